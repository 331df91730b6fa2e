"""From the rows of heads to attention layers: their modules, their names, and which of several cores are one layer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hdi_callback.attention.isolation import isolated
from hdi_callback.attention.layer.changing_hooks import has_hooks
from hdi_callback.attention.layer.heads import INPUT_ROLES, AttentionLayer, HeadWeight, Role
from hdi_callback.attention.trace.cores import Core, cores_of
from hdi_callback.attention.trace.draw import Draw
from hdi_callback.attention.trace.head_rows import SINGLE_KEYS, HeadRows, NoHeadsError, Rows, UndecidedError, module_of
from hdi_callback.attention.trace.head_weights import is_whole, kind_of, output_weight, weight_of
from hdi_callback.attention.trace.heads import CoreReading
from hdi_callback.attention.trace.maps import objection_to
from hdi_callback.attention.trace.outputs import outputs_of, receiver_of
from hdi_callback.attention.trace.own_inputs import OWN_INPUTS, refuse_inputs_of_their_own
from hdi_callback.attention.trace.run import Traceable
from hdi_callback.attention.trace.support import Support, columns_of, random_weights
from hdi_callback.attention.trace.traced_cores import TracedCores
from hdi_callback.attention.trace.traced_run import TracedRun
from hdi_callback.attention.trace.unread import unread_averages, unread_exponentials, unread_softmaxes


@dataclass(frozen=True)
class Found:
    """What one or more cores of a run establish.

    Attributes:
        layer: the heads; `None` if they cannot be read.
        path: dotted path of the module within the one that was run.
        reason: why they cannot be read.
        cores: numbers of the cores.
        maps: what queries, keys and values come from.
        is_undecided: another run may read them; of a layer, that it may be others where an argument is passed that was
            left out, and with which the module could not be run.
    """

    path: str
    layer: AttentionLayer | None = None
    reason: str = ""
    cores: tuple[int, ...] = ()
    maps: frozenset[str] = frozenset()
    is_undecided: bool = False


def layers_in(
    traceable: Traceable,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    name: str = "",
    *,
    is_known: Callable[[str], bool] = lambda path: False,
) -> tuple[TracedRun, list[Found]]:
    """Run a copy of a module, and read the heads of every attention core that it computes.

    Args:
        traceable: the copy.
        args: by position.
        kwargs: by name.
        name: dotted path of the module in the model.
        is_known: says whether cores that are computed in a module, by its path within this one, are known.

    Returns:
        The run, and for each core a layer or the reason why there is none; several cores may be one layer.
    """
    with isolated(traceable.module), torch.enable_grad():
        run = traceable.run(args, kwargs, Draw())
        cores = cores_of(run)
        trace = TracedCores(traceable, args, kwargs, run, cores)
        groups: list[tuple[tuple[int, ...], HeadRows | NoHeadsError]] = []
        for number, core in enumerate(cores):
            if is_known(core.path):
                continue
            try:
                groups += (((number,), heads) for heads in CoreReading(trace, number).streams())
            except NoHeadsError as error:
                groups.append(((number,), error))
        found = []
        for numbers, heads in _joined(groups, trace):
            try:
                if isinstance(heads, NoHeadsError):
                    raise heads
                found.append(_layer(trace, name, numbers, heads))
            except NoHeadsError as error:  # noqa: PERF203
                if str(error):
                    path = cores[numbers[0]].path
                    reason = str(error).replace(f"`{path}.", "`") if path else str(error)
                    is_undecided = isinstance(error, UndecidedError)
                    found.append(Found(path, None, reason, numbers, _maps_of(trace, numbers[0]), is_undecided))
        reported = {one.path for one in found}
        unread = [*unread_softmaxes(run, cores), *unread_averages(run, cores)]
        unread += [] if found else unread_exponentials(run, cores)
        for node, reason in unread:
            path = run.path_of(node)
            if path not in reported and not is_known(path):
                reported.add(path)
                reason = reason.replace(f"`{path}.", "`") if path else reason
                found.append(Found(path, None, reason, is_undecided=True))
    return run, _named_apart(found, name)


def _joined(
    groups: list[tuple[tuple[int, ...], HeadRows | NoHeadsError]], trace: TracedCores
) -> list[tuple[tuple[int, ...], HeadRows | NoHeadsError]]:
    """Join cores of a single head each whose outputs one map takes side by side: together they are one layer."""
    if trace.run.ranks > 1:
        return _joined_ranks(groups, trace)
    single = [
        place
        for place, (_, heads) in enumerate(groups)
        if isinstance(heads, HeadRows) and len(heads.members) == 1 and heads.units.count == 1 and heads.tied is None
    ]
    by_receiver: dict[Any, list[int]] = {}
    of_chain = _behind_a_chain(trace, [groups[place][0][0] for place in single])
    for place in single:
        number = groups[place][0][0]
        receiver = of_chain.get(number, receiver_of(trace, trace.cores[number]))
        by_receiver.setdefault(receiver, []).append(place)
    joined = list(groups)
    for receiver, places in by_receiver.items():
        if receiver is None or len(places) < 2:
            continue
        parts: list[HeadRows] = [groups[place][1] for place in places]  # type: ignore[misc]
        roles = [role for role in parts[0].rows if all(role in part.rows for part in parts)]
        whole = HeadRows(
            {role: [part.rows[role][0] for part in parts] for role in roles},
            [part.members[0] for part in parts],
            set().union(*(part.normed for part in parts)),
        )
        numbers = tuple(groups[place][0][0] for place in places)
        joined[places[0]] = (numbers, whole)
        for place in places[1:]:
            joined[place] = ((), whole)
    return [(numbers, heads) for numbers, heads in joined if numbers]


def _joined_ranks(
    groups: list[tuple[tuple[int, ...], HeadRows | NoHeadsError]], trace: TracedCores
) -> list[tuple[tuple[int, ...], HeadRows | NoHeadsError]]:
    """Join cores of the same maps, each with the heads that one rank attends with: together they are one layer."""
    alike: dict[Any, list[tuple[int, HeadRows]]] = {}
    joined: list[tuple[tuple[int, ...], HeadRows | NoHeadsError]] = []
    for numbers, heads in groups:
        if isinstance(heads, NoHeadsError):
            joined.append((numbers, heads))
            continue
        maps = tuple((role, tuple({one.parameter: 0 for one in of_role})) for role, of_role in heads.rows.items())
        alike.setdefault((receiver_of(trace, trace.cores[numbers[0]]), maps), []).append((numbers[0], heads))
    for parts in alike.values():
        own = {id(heads): tuple(map(tuple, zip(*heads.rows.values()))) for _, heads in parts}
        if len(set(own.values())) == 1:  # every rank attends with the same heads
            joined.append(((parts[0][0],), parts[0][1]))
            continue
        of_heads = [(number, heads, place) for number, heads in parts for place in range(len(heads.members))]
        of_heads.sort(key=lambda one: [of_role[one[2]].features[0] for of_role in reversed(one[1].rows.values())])
        first = parts[0][1]
        whole = replace(
            first,
            rows={role: [heads.rows[role][place] for _, heads, place in of_heads] for role in first.rows},
            members=[heads.members[place] for _, heads, place in of_heads],
            normed=set().union(*(heads.normed for _, heads in parts)),
        )
        joined.append((tuple(number for number, _, _ in of_heads), whole))
    return joined


def _behind_a_chain(trace: TracedCores, numbers: list[int]) -> dict[int, int]:
    """Find the map that takes side by side what heads give that are fed by one another, as in a cascade of heads.

    Returns:
        Number of a core -> that of the map, where an earlier map takes what the core gives as well.
    """
    first = {number: receiver_of(trace, trace.cores[number]) for number in numbers}
    if len(set(first.values()) - {None}) < 2:
        return {}
    found: dict[int, int] = {}
    outputs = [trace.cores[number].output for number in numbers]
    for receiver in sorted({one for one in first.values() if one is not None}, reverse=True):
        taken = trace.leaves[receiver].taken
        codes = columns_of(taken, outputs) if taken.requires_grad else {}
        live = {place: {one for one in code.flatten().tolist() if one >= 0} for place, code in codes.items()}
        live = {place: own for place, own in live.items() if own and numbers[place] not in found}
        if len(live) > 1 and sum(map(len, live.values())) == len(set().union(*live.values())):
            found.update({numbers[place]: receiver for place in live})
    return found


def _layer(trace: TracedCores, name: str, numbers: tuple[int, ...], heads: HeadRows) -> Found:
    cores = [trace.cores[number] for number in numbers]
    used = [trace.leaves[leaf] for number in numbers for leaf in _leaves_of(trace, number)]
    for of_role in heads.rows.values():
        for parameter in {one.parameter for one in of_role} | {one.inner.parameter for one in of_role if one.inner}:
            leaf, *others = (leaf for leaf in trace.leaves if leaf.parameter == parameter)
            # The transpose of a map may be what takes the outputs.
            if any(one.axes != leaf.axes and (one in used or leaf not in used) for one in others):
                raise NoHeadsError(f"it multiplies with `{module_of(parameter)}` and with its transpose")
            if leaf.is_of_parts:
                role = next(role for role, of in heads.rows.items() if of is of_role)
                raise NoHeadsError(OWN_INPUTS.format(role=role))
            why = None if leaf.module is None else objection_to(leaf.module)
            if why is not None:
                # Of hooks that may change something a forward shows whether they do.
                refusal = UndecidedError if leaf.module is not None and has_hooks(leaf.module) else NoHeadsError
                raise refusal(f"its projection `{module_of(parameter)}` is {why}")
    refuse_inputs_of_their_own(trace, heads.rows)
    output = outputs_of(trace, cores, heads)
    H = len(heads.members)
    order = _by_shared_keys(heads.rows)
    rows: dict[Role, list[Rows]] = {role: [of_role[head] for head in order] for role, of_role in heads.rows.items()}
    is_reordered = order != sorted(order)
    value_dim = cores[0].values.shape[-1] if heads.tied is None else heads.tied.shape[1]
    path = _owner(trace, cores, rows)
    key_rows = _distinct("key", rows["key"])
    value_rows = _distinct("value", rows["value"]) if "value" in rows else []
    if H % len(key_rows):
        raise NoHeadsError(f"its {H} heads cannot share {len(key_rows)} key heads evenly")
    module = trace.run.module.get_submodule(path)
    _refuse_shared(rows, key_rows, value_rows)
    slices: dict[Role, HeadWeight] = {}
    if "query" in rows:
        slices["query"] = weight_of(trace, path, rows["query"])
    slices["key"] = weight_of(trace, path, key_rows)
    if value_rows:
        slices["value"] = weight_of(trace, path, value_rows)
    projection = None
    taken_by = None if output is None else output.receiver
    if output is not None and output.features is not None and taken_by is not None and is_whole(trace, taken_by):
        slices["output"] = output_weight(trace, path, taken_by, output.features[order])
        projection = taken_by.module if output.is_side_by_side else None
    kind = kind_of(slices, heads)
    if is_reordered:
        kind += f", heads by their keys ({', '.join(map(str, order))})"
    full = ".".join(one for one in (name, path) if one)
    left_out = " and ".join(filter(None, (heads.left_out, "" if output is None else output.left_out)))
    layer = AttentionLayer(
        full, module, H, len(key_rows), len(key_rows[0].features), value_dim, kind, slices,
        projection, frozenset(heads.normed), left_out, "trace", tuple(order) if is_reordered else (),
    )  # fmt: skip
    return Found(path, layer, "", numbers, _maps_of(trace, numbers[0]))


def _maps_of(trace: TracedCores, number: int) -> frozenset[str]:
    return frozenset(map(trace.parameter_of, _leaves_of(trace, number)))


def _leaves_of(trace: TracedCores, number: int) -> set[int]:
    """Number the calls of maps that queries, keys and values of a core are made of."""
    core = trace.cores[number]
    sides = [core.values, *(side for product in core.scores for side in (product.left, product.right))]
    found = [Support.of(one, random_weights(one.shape), trace.tensors) for one in sides]
    return {leaf for one in found for leaf in one.masks}


def _by_shared_keys(rows: dict[Role, list[Rows]]) -> list[int]:
    """Order heads so that those which share a key lie side by side, and among them those which share a value."""
    shared = [rows[role] for role in INPUT_ROLES[1:] if role in rows]
    first = [{one: head for head, one in reversed(list(enumerate(of_role)))} for of_role in shared]
    places = [[known[one] for one in of_role] for known, of_role in zip(first, shared)]
    return sorted(range(len(shared[0])), key=lambda head: [place[head] for place in places])


def _distinct(role: str, rows: list[Rows]) -> list[Rows]:
    """Key or value heads in their order, each the same for a group of heads side by side."""
    kept = [one for place, one in enumerate(rows) if place == 0 or rows[place - 1] != one]
    times, left = divmod(len(rows), len(kept))
    if left or [one for one in kept for _ in range(times)] != rows or len(set(kept)) != len(kept):
        raise NoHeadsError(f"its heads do not share {role}s in groups of one size side by side")
    return kept


def _refuse_shared(rows: dict[Role, list[Rows]], keys: list[Rows], values: list[Rows]) -> None:
    for role, found in (("query", rows.get("query", [])), ("key", keys), ("value", values)):
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
    held = [one.parameter for role in ("key", "value") for one in rows.get(role, ())]
    paths = [core.path for core in cores]
    path = _common(paths)
    while path and not (all(name.startswith(f"{path}.") for name in held) and _computes(trace, path)):
        path = path.rpartition(".")[0]
    return path


def _computes(trace: TracedCores, path: str) -> bool:
    return not isinstance(trace.run.module.get_submodule(path), (nn.ModuleList, nn.ModuleDict))


def _common(paths: list[str]) -> str:
    parts = [path.split(".") if path else [] for path in paths]
    shared = itertools.takewhile(lambda one: len(set(one)) == 1, zip(*parts))
    return ".".join(one[0] for one in shared)


def _named_apart(found: list[Found], name: str) -> list[Found]:
    """One layer for a module that ran twice, and names of their own for several layers of one module."""
    kept: list[Found] = []
    for one in found:
        layer = one.layer
        twin = next(
            (place for place, other in enumerate(kept) if other.path == one.path and _are_one(other, one)), None
        )
        if twin is None:
            kept.append(one)
        elif kept[twin].reason == SINGLE_KEYS:  # a block of one key tells nothing of the others
            kept[twin] = one
        elif (
            layer is None and one.reason != SINGLE_KEYS
        ):  # what holds in one of its calls and not in another is not established
            kept[twin] = one
    layers = [one for one in kept if one.layer is not None]
    shared = {
        id(layer.output_projection)
        for one, other in itertools.permutations(layers, 2)
        if (layer := one.layer) is not None
        and other.layer is not None
        and layer.output_projection is other.layer.output_projection
    }
    named = []
    for one in kept:
        layer = one.layer
        if layer is not None and id(layer.output_projection) in shared:
            layer = replace(layer, output_projection=None)  # its input is a sum of what they give
        if layer is not None:
            beside = [other for other in layers if other.path == one.path and other is not one]
            layer = replace(layer, name=".".join(part for part in (layer.name, _own_name(one, beside)) if part))
        named.append(replace(one, layer=layer))
    return [_refused(one) if any(_conflict(one, other) for other in named) else one for one in named]


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
    return ".".join(part for part in (_map_of(one, "key"), str(number)) if part)


def _map_of(one: Found, role: Role) -> str:
    part = None if one.layer is None else one.layer.slices.get(role)
    return "" if part is None else module_of(part.by_token.parameter)


def _refused(one: Found) -> Found:
    return replace(one, layer=None, reason="several of its softmaxes have heads of the same maps, and none of its own")


def _conflict(one: Found, other: Found) -> bool:
    """Tell layers of one module that cut the same map into other heads: what one of them says, the other denies."""
    if one is other or one.layer is None or other.layer is None or one.path != other.path:
        return False
    pairs = {
        role: (one.layer.slices[role], other.layer.slices[role])
        for role in INPUT_ROLES
        if role in one.layer.slices.keys() & other.layer.slices.keys()
    }
    differing = [role for role, (a, b) in pairs.items() if a != b]
    # Two may share all of their keys, or have rows of their own of the same maps, as where softmaxes are subtracted.
    return differing == ["value"] or any(_overlap(*pairs[role]) for role in differing)


def _overlap(one: HeadWeight, other: HeadWeight) -> bool:
    """Tell whether two layers have rows of a parameter in common."""
    rows = [
        {
            (id(part.owner), part.parameter, row)
            for part in getattr(whole, "pieces", (whole.by_token,))
            for row in part.index().flatten().tolist()
        }
        for whole in (one, other)
    ]
    return not rows[0].isdisjoint(rows[1])


def _are_one(one: Found, other: Found) -> bool:
    if one.layer is None or other.layer is None:
        return one.maps == other.maps
    return one.maps == other.maps and all(
        role in other.layer.slices and part == other.layer.slices[role] for role, part in one.layer.slices.items()
    )
