"""`watch_heads`: the watch in a training loop of one's own, with accelerate or without."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from hdi_callback.arguments import function, path, shown, whole_number
from hdi_callback.attention import AttentionLayer
from hdi_callback.attention.padding import PaddingChoice
from hdi_callback.dashboards import console, tensorboard, wandb
from hdi_callback.dashboards.tensorboard import place_board
from hdi_callback.errors import MisconfigurationError
from hdi_callback.integrations.optimizers import inner_optimizer
from hdi_callback.monitoring.alerts import Alert, Alerts, Rule
from hdi_callback.monitoring.faults import Faults
from hdi_callback.monitoring.history import History
from hdi_callback.monitoring.interventions import Intervention, SaveCheckpoint
from hdi_callback.monitoring.monitor import HeadDiversityMonitor
from hdi_callback.monitoring.place import place_history
from hdi_callback.monitoring.ranks import is_first_rank, refuse_apart, share_within
from hdi_callback.monitoring.schedule import Schedule
from hdi_callback.monitoring.settings import Method, Settings
from hdi_callback.monitoring.state import sound_state
from hdi_callback.monitoring.watch import (
    Follower,
    OnAlert,
    Outcome,
    Watch,
    check_patterns,
    state_of_this_model,
)

_Path = str | os.PathLike[str]


def watch_heads(
    model: nn.Module,
    optimizer: Any,
    *,
    every_n_steps: int = 50,
    log_dir: _Path = "runs/heads",
    tensorboard: Any = None,
    wandb: Any = None,
    metrics: Sequence[str] | None = None,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    max_tokens: int = 2048,
    padding: PaddingChoice = "auto",
    rank_tol: float = 1e-6,
    method: Method = "whiten",
    history: bool | _Path = True,
    alerts: Literal["default"] | Sequence[Rule] | None = "default",
    thresholds: dict[str, dict[str, float | None]] | None = None,
    on_alert: Callable[[Alert], Any] | None = None,
    interventions: Sequence[Intervention] | None = None,
    save_checkpoint: Callable[[str], Any] | None = None,
    strict: bool = False,
    check_heads: bool = True,
    process_group: Any = "auto",
    verbose: bool = True,
) -> HeadWatch:
    """Watch the diversity of the attention heads of a model that a loop of your own trains.

    Reads, judges and intervenes as `HDICallback` does, around the steps that ``with heads.step():`` encloses. Call it
    before the first forward of a compiled model, and with accelerate or a data-parallel wrapper on what they have
    prepared. In a distributed run every rank calls it; the first one writes.

    Args:
        model: any module that contains attention layers.
        optimizer: the optimizer, or a list of those that together make a step.
        every_n_steps: optimizer steps between readings.
        log_dir: folder of the run; the history is ``hdi/history.jsonl`` in it.
        tensorboard: a `torch.utils.tensorboard.SummaryWriter` of yours, or True for one in ``hdi`` under `log_dir`.
        wandb: a `wandb` run. The curves have the axis ``hdi_step`` and come with what you log yourself.
        metrics: names of the curves to log, see `HDICallback`.
        include: patterns of layer names to watch; all by default.
        exclude: patterns of layer names to leave out.
        max_tokens: largest number of tokens kept per layer for one reading of the head outputs.
        padding: which tokens are padding, whose head outputs are left out: ``"auto"`` for what masks tell, the number
            of the token that is padding, a function of the model's arguments, or `None` to count every token, see
            `HDICallback`.
        rank_tol: singular values below ``rank_tol`` times a head's largest do not count.
        method: how overlaps are computed, see `head_diversity`.
        history: write the history file, to its usual place or to the path given.
        alerts: ``"default"``, rules of your own, or `None` for no alerts.
        thresholds: limits of the default rules by pattern of layer names.
        on_alert: a function that is called with each `Alert`, on the first rank.
        interventions: what to do about alerts; nothing by default.
        save_checkpoint: how to save a checkpoint, for the intervention `SaveCheckpoint`: a function of a name, called
            on every rank; what it returns, or else the name, is kept as the place.
        strict: make errors of two warnings: that the model has no readable attention layer, and that a state that is
            loaded is of a model with other heads.
        check_heads: check once, on a few tokens of the first forward that is read, that every layer computes attention
            with the heads that were found; a layer that does not is left out, with a warning that shows why.
        process_group: the ranks that measure together: ``"auto"`` for all of them, a process group, or `None` for each
            rank alone, see `HDICallback`.
        verbose: print once at start which layers were found.

    Returns:
        A context manager, which leaves no hook behind.

    Raises:
        MisconfigurationError: if an argument cannot work.

    Example:
        >>> model = nn.TransformerEncoderLayer(32, 4, batch_first=True)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> with watch_heads(model, optimizer, every_n_steps=2, history=False, verbose=False) as heads:
        ...     for batch in torch.randn(3, 8, 10, 32):
        ...         with heads.step():
        ...             model(batch).square().mean().backward()
        ...             optimizer.step()
        ...             optimizer.zero_grad()
        >>> heads.global_step, sorted(heads.latest)[:2]
        (3, ['hdi/mean', 'hdi/min'])
    """
    settings = Settings(
        every_n_steps=every_n_steps,
        metrics=metrics,
        include=include,
        exclude=exclude,
        max_tokens=max_tokens,
        padding=padding,
        rank_tol=rank_tol,
        method=method,
        history=history,
        alerts=alerts,
        thresholds=thresholds,
        on_alert=on_alert,
        interventions=interventions,
        strict=strict,
        check_heads=check_heads,
        process_group=process_group,
        verbose=verbose,
    )
    if not isinstance(model, nn.Module):
        raise MisconfigurationError(f"`model` must be a torch.nn.Module, got {shown(model)}.")
    function("save_checkpoint", save_checkpoint, "the name of a checkpoint")
    chosen = tuple(settings.interventions or ())
    if save_checkpoint is None and any(isinstance(item, SaveCheckpoint) and not item.dry_run for item in chosen):
        raise MisconfigurationError(
            "SaveCheckpoint has to be told how: write save_checkpoint=lambda name: torch.save(..., name + '.pt')."
        )
    optimizers = _inner_optimizers(optimizer)
    folder = Path(path("log_dir", log_dir, "runs/heads"))
    logs = _Logs(folder, settings.history, tensorboard, wandb, on_alert, settings.metrics or ())
    faults = Faults()
    refuse_apart(settings.process_group, [item.name for item in chosen if not item.dry_run])
    monitor = HeadDiversityMonitor(model, **settings.measuring)
    training = _LoopTraining(monitor, optimizers, save_checkpoint)
    try:
        found = [layer.name for layer in monitor.layers] + [refusal.name for refusal in monitor.refused]
        for what, patterns in settings.layer_patterns.items():
            check_patterns(what, patterns, found)
        watch = Watch(
            monitor,
            Schedule(settings.every_n_steps),
            alerts=None if settings.rules is None else Alerts(settings.rules, monitor.facts, faults),
            interventions=chosen,
            training=training,
            share=share_within(settings.process_group),
            faults=faults,
        )
    except Exception:
        monitor.close()
        for intervention in chosen:
            intervention.detach()
        raise
    if settings.verbose and is_first_rank():
        with faults.contained("printing the layers"):
            console.print_layers(
                monitor.layers, monitor.refused, every_n_steps=settings.every_n_steps, interventions=chosen
            )
    return HeadWatch(watch, training, logs, is_strict=settings.strict)


class HeadWatch:
    """A watch in a training loop; `watch_heads` makes it.

    It has `state_dict` and `load_state_dict`, so that ``accelerator.register_for_checkpointing(heads)`` works.

    Attributes:
        global_step: optimizer steps taken so far.
        latest: the curves at the last reading whose numbers have arrived, on every rank: ``heads.latest["hdi/min"]``.
    """

    def __init__(self, watch: Watch, training: _LoopTraining, logs: _Logs, *, is_strict: bool = False) -> None:
        self.global_step = 0
        self._is_strict = is_strict
        self.latest: dict[str, float] = {}
        self._watch, self._training, self._logs, self._faults = watch, training, logs, watch.faults
        self._restored: dict[str, Any] | None = None
        self._has_begun = self._is_closed = self._is_inside = False
        self._epoch: int | None = None
        self._read: set[int] = set()  # optimizers whose gradients interventions have had in this step
        self._steps: Counter[int] = Counter()  # of each optimizer in this step
        self._was_compiled = self._has_seen_any = False
        self._handles: list[Any] = []
        for optimizer in training.optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._on_step_begin))
            self._handles.append(optimizer.register_step_post_hook(self._on_step_end))

    @property
    def should_stop(self) -> bool:
        """Whether an intervention has asked for the end of the training."""
        return self._training.is_stopped

    @property
    def history_path(self) -> Path | None:
        """Where the history of the run is; `None` before the first step and when there is none."""
        return None if self._watch.history is None else self._watch.history.path

    @property
    def active_alerts(self) -> list[Alert]:
        """The alerts that stand now."""
        return [] if self._watch.alerts is None else self._watch.alerts.active

    @property
    def monitor(self) -> HeadDiversityMonitor:
        """The monitor that measures."""
        return self._watch.monitor

    def __enter__(self) -> HeadWatch:
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
            self._faults.say("step", f"`with heads.step():` {why} does nothing. Write it once around each step.")
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
            self._faults.say(
                "order",
                "`heads.before_optimizer_step()` does nothing outside of `with heads.step():`. Write it within.",
            )
            return
        for optimizer in self._training.optimizers:
            self._prepare(optimizer)

    def finish(self) -> None:
        """Read the final weights, make everything known, and leave nothing behind; the end of the ``with`` does it."""
        if self._is_closed:
            return
        if self._has_begun:
            with self._faults.contained("the last reading"):
                self._watch.finish(self.global_step, epoch=self._epoch)
            if not self._has_seen_any:
                self._faults.say(
                    "no step",
                    "No step of the optimizer was seen in `with heads.step():`, so that there is one reading at most. "
                    "Call optimizer.step() within it, on the optimizer that was given to `watch_heads`.",
                )
        self.close()

    def close(self) -> None:
        """Make known what was read, and leave nothing behind; calling it again does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        for handle in self._handles:
            handle.remove()
        if self._has_begun:
            with self._faults.contained("closing the watch"):
                self._watch.flush(is_broken=True)
        self._watch.close()
        with self._faults.contained("closing TensorBoard"):
            self._logs.close()

    def state_dict(self) -> dict[str, Any]:
        """Give what a resumed run needs; between steps.

        Returns:
            Plain data.
        """
        if not self._has_begun and self._restored is not None:
            return self._restored
        return {**self._watch.state_dict(), "step": self.global_step, "tensorboard": self._logs.board_path}

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
            if self._is_strict:
                raise MisconfigurationError(message)
            self._faults.say("no state", f"{message} Steps are counted from {self.global_step} on, alerts start anew.")
            return
        sound = sound_state(state_dict, faults=self._faults) or {}
        counted = [sound.get(name) for name in ("step", "last_step")]
        # Without a step count the last reading is the best guess of how far the run has come.
        step = next((count for count in counted if count is not None), self.global_step)
        layers = self._watch.monitor.layers
        state = state_of_this_model(state_dict, layers, step=step, is_strict=self._is_strict, faults=self._faults)
        if self._has_begun:
            self._watch.flush()
        self._restored = state
        self.global_step = step
        self._training.is_stopped = False
        self._has_begun = False

    def _enter_step(self, epoch: int | None) -> None:
        self._is_inside, self._was_compiled, self._epoch = True, False, epoch
        self._read.clear()
        self._steps.clear()
        with self._faults.contained("watching a step"):
            if not self._has_begun:
                self._begin()
            self._watch.monitor.resume()
            self._watch.before_forward(self.global_step)

    def _leave_step(self, *, is_whole: bool) -> None:
        self._is_inside = False
        has_stepped = bool(self._steps) or self._was_compiled
        with self._faults.contained("watching a step"):
            if self._was_compiled and self._watch.is_reading_owed:
                self._watch.abandon()
                self._faults.say(
                    "compiled step",
                    "The optimizer's step is compiled, and within a graph the heads cannot be read: call "
                    "`heads.before_optimizer_step()` before it.",
                )
            if max(self._steps.values(), default=0) > 1:
                self._faults.say(
                    "several steps",
                    "An optimizer made several steps within one `with heads.step():`, which counts as one. Write it "
                    "within the loop, around each step.",
                )
            if has_stepped:
                self.global_step += 1
                self._has_seen_any = True
            if is_whole:
                self._watch.after_step(self.global_step, epoch=self._epoch)
            else:
                self._watch.abandon()
            self._watch.monitor.suspend()

    def _begin(self) -> None:
        """Open what is written to, once it is known whether a checkpoint is resumed."""
        self._has_begun = True
        self._watch.history, followers = self._logs.open(self._watch, self._restored)
        self._watch.followers = (_Latest(self, self._logs.metrics), *followers)
        self._watch.begin(self.global_step, self._restored)

    def _prepare(self, optimizer: Optimizer) -> None:
        if id(optimizer) in self._read:
            return
        self._read.add(id(optimizer))
        with self._faults.contained("watching a step"):
            # Where several optimizers take turns, others may have forwards of networks of their own to come.
            is_last = len(self._training.optimizers) == 1
            self._watch.after_backward(self.global_step, epoch=self._epoch, is_last=is_last)
            self._watch.before_optimizer_step(optimizer)

    # Called by the optimizers. Where their step is compiled this is traced: it must break no graph, and depend on
    # nothing that changes from step to step.
    def _on_step_begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            self._was_compiled = True
            return
        if self._is_inside:
            self._prepare(optimizer)
        else:
            self._faults.say(
                "outside",
                "The optimizer made a step outside of `with heads.step():`, so that it is not watched. Write it around "
                "forward, backward and optimizer.step().",
            )

    def _on_step_end(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling() and self._is_inside:
            self._steps[id(optimizer)] += 1


class _Logs:
    """Where the readings of a loop go."""

    def __init__(
        self,
        folder: Path,
        history: bool | _Path,
        board: Any,
        run: Any,
        on_alert: Callable[[Alert], Any] | None,
        metrics: Sequence[str],
    ) -> None:
        self.metrics = list(metrics)
        self._folder, self._history, self._board, self._run, self._on_alert = folder, history, board, run, on_alert
        if board is not None and not isinstance(board, bool) and not hasattr(board, "add_scalar"):
            raise MisconfigurationError(f"`tensorboard` must be a SummaryWriter or True, got {shown(board)}.")
        if run is not None and (not hasattr(run, "log") or isinstance(run, type(os))):
            raise MisconfigurationError(f"`wandb` must be a run, got {shown(run)}: write wandb=wandb.init(...).")
        self._own_writer: Any = None
        self.board_path: str | None = None

    def open(self, watch: Watch, restored: Mapping[str, Any] | None) -> tuple[History | None, list[Follower]]:
        """Open the history and the dashboards, on the first rank."""
        if not is_first_rank():
            return None, []
        history = place_history(self._history, self._folder, state=restored, say=watch.faults.say)
        followers: list[Follower] = []
        if self._board is not None and self._board is not False:
            with watch.faults.contained("opening TensorBoard"):
                followers.append(tensorboard.Board(self._writer(restored), self.metrics))
        if self._run is not None:
            with watch.faults.contained("joining the W&B run"):
                layers = [layer.name for layer in watch.monitor.layers]
                followers.append(wandb.RunLog(self._run, self.metrics, layers, "hdi_step", is_guest=True))
        elsewhere = "the dashboards" if history is None else history
        followers.append(console.AlertLines(print, elsewhere))
        if self._on_alert is not None:
            followers.append(OnAlert(self._on_alert))
        return history, followers

    def close(self) -> None:
        """Close the writer, unless it is the user's."""
        if self._own_writer is not None:
            self._own_writer.close()

    def _writer(self, restored: Mapping[str, Any] | None) -> Any:
        if self._board is not True:
            return self._board
        from torch.utils.tensorboard import SummaryWriter

        self.close()
        folder = place_board(self._folder / "hdi", restored)
        self.board_path = str(folder)
        # What an interrupted run has written beyond its checkpoint is to be hidden.
        last = None if restored is None else restored.get("last_step")
        self._own_writer = SummaryWriter(folder, purge_step=None if last is None else last + 1)
        return self._own_writer


class _Latest:
    """Keeps the curves of the last reading."""

    name = "keeping the latest reading"

    def __init__(self, heads: HeadWatch, metrics: Sequence[str]) -> None:
        self._heads, self._metrics = heads, list(metrics)

    def follow(self, outcome: Outcome) -> None:
        self._heads.latest = outcome.record.scalars(self._metrics)


class _LoopTraining:
    """What interventions may do to a loop."""

    def __init__(
        self, monitor: HeadDiversityMonitor, optimizers: Sequence[Optimizer], save: Callable[[str], Any] | None
    ) -> None:
        self._monitor = monitor
        self.optimizers = list(optimizers)
        self.is_stopped = False
        self._save = save

    @property
    def layers(self) -> Mapping[str, AttentionLayer]:
        return {layer.name: layer for layer in self._monitor.layers}

    def loss_scale(self, optimizer: Optimizer) -> float:
        # Fused optimizers take the scale of a gradient scaler off themselves; for all others the scaler has done it.
        return float(getattr(optimizer, "grad_scale", None) or 1)

    def stop(self) -> None:
        self.is_stopped = True

    def save_checkpoint(self, name: str) -> str:
        if self._save is None:
            raise MisconfigurationError("No checkpoint can be saved without watch_heads(..., save_checkpoint=...).")
        place = self._save(name)
        return name if place is None else str(place)


def _inner_optimizers(optimizer: Any) -> list[Optimizer]:
    several = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    if not len(several):
        raise MisconfigurationError("`optimizer` is an empty list: give the optimizer that steps.")
    return list({id(inner): inner for inner in map(inner_optimizer, several)}.values())
