"""`find_attention`: the layers of a model that attend, from one forward, and what cannot be read, with reasons."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hdi_callback.arguments import function, torch_module
from hdi_callback.attention.cores import ELEMENT_BY_ELEMENT, core_of, layout_of_fused
from hdi_callback.attention.extra_forward import inner_model, nothing_remains
from hdi_callback.attention.heads import IN, FoundAttention, Projection, columns_of, heads_of, maps_that_are_shared
from hdi_callback.attention.labels import (
    CENTRED,
    FILTERED,
    GAINED,
    GATED,
    NONLINEAR,
    NORMED,
    SEVERAL,
    Labels,
    Unreadable,
)
from hdi_callback.attention.layer import AttentionLayer, HeadWeight, Refusal, Site, Survey
from hdi_callback.attention.operations import COPIES, EXPONENTIALS, SCATTERS, SOFTMAX_LIKE
from hdi_callback.attention.own_inputs import own_forward
from hdi_callback.attention.registry import known_layers
from hdi_callback.attention.sites import merged_sites, ordinals, site_of
from hdi_callback.attention.tape import DATA, Cell, Step, Tape, View
from hdi_callback.attention.terms import Weights, origin
from hdi_callback.errors import MisconfigurationError, UnsupportedAttentionWarning

__all__ = ["OnRead", "claims_of", "find_attention", "place_of", "read_tape", "survey"]


Reasons = list[tuple[Step, str]]  # of what cannot be read


# from a tape to claims


class Reading:
    """Reads the attention on a tape, also while it is written.

    Attributes:
        labels: the labels.
        claims: what was read.
        refused: what cannot be read, with reasons.
    """

    def __init__(self, tape: Tape) -> None:
        self.labels = Labels(tape)
        self.claims: list[FoundAttention] = []
        self.refused: Reasons = []
        self._next = 0

    @torch.no_grad()
    def go_on(self, last: int | None = None) -> None:
        """Read up to a step, behind which the products with its values have run."""
        steps = self.labels.tape.steps
        last = len(steps) - 1 if last is None else last
        for step in steps[self._next : last + 1]:
            if _looks_like_attention(step):
                self.refused.append((step, f"it runs the operation {step.op}, which is not known"))
                continue
            try:
                claim = _claim(self.labels, step)
            except Unreadable as error:
                self.refused.append((step, str(error)))
                continue
            except Exception as error:  # one attention that is not understood leaves the others
                self.refused.append((step, f"reading it failed ({type(error).__name__}: {error})"))
                continue
            if claim is not None:
                self.claims.append(claim)
        self._next = max(self._next, last + 1)


@torch.no_grad()
def claims_of(tape: Tape, reading: Reading | None = None) -> tuple[Labels, list[FoundAttention], Reasons]:
    """Read each attention on a tape.

    Args:
        tape: a forward that was written down.
        reading: what was read of it while it was written.

    Returns:
        The labels, what was read, and what cannot be read, with reasons.
    """
    reading = Reading(tape) if reading is None else reading
    reading.go_on()
    labels, claims, refused = reading.labels, reading.claims, reading.refused
    refused += _without_softmax(labels, claims, refused)
    refused += _over_edges(labels)
    refused += _element_by_element(labels, {step.path for step, _ in refused})
    labels.forget()
    for claim in claims:
        columns_of(labels, claim)
    claims, more = _joined(labels, claims)
    claims, further = _without_single_heads(_summed(labels, claims), refused)
    return labels, claims, refused + more + further


def _claim(labels: Labels, step: Step) -> FoundAttention | None:
    core = core_of(labels, step)
    if core is None:
        return None
    while shared := maps_that_are_shared(labels, core):
        labels.deep |= shared
        labels.forget()
        core = core_of(labels, step)
        if core is None:
            return None
    claim = heads_of(labels, core)
    labels.score_steps |= {core.score_step.number} if core.score_step is not None else set()
    return claim


def _looks_like_attention(step: Step) -> bool:
    """Say whether an operation of a package takes what may be queries, keys and values."""
    if "::" not in step.op or layout_of_fused(step) or len(step.inputs) < len(IN):
        return False
    query, key, value = step.inputs[: len(IN)]
    are_data = all(one.is_float and one.cell.kind == DATA and len(one.shape) >= 3 for one in (query, key, value))
    return are_data and query.shape[-1] == key.shape[-1] and query.cell.is_mapped and key.cell.is_mapped


def _without_softmax(labels: Labels, claims: list[FoundAttention], refused: Reasons) -> Reasons:
    """Name what multiplies three computed tensors without a softmax: linear and sigmoid attention, state spaces."""
    paths = {step.path for step, _ in refused} | {claim.path for claim in claims}
    found: dict[str | None, Step] = {}
    for step in labels.tape.steps:
        product = labels.products.of(step) if step.path not in paths | set(found) else None
        if product is not None and product.kind == "scores":
            sides = [(product.first.cell, product.second), (product.second.cell, product.first)]
            if any(labels.may_read(other) and _is_of_two_computed(labels, cell, step.path) for cell, other in sides):
                found[step.path] = step
    kinds = "linear, random-feature, sigmoid, ReLU attention, a state space"
    reason = f"it multiplies three computed tensors without a softmax ({kinds})"
    return [(step, reason) for step in found.values()]


_FAR = 200  # tensors that are looked at for a product


def _over_edges(labels: Labels) -> Reasons:
    """Name attention over the edges of a graph: exponentials of products of queries and keys, summed by scattering."""
    found: dict[str | None, Step] = {}
    for step in labels.tape.steps:
        exponentials = [view.cell.step for view in step.inputs if view.cell.step is not None]
        for exponential in exponentials if step.op in SCATTERS else ():
            if exponential.op == "exp" and _is_of_products(exponential):
                found.setdefault(exponential.path, exponential)
    reason = "its softmax runs over the edges of a graph (exponentials that are summed by `{}`)"
    scatters = sorted({step.op for step in labels.tape.steps} & SCATTERS)
    return [(step, reason.format("`, `".join(scatters))) for step in found.values()]


def _is_of_products(step: Step) -> bool:
    """Whether a step takes sums of products, element by element, of two computed tensors."""
    for _ in range(8):
        views = [view for view in step.inputs if view.is_float and view.cell.is_mapped]
        if step.op == "mul" and len(views) == 2:
            return all(view.cell.kind == DATA for view in views)
        if not views or views[0].cell.step is None or not (step.is_pointwise or step.op == "sum"):
            return False
        step = views[0].cell.step
    return False


def _element_by_element(labels: Labels, refused: set[str | None]) -> Reasons:
    """Name attention without queries: exponentials times values, over a sum of the same exponentials over tokens."""
    found: dict[str | None, Step] = {}
    for step in labels.tape.steps:
        divided = step.inputs[:2] if step.op == "div" and len(step.inputs) == 2 else []
        if not divided or any(view.cell.kind < DATA or not view.cell.is_mapped for view in divided):
            continue
        above, below = (_before(labels, view.cell) for view in divided)
        factors = [view for one in above - below if one.op == "mul" and len(one.inputs) == 2 for view in one.inputs]
        weights = _exponentials(below)
        shared = set().union(*(_exponentials(_before(labels, view.cell)).keys() for view in factors)) & weights.keys()
        if any(_mixes_tokens(labels, divided[1], weights[cell], below) for cell in shared):
            first = min((weights[cell] for cell in shared), key=lambda one: one.number)
            found.setdefault(first.path, first)
    return [(step, f"{ELEMENT_BY_ELEMENT} (attention-free)") for path, step in found.items() if path not in refused]


def _exponentials(steps: set[Step]) -> dict[Cell, Step]:
    """Return the exponentials of computed tensors, by what they are taken of."""
    return {step.inputs[0].cell: step for step in steps if step.op in EXPONENTIALS and step.inputs[0].cell.is_mapped}


def _mixes_tokens(labels: Labels, view: View, exponential: Step, between: set[Step]) -> bool:
    """Whether a tensor is a sum over tokens of exponentials that are each of one token."""
    if any(not (step.is_pointwise or step.op in COPIES | {"sum", "amax"}) for step in between):
        return True
    labels_of = (labels.may_read(one) for one in (exponential.inputs[0], view))
    before, after = (label is not None and bool((label.tokens == SEVERAL).any()) for label in labels_of)
    return after and not before


def _before(labels: Labels, cell: Cell) -> set[Step]:
    """Return the steps before a tensor, up to exponentials and linear maps of features."""
    todo, steps = [cell], set[Step]()
    for current in todo:  # it grows
        step = current.step
        product = labels.products.of(step) if step is not None else None
        if step is None or step in steps or (product and product.kind == "weight" and not product.is_flipped):
            continue
        steps.add(step)
        if step.op not in SOFTMAX_LIKE and len(todo) < _FAR:
            todo += [view.cell for view in step.inputs if view.is_float and view.cell.kind == DATA]
    return steps


def _is_of_two_computed(labels: Labels, cell: Cell, path: str | None) -> bool:
    """Whether a tensor comes from a matmul or outer product of two computed ones, with no map or softmax between."""
    # What lies between may mix tokens: a mask, a sum or a cumulative sum, the loop of a recurrence.
    todo, met = [cell], {cell}
    for current in todo:  # it grows
        step = current.step
        product = labels.products.of(step) if step is not None else None
        if step is None or step.op in SOFTMAX_LIKE or (product is not None and product.kind == "weight"):
            continue
        views = [view for view in step.inputs if view.is_float and view.cell.kind == DATA and view.cell.is_mapped]
        # One of another module is of an earlier layer, whose output is mixed here once more.
        is_own = product is not None and product.kind == "scores" and step.path == path
        pair = [product.first, product.second] if is_own and product is not None else []
        sizes = [view.numel for view in views]
        if step.op == "mul" and len(views) == 2 and current.numel > max(sizes):
            pair = views
        if pair and all(labels.may_read(view) is not None for view in pair):
            return True
        fresh = [view.cell for view in views if view.cell not in met]
        met.update(fresh)
        todo += fresh if len(todo) < _FAR else []
    return False


def _joined(labels: Labels, claims: list[FoundAttention]) -> tuple[list[FoundAttention], Reasons]:
    """Put heads together that are computed one after the other, and enter one product side by side."""
    groups: dict[tuple[Any, ...], list[FoundAttention]] = {}
    for claim in claims:
        if claim.outputs:
            kinds = sorted((role, len(maps), maps[0].starts.shape[1]) for role, maps in claim.maps.items())
            groups.setdefault((tuple(step.number for step, _ in claim.outputs), *kinds), []).append(claim)
    gone: set[int] = set()
    refused = []
    for group in groups.values():
        columns = [set(claim.outputs[0][1].starts.flatten().tolist()) for claim in group]
        if len(group) == 1 or len(set().union(*columns)) != sum(map(len, columns)):
            continue
        gone |= {id(claim) for claim in group[1:]}
        role = _role_with_inputs_of_heads(labels, group)
        if role:
            refused.append((group[0].core.step, f"each head's {role} map takes an input of its own"))
            gone.add(id(group[0]))
            continue
        _join(group)
    return [claim for claim in claims if id(claim) not in gone], refused


def _join(group: list[FoundAttention]) -> None:
    """Put the heads of some claims into the first of them."""
    first = group[0]
    first.members = [copy(one) for one in group]
    first.maps = {
        role: [_together(list(parts)) for parts in zip(*(one.maps[role] for one in group))] for role in first.maps
    }
    counts = {len(one.outputs) for one in group}
    first.outputs = [
        (step, _together([one.outputs[place][1] for one in group]))
        for place, (step, _) in enumerate(first.outputs if len(counts) == 1 else [])
    ]
    first.heads = sum(one.heads for one in group)
    first.flags = set().union(*(one.flags for one in group))


def _summed(labels: Labels, claims: list[FoundAttention]) -> list[FoundAttention]:
    """Put heads together that are modules of their own, with the same inputs, and an output map each that is summed."""
    groups: dict[tuple[Any, ...], list[FoundAttention]] = {}
    for claim in claims:
        maps = [one for role in IN for one in claim.maps.get(role, [])]
        inputs = frozenset(
            origin(x.first) for one in maps for own in one.owners for x in labels.products_of[own].values()
        )
        kinds = sorted((role, [one.starts.shape for one in mine]) for role, mine in claim.maps.items())
        parent = (claim.path or "").rpartition(".")[0] if claim.path else ""
        key = (claim.heads, parent, inputs, *((role, tuple(shapes)) for role, shapes in kinds))
        groups.setdefault(key if claim.heads == 1 and len(maps) == len(IN) else (id(claim),), []).append(claim)
    kept = []
    for group in groups.values():
        different = {tuple(one.key for maps in claim.maps.values() for one in maps): claim for claim in group}
        if len(group) > 1 and len(different) > 1:
            _join(list(different.values()))
        kept.append(group[0])
        kept += [claim for claim in group[1:] if not group[0].members]
    return kept


def _without_single_heads(claims: list[FoundAttention], refused: Reasons) -> tuple[list[FoundAttention], Reasons]:
    """Refuse a single head of a module, of which others are refused."""
    paths = {step.path for step, _ in refused}
    gone = [claim for claim in claims if claim.heads == 1 and claim.path in paths]
    kept = [claim for claim in claims if claim not in gone]
    return kept, [(claim.core.step, "other heads of it cannot be read") for claim in gone]


def _role_with_inputs_of_heads(labels: Labels, group: list[FoundAttention]) -> str:
    for role in IN:
        owners = {owner for claim in group for one in claim.maps.get(role, []) for owner in one.owners}
        given = [frozenset(origin(product.first) for product in labels.products_of[one].values()) for one in owners]
        if len(set(given)) > 1 and not frozenset.intersection(*given):
            return role
    return ""


def _together(maps: list[Projection]) -> Projection:
    owners = tuple(owner for one in maps for owner in one.owners)
    names = tuple(
        one.names[head] if len(one.names) > 1 else one.names[0] for one in maps for head in range(len(one.starts))
    )
    starts = torch.cat([one.starts for one in maps])
    return replace(maps[0], names=names[:1] if len(set(names)) == 1 else names, owners=owners, starts=starts)


# from claims to layers


OnRead = Callable[[Labels, list[FoundAttention], Reasons], None]


def read_tape(tape: Tape, on_read: OnRead | None = None, reading: Reading | None = None) -> Survey:
    """Read the attention layers of a model from a forward that was written down.

    Args:
        tape: the forward; labels are on the CPU, wherever the model is.
        on_read: takes what `claims_of` gives, for others to look at.
        reading: what was read of it while it was written.

    Returns:
        The layers, in the order in which their attention ran, and what cannot be read, with reasons.
    """
    with torch._C.DisableTorchFunction(), torch.device("cpu"):  # a model may run under torch.device("meta")
        labels, claims, refused = claims_of(tape, reading)
        found = _Layers(labels, claims).survey(refused)
        if on_read is not None:
            on_read(labels, claims, refused)
        return found


class _Layers:
    """Turn claims into layers."""

    def __init__(self, labels: Labels, claims: list[FoundAttention]) -> None:
        self._claims, self._tape, self._model = claims, labels.tape, labels.tape.model
        behind = {owner for claim in claims for _, one in claim.outputs for owner in one.owners}
        self._weights = Weights(labels, behind)
        self._ordinals, self._counts = ordinals(labels.tape)
        self._layers: dict[tuple[object, ...], AttentionLayer] = {}
        self._sites: list[tuple[Site, object]] = []
        self._refused: dict[str, Refusal] = {}

    def survey(self, refused: Reasons) -> Survey:
        """Make a layer of each different claim; claims with the same rows are calls of one layer."""
        for claim in self._claims:
            try:
                self._add(claim)
            except Unreadable as error:  # noqa: PERF203
                self._refuse(claim.core.step.path or "", str(error))
        for step, reason in refused:
            self._refuse(step.path or "", reason)
        merged: dict[object, list[Site]] = {}
        for site, key in merged_sites(sorted(self._sites, key=lambda one: (one[0].path, one[0].ordinal)), self._counts):
            merged.setdefault(key, []).append(site)
        layers = [replace(layer, sites=tuple(merged.get(key, ()))) for key, layer in self._layers.items()]
        return Survey(_with_own_names(layers), tuple(self._refused.values()))

    def _refuse(self, path: str, reason: str) -> None:
        module = self._model.get_submodule(path)
        self._refused.setdefault(f"{path}: {reason}", Refusal(path, reason, type(module).__name__))

    def _add(self, claim: FoundAttention) -> None:
        streams = [claim.maps, *claim.streams]
        for place, maps in enumerate(streams):
            outputs = [
                one for one, stream in zip(claim.outputs, claim.stream_of_output) if stream == place
            ] or claim.outputs
            key = tuple((role, *(one.key for one in mine)) for role, mine in sorted(maps.items()))
            if key not in self._layers:
                self._layers[key] = self._layer(claim, maps, outputs)
            if place == 0:
                self._note_sites(claim, key)

    def _note_sites(self, claim: FoundAttention, key: object) -> None:
        first = 0
        for one in claim.members or [claim]:
            ordinal = self._ordinals.get(one.core.anchor.number)
            count = len(set(one.numbers[0].flatten().tolist()) - {-1})
            if ordinal is not None:
                order = tuple(range(first, first + count)) if claim.members else ()
                with suppress(Unreadable):
                    self._sites.append((replace(site_of(one, ordinal, self._tape.steps), order=order), key))
            first += count

    def _layer(
        self, claim: FoundAttention, maps: dict[str, list[Projection]], outputs: list[tuple[Step, Projection]]
    ) -> AttentionLayer:
        notes = [*claim.notes, *_caveats(claim.flags)]
        kept = _kept(maps, claim.flags, notes)
        weights, of_heads = self._weights_of(claim, kept, notes)
        base = None
        try:
            weights["output"], base = self._weights.output(outputs)
        except Unreadable as error:
            notes.append(f"the output projection{error}")
        value_dim = weights["value"].width if "value" in weights else claim.width
        if "output" in weights and weights["output"].width != value_dim:
            notes.append("the output projection, which takes heads of another width")
            del weights["output"]
        name = place_of(self._model, claim, kept)
        module = self._model.get_submodule(name)
        return AttentionLayer(
            name, module, weights, kind=_kind(claim, kept), key_of=of_heads["key"], value_dim=value_dim,
            value_of=of_heads.get("value", tuple(range(claim.heads))),
            normed=frozenset(role for role in IN if f"{role}: {NORMED}" in claim.flags),
            output_module=self._output_module(base, name), notes="; ".join(notes),
        )  # fmt: skip

    def _weights_of(
        self, claim: FoundAttention, kept: dict[str, list[Projection]], notes: list[str]
    ) -> tuple[dict[str, HeadWeight], dict[str, tuple[int, ...]]]:
        """Make the weights of queries, keys and values, and say which of them each head has."""
        weights: dict[str, HeadWeight] = {}
        of_heads: dict[str, tuple[int, ...]] = {}
        path = _common([name.rpartition(".")[0] for mine in kept.values() for one in mine for name in one.names])
        inputs = [self._weights.inputs(one) for mine in kept.values() for one in mine[:1]]
        shared = frozenset.intersection(*inputs) if len(inputs) == len(IN) else frozenset()
        for role, mine in kept.items():
            chosen, numbers = _different(mine, claim.heads) if role != "query" else (mine, tuple(range(claim.heads)))
            try:
                weights[role] = self._weights.of(chosen, role, shared, path, _centred(chosen, claim.flags, role))
            except Unreadable as error:
                if role == "key":
                    raise
                notes.append(str(error))
                continue
            of_heads[role] = numbers
        return weights, of_heads

    def _output_module(self, base: Projection | None, name: str) -> nn.Module | None:
        """Find the module that is called with the heads side by side; a parameter of the layer's own has none."""
        owners = {one.rpartition(".")[0] for one in base.names} if base is not None else set()
        owner = owners.pop() if len(owners) == 1 else name
        module = self._model.get_submodule(owner)
        is_layer = owner == name or name.startswith(f"{owner}.") or not owner
        return None if is_layer or isinstance(module, _NEVER_CALLED) else module


