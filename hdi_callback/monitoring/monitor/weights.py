"""Reading the heads' weights: by source, layers of one shape at once, in bounded memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from hdi_callback.attention import ROLES, AttentionLayer, Role
from hdi_callback.attention.autocast import without_autocast
from hdi_callback.attention.isolation import collectives_within
from hdi_callback.errors import HDIError
from hdi_callback.monitoring.absent import Absent
from hdi_callback.monitoring.layers import WatchedLayers
from hdi_callback.monitoring.monitor.gathers import Gather, Gathers
from hdi_callback.monitoring.ranks import Ranks, number_of_processes
from hdi_callback.monitoring.readings import Measurement

Shape = tuple[tuple[Role, torch.Size, torch.device, torch.dtype], ...]
Heads = tuple[tuple[Role, int], ...]


@dataclass(frozen=True)
class WeightSource:
    """A measurement that needs the weights of a layer alone.

    Attributes:
        name: its name in the catalogue of metrics.
        roles: the weights of a layer that it needs.
        compute: names of some layers, role -> weights ``(layers, heads, width, features)`` -> a frozen record of
            tensors ``(layers, ...)``.
        finish: turns such a record of all layers into the final one, at once; identity by default.
    """

    name: str
    roles: Callable[[AttentionLayer], tuple[Role, ...]]
    compute: Callable[[Sequence[str], Mapping[Role, Tensor]], Any]
    finish: Callable[[Any], Any] = lambda found: found
    _blanks: dict[Heads, Any] = field(default_factory=dict, compare=False, repr=False)

    def measure(self, names: Sequence[str], weights: Mapping[Role, Tensor]) -> Any:
        """Compute the result of layers with stacked weights.

        Args:
            names: of the layers.
            weights: by role, ``(layers, heads, width, features)``.

        Returns:
            A frozen record of tensors ``(layers, ...)``.
        """
        return self.finish(self.compute(names, weights))

    def heads(self, layer: AttentionLayer) -> Heads:
        """Numbers of heads of a layer's weights, by role.

        Args:
            layer: the layer.

        Returns:
            The numbers, which determine the shapes of the result.
        """
        shared = {"key": layer.num_key_heads, "value": layer.num_value_heads}
        return tuple((role, shared.get(role, layer.num_heads)) for role in self.roles(layer))

    def blank(self, heads: Heads) -> Any:
        """The shapes of the result of one layer; cached by its numbers of heads.

        Args:
            heads: `heads` of the layer.

        Returns:
            A record of tensors ``(1, ...)`` on the meta device.
        """
        if heads not in self._blanks:  # computed once: the meta device is slow, for tensors of this size
            empty = {role: torch.empty(1, count, 1, 1, device="meta") for role, count in heads}
            self._blanks[heads] = self.measure([""], empty)
        return self._blanks[heads]


class WeightReader:
    """Read weights and measure them, many layers at once.

    Args:
        layers: the layers that are watched.
        memory_budget: bytes that a reading may take beyond what one layer needs; half of them is for copies of weights.

    Attributes:
        memory_budget: the same.
        gathers: the parts of weights and of captured tensors that are gathered from other ranks.
    """

    def __init__(self, layers: WatchedLayers, memory_budget: int) -> None:
        self.memory_budget = memory_budget
        self.gathers = Gathers()
        self._layers, self._budget = layers, memory_budget // 2
        self._layers_at_once = sys.maxsize
        self._views: dict[tuple[str, Role], Tensor] | None = None

    @contextmanager
    def remembering_views(self) -> Iterator[None]:
        """Cache views of parameters inside the block, as several sources read the same weights.

        Yields:
            Nothing; the cache is emptied at the end.
        """
        self._views = {}
        try:
            yield
        finally:
            self._views = None

    def measure(
        self, source: WeightSource, absent: Absent, ranks: Ranks, waiting: Collection[str] = ()
    ) -> list[Measurement]:
        """Measure the weights of all layers; of several ranks, every one measures its share of the layers.

        Args:
            source: the measurement.
            absent: notes what cannot be measured.
            ranks: those that measure together.
            waiting: names of layers that this reading skips, the same on every rank.

        Returns:
            One measurement for each batch of layers of one shape.
        """
        pending: dict[Shape, list[tuple[str, dict[Role, Tensor]]]] = {}
        measurements: list[Measurement] = []
        for place, layer in enumerate(self._layers.all):
            if layer.name in waiting:
                continue
            with absent.unless_measured(source.name, layer.name):
                # On every rank: it may be a collective call.
                weights = {role: self.weight(layer, role, ranks) for role in source.roles(layer)}
                kind = tuple((role, weight.shape, weight.device, weight.dtype) for role, weight in weights.items())
                limit = min(_layers_per_call(weights.values(), self._budget), self._layers_at_once)
                if ranks.takes(place):
                    pending.setdefault(kind, []).append((layer.name, weights))
                del weights  # else two layers would be whole while the next one is gathered
                if len(pending.get(kind, ())) >= limit:
                    measurements += self._measure_at_once(source, pending.pop(kind), absent)
        for members in pending.values():
            measurements += self._measure_at_once(source, members, absent)
        return measurements

    def weight(self, layer: AttentionLayer, role: Role, ranks: Ranks) -> Tensor:
        """Read a weight whole.

        Args:
            layer: the layer.
            role: of the weight.
            ranks: those that measure together.

        Returns:
            ``(heads or key heads, width, features)``, detached.

        Raises:
            HDIError: if it must not be read, or cannot be.
        """
        self._layers.require(layer)
        if self._views is not None and (layer.name, role) in self._views:
            return self._views[layer.name, role]
        sharding, holder = self._layers.sharding, layer.slices[role].module
        plain = sharding.plain_owner(layer, role)
        if plain is not None:
            weight, holder = layer.weight(role).detach(), plain
        else:
            is_sharded = number_of_processes() > 1 and sharding.is_sharded(layer, role)
            if ranks.size == 1 and is_sharded:
                raise HDIError("other ranks hold parts of it, and they take no readings with this one")
            # A parametrization may call other ranks too.
            with collectives_within(range(number_of_processes()) if is_sharded else ranks.members_of_world):
                if is_sharded:
                    with self.gathers.take((layer.name, role)) as is_freed:
                        weight = layer.weight(role).detach()
                        weight = weight.clone() if is_freed else weight
                else:
                    weight = sharding.weight(layer, role)
        if weight.is_meta and ranks.size > 1:
            raise HDIError("it is on the meta device and holds no numbers")
        if self._views is not None and _is_part_of(weight, holder):
            self._views[layer.name, role] = weight
        return weight

    def gathered_for(
        self, sources: Iterable[tuple[WeightSource, Collection[str]]]
    ) -> Iterator[tuple[Hashable, Gather]]:
        """What `measure` gathers.

        Args:
            sources: the measurements, each with the names of layers that it skips.

        Yields:
            The argument of `Gathers.planned`.
        """
        for source, waiting in sources:
            for layer in self._layers.all:
                if layer.name not in waiting:
                    for role in source.roles(layer):
                        yield from self.gathered(layer, role)

    def gathered(self, layer: AttentionLayer, role: Role) -> Iterator[tuple[Hashable, Gather]]:
        """What `weight` gathers.

        Args:
            layer: the layer.
            role: the role of the weight.

        Yields:
            The argument of `Gathers.planned`; nothing if the weight lies here whole.
        """
        sharding = self._layers.sharding
        if sharding.plain_owner(layer, role) is None and sharding.is_sharded(layer, role):
            yield (layer.name, role), sharding.gathering(layer, role)

    def _measure_at_once(
        self, source: WeightSource, members: Sequence[tuple[str, dict[Role, Tensor]]], absent: Absent
    ) -> list[Measurement]:
        names = tuple(name for name, _ in members)
        of = f"its {source.name} weight" if source.name in ROLES else "it"
        try:
            # Under the user's autocast the products would run in half precision.
            roles = tuple(members[0][1])
            with without_autocast(members[0][1][roles[0]].device):
                if _are_read_alone(members[0][1].values()):
                    each = [
                        source.compute((name,), {role: weights[role][None] for role in roles})
                        for name, weights in members
                    ]
                    values = source.finish(each[0] if len(each) == 1 else _joined(each))
                else:
                    stacked = {role: torch.stack([weights[role] for _, weights in members]) for role in roles}
                    values = source.measure(names, stacked)
        except torch.OutOfMemoryError as error:
            # Later readings start from the batch size that worked.
            self._layers_at_once = max(1, len(members) // 2)
            reason = f"{of} cannot be measured ({error})"
        except Exception as error:
            reason = f"{of} cannot be measured ({error})"
            absent.leave_all_out(source.name, names, reason, f"measuring {type(error).__name__}")
            return []
        else:
            return [Measurement(names, source.name, values)]
        if len(members) == 1:
            absent.leave_all_out(source.name, names, reason, "out of memory")
            return []
        half = len(members) // 2
        return [
            *self._measure_at_once(source, members[:half], absent),
            *self._measure_at_once(source, members[half:], absent),
        ]


def _is_part_of(weight: Tensor, module: nn.Module) -> bool:
    """Return whether a weight on a CPU is a view of a module's parameter, which takes no memory to keep."""
    if weight.device.type != "cpu" or type(weight) is not Tensor:
        return False
    place = weight.untyped_storage().data_ptr()
    whole = (value for value in module.parameters() if type(value) is nn.Parameter)
    return any(value.untyped_storage().data_ptr() == place for value in whole)


_LARGE = 2**17
"""Entries of a weight from which on batches of layers gain nothing on a CPU, and no longer fit into its cache."""


def _are_read_alone(weights: Iterable[Tensor]) -> bool:
    """Return whether the layers of a batch are read one by one, without a stacked copy."""
    return all(weight.device.type == "cpu" and weight.numel() >= _LARGE for weight in weights)


def _joined(results: Sequence[Any]) -> Any:
    """Join records of tensors ``(1, ...)`` along the layers."""
    values = {item.name: torch.cat([getattr(result, item.name) for result in results]) for item in fields(results[0])}
    return type(results[0])(**values)


def _layers_per_call(weights: Iterable[Tensor], budget: int) -> int:
    """Number of layers to measure at once, so that copies of their weights stay within the budget."""
    # The weights are stacked, and beside them are two copies in float32 or wider, as of a circuit.
    each = sum(weight.numel() * (weight.element_size() + 2 * max(4, weight.element_size())) for weight in weights)
    return max(1, budget // max(1, each))
