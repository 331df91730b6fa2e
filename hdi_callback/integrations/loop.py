"""`watch_heads`: the watch in a training loop of one's own, with accelerate or without."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.optim import Optimizer

from hdi_callback.arguments import function, path, shown, whole_number
from hdi_callback.attention.padding import PaddingChoice
from hdi_callback.deprecation import renamed
from hdi_callback.errors import MisconfigurationError
from hdi_callback.integrations.optimizers import inner_optimizer
from hdi_callback.integrations.outlets import Dashboards, alert_sinks, picture_sinks, print_layers
from hdi_callback.monitoring.alerts import Alert, Rule
from hdi_callback.monitoring.history import History
from hdi_callback.monitoring.host import PlainHost
from hdi_callback.monitoring.interventions import Intervention, SaveCheckpoint
from hdi_callback.monitoring.monitor import HeadDiversityMonitor
from hdi_callback.monitoring.notebook import run_summary
from hdi_callback.monitoring.position import Position
from hdi_callback.monitoring.session import Session
from hdi_callback.monitoring.settings import DEFAULT_MEMORY, Method, Settings
from hdi_callback.monitoring.sink import Result, Sink
from hdi_callback.monitoring.state import sound_state
from hdi_callback.monitoring.warn_once import WarnOnce

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
    memory_budget: int = DEFAULT_MEMORY,
    history: bool | _Path = True,
    matrices_every: int = 10,
    history_mb: float | None = 200,
    figures_every: int = 20,
    alerts: Literal["default"] | Sequence[Rule] | None = "default",
    thresholds: dict[str, dict[str, float | None]] | None = None,
    loaded: bool | Literal["auto"] = "auto",
    on_alert: Callable[[Alert], Any] | None = None,
    interventions: Sequence[Intervention] | None = None,
    save_checkpoint: Callable[[str], Any] | None = None,
    strict: bool = False,
    check_heads: bool = True,
    process_group: Any = "auto",
    verbose: bool = True,
) -> HeadSession:
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
        memory_budget: bytes that reading weights may take at a time, beyond what the largest layer needs alone; less
            of it is slower.
        history: write the history file, to its usual place or to the path given.
        matrices_every: the history keeps the heads-by-heads matrices of every so many readings, and those of step 0, of
            the end and of alerts besides; 0 for none at all.
        history_mb: megabytes that the history may have on the disk; when it has more, the matrices of older readings
            are thinned. `None` for no limit.
        figures_every: draw the worst alignment of all layers and the heads of the worst ones at every so many readings,
            for the loggers that take pictures and into ``figures`` beside the history; 0 for none. Drawing takes at
            most 2% of the run's time while it goes on, and needs matplotlib.
        alerts: ``"default"``, rules of your own, or `None` for no alerts.
        thresholds: limits of the default rules by pattern of layer names.
        loaded: whether the weights had been trained before this run, so that what they are at its start is no alarm;
            ``"auto"`` tells it from the weights of each layer.
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
        >>> heads.global_step, "hdi/min" in heads.latest
        (3, True)
    """
    settings = Settings.of(locals())
    if not isinstance(model, nn.Module):
        raise MisconfigurationError(f"`model` must be a torch.nn.Module, got {shown(model)}.")
    _check_outlets(tensorboard, wandb)
    host = _LoopHost(optimizer, settings, log_dir, (tensorboard, wandb), save_checkpoint)
    session = Session.start(model, host, settings, warn_once=host.warn_once)
    session.attach()
    if host.is_first_rank:
        print_layers(session, settings)
    return HeadSession(session, host, is_strict=settings.strict)


