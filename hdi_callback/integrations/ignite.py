"""`HDIHandler`: the monitor on a pytorch-ignite trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

from ignite.engine import Engine, Events
from torch import nn

from hdi_callback.errors import MisconfigurationError
from hdi_callback.integrations.loop import Folder, watch_heads
from hdi_callback.interventions import Intervention
from hdi_callback.session.settings import ChosenAlerts, History, Padding, Thresholds


class HDIHandler:
    """Watch the diversity of the attention heads of a model that a pytorch-ignite `Engine` trains.

    Reads, judges and intervenes as `HDICallback` does, around every iteration of the trainer; evaluators are left
    alone. The intervention `StopTraining` terminates the trainer. ``Checkpoint({"heads": handler, ...}, ...)`` keeps
    what a resumed run needs.

    An engine re-raises an exception only if no handler is registered for it, so this one registers none: after a
    training that an exception ended, call `close`, or hooks may stay on the model.

    Args:
        model: any module that contains attention layers.
        optimizer: the optimizer, or a list of optimizers that make a step together.
        every_n_steps: optimizer steps between readings.
        metrics: names of further metrics to draw for each layer.
        include: patterns of layer names to watch (``"encoder.*"``); all by default.
        exclude: patterns of layer names to leave out.
        max_tokens: largest number of tokens kept per layer for one reading of the head outputs.
        padding: which tokens are padding: ``"auto"``, the id of the padding token, a function, or `None`; see
            `Settings`.
        history: write the history, to ``hdi/history.jsonl`` in `log_dir`, or to a path.
        alerts: ``"default"``, a list of rules, or `None` for no alerts.
        thresholds: limits of the rules by pattern of layer names.
        pretrained: whether the weights were trained before this run; ``"auto"`` tells it from the weights.
        interventions: what to do about alerts; nothing by default.
        strict: raise an error if no attention is read in the first forward; otherwise warn.
        log_dir: the folder of the run.
        tensorboard: a `SummaryWriter` of yours, or True for one in ``hdi`` under `log_dir`.
        wandb: a `wandb` run.
        save_checkpoint: how to save a checkpoint, for the intervention `SaveCheckpoint`: a function of a name.

    Attributes:
        heads: the session in the loop, see `watch_heads`.

    Raises:
        MisconfigurationError: if an argument cannot work.

    Example:
        >>> import torch
        >>> model = nn.TransformerEncoderLayer(32, 4, batch_first=True)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> handler = HDIHandler(model, optimizer, every_n_steps=50)
        >>> trainer = Engine(lambda engine, batch: None)
        >>> handler.attach(trainer)  # before trainer.run(...)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any = None,
        every_n_steps: int = 50,
        metrics: Sequence[str] | None = None,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        max_tokens: int = 2048,
        padding: Padding = "auto",
        history: History = True,
        alerts: ChosenAlerts = "default",
        thresholds: Thresholds = None,
        pretrained: bool | Literal["auto"] = "auto",
        interventions: Sequence[Intervention] | None = None,
        strict: bool = True,
        *,
        log_dir: Folder = "runs/heads",
        tensorboard: Any = None,
        wandb: Any = None,
        save_checkpoint: Callable[[str], Any] | None = None,
    ) -> None:
        self.heads = watch_heads(
            model,
            optimizer,
            every_n_steps=every_n_steps,
            metrics=metrics,
            include=include,
            exclude=exclude,
            max_tokens=max_tokens,
            padding=padding,
            history=history,
            alerts=alerts,
            thresholds=thresholds,
            pretrained=pretrained,
            interventions=interventions,
            strict=strict,
            log_dir=log_dir,
            tensorboard=tensorboard,
            wandb=wandb,
            save_checkpoint=save_checkpoint,
        )
        self._step: AbstractContextManager[None] | None = None

    def attach(self, engine: Any) -> None:
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
        engine.add_event_handler(Events.ITERATION_STARTED, self._begin_step)
        engine.add_event_handler(Events.ITERATION_COMPLETED, self._end_step)
        engine.add_event_handler(Events.COMPLETED, self._end)

    def close(self) -> None:
        """Publish what was measured and remove all hooks; calling it again does nothing."""
        self.heads.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a resumed run, as plain data."""
        return self.heads.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take the state of a checkpoint, before ``engine.run``."""
        self.heads.load_state_dict(state_dict)

    def _begin_step(self, engine: Engine) -> None:
        self._step = self.heads.step(epoch=engine.state.epoch - 1)  # ignite counts from 1
        self._step.__enter__()

    def _end_step(self, engine: Engine) -> None:
        step, self._step = self._step, None
        output: Any = engine.state.output
        if isinstance(output, float):  # the loss, as most process functions return it
            self.heads.loss = output
        if step is not None:
            step.__exit__(None, None, None)
        if self.heads.should_stop:
            engine.terminate()

    def _end(self, engine: Engine) -> None:
        self.heads.finish()
