"""`watch_heads`: the monitor in a training loop of one's own, with accelerate or without."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import ne
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import Unpack

from hdi_callback.arguments import file_path, function, shown, torch_module
from hdi_callback.errors import MisconfigurationError
from hdi_callback.guard import guarded
from hdi_callback.integrations.base import MISUSE, Log, Watcher
from hdi_callback.interventions import SaveCheckpoint
from hdi_callback.record import Record
from hdi_callback.session import Session, Settings, Trainer
from hdi_callback.session.settings import Options, takes_settings

_PATIENCE = 50  # parts without an optimizer's step after which that is said, if steps had fewer than a tenth of them
_SAVE = "save_checkpoint=lambda name: torch.save(..., name + '.pt')"

_NO_STEP = (
    "No optimizer that was passed to `watch_heads` has made a step in the last {} of `with heads.step():`, since step "
    "{}, so that nothing is read. Call optimizer.step() within it, on that optimizer, or heads.before_optimizer_step() "
    "where its step is compiled. A gradient scaler skips steps of infinite gradients: look at its scale."
)


@takes_settings
def watch_heads(
    model: nn.Module,
    optimizer: Any = None,
    every_n_steps: int = 50,
    *,
    log_dir: str | os.PathLike[str] = "runs/heads",
    tensorboard: Any = None,
    wandb: Any = None,
    log: Log | None = None,
    save_checkpoint: Callable[[str], Any] | None = None,
    **settings: Unpack[Options],
) -> HeadSession:
    """Watch the diversity of the attention heads of a model that a loop of your own trains.

    Reads, judges and intervenes as `HDICallback` does, around the steps that ``with heads.step():`` encloses. Call it
    before the first forward of a compiled model, and with accelerate or a data-parallel wrapper on what they have
    prepared. In a distributed run every rank calls it; the first one writes.

    Args:
        model: any module that contains attention layers.
        optimizer: the optimizer, or a list of optimizers that make a step together; their steps are counted. Without
            one, or where its step is compiled, call `HeadSession.before_optimizer_step` in each step.
        every_n_steps: optimizer steps between readings.
        log_dir: the folder of the run.
        tensorboard: a `torch.utils.tensorboard.SummaryWriter` of yours, or True for one in ``hdi`` under `log_dir`.
        wandb: a `wandb` run; the curves come with what you log yourself.
        log: a function that takes each reading's curves, a dictionary, and its step: ``accelerator.log``,
            ``fabric.log_dict``, ``mlflow.log_metrics``.
        save_checkpoint: how to save a checkpoint, for the intervention `SaveCheckpoint`: a function of a name, called
            on every rank; what it returns, or else the name, is kept as the place.
        settings: see `Settings`.

    Returns:
        A context manager, which removes all hooks at its end.

    Raises:
        MisconfigurationError: if an argument cannot work.

    Example:
        >>> model = nn.TransformerEncoderLayer(32, 4, batch_first=True)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> with watch_heads(model, optimizer, every_n_steps=2, history=False) as heads:  # doctest: +ELLIPSIS
        ...     for batch in torch.randn(3, 8, 10, 32):
        ...         with heads.step():
        ...             model(batch).square().mean().backward()
        ...             optimizer.step()
        ...             optimizer.zero_grad()
        hdi_callback watches 1 attention layer...
        >>> heads.global_step, "hdi/min" in heads.latest
        (3, True)
    """
    chosen = Settings(every_n_steps=every_n_steps, **settings)
    torch_module("model", model)
    function("log", log, "log=accelerator.log")
    function("save_checkpoint", save_checkpoint, _SAVE)
    folder = file_path("log_dir", log_dir, "runs/a").absolute()
    if tensorboard is not None and not isinstance(tensorboard, bool) and not hasattr(tensorboard, "add_scalar"):
        raise MisconfigurationError(f"`tensorboard` must be a SummaryWriter or True, got {shown(tensorboard)}.")
    if wandb is not None and (not hasattr(wandb, "log") or isinstance(wandb, type(os))):
        raise MisconfigurationError(f"`wandb` must be a run, got {shown(wandb)}: write wandb=wandb.init(...).")
    if save_checkpoint is None and any(isinstance(item, SaveCheckpoint) for item in chosen.interventions or ()):
        raise MisconfigurationError(f"SaveCheckpoint needs a function that saves: write {_SAVE}.")
    targets = [target for target in (log, tensorboard, wandb) if target is not None and target is not False]
    return HeadSession(model, chosen, _Loop(_torch_optimizers(optimizer), folder, targets, save_checkpoint))


class HeadSession(Watcher):
    """A session in a training loop; `watch_heads` makes it.

    It has `state_dict` and `load_state_dict`, so that ``accelerator.register_for_checkpointing(heads)`` works.
    Set ``heads.loss = loss`` within a step to keep the training loss with the reading.
    """

    def __init__(self, model: nn.Module, settings: Settings, loop: _Loop) -> None:
        super().__init__(settings)
        self.loss: Any = None
        self._loop = loop
        self._has_stepped = False
        self._parts = self._idle = 0  # most of them to a step so far, and those since the last one
        self._versions: list[int] | None = None  # of the weights, when a step was announced
        self._ended: list[int] = []  # and as the last part ended, where steps had fewer parts than came without one
        self._handles: list[Any] = []
        self._start(model, loop)
        for optimizer in loop.optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._on_optimizer_step))
            self._handles.append(optimizer.register_step_post_hook(self._on_optimizer_stepped))

    @property
    def global_step(self) -> int:
        """Optimizer steps taken so far."""
        return self._loop.step

    @property
    def should_stop(self) -> bool:
        """Whether an intervention has requested the end of the training."""
        return self._loop.is_stopped

    def __enter__(self) -> HeadSession:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self.finish()
        else:
            self.close()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Enclose what makes an optimizer step: forward, backward and ``optimizer.step()``.

        Under gradient accumulation it encloses each part. A step counts if an optimizer really made one inside: not
        while gradients are accumulated, and not if a gradient scaler has skipped it. Outside, evaluation is neither
        read nor counted.

        Yields:
            Nothing.
        """
        self.loss, self._versions, self._has_stepped = None, None, False
        self._tell(Session.before_forward)
        try:
            yield
        except BaseException:
            self._tell(Session.abandon)
            raise
        self._leave_step()

    @guarded("watching a step", passes=MISUSE)
    def before_optimizer_step(self) -> None:
        """Read now; otherwise done as an optimizer begins its step.

        Call it after the backward where there is no optimizer that torch knows, or its step is compiled, as nothing can
        be read within a graph; under accumulation in the last part only.
        """
        self._versions = self._loop.versions
        self._tell(Session.after_backward)

    @guarded("the last reading")
    def finish(self) -> None:
        """Read the final weights, publish everything, and remove all hooks; leaving the ``with`` does it."""
        if self._session is not None and self._loop.step > 0:
            self._session.finish()
        elif self._session is not None and self._session.last_step is not None:
            self._guard.warn_once("no step", _NO_STEP.format(self._idle, 0))
        self.close()

    def close(self) -> None:
        """Publish what was measured and remove all hooks; calling it again does nothing."""
        super().close()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a resumed run, as plain data; call it between steps."""
        return {**super().state_dict(), "step": self._loop.step}

    def load_state_dict(self, state_dict: Any) -> None:
        """Take the state of a checkpoint, on every rank, before the first step.

        Raises:
            MisconfigurationError: if steps have been made already.
        """
        if self._loop.step > 0:
            raise MisconfigurationError("Load a state before the first step: call watch_heads(...) anew to go back.")
        step = state_dict.get("step") if isinstance(state_dict, dict) else None
        self._loop.step = step if type(step) is int and step >= 0 else 0
        super().load_state_dict(state_dict)
        self._resume()

    @guarded("watching a step", passes=MISUSE)
    def _leave_step(self) -> None:
        # A compiled step calls no hook: it was announced, and has written into the weights.
        is_announced = self._versions is not None and (
            not self._loop.optimizers or self._versions != self._loop.versions
        )
        written = sum(map(ne, self._ended, self._loop.versions)) if self._ended else 0
        self._idle += 1
        if self._has_stepped or is_announced:
            self._loop.step += 1
            self._parts, self._idle = max(self._parts, self._idle), 0
        elif 2 * written > len(self._ended) or (self._loop.step > 0 and self._idle >= max(_PATIENCE, 10 * self._parts)):
            self._guard.warn_once("no step", _NO_STEP.format(self._idle, self._loop.step))
        self._ended = self._loop.versions if self._idle > self._parts + 1 else []
        self._tell(lambda session: session.after_step(self.loss))

    # Called by the optimizers; a compiled step traces them.

    @guarded("watching a step", passes=MISUSE)
    def _on_optimizer_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            closure = args[1] if len(args) > 1 else kwargs.get("closure")  # behind the optimizer itself
            self._tell(Session.after_backward if closure is None else Session.before_closure)

    @guarded("watching a step")
    def _on_optimizer_stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            self._has_stepped = True


@dataclass
class _Loop(Trainer):
    """A loop as the `Trainer` of a session, which counts the steps itself."""

    optimizers: Sequence[Optimizer] = ()
    folder: Path = Path()
    sinks: Sequence[Any] = ()  # see `sink_for`; True for a writer of TensorBoard
    save_checkpoint: Callable[[str], Any] | None = None
    step: int = 0
    is_stopped: bool = False

    @property
    def versions(self) -> list[int]:
        """How often each of the weights that the optimizers train was written into."""
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        return [weight._version for group in groups for weight in group["params"]]

    def stop(self) -> None:
        self.is_stopped = True

    def save(self, name: str) -> str:
        place = None if self.save_checkpoint is None else self.save_checkpoint(name)
        return name if place is None else str(place)

    def targets(self, past: Sequence[Record]) -> list[Any]:
        if not self.is_first_rank:
            return []
        if True not in self.sinks:
            return list(self.sinks)
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(self.folder / "hdi"), purge_step=past[-1].step + 1 if past else None)
        return [writer if sink is True else sink for sink in self.sinks]


def _torch_optimizers(wrapped: Any) -> list[Optimizer]:
    """Return the torch optimizers inside wrappers such as that of accelerate, which call no hooks of their own."""
    if wrapped is None:
        return []
    optimizers: list[Optimizer] = []
    for optimizer in wrapped if isinstance(wrapped, list | tuple) else [wrapped]:
        inner = optimizer
        while isinstance(getattr(inner, "optimizer", None), Optimizer):
            inner = inner.optimizer
        # torch installs what calls the hooks in `Optimizer.__init__`.
        if not isinstance(inner, Optimizer) or not hasattr(type(inner).step, "hooked"):
            raise MisconfigurationError(
                f"`optimizer` must be a torch optimizer, or a list of them, got {shown(optimizer)}: write "
                "torch.optim.AdamW(model.parameters()) or the like. For an optimizer that torch does not know write "
                "optimizer=None, and call heads.before_optimizer_step() in each step."
            )
        if inner not in optimizers:
            optimizers.append(inner)
    return optimizers
