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
from hdi_callback.guard import attempt_each, guarded
from hdi_callback.integrations.loop_host import LoopHost, LoopSettings
from hdi_callback.integrations.optimizers import OptimizerSteps
from hdi_callback.integrations.shell import MISUSE, Shell
from hdi_callback.integrations.signature import function_of
from hdi_callback.monitoring.monitor import HeadDiversityMonitor
from hdi_callback.monitoring.session.session import Session

_STEP = "watching a step"


class HeadSession(Shell):
    """A session in a training loop; `watch_heads` makes it.

    It has `state_dict` and `load_state_dict`, so that ``accelerator.register_for_checkpointing(heads)`` works.
    """

    def __init__(self, settings: LoopSettings) -> None:
        super().__init__(settings)
        self._is_closed = False
        self._host: LoopHost
        self._start(settings.model, LoopHost(settings, self._warn_once), settings, attaches=True)
        self._steps = OptimizerSteps(settings.optimizer, self._prepare, self._before_closure, self._warn_once)

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
        """Whether an intervention has requested the end of the training."""
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
        one inside: not while gradients are accumulated, and not if a gradient scaler has skipped it. Outside, the model
        has no hooks, so that evaluation is neither read nor changed.

        Args:
            epoch: the epoch, kept with the readings.

        Yields:
            Nothing.

        Raises:
            MisconfigurationError: if `epoch` is no whole number.
        """
        if epoch is not None:
            self._check_epoch(epoch)
        if self._is_closed or self._steps.is_inside:
            self._warn_of_useless_step()
            yield
            return
        try:
            self._enter_step(epoch)  # the user may interrupt this, and go on with the next step
            yield
        except BaseException:
            self._leave_step(is_whole=False)
            raise
        self._leave_step(is_whole=True)

    @guarded(_STEP)
    def before_optimizer_step(self) -> None:
        """Read now, and let interventions act on the gradients; otherwise done as an optimizer begins its step.

        Call it after the backward where ``optimizer.step`` is compiled, as nothing can be read within a graph, or
        before gradients are clipped, to clip the gradient of `DiversityPenalty` as well. Gradients must have been
        unscaled; under accumulation call it in the last part only.
        """
        self._steps.prepare()

    @guarded("the last reading", otherwise=lambda self: self.close())
    def finish(self) -> None:
        """Read the final weights, publish everything, and remove all hooks; leaving the ``with`` does it."""
        if self._is_closed:
            return
        final = [] if self._opened is None else [self._started.finish, self._steps.warn_if_none]
        attempt_each([*final, self.close])

    @guarded("closing the session", otherwise=lambda self: self._close())
    def close(self) -> None:
        """Publish pending readings, and remove all hooks; calling it again does nothing."""
        if not self._is_closed:
            self._close()

    def _close(self) -> None:
        self._is_closed = True
        attempt_each([self._steps.close, super().close, self._host.dashboards.close])

    @guarded("keeping the state of head diversity", otherwise=lambda self: {"step": self._host.step})
    def state_dict(self) -> dict[str, Any]:
        """State for a resumed run; call it between steps.

        Returns:
            Plain data.
        """
        if self._opened is None and self._restored is not None:
            return super().state_dict()
        return {**self._started.state_dict(), **self._host.state_dict()}

    @guarded("restoring the state of head diversity", passes=MISUSE)
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint, on every rank; also in the middle of a run that goes back to it.

        Args:
            state_dict: the result of `state_dict`.

        Raises:
            MisconfigurationError: if called within a step; with `strict` also for a state that `state_dict` did not
                return, or of another model. Otherwise such a state costs a warning, and its valid fields are restored.
        """
        if self._steps.is_inside:
            raise MisconfigurationError("Load the state of the heads between steps, not within `with heads.step():`.")
        step = self._host.step_in(state_dict)
        if step is None:
            return
        self._started.accept(state_dict, step=step)
        super().load_state_dict(state_dict)
        self._host.go_back_to(step)

    @guarded(_STEP, passes=(MisconfigurationError,))
    def _check_epoch(self, epoch: int) -> None:
        whole_number("epoch", epoch, least=0, example=0)

    @guarded(_STEP)
    def _warn_of_useless_step(self) -> None:
        why = "after the watch was closed" if self._is_closed else "within another"
        self._warn_once.warn("step", f"`with heads.step():` {why} does nothing. Write it once around each step.")

    @guarded(_STEP)
    def _enter_step(self, epoch: int | None) -> None:
        self._host.begin_step(epoch)
        self._steps.begin()
        if self._opened is None:  # not earlier: a checkpoint may be loaded until the first step
            self._open()
        self._started.monitor.resume()
        self._started.before_forward()

    @guarded(_STEP, otherwise=lambda self: attempt_each([self._steps.abandon, self._started.monitor.suspend]))
    def _leave_step(self, *, is_whole: bool) -> None:
        try:
            if self._steps.end():
                self._host.count_step()
            if not is_whole or self._steps.is_unprepared:
                self._started.abandon()
            if is_whole:
                self._started.after_step()
        finally:
            self._started.monitor.suspend()

    @guarded(_STEP)
    def _prepare(self, optimizer: Optimizer) -> None:
        self._read()
        self._started.before_optimizer_step(optimizer)

    @guarded(_STEP)
    def _before_closure(self) -> None:
        """Read forwards that ran before a closure: the optimizer may move the weights before it calls the closure."""
        if self._started.monitor.has_run:
            self._read()

    def _read(self) -> None:
        # If several optimizers take turns, further forwards of their own networks may follow.
        self._started.after_backward(is_last=len(self._host.optimizers) == 1)


@function_of(LoopSettings)
def watch_heads(settings: LoopSettings) -> HeadSession:
    """Watch the diversity of the attention heads of a model that a loop of your own trains.

    Reads, judges and intervenes as `HDICallback` does, around the steps that ``with heads.step():`` encloses. Call it
    before the first forward of a compiled model, and with accelerate or a data-parallel wrapper on what they have
    prepared. In a distributed run every rank calls it; the first one writes.

    Args:
        settings: the arguments of `LoopSettings`, by their names; ``model`` and ``optimizer`` come first.

    Returns:
        A context manager, which removes all hooks at its end.

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
