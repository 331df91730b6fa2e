"""Which layers of a model are watched, and why others are not: refused, contradicted, removed, found late."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from hdi_callback.attention import AttentionLayer, HeadCheck, HeadSearch, Refusal, survey
from hdi_callback.attention.isolation import isolated
from hdi_callback.attention.observe import AttentionObserver, Unexplained
from hdi_callback.attention.search import is_inside
from hdi_callback.attention.sharding import Sharding, as_if_whole
from hdi_callback.attention.trace.inputs import Inputs
from hdi_callback.attention.wrappers import inner_model, users_name
from hdi_callback.errors import HDIError, MonitoringWarning, NothingToWatchError, UnsupportedAttentionWarning
from hdi_callback.monitoring.absent import ContradictedError, listed
from hdi_callback.monitoring.ranks.roster import Roster
from hdi_callback.monitoring.warn_once import WarnOnce

_DECIDES = "; the first forward that is read decides"
_LOOKS = 3  # armed readings in which claims are judged, for layers that do not run in each of them


class WatchedLayers:
    """Find the attention layers of a model, and keep up with what becomes of them.

    Args:
        model: the model.
        include: patterns of layer names to watch; all by default.
        exclude: patterns of layer names to leave out.
        check_heads: judge the heads by the first forward that is read, look there again at what was refused, and say
            which attention is not watched.
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
        self._include, self._exclude = include, exclude
        self._undecided = found.undecided if check_heads else ()
        self._check = HeadCheck(self.all) if check_heads else None
        self._search = HeadSearch(self._undecided) if self._undecided else None
        again = {place.name for place in self._undecided}
        self._held = {one.name: one for one in self.refused if one.name in again}
        self.refused = tuple(
            replace(one, reason=one.reason + _DECIDES) if one.name in again else one for one in self.refused
        )
        self._has_said_what_is_open = self._has_looked = False
        self._say_what_is_left_out({place.name for place in found.undecided} - again)
        self._looks = 0
        self._is_armed = False
        self._adopted: set[str] = set()  # what other ranks have contradicted
        self._others_await = False
        self._unexplained: set[str] = set()
        self._late: list[AttentionLayer] = []
        self._contradicted: dict[str, str] = {}
        self._shown: dict[str, str] = {}  # what contradicts heads that were looked for, in a forward
        self._removed: set[str] = set()

    @property
    def names(self) -> tuple[str, ...]:
        """Their names, in model order."""
        return tuple(layer.name for layer in self.all)

    @property
    def watched(self) -> tuple[AttentionLayer, ...]:
        """Those of them whose heads no forward has contradicted, in model order."""
        return tuple(layer for layer in self.all if layer.name not in self._contradicted)

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
        self._is_armed = self._check is not None and self._looks < _LOOKS
        if self._check is not None and not self._looks:
            self._check.arm()
            if self._search is not None:
                self._search.arm()

    @property
    def is_judging(self) -> bool:
        """Whether the forward that is armed is to be observed for the claims, on this rank or on another."""
        return self._is_armed and (not self._looks or bool(self._awaited()) or self._others_await)

    @property
    def is_first_look(self) -> bool:
        """Whether claims were judged by one forward alone so far, the one that `ran` is of."""
        return self._looks == 1

    def _awaited(self) -> list[str]:
        """Names of the modules that a forward is to decide, and that no forward has called yet."""
        ran = frozenset() if self._search is None else self._search.ran
        return [name for name in self._held if name not in ran]

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

    def verify(self, observer: AttentionObserver) -> bool:
        """Judge the claims once a forward was armed, on every rank at the same readings.

        Args:
            observer: which has seen the forward.

        Returns:
            True at the readings where claims were judged.

        Raises:
            NothingToWatchError: if nothing is left to watch and `strict` is set.
        """
        if self._check is None:
            return False
        if not self._is_armed:
            if not self._looks:
                self._say_what_is_open()
            return False
        is_judging, is_first = self.is_judging, not self._looks
        self._is_armed, self._looks = False, self._looks + 1
        observer.disarm()
        if is_judging:
            with self._warn_once.guard("checking heads"):
                self._judge(observer, is_first=is_first)
            with self._warn_once.guard("looking for heads"):
                # Hooks leave as it stops recording, which isolation would undo.
                recorded = self._search.recorded() if is_first and self._search is not None else {}
                with isolated(self._model, keeps_defaults=True):
                    found = self._found_in(observer, recorded)
                self._admit(found)
                self._has_looked = True
            with self._warn_once.guard("saying what stays refused"):
                self._say_what_stays_refused()
            with self._warn_once.guard("accounting for attention"):
                self._say_what_is_unexplained(observer)
        if is_first and not self.watched and (self._is_strict or not self.all):  # else it was said what is left out
            self._say_that_nothing_is_watched()
        return is_judging

    def _judge(self, observer: AttentionObserver, *, is_first: bool) -> None:
        """Leave out the layers whose heads are not what was claimed."""
        assert self._check is not None
        # A module whose projections are spread over ranks may count the heads of its own rank alone.
        spread = {one.name for one in self.all if any(self.sharding.is_sharded(one, role) for role in one.slices)}
        with isolated(self._model, keeps_defaults=True):
            verdicts = {name: one for name, one in observer.verdicts(self.all).items() if name not in spread}
        shown = {name: one.sentence for name, one in verdicts.items() if one.state == "contradicted"}
        tried: dict[str, str] = {}
        if is_first:  # what observation leaves open or contradicts is run again, with the same inputs
            seen = {name for name, one in verdicts.items() if one.state == "established"}
            tried = self._check.contradictions(leave_out=spread | seen)
        told = {name: f"a run with the inputs of the first forward contradicts its heads: {what}"
                for name, what in tried.items()}  # fmt: skip
        for name, what in shown.items():
            # What a traced run has shown is not given up for what looking on alone shows.
            if name in tried or self.named(name).evidence not in ("trace", "forward"):
                told[name] = f"the first forward contradicts its heads: {what}"
        told = {name: why for name, why in told.items() if name not in self._contradicted}
        self._leave_out(told)
        if told:
            said = "; ".join(f"`{name}`: {why}" for name, why in list(told.items())[:3])
            warnings.warn(
                f"{listed(list(told))} left out from now on. {said}. Describe it with `register_layout`.",
                UnsupportedAttentionWarning,
                stacklevel=6,
            )

    def _leave_out(self, told: Mapping[str, str]) -> None:
        self._contradicted |= told
        kinds = {layer.name: type(layer.module).__name__ for layer in self.all}
        self.refused = (*self.refused, *(Refusal(name, kinds[name], why) for name, why in told.items()))

    def _found_in(self, observer: AttentionObserver, recorded: Mapping[str, Sequence[Inputs]]) -> list[AttentionLayer]:
        """Find the layers that the forward shows: refused before it, or looked at by nobody."""
        found: list[AttentionLayer] = []
        if self._search is not None and recorded:
            looked = self._search.found(recorded)
            seen = observer.verdicts(looked)
            self._shown |= {name: one.sentence for name, one in seen.items() if one.state == "contradicted"}
            found += [one for one in looked if seen[one.name].state != "contradicted"]
        for path, layer in observer.proposals([*self.all, *found]).items():
            if isinstance(layer, AttentionLayer) and self._may_be_watched(path, layer, [*self.all, *found]):
                found.append(layer)
        return [replace(layer, evidence="forward") for layer in found]

    def _may_be_watched(self, path: str, layer: AttentionLayer, others: Sequence[AttentionLayer]) -> bool:
        """Tell whether a layer from observation alone is one that is asked for, beside all others."""
        inside = set(layer.module.modules())
        if any(one.module in inside or layer.module in set(one.module.modules()) for one in others):
            return False
        is_spread = any(self.sharding.is_sharded(layer, role) for role in layer.slices)
        return layer.num_heads > 1 and not is_spread and self._is_chosen(users_name(path))

    def _say_what_is_unexplained(self, observer: AttentionObserver) -> None:
        """Name the attention that ran and is not watched, once for each kind of module."""
        refused = {refusal.name for refusal in self.refused}
        told = [path for path, _ in self._model.named_modules() if users_name(path) in refused]
        with isolated(self._model, keeps_defaults=True):
            seen = [one for one in observer.unexplained(self.all, told=told) if self._is_chosen(users_name(one.name))]
        found = [one for one in seen if one.name not in self._unexplained]
        self._unexplained |= {one.name for one in found}
        kinds: dict[tuple[str, str], list[Unexplained]] = {}
        for one in found:
            kinds.setdefault((one.module_type, one.reason), []).append(one)
        for alike in kinds.values():
            more = f" The same holds for {listed([one.name for one in alike[1:]])}." if alike[1:] else ""
            warnings.warn(alike[0].message + more, UnsupportedAttentionWarning, stacklevel=6)
        self.refused = (
            *self.refused,
            *(Refusal(users_name(one.name), one.module_type, one.reason) for one in found if not one.layer),
        )

    def _is_chosen(self, name: str) -> bool:
        """Tell whether patterns leave a module in; one of a layer chooses all that the layer holds."""
        parts = name.split(".")
        around = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]

        def matches(patterns: Collection[str]) -> bool:
            return any(fnmatchcase(one, pattern) for one in around for pattern in patterns)

        return (self._include is None or matches(self._include)) and not matches(self._exclude or ())

    def sample(self) -> list[str]:
        """Read a few numbers of each layer's key weight, by which ranks know whether they hold the same; waits.

        Returns:
            One text for each layer; empty where other ranks hold a part of the weight, or it cannot be read.
        """
        found = []
        for layer in self.all:
            text = ""
            with suppress(Exception):
                if "key" in layer.slices and not self.sharding.is_sharded(layer, "key"):
                    head = layer.weight("key").detach()[0]
                    numbers = head[:: max(1, len(head) // 4), :: max(1, head.shape[1] // 4)].double().cpu()
                    text = hashlib.sha256(repr(numbers.tolist()).encode()).hexdigest()[:16]
            found.append(text)
        return found

    def findings(self) -> dict[str, Any]:
        """Say what this rank has found out about its layers.

        Returns:
            What a `Roster` is made of, without the layers.
        """
        return {
            "contradicted": {name: why for name, why in self._contradicted.items() if name not in self._adopted},
            "awaits": bool(self._awaited()),
            "late": sorted(self.found_late),
        }

    def adopt(self, roster: Roster) -> None:
        """Leave out what any rank leaves out, so that all have the same numbers.

        Args:
            roster: the layers of all ranks, with their findings.
        """
        self._others_await = roster.awaits
        here = set(self.names)
        for name in roster.contradicted:
            if name in here and name not in self._contradicted:
                self._adopted.add(name)
                self._leave_out({name: "what another rank saw contradicts its heads"})

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
        for module in (*(layer.module for layer in self.all), self._model):
            for parameter in module.parameters():
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

    def _say_what_is_left_out(self, unchecked: Collection[str]) -> None:
        """Warn about what no forward will decide; `unchecked` names what one would."""
        for refusal in self.refused:
            if refusal.name not in self._held:
                later = " With check_heads=True the first forward that is read may show them."
                message = refusal.message + (later if refusal.name in unchecked else "")
                warnings.warn(message, UnsupportedAttentionWarning, stacklevel=5)
        if not (self.all or (self._check is not None and (self._held or _may_attend(self._model)))):
            self._say_that_nothing_is_watched()

    def _say_what_is_open(self) -> None:
        """Warn, at a reading before any forward was armed, about what awaits one."""
        if self._has_said_what_is_open or not (self._held or not self.all):
            return
        self._has_said_what_is_open = True
        of = f" may show those of {listed(sorted(self._held))}" if self._held else " is looked at"
        heads = "The heads of some attention layers" if self.all else "The heads of no attention layer"
        could = "could not be read yet" if self.all else "could be read yet"
        warnings.warn(
            f"{heads} of {type(self._model).__name__} {could}. The first forward that is read{of}.",
            MonitoringWarning,
            stacklevel=6,
        )

    def _say_what_stays_refused(self) -> None:
        """Warn about what a forward was to decide and did not, once for each kind of module, with what it showed."""
        waiting = set(self._awaited()) if self._looks < _LOOKS else set()
        decided = {name: one for name, one in self._held.items() if name not in waiting}
        self._held = {name: one for name, one in self._held.items() if name in waiting}
        kept: dict[str, Refusal] = {}
        for name, refusal in decided.items():
            reason = self._reason_of_forward(refusal)
            if reason is not None:
                kept[name] = Refusal(name, refusal.module_type, reason)
        self.refused = tuple(
            kept.get(one.name, one) for one in self.refused if one.name not in decided or one.name in kept
        )
        kinds: dict[tuple[str, str], list[Refusal]] = {}
        for one in kept.values():
            kinds.setdefault((one.module_type, one.reason), []).append(one)
        for alike in kinds.values():
            more = f" The same holds for {listed([one.name for one in alike[1:]])}." if alike[1:] else ""
            warnings.warn(alike[0].message + more, UnsupportedAttentionWarning, stacklevel=6)

    def _reason_of_forward(self, refusal: Refusal) -> str | None:
        """Say why a module stays refused after a forward; `None` where its heads are read by now."""
        name, search = refusal.name, self._search
        assert search is not None
        if any(layer.name == name for layer in self.all):
            return None
        if name in search.reasons:
            return search.reasons[name]
        shown = [said for other, said in self._shown.items() if other == name or is_inside(other, name)]
        if shown:
            return f"in the first forward that was read, {shown[0]}"
        if any(is_inside(late, name) for late in self.found_late):
            return None
        if name not in search.ran:
            return f"{refusal.reason}, and no call of it in Python was seen in the first forward that was read"
        if not self._has_looked:  # which was said
            return refusal.reason
        return "no softmax-weighted sum over tokens was seen in the first forward that was read"

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


def _may_attend(model: nn.Module) -> bool:
    """Tell whether a forward may attend: torch's own layers do only where they are made for it."""
    return any(isinstance(one, nn.MultiheadAttention) or not _is_of_torch(one) for one in model.modules())


def _is_of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.modules.")


def _uncountable(layer: AttentionLayer) -> Refusal:
    return Refusal(
        layer.name,
        type(layer.module).__name__,
        "its projections are split over ranks, and it does not say how wide a head is, so that its number of heads may "
        "be that of one rank",
        f"Give it an attribute `head_dim`, or skip it with exclude=[{layer.name!r}].",
    )
