"""The heads of layers, checked once in a real run; and looked for where they could not be found without one.

At the first armed forward the arguments of attention modules are recorded. Once the backward is over, copies of the
modules are run with them, and read as before training.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from hdi_callback.attention.behaviour.given import Given, given
from hdi_callback.attention.behaviour.received import NoHeadsError
from hdi_callback.attention.behaviour.trial import contradiction
from hdi_callback.attention.heads import AttentionLayer
from hdi_callback.attention.isolation import isolated
from hdi_callback.attention.layouts import found_by_behaviour
from hdi_callback.attention.recorder import Recorder
from hdi_callback.attention.registry import Place
from hdi_callback.attention.trace.inputs import Inputs, recorded_inputs
from hdi_callback.attention.trace.kinds import KindTracer
from hdi_callback.attention.trace.layers import layers_in
from hdi_callback.attention.trace.run import Traceable
from hdi_callback.attention.trace.verify import contradiction_of

_MOST_SECONDS = 60.0  # for one module


class ArgumentRecorder(Recorder[Inputs | Given]):
    """Keeps the arguments of the next forward of some modules, for a traced run and for a trial."""

    def _keep(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Inputs | Given]:
        with isolated(module):
            return [*recorded_inputs(args, kwargs), *given(module, args, kwargs, is_whole=True)]


def for_traces(ways: Sequence[Inputs | Given]) -> list[Inputs]:
    """Choose the arguments for a traced run.

    Args:
        ways: of one module, as they were recorded.

    Returns:
        Those for `trace`.
    """
    return [one for one in ways if isinstance(one, Inputs)]


def for_trials(ways: Sequence[Inputs | Given]) -> list[Given]:
    """Choose the arguments for a trial.

    Args:
        ways: of one module, as they were recorded.

    Returns:
        Those for `trial.py`.
    """
    return [one for one in ways if isinstance(one, Given)]


class HeadCheck(ArgumentRecorder):
    """Check claimed heads on the arguments of one real forward.

    Args:
        layers: the claims.
    """

    def __init__(self, layers: Sequence[AttentionLayer]) -> None:
        self._layers = {layer.name: layer for layer in layers}
        super().__init__({layer.name: layer.module for layer in layers})

    def contradictions(self, *, leave_out: Collection[str] = ()) -> dict[str, str]:
        """Compare, and let go of the arguments.

        Args:
            leave_out: names of layers that are not to be compared.

        Returns:
            Layers whose heads are not what is claimed: name -> what shows it. A layer that did not run, or that cannot
            be run again with these arguments, is not among them.
        """
        seen = {name: ways for name, ways in self.take().items() if name not in leave_out}
        shown = {}
        with isolated(*(self._layers[name].module for name in seen)):
            for name, ways in seen.items():
                with suppress(Exception), isolated(seconds=_MOST_SECONDS):  # what fails in one is no word on others
                    what = _contradiction(self._layers[name], ways)
                    if what is not None:
                        shown[name] = what
        return shown


def _contradiction(layer: AttentionLayer, ways: Sequence[Inputs | Given]) -> str | None:
    """Say what all ways that run show against a layer; one that agrees is enough, as one of them is right."""
    said = list(traced_contradictions(layer, for_traces(ways)))
    if said:
        return None if None in said else said[0]
    if layer.output_projection is None:  # nothing shows in what comes back
        return None
    what = contradiction(layer, [way for way in for_trials(ways) if not way.is_whole])
    return None if what is None or _is_found_again(layer, for_trials(ways)) else what


def traced_contradictions(layer: AttentionLayer, ways: Sequence[Inputs]) -> Iterator[str | None]:
    """Say for each way that runs what contradicts a layer; end with the first that agrees.

    Args:
        layer: the claim.
        ways: arguments of its module.

    Yields:
        What was seen instead, as a clause; `None` if it agrees.
    """
    try:
        traceable = Traceable(layer.module)
    except Exception:  # what cannot be copied is not compared
        return
    for way in ways:
        with suppress(Exception):
            run, found = layers_in(traceable, way.args, way.kwargs)
            if run.error is not None or not any(one.layer is not None for one in found):
                continue
            what = contradiction_of(layer, found, layer.name)
            yield what
            if what is None:
                return


def _is_found_again(layer: AttentionLayer, ways: Sequence[Given]) -> bool:
    """Ask for a second opinion: where tokens change places, or values add to the scores, outputs alone deceive."""
    try:
        found = found_by_behaviour(Place(layer.name, layer.module), ways)
    except NoHeadsError:
        return False
    return all(role in layer.slices and torch.equal(found.weight(role), layer.weight(role)) for role in found.slices)


class HeadSearch(ArgumentRecorder):
    """Look for heads with the arguments of one real forward.

    Args:
        places: modules whose heads could not be established with inputs that are made up.

    Attributes:
        reasons: what was seen instead of heads, name -> reason.
    """

    def __init__(self, places: Sequence[Place]) -> None:
        self.reasons: dict[str, str] = {}
        self._places = {place.name: place for place in places}
        self._tracer = KindTracer()
        super().__init__({place.name: place.module for place in places})

    def recorded(self) -> dict[str, list[Inputs | Given]]:
        """Stop recording, and hand over the arguments with which heads can be looked for.

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
            self.reasons[name] = "what it received in the first forward that was read cannot be copied"
            del ways[name]
        return ways

    def found(self, ways: Mapping[str, Sequence[Inputs | Given]]) -> list[AttentionLayer]:
        """Look with arguments that were recorded.

        Args:
            ways: what `recorded` gave.

        Returns:
            The layers that were found.
        """
        layers: list[AttentionLayer] = []
        with isolated(*(self._places[name].module for name in ways)):
            self._look(ways, layers)
        return layers

    def _look(self, ways: Mapping[str, Sequence[Inputs | Given]], layers: list[AttentionLayer]) -> None:
        for name in sorted(ways, key=lambda name: len(name.split(".")), reverse=True):
            try:
                with isolated(seconds=_MOST_SECONDS):
                    layers += self._found(self._places[name], ways[name])
            except NoHeadsError as error:  # noqa: PERF203
                self.reasons.setdefault(name, str(error))
            except Exception as error:  # what fails in one is no word on others
                self.reasons.setdefault(name, f"looking at it raises {type(error).__name__} ({error})")

    def _found(self, place: Place, ways: Sequence[Inputs | Given]) -> list[AttentionLayer]:
        found = self._tracer.found_in(place.name, place.module, for_traces(ways))
        layers = [one.layer for one in found or () if one.layer is not None]
        for one in found or ():
            if one.layer is None:
                self.reasons[place.name] = one.reason
        is_open = found is None or any(one.is_undecided for one in found)
        if layers or not is_open:
            return layers
        if self._tracer.is_slow(place.module):
            raise NoHeadsError("running it with what it received in the first forward that was read takes too long")
        return [found_by_behaviour(place, for_trials(ways))]


def _is_spread(module: nn.Module) -> bool:
    return any(hasattr(one, "placements") or hasattr(one, "ds_id") for one in module.parameters())
