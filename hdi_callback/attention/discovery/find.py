"""`find_attention`: the layers of a model that attend, from one forward, and what cannot be read, with reasons."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from itertools import islice, takewhile
from typing import Any

import torch
from torch import nn

from hdi_callback.arguments import function, quoted, torch_module
from hdi_callback.attention import operations as ops
from hdi_callback.attention.discovery.cores import core_of, layout_of_fused
from hdi_callback.attention.discovery.head_weights import Weights, origin
from hdi_callback.attention.discovery.heads import (
    IN,
    FoundAttention,
    Projection,
    columns_of,
    heads_of,
)
from hdi_callback.attention.discovery.labels import (
    FILTERED,
    GAINED,
    GATED,
    NONLINEAR,
    NORMED,
    SUM,
    Flag,
    Labels,
)
from hdi_callback.attention.discovery.own_inputs import forward_of_torchs_attention, own_forward
from hdi_callback.attention.discovery.products import Unreadable
from hdi_callback.attention.discovery.sites import merged_sites, site_of
from hdi_callback.attention.extra_forward import inner_model, nothing_remains
from hdi_callback.attention.layer import ROOT, AttentionLayer, HeadWeight, Refusal, Site, Survey
from hdi_callback.attention.normalisers import SOFTMAX
from hdi_callback.attention.tape import DATA, Cell, Step, Tape, View, walk_back
from hdi_callback.errors import MisconfigurationError, UnsupportedAttentionWarning

RefusedSteps = list[tuple[Step, str]]  # of what cannot be read
Projections = dict[str, list[Projection]]  # role -> those that are summed


# from a tape to attentions


class TapeReader:
    """Reads the attention on a tape, also while it is written."""

    def __init__(self, tape: Tape) -> None:
        self.labels = Labels(tape)
        self.attentions: list[FoundAttention] = []
        self.refused: RefusedSteps = []
        self._next = 0

    @torch.no_grad()
    def go_on(self, last: int | None = None) -> None:
        """Read up to a step, after which the products with its values have run."""
        steps = self.labels.tape.steps
        last = len(steps) - 1 if last is None else last
        for step in steps[self._next : last + 1]:
            if _looks_like_attention(step):
                self.refused.append((step, f"it runs the operation {step.op}, which is not known"))
                continue
            try:
                core = core_of(self.labels, step)
                self.attentions += [heads_of(self.labels, core)] if core is not None else []
            except Unreadable as error:
                self.refused.append((step, str(error)))
            except Exception as error:  # one attention that is not understood leaves the others
                self.refused.append((step, f"reading it failed ({type(error).__name__}: {error})"))
        self._next = max(self._next, last + 1)

    @torch.no_grad()
    def finish(self) -> TapeReader:
        """Read what is left, name what weighs tokens otherwise, and join single heads; return itself."""
        self.go_on()
        labels = self.labels
        self.refused += _without_softmax(labels, self.attentions, self.refused)
        labels.forget()
        labels.tape.normalisers.forget()
        for attn in self.attentions:
            columns_of(labels, attn)
        attentions, refused_groups = _joined_side_by_side(labels, self.attentions)
        paths = {step.path for step, _ in self.refused}
        lone = [attn for attn in attentions if attn.heads == 1 and attn.path in paths]
        self.refused += refused_groups + [(attn.core.step, "other heads of it cannot be read") for attn in lone]
        self.attentions = [attn for attn in attentions if attn not in lone]
        return self


def _looks_like_attention(step: Step) -> bool:
    """Whether an operation of a package takes what may be queries, keys and values."""
    if step.op in ops.WHOLE_LAYERS:
        return True
    if "::" not in step.op or layout_of_fused(step) or len(step.inputs) < len(IN):
        return False
    query, key, value = step.inputs[: len(IN)]
    are_data = all(view.is_float and view.cell.kind == DATA and len(view.shape) >= 3 for view in (query, key, value))
    return are_data and query.shape[-1] == key.shape[-1] and query.cell.is_mapped and key.cell.is_mapped


_MOST_TENSORS = 400  # that are looked at before a product
_NO_SOFTMAX = (
    "it multiplies three computed tensors without a softmax (linear, random-feature, sigmoid, ReLU attention, a hard "
    "choice, a state space, hyper-connections)"
)
_NO_SCORES = "it sums products of two computed tensors over tokens, without scores (as AFT and RWKV do)"


def _without_softmax(labels: Labels, attentions: list[FoundAttention], refused: RefusedSteps) -> RefusedSteps:
    """Return what weighs tokens otherwise: linear attention, state spaces, attention over edges, or without queries."""
    paths = {step.path for step, _ in refused} | {attn.path for attn in attentions}
    first: dict[str | None, tuple[Step, str]] = {}
    without_scores: dict[str | None, tuple[Step, str]] = {}
    for step in labels.tape.steps:
        exponentials = [view.cell.step for view in step.inputs if view.cell.step is not None]
        for exponential in exponentials if step.op in ops.SCATTERS else ():
            scores = exponential.inputs[0].cell if exponential.op == "exp" else None
            if scores is not None and _is_of_two_computed(labels, scores, exponential.path, is_by_element=True):
                reason = f"its softmax runs over the edges of a graph (exponentials that are summed by `{step.op}`)"
                first.setdefault(exponential.path, (exponential, reason))
        if step.path in paths | set(first):
            continue
        product = labels.products.of(step)
        mixed = step.inputs[0] if step.op in ops.CUMULATIVE else None
        if product is not None and product.kind == "scores":
            sides = [(product.first.cell, product.second), (product.second.cell, product.first)]
            if any(labels.may_read(side) and _is_of_two_computed(labels, cell, step.path) for cell, side in sides):
                first[step.path] = step, _NO_SOFTMAX
        elif product is not None and product.is_flipped and product.kind == "weight":
            mixed = product.first
        if mixed is not None and _is_of_two_computed(labels, mixed.cell, step.path, is_by_element=True):
            without_scores.setdefault(step.path, (step, _NO_SCORES))
    return list((without_scores | first).values())


def _is_of_two_computed(labels: Labels, cell: Cell, path: str | None, *, is_by_element: bool = False) -> bool:
    """Whether a tensor comes from a matmul or outer product of two computed ones, with no map or softmax between."""

    # What lies between may mix tokens: a mask, a sum or a cumulative sum, a choice, the loop of a recurrence.
    def computed(cell: Cell) -> list[View]:
        if cell.step is None or cell.step.op in ops.SOFTMAX_LIKE or labels.products.kind(cell.step) == "weight":
            return []
        return [view for view in cell.step.inputs if view.cell.kind == DATA and view.cell.is_mapped]

    for current in islice(walk_back([cell], lambda cell: [view.cell for view in computed(cell)]), _MOST_TENSORS):
        step, pair = current.step, computed(current)
        product = labels.products.of(step)
        # One of another module is of an earlier layer, whose output is mixed here once more.
        is_own = product is not None and product.kind == "scores" and step is not None and step.path == path
        pair = [product.first, product.second] if is_own and product is not None else pair
        is_outer = bool(pair) and current.numel > max(view.numel for view in pair)
        if not is_own and (step is None or step.op != "mul" or not (is_by_element or is_outer)):
            continue
        read = [labels.members_of(label.features) for view in pair if (label := labels.may_read(view)) is not None]
        if len(pair) == len(read) == 2 and not (is_by_element and read[0] & read[1]):
            return True
    return False


def _joined_side_by_side(labels: Labels, attentions: list[FoundAttention]) -> tuple[list[FoundAttention], RefusedSteps]:
    """Join heads that are computed one after the other, and enter one product side by side."""
    groups: dict[tuple[Any, ...], list[FoundAttention]] = {}
    for attn in attentions:
        if attn.outputs:
            kinds = sorted((role, len(maps), maps[0].starts.shape[1]) for role, maps in attn.maps.items())
            groups.setdefault((tuple(step.number for step, _ in attn.outputs), *kinds), []).append(attn)
    joined: set[int] = set()
    refused = []
    for group in groups.values():
        columns = [set(attn.outputs[0][1].starts.flatten().tolist()) for attn in group]
        if len(group) == 1 or len(set().union(*columns)) != sum(map(len, columns)):
            continue
        joined |= {id(attn) for attn in group[1:]}
        role = _role_with_inputs_of_heads(labels, group)
        if role:
            refused.append((group[0].core.step, f"each head's {role} map takes an input of its own"))
            joined.add(id(group[0]))
            continue
        _join(group)
    return [attn for attn in attentions if id(attn) not in joined], refused


def _join(group: list[FoundAttention]) -> None:
    """Join the heads of some attentions into the first of them."""
    first = group[0]
    first.members = [copy(attn) for attn in group]
    first.maps = {role: list(map(_together, zip(*(attn.maps[role] for attn in group)))) for role in first.maps}
    outputs = zip(*(attn.outputs for attn in group)) if len({len(attn.outputs) for attn in group}) == 1 else ()
    first.outputs = [(of_heads[0][0], _together([output for _, output in of_heads])) for of_heads in outputs]
    first.heads = sum(attn.heads for attn in group)
    first.flags = set().union(*(attn.flags for attn in group))


def _role_with_inputs_of_heads(labels: Labels, group: list[FoundAttention]) -> str:
    for role in IN:
        names = {name for attn in group for item in attn.maps.get(role, []) for name in item.names}
        products = (labels.products_of[name].values() for name in names)
        inputs = [frozenset(origin(product.first) for product in of_name) for of_name in products]
        if len(set(inputs)) > 1 and not frozenset.intersection(*inputs):
            return role
    return ""


def _together(items: Sequence[Projection]) -> Projection:
    names = tuple(name for item in items for name in item.names)
    return replace(items[0], names=names, starts=torch.cat([item.starts for item in items]))


# from attentions to layers


OnRead = Callable[[TapeReader], object]


def survey_tape(tape: Tape, on_read: OnRead | None = None, tape_reader: TapeReader | None = None) -> Survey:
    """Return the layers of a model, and what cannot be read, from a tape; `tape_reader` may have begun to read it."""
    with torch._C.DisableTorchFunction(), torch.device("cpu"):  # a model may run under torch.device("meta")
        reader = (TapeReader(tape) if tape_reader is None else tape_reader).finish()
        result = _Layers(reader.labels, reader.attentions).read(reader.refused)
        if on_read is not None:
            on_read(reader)
        return result


class _Layers:
    """Turns attentions into layers."""

    def __init__(self, labels: Labels, attentions: list[FoundAttention]) -> None:
        self._attentions, self._tape, self._model = attentions, labels.tape, labels.tape.model
        self._unread = labels.tape.unread_parameters()
        of_outputs = {name for attn in attentions for _, output in attn.outputs for name in output.names}
        self._weights = Weights(labels, of_outputs)
        self._layers: dict[tuple[object, ...], AttentionLayer] = {}
        self._sites: list[tuple[Site, object]] = []
        self._refused: dict[str, Refusal] = {}

    def read(self, refused: RefusedSteps) -> Survey:
        """Return a layer for each different attention; attentions with the same rows are calls of one layer."""
        for attn in self._attentions:
            try:
                self._add(attn)
            except Unreadable as error:  # noqa: PERF203
                self._refuse(attn.core.step.path or "", str(error))
        for step, reason in refused:
            self._refuse(step.path or "", reason)
        merged = merged_sites(self._sites, self._tape.counts)
        layers = [replace(layer, sites=tuple(merged.get(key, ()))) for key, layer in self._layers.items()]
        return Survey(in_model_order(self._model, layers), tuple(self._refused.values()))

    def _refuse(self, path: str, reason: str) -> None:
        name = layer_name(path)
        self._refused[name] = Refusal(name, reason, type(self._tape.modules[path]).__name__)

    def _add(self, attn: FoundAttention) -> None:
        for place, maps in enumerate([attn.maps, *attn.streams]):
            of_stream = [output for output, stream in zip(attn.outputs, attn.stream_of_output) if stream == place]
            outputs = of_stream or attn.outputs
            key = tuple((role, *(item.key for item in items)) for role, items in sorted(maps.items()))
            if key not in self._layers:
                self._layers[key] = self._layer(attn, maps, outputs)
            if place == 0:
                self._note_sites(attn, key)

    def _note_sites(self, attn: FoundAttention, key: object) -> None:
        first = 0
        for member in attn.members or [attn]:
            count = len(set(member.numbers[0].flatten().tolist()) - {-1})
            if member.core.step.is_recognised or member.core.normaliser is not None:
                order = tuple(range(first, first + count)) if attn.members else ()
                with suppress(Unreadable):
                    self._sites.append((replace(site_of(member, self._tape.steps), order=order), key))
            first += count

    def _layer(self, attn: FoundAttention, maps: Projections, outputs: list[tuple[Step, Projection]]) -> AttentionLayer:
        notes = [*attn.notes, *_caveats(attn.flags)]
        chosen = _distinguishing_maps(maps, attn.flags, notes)
        weights, of_heads = self._weights_of(attn, chosen, notes)
        base = None
        try:
            weights["output"], base = self._weights.output(outputs)
        except Unreadable as error:
            notes.append(f"the output projection: {error}".removesuffix(": "))
        value_dim = weights["value"].width if "value" in weights else attn.width
        if "output" in weights and weights["output"].width != value_dim:
            notes.append("the output projection, which takes heads of another width")
            del weights["output"]
        path = place_of(attn, chosen)
        name = layer_name(path)
        namesakes = sum(layer.name.partition("#")[0] == name for layer in self._layers.values())
        inside = f"{path}." if path else ""
        return AttentionLayer(
            f"{name}#{namesakes + 1}" if namesakes else name, self._tape.modules[path], weights,
            kind=_kind(attn, chosen), key_of=of_heads["key"], value_dim=value_dim,
            value_of=of_heads.get("value", tuple(range(attn.heads))),
            normed=frozenset(role for role in IN if NORMED.of(role) in attn.flags),
            output_module=self._output_module(base, path), notes="; ".join(notes),
            unread=frozenset(each.removeprefix(inside) for each in self._unread if each.startswith(inside)),
        )  # fmt: skip

    def _weights_of(
        self, attn: FoundAttention, maps: Projections, notes: list[str]
    ) -> tuple[dict[str, HeadWeight], dict[str, tuple[int, ...]]]:
        """Return the weights of queries, keys and values, and which of them each head has."""
        weights, of_heads = dict[str, HeadWeight](), dict[str, tuple[int, ...]]()
        path = _common(_modules_of(maps))
        inputs = [self._weights.inputs(items[0]) for items in maps.values()]
        shared = frozenset.intersection(*inputs) if len(inputs) == len(IN) else frozenset()
        for role, items in maps.items():
            chosen, numbers = _different(items, attn.heads) if role != "query" else (items, tuple(range(attn.heads)))
            try:
                weights[role] = self._weights.of(chosen, role, shared, path)
            except Unreadable as error:
                if role == "key":
                    raise
                notes.append(str(error))
                continue
            of_heads[role] = numbers
        return weights, of_heads

    def _output_module(self, base: Projection | None, name: str) -> nn.Module | None:
        """Return the module that is called with the heads side by side; a parameter of the layer's own has none."""
        owners = {parameter.rpartition(".")[0] for parameter in base.names} if base is not None else set()
        owner = owners.pop() if len(owners) == 1 else name
        module = self._tape.modules[owner]
        is_layer = owner == name or name.startswith(f"{owner}.") or not owner
        return None if is_layer or isinstance(module, _NEVER_CALLED) else module


