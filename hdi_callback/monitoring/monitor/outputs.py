"""`HeadOutputs`: measurements on captured head outputs, of one process or of all ranks."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hdi_callback.attention import AttentionLayer, Capture
from hdi_callback.attention.autocast import without_autocast
from hdi_callback.attention.capture.padding import PaddingChoice
from hdi_callback.attention.layer.sharding import is_first_holder, whole
from hdi_callback.core import HeadCovariance, head_covariance
from hdi_callback.core.contribution import head_slopes
from hdi_callback.core.head_sums import HeadSums, count_and_total
from hdi_callback.errors import HDIError
from hdi_callback.monitoring.absent import Absent, absence_of
from hdi_callback.monitoring.layers import WatchedLayers
from hdi_callback.monitoring.metrics import CONTRIBUTION, COVARIANCE, IMPORTANCE, METRICS
from hdi_callback.monitoring.monitor.contributions import HeadContribution, contribution_sums, not_finite
from hdi_callback.monitoring.monitor.gathers import Gather
from hdi_callback.monitoring.monitor.importance import Importances, closest_pairs
from hdi_callback.monitoring.monitor.join import join
from hdi_callback.monitoring.monitor.output_capture import OutputCapture, outputs_of
from hdi_callback.monitoring.monitor.output_sums import OutputSums
from hdi_callback.monitoring.monitor.shared_products import SharedProducts
from hdi_callback.monitoring.monitor.weights import WeightReader
from hdi_callback.monitoring.ranks import Ranks
from hdi_callback.monitoring.readings import Measurement
from hdi_callback.monitoring.warn_once import WarnOnce

SOURCES = (COVARIANCE, CONTRIBUTION, IMPORTANCE)
"""Sources that are measured on head outputs."""

_ROUND = 2**22
"""Bytes of scatters that are added up at once, so that those of all layers are never in memory together."""


@dataclass(frozen=True)
class _Share:
    """One rank's part in the measurement of a layer that some rank captures.

    Attributes:
        layer: the layer.
        mean: mean head outputs over the tokens of all ranks, ``(H, d_v)``.
        is_here: whether this rank captures the layer.
        is_taken: whether this rank computes what only one of the ranks computes.
    """

    layer: AttentionLayer
    mean: Tensor
    is_here: bool
    is_taken: bool


class HeadOutputs(OutputCapture):
    """Measure the head outputs of the armed forwards of one step.

    Args:
        layers: the layers that are watched.
        reader: reads their output weights.
        metrics: names of the metrics that are asked for.
        max_tokens: largest number of tokens kept per layer.
        model: the model around them.
        padding: how padding is known.
        warn_once: warns once of each kind of failure.
        shared: products of output weights that were formed for circuits.
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
        shared: SharedProducts,
    ) -> None:
        self._reader, self._shared = reader, shared
        self._sources = {METRICS[name].source for name in metrics}
        super().__init__(
            layers,
            max_tokens=max_tokens,
            model=model,
            padding=padding,
            warn_once=warn_once,
            reduce_slopes=head_slopes if IMPORTANCE in self._sources else None,
        )
        # Standard errors cost as much again as all the rest, so they are computed when asked for.
        self._needs_errors = any(name.endswith("_error") for name in metrics)
        self._needs_overlap = "head_output_overlap" in metrics

    def measure(self, absent: Absent, weights: Sequence[Measurement] = ()) -> list[Measurement]:
        """Measure the captures of one process.

        Args:
            absent: notes what cannot be measured.
            weights: measurements of weights at this reading.

        Returns:
            One measurement for each source and number of heads.
        """
        measured: dict[tuple[Any, ...], list[tuple[str, Any]]] = {}
        closest = closest_pairs(weights)
        for layer in self._layers.all:
            # Popped, so that the next layer reuses the memory of this one.
            capture = None if self._captures is None else self._captures.pop(layer.name, None)
            if capture is None:
                continue
            sequences = (capture.sequences, capture.num_sequences) if self._needs_errors else None
            device = capture.outputs.device
            with absent.unless_measured(COVARIANCE, layer.name), without_autocast(device):
                _require_two_tokens(capture)
                weight = self._reader.weight(layer, "output", Ranks())
                outputs = whole(capture.outputs)
                _require_numbers(weight, outputs)
                found: dict[str, Any] = {}
                if COVARIANCE in self._sources:
                    products = self._shared.take(layer.name, "output")
                    found[COVARIANCE] = head_covariance(
                        outputs, weight, weights=capture.weights, sequences=sequences, products=products
                    )
                if CONTRIBUTION in self._sources:
                    known: HeadCovariance | None = found.get(COVARIANCE)
                    sums = contribution_sums(outputs, weight, capture.weights, None if known is None else known.trace)
                    found[CONTRIBUTION] = HeadContribution.of(sums, not_finite(outputs, capture.weights, sums))
                slopes = self._slopes_of(layer, capture, absent)
                if slopes is not None:
                    importances = Importances.of(slopes, layer.num_key_heads)
                    found[IMPORTANCE] = importances.importance(closest.get(layer.name))
                for source, values in found.items():
                    kind = (source, layer.num_heads, layer.num_key_heads, device)
                    measured.setdefault(kind, []).append((layer.name, values))
        return [join(source, group) for (source, *_), group in measured.items()]

    def shares(self, layers: Sequence[AttentionLayer], ranks: Ranks, device: torch.device) -> list[Tensor]:
        """Mean head outputs of layers over the tokens of all ranks.

        Args:
            layers: those that any rank captures, the same on every rank.
            ranks: those that measure together.
            device: where they add up.

        Returns:
            One ``(H, d_v)`` for each layer; none if no forward was armed.
        """
        held = self._captures
        if held is None:  # on no rank
            return []
        parts: list[Tensor] = []
        with self._reader.gathers.planned(ranks, (gather for layer in layers for gather in self._gathered(layer))):
            for layer in layers:
                count = torch.zeros((), device=device)
                total = torch.zeros(layer.num_heads, layer.value_dim, device=device)
                if layer.name in held:
                    outputs = held[layer.name].outputs
                    own = self._whole(layer, outputs)
                    if is_first_holder(outputs):
                        found = count_and_total(own, held[layer.name].weights)
                        count, total = (tensor.to(device) for tensor in found)
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
        """Sums over this rank's tokens, centred by the mean of all ranks; zeros where it has none.

        Scatters are added up over the ranks here, some layers at a time, and one rank reduces each of them.

        Args:
            layers: as for `shares`.
            means: the result of `shares`.
            ranks: those that measure together; all of them call this.
            device: where they add up.
            absent: notes what cannot be measured.

        Returns:
            Sums to add up over ranks, one for each layer; none if no forward was armed, which is the same on all ranks.
        """
        if self._captures is None:
            return []
        here, taken = {layer.name for layer in self._tapped}, self._taken(ranks)
        shares = [
            _Share(layer, mean, layer.name in here, layer.name in taken and layer.name in here)
            for layer, mean in zip(layers, means)
        ]
        if not (self._needs_overlap and self._fits(layers, absent)):
            with self._reader.gathers.planned(ranks, self._gathered_of(shares, outputs=True, weights=True)):
                return [self._own(share, None, ranks, device, absent) for share in shares]
        sums: list[OutputSums] = []
        for part in in_rounds([_bytes_of_scatter(layer) for layer in layers]):
            sizes = [_bytes_of_scatter(layer) // 4 for layer in layers[part]]
            room = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
            scatters = torch.split(room, sizes)
            each = list(zip(shares[part], scatters))
            with self._reader.gathers.planned(ranks, self._gathered_of(shares[part], outputs=True)):
                found = [self._own(share, scatter, ranks, device, absent) for share, scatter in each]
            ranks.add_up(room)
            with self._reader.gathers.planned(ranks, self._gathered_of(shares[part], weights=True)):
                for (share, scatter), own in zip(each, found):
                    self._mix(own, share, scatter, ranks, absent)
            sums += found
        return sums

    def _gathered_of(
        self, shares: Sequence[_Share], *, outputs: bool = False, weights: bool = False
    ) -> Iterator[tuple[Hashable, Gather]]:
        """What `_own` or `_mix` gather."""
        for share in shares:
            if weights and share.is_here:
                yield from self._reader.gathered(share.layer, "output")
            if outputs and share.is_here:
                yield from self._gathered(share.layer)

    def _own(
        self, share: _Share, scatter: Tensor | None, ranks: Ranks, device: torch.device, absent: Absent
    ) -> OutputSums:
        """Sums over this rank's tokens of one layer; writes their scatter into `scatter`."""
        layer = share.layer
        found = OutputSums.zeros(layer, self._sources, device, with_overlap=scatter is not None)
        if not share.is_here:
            return found
        capture = None if self._captures is None else self._captures.get(layer.name)
        with absent.unless_measured(COVARIANCE, layer.name), without_autocast(device):
            # Both may be collective calls, so every rank makes them.
            weight = None if scatter is not None else self._reader.weight(layer, "output", ranks)
            outputs = None if capture is None else self._whole(layer, capture.outputs)
            if weight is not None and share.is_taken:
                found.add_mean(share.mean, weight)
            if capture is None or outputs is None or not is_first_holder(capture.outputs):
                return found
            if weight is not None:
                _require_numbers(weight, outputs)
            weights = capture.weights
            if found.covariance is not None:
                mean = share.mean.to(outputs.device)
                own = HeadSums.of(outputs, weight, mean, with_scatter=scatter is not None, weights=weights)
                if scatter is not None and own.scatter is not None:
                    scatter.copy_(own.scatter)
                found.covariance = replace(own, scatter=None)
            elif found.contribution is not None and weight is not None:
                found.contribution = contribution_sums(outputs, weight, weights)
            if found.not_finite is not None:
                found.not_finite = not_finite(outputs, weights).double()
            slopes = self._slopes_of(layer, capture, absent)
            if slopes is not None:
                found.importance = Importances.of(slopes, layer.num_key_heads)
                found.followed = torch.ones((), device=device)
        return found

    def _mix(self, sums: OutputSums, share: _Share, scatter: Tensor, ranks: Ranks, absent: Absent) -> None:
        """Multiply a scatter over all ranks by the output weight, on one of those that hold the layer."""
        if not share.is_here:
            return
        is_known = False
        with absent.unless_measured(COVARIANCE, share.layer.name), without_autocast(scatter.device):
            # On every rank: it may be a collective call.
            weight = self._reader.weight(share.layer, "output", ranks)
            if share.is_taken:
                _require_numbers(weight, share.mean)
                products = self._shared.take(share.layer.name, "output")
                sums.mix(scatter, share.mean, weight.to(scatter.device), products)
            is_known = True
        if share.is_taken and not is_known:
            sums.lose()

    def _taken(self, ranks: Ranks) -> set[str]:
        """Names of the layers whose weights this rank measures for its peers."""
        return {layer.name for place, layer in enumerate(self._layers.all) if ranks.takes(place)}

    def read_sums(
        self,
        layers: Sequence[AttentionLayer],
        kept: Sequence[bool],
        totals: Sequence[OutputSums],
        absent: Absent,
        weights: Sequence[Measurement] = (),
    ) -> list[Measurement]:
        """Measurements from sums over the ranks.

        Args:
            layers: as for `shares`.
            kept: whether the heads of each of them are established, not contradicted, on all ranks.
            totals: the result of `sums`, over all ranks, after `mix`.
            absent: notes what cannot be measured.
            weights: what was measured of weights at this reading.

        Returns:
            One measurement for each source and number of heads; none if no forward was armed, which is the same on all
            ranks.
        """
        if self._captures is None:
            return []
        measured: dict[tuple[Any, ...], list[tuple[str, Any]]] = {}
        closest = closest_pairs(weights)
        for layer, is_kept, total in zip(layers, kept, totals):
            if not is_kept:
                continue
            if total.covariance is not None:
                values: Any = total.covariance.covariance(total.squares)
                measured.setdefault((COVARIANCE, layer.num_heads), []).append((layer.name, values))
            contribution = total.contributions()
            if contribution is not None and total.not_finite is not None:
                values = HeadContribution.of(contribution, total.not_finite > 0)
                measured.setdefault((CONTRIBUTION, layer.num_heads), []).append((layer.name, values))
            if total.importance is not None and total.followed is not None:
                mean = total.importance.averaged(total.followed)
                values = mean.importance(closest.get(layer.name))
                measured.setdefault((IMPORTANCE, layer.num_heads, layer.num_key_heads), []).append((layer.name, values))
            if total.covariance is None:  # else its number of tokens shows whether other ranks have captured it
                absent.reasons.pop(outputs_of(layer.name), None)
        if self._needs_errors:
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
        """Return, the same on every rank, whether the scatters for the overlap of outputs fit into the budget."""
        size = sum(_bytes_of_scatter(layer) for layer in layers)
        budget = self._reader.memory_budget
        if size <= budget:
            return True
        reason = (
            f"over several ranks it adds up {size / 2**20:.0f} MiB, more than memory_budget={budget}: raise "
            "memory_budget, or leave `head_output_overlap` out of metrics"
        )
        absent.reasons.update({f"head_output_overlap/{layer.name}": reason for layer in layers})
        self._warn_once.warn("output overlap", f"`head_output_overlap` is absent: {reason}.")
        return False


def _bytes_of_scatter(layer: AttentionLayer) -> int:
    return 4 * HeadSums.scatter_size(layer.num_heads, layer.value_dim)


def in_rounds(sizes: Sequence[int]) -> Iterator[slice]:
    """Split layers into rounds of at most 4 MiB, or of one layer; depends on sizes alone.

    Args:
        sizes: bytes of each layer.

    Yields:
        Places of the layers of a round.
    """
    first, held = 0, 0
    for place, size in enumerate(sizes):
        if place > first and held + size > _ROUND:
            yield slice(first, place)
            first, held = place, 0
        held += size
    if sizes:
        yield slice(first, len(sizes))


def _require_numbers(weight: Tensor, outputs: Tensor) -> None:
    if weight.is_meta and not outputs.is_meta:
        raise HDIError("its output weight is on the meta device, which holds no numbers")


def _require_two_tokens(capture: Capture) -> None:
    if len(capture.outputs) < 2:
        raise HDIError(f"the armed forward had {len(capture.outputs)} tokens, and two are needed")
