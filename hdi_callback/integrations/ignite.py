"""`HDIHandler`: the monitor on a pytorch-ignite trainer."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from ignite.engine import Engine, Events

from hdi_callback.errors import MisconfigurationError
from hdi_callback.guard import guarded
from hdi_callback.integrations.loop import HeadSession
from hdi_callback.integrations.loop_host import LoopSettings
from hdi_callback.integrations.shell import WATCHING
from hdi_callback.integrations.signature import documented_by, method_of


@documented_by(LoopSettings)
class HDIHandler:
    """Watch the diversity of the attention heads of a model that a pytorch-ignite `Engine` trains.

    Reads, judges and intervenes as `HDICallback` does, around every iteration of the trainer; evaluators are left
    alone. The intervention `StopTraining` terminates the trainer. ``Checkpoint({"heads": handler, ...}, ...)`` keeps
    what a resumed run needs.

    An engine re-raises an exception only if no handler is registered for it, so this one registers none: after a
    training that an exception ended, call `close`, or hooks may stay on the model until the next run.

    Args:
        settings: the arguments of `watch_heads`, by their names; ``model`` and ``optimizer`` come first.

    Raises:
        MisconfigurationError: if an argument cannot work.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.TransformerEncoderLayer(32, 4, batch_first=True)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> handler = HDIHandler(model, optimizer, every_n_steps=50, verbose=False)
        >>> trainer = Engine(lambda engine, batch: None)
        >>> handler.attach(trainer)  # before trainer.run(...)
    """

    @method_of(LoopSettings)
    def __init__(self, settings: LoopSettings) -> None:
        self._settings = settings
        self.heads = HeadSession(settings)
        self._step: AbstractContextManager[None] | None = None
        self._has_ended = False

    def attach(self, engine: Engine) -> None:
        """Watch the iterations of a trainer.

        Args:
            engine: the trainer, whose process function makes a forward, a backward and the optimizer's step.

        Raises:
            MisconfigurationError: if it is no `Engine`, or is watched already.
        """
        if not isinstance(engine, Engine):
            raise MisconfigurationError(f"`engine` must be an ignite Engine, got {type(engine).__name__}.")
        if engine.has_event_handler(self._begin_step):
            raise MisconfigurationError("This handler is attached to the engine already: attach it once.")
        engine.add_event_handler(Events.STARTED, self._begin)
        engine.add_event_handler(Events.ITERATION_STARTED, self._begin_step)
        engine.add_event_handler(Events.ITERATION_COMPLETED, self._end_step)
        engine.add_event_handler(Events.COMPLETED, self._end)

    @guarded(WATCHING)
    def close(self) -> None:
        """Publish pending readings, and remove all hooks; calling it again does nothing."""
        self._leave(RuntimeError("the step did not finish"))
        self.heads.close()
        self._has_ended = True

    def state_dict(self) -> dict[str, Any]:
        """State for a resumed run."""
        return self.heads.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint, before ``engine.run``."""
        self.heads.load_state_dict(state_dict)

    @guarded(WATCHING)
    def _begin(self, engine: Engine) -> None:
        self._leave(RuntimeError("the step did not finish"))
        if self._has_ended:  # the trainer is run for further epochs
            state, self.heads, self._has_ended = self.heads.state_dict(), HeadSession(self._settings), False
            self.heads.load_state_dict(state)

    @guarded(WATCHING)
    def _begin_step(self, engine: Engine) -> None:
        self._step = self.heads.step(epoch=engine.state.epoch - 1)  # ignite counts from 1
        self._step.__enter__()

    @guarded(WATCHING)
    def _end_step(self, engine: Engine) -> None:
        self._leave()
        if self.heads.should_stop:
            engine.terminate()

    @guarded(WATCHING)
    def _end(self, engine: Engine) -> None:
        self.heads.finish()
        self._has_ended = True

    def _failed(self, work: str, error: Exception) -> None:
        self.heads._failed(work, error)

    def _leave(self, error: Exception | None = None) -> None:
        step, self._step = self._step, None
        if step is not None:
            step.__exit__(None if error is None else type(error), error, None)