def place_of(attn: FoundAttention, maps: Projections) -> str:
    """Return the path of a layer's module: the one that runs the attention, if it has the parameters."""
    owners = _modules_of(maps)
    path = attn.core.step.path or ""
    if attn.members or not any(owner == path or owner.startswith(f"{path}.") or not path for owner in owners):
        path = _common(owners)
        if path in owners and "." in path:  # one packed projection: the module that attends is around it
            path = path.rpartition(".")[0]
    return path


# used by `nn.MultiheadAttention`, which takes its weight and does not call it
_NEVER_CALLED = (nn.modules.linear.NonDynamicallyQuantizableLinear, nn.MultiheadAttention)


def _modules_of(maps: Projections) -> list[str]:
    return [name.rpartition(".")[0] for items in maps.values() for item in items for name in item.names]


def _distinguishing_maps(maps: Projections, flags: set[Flag], notes: list[str]) -> Projections:
    """Return the projections that tell heads apart, with the same features of queries and keys."""
    if "key" not in maps:
        raise Unreadable("its keys come from no linear map")
    chosen = {"key": _distinguishing(maps["key"], flags, "key")}
    places = chosen["key"][0].places
    if "query" in maps:
        query = [item for item in maps["query"] if set(places) <= set(item.places)]
        if SUM.of("query") not in flags and len(query) != 1:
            raise Unreadable("its queries and keys are put together in different ways")
        if any(len(item.places) > len(places) for item in query):
            notes.append("features of queries that meet no keys of heads")
        chosen["query"] = [item.at(places) for item in query]
    if "value" in maps:
        chosen["value"] = _distinguishing(maps["value"], flags, "value")
    return chosen


