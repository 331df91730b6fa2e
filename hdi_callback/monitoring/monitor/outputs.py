"""What the heads gave in the forwards of one step: collected from the taps, and measured alone or with other ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from hdi_callback.attention import AttentionLayer, Capture, Taps
from hdi_callback.attention.fast_path import takes_fast_path
from hdi_callback.attention.padding import PaddingChoice
from hdi_callback.attention.sharding import is_first_holder, whole
from hdi_callback.core import HeadCovariance, head_covariance
from hdi_callback.core.contribution import ContributionSums, ImportanceSums, head_slopes
from hdi_callback.core.covariance import HeadMoments, HeadSums
from hdi_callback.errors import HDIError
from hdi_callback.monitoring.absent import FOUND_LATE, Absent, absence_of, listed
from hdi_callback.monitoring.layers import WatchedLayers
from hdi_callback.monitoring.metrics import CONTRIBUTION, COVARIANCE, IMPORTANCE, METRICS
from hdi_callback.monitoring.monitor.collected import Collected
from hdi_callback.monitoring.monitor.importance import Importances, closest_pairs
from hdi_callback.monitoring.monitor.weights import WeightReader, without_autocast
from hdi_callback.monitoring.ranks import Ranks
from hdi_callback.monitoring.readings import Measurement
from hdi_callback.monitoring.warn_once import WarnOnce

SOURCES = (COVARIANCE, CONTRIBUTION, IMPORTANCE)
"""What is measured on head outputs."""

_NO_RECOMPILATION = "they need a graph of their own, and torch.compile must not or should not compile another one"
_REPLACED = (
    "its output projection is no part of the model any more, as after an adapter was unloaded or merged; a new monitor "
    "sees what came in its place"
)
_FAST_PATH = (
    "in evaluation mode the nn.TransformerEncoderLayer around it takes torch's fast path, which computes attention "
    "without calling it; torch.backends.mha.set_fastpath_enabled(False) switches that off, which changes the last "
    "digits of what it computes"
)
_UNCALLED = (
    "its attention ran without calling its output projection, whose weight it uses directly, as by "
    "torch.nn.functional.linear"
)


@dataclass(frozen=True)
class HeadContribution:
    """What each head adds to the output of its layer.

    Attributes:
        relative: ``(H,)``, RMS over tokens of the norm of what a head adds, over that of what all heads add together.
        not_finite: ``(H,)``, 1 where an output of the head is NaN or infinite, 0 elsewhere.
        tokens: how many tokens counted.
    """

    relative: Tensor
    not_finite: Tensor
    tokens: Tensor


@dataclass
class OutputSums:
    """Sums over the tokens of one layer that a rank holds.

    Attributes:
        covariance: of the covariance term; `None` if it is not asked for.
        contribution: of the contributions; `None` if they are not asked for.
        not_finite: ``(H,)``, how many ranks saw an output that is not finite.
        importance: of their importance; `None` if it is not asked for.
        followed: how many ranks know it.
    """

    covariance: HeadSums | None
    contribution: ContributionSums | None
    not_finite: Tensor | None
    importance: Importances | None = None
    followed: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """Give what adds up, in a fixed order."""
        parts = [self.covariance, self.contribution]
        found = [getattr(part, item.name) for part in parts if part is not None for item in fields(part)]
        found += [] if self.importance is None else self.importance.tensors()
        return [tensor for tensor in (*found, self.not_finite, self.followed) if tensor is not None]

    def added_up(self, added: Iterator[Tensor]) -> OutputSums:
        """Take the same tensors over all ranks."""

        def take(part: Any) -> Any:
            if part is None:
                return None
            values = {item.name: getattr(part, item.name) for item in fields(part)}
            return type(part)(**{name: None if value is None else next(added) for name, value in values.items()})

        covariance, contribution = take(self.covariance), take(self.contribution)
        importance = None
        if self.importance is not None:
            heads, groups = take(self.importance.heads), take(self.importance.groups)
            importance = Importances(heads, groups)
        counts = [None if count is None else next(added) for count in (self.not_finite, self.followed)]
        return OutputSums(covariance, contribution, counts[0], importance, counts[1])


class HeadOutputs(Collected):
    """Capture head outputs and measure them.

    Args:
        layers: the layers that are watched.
        reader: reads their output weights.
        metrics: names of the metrics that are asked for.
        max_tokens: largest number of tokens kept per layer.
        model: the model around them.
        padding: how padding is known.
        warn_once: turns what goes wrong into one warning.
    """

    def __init__(
        self,
        layers: WatchedLayers,
        reader: WeightReader,
        metrics: Sequence[str],
        *,
        max_tokens: int,
        model: nn.Module,
        padding: PaddingChoice,
        warn_once: WarnOnce,
    ) -> None:
        self._layers, self._reader, self._model, self._warn_once = layers, reader, model, warn_once
        self._sources = {METRICS[name].source for name in metrics}
        reduce = head_slopes if IMPORTANCE in self._sources else None
        self.taps = Taps(layers.all, max_tokens=max_tokens, model=model, padding=padding, reduce_slopes=reduce)
        # Standard errors cost as much again as all the rest, so they are computed when asked for.
        self._wants_errors = any(name.endswith("_error") for name in metrics)
        self._wants_overlap = "head_output_overlap" in metrics
        self._uncalled: set[str] = set()  # layers whose output projection is used without being called
        self._tap()

    def _tap(self) -> None:
        self._tapped = [layer for layer in self._layers.all if layer.name not in self.taps.absent]

    def add(self, layers: Sequence[AttentionLayer], absent: Absent) -> None:
        """Capture further layers from the next armed forward on.

        Args:
            layers: layers with names of their own.
            absent: takes what this reading lacks of them.
        """
        self.taps.add(layers)
        self._tap()
        for layer in layers:
            absent.reasons[_outputs_of(layer.name)] = self.taps.absent.get(layer.name, FOUND_LATE)

    def verified(self) -> None:
        """Take note, after the heads were checked, of layers that ran without calling their output projection."""
        self._uncalled = set(self.taps.missed) & self._layers.ran

    def pending(self) -> set[str]:
        """Name the layers that were to be captured and did not run yet."""
        if not self.taps.was_armed:
            return set()
        return set(self.taps.missed) - self._layers.removed

    def collect(self, names: Collection[str], pending: Collection[str], absent: Absent) -> None:
        """Take over what the taps of some layers hold, for the measurement that follows.

        Args:
            names: of these layers.
            pending: layers that may still run, of which nothing is said yet.
            absent: takes what was not captured.
        """
        self.taps.disarm()
        self._captures = None
        if self.taps.was_armed:
            self._captures = {name: capture for name, capture in self.taps.captures.items() if name in names}
            tapped = {layer.name for layer in self._tapped}
            for name, reason in self.taps.absent.items():
                if name in tapped and name in names:
                    absent.leave_out(_outputs_of(name), reason, kind="capturing")
                elif name not in tapped:  # known from the start
                    absent.reasons[_outputs_of(name)] = reason
            missed = [name for name in self.taps.missed if name in names and name not in self._layers.removed]
            if self.taps.is_limited:
                absent.reasons.update({_outputs_of(name): _NO_RECOMPILATION for name in missed})
                self._warn_once.warn(
                    "no recompilation", f"Head outputs of {listed(missed)} are absent: {_NO_RECOMPILATION}."
                )
                missed = []
            absent.reasons.update({_outputs_of(name): self._why_missed(name) for name in missed})
            if told := [name for name in missed if name not in pending]:
                self._say_what_was_missed(told)
            self._say_what_is_padded(names)
        self.taps.release()

    def measure(self, absent: Absent, weights: Sequence[Measurement] = ()) -> list[Measurement]:
        """Measure what was collected, as one process alone.

        Args:
            absent: takes what cannot be measured.
            weights: what was measured of weights at this reading.

        Returns:
            One measurement for each source and number of heads.
        """
        measured: dict[tuple[Any, ...], list[tuple[str, Any]]] = {}
        closest = closest_pairs(weights)
        for layer in self._layers.all:
            capture = None if self._captures is None else self._captures.get(layer.name)
            if capture is None:
                continue
            sequences = (capture.sequences, capture.num_sequences) if self._wants_errors else None
            device = capture.outputs.device
            with absent.unless_measured(COVARIANCE, layer.name), without_autocast(device):
                _require_two_tokens(capture)
                weight = self._reader.weight(layer, "output", Ranks())
                outputs = whole(capture.outputs)
                found: dict[str, Any] = {}
                if COVARIANCE in self._sources:
                    found[COVARIANCE] = head_covariance(outputs, weight, weights=capture.weights, sequences=sequences)
                if CONTRIBUTION in self._sources:
                    known: HeadCovariance | None = found.get(COVARIANCE)
                    sums = contribution_sums(outputs, weight, capture.weights, None if known is None else known.trace)
                    found[CONTRIBUTION] = _contribution(sums, not_finite(outputs, capture.weights))
                slopes = self._slopes_of(layer, capture, absent)
                if slopes is not None:
                    importances = Importances.of(slopes, layer.num_key_heads)
                    found[IMPORTANCE] = importances.importance(closest.get(layer.name))
                for source, values in found.items():
                    kind = (source, layer.num_heads, layer.num_key_heads, device)
                    measured.setdefault(kind, []).append((layer.name, values))
        return [join(source, group) for (source, *_), group in measured.items()]

    def shares(self, layers: Sequence[AttentionLayer], ranks: Ranks, device: torch.device) -> list[Tensor]:
        """Compute the mean head outputs of layers over the tokens of all ranks.

        Args:
            layers: those that any rank captures, the same on every rank.
            ranks: those that measure together.
            device: where they add up.

        Returns:
            One ``(H, d_v)`` for each layer.
        """
        held = self._captures or {}
        parts: list[Tensor] = []
        for layer in layers:
            count = torch.zeros((), device=device)
            total = torch.zeros(layer.num_heads, layer.value_dim, device=device)
            if layer.name in held:
                outputs = held[layer.name].outputs
                own = HeadMoments.of(whole(outputs), held[layer.name].weights)
                if is_first_holder(outputs):
                    count, total = own.count.to(device), (own.count * own.mean).to(device)
            parts += [count, total]
        added = ranks.sum(parts, device)
        return [total / count.clamp_min(1) for count, total in zip(added[::2], added[1::2])]

    def sums(
        self,
        layers: Sequence[AttentionLayer],
        means: Sequence[Tensor],
        ranks: Ranks,
        device: torch.device,
        absent: Absent,
    ) -> list[OutputSums]:
        """Add up the tokens at hand about the mean of all; zeros where there are none.

        Args:
            layers: as for `shares`.
            means: what `shares` gave.
            ranks: those that measure together.
            device: where they add up.
            absent: takes what cannot be measured.

        Returns:
            One for each layer.
        """
        held, here = self._captures or {}, {layer.name for layer in self._tapped}
        sums = []
        with_scatter = self._wants_overlap and self._fits(layers, absent)
        for layer, mean in zip(layers, means):
            found = self._no_sums(layer, mean, device, with_scatter=with_scatter)
            if layer.name not in here:
                sums.append(found)
                continue
            with absent.unless_measured(COVARIANCE, layer.name), without_autocast(device):
                # Both may be collective calls, so that every rank makes them.
                weight = self._reader.weight(layer, "output", ranks)
                outputs = whole(held[layer.name].outputs) if layer.name in held else None
                if outputs is not None and is_first_holder(held[layer.name].outputs):
                    weights = held[layer.name].weights
                    if found.covariance is not None:
                        found.covariance = HeadSums.of(
                            outputs,
                            weight,
                            mean.to(outputs.device),
                            with_scatter=with_scatter,
                            weights=weights,
                        )
                    if found.contribution is not None:
                        found.contribution = contribution_sums(outputs, weight, weights)
                        found.not_finite = not_finite(outputs, weights).double()
                    slopes = self._slopes_of(layer, held[layer.name], absent)
                    if slopes is not None:
                        found.importance = Importances.of(slopes, layer.num_key_heads)
                        found.followed = torch.ones((), device=device)
                del weight, outputs
            sums.append(found)
        return sums

    def read_sums(
        self,
        layers: Sequence[AttentionLayer],
        kept: Sequence[bool],
        sums: Sequence[OutputSums],
        added: Iterator[Tensor],
        absent: Absent,
        weights: Sequence[Measurement] = (),
    ) -> list[Measurement]:
        """Measure what was added up over the ranks.

        Args:
            layers: as for `shares`.
            kept: whether the heads of each of them are what was claimed, on all ranks.
            sums: what `sums` gave.
            added: the same tensors, over all ranks.
            absent: takes what cannot be measured.
            weights: what was measured of weights at this reading.

        Returns:
            One measurement for each source and number of heads; none if no forward was to be captured, as it was on
            all ranks then.
        """
        if self._captures is None:
            return []
        measured: dict[tuple[Any, ...], list[tuple[str, Any]]] = {}
        closest = closest_pairs(weights)
        for layer, is_kept, item in zip(layers, kept, sums):
            total = item.added_up(added)
            if not is_kept:
                continue
            if total.covariance is not None:
                values: Any = total.covariance.covariance()
                measured.setdefault((COVARIANCE, layer.num_heads), []).append((layer.name, values))
            if total.contribution is not None and total.not_finite is not None:
                values = _contribution(total.contribution, total.not_finite > 0)
                measured.setdefault((CONTRIBUTION, layer.num_heads), []).append((layer.name, values))
            if total.importance is not None and total.followed is not None:
                mean = total.importance.averaged(total.followed)
                values = mean.importance(closest.get(layer.name))
                measured.setdefault((IMPORTANCE, layer.num_heads, layer.num_key_heads), []).append((layer.name, values))
            if total.covariance is None:  # else its tokens tell whether other ranks have captured it
                absent.reasons.pop(_outputs_of(layer.name), None)
        if self._wants_errors:
            self._warn_once.warn(
                "errors over ranks", "Standard errors are not computed over several ranks; they are absent."
            )
        return [join(source, group) for (source, *_), group in measured.items()]

    def _slopes_of(self, layer: AttentionLayer, capture: Capture, absent: Absent) -> Tensor | None:
        if IMPORTANCE not in self._sources:
            return None
        why = None if capture.slopes is not None else capture.no_slopes
        if layer.num_heads % layer.num_key_heads:
            why = f"its {layer.num_key_heads} key heads do not divide its {layer.num_heads} heads"
        if why is not None:
            absent.leave_out(absence_of(IMPORTANCE, layer.name), f"it is not known: {why}", f"{IMPORTANCE} {why}")
        return capture.slopes if why is None else None

    def _fits(self, layers: Sequence[AttentionLayer], absent: Absent) -> bool:
        """Tell, the same on every rank, whether what the overlap of outputs adds up over ranks keeps within bounds."""
        size = sum(8 * (layer.num_heads * layer.value_dim) ** 2 for layer in layers)
        budget = self._reader.memory_budget
        if size <= budget:
            return True
        reason = (
            f"over several ranks it adds up {size / 2**20:.0f} MiB, more than memory_budget={budget}: raise "
            "memory_budget, or leave `head_output_overlap` out of metrics"
        )
        if self._captures is not None:
            absent.reasons.update({f"head_output_overlap/{layer.name}": reason for layer in layers})
            self._warn_once.warn("output overlap", f"`head_output_overlap` is absent: {reason}.")
        return False

    def _no_sums(self, layer: AttentionLayer, mean: Tensor, device: torch.device, *, with_scatter: bool) -> OutputSums:
        H = layer.num_heads

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, device=device)

        covariance = contribution = count = None
        if COVARIANCE in self._sources:
            scatter = zeros(*mean.shape, *mean.shape) if with_scatter else None
            covariance = HeadSums(zeros(), zeros(H, H), scatter)
        if CONTRIBUTION in self._sources:
            contribution, count = ContributionSums(zeros(), zeros(H), zeros()), zeros(H)
        importance = followed = None
        if IMPORTANCE in self._sources:
            G = layer.num_key_heads
            importance = Importances(ImportanceSums(zeros(H), zeros(H, H)), ImportanceSums(zeros(G), zeros(G, G)))
            followed = zeros()
        return OutputSums(covariance, contribution, count, importance, followed)

    def _why_missed(self, name: str) -> str:
        layer = self._layers.named(name)
        projection = layer.output_projection
        if projection is not None and projection not in set(self._model.modules()):
            return _REPLACED
        if name not in self._uncalled and takes_fast_path(layer.module, self._model):
            return _FAST_PATH
        return _UNCALLED if name in self._uncalled else "its output projection was not seen to be called"

    def _say_what_is_padded(self, names: Collection[str]) -> None:
        doubts = {name: why for name, why in self.taps.doubts.items() if name in names}
        if doubts:
            self._warn_once.warn(
                "padding",
                f"Which tokens of {listed(list(doubts))} are padding is not known, so that all of them are counted: "
                f"{next(iter(doubts.values()))}. Write padding=... to say it, or padding=None if there is none.",
            )

    def _say_what_was_missed(self, names: Sequence[str]) -> None:
        for reason in (_REPLACED, _UNCALLED, _FAST_PATH):
            if alike := [name for name in names if self._why_missed(name) == reason]:
                self._warn_once.warn(
                    reason,
                    f"No head outputs of {listed(alike)} were captured, so their covariance is absent; weights are "
                    f"read all the same: {reason}.",
                )
        names = [name for name in names if self._why_missed(name) not in (_REPLACED, _UNCALLED, _FAST_PATH)]
        if not names:
            return
        if len(names) == len(self._layers.all):
            what = "No head outputs were captured"
        else:
            what = f"No head outputs of {listed(names)} were captured"
        self._warn_once.warn(
            "nothing captured",
            f"{what} in a forward that was to be captured, so their covariance is absent there; weights are read all "
            "the same. Either it was not called in that forward, or it was compiled and called before the monitor was "
            "there: then make the monitor before the first call, or write torch.compiler.reset() after making it.",
        )


def contribution_sums(
    outputs: Tensor, output_weight: Tensor, weights: Tensor | None, trace: Tensor | None = None
) -> ContributionSums:
    """Add up what heads contribute, each token as often as it counts.

    Args:
        outputs: ``(tokens, H, d_v)``.
        output_weight: ``(H, d_v, d)``.
        weights: ``(tokens,)``, how often each token counts, 0 for padding; once if `None`.
        trace: ``(H, H)``, trace of the covariance of two heads' contributions, if it is known: then no token is
            projected once more.

    Returns:
        Their sums.
    """
    if trace is not None:
        return _contributions_of(trace, outputs, output_weight, weights)
    if weights is None:
        return ContributionSums.of(outputs, output_weight)
    wide = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
    # Squares are added up, so that the root of a weight counts a token that often; NaN in padding stays out.
    counted = torch.where(weights[:, None, None] == 0, 0, wide * weights.sqrt()[:, None, None])
    sums = ContributionSums.of(counted, output_weight)
    return ContributionSums(weights.sum().to(sums.count.dtype), sums.heads, sums.output)


def _contributions_of(
    trace: Tensor, outputs: Tensor, output_weight: Tensor, weights: Tensor | None
) -> ContributionSums:
    """Second moments of contributions: their covariance, and the squares of their means."""
    wide = outputs.to(trace.dtype)
    if weights is None:
        count, mean = trace.new_full((), len(wide)), wide.mean(0)
    else:
        weights = weights.to(trace.dtype)
        count = weights.sum()
        counted = torch.where(weights[:, None, None] == 0, 0, wide)
        mean = torch.tensordot(weights, counted, 1) / count
    means = (mean[:, None, :] @ output_weight.to(trace.dtype))[:, 0]  # (H, d)
    heads = count * (trace.diagonal() + means.square().sum(-1))
    output = count * (trace.sum() + means.sum(0).square().sum())
    return ContributionSums(count, heads.clamp_min(0), output.clamp_min(0))


def not_finite(outputs: Tensor, weights: Tensor | None) -> Tensor:
    """Tell which heads gave what is no number.

    Args:
        outputs: ``(tokens, H, d_v)``.
        weights: ``(tokens,)``, 0 for padding, which is not looked at; `None` if there is none.

    Returns:
        ``(H,)``, boolean.
    """
    bad = ~outputs.isfinite().all(-1)
    return bad.any(0) if weights is None else (bad & (weights != 0)[:, None]).any(0)


def _require_two_tokens(capture: Capture) -> None:
    if len(capture.outputs) < 2:
        raise HDIError(f"the armed forward had {len(capture.outputs)} tokens, and two are needed")


def _contribution(sums: ContributionSums, bad: Tensor) -> HeadContribution:
    return HeadContribution(sums.relative, bad.to(sums.count.dtype), sums.count)


def _outputs_of(name: str) -> str:
    return absence_of(COVARIANCE, name)


def join(source: str, results: Sequence[tuple[str, Any]]) -> Measurement:
    """Join the results of several layers along a new first dimension.

    Args:
        source: what they are of.
        results: names of the layers, and frozen records of tensors of one shape.

    Returns:
        One measurement.
    """
    record = type(results[0][1])
    stacked: Mapping[str, Tensor] = {
        item.name: torch.stack([getattr(result, item.name) for _, result in results]) for item in fields(record)
    }
    return Measurement(tuple(name for name, _ in results), source, record(**stacked))
