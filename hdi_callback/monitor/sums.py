"""Measurements of armed forwards: sums over tokens or queries, which ranks add up, and what is made of them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from hdi_callback.attention.capture.capture import Captured
from hdi_callback.attention.layer import AttentionLayer
from hdi_callback.monitor.ranks import Ranks, chunks, failed, repeats_tokens
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
        fields: those of `Captured` that `sums` stacks.
    """

    name: str
    reads: str
    fields: tuple[str, ...] = ()

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
    """Return one result of a source for each group of layers of one shape, over all ranks.

    Args:
        source: what is measured.
        layers: what is watched.
        captured: layer -> what was captured on this rank.
        ranks: those that measure together; all of them call this.
        absent: takes the reasons of what cannot be measured.
    """
    measured = [layer for layer in layers if _is_measured(source, layer, captured, absent)]
    if ranks.size == 1:
        measured = [layer for layer in measured if has_captured(source, layer, captured)]
    results = []
    for chunk in chunks(measured, map(source.size, measured), _AT_ONCE):
        source.begin(chunk, captured, ranks)
        own = _sums_of(source, chunk, captured, ranks, absent)
        groups: dict[Any, list[tuple[str, Any, Tensor | None]]] = {}
        for layer, total in zip(chunk, ranks.add([own[layer.name] for layer in chunk])):
            with absent.unless([source.name], [layer.name]):
                weight = source.weight(layer)
                tensors = [*vars(total).values(), weight]
                groups.setdefault(tuple(map(_kind, tensors)), []).append((layer.name, total, weight))
        for group in groups.values():
            names, totals, weights = zip(*group)
            with absent.unless([source.name], names):
                sums = source.reduce(joined(totals), None if weights[0] is None else stacked(weights))
                results.append(Result(source.name, names, sums, source.finish))
    return results


def _is_measured(source: SumSource, layer: AttentionLayer, captured: Mapping[str, Captured], absent: Absent) -> bool:
    """Return whether some rank may measure a layer; note why not, or why this rank has nothing of it."""
    never = reason = source.why_not(layer)
    if never is None and layer.name not in captured:
        reason = NOT_ARMED
    elif never is None and not has_captured(source, layer, captured):
        reason = captured[layer.name].reasons.get(source.reads)
        reason = reason or "the layer was not called in a forward that was armed"
    if reason is not None:
        absent.note(layer.name, source.name, reason)
    return never is None


def has_captured(source: SumSource, layer: AttentionLayer, captured: Mapping[str, Captured]) -> bool:
    """Return whether this rank has captured what a source is computed from."""
    value = getattr(captured.get(layer.name), source.reads, None)
    return value is not None and (isinstance(value, Tensor) or len(value) > 0)


def _sums_of(
    source: SumSource, layers: Sequence[AttentionLayer], captured: Mapping[str, Captured], ranks: Ranks, absent: Absent
) -> dict[str, Any]:
    """Return layer -> the sums of this rank, of one shape on all; over nothing, or NaN if they cannot be computed."""
    sums: dict[str, Any] = {}
    groups: dict[Any, list[AttentionLayer]] = {}
    for layer in layers:
        if layer.name in captured and source.reads in captured[layer.name].failed:
            continue
        if not has_captured(source, layer, captured) or (ranks.size > 1 and repeats_tokens(layer)):
            sums[layer.name] = source.blank(layer, ranks.device)
        else:
            shape = tuple(_kind(getattr(captured[layer.name], name)) for name in source.fields)
            groups.setdefault(shape, []).append(layer)
    for shape, group in groups.items():
        size, _, device = shape[0] if shape else ((), None, ranks.device)
        at_once = _AT_ONCE_ON_CPU if device.type == "cpu" else _AT_ONCE
        for chunk in chunks(group, repeat(math.prod(size)), at_once):
            with absent.unless([source.name], [layer.name for layer in chunk]):
                computed = source.sums(chunk, [captured[layer.name] for layer in chunk])
                sums |= {layer.name: record for layer, record in zip(chunk, computed)}
    failing = [layer for layer in layers if layer.name not in sums]
    return sums | {layer.name: failed(source.blank(layer, ranks.device)) for layer in failing}


def _kind(tensor: Tensor | None) -> Any:
    """Return what tensors must have alike to be stacked."""
    return None if tensor is None else (tensor.shape, tensor.dtype, tensor.device)