def _distinguishing(maps: list[Projection], flags: set[Flag], role: str) -> list[Projection]:
    """Return projections that tell heads apart, but not what all heads share (rotary parts of latent attention)."""
    if len(maps) == 1 or SUM.of(role) in flags:
        return maps
    apart = [item for item in maps if len({tuple(row) for row in item.starts.tolist()}) > 1]
    if len(apart) != 1:
        raise Unreadable(f"its {role} is put together from several maps")
    return apart


_CAVEATS = {
    FILTERED: "that its {} is a filter over several tokens",
    GAINED: "a gain with which its {} is multiplied",
    GATED: "a gate with which its {} is multiplied",
}


def _caveats(flags: set[Flag]) -> list[str]:
    """Return what lies between projections and attention that weights do not show, in words."""
    notes = []
    for kind, detail, role in sorted((flag for flag in flags if flag.role in IN), key=str):
        if kind == NONLINEAR and detail != "clamp":
            notes.append(f"{detail}, through which its {role} passes")
        elif Flag(kind) in _CAVEATS:
            notes.append(_CAVEATS[Flag(kind)].format(role))
    return notes


def _different(maps: list[Projection], heads: int) -> tuple[list[Projection], tuple[int, ...]]:
    """Return each different head once, and the number of each head among these."""
    names = [tuple((item.names[head], *item.starts[head].tolist()) for item in maps) for head in range(heads)]
    order = list(dict.fromkeys(names))
    first = [names.index(name) for name in order]
    different = [
        replace(item, names=tuple(item.names[head] for head in first), starts=item.starts[first]) for item in maps
    ]
    return different, tuple(order.index(name) for name in names)


