"""Which layers of a model are watched, and why others are not: refused, contradicted, removed, found late."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from hdi_callback.attention import AttentionLayer, HeadCheck, HeadSearch, Refusal, survey
from hdi_callback.attention.sharding import Sharding, as_if_whole
from hdi_callback.attention.wrappers import inner_model, users_name
from hdi_callback.errors import HDIError, MonitoringWarning, NothingToWatchError, UnsupportedAttentionWarning
from hdi_callback.monitoring.absent import ContradictedError, listed
from hdi_callback.monitoring.ranks import Ranks
from hdi_callback.monitoring.warn_once import WarnOnce


class WatchedLayers:
    """Find the attention layers of a model, and keep up with what becomes of them.

    Args:
        model: the model.
        include: patterns of layer names to watch; all by default.
        exclude: patterns of layer names to leave out.
        check_heads: check the heads against the first forward that is read, and look there again at what was refused.
        strict: make it an error if there is nothing to watch.
        warn_once: turns what goes wrong into one warning.

    Attributes:
        all: the layers, in model order.
        facts: what is known of each, as plain data.
        refused: attention that is not watched.
        found_late: names of the layers that the first forward showed.

    Raises:
        NothingToWatchError: if there is nothing to watch and `strict` is set.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        include: Sequence[str] | None,
        exclude: Sequence[str] | None,
        check_heads: bool,
        strict: bool,
        warn_once: WarnOnce,
    ) -> None:
        with as_if_whole(model) as uncounted:
            found = survey(inner_model(model), include=include, exclude=exclude)
            layers = [replace(layer, name=users_name(layer.name)) for layer in found.layers]
            self.all = tuple(layer for layer in layers if layer.module not in uncounted)
            self.facts = tuple(layer.facts() for layer in self.all)
        uncountable = [_uncountable(layer) for layer in layers if layer.module in uncounted]
        self.refused: tuple[Refusal, ...] = (*found.refused, *uncountable)
        self.found_late: frozenset[str] = frozenset()
        self.sharding = Sharding(model)
        self._model, self._is_strict, self._warn_once = model, strict, warn_once
        self._undecided = found.undecided if check_heads else ()
        self._say_what_is_left_out()
        self._check = HeadCheck(self.all) if check_heads else None
        self._search = HeadSearch(self._undecided) if self._undecided else None
        self._is_checked = False
        self._late: list[AttentionLayer] = []
        self._contradicted: dict[str, str] = {}
        self._removed: set[str] = set()

    @property
    def names(self) -> tuple[str, ...]:
        """Their names, in model order."""
        return tuple(layer.name for layer in self.all)

    @property
    def removed(self) -> set[str]:
        """Names of the layers that are no part of the model any more."""
        return self._removed

    @property
    def ran(self) -> frozenset[str]:
        """Names of the layers that ran in the forward that was checked."""
        return frozenset(() if self._check is None else self._check.ran)

    def is_contradicted(self, name: str) -> bool:
        """Tell whether the first forward showed other heads than were claimed.

        Args:
            name: of a layer.

        Returns:
            True if it did, here or on another rank.
        """
        return name in self._contradicted

    def named(self, name: str) -> AttentionLayer:
        """Find a layer.

        Args:
            name: its name.

        Returns:
            The layer.
        """
        return next(layer for layer in self.all if layer.name == name)

    def arm(self) -> None:
        """Look at the heads in the next forward, if that was not done yet."""
        if self._check is not None and not self._is_checked:
            self._check.arm()
            if self._search is not None:
                self._search.arm()

    def suspend(self) -> None:
        """Take the hooks off."""
        for recorder in (self._check, self._search):
            if recorder is not None:
                recorder.suspend()

    def resume(self) -> None:
        """Put the hooks back after `suspend`."""
        for recorder in (self._check, self._search):
            if recorder is not None:
                recorder.resume()

    def look_for_removed(self) -> None:
        """See which layers are still a part of the model."""
        there = set(self._model.modules())
        self._removed = {layer.name for layer in self.all if layer.module not in there}

    def require(self, layer: AttentionLayer) -> None:
        """Refuse a layer of which nothing is to be read.

        Args:
            layer: the layer.

        Raises:
            ContradictedError: if its heads are not what was claimed.
            HDIError: if it is no part of the model any more.
        """
        if layer.name in self._contradicted:
            raise ContradictedError(self._contradicted[layer.name])
        if layer.name in self._removed:
            raise HDIError("it is no part of the model any more; a new monitor would see what came in its place")

    def verify(self) -> bool:
        """Check the heads once a forward was armed, on every rank at the same reading.

        Returns:
            True at that reading.

        Raises:
            NothingToWatchError: if nothing is left to watch and `strict` is set.
        """
        if self._check is None or not self._check.is_armed:
            return False
        self._is_checked = True
        with self._warn_once.guard("checking heads"):
            # A module whose projections are spread over ranks may count the heads of its own rank alone.
            spread = [one.name for one in self.all if any(self.sharding.is_sharded(one, role) for role in one.slices)]
            shown_otherwise = self._check.contradictions(leave_out=spread)
            self._contradicted = {
                name: f"a trial with the inputs of the first forward contradicts its heads: {shown}"
                for name, shown in shown_otherwise.items()
            }
        if self._search is not None:
            with self._warn_once.guard("looking for heads"):
                self._admit(self._search.found())
        if self._contradicted:
            shown = "; ".join(f"`{name}`: {reason}" for name, reason in list(self._contradicted.items())[:3])
            warnings.warn(
                f"{listed(list(self._contradicted))} left out from now on. {shown}. Describe it with "
                "`register_layout`.",
                UnsupportedAttentionWarning,
                stacklevel=5,
            )
        if not self.all:
            self._say_that_nothing_is_watched()
        return True

    def agree(self, ranks: Ranks, device: torch.device) -> None:
        """Leave out what any rank leaves out, so that all have the same numbers.

        Args:
            ranks: those that measure together.
            device: where they add up.
        """
        mine = torch.tensor([layer.name in self._contradicted for layer in self.all], dtype=torch.float64)
        (found,) = ranks.sum([mine], device)
        for layer, count in zip(self.all, found.tolist()):
            if count:
                self._contradicted.setdefault(layer.name, "a trial on another rank contradicts its heads")

    def take_late(self) -> list[AttentionLayer]:
        """Hand over the layers that were found late, once.

        Returns:
            Layers of which nothing was captured yet.
        """
        late, self._late = self._late, []
        return late

    def device(self) -> torch.device:
        """Tell where the first of them lies.

        Returns:
            The device.
        """
        for layer in self.all:
            for parameter in layer.module.parameters():
                return parameter.device
        return torch.device("cpu")

    def _admit(self, layers: Sequence[AttentionLayer]) -> None:
        """Watch further layers: their weights at once, their outputs from the next armed forward on."""
        self._late = [replace(layer, name=users_name(layer.name)) for layer in layers]
        if not self._late:
            return
        places = {module: place for place, module in enumerate(self._model.modules())}
        self.all = tuple(sorted((*self.all, *self._late), key=lambda layer: places[layer.module]))
        self.facts = tuple(layer.facts() for layer in self.all)
        self.found_late = frozenset(layer.name for layer in self._late)
        names = {layer.name for layer in layers}
        self.refused = tuple(refusal for refusal in self.refused if refusal.name not in names)

    def _say_what_is_left_out(self) -> None:
        again = {place.name for place in self._undecided}
        for refusal in self.refused:
            later = " It is looked at again in the first forward that is read." if refusal.name in again else ""
            warnings.warn(refusal.message + later, UnsupportedAttentionWarning, stacklevel=5)
        if self.all:
            return
        if not again:
            self._say_that_nothing_is_watched()
            return
        warnings.warn(
            f"The heads of no attention layer of {type(self._model).__name__} could be read yet. The first forward "
            f"that is read may show those of {listed(sorted(again))}.",
            MonitoringWarning,
            stacklevel=5,
        )

    def _say_that_nothing_is_watched(self) -> None:
        kinds = sorted({type(module).__name__ for module in self._model.modules()})
        message = (
            f"No attention layer was found whose heads can be read in {type(self._model).__name__}, so there is "
            f"nothing to watch. Its modules are of these types: {', '.join(kinds)}. Describe the attention with "
            "`register_layout`."
        )
        if self._is_strict:
            raise NothingToWatchError(message)
        warnings.warn(message, MonitoringWarning, stacklevel=6)


def _uncountable(layer: AttentionLayer) -> Refusal:
    return Refusal(
        layer.name,
        type(layer.module).__name__,
        "its projections are split over ranks, and it does not say how wide a head is, so that its number of heads may "
        "be that of one rank",
        f"Give it an attribute `head_dim`, or skip it with exclude=[{layer.name!r}].",
    )