def place_of(model: nn.Module, claim: FoundAttention, maps: dict[str, list[Projection]]) -> str:
    """Choose the module that a layer is called by: the one that runs the attention, if it has the parameters."""
    owners = [name.rpartition(".")[0] for mine in maps.values() for one in mine for name in one.names]
    path = claim.core.step.path or ""
    if claim.members or not any(owner == path or owner.startswith(f"{path}.") or not path for owner in owners):
        path = _common(owners)
        if path in owners and "." in path:  # one packed projection: the module that attends is around it
            path = path.rpartition(".")[0]
    while path and not isinstance(model.get_submodule(path), nn.Module):
        path = path.rpartition(".")[0]
    return path


# used by `nn.MultiheadAttention`, which takes its weight and does not call it
_NEVER_CALLED = (nn.modules.linear.NonDynamicallyQuantizableLinear, nn.MultiheadAttention)


def _kept(maps: dict[str, list[Projection]], flags: set[str], notes: list[str]) -> dict[str, list[Projection]]:
    """Choose the maps that tell heads apart, with the same features of queries and keys."""
    if "key" not in maps:
        raise Unreadable("its keys come from no linear map")
    kept = {"key": _distinguishing(maps["key"], flags, "key")}
    places = kept["key"][0].places
    if "query" in maps:
        query = [one for one in maps["query"] if set(places) <= set(one.places)]
        if "query: sum" not in flags and len(query) != 1:
            raise Unreadable("its queries and keys are put together in different ways")
        if any(len(one.places) > len(places) for one in query):
            notes.append("features of queries that meet no keys of heads")
        kept["query"] = [one.at(places) for one in query]
    if "value" in maps:
        kept["value"] = _distinguishing(maps["value"], flags, "value")
    return kept


