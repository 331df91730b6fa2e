"""`Search`: the attention layers and refusals of one model, gathered step by step.

Its methods are the steps of `discovery`, in that order; each visits modules from the innermost outwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from hdi_callback.attention.finding.conventions import (
    computes_attention,
    has_code_of_attention,
    has_vectors_alone,
    is_called_attention,
    is_named_attention,
    looks_like_attention,
)
from hdi_callback.attention.finding.runtime_finder import layers_observed
from hdi_callback.attention.finding.runtime_verifier import comparison_with_forward
from hdi_callback.attention.isolation import MOST_SECONDS, isolated
from hdi_callback.attention.layer.heads import AttentionLayer, HeadPieces, HeadSlice, RefusedError
from hdi_callback.attention.layer.projections import base_of, is_map, stored_shape
from hdi_callback.attention.layer.registry import Place, is_known_kind, known_layer
from hdi_callback.attention.names import containers, is_inside, is_within, printable
from hdi_callback.attention.observe import AttentionObserver, Verdict
from hdi_callback.attention.trace.head_rows import SINGLE_KEYS
from hdi_callback.attention.trace.inputs import Inputs
from hdi_callback.attention.trace.kinds import KindTracer
from hdi_callback.attention.trace.layers import Found
from hdi_callback.attention.wrappers import is_wrapper, users_name

_MOST_LAYERS_WITHIN = 4  # of what is run to see whether it computes attention beside that of its parts
_NO_SUM = "it computed no softmax-weighted sum over tokens with projections of its own"
_NO_SOFTMAX = f"{_NO_SUM} when it was run with synthetic inputs"
_NO_SOFTMAX_SEEN = f"{_NO_SUM} in the forward that was run"
_NOT_RUN = "it could not be run with synthetic inputs"
_NOT_CALLED = f"{_NOT_RUN}, and no call of it was observed in the forward that was run"
_NOT_RUN_AGAIN = "it could not be run by itself, neither with synthetic inputs nor with those of the forward"
_MAY_BE_HEADS = ", so the {count} attentions of one head in it ({first}, ...) may be layers or the heads of one layer"
_SLOW = "running it with synthetic inputs takes too long"
_EXPORTED = "it is part of a graph that torch.export made, which calls operators in place of modules"
_BEFORE_EXPORT = "Find its heads before the export"
_WITH_FORWARD = "Pass `find_attention` a forward= or describe it with `register_layout`"


def _or_skip(remedy: str, name: str) -> str:
    """Add to a remedy the pattern that skips a module, where it has a name."""
    return f"{remedy}, or skip it with exclude=[{name!r}]." if name else f"{remedy}."


@dataclass(frozen=True)
class Reason:
    """Why nothing is read of a module.

    Attributes:
        text: the reason, as a clause.
        remedy: what to write instead; the usual if that is empty.
        is_open: the module ran, and another run may read it.
        is_decided: the module ran, and no run can read heads of it.
    """

    text: str
    remedy: str = ""
    is_open: bool = False
    is_decided: bool = False


class Search:
    """The modules of a model, with the layers found in them and the reasons of the others.

    Args:
        model: the model.

    Attributes:
        places: every module that computes something, by its name.
        layers: layers whose heads are established, by name.
        reasons: name -> why a module is left out.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.places = {place.name: place for place in _places(model)}
        self._parts = {users_name(printable(name)): module for name, module in model.named_modules()}  # with lists
        self.layers: dict[str, AttentionLayer] = {}
        self.reasons: dict[str, Reason] = {}
        self._registered: set[str] = set()  # names of modules that the registry knows
        self._ran: set[str] = set()
        self._called: set[str] = set()  # names of modules that a forward called
        self._failed: set[str] = set()  # names of those of them that could not be run again with its inputs
        self._of_single_heads: dict[str, str] = {}  # modules whose parts may be layers or heads of one, and that clause
        self._has_forward = False
        self._exported = [name for name, place in self.places.items() if _is_exported(place.module)]
        self._has_vectors_alone = has_vectors_alone(model)
        self._tracer = KindTracer()

    # --- 1. the registry

    def apply_registry(self) -> None:
        """Look every module up in the registry of known heads."""
        for name, place in self.places.items():
            if not is_known_kind(place.module):
                continue
            try:
                with isolated(seconds=MOST_SECONDS):
                    layer = known_layer(place)
            except RefusedError as error:
                self.reasons[name] = Reason(error.reason, error.remedy)
            except Exception as error:  # one odd module costs one refusal
                self.reasons[name] = Reason(f"inspecting it raises {type(error).__name__} ({_first_line(error)})")
            else:
                if layer is None:
                    continue
                self.layers[name] = layer
            self._registered.add(name)

    # --- 2. what modules compute

    def trace(self) -> None:
        """Run copies of modules with synthetic inputs."""
        for _, names in groupby(self._from_the_inside(self.places), _depth):
            layers_in = self._layers_in()
            for name in names:
                if layers_in[name] <= _MOST_LAYERS_WITHIN and self._is_worth_running(name):
                    self._record(name, self._traced(name, None))
        self._leave_single_heads_open()

    def _layers_in(self) -> Counter[str]:
        """Count the layers in each module; those of one head in like places once, as they may be one layer."""
        counted: dict[Any, str] = {}
        for name, layer in self.layers.items():
            place = [part for part in self._around(name).split(".") if not part.isdecimal()]
            counted[name if layer.num_heads > 1 else (*place, type(layer.module))] = name
        return Counter(around for name in counted.values() for around in containers(name))

    def _around(self, name: str) -> str:
        """The name of the module around another that is no list."""
        return next((around for around in containers(name) if around in self.places), "")

    def _leave_single_heads_open(self) -> None:
        """Refuse layers of one head without an output projection in a module that could not be run, for now."""
        single = [layer for layer in self.layers.values() if self._may_be_a_head(layer)]
        heads = {parameter for layer in single for parameter in layer.module.parameters()}
        beside: dict[str, list[str]] = {}
        for layer in single:
            for around in self._not_run_around(layer.name, heads):
                beside.setdefault(around, []).append(layer.name)
        for name, layers in sorted(beside.items(), key=lambda one: _depth(one[0]), reverse=True):
            layers = [other for other in layers if other in self.layers]
            if len(layers) > 1:
                self._of_single_heads[name] = _MAY_BE_HEADS.format(count=len(layers), first=layers[0])
                text = f"{_NOT_RUN}{self._of_single_heads[name]}"
                self.reasons[name] = Reason(text, _or_skip(_WITH_FORWARD, name), is_open=True)
                self.layers = {other: layer for other, layer in self.layers.items() if other not in layers}

    def _may_be_a_head(self, layer: AttentionLayer) -> bool:
        """Return whether a layer of one head gives too few features to be followed by another one, or is in a list."""
        if layer.num_heads > 1 or "output" in layer.slices:
            return False
        is_in_list, value = layer.name.count(".") == _depth(self._around(layer.name)) + 1, layer.slices.get("value")
        return is_in_list or (value is not None and layer.value_dim < value.in_features)

    def _not_run_around(self, name: str, heads: Container[nn.Parameter]) -> Iterator[str]:
        """The modules around a head that could not be run, up to the first that has a matrix beside such heads."""
        for around in containers(name):
            place = self.places.get(around)
            plain = (nn.Module.forward, nn.Sequential.forward)  # which join no outputs
            has_forward = place is not None and type(place.module).forward not in plain
            if has_forward and around not in self._ran | self._registered:
                yield around
            if any(parameter.dim() > 1 and parameter not in heads for parameter in self._parts[around].parameters()):
                return

    def trace_recorded(self, recorded: Mapping[str, Sequence[Inputs]]) -> None:
        """Run copies of modules with inputs of a real forward.

        Args:
            recorded: name of a module -> its arguments, in each of the ways in which they may be cut.
        """
        self._has_forward = True
        self._called |= recorded.keys()
        for name in self._from_the_inside(recorded):
            found = self._traced(name, recorded[name]) if recorded[name] else None
            if found is None:
                self._failed.add(name)
                if name in self._of_single_heads:
                    text = f"{self._why_not_run(name)}{self._of_single_heads[name]}"
                    self.reasons[name] = Reason(text, is_open=True)
            else:  # it is known by now what several keys show, and what the heads of the parts are
                if name in self._of_single_heads:
                    self.reasons.pop(name, None)
                for other in [one for one, why in self.reasons.items() if why.is_open and why.text == SINGLE_KEYS]:
                    if is_within(other, {name}):
                        del self.reasons[other]
            self._record(name, found, is_of_forward=True)

    def _traced(self, name: str, recorded: Sequence[Inputs] | None) -> Sequence[Found] | None:
        def is_known(path: str) -> bool:
            return self._is_known(users_name(_joined(name, path)), name)

        return self._tracer.found_in(name, self.places[name].module, recorded, is_known=is_known)

    def _from_the_inside(self, names: Mapping[str, object]) -> list[str]:
        return sorted(names, key=_depth, reverse=True)

    def _is_worth_running(self, name: str) -> bool:
        place = self.places[name]
        if is_within(name, self._registered):
            return False
        if any(is_lazy(parameter) for parameter in place.module.parameters()) or not _holds_matrices(place.module):
            return False
        return not self._is_slow(name)

    def _is_slow(self, name: str) -> bool:
        """Return whether a module, or a part of it, took too long to run."""
        return any(self._tracer.is_slow(part) for part in self.places[name].module.modules())

    def _is_known(self, path: str, around: str) -> bool:
        """Return whether the cores at a path belong to a layer that is complete."""
        if is_within(path, self._registered):
            return True
        for name in (path, *containers(path)):
            # The projection of outputs may lie beside a module, and no further away; one head may be one of several.
            layer = self.layers.get(name)
            is_far = _depth(name) - _depth(around) > 2
            if layer is not None and ("output" in layer.slices or (is_far and layer.num_heads > 1)):
                return True
        return False

    def _record(self, name: str, found: Sequence[Found] | None, *, is_of_forward: bool = False) -> None:
        if found is None:
            return
        self._ran.add(name)
        for one in found:
            full = users_name(_joined(name, one.path))
            if one.layer is None and len(one.cores) > 1:
                self._drop_single_heads(full)
            known = self.reasons.get(full)
            is_open = known is not None and known.is_open
            if one.layer is None:
                is_reported = any(is_inside(other, full) for other in self._registered & self.reasons.keys())
                is_new = known is None or (is_of_forward and is_open)
                if is_new and not is_reported and not self._is_explained(full):
                    self.reasons[full] = Reason(one.reason, "", one.is_undecided, not one.is_undecided)
                continue
            if one.is_undecided and is_open and not is_of_forward:
                continue  # an argument that changes its heads may be among those that were left out
            layer = replace(one.layer, name=users_name(one.layer.name))
            beside = [other.reason for other in found if other.layer is None and other.path == one.path]
            if beside and not layer.left_out:
                layer = replace(layer, left_out=f"another attention in it ({beside[0]})")
            before = self.layers.get(layer.name)
            if before is None or len(before.slices) < len(layer.slices):
                self.layers[layer.name] = layer
            self.reasons.pop(full, None)
            self._drop_parts_of(layer)
            self._name_by_part(layer)

    def _drop_single_heads(self, around: str) -> None:
        """Drop layers of a single head in a module that was found to join their outputs, and cannot be read."""
        single = {name for name, layer in self.layers.items() if layer.num_heads == 1 and is_inside(name, around)}
        self.layers = {name: layer for name, layer in self.layers.items() if name not in single}

    def _drop_parts_of(self, whole: AttentionLayer) -> None:
        """Drop layers of a single head that were found to be the heads of another one."""
        key = whole.slices["key"]
        if not isinstance(key, HeadPieces):
            return
        owners = {piece.owner for piece in key.pieces}
        for name, layer in list(self.layers.items()):
            is_head = layer is not whole and layer.num_heads == 1 < whole.num_heads and is_inside(name, whole.name)
            if is_head and not owners.isdisjoint(layer.module.modules()):
                del self.layers[name]

    def _name_by_part(self, whole: AttentionLayer) -> None:
        """If a module uses the weights of its part itself, keep its own layer, under the name of the part."""
        for name, layer in list(self.layers.items()):
            if layer is not whole and is_inside(name, whole.name) and _has_same_keys(layer, whole):
                self.layers.pop(whole.name, None)
                self.layers[name] = replace(whole, name=name)

    # --- 3. names

    def refuse_silent_modules(self) -> None:
        """Refuse modules that are called attention and ran without a softmax over tokens."""
        explained = self._modules_of_layers()
        reported = {*self.layers, *self.reasons}
        reported |= {name for name, place in self.places.items() if id(place.module) in explained}
        reported |= {around for name in reported for around in containers(name)}
        for name, place in self.places.items():
            is_called = place.parent is not None and is_called_attention(place.module) and looks_like_attention(place)
            if name in self._ran and name not in reported and is_called:
                self.reasons[name] = Reason(self._tracer.function_in(place.module) or _NO_SOFTMAX)

    # --- 4. and 5. a real forward

    def undecided(self) -> dict[str, Place]:
        """Return the modules whose heads a real forward may show.

        Returns:
            Their places by name, in model order.
        """
        explained = self._modules_of_layers()
        around_registered = {around for name in self._registered for around in containers(name)}
        found = {name for name in self.reasons if name not in self._registered and name in self.places}
        for name, place in self.places.items():
            is_open = name not in self._ran and name not in self._registered and id(place.module) not in explained
            is_open &= name not in around_registered
            is_open &= name in self._called or not self._has_forward or not self._holds_others(name)
            is_alike = looks_like_attention(place) or (self._has_vectors_alone and computes_attention(place.module))
            # A whole model may be called anything; its own code counts where nothing else may hold the attention.
            is_alike |= place.parent is None and not (found or self.layers) and has_code_of_attention(place)
            if is_open and is_alike:
                found.add(name)
        inner = found - {around for name in found for around in containers(name)}
        inner |= {name for name in found if name in self.reasons or self.may_attend_itself(name)}
        known = self.layers.keys() | self._registered
        return {name: self.places[name] for name in self.places if name in inner and not is_within(name, known)}

    def _holds_others(self, name: str) -> bool:
        """Return whether all parts of a module have a place elsewhere, where they are called and searched."""
        own = self.places[name].module
        names = {id(place.module): other for other, place in self.places.items()}
        parts = {names.get(id(part)) for part in own.modules() if list(part.parameters(recurse=False))}
        return not any(part is None or is_within(part, {name}) for part in parts)

    def may_attend_itself(self, name: str) -> bool:
        """Return whether a module that did not run may attend by itself, beside attention in its children.

        Args:
            name: of a module.

        Returns:
            True if it resembles attention, and two maps or more lie directly in it.
        """
        place = self.places[name]
        maps = [stored_shape(base_of(child), "weight") or () for child in place.module.children() if is_map(child)]
        is_feed_forward = len(maps) == 2 and maps[0][:2] == maps[1][1::-1] != maps[1][:2]
        count = 0 if is_feed_forward else len(maps)
        # Tokens and tables of positions, which lie there once for all sequences, are no maps.
        count += sum(
            parameter.dim() >= 2 and min(parameter.shape[:2]) > 1
            for parameter in place.module.parameters(recurse=False)
        )
        return name not in self._ran and count > 1 and looks_like_attention(place)

    def compare(self, observer: AttentionObserver, ways: Mapping[str, Sequence[Inputs]]) -> None:
        """Compare the layers found with the inputs of attention in a real forward.

        Args:
            observer: of `layers`, disarmed after the forward.
            ways: the arguments of each module in that forward.
        """
        for name, verdict in observer.verdicts().items():
            if name in self.layers:
                self._correct(self.layers[name], verdict, ways.get(name, ()))
        reasons = {name: why.text for name, why in self.reasons.items()}
        decided = {name for name, why in self.reasons.items() if why.is_decided}
        for layer in layers_observed(observer, list(self.layers.values()), reasons, decided):
            if not is_within(layer.name, self._registered):
                self.layers[layer.name] = layer
                self.reasons.pop(layer.name, None)
        refused = [path for path, _ in self.model.named_modules() if users_name(printable(path)) in self.reasons]
        for attention in observer.unexplained(list(self.layers.values()), reported=refused):
            read, name = self.layers.get(attention.layer), users_name(printable(attention.name))
            if read is None:
                self.reasons[name] = Reason(self._why_not_run(name) if name in self._failed else attention.reason)
            elif not read.left_out:
                self.layers[attention.layer] = replace(
                    read, left_out=self._left_out_of(read, ways.get(attention.layer, ()))
                )

    def refuse_silent_in_forward(self, names: Iterable[str]) -> None:
        """Refuse modules that were undecided before a real forward and showed no attention in it.

        Args:
            names: of the modules that were run again with the inputs of that forward.
        """
        for name in names:
            known = (*self.layers, *(other for other in self.reasons if other != name))
            is_reported = any(name == other or is_inside(other, name) or is_inside(name, other) for other in known)
            is_named = is_named_attention(self.places[name].module)  # of other code nobody expects any
            is_silent = name in self._ran and name not in self.reasons and not is_reported
            if is_named and is_silent and not self._is_explained(name):
                hidden = self._tracer.function_in(self.places[name].module)
                self.reasons[name] = Reason(hidden or _NO_SOFTMAX_SEEN)

    def _left_out_of(self, layer: AttentionLayer, ways: Sequence[Inputs]) -> str:
        """The further tokens that a layer attends to, in words, by the arguments of real calls."""
        found = self._tracer.found_in(layer.name, layer.module, ways) or ()
        reasons = [result.layer.left_out for result in found if result.layer is not None and result.layer.left_out]
        return reasons[0] if reasons else "the tokens that do not come from its projections"

    def _correct(self, layer: AttentionLayer, verdict: Verdict, recorded: Sequence[Inputs]) -> None:
        """Read a layer again with the inputs of a forward that contradicts it."""
        what = comparison_with_forward(layer, verdict, recorded)
        if what is None:
            return
        name = layer.name
        self.layers.pop(name, None)
        found = self._tracer.found_in(name, layer.module, recorded)
        if found and all(result.layer is not None for result in found):
            self._record(name, found)
        elif isinstance(what, AttentionLayer):
            self.layers[name] = what
        else:
            self.reasons[name] = Reason(f"in the forward that was run, {what}")

    def reason_of(self, name: str) -> Reason:
        """Return why nothing is read of a module.

        Args:
            name: of a module that is refused or undecided.

        Returns:
            The reason.
        """
        if self.is_exported(name):
            return Reason(_EXPORTED, _or_skip(_BEFORE_EXPORT, name))
        if name in self.reasons:
            return self.reasons[name]
        module = self.places[name].module
        if isinstance(module, torch.jit.ScriptModule):
            return Reason("it is compiled by torch.jit.script, whose operations cannot be traced")
        if any(is_lazy(parameter) for parameter in module.parameters()):
            return Reason("its lazy parameters have no shape before the first forward")
        if self._tracer.is_slow(module):
            return Reason(_SLOW, _or_skip(_WITH_FORWARD, name))
        if name in self._failed:
            return Reason(self._why_not_run(name))
        return Reason(_NOT_CALLED) if self._has_forward else Reason(_NOT_RUN, _or_skip(_WITH_FORWARD, name))

    def _why_not_run(self, name: str) -> str:
        return _NOT_RUN_AGAIN + self._tracer.error_of(self.places[name].module)

    def is_exported(self, name: str) -> bool:
        """Return whether a module is part of a graph of torch.export, of which no forward shows more.

        Args:
            name: of the module.

        Returns:
            True if so.
        """
        return any(is_within(name, {other}) for other in self._exported)

    def _is_explained(self, name: str) -> bool:
        place = self.places.get(name)
        return place is not None and id(place.module) in self._modules_of_layers()

    def _modules_of_layers(self) -> set[int]:
        return {id(layer.module) for layer in self.layers.values()}