def _kind(attn: FoundAttention, maps: Projections) -> str:
    names = short_names(name for items in maps.values() for item in items for name in item.names)
    where = f"{'packed in' if len(names) == 1 else 'in'} {quoted(names)}"
    normaliser = SOFTMAX if attn.core.normaliser is None else attn.core.normaliser.name
    return f"{where}{'' if normaliser == SOFTMAX else f'; {normaliser} in place of a softmax'}"


def short_names(parameters: Iterable[str]) -> list[str]:
    """Return the names of the modules of parameters, each once, without the path that all of them share."""
    names = dict.fromkeys(name.removesuffix(".weight") for name in parameters)
    shared = len(_common([name.rpartition(".")[0] for name in names]))
    return [name[shared:].removeprefix(".") for name in names]


def _common(paths: list[str]) -> str:
    levels = zip(*(path.split(".") for path in paths))
    return ".".join(level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels))


def survey(model: nn.Module, forward: Callable[[], object] | None = None, on_read: OnRead | None = None) -> Survey:
    """Return the attention layers of a model, and what cannot be read, with reasons.

    Args:
        model: the model.
        forward: runs a forward of it, without arguments: ``lambda: model(batch)``. Without it, a batch is taken that
            the model brings itself (``example_input_array``, ``input_size`` of timm), or that is made up for a model
            of transformers; if there is none, torch's own attentions are called one by one.
        on_read: takes the `TapeReader` when it has finished, for others to look at.

    Raises:
        MisconfigurationError: if there is no `forward`, and no other way to know.
    """
    torch_module("model", model)
    function("forward", forward, "lambda: model(batch)")
    forward = forward or own_forward(model) or forward_of_torchs_attention(model)
    if forward is None:
        name = type(model).__name__
        raise MisconfigurationError(f"The heads of {name} are read from a forward: write forward=lambda: model(batch).")
    inner = inner_model(model)
    with nothing_remains(inner, forward), Tape(inner) as tape:
        forward()
    return survey_tape(tape, on_read)


