"""The heads of layers, checked once in a real run; and searched where they could not be found without one.

At the first armed forward the arguments of attention modules are recorded. Once the backward is over, copies of the
modules are run with them, and read as before training.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch import nn

from hdi_callback.attention.heads import AttentionLayer, Role
from hdi_callback.attention.isolation import isolated
from hdi_callback.attention.names import is_within, printable
from hdi_callback.attention.observe import AttentionObserver, Verdict
from hdi_callback.attention.recorder import Recorder
from hdi_callback.attention.registry import Place
from hdi_callback.attention.trace.inputs import Inputs, recorded_inputs
from hdi_callback.attention.trace.kinds import KindTracer
from hdi_callback.attention.trace.layers import layers_in
from hdi_callback.attention.trace.run import Traceable
from hdi_callback.attention.trace.verify import contradiction_of
from hdi_callback.attention.wrappers import users_name

_MOST_SECONDS = 60.0  # for one module
_NOT_RUN = "it could not be run by itself with its arguments in the first forward that was read"
_SLOW = "running it with its arguments in the first forward that was read takes too long"


class ArgumentRecorder(Recorder[Inputs]):
    """Keeps the arguments of the next forward of some modules, for a traced run."""

    def _keep(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Inputs]:
        with isolated(module):
            return list(recorded_inputs(args, kwargs))


class HeadCheck(ArgumentRecorder):
    """Check claimed heads on the arguments of one real forward.

    Args:
        layers: the claims.
    """

    def __init__(self, layers: Sequence[AttentionLayer]) -> None:
        self._layers = {layer.name: layer for layer in layers}
        super().__init__({layer.name: layer.module for layer in layers})

    def contradictions(
        self, verdicts: Mapping[str, Verdict] | None = None, *, leave_out: Collection[str] = ()
    ) -> dict[str, str]:
        """Say which claims that forward, or a later one, contradicts, and let go of the arguments.

        Args:
            verdicts: name of a layer -> what an observer saw of its heads.
            leave_out: names of layers that are not to be compared.

        Returns:
            Layers whose heads are not what is claimed: name -> what shows it. A layer that did not run, or that cannot
            be run again with these arguments, is not among them.
        """
        verdicts = verdicts or {}
        recorded = self.take() if self.is_armed else {}
        shown = {}
        compared = [one for name, one in self._layers.items() if name not in leave_out]
        with isolated(*(one.module for one in compared if one.name in recorded)):
            for layer in compared:
                what = contradiction_in_forward(layer, verdicts.get(layer.name), recorded.get(layer.name, ()))
                if what is not None:
                    shown[layer.name] = what
        return shown


def contradiction_in_forward(layer: AttentionLayer, verdict: Verdict | None, recorded: Sequence[Inputs]) -> str | None:
    """Say what a real forward shows against the heads of a layer, before training and in it.

    The inputs of attention decide first. Where that leaves the claim open or contradicts it, the module is run again
    with its arguments in that forward; one way to cut them that agrees is enough, as one of the ways is right.
    Observation does not outweigh a traced run that shows the heads as they are claimed.

    Args:
        layer: the claim.
        verdict: what an observer saw of its heads; `None` if nothing was observed.
        recorded: the arguments of its module, in each of the ways in which they may be cut; empty if it was not called.

    Returns:
        What was observed instead, as a clause; `None` if nothing contradicts the claim.
    """
    if verdict is not None and verdict.state == "established":
        return None
    shown: list[str | None] = []
    with suppress(Exception), isolated(seconds=_MOST_SECONDS):  # what fails in one is no word on others
        shown = list(traced_contradictions(layer, recorded))
    observed = verdict.sentence if verdict is not None and verdict.state == "contradicted" else ""
    if shown:
        return None if None in shown else observed or shown[0]
    return None if layer.evidence in ("trace", "forward") else observed or None


def traced_contradictions(layer: AttentionLayer, ways: Sequence[Inputs]) -> Iterator[str | None]:
    """Say for each way that runs what contradicts a layer; end with the first that agrees.

    Args:
        layer: the claim.
        ways: arguments of its module.

    Yields:
        What was observed instead, as a clause; `None` if it agrees.
    """
    try:
        traceable = Traceable(layer.module)
    except Exception:  # what cannot be copied is not compared
        return
    for way in ways:
        with suppress(Exception):
            run, found = layers_in(traceable, way.args, way.kwargs)
            shown = [one for one in found if not one.is_undecided]
            # What somebody vouches for need not be something that a traced run can read.
            is_reported = layer.evidence != "layout" and bool(shown)
            if run.error is not None or not (is_reported or any(one.layer is not None for one in shown)):
                continue
            what = contradiction_of(layer, shown, layer.name)
            yield what
            if what is None:
                return


class HeadSearch(ArgumentRecorder):
    """Find heads with the arguments of one real forward.

    Args:
        places: modules whose heads could not be established with inputs that are made up.

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

    def recorded(self) -> dict[str, list[Inputs]]:
        """Stop recording, and hand over the arguments with which heads can be searched.

        Not to be called where the model is isolated, which would put back the hooks that leave here.

        Returns:
            Name of a module -> its arguments, in each of the ways in which they may be cut.
        """
        ways = self.take()
        for name in [name for name in ways if _is_spread(self._places[name].module)]:
            # The module may count the heads of its own rank alone.
            self.reasons[name] = "its projections are spread over ranks"
            del ways[name]
        for name in [name for name, of_one in ways.items() if not of_one]:
            self.reasons[name] = "its arguments in the first forward that was read cannot be copied"
            del ways[name]
        return ways

    def found(self, ways: Mapping[str, Sequence[Inputs]]) -> list[AttentionLayer]:
        """Search with arguments that were recorded.

        Args:
            ways: what `recorded` gave.

        Returns:
            The layers that were found.
        """
        layers: list[AttentionLayer] = []
        with isolated(*(self._places[name].module for name in ways)):
            self._search_all(ways, layers)
        for name in self._failed:
            # What could not be run is no attention of its own where that of its parts is read.
            if not any(layer.name == name or layer.name.startswith(f"{name}.") for layer in layers):
                self.reasons.setdefault(name, _NOT_RUN)
        return layers

    def _search_all(self, ways: Mapping[str, Sequence[Inputs]], layers: list[AttentionLayer]) -> None:
        for name in sorted(ways, key=lambda name: len(name.split(".")), reverse=True):
            try:
                with isolated(seconds=_MOST_SECONDS):
                    layers += self._found(self._places[name], ways[name])
            except Exception as error:  # noqa: PERF203 - what fails in one is no word on others
                self.reasons.setdefault(name, f"inspecting it raises {type(error).__name__} ({error})")

    def _found(self, place: Place, ways: Sequence[Inputs]) -> list[AttentionLayer]:
        found = self._tracer.found_in(place.name, place.module, ways)
        if found is None and self._tracer.is_slow(place.module):
            self.reasons[place.name] = _SLOW
        elif found is None:
            self._failed.append(place.name)
        for one in found or ():
            if one.layer is None:
                self.reasons[place.name] = one.reason
                if not one.is_undecided:
                    self.decided.add(place.name)
        return [one.layer for one in found or () if one.layer is not None]


def layers_observed(
    observer: AttentionObserver, layers: Sequence[AttentionLayer], reasons: Mapping[str, str], decided: Collection[str]
) -> list[AttentionLayer]:
    """Describe attention that no layer explains by its inputs in a real forward, before training and in it.

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
        inside = set(layer.module.modules())
        if any(one.module in inside or layer.module in set(one.module.modules()) for one in (*layers, *found)):
            continue
        name = users_name(printable(path))
        if any(is_within(name, [other]) or is_within(other, [name]) for other in decided):
            continue
        left_out = " and ".join(f"the weights of its {of}" for role, of in _NAMES.items() if role not in layer.slices)
        if left_out and name in reasons:
            left_out += f", as {reasons[name]}"
        found.append(replace(layer, name=name, evidence="forward", left_out=left_out))
    return found


_NAMES: dict[Role, str] = {"query": "queries", "value": "values"}


def _is_spread(module: nn.Module) -> bool:
    return any(hasattr(one, "placements") or hasattr(one, "ds_id") for one in module.parameters())