def _distinguishing(maps: list[Projection], flags: set[str], role: str) -> list[Projection]:
    """Leave maps that tell heads apart; of what all heads share, as rotary parts of latent attention are, none."""
    if len(maps) == 1 or f"{role}: sum" in flags:
        return maps
    apart = [one for one in maps if len({tuple(row) for row in one.starts.tolist()}) > 1]
    if len(apart) != 1:
        raise Unreadable(f"its {role} is put together from several maps")
    return apart


_CAVEATS = {
    FILTERED: "that its {} is a filter over several tokens",
    GAINED: "a gain with which its {} is multiplied",
    GATED: "a gate with which its {} is multiplied",
}


def _caveats(flags: set[str]) -> list[str]:
    """Say what lies between maps and attention that weights do not show."""
    found = []
    for flag in sorted(flags):
        role, _, what = flag.partition(": ")
        if role in IN and what.startswith(NONLINEAR) and what.removeprefix(NONLINEAR) != "clamp":
            found.append(f"{what.removeprefix(NONLINEAR)}, through which its {role} passes")
        elif role in IN and what in _CAVEATS:
            found.append(_CAVEATS[what].format(role))
    return found


def _centred(maps: list[Projection], flags: set[str], role: str) -> str:
    """Say over which rows a norm behind a map takes the mean away: of a head, of all heads, or of none."""
    widths = [int(flag.rpartition(" ")[2]) for flag in flags if flag.startswith(f"{role}: {CENTRED}")]
    H, width = maps[0].starts.shape
    return "head" if width in widths else "all" if H * width in widths else ""


