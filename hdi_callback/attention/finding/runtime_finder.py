"""Heads that could not be found without a real forward: by its arguments, and by the inputs of attention in it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from torch import nn

from hdi_callback.attention.finding.argument_recorder import ArgumentRecorder
from hdi_callback.attention.isolation import MOST_SECONDS, isolated
from hdi_callback.attention.layer.changing_hooks import changing_hook
from hdi_callback.attention.layer.head_maps import single_maps
from hdi_callback.attention.layer.heads import PLURAL, AttentionLayer
from hdi_callback.attention.layer.registry import Place
from hdi_callback.attention.names import is_within, printable
from hdi_callback.attention.observe import AttentionObserver
from hdi_callback.attention.trace.inputs import Inputs
from hdi_callback.attention.trace.kinds import KindTracer
from hdi_callback.attention.wrappers import users_name

_NOT_RUN = "it could not be run by itself with its arguments from the first captured forward"
_SLOW = "running it with its arguments from the first captured forward takes too long"


class RuntimeFinder(ArgumentRecorder):
    """Find heads with the arguments of one real forward.

    Args:
        places: modules whose heads could not be established with synthetic inputs.

    Attributes:
        reasons: what was observed instead of heads, name -> reason.
        decided: names of those of which no other run will read heads either.
    """

    def __init__(self, places: Sequence[Place]) -> None:
        self.reasons: dict[str, str] = {}
        self.decided: set[str] = set()
        self._places = {place.name: place for place in places}
        self._failed: list[str] = []
        self._tracer = KindTracer()
        super().__init__({place.name: place.module for place in places})

    def function_in(self, name: str) -> str:
        """Return which function of a module hides what it computes.

        Args:
            name: of the module.

        Returns:
            A clause; empty if there is none.
        """
        return self._tracer.function_in(self._places[name].module)

    def recorded(self) -> dict[str, list[Inputs]]:
        """Stop recording, and return the arguments with which heads can be searched.

        Not to be called inside isolation, which would restore the hooks that are removed here.

        Returns:
            Name of a module -> its arguments, in each of the ways in which they may be cut.
        """
        ways = self.take()
        for name in [name for name in ways if _is_spread(self._places[name].module)]:
            # The module may count the heads of its own rank alone.
            self.reasons[name] = "its projections are sharded over ranks"
            del ways[name]
        for name in [name for name, of_one in ways.items() if not of_one]:
            self.reasons[name] = "its arguments from the first captured forward cannot be copied"
            del ways[name]
        return ways

    def found(self, ways: Mapping[str, Sequence[Inputs]]) -> list[AttentionLayer]:
        """Search with arguments that were recorded.

        Args:
            ways: the result of `recorded`.

        Returns:
            The layers that were found.
        """
        layers: list[AttentionLayer] = []
        with isolated(*(self._places[name].module for name in ways)):
            for name in sorted(ways, key=lambda name: len(name.split(".")), reverse=True):
                try:
                    with isolated(seconds=MOST_SECONDS):
                        layers += self._found(self._places[name], ways[name])
                except Exception as error:  # noqa: PERF203 - what fails in one is no word on others
                    self.reasons.setdefault(name, f"inspecting it raises {type(error).__name__} ({error})")
        for name in self._failed:
            # A module that could not be run has no attention of its own where that of its parts is read.
            if not any(layer.name == name or layer.name.startswith(f"{name}.") for layer in layers):
                self.reasons.setdefault(name, _NOT_RUN + self._tracer.error_of(self._places[name].module))
        return layers

    def _found(self, place: Place, ways: Sequence[Inputs]) -> list[AttentionLayer]:
        found = self._tracer.found_in(place.name, place.module, ways)
        if found is None and self._tracer.is_slow(place.module):
            self.reasons[place.name] = _SLOW
        elif found is None:
            self._failed.append(place.name)
        for result in found or ():
            if result.layer is None:
                if place.name not in self.decided and not (result.is_undecided and place.name in self.reasons):
                    self.reasons[place.name] = result.reason
                if not result.is_undecided:
                    self.decided.add(place.name)
        return [one.layer for one in found or () if one.layer is not None]


def layers_observed(
    observer: AttentionObserver, layers: Sequence[AttentionLayer], reasons: Mapping[str, str], decided: Collection[str]
) -> list[AttentionLayer]:
    """Layers for attention that belongs to no layer yet, from its inputs in a real forward, before training and in it.

    Args:
        observer: of that forward.
        layers: those that are read otherwise.
        reasons: name of a module -> why a traced run could not read all of it.
        decided: names of those of them whose attention no heads can be read of, such as heads that mix.

    Returns:
        Layers of several heads beside them.
    """
    found: list[AttentionLayer] = []
    for path, layer in observer.proposals(layers).items():
        if not isinstance(layer, AttentionLayer) or layer.num_heads < 2:
            continue
        if any(changing_hook(part.owner) is not None for part in single_maps(layer.slices.values())):
            continue
        inside = set(layer.module.modules())
        if any(one.module in inside or layer.module in set(one.module.modules()) for one in (*layers, *found)):
            continue
        name = users_name(printable(path))
        if any(is_within(name, [other]) or is_within(other, [name]) for other in decided):
            continue
        left_out = " and ".join(
            f"the weights of its {PLURAL[role]}" for role in ("query", "value") if role not in layer.slices
        )
        if left_out and name in reasons:
            left_out += f", as {reasons[name]}"
        found.append(replace(layer, name=name, evidence="forward", left_out=left_out))
    return found


def _is_spread(module: nn.Module) -> bool:
    return any(hasattr(parameter, "placements") or hasattr(parameter, "ds_id") for parameter in module.parameters())
