"""Attention layers from the rows of heads: their modules, their names, and refusals."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hdi_callback.attention.isolation import isolated
from hdi_callback.attention.layer.changing_hooks import has_hooks
from hdi_callback.attention.layer.heads import INPUT_ROLES, PLURAL, AttentionLayer, HeadWeight, Role
from hdi_callback.attention.trace.cores import Core, cores_of
from hdi_callback.attention.trace.draw import Draw
from hdi_callback.attention.trace.head_rows import SINGLE_KEYS, HeadRows, NoHeadsError, Rows, UndecidedError, module_of
from hdi_callback.attention.trace.head_weights import is_whole, kind_of, output_weight, weight_of
from hdi_callback.attention.trace.heads import CoreReading
from hdi_callback.attention.trace.joining import joined
from hdi_callback.attention.trace.maps import objection_to
from hdi_callback.attention.trace.outputs import outputs_of
from hdi_callback.attention.trace.own_inputs import OWN_INPUTS, refuse_inputs_of_their_own
from hdi_callback.attention.trace.run import Traceable
from hdi_callback.attention.trace.support import Support
from hdi_callback.attention.trace.traced_cores import TracedCores
from hdi_callback.attention.trace.traced_run import TracedRun
from hdi_callback.attention.trace.unread import unread_averages, unread_exponentials, unread_softmaxes

_SAME_MAPS = "several of its softmaxes share projections and split them into different heads"
_SAME_KEYS = "several of its softmaxes have the same queries and keys, but each has values of its own"


@dataclass(frozen=True)
class Found:
    """Heads that one or more cores of a run establish, or the reason why they cannot be read.

    Attributes:
        layer: the heads; `None` if they cannot be read.
        path: dotted path of the module within the one that was run.
        reason: why they cannot be read.
        cores: numbers of the cores.
        maps: what queries, keys and values come from: parameters, and the numbers of their features.
        is_undecided: another run may read them; of a layer, that it may be others where an argument is passed that was
            left out, and with which the module could not be run.
    """

    path: str
    layer: AttentionLayer | None = None
    reason: str = ""
    cores: tuple[int, ...] = ()
    maps: frozenset[tuple[str, int]] = frozenset()
    is_undecided: bool = False


def layers_in(
    traceable: Traceable,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    name: str = "",
    *,
    is_known: Callable[[str], bool] = lambda path: False,
    is_synthetic: bool = False,
) -> tuple[TracedRun, list[Found]]:
    """Run a copy of a module, and read the heads of every attention core that it computes.

    Args:
        traceable: the copy.
        args: by position.
        kwargs: by name.
        name: dotted path of the module in the model.
        is_known: returns whether cores that are computed in a module, by its path within this one, are known.
        is_synthetic: no forward was called with these arguments, and equal numbers in two of them mean nothing.

    Returns:
        The run, and for each core a layer or the reason why there is none; several cores may be one layer.
    """
    with isolated(traceable.module), torch.enable_grad():
        run = traceable.run(args, kwargs, Draw())
        cores = cores_of(run)
        trace = TracedCores(traceable, args, kwargs, run, cores, is_synthetic=is_synthetic)
        read: list[tuple[int, HeadRows]] = []
        found: list[Found] = []
        for number, core in enumerate(cores):
            if is_known(core.path):
                continue
            try:
                read += ((number, heads) for heads in CoreReading(trace, number).streams())
            except NoHeadsError as error:
                found += _refused(trace, (number,), error)
        for numbers, heads in joined(trace, read):
            try:
                found.append(_layer(trace, name, numbers, heads))
            except NoHeadsError as error:  # noqa: PERF203
                found += _refused(trace, numbers, error)
        found.sort(key=lambda one: one.cores)
        unread = [*unread_softmaxes(run, cores), *unread_averages(run, cores)]
        unread += [] if found else unread_exponentials(run, cores)
        reported = {result.path for result in found}
        for node, reason in unread:
            path = run.path_of(node)
            if path not in reported and not is_known(path):
                reported.add(path)
                found.append(Found(path, None, _within(path, reason), is_undecided=True))
    return run, _named_apart(found)


def _refused(trace: TracedCores, numbers: tuple[int, ...], error: NoHeadsError) -> list[Found]:
    """The reason why cores are not read; nothing for cores that are no attention."""
    if not str(error):
        return []
    path = _shared_path([trace.cores[number] for number in numbers])
    while path and not _computes(trace, path):
        path = path.rpartition(".")[0]
    is_undecided = isinstance(error, UndecidedError)
    return [Found(path, None, _within(path, str(error)), numbers, _maps_of(trace, numbers[0]), is_undecided)]


def _within(path: str, reason: str) -> str:
    """Write the paths in a reason relative to the module."""
    return reason.replace(f"`{path}.", "`") if path else reason


def _layer(trace: TracedCores, name: str, numbers: tuple[int, ...], heads: HeadRows) -> Found:
    cores = [trace.cores[number] for number in numbers]
    _require_matrices(trace, numbers, heads.rows)
    refuse_inputs_of_their_own(trace, heads.rows)
    output = outputs_of(trace, cores, heads)
    H = len(heads.members)
    order = _by_shared_keys(heads.rows)
    rows: dict[Role, list[Rows]] = {role: [of_role[head] for head in order] for role, of_role in heads.rows.items()}
    path = _owner(trace, cores, rows)
    rows |= {role: _distinct(role, rows[role]) for role in INPUT_ROLES[1:] if role in rows}
    if H % len(rows["key"]):
        raise NoHeadsError(f"its {H} heads cannot share {len(rows['key'])} key heads evenly")
    _refuse_shared(rows)
    slices: dict[Role, HeadWeight] = {role: weight_of(trace, path, of_role) for role, of_role in rows.items()}
    projection = None
    receiver = None if output is None else output.receiver
    if output is not None and output.features is not None and receiver is not None and is_whole(trace, receiver):
        slices["output"] = output_weight(trace, path, receiver, output.features[order])
        projection = receiver.module if output.is_side_by_side else None
    kind, is_reordered = kind_of(slices, heads), order != sorted(order)
    if is_reordered:
        kind += f", heads by their keys ({', '.join(map(str, order))})"
    layer = AttentionLayer(
        name=".".join(filter(None, (name, path))),
        module=trace.run.module.get_submodule(path),
        num_heads=H,
        num_key_heads=len(rows["key"]),
        head_dim=len(rows["key"][0].features),
        value_dim=cores[0].values.shape[-1] if heads.tied is None else heads.tied.shape[1],
        kind=kind,
        slices=slices,
        output_projection=projection,
        normed=frozenset(heads.normed),
        left_out=" and ".join(filter(None, (heads.left_out, "" if output is None else output.left_out))),
        evidence="trace",
        head_order=tuple(order) if is_reordered else (),
    )
    return Found(path, layer, "", numbers, _maps_of(trace, numbers[0]))


def _require_matrices(trace: TracedCores, numbers: tuple[int, ...], rows: Mapping[Role, list[Rows]]) -> None:
    """Refuse maps whose matrix cannot be read, or is used in two ways."""
    used = {leaf for number in numbers for leaf in _leaves_of(trace, number)}
    for role, of_role in rows.items():
        for parameter in {row.parameter for row in of_role} | {row.inner.parameter for row in of_role if row.inner}:
            first, *others = (at for at, leaf in enumerate(trace.leaves) if leaf.parameter == parameter)
            leaf, name = trace.leaves[first], module_of(parameter)
            # The transpose of a map may take the outputs.
            if any(trace.leaves[at].axes != leaf.axes and (at in used or first not in used) for at in others):
                raise NoHeadsError(f"it multiplies with `{name}` and with its transpose")
            if leaf.takes_part:
                raise NoHeadsError(f"it multiplies with a part of the columns of `{name}`")
            if leaf.is_of_parts:
                raise NoHeadsError(OWN_INPUTS.format(roles=PLURAL[role]))
            why = None if leaf.module is None else objection_to(leaf.module)
            if why is not None:
                # A forward shows whether hooks that may change something do.
                refusal = UndecidedError if leaf.module is not None and has_hooks(leaf.module) else NoHeadsError
                raise refusal(f"its projection `{name}` is {why}")


def _maps_of(trace: TracedCores, number: int) -> frozenset[tuple[str, int]]:
    return frozenset().union(*map(trace.run.features, _supports_of(trace, number)))


def _leaves_of(trace: TracedCores, number: int) -> set[int]:
    return {leaf for support in _supports_of(trace, number) for leaf in support.masks}


def _supports_of(trace: TracedCores, number: int) -> list[Support]:
    """Find the calls of maps that queries, keys and values of a core are made of."""
    core = trace.cores[number]
    taken = [core.values, *(side for product in core.scores for side in product.sides)]
    return [trace.run.support(one) for one in taken]


def _by_shared_keys(rows: dict[Role, list[Rows]]) -> list[int]:
    """Order heads so that those of one key or value head are adjacent: by the role that more heads share first."""
    shared = sorted((rows[role] for role in INPUT_ROLES[1:] if role in rows), key=lambda of_role: len(set(of_role)))
    first = [{row: head for head, row in reversed(list(enumerate(of_role)))} for of_role in shared]
    places = [[known[row] for row in of_role] for known, of_role in zip(first, shared)]
    return sorted(range(len(shared[0])), key=lambda head: [place[head] for place in places])


def _distinct(role: str, rows: list[Rows]) -> list[Rows]:
    """Key or value heads in their order, each the same for a group of heads side by side."""
    kept = [row for place, row in enumerate(rows) if place == 0 or rows[place - 1] != row]
    times, left = divmod(len(rows), len(kept))
    if left or [one for one in kept for _ in range(times)] != rows or len(set(kept)) != len(kept):
        raise NoHeadsError(f"its {role}s are not shared by adjacent heads in groups of one size")
    return kept


def _refuse_shared(rows: dict[Role, list[Rows]]) -> None:
    for role, found in rows.items():
        own = [
            (one.parameter, feature, one.inner and (one.inner.parameter, one.inner.features))
            for one in found
            for feature in one.features
        ]
        if len(set(own)) < len(own):
            raise NoHeadsError(f"its {role} heads share features of `{module_of(found[0].parameter)}`")
        if len({len(one.features) for one in found}) > 1:
            raise NoHeadsError(f"its {role} heads differ in width")


def _owner(trace: TracedCores, cores: list[Core], rows: dict[Role, list[Rows]]) -> str:
    """The innermost module around the computation that holds its keys and values."""
    held = [row.parameter for role in INPUT_ROLES[1:] for row in rows.get(role, ())]
    path = _shared_path(cores)
    while path and not (all(name.startswith(f"{path}.") for name in held) and _computes(trace, path)):
        path = path.rpartition(".")[0]
    return path


def _shared_path(cores: list[Core]) -> str:
    parts = [core.path.split(".") for core in cores]
    return ".".join(one[0] for one in itertools.takewhile(lambda one: len(set(one)) == 1, zip(*parts)))


def _computes(trace: TracedCores, path: str) -> bool:
    return not isinstance(trace.run.module.get_submodule(path), (nn.ModuleList, nn.ModuleDict))


def _named_apart(found: list[Found]) -> list[Found]:
    """Keep one layer for a module that ran twice, and name several layers of one module apart."""
    kept: list[Found] = []
    for one in found:
        twin = next((place for place, other in enumerate(kept) if _are_same_layer(other, one)), None)
        if twin is None:
            kept.append(one)
        # A block of one key does not show the others; what holds in one of its calls alone is not established.
        elif kept[twin].reason == SINGLE_KEYS or (one.layer is None and one.reason != SINGLE_KEYS):
            kept[twin] = one
    projections = Counter(id(result.layer.output_projection) for result in kept if result.layer is not None)
    named = []
    for one in kept:
        layer = one.layer
        if layer is not None:
            beside = [other for other in kept if other.layer and other.path == one.path and other is not one]
            is_sum = projections[id(layer.output_projection)] > 1  # what a shared projection takes
            layer = replace(
                layer,
                name=".".join(filter(None, (layer.name, _own_name(one, beside)))),
                output_projection=None if is_sum else layer.output_projection,
            )
        named.append(replace(one, layer=layer))
    reasons = [next(filter(None, (_conflict(result, other) for other in named)), "") for result in named]
    return [replace(result, layer=None, reason=why) if why else result for result, why in zip(named, reasons)]


def _own_name(one: Found, beside: list[Found]) -> str:
    """Name a layer among others of its module: by its key map, else by its query map, else by a number too."""
    if not beside:
        return ""
    for role in ("key", "query"):
        name = _map_of(one, role)
        if name and all(_map_of(other, role) != name for other in beside):
            return name
    alike = [other for other in beside if _map_of(other, "key") == _map_of(one, "key")]
    number = sum(other.cores < one.cores for other in alike)
    return ".".join(filter(None, (_map_of(one, "key"), str(number))))


def _map_of(one: Found, role: Role) -> str:
    part = None if one.layer is None else one.layer.slices.get(role)
    return "" if part is None else module_of(part.by_token.parameter)


def _conflict(one: Found, other: Found) -> str:
    """Name the conflict of two layers of one module that divide the same map into different heads."""
    if one is other or one.layer is None or other.layer is None or one.path != other.path:
        return ""
    mine, theirs = one.layer.slices, other.layer.slices
    differing = [role for role in INPUT_ROLES if role in mine.keys() & theirs.keys() and mine[role] != theirs[role]]
    # Two may share all of their keys, or have rows of their own of the same maps, as where softmaxes are subtracted.
    if differing == ["value"] and "query" in mine.keys() & theirs.keys():
        return _SAME_KEYS
    return _SAME_MAPS if differing == ["value"] or any(_overlap(mine[role], theirs[role]) for role in differing) else ""


def _overlap(one: HeadWeight, other: HeadWeight) -> bool:
    """Return whether two layers have rows of a parameter in common."""
    rows = [
        {
            (id(part.owner), part.parameter, row)
            for part in getattr(whole, "pieces", (whole.by_token,))
            for row in part.index().flatten().tolist()
        }
        for whole in (one, other)
    ]
    return not rows[0].isdisjoint(rows[1])


def _are_same_layer(one: Found, other: Found) -> bool:
    if one.path != other.path or one.maps != other.maps:
        return False
    if one.layer is None or other.layer is None:
        return True
    theirs = other.layer.slices
    mine = {role: part for role, part in one.layer.slices.items() if role != "output" or role in theirs}
    return all(role in theirs and part == theirs[role] for role, part in mine.items())
