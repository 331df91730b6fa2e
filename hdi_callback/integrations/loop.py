"""`watch_heads`: the monitor in a training loop of one's own, with accelerate or without."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from torch.optim import Optimizer

from hdi_callback.arguments import whole_number
from hdi_callback.deprecation import renamed
from hdi_callback.errors import MisconfigurationError
from hdi_callback.integrations.loop_host import LoopHost, LoopSettings
from hdi_callback.integrations.optimizers import OptimizerSteps
from hdi_callback.integrations.shell import Shell
from hdi_callback.integrations.signature import function_of
from hdi_callback.monitoring.monitor import HeadDiversityMonitor
from hdi_callback.monitoring.session.session import Session
from hdi_callback.monitoring.session.state import sound_state


class HeadSession(Shell):
    """A session in a training loop; `watch_heads` makes it.

    It has `state_dict` and `load_state_dict`, so that ``accelerator.register_for_checkpointing(heads)`` works.
    """

    def __init__(self, settings: LoopSettings) -> None:
        super().__init__(settings)
        self._has_begun = self._is_closed = self._is_inside = self._has_seen_any = False
        self._host: LoopHost
        self._start(settings.model, LoopHost(settings, self._warn_once), settings, attaches=True)
        self._steps = OptimizerSteps(settings.optimizer, self._prepare, self._warn_once)

    @property
    def global_step(self) -> int:
        """Optimizer steps taken so far."""
        return self._host.step

    @property
    def latest(self) -> dict[str, float]:
        """The curves at the last reading whose numbers have arrived, on every rank: ``heads.latest["hdi/min"]``."""
        return self._host.latest

    @property
    def should_stop(self) -> bool:
        """Whether an intervention has asked for the end of the training."""
        return self._host.is_stopped

    @property
    def monitor(self) -> HeadDiversityMonitor:
        """The monitor that measures."""
        return self._started.monitor

    @property
    def _started(self) -> Session:
        assert self._session is not None, "it is started in the constructor"
        return self._session

    def __enter__(self) -> HeadSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()
        else:
            self.close()

    @contextmanager
    def step(self, *, epoch: int | None = None) -> Iterator[None]:
        """Enclose what makes an optimizer step: forward, backward and ``optimizer.step()``.

        Under gradient accumulation it may enclose each part or all of them. A step counts if an optimizer really made
        one in here: not while gradients are accumulated, and not if a gradient scaler has passed it over. Outside of it
        the model has no hooks, so that evaluation is neither read nor touched.

        Args:
            epoch: the epoch, kept with the readings.

        Yields:
            Nothing.

        Raises:
            MisconfigurationError: if `epoch` is no whole number.
        """
        if epoch is not None:
            whole_number("epoch", epoch, least=0, example=0)
        if self._is_closed or self._is_inside:
            why = "after the watch was closed" if self._is_closed else "within another"
            self._warn_once.warn("step", f"`with heads.step():` {why} does nothing. Write it once around each step.")
            yield
            return
        self._enter_step(epoch)
        try:
            yield
        except BaseException:
            self._leave_step(is_whole=False)
            raise
        self._leave_step(is_whole=True)

    def before_optimizer_step(self) -> None:
        """Read now, and let interventions act on the gradients; by itself this happens as an optimizer begins its step.

        Call it after the backward where ``optimizer.step`` is compiled, as nothing can be read within a graph, or
        before gradients are clipped if what `DiversityPenalty` adds is to be clipped as well. Gradients must have been
        unscaled, and under accumulation it is for the last part alone.
        """
        if not self._is_inside:
            self._warn_once.warn(
                "order",
                "`heads.before_optimizer_step()` does nothing outside of `with heads.step():`. Write it within.",
            )
            return
        self._steps.prepare()

    def finish(self) -> None:
        """Read the final weights, make everything known, and leave nothing behind; the end of the ``with`` does it."""
        if self._is_closed:
            return
        if self._has_begun:
            with self._warn_once.guard("the last reading"):
                self._started.finish()
            if not self._has_seen_any:
                self._warn_once.warn(
                    "no step",
                    "The optimizer made no step in `with heads.step():`, so that there is one reading at most. "
                    "Call optimizer.step() within it, on the optimizer that `watch_heads` got.",
                )
        self.close()

    def close(self) -> None:
        """Make known what was read, and leave nothing behind; calling it again does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._steps.close()
        super().close()
        self._host.dashboards.close()

    def state_dict(self) -> dict[str, Any]:
        """Give what a resumed run needs; between steps.

        Returns:
            Plain data.
        """
        if not self._has_begun and self._restored is not None:
            return dict(self._restored)
        return {**self._started.state_dict(), "step": self.global_step, "tensorboard": self._host.dashboards.folder}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take up where a checkpoint left off, also in the middle of a run that goes back to it; on every rank.

        Args:
            state_dict: what `state_dict` gave.

        Raises:
            MisconfigurationError: if a step is going on; if the watch is strict, also if it is not what `state_dict`
                gave, or of another model. Otherwise such a state costs a warning, and what is sound of it is taken.
        """
        if self._is_inside:
            raise MisconfigurationError("Load the state of the heads between steps, not within `with heads.step():`.")
        if not isinstance(state_dict, Mapping) or not {"step", "last_step"} & set(state_dict):
            has = sorted(map(str, state_dict)) if isinstance(state_dict, Mapping) else type(state_dict).__name__
            message = f"This is no state of `watch_heads`, it has {has}: load what `heads.state_dict()` gave."
            if self._settings.strict:
                raise MisconfigurationError(message)
            self._warn_once.warn(
                "no state", f"{message} Steps are counted from {self.global_step} on, alerts start anew."
            )
            return
        sound = sound_state(state_dict, warn_once=self._warn_once) or {}
        counted = [sound.get(name) for name in ("step", "last_step")]
        # Without a step count the last reading is the best guess of how far the run has come.
        step = next((count for count in counted if count is not None), self.global_step)
        state = self._started.accept(state_dict, step=step)
        if self._has_begun:
            self._started.flush()
        self._restored = state
        self._host.step, self._host.is_stopped = step, False
        self._has_begun = False

    def _enter_step(self, epoch: int | None) -> None:
        self._is_inside, self._host.epoch = True, epoch
        self._steps.begin()
        with self._warn_once.guard("watching a step"):
            if not self._has_begun:  # it is known now whether a checkpoint is resumed
                self._has_begun, self._opened = True, self._started
                self._started.open(self._restored)
                self._history = self._started.history
            self._started.monitor.resume()
            self._started.before_forward()

    def _leave_step(self, *, is_whole: bool) -> None:
        self._is_inside = False
        has_stepped = self._steps.end()
        with self._warn_once.guard("watching a step"):
            if self._steps.was_compiled and self._started.is_capturing:
                self._started.abandon()
                self._warn_once.warn(
                    "compiled step",
                    "The optimizer's step is compiled, and within a graph the heads cannot be read: call "
                    "`heads.before_optimizer_step()` before it.",
                )
            if has_stepped:
                self._host.step += 1
                self._has_seen_any = True
            if is_whole:
                self._started.after_step()
            else:
                self._started.abandon()
            self._started.monitor.suspend()

    def _prepare(self, optimizer: Optimizer) -> None:
        with self._warn_once.guard("watching a step"):
            # Where several optimizers take turns, others may have forwards of networks of their own to come.
            self._started.after_backward(is_last=len(self._host.optimizers) == 1)
            self._started.before_optimizer_step(optimizer)


@function_of(LoopSettings)
def watch_heads(settings: LoopSettings) -> HeadSession:
    """Watch the diversity of the attention heads of a model that a loop of your own trains.

    Reads, judges and intervenes as `HDICallback` does, around the steps that ``with heads.step():`` encloses. Call it
    before the first forward of a compiled model, and with accelerate or a data-parallel wrapper on what they have
    prepared. In a distributed run every rank calls it; the first one writes.

    Args:
        settings: the arguments of `LoopSettings`, by their names; ``model`` and ``optimizer`` come first.

    Returns:
        A context manager, which leaves no hook behind.

    Raises:
        MisconfigurationError: if an argument cannot work.

    Example:
        >>> import torch
        >>> model = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> with watch_heads(model, optimizer, every_n_steps=2, history=False, verbose=False) as heads:
        ...     for batch in torch.randn(3, 8, 10, 32):
        ...         with heads.step():
        ...             model(batch).square().mean().backward()
        ...             optimizer.step()
        ...             optimizer.zero_grad()
        >>> heads.global_step, "hdi/min" in heads.latest
        (3, True)
    """
    return HeadSession(settings)


__getattr__ = renamed(__name__, {"HeadWatch": "hdi_callback.integrations.loop:HeadSession"})