def find_attention(model: nn.Module, forward: Callable[[], object] | None = None) -> list[AttentionLayer]:
    """Return the attention layers of a model, in its order, with a warning for each that cannot be read.

    Args:
        model: the model.
        forward: runs a forward of it, without arguments; see `survey`.
    """
    result = survey(model, forward)
    for refusal in result.refused:
        warnings.warn(f"Attention is left out: {refusal}.", UnsupportedAttentionWarning, stacklevel=2)
    return list(result.layers)


def in_model_order(model: nn.Module, layers: Iterable[AttentionLayer]) -> tuple[AttentionLayer, ...]:
    """Return layers in the order of the model's modules."""
    order = {layer_name(name): at for at, (name, _) in enumerate(model.named_modules())}
    return tuple(sorted(layers, key=lambda layer: order.get(layer.name.partition("#")[0], len(order))))


# Of torch.compile, Fabric, the first FSDP and activation checkpointing: layers have the names of the model within.
_WRAPPERS = {"_orig_mod", "_forward_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


def name_without_wrappers(name: str) -> str:
    """Return the dotted name of a module without the wrappers that it is in: ``blocks.0._orig_mod.attn``."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def layer_name(path: str) -> str:
    """Return the name of the layer of a module: its name without wrappers, of the model itself "the model"."""
    return name_without_wrappers(path) or ROOT
