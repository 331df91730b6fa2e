"""Measurements of armed forwards: sums over tokens or queries, which ranks add up, and what is made of them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hdi_callback.attention.capture import Captured
from hdi_callback.attention.layer import AttentionLayer
from hdi_callback.monitor.ranks import Ranks, failed, repeats_tokens
from hdi_callback.monitor.reading import Absent, Result, joined, stacked

_AT_ONCE = 2**24
"""Numbers in the sums of the layers that ranks add up at once, and in what is stacked."""

_AT_ONCE_ON_CPU = 2**19
"""Numbers that are stacked on a CPU, whose cache would not hold more."""


class SumSource(ABC):
    """A measurement of armed forwards.

    Attributes:
        name: one of `FORWARD_SOURCES`.
        reads: the field of `Captured` that it is computed from.
        taken: the fields of `Captured` that `sums` stacks.
    """

    name: str
    reads: str
    taken: tuple[str, ...] = ()

    def why_not(self, layer: AttentionLayer) -> str | None:
        """Return why a layer cannot be measured, by facts that are the same on every rank; `None` if it can."""
        return None

    def begin(  # noqa: B027
        self, layers: Sequence[AttentionLayer], captured: Mapping[str, Captured], ranks: Ranks
    ) -> None:
        """Exchange the facts that `sums` needs of the other ranks; every rank calls it for the same layers."""

    @abstractmethod
    def sums(self, layers: Sequence[AttentionLayer], captured: Sequence[Captured]) -> Sequence[Any]:
        """Compute the sums of this rank for layers of one shape, a frozen dataclass of tensors for each."""

    @abstractmethod
    def blank(self, layer: AttentionLayer, device: torch.device) -> Any:
        """Return sums over nothing, of the same shapes."""

    def weight(self, layer: AttentionLayer) -> Tensor | None:
        """Return the weight that `reduce` takes, on every rank, as it may be gathered."""
        return None

    def reduce(self, sums: Any, weight: Tensor | None) -> Any:
        """Reduce the stacked sums of layers of one shape to a size for the host."""
        return sums

    def finish(self, sums: Any) -> Any:
        """Turn reduced sums, on the host, into the record that the catalogue reads."""
        return sums

    def size(self, layer: AttentionLayer) -> int:
        """Return about how many numbers the sums of a layer hold."""
        return layer.num_heads**2


NOT_ARMED = "no forward was armed before this reading"
"""Why a reading has nothing of forwards, such as the last one of a run, which reads the final weights."""


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
    results = []
    for some in _chunks(able, source):
        source.begin(some, captured, ranks)
        own = _sums_of(source, some, captured, ranks, absent)
        groups: dict[Any, list[tuple[str, Any, Tensor | None]]] = {}
        for layer, total in zip(some, ranks.add([own[layer.name] for layer in some])):
            with absent.unless([source.name], [layer.name]):
                weight = source.weight(layer)
                tensors = [*vars(total).values(), *([] if weight is None else [weight])]
                shape = tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in tensors)
                groups.setdefault(shape, []).append((layer.name, total, weight))
        for group in groups.values():
            names, totals, weights = zip(*group)
            with absent.unless([source.name], names):
                sums = source.reduce(joined(totals), None if weights[0] is None else stacked(weights))
                results.append(Result(source.name, names, sums, source.finish))
    return results


def _is_left_out(source: SumSource, layer: AttentionLayer, captured: Mapping[str, Captured], absent: Absent) -> bool:
    """Return whether no rank measures a layer; note why, or why this rank has nothing of it."""
    reason = source.why_not(layer)
    if reason is not None:
        absent.note(layer.name, source.name, reason)
    elif layer.name not in captured:
        absent.note(layer.name, source.name, NOT_ARMED)
    elif not has_captured(source, layer, captured):
        why = captured[layer.name].reasons.get(source.reads, "the layer was not called in a forward that was armed")
        absent.note(layer.name, source.name, why)
    return reason is not None


def has_captured(source: SumSource, layer: AttentionLayer, captured: Mapping[str, Captured]) -> bool:
    """Return whether this rank has captured the tensors of a source."""
    value = getattr(captured.get(layer.name), source.reads, None)
    return value is not None and (isinstance(value, torch.Tensor) or len(value) > 0)


def _sums_of(
    source: SumSource,
    layers: Sequence[AttentionLayer],
    captured: Mapping[str, Captured],
    ranks: Ranks,
    absent: Absent,
) -> dict[str, Any]:
    """The sums of this rank; nothing, or NaN if they cannot be computed, in the same shapes."""
    sums: dict[str, Any] = {}
    groups: dict[Any, list[AttentionLayer]] = {}
    for layer in layers:
        if layer.name in captured and source.reads in captured[layer.name].failed:
            continue
        if not has_captured(source, layer, captured) or (ranks.size > 1 and repeats_tokens(layer)):
            sums[layer.name] = source.blank(layer, ranks.device)
        else:
            groups.setdefault(_shape(source, captured[layer.name]), []).append(layer)
    for shape, group in groups.items():
        size, _, device = shape[0] if shape else ((), None, ranks.device)
        at_once = _AT_ONCE_ON_CPU if device.type == "cpu" else _AT_ONCE
        for some in _split(group, max(1, at_once // max(1, math.prod(size)))):
            with absent.unless([source.name], [layer.name for layer in some]):
                totals = source.sums(some, [captured[layer.name] for layer in some])
                sums |= {layer.name: total for layer, total in zip(some, totals)}
    return {
        layer.name: sums[layer.name] if layer.name in sums else failed(source.blank(layer, ranks.device))
        for layer in layers
    }


def _shape(source: SumSource, captured: Captured) -> tuple[Any, ...]:
    """Return shapes, types and devices that layers must share to be stacked."""
    tensors = [getattr(captured, name) for name in source.taken]
    return tuple(None if tensor is None else (tensor.shape, tensor.dtype, tensor.device) for tensor in tensors)


def _split(layers: Sequence[AttentionLayer], size: int) -> Iterator[Sequence[AttentionLayer]]:
    for start in range(0, len(layers), size):
        yield layers[start : start + size]


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
