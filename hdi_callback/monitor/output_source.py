"""What heads put out, and the tokens that come into a layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hdi_callback.attention.capture.capture import Captured
from hdi_callback.attention.layer import AttentionLayer
from hdi_callback.core.covariance import (
    CovarianceSums,
    HeadCovariance,
    OutputMoments,
    count_and_total,
    covariance_from,
    covariance_sums,
    outputs_not_finite,
)
from hdi_callback.core.tokens import TokenSpread, TokenSums, token_metrics
from hdi_callback.monitor.metrics import FINITE_OUTPUTS, OUTPUTS, TOKENS
from hdi_callback.monitor.ranks import Ranks
from hdi_callback.monitor.reading import apart, stacked
from hdi_callback.monitor.sums import SumSource, has_captured
from hdi_callback.monitor.weight_source import NotFiniteCounts


class OutputCovariance(SumSource):
    """Covariance of the heads' contributions to the output, and their overlap before the output projection."""

    name, reads, fields = OUTPUTS, "outputs", ("outputs", "valid")

    def __init__(self) -> None:
        self._centres: dict[str, Tensor] = {}

    def why_not(self, layer: AttentionLayer) -> str | None:
        return None if "output" in layer.weights else "the layer has no output weight of its own"

    def begin(self, layers: Sequence[AttentionLayer], captured: Mapping[str, Captured], ranks: Ranks) -> None:
        """Compute the mean outputs over all ranks, about which second moments add up without losing digits."""
        self._centres = _centres(self, layers, captured, ranks, lambda layer: (layer.num_heads, layer.value_dim))

    def sums(self, layers: Sequence[AttentionLayer], captured: Sequence[Captured]) -> list[OutputMoments]:
        outputs, valid = _stacked([_outputs(of_layer) for of_layer in captured])
        centres = [self._centres[layer.name] for layer in layers if layer.name in self._centres]
        return apart(OutputMoments.from_tokens(outputs, valid, centre=stacked(centres) if centres else None))

    def blank(self, layer: AttentionLayer, device: torch.device) -> OutputMoments:
        zeros = OutputMoments.zeros(layer.num_heads, layer.value_dim, device)
        return replace(zeros, centre=self._centres.get(layer.name, zeros.centre))

    def weight(self, layer: AttentionLayer) -> Tensor:
        return layer.weight("output").detach()

    def reduce(self, sums: OutputMoments, weight: Tensor | None) -> CovarianceSums:
        assert weight is not None
        return covariance_sums(sums, weight)

    def finish(self, sums: CovarianceSums) -> HeadCovariance:
        return covariance_from(sums)

    def size(self, layer: AttentionLayer) -> int:
        return (layer.num_heads * layer.value_dim) ** 2


@dataclass(frozen=True)
class FinitenessSums:
    """On how many ranks heads were read, and have outputs that are not finite, ``(layers, H)``."""

    ranks: Tensor
    not_finite: Tensor


class OutputFiniteness(SumSource):
    """Heads with outputs that are NaN or infinite."""

    name, reads, fields = FINITE_OUTPUTS, "outputs", ("outputs", "valid")

    def sums(self, layers: Sequence[AttentionLayer], captured: Sequence[Captured]) -> list[FinitenessSums]:
        not_finite = outputs_not_finite(*_stacked([_outputs(of_layer) for of_layer in captured])).float()
        return apart(FinitenessSums(torch.ones_like(not_finite), not_finite))

    def blank(self, layer: AttentionLayer, device: torch.device) -> FinitenessSums:
        return FinitenessSums(*torch.zeros(2, layer.num_heads, device=device))

    def finish(self, sums: FinitenessSums) -> NotFiniteCounts:
        return NotFiniteCounts(torch.where(sums.ranks == 0, torch.nan, sums.not_finite.clamp(max=1)))


class InputTokens(SumSource):
    """Mean cosine and effective rank of a layer's input tokens."""

    name, reads, fields = TOKENS, "inputs", ("inputs", "inputs_valid")

    def __init__(self, *, with_rank: bool) -> None:
        self._with_rank = with_rank
        self._centres: dict[str, Tensor] = {}

    def why_not(self, layer: AttentionLayer) -> str | None:
        return None if "key" in layer.weights else "the width of its input is not known"

    def begin(self, layers: Sequence[AttentionLayer], captured: Mapping[str, Captured], ranks: Ranks) -> None:
        """Compute the mean token over all ranks, if the effective rank is measured."""
        if self._with_rank:
            self._centres = _centres(self, layers, captured, ranks, lambda layer: (1, _width(layer)))

    def sums(self, layers: Sequence[AttentionLayer], captured: Sequence[Captured]) -> list[TokenSums]:
        inputs, valid = _stacked([_inputs(of_layer) for of_layer in captured])
        centres = [self._centres[layer.name][0] for layer in layers if layer.name in self._centres]
        centre = stacked(centres) if centres else None
        return apart(TokenSums.from_tokens(inputs[:, :, 0], valid, centre=centre, with_rank=self._with_rank))

    def blank(self, layer: AttentionLayer, device: torch.device) -> TokenSums:
        return TokenSums.zeros(_width(layer), device, with_rank=self._with_rank)

    def reduce(self, sums: TokenSums, weight: Tensor | None) -> TokenSpread:
        return token_metrics(sums)

    def size(self, layer: AttentionLayer) -> int:
        return _width(layer) ** (2 if self._with_rank else 1)


def _width(layer: AttentionLayer) -> int:
    return layer.weights["key"].in_features


def _outputs(captured: Captured) -> tuple[Tensor, Tensor | None]:
    assert captured.outputs is not None
    return captured.outputs, captured.valid


def _inputs(captured: Captured) -> tuple[Tensor, Tensor | None]:
    assert captured.inputs is not None
    return captured.inputs[:, None], captured.inputs_valid


def _stacked(samples: Sequence[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    """Stack tokens of layers, and which of them count."""
    valid = [mask for _, mask in samples if mask is not None]
    return stacked([tokens for tokens, _ in samples]), stacked(valid) if valid else None


def _centres(
    source: OutputCovariance | InputTokens,
    layers: Sequence[AttentionLayer],
    captured: Mapping[str, Captured],
    ranks: Ranks,
    shape: Callable[[AttentionLayer], tuple[int, int]],
) -> dict[str, Tensor]:
    """Return the mean over the tokens of all ranks; nothing for one process, whose sums are about their own mean."""
    if ranks.size == 1:
        return {}
    read = _outputs if isinstance(source, OutputCovariance) else _inputs
    parts = []
    for layer in layers:
        count, total = torch.zeros((), device=ranks.device), torch.zeros(shape(layer), device=ranks.device)
        if has_captured(source, layer, captured):
            try:
                count, total = count_and_total(*read(captured[layer.name]))
            except Exception:  # other ranks wait for these sums; `sums` fails likewise, and notes the reason
                total = torch.full_like(total, torch.nan)
        parts += [count, total]
    added = ranks.sum(parts)
    return {layer.name: total / count.clamp_min(1) for layer, count, total in zip(layers, added[::2], added[1::2])}
