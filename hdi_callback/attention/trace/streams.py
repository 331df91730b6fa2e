"""Joint attention of two token streams, each with projections of its own: which of them is read."""

from __future__ import annotations

from hdi_callback.attention.layer.heads import INPUT_ROLES, Role
from hdi_callback.attention.trace.core_view import CoreView
from hdi_callback.attention.trace.head_rows import NoHeadsError, named
from hdi_callback.attention.trace.support import Support
from hdi_callback.attention.trace.traced_cores import TracedCores

_Stream = tuple[str, str]  # the maps of its keys and of its values
_KEPT = INPUT_ROLES[1:]


def second_stream(view: CoreView) -> str:
    """Recognise keys and values that come from one map for some tokens and from another for others.

    Each stream has its own maps, and no token is of both. Kept is that of the tokens that the first query is of.

    Args:
        view: of a core; what a second stream gives is taken out of its supports, and of its tokens.

    Returns:
        What is left out; empty if there is one stream.
    """
    run, keys, values = view.trace.run, view.tensor("key"), view.tensor("value")
    at_keys, of_first = view.at(view.first, "key"), view.supports[view.first]
    at_values = view.at(view.first, "value")[0] + at_keys % keys.shape[1]
    if keys.shape[1] != values.shape[1] or all(len(run.maps(of_first[role])) < 2 for role in _KEPT):
        return ""
    streams: dict[tuple[frozenset[str], ...], list[int]] = {}
    for places in zip(at_keys.tolist(), at_values.tolist()):
        maps = [frozenset(run.maps(run.support(tensor, [at]))) for tensor, at in zip((keys, values), places)]
        if all(maps):
            streams.setdefault(tuple(maps), []).append(places[0] % keys.shape[1])
    single: list[_Stream] = [(*stream[0], *stream[1]) for stream in streams if set(map(len, stream)) == {1}]  # type: ignore[misc]
    # Tokens of several maps together are no stream that is read, and those of one of them no second stream.
    if len(streams) != 2 or not single or (len(single) < 2 and any(one & other for one, other in zip(*streams))):
        return ""
    kept = _stream_of_query(view.trace, single, of_first)
    for supports in view.supports.values():
        for role, name in zip(_KEPT, kept):
            supports[role] = supports[role].only(_leaves_of(view.trace, supports[role], name))
    view.keep_tokens(next(tokens for maps, tokens in streams.items() if kept == (*maps[0], *maps[1])))
    dropped = frozenset().union(*(maps for stream in streams for maps in stream)) - set(kept)
    return f"the keys and values of a second token stream, which come from {named(sorted(dropped))}"


def _leaves_of(trace: TracedCores, support: Support, name: str) -> list[int]:
    return [leaf for leaf in support.masks if trace.leaves[leaf].parameter == name]


def _stream_of_query(trace: TracedCores, streams: list[_Stream], supports: dict[Role, Support]) -> _Stream:
    """Choose the stream of the queries: by its map, by the input of that map, by the places of its tokens."""
    query, keys = supports["query"], supports["key"]
    leaves = {stream: _leaves_of(trace, keys, stream[0]) for stream in streams}
    alike = [stream for stream in streams if stream[0] in trace.run.maps(query)]
    if not alike:
        of_query = {_source(trace, leaf) for leaf in query.masks}
        alike = [stream for stream in streams if any(_source(trace, leaf) in of_query for leaf in leaves[stream])]
    if len(alike) > 1:  # parts of one input
        places = {place for leaf in query.masks for place in _places(trace, leaf, query.positions(leaf))}
        alike = [one for one in alike if places <= {at for leaf in leaves[one] for at in _places(trace, leaf)}]
        if len(alike) != 1:
            raise NoHeadsError(
                "its keys come from two token streams, and it is not clear which of them has its queries"
            )
    return alike[0] if alike else streams[0]


def _places(trace: TracedCores, leaf: int, positions: tuple[int, ...] | None = None) -> set[tuple[int, int]]:
    """Places in the inputs that a map reads, at some or all of its positions."""
    found = Support.of(trace.leaves[leaf].input, trace.run.inputs, positions)
    return {(number, place) for number in found.masks for place in found.positions(number)}


def _source(trace: TracedCores, leaf: int) -> tuple[frozenset[int], frozenset[int]]:
    """Return the sources of a map: other maps, and inputs."""
    return frozenset(trace.fed(leaf).masks), frozenset(trace.inputs_of(leaf).masks)