def _different(maps: list[Projection], heads: int) -> tuple[list[Projection], tuple[int, ...]]:
    """Leave each different head once; say which is whose."""
    names = [tuple((one.owners[head], *one.starts[head].tolist()) for one in maps) for head in range(heads)]
    order = list(dict.fromkeys(names))
    return [one.of_heads([names.index(name) for name in order]) for one in maps], tuple(
        order.index(name) for name in names
    )


def _kind(claim: FoundAttention, maps: dict[str, list[Projection]]) -> str:
    names = list(
        dict.fromkeys(name.removesuffix(".weight") for mine in maps.values() for one in mine for name in one.names)
    )
    short = [name.rpartition(".")[2] for name in names]
    where = f"{'packed in' if len(names) == 1 else 'in'} {', '.join(f'`{name}`' for name in short[:4])}"
    normaliser = "" if claim.core.normaliser == "softmax" else f"; {claim.core.normaliser} in place of a softmax"
    return f"{claim.heads} heads, {where}{normaliser}"


def _common(paths: list[str]) -> str:
    parts = [path.split(".") for path in paths]
    kept = []
    for mine in zip(*parts):
        if len(set(mine)) > 1:
            break
        kept.append(mine[0])
    return ".".join(kept)


def _with_own_names(layers: list[AttentionLayer]) -> tuple[AttentionLayer, ...]:
    counts: Counter[str] = Counter()
    named = []
    for layer in layers:
        counts[layer.name] += 1
        named.append(layer if counts[layer.name] == 1 else replace(layer, name=f"{layer.name}#{counts[layer.name]}"))
    return tuple(named)


