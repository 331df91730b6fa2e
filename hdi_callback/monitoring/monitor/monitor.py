"""`HeadDiversityMonitor`: arm, capture, measure. It knows models and steps, and no trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from hdi_callback.arguments import shown, whole_number
from hdi_callback.attention import AttentionLayer, Refusal, Taps
from hdi_callback.attention.capture.padding import PaddingChoice
from hdi_callback.attention.wrappers import inner_model
from hdi_callback.core.whitening import Method
from hdi_callback.deprecation import renamed_argument, renamed_attribute
from hdi_callback.errors import MisconfigurationError
from hdi_callback.guard import attempt_each, guarded
from hdi_callback.monitoring.absent import Absent, absence_of
from hdi_callback.monitoring.chosen_metrics import choose_metrics
from hdi_callback.monitoring.layers import HeadVerifier, WatchedLayers
from hdi_callback.monitoring.metrics import (
    COVARIANCE,
    METRICS,
    MOVEMENT,
    QK,
    ROWS,
    UPDATES,
    UPDATES_OV,
    UPDATES_QK,
)
from hdi_callback.monitoring.monitor.inputs import SOURCES as OF_INPUTS
from hdi_callback.monitoring.monitor.inputs import LayerInputs
from hdi_callback.monitoring.monitor.measuring import DEFAULT_MEMORY, check_arguments
from hdi_callback.monitoring.monitor.movement import LARGEST, LARGEST_FOR_RULES, LastWeights
from hdi_callback.monitoring.monitor.outputs import SOURCES, HeadOutputs
from hdi_callback.monitoring.monitor.pooled import measure_over_ranks
from hdi_callback.monitoring.monitor.rotation import LayerRotation
from hdi_callback.monitoring.monitor.rows import AttentionReadings
from hdi_callback.monitoring.monitor.shared_products import SharedProducts
from hdi_callback.monitoring.monitor.sources import shared_roles, weight_sources
from hdi_callback.monitoring.monitor.weights import WeightReader
from hdi_callback.monitoring.notebook import layer_table
from hdi_callback.monitoring.plain_table import layer_lines
from hdi_callback.monitoring.ranks import Ranks, number_of_processes
from hdi_callback.monitoring.ranks.rendezvous import Rendezvous
from hdi_callback.monitoring.ranks.roster import SIZES, Roster
from hdi_callback.monitoring.readings import Measurement, Reading
from hdi_callback.monitoring.warn_once import WarnOnce, describe


class HeadDiversityMonitor:
    """Measure the head diversity of a model, reading by reading, without touching its training.

    A reading is what was measured at one step: the diversity of the heads' weights, and the covariance of the head
    outputs if a forward was armed. Between readings the hooks do nothing. Use it as a context manager, so that the
    hooks leave with it; install it before the first call of a compiled model.

    Args:
        model: any module that contains attention layers.
        metrics: names of metrics (see `METRICS`), ``"default"`` or `None` for the default ones; they decide which
            weights are read and whether head outputs are captured. The key weights always are.
        include: patterns of layer names to watch (``"encoder.*"``); all by default.
        exclude: patterns of layer names to leave out.
        max_tokens: largest number of tokens kept per layer for one reading of the head outputs.
        rank_tol: singular values below ``rank_tol`` times a head's largest do not count.
        method: how overlaps are computed, see `head_diversity`.
        memory_budget: bytes that reading weights may take at a time, beyond what the largest layer needs alone.
        strict: raise an error, in place of a warning, for a model without any readable attention layer: at once, or at
            the first reading if a real forward may still show the heads of modules that resemble attention.
        check_heads: check, on a few tokens of the first armed forward, that every layer computes attention with the
            heads that were found; a layer that does not is left out from then on, with a warning that shows why. Layers
            proposed by names alone are watched once a forward has confirmed them. Modules that were refused are
            searched again there, watched from then on if it shows their heads, and warned of if it does not; attention
            that ran and is not watched is named once.
        process_group: the ranks that measure together, each its share of the weights and its own tokens: ``"auto"`` for
            all of them once `torch.distributed` is initialised, a process group, or `None` for this rank alone.
        padding: how it is known which tokens are padding, whose outputs are left out: ``"auto"`` from the masks that
            attention and the modules around it receive; the number of the token that is padding, among the integers
            that the model receives; a function that takes the arguments of the outermost watched module, by name, and
            returns ``(batch, length)``, true where a token is padding; `None` to count every token.
        rule_metrics: metrics that rules need, measured beside `metrics`, without a warning where they cannot be.
        rotate_layers: measure the costly ones among them on a quarter or an eighth of the wide layers at each reading,
            see `LayerRotation`, and the movement of wide layers on a quarter of their weights.
        unasked: deprecated, an earlier name of `rule_metrics`.
        in_turn: deprecated, an earlier name of `rotate_layers`.

    Raises:
        MisconfigurationError: if an argument cannot work, or nothing can be watched and `strict` is set
            (`NothingToWatchError`).

    Example:
        >>> import torch
        >>> model = torch.nn.MultiheadAttention(32, num_heads=4, batch_first=True)
        >>> x = torch.randn(2, 10, 32)
        >>> with HeadDiversityMonitor(torch.nn.ModuleDict({"attn": model})) as monitor:
        ...     monitor.arm()
        ...     _ = model(x, x, x)
        ...     record = monitor.measure(step=0).record()
        >>> sorted(record.scalars(["hdi", "head_correlation"]))
        ['hdi/attn', 'hdi/mean', 'hdi/min', 'head_correlation/attn']
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        metrics: Sequence[str] | None = None,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        max_tokens: int = 2048,
        rank_tol: float = 1e-6,
        method: Method = "whiten",
        memory_budget: int = DEFAULT_MEMORY,
        strict: bool = False,
        check_heads: bool = True,
        process_group: Any = "auto",
        padding: PaddingChoice = "auto",
        rule_metrics: Sequence[str] = (),
        rotate_layers: bool = False,
        unasked: Sequence[str] | None = None,
        in_turn: bool | None = None,
    ) -> None:
        rule_metrics = renamed_argument("unasked", "rule_metrics", unasked, rule_metrics)
        rotate_layers = renamed_argument("in_turn", "rotate_layers", in_turn, rotate_layers)
        if not isinstance(model, nn.Module):
            raise MisconfigurationError(f"`model` must be a torch.nn.Module, got {shown(model)}.")
        checked = check_arguments(
            metrics=metrics, include=include, exclude=exclude, max_tokens=max_tokens, rank_tol=rank_tol, method=method,
            strict=strict, check_heads=check_heads, process_group=process_group, padding=padding,
            memory_budget=memory_budget,
        )  # fmt: skip
        include, exclude, max_tokens, rank_tol = (
            checked[name] for name in ("include", "exclude", "max_tokens", "rank_tol")
        )
        self.metrics: tuple[str, ...] = checked["metrics"]
        self.warn_once = WarnOnce()
        self._model = model
        self._layers = WatchedLayers(model, include=include, exclude=exclude)
        self._verifier = HeadVerifier(model, self._layers, is_on=check_heads, strict=strict, warn_once=self.warn_once)
        memory_budget = checked["memory_budget"]
        self._reader = WeightReader(self._layers, memory_budget)
        requested = {METRICS[name].source for name in self.metrics}
        measured = (*self.metrics, *choose_metrics(rule_metrics or self.metrics))
        sources = {METRICS[name].source for name in measured}
        self._rule_sources = sources - requested
        self._rotation = LayerRotation(self._rule_sources if rotate_layers else ())
        keeps = {MOVEMENT, UPDATES, UPDATES_QK, UPDATES_OV}
        self._last_weights = LastWeights(
            LARGEST if requested & keeps else LARGEST_FOR_RULES,
            for_movement_alone=sources & keeps == {MOVEMENT},
            samples_wide=rotate_layers and MOVEMENT in self._rule_sources,
        )
        self._shared = SharedProducts(memory_budget // 4, shared_roles(sources))
        self._weight_sources = weight_sources(
            sources, self._last_weights, rank_tol=rank_tol, method=method, shared=self._shared,
            memory_budget=memory_budget,
        )  # fmt: skip
        self._outputs = None
        if sources & set(SOURCES):
            self._outputs = HeadOutputs(
                self._layers, self._reader, measured, max_tokens=max_tokens, model=inner_model(model),
                padding=padding, warn_once=self.warn_once, shared=self._shared,
            )  # fmt: skip
        self._taps = None if self._outputs is None else self._outputs.taps
        self._rows = AttentionReadings(
            self._layers, self._verifier, model, padding=padding, rotation=self._rotation, reads_rows=ROWS in sources
        )
        self._inputs = None
        if sources & set(OF_INPUTS):
            self._inputs = LayerInputs(
                self._layers, self._reader, sources, max_tokens=max_tokens, model=inner_model(model),
                padding=padding, rank_tol=rank_tol, rotation=self._rotation,
            )  # fmt: skip
        captures = (self._taps, None if self._inputs is None else self._inputs.taps, self._rows)
        self._captures: list[Taps | AttentionReadings] = [capture for capture in captures if capture is not None]
        self._pending_outputs: set[str] = set()
        self._training_only = False
        self._rendezvous = Rendezvous(process_group)
        self._roster: Roster | None = None
        self._subject = [list(self.metrics), list(rule_metrics), rank_tol, method]
        self._sample: list[str] | None = None
        self._failure, self._has_joined = "", False

    @property
    def ranks(self) -> Ranks:
        """The ranks that measure together."""
        return self._rendezvous.asked

    @property
    def layers(self) -> tuple[AttentionLayer, ...]:
        """The layers that are watched on this rank, in model order."""
        return self._layers.watched

    @property
    def facts(self) -> tuple[dict[str, Any], ...]:
        """Facts about each layer as plain data; after the first reading over ranks, about the layers of all ranks."""
        return self._layers.facts if self._roster is None or not self._roster.spans else self._roster.facts

    def sizes(self) -> dict[str, list[int]]:
        """Sizes of the layers, by which a checkpoint recognises this model.

        Returns:
            Name -> sizes, of `facts`; without layers that a forward of this rank has found or contradicted.
        """
        here, late = {layer.name for layer in self.layers}, self.found_late
        elsewhere = {facts["name"] for facts in self.facts} - set(self._layers.names)
        kept = (facts for facts in self.facts if facts["name"] in (here - late) | elsewhere)
        return {facts["name"]: [facts[size] for size in SIZES] for facts in kept}

    @property
    def spans_ranks(self) -> bool:
        """Whether other ranks hold other layers, which `facts` includes."""
        return self._roster is not None and self._roster.spans

    @property
    def refused(self) -> tuple[Refusal, ...]:
        """Attention that is not watched, with the reasons."""
        return self._layers.refused

    @property
    def found_late(self) -> frozenset[str]:
        """Names of the layers that the first forward showed."""
        return self._layers.found_late

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @guarded("removing the hooks", otherwise=lambda self: self._remove_hooks())
    def close(self) -> None:
        """Remove the hooks and release what was captured; calling it again does nothing."""
        self._remove_hooks()

    def _remove_hooks(self) -> None:
        attempt_each([*(capture.remove for capture in self._captures), self._verifier.suspend, self._rendezvous.close])

    @property
    def rendezvous(self) -> Rendezvous:
        """Where the ranks agree beside readings."""
        return self._rendezvous

    def __repr__(self) -> str:
        return f"<HeadDiversityMonitor of {len(self.layers)} layers; {len(self.refused)} not watched>"

    def __str__(self) -> str:
        """The layers that are watched, and those that are not with the reason."""
        title = f"hdi_callback watches {len(self.layers)} attention layers"
        return "\n".join([title, *layer_lines(self.layers, self.refused)])

    def _repr_html_(self) -> str:
        return layer_table(self.layers, self.refused)

    @guarded("preparing to measure head diversity")
    def arm(self, *, training_only: bool = False, padding_mask: Tensor | None = None) -> None:
        """Capture the head outputs of the forwards that follow, for the next `measure`.

        All forwards before `measure` that train are read: those that autograd records, except those that no backward
        reaches while it reaches others. If autograd records none, all are read.

        Args:
            training_only: skip forwards that autograd does not record, even if there are no others.
            padding_mask: ``(batch, length)``, true where a token of these forwards is padding.
        """
        self._begin_reading()
        self._arm(training_only, padding_mask)

    def _begin_reading(self) -> None:
        self._rotation.begin(self.facts)
        if self._inputs is not None:
            self._inputs.begin()

    def _arm(self, training_only: bool, padding_mask: Tensor | None = None) -> None:
        self._verifier.arm()
        self._training_only = training_only
        for capture in self._captures:
            capture.arm(training_only=training_only, padding_mask=padding_mask)

    @guarded("preparing to measure head diversity")
    def disarm(self) -> None:
        """Stop capturing, and keep what was captured for the next `measure`."""
        for capture in self._captures:
            capture.disarm()

    @property
    def has_run(self) -> bool:
        """Whether a layer has run since `arm`."""
        return any(capture.has_run for capture in self._captures)

    @guarded("preparing to measure head diversity")
    def skip_forward(self) -> None:
        """Remove samples from compiled graphs before a forward that is not captured."""
        for capture in self._captures:
            capture.skip_forward()

    rest = renamed_attribute("rest", "skip_forward")

    @guarded("removing the hooks")
    def release(self) -> None:
        """Stop capturing, and discard what was captured."""
        attempt_each(capture.release for capture in self._captures)

    @guarded("removing the hooks")
    def suspend(self) -> None:
        """Remove the hooks for an evaluation, so that it runs exactly as without a monitor."""
        attempt_each([*(capture.suspend for capture in self._captures), self._verifier.suspend])

    @guarded("putting the hooks back")
    def resume(self) -> None:
        """Put the hooks back after `suspend`."""
        *taps, rows = self._captures
        # In the order of installation, on which compiled graphs have guards.
        for hooked in (*taps, self._verifier, rows):
            hooked.resume()

    def measure(
        self, step: int, *, epoch: int | None = None, axis: int | None = None, is_last_forward: bool = True
    ) -> Reading:
        """Measure the weights as they are now, and the head outputs captured since `arm`.

        Does not wait for the device; `Reading.record` does. In a distributed run every rank calls it at the same
        steps, and every rank gets the whole reading.

        Args:
            step: optimizer steps taken so far.
            epoch: the epoch, if there are epochs.
            axis: position on the trainer's own logging axis, if it differs from `step`.
            is_last_forward: False if forwards of further layers may follow, as when several networks are trained in
                turn; `complete` adds their head outputs to the reading.

        Returns:
            The reading. What could not be measured is named in `Reading.absent`, with the reason.

        Raises:
            MisconfigurationError: if `step`, `epoch` or `axis` is no whole number.
        """
        whole_number("step", step, least=0, example=100)
        for name, value in (("epoch", epoch), ("axis", axis)):
            if value is not None:
                whole_number(name, value, least=0, example=0)
        reading = self._measured(step, epoch, axis, is_last_forward)
        self._has_joined = False
        if isinstance(reading, Reading):
            return reading
        self._pending_outputs = set()
        absent = dict.fromkeys(self._layers.names, reading)
        return Reading(step, self._layers.names, (), absent, epoch, axis, warn_once=self.warn_once)

    def _failed(self, work: str, error: Exception) -> None:
        self._failure = describe(error)
        self.warn_once.error(work, error)

    @guarded("measuring head diversity", otherwise=lambda self: self._give_up())
    def _measured(self, step: int, epoch: int | None, axis: int | None, is_last_forward: bool) -> Reading | str:
        """Measure, or return why that failed."""
        absent = Absent(self.warn_once, quiet_sources=self._rule_sources)
        self._begin_reading()
        self._rotation.end()
        self._verify()
        self._layers.find_removed()
        # Over several ranks all sums are exchanged at once.
        alone = number_of_processes() == 1
        self._pending_outputs = set()
        if self._outputs is not None:
            self._pending_outputs = self._outputs.pending() if alone and not is_last_forward else set()
            self._outputs.collect(self._layers.names, self._pending_outputs, absent)
        self._rows.collect(self._layers.names, self._pending_outputs, absent)
        if self._inputs is not None:
            self._inputs.collect(absent)
        self._last_weights.begin(step)
        self._shared.begin({"key": self._rotation.skipped(QK)})
        with torch.no_grad(), self._reader.remembering_views():
            measurements = self._measure_together(absent)
            measurements = self._measure_alone(absent) if measurements is None else measurements
        self._shared.clear()
        for collected in (self._outputs, self._rows, self._inputs):
            if collected is not None:
                collected.clear()
        self._warn_of_weights_not_kept()
        names = self._layers.names if self._roster is None else self._roster.names
        late = self._layers.take_late()
        for collected in (self._outputs, self._inputs):
            if late and collected is not None:
                collected.add(late, absent)
        if self._pending_outputs:
            self._arm(self._training_only)
        frozen = self._layers.frozen(self.facts)
        return Reading(
            step, names, tuple(measurements), absent.reasons, epoch, axis, frozen=frozen, warn_once=self.warn_once
        )

    def _give_up(self) -> str:
        """Let other ranks not wait for this one; return why there is no reading."""
        if not self._has_joined:
            self._rendezvous.give_up()
        return f"measuring it failed ({self._failure})"

    @property
    def awaits_forwards(self) -> bool:
        """Whether the last reading lacks head outputs that `complete` may add."""
        return bool(self._pending_outputs)

    def complete(self, reading: Reading, *, is_last_forward: bool = True) -> Reading:
        """Add to the last reading the head outputs of forwards that came after it.

        Args:
            reading: the result of `measure` with ``is_last_forward=False``.
            is_last_forward: False if forwards of further layers may still follow.

        Returns:
            The same reading, with the head outputs captured since.
        """
        completed = self._completed(reading, is_last_forward)
        if completed is None:
            self._pending_outputs = set()
        return reading if completed is None else completed

    @guarded("measuring head diversity")
    def _completed(self, reading: Reading, is_last_forward: bool) -> Reading | None:
        pending = self._pending_outputs
        found: list[Measurement] = []
        known = {absence_of(source, name) for source in (COVARIANCE, ROWS) for name in pending}
        reasons = {key: reason for key, reason in reading.absent.items() if key not in known}
        absent = Absent(self.warn_once, reasons, quiet_sources=self._rule_sources)
        if self._outputs is not None:
            self._pending_outputs = set() if is_last_forward else pending & self._outputs.pending()
            self._verify()
            self._outputs.collect(pending, self._pending_outputs, absent)
            self._rows.collect(pending, self._pending_outputs, absent)
            with torch.no_grad():
                found = [*self._outputs.measure(absent, reading.measurements), *self._rows.measure(absent)]
            self._outputs.clear()
            self._rows.clear()
        if self._pending_outputs:
            self._arm(self._training_only)
        return replace(reading, measurements=(*reading.measurements, *found), absent=absent.reasons)

    def _warn_of_weights_not_kept(self) -> None:
        if self._last_weights.is_full and MOVEMENT not in self._rule_sources:
            self.warn_once.warn(
                "keeping weights",
                "The movement and updates of some heads are absent, as their weights at the last reading would take "
                f"more than {LARGEST / 2**30:.0f} GiB of host memory. Write include=[...] to watch fewer layers.",
            )
        self._last_weights.end()

    def _verify(self) -> None:
        """Check the heads at the first reading of an armed forward."""
        is_verified = self._verifier.verify(self._rows.observer)
        if is_verified and self._outputs is not None and self._verifier.is_first_reading:
            self._outputs.verified(self._verifier.ran)

    def _describe(self, absent: Absent) -> dict[str, Any]:
        """Describe what this rank measures, for `Roster`."""
        if self._sample is None:  # once, as it waits for the device
            self._sample = self._layers.sample()
        outputs, inputs = (
            {layer.name for layer in taps.tapped} if taps else set() for taps in (self._outputs, self._inputs)
        )
        return {
            "subject": self._subject,
            "layers": [
                {
                    "facts": facts,
                    "roles": sorted(layer.slices),
                    "outputs": layer.name in outputs,
                    "inputs": layer.name in inputs,
                }
                for layer, facts in zip(self._layers.all, self._layers.facts)
            ],
            "weights": self._sample,
            "has_parts": self._layers.sharding.has_parts,
            "absent": absent.reasons,
            **self._layers.findings(),
            **self._verifier.findings(),
        }

    @guarded("meeting the other ranks")
    def meet(self) -> None:
        """Let the ranks tell each other which layers they hold, before the first reading does; all of them call it."""
        absent = Absent(self.warn_once)
        try:
            self._rendezvous.join(lambda: self._describe(absent), is_armed=False, say=self.warn_once.warn)
        except Exception:
            self._rendezvous.give_up()
            raise
        finally:
            self._rendezvous.end_reading(has_failed=False)

    def _measure_alone(self, absent: Absent) -> list[Measurement]:
        measurements: list[Measurement] = []
        for source in self._weight_sources:
            measurements += self._reader.measure(source, absent, Ranks(), self._rotation.skipped(source.name))
        measurements += [] if self._outputs is None else self._outputs.measure(absent, measurements)
        measurements += self._rows.measure(absent)
        if self._inputs is not None:
            measurements += self._inputs.measure(self._inputs.tapped, (), Ranks(), self._layers.device(), absent)
        return measurements

    def _measure_together(self, absent: Absent) -> list[Measurement] | None:
        """Measure as one of several ranks; `None` if this rank is alone."""
        collected = [one for one in (self._outputs, self._rows, self._inputs) if one is not None]
        self._roster, self._has_joined, has_failed = None, True, True
        try:
            is_armed = any(one.has_collected for one in collected)
            agreed = self._rendezvous.join(lambda: self._describe(absent), is_armed=is_armed, say=self.warn_once.warn)
            if agreed is None:
                has_failed = False
                return None
            roster, is_any_armed = agreed
            self._layers.adopt(roster)
            self._verifier.adopt(others_await=roster.awaits)
            absent.reasons.update(roster.absent)
            for source in collected if is_any_armed else ():
                source.join_measurement()
            measurements = measure_over_ranks(
                roster,
                self._layers,
                self._reader,
                self._weight_sources,
                self._outputs,
                self._rows,
                absent,
                self.warn_once,
                self._rotation,
            )
            if self._inputs is not None:
                captured = roster.captured(self._layers.all, "inputs")
                left_out = roster.contradicted
                measurements += self._inputs.measure(captured, left_out, roster.ranks, self._layers.device(), absent)
            self._roster, has_failed = roster, False
            return measurements
        except Exception as error:  # on every rank, as a backend that does not know the device, or on this one
            self._rendezvous.give_up()
            self.warn_once.error("measuring head diversity over several ranks", error)
            return None
        finally:
            self._rendezvous.end_reading(has_failed=has_failed)