class HeadSession:
    """A session in a training loop; `watch_heads` makes it.

    It has `state_dict` and `load_state_dict`, so that ``accelerator.register_for_checkpointing(heads)`` works.
    """

    def __init__(self, session: Session, host: _LoopHost, *, is_strict: bool = False) -> None:
        self._session, self._host, self._warn_once = session, host, session.warn_once
        self._is_strict = is_strict
        self._restored: dict[str, Any] | None = None
        self._has_begun = self._is_closed = self._is_inside = False
        self._prepared: set[int] = set()  # optimizers whose gradients interventions have had in this step
        self._steps: Counter[int] = Counter()  # of each optimizer in this step
        self._was_compiled = self._has_seen_any = False
        self._handles: list[Any] = []
        for optimizer in host.optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._on_step_begin))
            self._handles.append(optimizer.register_step_post_hook(self._on_step_end))

    @property
    def global_step(self) -> int:
        """Optimizer steps taken so far."""
        return self._host.step

    @property
    def latest(self) -> dict[str, float]:
        """The curves at the last reading whose numbers have arrived, on every rank: ``heads.latest["hdi/min"]``."""
        return self._host.latest.curves

    @property
    def should_stop(self) -> bool:
        """Whether an intervention has asked for the end of the training."""
        return self._host.is_stopped

    @property
    def history_path(self) -> Path | None:
        """Where the history of the run is; `None` before the first step and when there is none."""
        return self._session.history_path

    def _repr_html_(self) -> str:
        monitor = self.monitor
        return run_summary("HeadSession", monitor.layers, monitor.refused, self.active_alerts, self.history_path)

    @property
    def active_alerts(self) -> list[Alert]:
        """The alerts that are active now."""
        return self._session.active_alerts

    @property
    def monitor(self) -> HeadDiversityMonitor:
        """The monitor that measures."""
        return self._session.monitor

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
        for optimizer in self._host.optimizers:
            self._prepare(optimizer)

    def finish(self) -> None:
        """Read the final weights, make everything known, and leave nothing behind; the end of the ``with`` does it."""
        if self._is_closed:
            return
        if self._has_begun:
            with self._warn_once.guard("the last reading"):
                self._session.finish()
            if not self._has_seen_any:
                self._warn_once.warn(
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
            with self._warn_once.guard("closing the watch"):
                self._session.flush(is_broken=True)
        self._session.close()
        self._host.dashboards.close()

    def state_dict(self) -> dict[str, Any]:
        """Give what a resumed run needs; between steps.

        Returns:
            Plain data.
        """
        if not self._has_begun and self._restored is not None:
            return self._restored
        return {**self._session.state_dict(), "step": self.global_step, "tensorboard": self._host.dashboards.folder}

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
            self._warn_once.warn(
                "no state", f"{message} Steps are counted from {self.global_step} on, alerts start anew."
            )
            return
        sound = sound_state(state_dict, warn_once=self._warn_once) or {}
        counted = [sound.get(name) for name in ("step", "last_step")]
        # Without a step count the last reading is the best guess of how far the run has come.
        step = next((count for count in counted if count is not None), self.global_step)
        state = self._session.accept(state_dict, step=step)
        if self._has_begun:
            self._session.flush()
        self._restored = state
        self._host.go_to(step)
        self._has_begun = False

    def _enter_step(self, epoch: int | None) -> None:
        self._is_inside, self._was_compiled, self._host.epoch = True, False, epoch
        self._prepared.clear()
        self._steps.clear()
        with self._warn_once.guard("watching a step"):
            if not self._has_begun:  # it is known now whether a checkpoint is resumed
                self._has_begun = True
                self._session.open(self._restored)
            self._session.monitor.resume()
            self._session.before_forward()

    def _leave_step(self, *, is_whole: bool) -> None:
        self._is_inside = False
        has_stepped = bool(self._steps) or self._was_compiled
        with self._warn_once.guard("watching a step"):
            if self._was_compiled and self._session.is_capturing:
                self._session.abandon()
                self._warn_once.warn(
                    "compiled step",
                    "The optimizer's step is compiled, and within a graph the heads cannot be read: call "
                    "`heads.before_optimizer_step()` before it.",
                )
            if max(self._steps.values(), default=0) > 1:
                self._warn_once.warn(
                    "several steps",
                    "An optimizer made several steps within one `with heads.step():`, which counts as one. Write it "
                    "within the loop, around each step.",
                )
            if has_stepped:
                self._host.go_on()
                self._has_seen_any = True
            if is_whole:
                self._session.after_step()
            else:
                self._session.abandon()
            self._session.monitor.suspend()

    def _prepare(self, optimizer: Optimizer) -> None:
        if id(optimizer) in self._prepared:
            return
        self._prepared.add(id(optimizer))
        with self._warn_once.guard("watching a step"):
            # Where several optimizers take turns, others may have forwards of networks of their own to come.
            self._session.after_backward(is_last=len(self._host.optimizers) == 1)
            self._session.before_optimizer_step(optimizer)

    # Called by the optimizers. Where their step is compiled this is traced: it must break no graph, and depend on
    # nothing that changes from step to step.
    def _on_step_begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            self._was_compiled = True
            return
        if self._is_inside:
            self._prepare(optimizer)
        else:
            self._warn_once.warn(
                "outside",
                "The optimizer made a step outside of `with heads.step():`, so that it is not watched. Write it around "
                "forward, backward and optimizer.step().",
            )

    def _on_step_end(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling() and self._is_inside:
            self._steps[id(optimizer)] += 1


class _Latest:
    """Keeps the curves of the last reading."""

    name = "keeping the latest reading"

    def __init__(self, metrics: Sequence[str]) -> None:
        self.curves: dict[str, float] = {}
        self._metrics = list(metrics)

    def write(self, result: Result) -> None:
        self.curves = result.scalars(self._metrics)


class _LoopHost(PlainHost):
    """What a loop offers: it counts the steps itself."""

    def __init__(
        self,
        optimizer: Any,
        settings: Settings,
        log_dir: _Path,
        outlets: tuple[Any, Any],
        save: Callable[[str], Any] | None,
    ) -> None:
        super().__init__(settings.process_group)
        function("save_checkpoint", save, "the name of a checkpoint")
        acting = [item for item in settings.interventions or () if not item.dry_run]
        if save is None and any(isinstance(item, SaveCheckpoint) for item in acting):
            raise MisconfigurationError(
                "SaveCheckpoint has to be told how: write save_checkpoint=lambda name: torch.save(..., name + '.pt')."
            )
        self._optimizers = _inner_optimizers(optimizer)
        self._folder = Path(path("log_dir", log_dir, "runs/heads"))
        self._settings, self._outlets, self._save = settings, outlets, save
        self.warn_once = WarnOnce()
        self.dashboards = Dashboards(settings.metrics, self.warn_once)
        self.latest = _Latest(settings.metrics or ())
        self.step, self.epoch, self.is_stopped = 0, cast("int | None", None), False

    @property
    def folder(self) -> Path:
        return self._folder

    @property
    def position(self) -> Position:
        return Position(self.step, self.epoch)

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        return self._optimizers

    def go_on(self) -> None:
        self.step += 1

    def go_to(self, step: int) -> None:
        self.step, self.is_stopped = step, False

    def stop(self) -> None:
        self.is_stopped = True

    def save(self, name: str) -> str:
        if self._save is None:
            raise MisconfigurationError("No checkpoint can be saved without watch_heads(..., save_checkpoint=...).")
        place = self._save(name)
        return name if place is None else str(place)

    def sinks(
        self, monitor: HeadDiversityMonitor, history: History | None, state: Mapping[str, Any] | None
    ) -> list[Sink]:
        sinks: list[Sink] = [self.latest]
        if not self.is_first_rank:
            return sinks
        board, run = self._outlets
        layers = [layer.name for layer in monitor.layers]
        if board is not None and board is not False:
            sinks += self.dashboards.tensorboard(board, self.folder / "hdi", state, layers)
        if run is not None:
            sinks += self.dashboards.wandb(run, layers, "hdi_step", is_guest=True)
        outlets = self.dashboards.outlets
        sinks += picture_sinks(self._settings, history, outlets, is_resumed=state is not None)
        return [*sinks, *alert_sinks(self._settings, history, self.say, "the dashboards")]


def _check_outlets(board: Any, run: Any) -> None:
    if board is not None and not isinstance(board, bool) and not hasattr(board, "add_scalar"):
        raise MisconfigurationError(f"`tensorboard` must be a SummaryWriter or True, got {shown(board)}.")
    if run is not None and (not hasattr(run, "log") or isinstance(run, type(os))):
        raise MisconfigurationError(f"`wandb` must be a run, got {shown(run)}: write wandb=wandb.init(...).")


def _inner_optimizers(optimizer: Any) -> list[Optimizer]:
    several = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    if not len(several):
        raise MisconfigurationError("`optimizer` is an empty list: give the optimizer that steps.")
    return list({id(inner): inner for inner in map(inner_optimizer, several)}.values())


__getattr__ = renamed(__name__, {"HeadWatch": "hdi_callback.integrations.loop:HeadSession"})