# of a model


def survey(model: nn.Module, forward: Callable[[], object] | None = None, on_read: OnRead | None = None) -> Survey:
    """Read the attention layers of a model.

    Args:
        model: the model.
        forward: runs a forward of it, without arguments: ``lambda: model(batch)``. Without it, torch's own attention
            and registered layouts are known, and the rest is read from inputs that the model brings itself
            (``example_input_array``, ``dummy_inputs`` of transformers, ``input_size`` of timm).
        on_read: takes what `claims_of` gives, for others to look at.

    Returns:
        The layers, and what cannot be read, with reasons.

    Raises:
        MisconfigurationError: if there is no `forward`, and no other way to know.
    """
    torch_module("model", model)
    function("forward", forward, "lambda: model(batch)")
    known = known_layers(model)
    if forward is None:
        forward = own_forward(model)
    if forward is None and not known:
        raise MisconfigurationError(
            f"The heads of {type(model).__name__} are read from a forward: write find_attention(model, forward=lambda: "
            "model(batch)), with a batch as your data loader gives it."
        )
    found = Survey() if forward is None else _survey_forward(model, forward, on_read)
    return put_together(model, known, found)


def find_attention(model: nn.Module, forward: Callable[[], object] | None = None) -> list[AttentionLayer]:
    """Find the attention layers of a model, with a warning for each that cannot be read.

    Args:
        model: the model.
        forward: runs a forward of it, without arguments; see `survey`.

    Returns:
        The layers, in model order.
    """
    found = survey(model, forward)
    for one in found.refused:
        warnings.warn(
            f"`{one.name}` ({one.module_type}) is left out: {one.reason}.", UnsupportedAttentionWarning, stacklevel=2
        )
    return list(found.layers)


