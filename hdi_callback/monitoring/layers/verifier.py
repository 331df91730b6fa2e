"""`HeadVerifier`: checks heads against the first forwards that are read, and finds attention that is not watched."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from torch import nn

from hdi_callback.attention import (
    AttentionLayer,
    Refusal,
    RuntimeFinder,
    RuntimeVerifier,
    is_named_attention,
    layers_observed,
    message_of_part,
)
from hdi_callback.attention.finding.runtime_verifier import comparison_with_forward
from hdi_callback.attention.isolation import isolated
from hdi_callback.attention.names import is_inside
from hdi_callback.attention.observe import AttentionObserver, Unexplained
from hdi_callback.attention.trace.inputs import Inputs
from hdi_callback.attention.wrappers import users_name
from hdi_callback.errors import MonitoringWarning, NothingToWatchError, UnsupportedAttentionWarning
from hdi_callback.monitoring.absent import listed
from hdi_callback.monitoring.layers.layers import WatchedLayers
from hdi_callback.monitoring.layers.refusals import may_attend, nothing_to_watch, warn_by_kind
from hdi_callback.monitoring.warn_once import WarnOnce

_DECIDES = "; the first captured forward decides"
_MOST_READINGS = 3  # armed readings in which claims are verified, for layers that do not run in each of them


class HeadVerifier:
    """Verify the heads of layers in the first forwards, and search refused modules there again.

    Args:
        model: the model.
        layers: its layers, found without a forward.
        is_on: verify; else only refusals are reported.
        strict: raise an error if there is nothing to watch.
        warn_once: warns once of each kind of failure.

    Raises:
        NothingToWatchError: if there is nothing to watch and `strict` is set.
    """

    def __init__(
        self, model: nn.Module, layers: WatchedLayers, *, is_on: bool, strict: bool, warn_once: WarnOnce
    ) -> None:
        self._model, self._layers, self._is_strict, self._warn_once = model, layers, strict, warn_once
        undecided = layers.undecided if is_on else ()
        self._check = RuntimeVerifier(layers.all) if is_on else None
        self._search = RuntimeFinder(undecided) if undecided else None
        pending = {place.name for place in undecided}
        self._named = {place.name for place in undecided if is_named_attention(place.module)}
        self._pending = {
            refusal.name: refusal for refusal in layers.refused if refusal.name in pending
        }  # until a forward decides
        layers.decide({name: replace(one, reason=one.reason + _DECIDES) for name, one in self._pending.items()})
        self._has_warned_of_pending = self._has_searched = False
        self._warn_of_refused({place.name for place in layers.undecided} - pending)
        self._count = 0  # readings whose forward verified claims
        self._is_armed = False
        self._modules: frozenset[int] = frozenset()  # of the last armed forward
        self._has_grown = False  # since then: blocks may be added in the middle of a run
        self._others_await = False
        self._unexplained: set[str] = set()
        self._read_in_part: set[str] = set()  # layers of which a part is left out, already reported
        self._contradictions: dict[str, str] = {}  # name of a searched module -> what contradicts its heads

    @property
    def ran(self) -> frozenset[str]:
        """Names of the layers that ran in the verified forward."""
        return frozenset(() if self._check is None else self._check.ran)

    def arm(self) -> None:
        """Verify heads in the next forward, if there is still something to verify."""
        modules = frozenset(map(id, self._model.modules()))
        self._has_grown = bool(self._count) and not modules <= self._modules
        self._modules = modules
        self._is_armed = self._check is not None and (self._count < _MOST_READINGS or self._has_grown)
        if self._check is not None and not self._count:
            self._check.arm()
            if self._search is not None:
                self._search.arm()

    @property
    def is_verifying(self) -> bool:
        """Whether heads are verified in the armed forward, on this rank or on another."""
        is_awaited = not self._count or self._has_grown or bool(self._undecided()) or self._others_await
        return self._is_armed and is_awaited

    @property
    def is_first_reading(self) -> bool:
        """Whether exactly one forward has verified heads so far, that of `ran`."""
        return self._count == 1

    def _undecided(self) -> list[str]:
        """Names of the modules that wait for a forward to decide, and that no forward has called yet."""
        ran = frozenset() if self._search is None else self._search.ran
        return [name for name in self._pending if name not in ran]

    def suspend(self) -> None:
        """Remove the hooks."""
        for recorder in (self._check, self._search):
            if recorder is not None:
                recorder.suspend()

    def resume(self) -> None:
        """Put the hooks back after `suspend`."""
        for recorder in (self._check, self._search):
            if recorder is not None:
                recorder.resume()

    def findings(self) -> dict[str, bool]:
        """This rank's findings for other ranks.

        Returns:
            The input of `Roster`: whether this rank waits for further forwards.
        """
        return {"awaits": bool(self._undecided())}

    def adopt(self, *, others_await: bool) -> None:
        """Verify as long as any rank does, so that all arm the same forwards.

        Args:
            others_await: whether any rank waits for further forwards.
        """
        self._others_await = others_await

    def verify(self, observer: AttentionObserver) -> bool:
        """Verify the heads in the armed forward, on every rank at the same readings.

        Args:
            observer: the observer of the forward.

        Returns:
            True if heads were verified at this reading.

        Raises:
            NothingToWatchError: if nothing is left to watch and `strict` is set.
        """
        if self._check is None:
            return False
        if not self._is_armed:
            if not self._count:
                self._warn_of_pending()
            return False
        is_verifying, is_first = self.is_verifying, not self._count
        self._is_armed, self._count = False, self._count + 1
        observer.disarm()
        if is_verifying:
            with self._warn_once.guard("checking heads"):
                observer.note_hooks()
                self._leave_out_contradicted(observer)
            with self._warn_once.guard("searching for heads"):
                # Removes the recorder's hooks; within isolation that would be undone.
                recorded = self._search.recorded() if is_first and self._search is not None else {}
                with isolated(self._model, keeps_defaults=True):
                    found = self._found_in(observer, recorded)
                self._layers.admit(found)
                self._has_searched = True
            with self._warn_once.guard("saying what stays refused"):
                self._warn_of_decided()
            with self._warn_once.guard("accounting for attention"):
                self._warn_of_unexplained(observer)
        # Layers that are left out have been reported.
        if is_first and not self._layers.watched and (self._is_strict or not self._layers.all):
            self._report_nothing_to_watch()
        return is_verifying

    def _leave_out_contradicted(self, observer: AttentionObserver) -> None:
        """Leave out the layers whose heads the forward contradicts."""
        assert self._check is not None
        layers = self._layers
        # A module whose projections are spread over ranks may count only the heads of its own rank.
        spread = {
            layer.name for layer in layers.all if any(layers.sharding.is_sharded(layer, role) for role in layer.slices)
        }
        with isolated(self._model, keeps_defaults=True):
            verdicts = {name: verdict for name, verdict in observer.verdicts(layers.all).items() if name not in spread}
        against = self._check.contradictions(verdicts, leave_out=spread)
        layers.leave_out_parts(self._check.parts)
        contradicted = {name: f"the first forward contradicts its heads: {what}" for name, what in against.items()}
        contradicted = {name: why for name, why in contradicted.items() if not layers.is_contradicted(name)}
        layers.leave_out(contradicted)
        if contradicted:
            why = "; ".join(f"`{name}`: {why}" for name, why in list(contradicted.items())[:3])
            is_or_are = "is" if len(contradicted) == 1 else "are"
            warnings.warn(
                f"{listed(list(contradicted))} {is_or_are} left out from now on. {why}. "
                "Describe the heads with `register_layout`.",
                UnsupportedAttentionWarning,
                stacklevel=6,
            )

    def _found_in(self, observer: AttentionObserver, recorded: Mapping[str, Sequence[Inputs]]) -> list[AttentionLayer]:
        """The layers that the forward shows: refused before it, or not proposed at all."""
        found: list[AttentionLayer] = []
        if self._search is not None and recorded:
            searched = self._search.found(recorded)
            verdicts = observer.verdicts(searched)
            # They were traced with the inputs of this forward, which observation does not outweigh.
            shown = {layer.name: comparison_with_forward(layer, verdicts.get(layer.name), ()) for layer in searched}
            self._contradictions |= {name: what for name, what in shown.items() if isinstance(what, str)}
            found += [layer for layer in searched if layer.name not in self._contradictions]
        reasons, decided = ({}, set()) if self._search is None else (self._search.reasons, self._search.decided)
        observed = layers_observed(observer, [*self._layers.all, *found], reasons, decided)
        return [replace(layer, evidence="forward") for layer in found] + list(filter(self._may_be_watched, observed))

    def _may_be_watched(self, layer: AttentionLayer) -> bool:
        """Return whether a layer from observation alone is chosen and not watched yet."""
        is_spread = any(self._layers.sharding.is_sharded(layer, role) for role in layer.slices)
        # A taken name belongs to a layer that was replaced, or that moved when others before it were deleted.
        is_free = layer.name not in {other.name for other in self._layers.all}
        return not is_spread and is_free and self._layers.is_chosen(layer.name)

    def _warn_of_unexplained(self, observer: AttentionObserver) -> None:
        """Warn of attention that ran and is not watched, once for each kind of module."""
        layers = self._layers
        here = set(self._model.modules())
        # A replacement of a layer is reported with that layer.
        refused = {refusal.name for refusal in layers.refused} | {
            layer.name for layer in layers.all if layer.module not in here
        }
        reported = [path for path, _ in self._model.named_modules() if users_name(path) in refused]
        with isolated(self._model, keeps_defaults=True):
            unexplained = observer.unexplained(layers.all, reported=reported)
        found = [
            attention for attention in unexplained
            if attention.name not in self._unexplained and layers.is_chosen(users_name(attention.name))
        ]  # fmt: skip
        self._unexplained |= {attention.name for attention in found}
        in_part = {layer.name: layer for layer in layers.all if layer.left_out}
        # The warning of such a layer states what is left out.
        found = [attention for attention in found if attention.layer not in in_part]
        found = [
            replace(attention, message=self._of_taken_name(attention)) if self._has_taken_name(attention) else attention
            for attention in found
        ]
        new = [layer for name, layer in in_part.items() if name not in self._read_in_part]
        self._read_in_part |= in_part.keys()
        kinds = (Refusal(layer.name, type(layer.module).__name__, layer.left_out) for layer in new)
        warn_by_kind(zip(kinds, map(message_of_part, new)), stacklevel=6)
        refusals = [Refusal(users_name(attention.name), attention.module_type, attention.reason) for attention in found]
        warn_by_kind(zip(refusals, (attention.message for attention in found)), stacklevel=6)
        layers.refuse(refusal for one, refusal in zip(found, refusals) if not one.layer)

    def _has_taken_name(self, one: Unexplained) -> bool:
        """Return whether attention has the name of another layer, which is watched under that name."""
        known = next((layer for layer in self._layers.all if layer.name == users_name(one.name)), None)
        return known is not None and known.module is not self._model.get_submodule(one.name)

    @staticmethod
    def _of_taken_name(one: Unexplained) -> str:
        return (
            f"The attention in `{one.name}` ({one.module_type}) is not watched: modules were moved, and the layer "
            "that had this name before is watched under it. A new monitor would watch both."
        )

    def _warn_of_refused(self, unchecked: Collection[str]) -> None:
        """Warn of refusals that no forward will decide; `unchecked`: those that one would with check_heads."""
        for refusal in self._layers.refused:
            if refusal.name not in self._pending:
                later = " With check_heads=True the first captured forward may show them."
                message = refusal.message + (later if refusal.name in unchecked else "")
                warnings.warn(message, UnsupportedAttentionWarning, stacklevel=5)
        if not (self._layers.all or (self._check is not None and (self._pending or may_attend(self._model)))):
            self._report_nothing_to_watch()

    def _warn_of_pending(self) -> None:
        """Warn, at a reading before any armed forward, of modules that wait for one."""
        if self._has_warned_of_pending or not (self._pending or not self._layers.all):
            return
        self._has_warned_of_pending = True
        of = f" may show those of {listed(sorted(self._pending))}" if self._pending else " may show them"
        heads = "The heads of some attention layers" if self._layers.all else "The heads of no attention layer"
        could = "could not be read yet" if self._layers.all else "could be read yet"
        warnings.warn(
            f"{heads} of {type(self._model).__name__} {could}. The first captured forward{of}.",
            MonitoringWarning,
            stacklevel=6,
        )

    def _warn_of_decided(self) -> None:
        """Warn of modules that a forward did not decide, once for each kind, with what the forward showed."""
        waiting = set(self._undecided()) if self._count < _MOST_READINGS else set()
        decided = {name: one for name, one in self._pending.items() if name not in waiting}
        self._pending = {name: one for name, one in self._pending.items() if name in waiting}
        known: dict[str, Refusal | None] = {}
        for name, refusal in decided.items():
            reason = self._reason_of_forward(refusal)
            known[name] = None if reason is None else Refusal(name, refusal.module_type, reason)
        self._layers.decide(known)
        warn_by_kind(((one, one.message) for one in known.values() if one is not None), stacklevel=6)

    def _reason_of_forward(self, refusal: Refusal) -> str | None:
        """Reason why a module stays refused after a forward; `None` if its heads are read by now."""
        name, search = refusal.name, self._search
        assert search is not None
        if any(layer.name == name for layer in self._layers.all):
            return None
        if name in search.reasons:
            return search.reasons[name]
        against = [what for other, what in self._contradictions.items() if other == name or is_inside(other, name)]
        if against:
            return f"in the first captured forward, {against[0]}"
        if any(is_inside(late, name) for late in self._layers.found_late):
            return None
        if name not in search.ran:
            return f"{refusal.reason}, and no call of it in Python was observed in the first captured forward"
        if not self._has_searched:  # the search failed, which was reported
            return refusal.reason
        if name not in self._named:  # it is not named attention, so nothing is missed
            return None
        return search.function_in(name) or (
            "it computed no softmax-weighted sum over tokens with projections of its own in the first captured forward"
        )

    def _report_nothing_to_watch(self) -> None:
        message = nothing_to_watch(self._model)
        if self._is_strict:
            raise NothingToWatchError(message)
        warnings.warn(message, MonitoringWarning, stacklevel=6)
