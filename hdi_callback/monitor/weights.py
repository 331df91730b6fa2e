"""Measure the heads' weights, all layers of one shape at once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hdi_callback.attention.layer import ROLES, AttentionLayer
from hdi_callback.core import HeadMovement, head_diversity, head_movement, not_finite, ov_circuits, qk_circuits
from hdi_callback.monitor.metrics import FINITENESS, KEYS, MOVEMENT, OV, QK, WEIGHT_SOURCES
from hdi_callback.monitor.ranks import checksums_of
from hdi_callback.monitor.reading import Absent, Result, stacked

_ROLES_OF = {KEYS: ("key",), QK: ("query", "key"), OV: ("value", "output"), FINITENESS: (), MOVEMENT: ()}
"""Roles that a source cannot do without; those of no role take the weights that there are."""

_AT_ONCE = 2**26
"""Numbers of weights that are stacked at once on a device."""

_AT_ONCE_ON_CPU = 2**19
"""The same on a CPU, where batches gain nothing for wide layers and no longer fit into its cache."""

_LARGEST_KEPT = 2**31
"""Bytes of weights that are kept on the host until the next reading; the movement of further layers is absent."""


@dataclass(frozen=True)
class NotFinite:
    """Heads with numbers that are NaN or infinite.

    Attributes:
        not_finite: ``(layers, H)``, number of roles, or of ranks, where a head has some.
    """

    not_finite: Tensor


@dataclass(frozen=True)
class Trains:
    """Whether layers train.

    Attributes:
        trains: ``(layers,)``, true where a parameter requires a gradient.
    """

    trains: Tensor


class WeightReader:
    """Measure the weights of layers, and keep them for the movement at the next reading.

    Args:
        sources: those that are asked for; others than those of weights are left out.

    Attributes:
        checksums: layer -> checksums of the weights that were read, if `measure` was asked for them.
    """

    def __init__(self, sources: Collection[str]) -> None:
        self.sources = tuple(source for source in WEIGHT_SOURCES if source in sources)
        self.checksums: dict[str, Tensor] = {}
        self._with_checksums = False
        self._last = _LastWeights()

    def measure(
        self, step: int, layers: Sequence[AttentionLayer], absent: Absent, *, with_checksums: bool = False
    ) -> list[Result]:
        """Measure layers; sharded weights are gathered in the order of the layers, the same on every rank.

        Args:
            step: optimizer steps taken so far.
            layers: what is watched.
            absent: takes the reasons of what cannot be measured.
            with_checksums: also find `checksums`.

        Returns:
            One result for each source and group of layers of one shape.
        """
        self._last.begin(step)
        self.checksums, self._with_checksums = {}, with_checksums
        results: list[Result] = []
        groups: dict[Any, list[tuple[AttentionLayer, dict[str, Tensor]]]] = {}
        for layer in layers:
            weights = self._read(layer, absent)
            shapes = tuple((role, weight.shape, weight.device, weight.dtype) for role, weight in weights.items())
            group = groups.setdefault((shapes, layer.key_of, layer.value_of), [])
            group.append((layer, weights))
            if len(group) >= _layers_at_once(weights.values()):
                results += self._measure_group(group, absent)
                group.clear()
        for group in groups.values():
            results += self._measure_group(group, absent) if group else []
        self._last.end()
        for layer in layers if self._last.is_full else ():
            absent.note(
                layer.name, MOVEMENT, f"its weights are not kept, beyond {_LARGEST_KEPT / 2**30:.0f} GiB in all"
            )
        return results

    def _read(self, layer: AttentionLayer, absent: Absent) -> dict[str, Tensor]:
        """Read the weights of a layer; note which sources lack one."""
        weights: dict[str, Tensor] = {}
        for role in ROLES:
            of_role = [source for source in self.sources if role in _ROLES_OF[source]]
            needed = of_role or any(not _ROLES_OF[source] for source in self.sources)
            if role in layer.weights and needed:
                with absent.unless(of_role or (FINITENESS, MOVEMENT), [layer.name]):
                    weights[role] = layer.weight(role).detach()
        for source in self.sources:
            missing = [role for role in _ROLES_OF[source] if role not in layer.weights]
            if missing:
                absent.note(layer.name, source, f"the layer has no {' and no '.join(missing)} weight of its own")
        return weights

    def _measure_group(self, group: Sequence[tuple[AttentionLayer, dict[str, Tensor]]], absent: Absent) -> list[Result]:
        names = tuple(layer.name for layer, _ in group)
        first, roles = group[0]
        results = []
        with absent.unless(self.sources, names):
            together = {role: stacked([weights[role] for _, weights in group]) for role in roles}
            if together and self._with_checksums:
                self.checksums |= dict(zip(names, checksums_of(together)))
            for source in self.sources:
                if together and set(_ROLES_OF[source]) <= together.keys():
                    with absent.unless([source], names):
                        results.append(Result(source, names, self._compute(source, names, first, together)))
        return results

    def _compute(self, source: str, names: Sequence[str], layer: AttentionLayer, weights: Mapping[str, Tensor]) -> Any:
        """Measure one source of layers with stacked weights; `layer` is one of them."""
        if source == KEYS:
            return head_diversity(weights["key"])
        if source == QK:
            return qk_circuits(weights["query"], weights["key"], layer.key_of)
        if source == OV:
            return ov_circuits(weights["value"], weights["output"], layer.value_of)
        if source == FINITENESS:
            return _finiteness(layer, weights)
        own = {role: weight for role, weight in weights.items() if weight.shape[1] == layer.num_heads}
        return self._last.movement(names, own)


class _LastWeights:
    """Weights of the last reading, on the host."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], Tensor] = {}
        self._next: dict[tuple[str, str], Tensor] = {}
        self._step: int | None = None
        self._bytes = 0

    def begin(self, step: int) -> None:
        """Begin a reading; a second one at a step has the same weights, and is not compared."""
        if step == self._step:
            self._kept = {}
        self._step, self._next, self._bytes = step, {}, 0

    @property
    def is_full(self) -> bool:
        """Whether weights of this reading were left out as there are too many."""
        return self._bytes > _LARGEST_KEPT

    def end(self) -> None:
        """End the reading: its weights are the last ones now."""
        self._kept, self._next = self._next, {}

    def movement(self, names: Sequence[str], weights: Mapping[str, Tensor]) -> HeadMovement:
        """Compare stacked weights with those of the last reading, and keep them; NaN where there are none.

        Args:
            names: of the layers.
            weights: role -> ``(layers, H, width, features)``.

        Returns:
            Movement of the heads.
        """
        now = list(weights.values())
        before = [self._before(names, role, weight) for role, weight in weights.items()]
        for role, weight in weights.items():
            for name, own in zip(names, weight):
                self._keep(name, role, own)
        moved = head_movement(now, before)
        # Nothing is equal to NaN, but of weights without a past nothing is known.
        return HeadMovement(moved.movement, moved.unchanged.masked_fill(moved.movement.isnan(), torch.nan))

    def _before(self, names: Sequence[str], role: str, weight: Tensor) -> Tensor:
        rows = []
        for name, own in zip(names, weight):
            kept = self._kept.get((name, role))
            is_alike = kept is not None and kept.shape == own.shape
            rows.append(kept.to(own.device, own.dtype, non_blocking=True) if is_alike else None)  # type: ignore[union-attr]
        if len(rows) == 1 and rows[0] is not None:
            return rows[0][None]
        return torch.stack([torch.full_like(own, torch.nan) if row is None else row for row, own in zip(rows, weight)])

    def _keep(self, name: str, role: str, weight: Tensor) -> None:
        self._bytes += weight.numel() * weight.element_size()
        if self.is_full or weight.is_meta:
            return
        if weight.device.type == "cuda":
            # The host does not wait for a copy into pinned memory; later reads are queued behind it.
            host = torch.empty(weight.shape, dtype=weight.dtype, device="cpu", pin_memory=True)
            self._next[name, role] = host.copy_(weight, non_blocking=True)
        else:
            self._next[name, role] = weight.to("cpu", copy=True)


def _finiteness(layer: AttentionLayer, weights: Mapping[str, Tensor]) -> NotFinite:
    """Count the roles of each head that are not finite; keys and values of a group belong to all of its heads."""
    shared = {"key": layer.key_of, "value": layer.value_of}
    by_role = []
    for role, weight in weights.items():
        bad = not_finite(weight)
        if bad.shape[-1] != layer.num_heads:
            bad = torch.stack([bad[:, head] for head in shared[role]], -1)
        by_role.append(bad)
    return NotFinite(torch.stack(by_role).sum(0))


def _layers_at_once(weights: Iterable[Tensor]) -> int:
    """Number of layers that are measured at once."""
    each, at_once = 1, _AT_ONCE
    for weight in weights:
        each += weight.numel()
        at_once = _AT_ONCE_ON_CPU if weight.device.type == "cpu" else _AT_ONCE
    return max(1, at_once // each)
