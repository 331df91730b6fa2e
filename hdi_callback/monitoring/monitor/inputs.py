"""The input tokens of layers, and the keys made of them: measured alone or with other ranks."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from hdi_callback.attention import AttentionLayer
from hdi_callback.attention.autocast import without_autocast
from hdi_callback.attention.capture.inputs import layers_of_inputs, tap_inputs
from hdi_callback.attention.capture.padding import PaddingChoice
from hdi_callback.attention.layer.sharding import is_first_holder, is_part
from hdi_callback.core import HeadDiversity, head_diversity_from_covariance
from hdi_callback.core.tensors import may_decide_on_host
from hdi_callback.monitoring.absent import FOUND_LATE, Absent, absence_of
from hdi_callback.monitoring.layers import WatchedLayers
from hdi_callback.monitoring.metrics import KEYS, TOKENS
from hdi_callback.monitoring.monitor.collected import Collected
from hdi_callback.monitoring.monitor.gathers import Gather
from hdi_callback.monitoring.monitor.input_mean import InputMean, InputSums
from hdi_callback.monitoring.monitor.join import join
from hdi_callback.monitoring.monitor.outputs import in_rounds
from hdi_callback.monitoring.monitor.rotation import LayerRotation
from hdi_callback.monitoring.monitor.weights import WeightReader
from hdi_callback.monitoring.ranks import Ranks
from hdi_callback.monitoring.readings import Measurement

SOURCES = (KEYS, TOKENS)
"""Sources that are measured on the inputs of layers."""


class LayerInputs(Collected):
    """Capture the input tokens of layers, and measure them.

    Args:
        layers: the layers that are watched.
        reader: reads their key weights.
        sources: which of `SOURCES` are asked for.
        max_tokens: largest number of tokens kept per layer.
        model: the model around them.
        padding: how padding is known.
        rank_tol: see `head_diversity_from_covariance`.
        rotation: which layers a reading skips.
    """

    def __init__(
        self,
        layers: WatchedLayers,
        reader: WeightReader,
        sources: Collection[str],
        *,
        max_tokens: int,
        model: nn.Module,
        padding: PaddingChoice,
        rank_tol: float,
        rotation: LayerRotation,
    ) -> None:
        self._rotation = rotation
        self.taps, self._why_not = tap_inputs(layers.all, max_tokens=max_tokens, model=model, padding=padding)
        self._layers, self._reader, self._rank_tol = layers, reader, rank_tol
        self._sources = [source for source in SOURCES if source in sources]
        self._tap()

    def _tap(self) -> None:
        without = {*self._why_not, *self.taps.absent}
        self._tapped = [layer for layer in self._layers.all if layer.name not in without]

    def begin(self) -> None:
        """Skip, at the reading that is armed next, the layers whose turn comes later."""
        # Where keys are measured, their sums give the statistics of tokens as well.
        self.taps.passed_over = self._rotation.skipped(TOKENS) if KEYS not in self._sources else frozenset()

    def add(self, layers: Sequence[AttentionLayer], absent: Absent) -> None:
        """Capture the inputs of further layers from the next armed forward on.

        Args:
            layers: layers with names of their own.
            absent: notes what this reading lacks of them.
        """
        tapped, why_not = layers_of_inputs(layers)
        self.taps.add(tapped)
        self._why_not |= why_not
        self._tap()
        for layer in layers:
            why = self._why_not.get(layer.name, self.taps.absent.get(layer.name, FOUND_LATE))
            absent.reasons.update(
                {absence_of(source, layer.name): f"they are not known: {why}" for source in self._sources}
            )

    def collect(self, absent: Absent) -> None:
        """Collect the captures for the next measurement.

        Args:
            absent: notes what was not captured.
        """
        self.taps.disarm()
        self._captures = None
        if self.taps.was_armed:
            self._captures = dict(self.taps.captures)
            reasons = {
                **self._why_not,
                **dict.fromkeys(self.taps.missed, "no call of its key projection was captured"),
                **self.taps.absent,
            }
            for layer in self._layers.all:
                # None: the layer was found in this very forward, which `add` has noted.
                why = reasons.get(layer.name)
                if why is not None and layer.name not in {*self._captures, *self._layers.removed}:
                    for source in self._sources:
                        absent.leave_out(absence_of(source, layer.name), f"they are not known: {why}", f"inputs {why}")
        self.taps.release()

    def measure(
        self,
        layers: Sequence[AttentionLayer],
        left_out: Collection[str],
        ranks: Ranks,
        device: torch.device,
        absent: Absent,
    ) -> list[Measurement]:
        """Measure the captures of all ranks together.

        Args:
            layers: those that any rank captures, the same on every rank.
            left_out: names of those whose heads are contradicted.
            ranks: those that measure together; all of them call this. Memory is bounded to one layer at a time.
            device: the device of the sums.
            absent: notes what cannot be measured.

        Returns:
            Measurements; none if no forward was armed, which is the same on all ranks.
        """
        if self._captures is None:
            return []
        layers = [layer for layer in layers if layer.name not in self.taps.passed_over]
        if ranks.size == 1:
            layers = self._whole_here(layers, absent)
        means = []
        if ranks.size > 1:
            with self._reader.gathers.planned(ranks, (gather for layer in layers for gather in self._gathered(layer))):
                means = [_mean_of(layer, self._tokens_of(layer, device), device) for layer in layers]
        added = iter(ranks.sum([tensor for mean in means for tensor in mean.tensors()], device))
        pooled = [InputMean(*(next(added) for _ in mean.tensors())) for mean in means]
        measured: dict[tuple[Any, ...], list[tuple[str, Any]]] = {}
        with self._reader.gathers.planned(ranks, self._gathered_of(layers)):
            for part in self._rounds(layers, ranks):
                with without_autocast(device):
                    each = self._add_up(layers[part], pooled[part], ranks, device)
                for layer, (is_held, sums, scatter) in zip(layers[part], each):
                    for source, values in self._measure_one(layer, sums, scatter, ranks, device, absent):
                        if is_held and layer.name not in left_out:
                            measured.setdefault((source, layer.num_key_heads), []).append((layer.name, values))
        return [join(source, group) for (source, _), group in measured.items()]

    def _gathered_of(self, layers: Sequence[AttentionLayer]) -> Iterator[tuple[Hashable, Gather]]:
        """What `_tokens_of` and `_measure_one` gather."""
        here = {layer.name for layer in self._tapped}
        for layer in layers:
            yield from self._gathered(layer)
            if KEYS in self._sources and layer.name in here:
                yield from self._reader.gathered(layer, "key")

    def _whole_here(self, layers: Sequence[AttentionLayer], absent: Absent) -> list[AttentionLayer]:
        """Leave out layers whose tokens other ranks hold parts of, as these take no readings with this one."""
        captures = {} if self._captures is None else self._captures
        parts = {name for name, capture in captures.items() if is_part(capture.outputs)}
        why = "other ranks hold parts of them, and they take no readings with this one"
        for name in parts:
            absent.reasons.update({absence_of(source, name): f"they are not known: {why}" for source in self._sources})
        return [layer for layer in layers if layer.name not in parts]

    def _rounds(self, layers: Sequence[AttentionLayer], ranks: Ranks) -> Iterator[slice]:
        """The layers whose scatters are added up over the ranks in one call, as each call waits for all of them."""
        if ranks.size == 1 or KEYS in self._sources:
            return (slice(place, place + 1) for place in range(len(layers)))
        return in_rounds([InputSums.bytes_of_scatter(_width(layer)) for layer in layers])

    def _add_up(
        self, layers: Sequence[AttentionLayer], means: Sequence[InputMean], ranks: Ranks, device: torch.device
    ) -> list[tuple[bool, InputSums, Tensor | None]]:
        """For each layer whether there are tokens, their sums, and their scatter where keys need it."""
        if ranks.size == 1 or KEYS in self._sources:
            found = []
            for place, layer in enumerate(layers):
                held = self._tokens_of(layer, device)
                mean = means[place] if means else None
                found.append((ranks.size > 1 or held is not None, *self._sums_of(layer, mean, held, ranks, device)))
            return found
        scatters = [
            InputSums.scatter_of(mean, _rows_of(layer, mean, self._tokens_of(layer, device), device))
            for layer, mean in zip(layers, means)
        ]
        room = torch.cat(scatters) if len(scatters) > 1 else scatters[0]
        ranks.add_up(room)
        halves = torch.split(room, [one.numel() for one in scatters])
        return [(True, InputSums.of_scatter(mean, half), None) for mean, half in zip(means, halves)]

    def _sums_of(
        self,
        layer: AttentionLayer,
        mean: InputMean | None,
        held: tuple[Tensor, Tensor] | None,
        ranks: Ranks,
        device: torch.device,
    ) -> tuple[InputSums, Tensor | None]:
        """Sums over the tokens of a layer, and their scatter where keys need it."""
        is_of_tokens_alone = ranks.size == 1 and KEYS not in self._sources  # inner products give the same statistics
        if is_of_tokens_alone and held is not None and may_decide_on_host(held[0]):
            found = InputSums.in_single(*held)
            if found is not None:
                return found, None
        mean = _mean_of(layer, held, device) if mean is None else mean
        rows = _rows_of(layer, mean, held, device)
        if is_of_tokens_alone:
            return InputSums.of_rows(mean, rows, torch.zeros(0) if held is None else held[1]), None
        (scatter,) = ranks.sum([rows.mT @ rows], device)
        return InputSums(mean, scatter.diagonal().sum(), scatter.square().sum()), scatter

    def _measure_one(
        self,
        layer: AttentionLayer,
        sums: InputSums,
        scatter: Tensor | None,
        ranks: Ranks,
        device: torch.device,
        absent: Absent,
    ) -> Iterator[tuple[str, Any]]:
        is_here = any(tapped.name == layer.name for tapped in self._tapped)
        for source in self._sources:
            found: Any = None
            with absent.unless_measured(source, layer.name), without_autocast(device):
                if source == TOKENS:
                    self._layers.require(layer)
                    found = sums.spread()
                elif is_here and scatter is not None:
                    weight = self._reader.weight(layer, "key", ranks).to(device, torch.float64)
                    maps = weight.flatten(0, 1)
                    covariance = (maps @ scatter @ maps.mT) / sums.mean.count
                    G, d_k = weight.shape[:2]
                    found = head_diversity_from_covariance(covariance.reshape(G, d_k, G, d_k), rank_tol=self._rank_tol)
            if source == KEYS and len(ranks.peers) < ranks.size:
                found = self._from_holders(layer, found, is_here, ranks, device)
            if found is not None:
                yield source, found

    def _from_holders(
        self, layer: AttentionLayer, found: Any, is_here: bool, ranks: Ranks, device: torch.device
    ) -> HeadDiversity:
        """Send the result of the first rank that holds a layer to all ranks; NaN if it could not measure."""
        G, d_k = layer.num_key_heads, layer.head_dim
        blank = head_diversity_from_covariance(torch.empty(G, d_k, G, d_k, dtype=torch.float64, device="meta"))
        blanks = {item.name: getattr(blank, item.name) for item in fields(blank)}
        parts = [torch.zeros(tensor.shape, dtype=torch.float64, device=device) for tensor in blanks.values()]
        if is_here and ranks.takes(0):
            for name, part in zip(blanks, parts):
                lost = torch.nan if blanks[name].is_floating_point() else -1
                part.copy_(getattr(found, name) if found is not None else torch.full_like(part, lost))
        added = ranks.sum(parts, device)
        return replace(blank, **{name: one.to(blanks[name].dtype) for name, one in zip(blanks, added)})

    def _tokens_of(self, layer: AttentionLayer, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """The captured tokens of a layer, ``(n, d)``, and their weights; `None` if this rank has none."""
        capture = None if self._captures is None else self._captures.get(layer.name)
        if capture is None:
            return None
        tokens = self._whole(layer, capture.outputs)
        if not is_first_holder(capture.outputs):
            return None
        tokens = tokens[:, 0].to(device, torch.promote_types(tokens.dtype, torch.float32))
        if capture.weights is None:
            return tokens, torch.ones(len(tokens), dtype=torch.float64, device=device)
        weights = capture.weights.to(device, torch.float64)
        return torch.where(weights[:, None] == 0, 0, tokens), weights  # padding may hold anything


def _mean_of(layer: AttentionLayer, held: tuple[Tensor, Tensor] | None, device: torch.device) -> InputMean:
    return InputMean.none(_width(layer), device) if held is None else InputMean.of(held[0].double(), held[1])


def _rows_of(
    layer: AttentionLayer, mean: InputMean, held: tuple[Tensor, Tensor] | None, device: torch.device
) -> Tensor:
    """The tokens of this rank, centred, times the roots of their weights: ``(n, d)``, float64."""
    if held is None:
        return torch.zeros(0, _width(layer), dtype=torch.float64, device=device)
    tokens, weights = held
    return (tokens.double() - mean.total / mean.count.clamp_min(1)).mul_(weights.sqrt()[:, None])


def _width(layer: AttentionLayer) -> int:
    return layer.slices["key"].in_features
