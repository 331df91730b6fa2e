"""Measurements of armed forwards: sums over tokens or queries, which ranks add up, and what is made of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from hdi_callback.attention.capture import Captured
from hdi_callback.attention.layer import AttentionLayer
from hdi_callback.monitor.ranks import Ranks, failed, repeats_tokens
from hdi_callback.monitor.reading import Absent, Result, joined

_AT_ONCE = 2**24
"""Numbers in the sums of the layers that ranks add up at once."""


class SumSource(ABC):
    """A measurement of armed forwards.

    Attributes:
        name: one of `FORWARD_SOURCES`.
        reads: the field of `Captured` that it is computed from.
    """

    name: str
    reads: str

    def why_not(self, layer: AttentionLayer) -> str | None:
        """Say why a layer cannot be measured, by facts that are the same on every rank; `None` if it can."""
        return None

    def begin(  # noqa: B027
        self, layers: Sequence[AttentionLayer], captured: Mapping[str, Captured], ranks: Ranks
    ) -> None:
        """Exchange what `sums` needs to know of the other ranks; every rank calls it for the same layers."""

    @abstractmethod
    def sums(self, layer: AttentionLayer, captured: Captured) -> Any:
        """Compute the sums of this rank, a frozen dataclass of tensors."""

    @abstractmethod
    def blank(self, layer: AttentionLayer, device: torch.device) -> Any:
        """Make the sums over nothing, of the same shapes."""

    @abstractmethod
    def finish(self, layer: AttentionLayer, sums: Any) -> Any:
        """Make of the sums over all ranks what the catalogue reads."""

    def size(self, layer: AttentionLayer) -> int:
        """Return about how many numbers the sums of a layer hold."""
        return layer.num_heads**2


def measure_sums(
    source: SumSource, layers: Sequence[AttentionLayer], captured: Mapping[str, Captured], ranks: Ranks, absent: Absent
) -> list[Result]:
    """Measure one source of all layers, over all ranks.

    Args:
        source: what is measured.
        layers: what is watched.
        captured: layer -> what was captured on this rank.
        ranks: those that measure together; all of them call this.
        absent: takes the reasons of what cannot be measured.

    Returns:
        One result for each group of layers of one shape.
    """
    able = [layer for layer in layers if not _is_left_out(source, layer, captured, absent)]
    if ranks.size == 1:
        able = [layer for layer in able if has_captured(source, layer, captured)]
    found: dict[Any, dict[str, Any]] = {}
    for some in _chunks(able, source):
        source.begin(some, captured, ranks)
        sums = [_sums_of(source, layer, captured, ranks, absent) for layer in some]
        for layer, total in zip(some, ranks.add(sums)):
            # Of every layer and on every rank: it may gather a weight.
            with absent.unless([source.name], [layer.name]):
                values = source.finish(layer, total)
                shape = tuple((tensor.shape, tensor.device) for tensor in vars(values).values())
                found.setdefault(shape, {})[layer.name] = values
    return [Result(source.name, tuple(group), joined(list(group.values()))) for group in found.values()]


def _is_left_out(source: SumSource, layer: AttentionLayer, captured: Mapping[str, Captured], absent: Absent) -> bool:
    """Return whether no rank measures a layer; note why, or why this rank has nothing of it."""
    reason = source.why_not(layer)
    if reason is not None:
        absent.note(layer.name, source.name, reason)
    elif layer.name not in captured:
        absent.note(layer.name, source.name, "no forward was armed before this reading")
    elif not has_captured(source, layer, captured):
        why = captured[layer.name].reasons.get(source.reads, "the layer was not called in a forward that was armed")
        absent.note(layer.name, source.name, why)
    return reason is not None


def has_captured(source: SumSource, layer: AttentionLayer, captured: Mapping[str, Captured]) -> bool:
    """Return whether this rank has captured what a source is computed from."""
    found = getattr(captured.get(layer.name), source.reads, None)
    return found is not None and (isinstance(found, torch.Tensor) or len(found) > 0)


def _sums_of(
    source: SumSource, layer: AttentionLayer, captured: Mapping[str, Captured], ranks: Ranks, absent: Absent
) -> Any:
    """The sums of this rank; nothing, or NaN if they cannot be computed, in the same shapes."""
    if layer.name in captured and source.reads in captured[layer.name].failed:
        return failed(source.blank(layer, ranks.device))
    if not has_captured(source, layer, captured) or (ranks.size > 1 and repeats_tokens(layer)):
        return source.blank(layer, ranks.device)
    sums = None
    with absent.unless([source.name], [layer.name]):
        sums = source.sums(layer, captured[layer.name])
    return failed(source.blank(layer, ranks.device)) if sums is None else sums


def _chunks(layers: Sequence[AttentionLayer], source: SumSource) -> Iterator[list[AttentionLayer]]:
    """Cut layers into lists whose sums are in memory together, alike on every rank."""
    some: list[AttentionLayer] = []
    size = 0
    for layer in layers:
        if some and size + source.size(layer) > _AT_ONCE:
            yield some
            some, size = [], 0
        some.append(layer)
        size += source.size(layer)
    if some:
        yield some
