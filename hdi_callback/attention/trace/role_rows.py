"""Rows of queries, keys and values in the maps that output them, and in the maps before those."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import replace

import torch

from hdi_callback.attention.layer.heads import INPUT_ROLES, PLURAL, Role
from hdi_callback.attention.trace.core_view import CoreView
from hdi_callback.attention.trace.head_rows import NoRowsError, Rows, module_of, named
from hdi_callback.attention.trace.sequences import joined_by_sequence
from hdi_callback.attention.trace.support import Support, agreed, columns_of, depends_on, derivatives
from hdi_callback.attention.trace.traced_cores import TracedCores


def rows_of_heads(view: CoreView) -> tuple[list[list[int]], dict[Role, list[list[Rows]]]]:
    """Read the rows of each part of a core; parts of equal rows are one head.

    Args:
        view: of the core.

    Returns:
        For each head its parts, and for each role the rows of each head, one entry for each map.
    """
    shared = _shared_source(view)
    read: dict[int, dict[Role, list[Rows]]] = {}
    parts: dict[object, list[int]] = {}
    for unit, supports in view.supports.items():
        mine = read[unit] = {role: _rows(view, role, supports[role], shared) for role in INPUT_ROLES[1:]}
        try:
            mine["query"] = _rows(view, "query", supports["query"], shared)
        except NoRowsError:  # the keys are known all the same
            mine["query"] = []
        known = tuple((row.parameter, row.features, row.inner) for role in INPUT_ROLES for row in mine[role])
        query = supports["query"]
        alone = () if mine["query"] else tuple((leaf, query.features(leaf)) for leaf in query.masks)
        parts.setdefault((known, alone), []).append(unit)
    members = joined_by_sequence(view, list(parts.values()), read)
    return members, {role: [read[of_head[0]][role] for of_head in members] for role in INPUT_ROLES}


def _shared_source(view: CoreView) -> frozenset[int]:
    """Maps in front of query, key and value alike: they compute the tokens, and belong to no head."""
    trace, supports = view.trace, view.supports[view.first]
    fed = [trace.fed(leaf) for support in supports.values() for leaf in support.masks]
    sources = [{leaf: support.features(leaf) for leaf in support.masks} for support in fed]
    return frozenset(sources[0]) if sources and all(source == sources[0] for source in sources) else frozenset()


def _rows(view: CoreView, role: Role, support: Support, shared: Collection[int]) -> list[Rows]:
    """The rows of one role of one head, one entry for each map."""
    run = view.trace.run
    features, maps = run.features(support), run.maps(support)
    found = []
    for parameter in maps:
        leaf = next(leaf for leaf in support.masks if run.leaves[leaf].parameter == parameter)
        own = tuple(sorted(feature for name, feature in features if name == parameter))
        try:
            found.append(Rows(parameter, own, *_fed_by(view, leaf, support, shared)))
        except NoRowsError as error:
            if len(maps) == 1:
                raise
            found.append(Rows(parameter, own, problem=str(error)))  # it may be that of places, and be left out
    return found


def _fed_by(
    view: CoreView, leaf: int, support: Support, shared: Collection[int]
) -> tuple[Rows | None, tuple[float, ...]]:
    """The rows of another map in front of a map, and the gain between both."""
    trace, run = view.trace, view.trace.run
    nothing = None, ()
    sources = [other for other in trace.fed(leaf).masks if other != leaf]
    if not sources or trace.inputs_of(leaf):
        return nothing
    if set(sources) == set(shared) and not _is_in_front(view, leaf, sources):
        return nothing
    if all(takes_attention(trace, source) for source in sources):  # which makes tokens of head outputs
        return nothing
    if _adds_by_token(trace, leaf):  # positions, say: what it takes are tokens, and no rows of another map alone
        return nothing
    refusal = NoRowsError(
        f"its projection `{module_of(run.leaves[leaf].parameter)}` takes the output of another linear map"
    )
    map_input = run.leaves[leaf].input
    token = map_input.reshape(-1, map_input.shape[-1])[support.positions(leaf)[0]][None]
    if len(sources) > 1:
        sources = list(run.support(token).masks)
    if len(sources) != 1:
        raise refusal
    (source,) = sources
    outputs = [run.leaves[source].output]
    codes = columns_of(token, outputs).get(0)
    if codes is None or (codes == -2).any() or int((codes >= 0).any(1).sum()) != 1:
        raise refusal
    read = agreed(codes)
    features = [(read == column).nonzero().flatten().tolist() for column in range(token.shape[-1])]
    behind = trace.fed(source).masks.keys() - {source}
    if any(len(feature) != 1 for feature in features) or (behind and not trace.inputs_of(source)):
        raise refusal
    own = [one for (one,) in features]
    gains = derivatives(token, torch.ones(token.shape), outputs)[0]
    gain = gains[(codes >= 0).any(1)][0][own]
    start = run.leaves[source].start
    inner = Rows(run.leaves[source].parameter, tuple(start + feature for feature in own))
    return inner, tuple((gain / gain.abs().max()).tolist())


def _adds_by_token(trace: TracedCores, leaf: int) -> bool:
    """Return whether the input of a map still differs by token when the other maps output zero."""
    run, _ = trace.without_maps
    if len(run.leaves) != len(trace.leaves) or run.leaves[leaf].input.dim() < 3:
        return False
    map_input = torch.nan_to_num(run.leaves[leaf].input.detach())
    return bool((map_input - map_input[..., :1, :]).abs().max() > 1e-4 * map_input.abs().max())


def _is_in_front(view: CoreView, leaf: int, sources: list[int]) -> bool:
    """Return whether a map in front of all projections belongs to this attention, and does not compute its tokens.

    In a layer that runs several times it does so in every call.
    """
    path, source, leaves = view.core.path, sources[0], view.trace.leaves
    calls = _calls(view.trace, leaves[leaf].parameter)
    if len({frozenset(leaves[other].parameter for other in view.trace.fed(at).masks) for at in calls}) > 1:
        return False
    is_own = not path or view.trace.leaves[source].parameter.startswith(f"{path}.")
    return len(sources) == 1 and is_own and not takes_attention(view.trace, source)


def takes_attention(trace: TracedCores, leaf: int) -> bool:
    """Recognise a map whose input is the output of an attention core, with no map in between."""
    return any(depends_on(trace.leaves[leaf].input, core.output) for core in trace.cores)


def leave_out_shared_features(view: CoreView, of_heads: dict[Role, list[list[Rows]]]) -> bool:
    """Leave out the key features that all heads share beside their own, and the query features multiplied with them.

    That is the rotary part of latent attention, whose columns are apart from those of the heads' own keys.

    Args:
        view: of the core.
        of_heads: for each role the rows of each head, which are changed.

    Returns:
        True if there is one.
    """
    found = of_heads["key"]
    shared = set(found[0]).intersection(*found[1:]) if len(found) > 1 else set()
    if not shared or any(set(one) == shared for one in found):
        return False
    columns = view.trace.run.columns(view.tensor("key"))
    own = _columns_of_rows(columns, {row for rows in found for row in rows} - shared)
    if own & _columns_of_rows(columns, shared):
        return False
    of_heads["key"] = [[row for row in rows if row not in shared] for rows in found]
    _keep_columns(view, of_heads, own)
    return True


def _keep_columns(view: CoreView, of_heads: dict[Role, list[list[Rows]]], own: Collection[int]) -> None:
    """Keep features of queries in some columns."""
    columns = view.trace.run.columns(view.tensor("query"))
    of_heads["query"] = [
        [
            replace(row, features=kept)
            for row in rows
            if (kept := tuple(at for at in row.features if columns.get((row.parameter, at), -2) in own))
        ]
        for rows in of_heads["query"]
    ]


def _columns_of_rows(columns: dict[tuple[str, int], int], rows: Collection[Rows]) -> set[int]:
    return {columns.get((row.parameter, feature), -2) for row in rows for feature in row.features} - {-2}


def are_parts_side_by_side(view: CoreView, found: list[list[Rows]]) -> bool:
    """Return whether keys have some features of one map and some of another, and are no sums of both.

    Args:
        view: of the core.
        found: rows of the keys of each head, one entry for each map.

    Returns:
        True if each map has columns of keys to itself.
    """
    columns = view.trace.run.columns(view.tensor("key"))
    of_maps: dict[str, set[int]] = {}
    for row in (row for rows in found for row in rows):
        own = {columns.get((row.parameter, feature), -2) for feature in row.features}
        of_maps.setdefault(row.parameter, set()).update(own)
    every = set().union(*of_maps.values())
    return -2 not in every and sum(map(len, of_maps.values())) == len(every)


def leave_out_positional_features(view: CoreView, of_heads: dict[Role, list[list[Rows]]]) -> str:
    """Leave out key features that come from another map than those of tokens, as of positions (Conditional DETR).

    Those of tokens are of the one map that takes what that of the values takes; of queries the features stay that are
    multiplied with them.

    Args:
        view: of the core.
        of_heads: for each role the rows of each head, which are changed.

    Returns:
        What is left out, in words; nothing where the map of the tokens gives all columns of the keys.
    """
    maps, of_tokens = ({row.parameter for rows in of_heads[role] for row in rows} for role in ("key", "value"))
    kept = [name for name in maps if len(of_tokens) == 1 and _take_the_same(view.trace, name, *of_tokens)]
    if len(kept) != 1 or len(maps) < 2 or not _are_of_other_tokens(view.trace, maps - set(kept), kept[0]):
        return ""
    of_keys = [[row for row in rows if row.parameter in kept] for rows in of_heads["key"]]
    columns = view.trace.run.columns(view.tensor("key"))
    own = {columns.get((row.parameter, feature), -2) for rows in of_keys for row in rows for feature in row.features}
    if -2 in own or not all(of_keys) or len(own) == view.tensor("key").shape[-1]:
        return ""
    of_heads["key"] = of_keys
    _keep_columns(view, of_heads, own)
    return f"the features of its keys that come from {named(sorted(maps - set(kept)))}"


def leave_out_added_terms(view: CoreView, of_heads: dict[Role, list[list[Rows]]]) -> str:
    """Leave out terms of another map in the keys, values or queries of tokens, such as those of their positions.

    Of several maps, that of the tokens takes what the one map of the other role takes, and no other of them does.

    Args:
        view: of the core.
        of_heads: for each role the rows of each head, which are changed.

    Returns:
        What is left out, in words.
    """
    pairs: tuple[tuple[Role, Role], ...] = (("key", "value"), ("value", "key"), ("query", "value"))
    reasons = []
    for role, other in pairs:
        maps, of_tokens = ({row.parameter for rows in of_heads[each] for row in rows} for each in (role, other))
        if len(of_tokens) != 1 or not any(len(rows) > 1 for rows in of_heads[role]):
            continue
        kept = [name for name in maps if _take_the_same(view.trace, name, *of_tokens)]
        own = [[row for row in rows if row.parameter in kept] for rows in of_heads[role]]
        if len(kept) == 1 and all(own) and _are_of_other_tokens(view.trace, maps - set(kept), kept[0]):
            of_heads[role] = own
            reasons.append(f"what {named(sorted(maps - set(kept)))} adds to its {PLURAL[role]}")
    return " and ".join(reasons)


def _take_the_same(trace: TracedCores, one: str, other: str) -> bool:
    """Return whether two maps have the same tokens as input.

    A forward may pass a tensor twice. Of synthetic inputs several have the same numbers, and are others.
    """
    pairs = itertools.product(_calls(trace, one), _calls(trace, other))
    return any(_are_given_the_same(trace, *pair) for pair in pairs)


def _are_of_other_tokens(trace: TracedCores, maps: Collection[str], kept: str) -> bool:
    """Return whether none of the added maps depends on the tokens themselves, as adapters do."""
    tokens = {number for at in _calls(trace, kept) for number in trace.inputs_of(at).masks}
    made = [
        _upstream_inputs(trace, source) for name in maps for at in _calls(trace, name) for source in trace.fed(at).masks
    ]
    return all(tokens.isdisjoint(one) for one in made)


def _upstream_inputs(trace: TracedCores, leaf: int, depth: int = 4) -> set[int]:
    """The inputs of the run that a map depends on, through further maps too."""
    found = set(trace.inputs_of(leaf).masks)
    others = [other for other in trace.fed(leaf).masks if other != leaf] if depth else []
    return found.union(*(_upstream_inputs(trace, other, depth - 1) for other in others))


def _calls(trace: TracedCores, name: str) -> list[int]:
    return [at for at, leaf in enumerate(trace.leaves) if leaf.parameter == name]


def _are_given_the_same(trace: TracedCores, one: int, other: int) -> bool:
    mine, others = trace.leaves[one].input, trace.leaves[other].input
    if mine.shape != others.shape or not torch.equal(mine, others):
        return False
    if not trace.is_synthetic:
        return True
    return all(of(one).masks.keys() == of(other).masks.keys() for of in (trace.inputs_of, trace.fed))
