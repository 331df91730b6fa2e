"""Measure the heads' weights, all layers of one shape at once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from hdi_callback.attention.dtensors import is_sharded
from hdi_callback.attention.layer import ROLES, AttentionLayer
from hdi_callback.core.circuits import CircuitSums, circuit_sums, circuits_of
from hdi_callback.core.diversity import diversity_of, diversity_sums
from hdi_callback.core.movement import HeadMovement, MovementSums, movement_of, movement_sums, not_finite
from hdi_callback.core.whitening import WhitenedHeads, whiten_layers
from hdi_callback.monitor.metrics import FINITENESS, KEYS, MOVEMENT, OV, PARAMETERS, QK, WEIGHT_SOURCES
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

_SMALL = 2**16  # numbers of parameters that are summed in one call with those of other layers
_OTHERS = 8
"""Parameters outside all layers that are looked at."""

_LARGEST_KEPT = 2**31
"""Bytes of weights that are kept until the next reading; the movement of further layers is absent."""


@dataclass(frozen=True)
class NotFiniteCounts:
    """Heads with numbers that are NaN or infinite."""

    not_finite: Tensor  # ``(layers, H)``, number of roles where a head has some, or 1 for outputs; NaN if unread


@dataclass(frozen=True)
class Trains:
    """Whether layers train."""

    trains: Tensor  # ``(layers,)``, true where a parameter requires a gradient


@dataclass(frozen=True)
class ParameterChanges:
    """Changes of other parameters than the weights of heads since the last reading; NaN without a last one."""

    still: Tensor  # ``(layers, parameters)``, of `further_parameters`: 1 unchanged, 0 changed, NaN not to train
    is_known: Tensor  # ``(layers,)``, whether there was an earlier reading
    others_move: Tensor  # ``(layers,)``, whether parameters of the model outside these layers have changed


class ParameterReader:
    """Tell parameters that have changed since the last reading, by sums of their bits, so that none is kept."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._last: dict[tuple[str, ...], Tensor] = {}
        self._next: dict[tuple[str, ...], Tensor] = {}
        self._sorted: tuple[Any, ...] = ()  # what the lists below are made of
        self._outside: list[nn.Parameter] = []
        self._alike: list[tuple[tuple[str, ...], list[tuple[nn.Parameter, ...]]]] = []  # names -> one of each layer

    def measure(self, step: int, model: nn.Module, layers: Sequence[AttentionLayer]) -> list[Result]:
        """Return which parameters of each layer, and whether some outside of them, have changed."""
        self._last, self._next = {} if step == self._step else self._next, {}
        self._step = step
        self._sort(list(model.parameters()), layers)
        # Of a parameter that is spread over ranks, the part of this rank moves with it.
        spread: Sequence[Any] = self._outside
        parts = [parameter.to_local() if is_sharded(parameter) else parameter for parameter in spread]
        outside = [_sums_of_bits([part]) for part in parts if part.numel() > 0]
        moves = (self._unchanged((), outside, 1) == 0).any().float()
        results = []
        for names, parameters in self._alike:
            still = self._unchanged(
                names,
                [_sums_of_bits(each) if _can_be_summed(each[0]) else _no_sums(each) for each in parameters],
                len(names),
            )
            is_known = torch.tensor([bool(self._last)] * len(names), device="cpu")
            changes = ParameterChanges(still, is_known, moves.expand(len(names)))
            results.append(Result(PARAMETERS, names, changes))
        return results

    def _sort(self, parameters: list[nn.Parameter], layers: Sequence[AttentionLayer]) -> None:
        """Group the parameters of layers that are alike; only where those of the model have changed."""
        now = (layers, [parameter.requires_grad for parameter in parameters], list(map(id, parameters)), parameters)
        if self._sorted[:3] == now[:3]:
            return
        self._sorted = now  # with the parameters, so that no number is used again
        own = {id(parameter) for layer in layers for parameter in layer.module.parameters()}
        outside = [each for each in parameters if id(each) not in own and each.requires_grad]
        self._outside = outside[:: 1 + len(outside) // _OTHERS]
        groups: dict[Any, list[tuple[str, list[nn.Parameter]]]] = {}
        for layer in layers:
            further = list(layer.further_parameters().values())
            kinds = tuple((each.shape, each.dtype, each.device, _can_be_summed(each)) for each in further)
            groups.setdefault(kinds, []).append((layer.name, further))
        self._alike = [
            (tuple(name for name, _ in group), list(zip(*(further for _, further in group))))
            for group in groups.values()
        ]

    def _unchanged(self, names: tuple[str, ...], sums: Sequence[Tensor], size: int) -> Tensor:
        """Return 1 for a parameter as it was, 0 for one that has changed, NaN where that is not known."""
        now = torch.stack([total.to(sums[0].device) for total in sums], 1) if sums else torch.zeros(size, 0)
        self._next[names] = now
        before = self._last.get(names)
        if before is None or before.shape != now.shape:
            return torch.full(now.shape, torch.nan, device=now.device)
        # A sum of no parameter that is to train is minus one.
        return (now == before).float().masked_fill(now == -1, torch.nan)


def _can_be_summed(parameter: nn.Parameter) -> bool:
    """Whether a parameter is to train and whole on this rank."""
    return parameter.requires_grad and not is_sharded(parameter) and parameter.numel() > 0


@torch.no_grad()
def _sums_of_bits(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return for parameters that are alike the sums of the bits of their numbers, which any change changes."""
    first, count = parameters[0], len(parameters)
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[first.element_size()]
    if first.numel() <= _SMALL:
        return (
            torch.stack([parameter.detach() for parameter in parameters])
            .view(bits)
            .reshape(count, -1)
            .sum(1, dtype=torch.int64)
        )
    return torch.stack([parameter.detach().contiguous().view(bits).sum(dtype=torch.int64) for parameter in parameters])


def _no_sums(parameters: Sequence[nn.Parameter]) -> Tensor:
    return torch.full((len(parameters),), -1, dtype=torch.int64, device=parameters[0].device)


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
        """Return the weights of a layer; note which sources lack one."""
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
        layers = [layer for layer, _ in group]
        names = tuple(layer.name for layer in layers)
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
                    results += measure(wanted, names, layers, stacks) if wanted else []
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
    wanted: Collection[str], names: tuple[str, ...], layers: Sequence[AttentionLayer], stacks: _Stacks
) -> list[Result]:
    """Measure likeness of the circuits, of both in one call where all weights are alike."""
    layer = layers[0]
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
    wanted: Collection[str], names: tuple[str, ...], layers: Sequence[AttentionLayer], stacks: _Stacks
) -> list[Result]:
    width = stacks.of["key"].shape[-1]
    return [Result(KEYS, names, diversity_sums(stacks.whitened("key")), lambda sums: diversity_of(sums, width))]


def _measure_finiteness(
    wanted: Collection[str], names: tuple[str, ...], layers: Sequence[AttentionLayer], stacks: _Stacks
) -> list[Result]:
    """Count the roles of each head that are not finite; keys and values of a group belong to all of its heads."""
    layer, by_role = layers[0], []
    shared = {"key": layer.key_of, "value": layer.value_of}
    for roles, stack in stacks.whole.items():
        for role, bad in zip(roles, not_finite(stack)):
            is_shared = bad.shape[-1] != layer.num_heads
            by_role.append(torch.stack([bad[:, head] for head in shared[role]], -1) if is_shared else bad)
    return [Result(FINITENESS, names, NotFiniteCounts(torch.stack(by_role).sum(0)))]


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
        self, wanted: Collection[str], names: tuple[str, ...], layers: Sequence[AttentionLayer], stacks: _Stacks
    ) -> list[Result]:
        """Compare the weights of each role with those of the last reading, and keep them; NaN without a last one."""
        layer, L = layers[0], len(layers)
        before = [self._kept.get((names, roles)) for roles in stacks.whole]
        for roles, stack in stacks.whole.items():
            self._keep((names, roles), stack)
        own = [
            place
            for place, role in enumerate(ROLES)
            if role in stacks.of and stacks.of[role].shape[1] == layer.num_heads
        ]
        if (
            any(last is None or last.shape != stack.shape for last, stack in zip(before, stacks.whole.values()))
            or not own
        ):
            unknown = torch.full((L, layer.num_heads), torch.nan)
            by_role = unknown[:, None].expand(-1, len(ROLES), -1)
            return [Result(MOVEMENT, names, HeadMovement(unknown, unknown, by_role))]
        shared = {"key": layer.key_of, "value": layer.value_of}
        of_role: dict[str, list[Tensor]] = {}
        for (roles, stack), last in zip(stacks.whole.items(), before):
            sums = movement_sums(stack, cast(Tensor, last))
            for role, *parts in zip(roles, *vars(sums).values()):
                is_shared = stack.shape[2] != layer.num_heads
                of_role[role] = [part[:, list(shared[role])] for part in parts] if is_shared else parts
        absent = [torch.zeros_like(part) for part in next(iter(of_role.values()))]
        parts = [torch.stack(part, 1) for part in zip(*(of_role.get(role, absent) for role in ROLES))]
        trains = torch.tensor([[_trains(layer, role) for role in ROLES] for layer in layers], device="cpu")
        return [Result(MOVEMENT, names, MovementSums(*parts), lambda sums: movement_of(sums, own, trains))]

    def _keep(self, key: tuple[tuple[str, ...], tuple[str, ...]], stack: Tensor) -> None:
        self._bytes += stack.numel() * stack.element_size()
        if self.is_full or stack.is_meta:
            return
        if stack.device.type == "cuda" and self._bytes > _LARGEST_ON_DEVICE:
            # The host does not wait for a copy into pinned memory; later reads are queued behind it.
            host = torch.empty(stack.shape, dtype=stack.dtype, device="cpu", pin_memory=True)
            stack = host.copy_(stack, non_blocking=True)
        self._next[key] = stack


def _trains(layer: AttentionLayer, role: str) -> bool:
    """Whether a parameter of a role requires a gradient."""
    return role in layer.weights and any(parameter.requires_grad for parameter in layer.weights[role].parameters())


def _layers_at_once(weights: Iterable[Tensor]) -> int:
    """Number of layers that are measured at once."""
    each, at_once = 1, _AT_ONCE
    for weight in weights:
        each += weight.numel()
        at_once = _AT_ONCE_ON_CPU if weight.device.type == "cpu" else _AT_ONCE
    return max(1, at_once // each)
