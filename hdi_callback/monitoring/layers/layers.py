"""`WatchedLayers`: the watched layers of a model; those contradicted, removed and found late."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hdi_callback.attention import AttentionLayer, Refusal, survey
from hdi_callback.attention.isolation import isolated
from hdi_callback.attention.layer.sharding import Sharding, with_global_shapes
from hdi_callback.attention.names import matches
from hdi_callback.attention.wrappers import inner_model, users_name
from hdi_callback.errors import HDIError, UnsupportedAttentionWarning
from hdi_callback.monitoring.absent import ContradictedError
from hdi_callback.monitoring.layers.refusals import uncountable
from hdi_callback.monitoring.ranks.roster import Roster


class WatchedLayers:
    """The attention layers of a model, and what later forwards show of them.

    Args:
        model: the model.
        include: patterns of layer names to watch; all by default.
        exclude: patterns of layer names to leave out.

    Attributes:
        all: the layers, in model order.
        facts: facts about each, as plain data.
        refused: attention that is not watched, with reasons.
        undecided: modules that a forward may show to be attention.
        found_late: names of the layers that were found in the first forward.
    """

    def __init__(self, model: nn.Module, *, include: Sequence[str] | None, exclude: Sequence[str] | None) -> None:
        with with_global_shapes(model) as uncounted:
            found = survey(inner_model(model), include=include, exclude=exclude)
            layers = [replace(layer, name=users_name(layer.name)) for layer in found.layers]
            self.all = tuple(layer for layer in layers if layer.module not in uncounted)
            facts = tuple(layer.facts() for layer in self.all)
        not_countable = [uncountable(layer) for layer in layers if layer.module in uncounted]
        self.refused: tuple[Refusal, ...] = (*found.refused, *not_countable)
        self.undecided = found.undecided
        self.found_late: frozenset[str] = frozenset()
        self.sharding = Sharding(model)
        self._model, self._include, self._exclude = model, include, exclude
        self._contradicted: dict[str, str] = {}
        self._adopted: set[str] = set()  # contradicted on other ranks
        self._removed: set[str] = set()
        self._late: list[AttentionLayer] = []
        self.facts = self._with_places(facts)

    def _with_places(self, facts: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
        """Mark the first layer of the model, if all attention of the model is watched."""
        is_whole = self._include is None and not self._exclude and not self.refused
        return tuple({**one, "is_first": is_whole and not place} for place, one in enumerate(facts))

    @property
    def names(self) -> tuple[str, ...]:
        """Their names, in model order."""
        return tuple(layer.name for layer in self.all)

    @property
    def watched(self) -> tuple[AttentionLayer, ...]:
        """The layers whose heads no forward has contradicted, in model order."""
        return tuple(layer for layer in self.all if layer.name not in self._contradicted)

    @property
    def removed(self) -> set[str]:
        """Names of the layers that are no longer part of the model."""
        return self._removed

    def is_contradicted(self, name: str) -> bool:
        """Return whether a forward contradicted the heads of a layer.

        Args:
            name: name of the layer.

        Returns:
            True if it did, here or on another rank.
        """
        return name in self._contradicted

    def refuse(self, refusals: Iterable[Refusal]) -> None:
        """Add attention that is not watched.

        Args:
            refusals: the reasons.
        """
        self.refused = (*self.refused, *refusals)

    def decide(self, refusals: Mapping[str, Refusal | None]) -> None:
        """Update the refusals of modules.

        Args:
            refusals: name -> refusal; `None` for a module that is not refused any more.
        """
        decided = (refusals.get(refusal.name, refusal) for refusal in self.refused)
        self.refused = tuple(refusal for refusal in decided if refusal is not None)

    def named(self, name: str) -> AttentionLayer:
        """The layer of a name.

        Args:
            name: its name.

        Returns:
            The layer.
        """
        return next(layer for layer in self.all if layer.name == name)

    def is_chosen(self, name: str) -> bool:
        """Return whether `include` and `exclude` choose a module; a pattern that matches a layer chooses all within it.

        Args:
            name: name of the module.

        Returns:
            True if its attention is to be watched.
        """
        parts = name.split(".")
        around = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]

        def is_in(patterns: Collection[str] | None) -> bool:
            return any(matches(path, patterns) for path in around)

        return is_in(self._include) and not is_in(self._exclude or ())

    def frozen(self, elsewhere: Sequence[Mapping[str, Any]]) -> frozenset[str]:
        """The layers none of whose parameters requires a gradient now.

        Args:
            elsewhere: facts about the layers of all ranks; for layers of other ranks their first state is used.

        Returns:
            Names.
        """
        here = {layer.name: layer for layer in self.all}
        others = {facts["name"] for facts in elsewhere if facts["name"] not in here and not facts.get("trains", True)}
        still = {
            name
            for name, layer in here.items()
            if not any(parameter.requires_grad for parameter in layer.module.parameters())
        }
        return frozenset(still | others)

    def find_removed(self) -> None:
        """Update which layers are no longer part of the model."""
        there = set(self._model.modules())
        self._removed = {layer.name for layer in self.all if layer.module not in there}

    def require(self, layer: AttentionLayer) -> None:
        """Refuse a layer that must not be read.

        Args:
            layer: the layer.

        Raises:
            ContradictedError: if its heads are contradicted.
            HDIError: if it is no longer part of the model.
        """
        if layer.name in self._contradicted:
            raise ContradictedError(self._contradicted[layer.name])
        if layer.name in self._removed:
            raise HDIError("it is no longer part of the model; a new monitor would find its replacement")

    def leave_out(self, contradicted: Mapping[str, str]) -> None:
        """Stop reading layers whose heads are contradicted.

        Args:
            contradicted: name of a layer -> what contradicts it.
        """
        self._contradicted |= contradicted
        kinds = {layer.name: type(layer.module).__name__ for layer in self.all}
        self.refuse(Refusal(name, kinds[name], why) for name, why in contradicted.items())

    def leave_out_parts(self, parts: Mapping[str, AttentionLayer]) -> None:
        """Read only what a forward established of layers.

        Args:
            parts: name of a layer -> the layer with more left out.
        """
        self.all = tuple(parts.get(layer.name, layer) for layer in self.all)

    def leave_out_later(self, name: str, why: str) -> None:
        """Read nothing more of a layer whose heads were right and are not any more, and warn.

        Args:
            name: of the layer.
            why: what contradicts its heads.
        """
        self.leave_out({name: why})
        warnings.warn(
            f"`{name}` is left out from now on: {why}. A new monitor would find its heads anew.",
            UnsupportedAttentionWarning,
            stacklevel=6,
        )

    def admit(self, layers: Sequence[AttentionLayer]) -> None:
        """Watch further layers: their weights at once, their outputs from the next armed forward on.

        Args:
            layers: layers that a forward has shown.
        """
        self._late = [replace(layer, name=users_name(layer.name)) for layer in layers]
        if not self._late:
            return
        places = {module: place for place, module in enumerate(self._model.modules())}
        self.all = tuple(sorted((*self.all, *self._late), key=lambda layer: places.get(layer.module, -1)))
        self.found_late = frozenset(layer.name for layer in self._late)
        names = {layer.name for layer in layers}
        self.refused = tuple(refusal for refusal in self.refused if refusal.name not in names)
        self.facts = self._with_places([layer.facts() for layer in self.all])

    def take_late(self) -> list[AttentionLayer]:
        """Return the layers that were found late, once.

        Returns:
            Layers without a capture yet.
        """
        late, self._late = self._late, []
        return late

    def device(self) -> torch.device:
        """Device of the first layer.

        Returns:
            The device.
        """
        for module in (*(layer.module for layer in self.all), self._model):
            for parameter in module.parameters():
                return parameter.device
        return torch.device("cpu")

    def sample(self) -> list[str]:
        """A few numbers of each layer's key weight, by which ranks compare their layers; waits for the device.

        Returns:
            One text for each layer; empty where other ranks hold a part of the weight, or it cannot be read.
        """
        found = []
        for layer in self.all:
            text = ""
            with suppress(Exception):
                if "key" in layer.slices and not self.sharding.is_sharded(layer, "key"):
                    with isolated():  # other ranks may hold and read other layers
                        head = layer.weight("key").detach()[0]
                    numbers = head[:: max(1, len(head) // 4), :: max(1, head.shape[1] // 4)].double().cpu()
                    text = hashlib.sha256(repr(numbers.tolist()).encode()).hexdigest()[:16]
            found.append(text)
        return found

    def findings(self) -> dict[str, Any]:
        """This rank's findings about its layers.

        Returns:
            The input of `Roster`, without the layers.
        """
        return {
            "contradicted": {name: why for name, why in self._contradicted.items() if name not in self._adopted},
            "late": sorted(self.found_late),
        }

    def adopt(self, roster: Roster) -> None:
        """Leave out the layers that any rank leaves out, so that all ranks have the same numbers.

        Args:
            roster: the layers of all ranks, with their findings.
        """
        here = set(self.names)
        for name in roster.contradicted:
            if name in here and name not in self._contradicted:
                self._adopted.add(name)
                self.leave_out({name: "what another rank found contradicts its heads"})
