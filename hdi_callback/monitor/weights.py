"""Measure the heads' weights, all layers of one shape at once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hdi_callback.attention.layer import ROLES, AttentionLayer
from hdi_callback.core import (
    CircuitSums,
    HeadMovement,
    MovementSums,
    WhitenedHeads,
    circuit_sums,
    circuits_of,
    diversity_of,
    diversity_sums,
    movement_of,
    movement_sums,
    not_finite,
    whiten_layers,
)
from hdi_callback.monitor.metrics import FINITENESS, KEYS, MOVEMENT, OV, QK, WEIGHT_SOURCES
from hdi_callback.monitor.ranks import checksums_of
from hdi_callback.monitor.reading import Absent, Result

_ROLES_OF = {KEYS: ("key",), QK: ("query", "key"), OV: ("value", "output"), FINITENESS: (), MOVEMENT: ()}
"""Roles that a source cannot do without; those of no role take the weights that there are."""

_SIDE_BY_SIDE = ("key", "value", "query", "output")
"""The order of roles in a stack: those that are whitened lie side by side, and those that are not."""

_AT_ONCE = 2**25
"""Numbers of weights that are stacked at once on a device."""

_AT_ONCE_ON_CPU = 2**19
"""The same on a CPU, where batches gain nothing for wide layers and no longer fit into its cache."""

_LARGEST_ON_DEVICE = 2**28
"""Bytes of weights that stay on a device until the next reading; further ones go to the host."""

_LARGEST_KEPT = 2**31
"""Bytes of weights that are kept until the next reading; the movement of further layers is absent."""


@dataclass(frozen=True)
class NotFinite:
    """Heads with numbers that are NaN or infinite."""

    not_finite: Tensor  # ``(layers, H)``, number of roles where a head has some, or 1 for outputs; NaN if unread


@dataclass(frozen=True)
class Trains:
    """Whether layers train."""

    trains: Tensor  # ``(layers,)``, true where a parameter requires a gradient


class WeightReader:
    """Measure the weights of layers, and keep them for the movement at the next reading.

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
        """Measure layers; sharded weights are gathered in the order of the layers, the same on every rank."""
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
        layer = group[0][0]
        results: list[Result] = []
        with absent.unless(self.sources, names):
            stacks = _Stacks([weights for _, weights in group])
            if stacks.of and self._with_checksums:
                self.checksums |= dict(zip(names, checksums_of(stacks.of)))
            able = [source for source in self.sources if stacks.of and set(_ROLES_OF[source]) <= stacks.of.keys()]
            for sources, measure in (
                ((QK, OV), _measure_circuits),
                ((KEYS,), _measure_keys),
                ((FINITENESS,), _measure_finiteness),
                ((MOVEMENT,), self._last.measure_movement),
            ):
                wanted = [source for source in sources if source in able]
                with absent.unless(wanted, names):
                    results += measure(wanted, names, layer, stacks) if wanted else []
        return sorted(results, key=lambda result: self.sources.index(result.source))


