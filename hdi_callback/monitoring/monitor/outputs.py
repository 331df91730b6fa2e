"""`HeadOutputs`: what is measured on captured head outputs, alone or with other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hdi_callback.attention import AttentionLayer, Capture
from hdi_callback.attention.autocast import without_autocast
from hdi_callback.attention.padding import PaddingChoice
from hdi_callback.attention.sharding import is_first_holder, whole
from hdi_callback.core import HeadCovariance, head_covariance
from hdi_callback.core.contribution import ContributionSums, head_slopes
from hdi_callback.core.covariance import HeadSums, count_and_total
from hdi_callback.errors import HDIError
from hdi_callback.monitoring.absent import Absent, absence_of
from hdi_callback.monitoring.layers import WatchedLayers
from hdi_callback.monitoring.metrics import CONTRIBUTION, COVARIANCE, IMPORTANCE, METRICS
from hdi_callback.monitoring.monitor.contributions import HeadContribution, contribution_sums, not_finite
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
"""What is measured on head outputs."""

_LARGE = 512
"""Features of the head outputs of a layer from which on to multiply on every rank costs more than one more sum."""


class HeadOutputs(OutputCapture):
    """Measure what heads put out in the armed forwards of one step.

    Args:
        layers: the layers that are watched.
        reader: reads their output weights.
        metrics: names of the metrics that are asked for.
        max_tokens: largest number of tokens kept per layer.
        model: the model around them.
        padding: how padding is known.
        warn_once: turns what goes wrong into one warning.
        shared: holds products of output weights that were formed for circuits.
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
        self._wants_errors = any(name.endswith("_error") for name in metrics)
        self._wants_overlap = "head_output_overlap" in metrics

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
            # Taken out, so that the next layer is measured in the memory that this one leaves.
            capture = None if self._captures is None else self._captures.pop(layer.name, None)
            if capture is None:
                continue
            sequences = (capture.sequences, capture.num_sequences) if self._wants_errors else None
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
                own = whole(outputs)
                if is_first_holder(outputs):
                    found = count_and_total(own, held[layer.name].weights)
                    count, total = (one.to(device) for one in found)
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
    ) -> tuple[list[OutputSums], Tensor]:
        """Add up the tokens at hand about the mean of all; zeros where there are none.

        Args:
            layers: as for `shares`.
            means: what `shares` gave.
            ranks: those that measure together.
            device: where they add up.
            absent: takes what cannot be measured.

        Returns:
            One for each layer; and the memory of all their scatters, in float32, which is to be added up beside them.
        """
        held, here = self._captures or {}, {layer.name for layer in self._tapped}
        sums = []
        with_scatter = self._wants_overlap and self._fits(layers, absent)
        sizes = [HeadSums.scatter_size(layer.num_heads, layer.value_dim) * with_scatter for layer in layers]
        scatters = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
        is_mixed_later = self._is_mixed_later(layers, with_scatter=with_scatter)
        taken = self._taken(ranks)
        for layer, mean, scatter in zip(layers, means, torch.split(scatters, sizes)):
            found = OutputSums.zeros(layer, self._sources, device, scatter=scatter if with_scatter else None)
            sums.append(found)
            if layer.name not in here:
                continue
            with absent.unless_measured(COVARIANCE, layer.name), without_autocast(device):
                # Both may be collective calls, so that every rank makes them.
                weight = None if is_mixed_later else self._reader.weight(layer, "output", ranks)
                outputs = whole(held[layer.name].outputs) if layer.name in held else None
                if weight is not None and layer.name in taken and COVARIANCE in self._sources:
                    self._add_mean(found, mean, weight)
                if outputs is not None and is_first_holder(held[layer.name].outputs):
                    if weight is not None:
                        _require_numbers(weight, outputs)
                    weights = held[layer.name].weights
                    if found.covariance is not None:
                        own = HeadSums.of(
                            outputs, weight, mean.to(outputs.device), with_scatter=with_scatter, weights=weights
                        )
                        if own.scatter is not None:
                            scatter.copy_(own.scatter)
                        found.covariance = replace(own, scatter=found.covariance.scatter)
                    elif found.contribution is not None and weight is not None:
                        found.contribution = contribution_sums(outputs, weight, weights)
                    if found.not_finite is not None:
                        found.not_finite = not_finite(outputs, weights).double()
                    slopes = self._slopes_of(layer, held[layer.name], absent)
                    if slopes is not None:
                        found.importance = Importances.of(slopes, layer.num_key_heads)
                        found.followed = torch.ones((), device=device)
                del weight, outputs
        return sums, scatters

    def mix(
        self,
        layers: Sequence[AttentionLayer],
        means: Sequence[Tensor],
        totals: Sequence[OutputSums],
        ranks: Ranks,
        device: torch.device,
        absent: Absent,
    ) -> None:
        """Multiply large scatters by output weights once they are added up, each layer on one of its ranks.

        Below `_LARGE` every rank has multiplied its own, as that costs less than one more sum. Which it is follows
        from the sizes of the layers, the same on every rank.

        Args:
            layers: as for `shares`.
            means: what `shares` gave.
            totals: of each layer, over all ranks; what is computed is put there.
            ranks: those that measure together; all of them call this.
            device: where they add up.
            absent: takes what cannot be measured.
        """
        scatters = [None if total.covariance is None else total.covariance.scatter for total in totals]
        with_scatter = any(scatter is not None for scatter in scatters)
        if not self._is_mixed_later(layers, with_scatter=with_scatter) or self._captures is None:
            return
        taken, here = self._taken(ranks), {layer.name for layer in self._tapped}
        parts: list[list[Tensor]] = []
        for layer, mean, total in zip(layers, means, totals):
            assert total.covariance is not None
            lost = torch.nan if layer.name in taken else 0.0
            mine = OutputSums.zeros(layer, self._sources, device, scatter=None).mean_and_products()
            parts.append([torch.full_like(one, lost) for one in mine])
            if layer.name not in here:
                continue
            with absent.unless_measured(COVARIANCE, layer.name), without_autocast(device):
                weight = self._reader.weight(layer, "output", ranks)  # on every rank, as it may be a collective call
                if layer.name in taken:
                    _require_numbers(weight, mean)
                    known = self._shared.take(layer.name, "output")
                    total.covariance = total.covariance.mixed(weight.to(device), known)
                    self._add_mean(total, mean, weight)
                    parts[-1] = total.mean_and_products()
                del weight
        added = iter(ranks.sum([one for part in parts for one in part], device))
        for total in totals:
            total.take_mean_and_products(added)

    def _taken(self, ranks: Ranks) -> set[str]:
        """Name the layers whose weights this rank measures, of those that it and its peers hold."""
        return {layer.name for place, layer in enumerate(self._layers.all) if ranks.takes(place)}

    def _is_mixed_later(self, layers: Sequence[AttentionLayer], *, with_scatter: bool) -> bool:
        is_large = any(layer.num_heads * layer.value_dim >= _LARGE for layer in layers)
        return with_scatter and is_large and COVARIANCE in self._sources

    def _add_mean(self, sums: OutputSums, mean: Tensor, weight: Tensor) -> None:
        """Add what the mean token contributes."""
        if sums.contribution is not None:
            wide = torch.promote_types(weight.dtype, torch.float32)
            heads = (mean.to(weight.device, wide)[:, None, :] @ weight.to(wide))[:, 0].to(mean.device, torch.float64)
            squares = heads.square().sum(-1), heads.sum(0).square().sum()
            sums.contribution = ContributionSums(torch.zeros_like(squares[1]), *squares)

    def read_sums(
        self,
        layers: Sequence[AttentionLayer],
        kept: Sequence[bool],
        totals: Sequence[OutputSums],
        absent: Absent,
        weights: Sequence[Measurement] = (),
    ) -> list[Measurement]:
        """Measure what was added up over the ranks.

        Args:
            layers: as for `shares`.
            kept: whether the heads of each of them are what was claimed, on all ranks.
            totals: what `sums` gave, over all ranks, after `mix`.
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
        for layer, is_kept, total in zip(layers, kept, totals):
            if not is_kept:
                continue
            if total.covariance is not None:
                values: Any = total.covariance.covariance()
                measured.setdefault((COVARIANCE, layer.num_heads), []).append((layer.name, values))
            contribution = total.contributions()
            if contribution is not None and total.not_finite is not None:
                values = HeadContribution.of(contribution, total.not_finite > 0)
                measured.setdefault((CONTRIBUTION, layer.num_heads), []).append((layer.name, values))
            if total.importance is not None and total.followed is not None:
                mean = total.importance.averaged(total.followed)
                values = mean.importance(closest.get(layer.name))
                measured.setdefault((IMPORTANCE, layer.num_heads, layer.num_key_heads), []).append((layer.name, values))
            if total.covariance is None:  # else its tokens tell whether other ranks have captured it
                absent.reasons.pop(outputs_of(layer.name), None)
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
        size = sum(4 * HeadSums.scatter_size(layer.num_heads, layer.value_dim) for layer in layers)
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


def _require_numbers(weight: Tensor, outputs: Tensor) -> None:
    if weight.is_meta and not outputs.is_meta:
        raise HDIError("its output weight is on the meta device, which holds no numbers")


def _require_two_tokens(capture: Capture) -> None:
    if len(capture.outputs) < 2:
        raise HDIError(f"the armed forward had {len(capture.outputs)} tokens, and two are needed")
