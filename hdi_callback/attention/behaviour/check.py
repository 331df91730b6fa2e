"""The heads of layers, checked once in a real run; and looked for where they could not be found without one.

At the first armed forward the arguments of every attention layer are kept. Once the backward is over, the trial of
`trial.py` is made with them in place of inputs that are made up: does a change in one claimed head show in its own
outputs, and in no other's?
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress

import torch
from torch import nn

from hdi_callback.attention.behaviour.given import ArgumentRecorder
from hdi_callback.attention.behaviour.probe import MadeUp
from hdi_callback.attention.behaviour.received import NoHeadsError
from hdi_callback.attention.behaviour.trial import contradiction
from hdi_callback.attention.heads import AttentionLayer
from hdi_callback.attention.isolation import isolated
from hdi_callback.attention.layouts import Place, found_by_behaviour

_MOST_SECONDS = 60.0  # for the trials of one module


class HeadCheck(ArgumentRecorder):
    """Check claimed heads on the arguments of one real forward.

    Args:
        layers: the claims.
    """

    def __init__(self, layers: Sequence[AttentionLayer]) -> None:
        self._layers = {layer.name: layer for layer in layers}
        # Without an output projection nothing shows in what comes back.
        super().__init__({layer.name: layer.module for layer in layers if layer.output_projection is not None})

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
                    what = contradiction(self._layers[name], ways)
                    if what is not None and not _is_found_again(self._layers[name], ways):
                        shown[name] = what
        return shown


def _is_found_again(layer: AttentionLayer, ways: Sequence[MadeUp]) -> bool:
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
        super().__init__({place.name: place.module for place in places}, keeps_whole=True)

    def found(self) -> list[AttentionLayer]:
        """Look, and let go of the arguments.

        Returns:
            The layers that were found.
        """
        # Where a projection is spread over ranks, a module may count the heads of its own rank alone.
        ways = {name: ways for name, ways in self.take().items() if ways and not _is_spread(self._places[name].module)}
        layers = []
        with isolated(*(self._places[name].module for name in ways)):
            for name, given in ways.items():
                try:
                    with isolated(seconds=_MOST_SECONDS):
                        layers.append(found_by_behaviour(self._places[name], given))
                except NoHeadsError as error:  # noqa: PERF203
                    self.reasons[name] = str(error)
                except Exception as error:  # what fails in one is no word on others
                    self.reasons[name] = f"looking at it raises {type(error).__name__} ({error})"
        return layers


def _is_spread(module: nn.Module) -> bool:
    return any(hasattr(one, "placements") or hasattr(one, "ds_id") for one in module.parameters())