class _Stacks:
    """Weights of layers that are alike: roles of one shape lie in one tensor, which one call measures.

    Attributes:
        whole: roles -> ``(roles, layers, heads, width, features)``; nobody else writes into it.
        of: role -> its part, a view ``(layers, heads, width, features)``.
    """

    def __init__(self, weights: Sequence[Mapping[str, Tensor]]) -> None:
        alike: dict[Any, list[str]] = {}
        for role in _SIDE_BY_SIDE:
            if role in weights[0]:
                weight = weights[0][role]
                alike.setdefault((weight.shape, weight.dtype, weight.device), []).append(role)
        self.whole: dict[tuple[str, ...], Tensor] = {}
        self.of: dict[str, Tensor] = {}
        self._whitened: dict[str, WhitenedHeads] = {}
        for roles in alike.values():
            stack = torch.stack([weight[role] for role in roles for weight in weights])
            self.whole[tuple(roles)] = stack = stack.unflatten(0, (len(roles), len(weights)))
            self.of |= dict(zip(roles, stack.unbind()))

    def together(self, *roles: str) -> Tensor | None:
        """Return the layers of some roles as one stack, if these lie side by side."""
        for alike, stack in self.whole.items():
            if set(roles) <= set(alike):
                return stack[alike.index(roles[0]) :][: len(roles)].flatten(0, 1)
        return None

    def whitened(self, *roles: str) -> WhitenedHeads:
        """Whiten the heads of keys, values or both, once; of both together if they are alike."""
        both = self.together("key", "value")
        whole, start = (self.of[roles[0]], 0) if both is None else (both, len(both) // 2 * (roles[0] == "value"))
        key = roles[0] if both is None else "both"
        if key not in self._whitened:
            self._whitened[key] = whiten_layers(whole)
        stop = start + len(roles) * len(self.of[roles[0]])
        return WhitenedHeads(*(tensor[start:stop] for tensor in vars(self._whitened[key]).values()))


def _measure_circuits(
    wanted: Collection[str], names: tuple[str, ...], layer: AttentionLayer, stacks: _Stacks
) -> list[Result]:
    """Measure likeness of the circuits, of both in one call where all weights are alike."""
    tasks: list[tuple[tuple[str, ...], Tensor | None, tuple[str, ...], Sequence[int]]] = [
        ((QK,), stacks.of.get("query"), ("key",), layer.key_of),
        ((OV,), stacks.of.get("output"), ("value",), layer.value_of),
    ]
    if set(wanted) == {QK, OV} and layer.key_of == layer.value_of and stacks.together("key", "value") is not None:
        both = stacks.together("query", "output")
        tasks = tasks if both is None else [((QK, OV), both, ("key", "value"), layer.key_of)]
    results = []
    for sources, own, shared, group_of in tasks:
        if own is not None and set(sources) <= set(wanted):
            sums = circuit_sums(own, stacks.whitened(*shared), group_of)
            parts = zip(*(tensor.chunk(len(sources)) for tensor in vars(sums).values()))
            results += [Result(source, names, CircuitSums(*part), circuits_of) for source, part in zip(sources, parts)]
    return results


def _measure_keys(
    wanted: Collection[str], names: tuple[str, ...], layer: AttentionLayer, stacks: _Stacks
) -> list[Result]:
    width = stacks.of["key"].shape[-1]
    return [Result(KEYS, names, diversity_sums(stacks.whitened("key")), lambda sums: diversity_of(sums, width))]


def _measure_finiteness(
    wanted: Collection[str], names: tuple[str, ...], layer: AttentionLayer, stacks: _Stacks
) -> list[Result]:
    """Count the roles of each head that are not finite; keys and values of a group belong to all of its heads."""
    shared = {"key": layer.key_of, "value": layer.value_of}
    by_role = []
    for roles, stack in stacks.whole.items():
        for role, bad in zip(roles, not_finite(stack)):
            is_shared = bad.shape[-1] != layer.num_heads
            by_role.append(torch.stack([bad[:, head] for head in shared[role]], -1) if is_shared else bad)
    return [Result(FINITENESS, names, NotFinite(torch.stack(by_role).sum(0)))]


class _LastWeights:
    """Weights of the last reading: the stacks that were measured, on their device while they are few."""

    def __init__(self) -> None:
        self._kept: dict[tuple[tuple[str, ...], tuple[str, ...]], Tensor] = {}  # by layers and roles
        self._next: dict[tuple[tuple[str, ...], tuple[str, ...]], Tensor] = {}
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

    def measure_movement(
        self, wanted: Collection[str], names: tuple[str, ...], layer: AttentionLayer, stacks: _Stacks
    ) -> list[Result]:
        """Compare weights that no heads share with those of the last reading, and keep them; NaN without a last one."""
        own = {roles: stack for roles, stack in stacks.whole.items() if stack.shape[2] == layer.num_heads}
        before = [self._kept.get((names, roles)) for roles in own]
        for roles, stack in own.items():
            self._keep((names, roles), stack)
        if any(last is None or last.shape != stack.shape for last, stack in zip(before, own.values())):
            unknown = torch.full((len(names), layer.num_heads), torch.nan)
            return [Result(MOVEMENT, names, HeadMovement(unknown, unknown))]
        sums = movement_sums(list(own.values()), [last for last in before if last is not None])
        return [Result(MOVEMENT, names, sums, _movement)]

    def _keep(self, key: tuple[tuple[str, ...], tuple[str, ...]], stack: Tensor) -> None:
        self._bytes += stack.numel() * stack.element_size()
        if self.is_full or stack.is_meta:
            return
        if stack.device.type == "cuda" and self._bytes > _LARGEST_ON_DEVICE:
            # The host does not wait for a copy into pinned memory; later reads are queued behind it.
            host = torch.empty(stack.shape, dtype=stack.dtype, device="cpu", pin_memory=True)
            stack = host.copy_(stack, non_blocking=True)
        self._next[key] = stack


def _movement(sums: MovementSums) -> HeadMovement:
    moved = movement_of(sums)
    # Nothing is equal to NaN, but of weights without a finite past nothing is known.
    return HeadMovement(moved.movement, moved.unchanged.masked_fill(moved.movement.isnan(), torch.nan))


def _layers_at_once(weights: Iterable[Tensor]) -> int:
    """Number of layers that are measured at once."""
    each, at_once = 1, _AT_ONCE
    for weight in weights:
        each += weight.numel()
        at_once = _AT_ONCE_ON_CPU if weight.device.type == "cpu" else _AT_ONCE
    return max(1, at_once // each)