def _survey_forward(model: nn.Module, forward: Callable[[], object], on_read: OnRead | None) -> Survey:
    own = inner_model(model)
    with nothing_remains(own, forward), Tape(own) as tape:
        forward()
    return read_tape(tape, on_read)


def put_together(model: nn.Module, known: list[AttentionLayer | Refusal], found: Survey) -> Survey:
    """Let what is known without a forward come before what was read, with the sites that a forward showed."""
    layers = {layer.name: layer for layer in map(_without_wrappers, found.layers)}
    refused = {refusal.name: refusal for refusal in map(_without_wrappers, found.refused)}
    for described in map(_without_wrappers, known):
        refused.pop(described.name, None)
        if isinstance(described, Refusal):
            refused[described.name] = described
            continue
        seen = layers.get(described.name)
        layers[described.name] = described if seen is None else replace(described, sites=seen.sites or described.sites)
    order = {name_without_wrappers(name): at for at, (name, _) in enumerate(model.named_modules())}
    in_order = sorted(layers.values(), key=lambda layer: order.get(layer.name.partition("#")[0], 0))
    return Survey(tuple(in_order), tuple(refused.values()))


# Of torch.compile, Fabric, the first FSDP and activation checkpointing: layers have the names of the model within.
_WRAPPERS = {"_orig_mod", "_forward_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


def name_without_wrappers(name: str) -> str:
    """Return the dotted name of a module without the wrappers that it is in.

    Example:
        >>> name_without_wrappers("blocks.0._orig_mod.attn")
        'blocks.0.attn'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _without_wrappers(named: Any) -> Any:
    return replace(named, name=name_without_wrappers(named.name))
