"""Alignments of all pairs of heads, within the size of a page."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from hdi_callback.monitoring.history import RunHistory
from hdi_callback.monitoring.readings import LayerRecord, Record

_MOST_BYTES = 12_000_000  # of matrices in a page
_MOST_MAPS, _MOST_MAPS_ELSEWHERE = 60, 8  # of a layer: of an important one, of another
_NOTHING = 255  # code of a missing number


class PairMatrices(Protocol):
    """Alignments of all pairs of a layer, at the steps that are kept."""

    def steps(self, layer: str) -> list[int]:
        """List the steps, ascending."""

    def at(self, step: int, layer: str) -> Tensor | None:
        """The alignments at one step, ``(H, H)``."""


class KeptMatrices:
    """The matrices of a history, in its lines or beside it."""

    def __init__(self, history: RunHistory, records: Sequence[Record]) -> None:
        self._history = history
        self._by_step = {record.step: record for record in records}

    def steps(self, layer: str) -> list[int]:
        """List the steps, ascending."""
        return [step for step in self._history.matrix_steps(layer) if step in self._by_step]

    def at(self, step: int, layer: str) -> Tensor | None:
        """The alignments at one step, ``(H, H)``."""
        return pair_alignment(self._history.matrices(step, layer), self._by_step[step].layers.get(layer))


class AuditMatrices:
    """The matrices of an audit."""

    def __init__(self, record: Record) -> None:
        self._record = record

    def steps(self, layer: str) -> list[int]:
        """List the steps, ascending."""
        return [self._record.step] if self._record.layers[layer].matrices else []

    def at(self, step: int, layer: str) -> Tensor | None:
        """The alignments at one step, ``(H, H)``."""
        return pair_alignment(self._record.layers[layer].matrices, self._record.layers[layer])


def pair_alignment(matrices: Mapping[str, Tensor], layer: LayerRecord | None) -> Tensor | None:
    """The alignment of every pair: as kept, or from overlaps and chance.

    Args:
        matrices: the matrices of the layer.
        layer: its numbers at that step.

    Returns:
        ``(H, H)``; `None` if neither is known.
    """
    if "pair_alignment" in matrices:
        return matrices["pair_alignment"].float()
    overlap = matrices.get("overlap")
    if overlap is None or layer is None or "hdi_chance" not in layer.values:
        return None
    chance = 1 - layer.values["hdi_chance"]
    return (overlap.float() - chance) / max(1 - chance, 1e-6)


def packed(
    matrices: PairMatrices, layers: Sequence[str], important: Sequence[str], alerted: set[tuple[str, int]]
) -> dict[str, Any]:
    """Upper triangles in one byte an entry, the most important first, as far as they fit into a page.

    Args:
        matrices: the matrices of a run.
        layers: all of them.
        important: layers of which more steps are kept.
        alerted: layer and step of alerts, which come first.

    Returns:
        Layer -> step -> text.
    """
    steps = {name: matrices.steps(name) for name in layers}
    chosen: list[tuple[str, int]] = [(name, of[-1]) for name, of in steps.items() if of]
    chosen += [(name, step) for name, step in sorted(alerted) if step in steps.get(name, ())]
    for names, most in ((important, _MOST_MAPS), (layers, _MOST_MAPS_ELSEWHERE)):
        chosen += [(name, step) for name in names for step in thinned(steps.get(name, []), most)]
    texts = {}
    for name, step in sorted(dict.fromkeys(chosen), key=lambda place: place[1]):  # in the order of the file
        matrix = matrices.at(step, name)
        if matrix is not None:
            texts[name, step] = _bytes_of(matrix)
    kept: dict[str, dict[str, Any]] = {}
    size = 0
    for name, step in dict.fromkeys(chosen):
        text = texts.get((name, step), "")
        size += len(text)
        if size > _MOST_BYTES:
            break
        if text:
            kept.setdefault(name, {})[str(step)] = text
    return kept


def thinned(steps: Sequence[int], most: int) -> list[int]:
    """Some steps, evenly spread.

    Args:
        steps: ascending.
        most: largest number of steps.

    Returns:
        The first, the last, and others between.
    """
    if len(steps) <= most:
        return list(steps)
    return [steps[round(place * (len(steps) - 1) / (most - 1))] for place in range(most)]


def _bytes_of(matrix: Tensor) -> str:
    """The pairs above the diagonal, row by row: 0 to 250 for an alignment of 0 to 1, 255 if missing."""
    H = matrix.shape[-1]
    rows, columns = torch.triu_indices(H, H, 1)
    values = matrix[rows, columns]
    scaled = (values.nan_to_num(0).clamp(0, 1) * 250).round().to(torch.uint8)
    scaled[~values.isfinite()] = _NOTHING
    return base64.b64encode(bytes(scaled.tolist())).decode("ascii")