# --- places and names


def _places(model: nn.Module) -> Iterator[Place]:
    """Walk the model in its own order; a module under two names is visited once, under its first.

    What wraps a module for training (FSDP, torch.compile, activation checkpointing) is skipped, and is in no name.
    """
    parents: dict[int, nn.Module | None] = {}
    for module in model.modules():
        around = parents.get(id(module)) if is_wrapper(module) else module
        for child in module.children():
            parents.setdefault(id(child), around)
    for name, module in model.named_modules():
        if isinstance(module, (nn.ModuleDict, nn.ModuleList)) or is_wrapper(module):  # which compute nothing themselves
            continue
        yield Place(users_name(printable(name)), module, parents.get(id(module)))


def _is_exported(module: nn.Module) -> bool:
    """Return whether a module is a graph of torch's own operators, which calls no module that it holds."""
    nodes = module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ()
    return any(isinstance(node.target, torch._ops.OpOverload) for node in nodes if node.op == "call_function")


def _holds_matrices(module: nn.Module) -> bool:
    """Return whether a module may hold projections: matrices, and parts or code of its own."""
    if type(module).__module__.startswith("torch.nn.modules") and not isinstance(
        module, (nn.Sequential, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.MultiheadAttention)
    ):
        return False
    # A lazy module, whose sizes follow from the first forward, may hold any.
    return any(is_lazy(parameter) or parameter.dim() >= 2 for parameter in module.parameters()) or any(
        type(getattr(part, "in_features", None)) is int for part in module.modules()
    )


def _has_same_keys(layer: AttentionLayer, other: AttentionLayer) -> bool:
    """Return whether the keys of two layers are the same features of one parameter."""
    one, two = layer.slices["key"], other.slices["key"]
    if not (isinstance(one, HeadSlice) and isinstance(two, HeadSlice)) or one.owner is not two.owner:
        return False
    names = {part.parameter.rpartition(".")[-1] for part in (one, two)}
    return len(names) == 1 and one.index().tolist() == two.index().tolist()


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else "nothing more is said"


def _joined(name: str, path: str) -> str:
    return ".".join(part for part in (name, path) if part)


def _depth(name: str) -> int:
    return len(name.split(".")) if name else 0
