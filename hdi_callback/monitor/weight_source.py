"""Measure the heads' weights, all layers of one shape at once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from hdi_callback.attention.layer import ROLES, AttentionLayer, owner_of
from hdi_callback.core.circuits import CircuitSums, circuit_norms, circuit_sums, circuits_of
from hdi_callback.core.diversity import DiversitySums, diversity_of, diversity_sums
from hdi_callback.core.movement import HeadMovement, MovementSums, movement_of, movement_sums, not_finite
from hdi_callback.core.whitening import WhitenedHeads, whiten_layers
from hdi_callback.monitor.metrics import FINITENESS, KEYS, MOVEMENT, OV, QK, WEIGHT_SOURCES
from hdi_callback.monitor.ranks import checksums_of
from hdi_callback.monitor.reading import Absent, Later, Result

_ROLES_OF = {KEYS: ("key",), QK: ("query", "key"), OV: ("value", "output"), FINITENESS: (), MOVEMENT: ()}
"""Roles that a source cannot do without; those of no role take the weights that there are."""

_SIDE_BY_SIDE = ("key", "value", "query", "output")  # in a stack: roles that are whitened lie beside each other
_AT_ONCE = 2**25  # numbers of weights that are stacked at once on a device
_AT_ONCE_ON_CPU = 2**19  # the same on a CPU, where batches gain nothing for wide layers and leave its cache

_LARGEST_ON_DEVICE = 2**28  # bytes of weights that stay on a device until the next reading; further ones go to the host
_LARGEST_KEPT = 2**31  # bytes of weights that are kept until the next reading; the movement of further layers is absent
_Viewed = tuple[dict[str, Any], str, nn.Parameter, int]  # where a parameter is, its name there, itself, its address
Measured = tuple[Sequence[Tensor], Callable[..., Any]]  # sums, and what makes of them what the catalogue reads


class WeightReader:
    """Measure the weights of layers, and keep them for the movement at the next reading."""

    def __init__(self, sources: Collection[str]) -> None:
        self.sources = tuple(source for source in WEIGHT_SOURCES if source in sources)
        of_role = {role: [source for source in self.sources if role in _ROLES_OF[source]] for role in ROLES}
        of_any = [source for source in self.sources if not _ROLES_OF[source]]
        self._sources_of = {role: of_role[role] or of_any for role in ROLES if of_role[role] or of_any}
        self.checksums: dict[str, Tensor] = {}  # layer -> those of the weights that were read, if they are asked for
        self._views: dict[str, tuple[list[_Viewed], dict[str, Tensor]]] = {}  # layer -> parameters, views by role
        self._outputs: dict[str, Tensor] = {}  # layer -> a copy of its output weight, that of the last reading
        self._last: dict[Any, Tensor] = {}  # layers and roles -> weights
        self._next: dict[Any, Tensor] = {}
        self._step: int | None = None
        self._bytes = 0

    def measure(
        self,
        step: int,
        layers: Sequence[AttentionLayer],
        absent: Absent,
        trained: Collection[tuple[str, str]] = (),
        *,
        with_checksums: bool = False,
    ) -> tuple[list[Result], list[Later]]:
        """Return results of weights, and what returns further ones: of copies on a CPU that are kept anyway.

        There is one of each source for each group of layers of one shape; `absent` takes what has none. Sharded weights
        are gathered in the order of the layers, the same on every rank. A second reading at a step has the same
        weights, and is not compared. Of the layers and roles in `trained` a movement is told.
        """
        earlier, self._last, self._next = self._last, {} if step == self._step else self._next, {}
        self._step, self._bytes, self.checksums = step, 0, {}
        self._outputs = {}
        results: list[Result] = []
        later: list[Later] = []
        groups: dict[Any, tuple[list[AttentionLayer], list[dict[str, Tensor]]]] = {}

        def measure_group(group: tuple[list[AttentionLayer], list[dict[str, Tensor]]]) -> None:
            names = tuple(layer.name for layer in group[0])
            with absent.unless(self.sources, names):
                stacks = _Stacks(*group, earlier)
                if stacks.of and with_checksums:
                    self.checksums |= dict(zip(names, checksums_of(stacks.of)))
                measure = partial(self._measured, stacks, self._exchange(stacks), trained)
                copies = [stack for roles, stack in stacks.whole.items() if self._next.get((names, roles)) is stack]
                if len(copies) == len(stacks.whole) and all(stack.is_cpu for stack in copies):
                    self._outputs |= dict(zip(names, stacks.of.get("output", ())))
                    later.append(measure)
                else:
                    results.extend(measure(absent))

        for layer in layers:
            weights = self._read(layer, absent)
            shapes = tuple([(role, weight.shape, weight.device, weight.dtype) for role, weight in weights.items()])
            group = groups.setdefault((shapes, layer.key_of, layer.value_of), ([], []))
            group[0].append(layer)
            group[1].append(weights)
            on_cpu = any(weight.is_cpu for weight in weights.values())
            numbers = 1 + sum(weight.numel() for weight in weights.values())
            if len(group[0]) >= (_AT_ONCE_ON_CPU if on_cpu else _AT_ONCE) // numbers:
                measure_group(group)
                del groups[shapes, layer.key_of, layer.value_of]
        for group in groups.values():
            measure_group(group)
        for layer in layers if self._bytes > _LARGEST_KEPT else ():
            absent.note(
                layer.name, MOVEMENT, f"its weights are not kept, beyond {_LARGEST_KEPT / 2**30:.0f} GiB in all"
            )
        return results, later

    def output_weights(
        self, layers: Sequence[AttentionLayer], *, is_sharded: bool = False
    ) -> tuple[list[Tensor], bool]:
        """Return output weights of layers, and whether they are copies, as where no rank has to be asked."""
        if not is_sharded and all(layer.name in self._outputs for layer in layers):
            return [self._outputs[layer.name] for layer in layers], True
        return [layer.weight("output").detach() for layer in layers], False

    def _measured(
        self, stacks: _Stacks, before: Mapping[Any, Tensor | None], trained: Collection[tuple[str, str]], absent: Absent
    ) -> list[Result]:
        """Return a result of each source that has the weights that it needs."""
        results = []
        for source in self.sources:
            if stacks.of and set(_ROLES_OF[source]) <= stacks.of.keys():
                with absent.unless([source], stacks.names):
                    measure = _MEASURES.get(source)
                    sums, finish = _movement(stacks, before, trained) if measure is None else measure(stacks)
                    results.append(Result(source, stacks.names, sums, finish))
        return results

    def _exchange(self, stacks: _Stacks) -> dict[Any, Tensor | None]:
        """Keep weights for the next reading, and return those of the last one, `None` where there are none."""
        if MOVEMENT in self.sources:
            for roles, stack in stacks.whole.items():
                self._keep((stacks.names, roles), stack)
        return {roles: self._last.get((stacks.names, roles)) for roles in stacks.whole}

    def _read(self, layer: AttentionLayer, absent: Absent) -> dict[str, Tensor]:
        """Return the weights of a layer, as at the last reading if they are views of the same memory."""
        for source in self.sources if len(layer.weights) < len(ROLES) else ():
            missing = [role for role in _ROLES_OF[source] if role not in layer.weights]
            if missing:
                absent.note(layer.name, source, f"the layer has no {' and no '.join(missing)} weight of its own")
        places, weights = self._views.get(layer.name, ([], {}))
        if places and all(own.get(name) is each and each.data_ptr() == at for own, name, each, at in places):
            return weights
        roles = [role for role in self._sources_of if role in layer.weights]
        weights = {}
        for role in roles:
            with absent.unless(self._sources_of[role], [layer.name]):
                weights[role] = layer.weight(role).detach()
        viewed = {role: _viewed(layer, role, weight) for role, weight in weights.items()}
        if len(viewed) == len(roles) and None not in viewed.values():
            self._views[layer.name] = [*{id(place[2]): place for place in viewed.values() if place}.values()], weights
        return weights

    def forget_views(self) -> None:
        """Look all parameters up again, as some were replaced."""
        self._views.clear()

    def _keep(self, key: Any, stack: Tensor) -> None:
        self._bytes += stack.numel() * stack.element_size()
        if self._bytes > _LARGEST_KEPT or stack.is_meta:
            return
        if stack.device.type == "cuda" and self._bytes > _LARGEST_ON_DEVICE:
            # The host does not wait for a copy into pinned memory; later reads are queued behind it.
            host = torch.empty(stack.shape, dtype=stack.dtype, device="cpu", pin_memory=True)
            stack = host.copy_(stack, non_blocking=True)
        self._next[key] = stack


class _Stacks:
    """Weights of layers that are alike: roles of one shape lie in one tensor, which one call measures."""

    def __init__(
        self, layers: Sequence[AttentionLayer], weights: Sequence[Mapping[str, Tensor]], earlier: Mapping[Any, Tensor]
    ) -> None:
        self.layer, self.names = layers[0], tuple(layer.name for layer in layers)
        alike: dict[Any, list[str]] = {}
        for role in _SIDE_BY_SIDE:
            if role in weights[0]:
                weight = weights[0][role]
                alike.setdefault((weight.shape, weight.dtype, weight.device), []).append(role)
        self.whole: dict[tuple[str, ...], Tensor] = {}  # roles -> ``(roles, layers, heads, width, features)``
        self.of: dict[str, Tensor] = {}  # role -> its part, a view ``(layers, heads, width, features)``
        self._whitened: dict[str, WhitenedHeads] = {}
        for kind, roles in alike.items():
            # In the memory of the reading before the last: new memory takes long to touch.
            spare = earlier.get((self.names, tuple(roles)))
            if spare is not None and (spare.is_inference() or (spare.shape[2:], spare.dtype, spare.device) != kind):
                spare = None
            tensors = [weight[role] for role in roles for weight in weights]
            stack = torch.stack(tensors, out=None if spare is None else spare.flatten(0, 1))
            self.whole[tuple(roles)] = stack = stack.unflatten(0, (len(roles), len(weights)))
            self.of |= dict(zip(roles, stack))

    def whitened(self, role: str) -> WhitenedHeads:
        """Return the whitened heads of keys or values; both are whitened in one call where they are alike."""
        if role not in self._whitened:
            both = next((stack[:2].flatten(0, 1) for roles, stack in self.whole.items() if "value" in roles[1:2]), None)
            if both is None:
                self._whitened[role] = whiten_layers(self.of[role])
            else:
                for place, tensors in enumerate(zip(*(tensor.chunk(2) for tensor in whiten_layers(both)))):
                    self._whitened[("key", "value")[place]] = WhitenedHeads(*tensors)
        return self._whitened[role]


def _keys(stacks: _Stacks) -> Measured:
    width = stacks.of["key"].shape[-1]
    return diversity_sums(stacks.whitened("key")), lambda *sums: diversity_of(DiversitySums(*sums), width)


def _qk(stacks: _Stacks) -> Measured:
    return [circuit_norms(stacks.of["query"], stacks.whitened("key"), stacks.layer.key_of)], lambda norm: norm


def _ov(stacks: _Stacks) -> Measured:
    sums = circuit_sums(stacks.of["output"], stacks.whitened("value"), stacks.layer.value_of)
    return sums, lambda *arrived: circuits_of(CircuitSums(*arrived))


def _finiteness(stacks: _Stacks) -> Measured:
    """Count the roles of each head that are not finite; keys and values of a group belong to all of its heads."""
    layer, roles = stacks.layer, list(stacks.of)
    bad = [heads for stack in stacks.whole.values() for heads in not_finite(stack)]
    return bad, lambda *arrived: sum(_by_head(layer, *pair).double() for pair in zip(roles, arrived))


def _movement(stacks: _Stacks, before: Mapping[Any, Tensor | None], trained: Collection[tuple[str, str]]) -> Measured:
    """Compare the weights of each role with those of the last reading; NaN without a last one."""
    layer, names, kinds = stacks.layer, stacks.names, [*stacks.whole]
    own = {role: weight[0, 0].numel() for role, weight in stacks.of.items() if weight.shape[1] == layer.num_heads}
    sums: list[Tensor] = []

    def blank() -> Tensor:
        return torch.full((len(names), layer.num_heads), torch.nan, device="cpu")

    for roles, stack in stacks.whole.items():
        last = before[roles]
        if last is None or last.shape != stack.shape or not own:
            return (), lambda: HeadMovement(blank(), blank(), dict.fromkeys(ROLES, blank()))
        sums += [part for parts in movement_sums(stack, last) for part in parts]

    def finish(*sums: Tensor) -> HeadMovement:
        arrived, of_role = iter(sums), {}
        for roles in kinds:
            moved, size, same = (list(islice(arrived, len(roles))) for _ in range(3))
            for role, *parts in zip(roles, moved, size, same):
                of_role[role] = MovementSums(*(_by_head(layer, role, part) for part in parts))
        measured = movement_of(of_role, own)
        by_role: dict[str, Tensor] = {role: measured.by_role.get(role, blank()) for role in ROLES}
        for role, movement in by_role.items():
            movement[[(name, role) not in trained for name in names]] = torch.nan
        return measured._replace(by_role=by_role)

    return sums, finish


_MEASURES: dict[str, Callable[[_Stacks], Measured]] = {KEYS: _keys, QK: _qk, OV: _ov, FINITENESS: _finiteness}


def _viewed(layer: AttentionLayer, role: str, weight: Tensor) -> _Viewed | None:
    """Return the parameter of which a weight is a view, if it is one."""
    rows = layer.weights[role].plain
    owner, name = (layer.module, "") if rows is None else owner_of(rows.module, rows.names[0])
    parameter = owner._parameters.get(name) if rows is not None and len(rows.names) == 1 else None
    if type(parameter) is not nn.Parameter or parameter.is_meta:
        return None
    is_view = weight.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()
    return (owner._parameters, name, parameter, parameter.data_ptr()) if is_view else None


def _by_head(layer: AttentionLayer, role: str, of_weight: Tensor) -> Tensor:
    """Return numbers of the distinct heads of a weight ``(layers, ...)`` as those of all heads, on the host."""
    if of_weight.shape[-1] == layer.num_heads:
        return of_weight
    return of_weight[..., list(layer.key_of if role == "key" else layer.value_of)]
