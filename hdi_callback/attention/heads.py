"""Heads of an attention: what of its queries, keys and values comes from the same rows of the same parameters.

A head is a set of rows for each role that is met together, whatever the sequence and token. `heads_of` reads them off
the labels of a `Core`; `columns_of` follows what the core gives to the output projection.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hdi_callback.attention.cores import Core, ValueProduct
from hdi_callback.attention.labels import GROUPED, TIMES, FeatureRange, Label, Labels, filter_features
from hdi_callback.attention.planes import repeats, reshaped, small, thin, unique_rows
from hdi_callback.attention.products import Product, Unreadable
from hdi_callback.attention.tape import DATA, Step, View

__all__ = ["FoundAttention", "Projection", "column_numbers", "columns_of", "heads_of", "maps_that_are_shared"]

IN = ("query", "key", "value")
_FAR = 60  # steps to walk on from an attention to its output projection

_Head = dict[str, "dict[frozenset[int], Vector]"]  # role -> its vectors, by the parameters of a stream of tokens
Vector = dict[int, tuple[tuple[int, int], ...]]  # of one token: parameter -> (place in the head, feature)


@dataclass(frozen=True, eq=False)
class Projection:
    """Rows (of an output: columns) of each head in one parameter.

    Attributes:
        names: of parameters: one, or one for each head.
        owners: their numbers, one for each head.
        starts: ``(heads, width)``, the first element of each row, numbered among those of all parameters.
        stride: elements from one of a row to the next.
        count: elements of a row.
        places: where in the head the rows lie.
    """

    names: tuple[str, ...]
    owners: tuple[int, ...]
    starts: Tensor
    stride: int
    count: int
    places: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[object, ...]:
        """What tells it from other maps."""
        return self.names, tuple(self.starts.flatten().tolist()), self.count

    def of_heads(self, heads: Sequence[int]) -> Projection:
        """Give the rows of some heads."""
        names = self.names if len(self.names) == 1 else tuple(self.names[head] for head in heads)
        owners = tuple(self.owners[head] for head in heads)
        return replace(self, names=names, owners=owners, starts=self.starts[list(heads)])

    def at(self, places: Sequence[int]) -> Projection:
        """Give the rows that lie at some places of the head."""
        kept = [self.places.index(place) for place in places]
        return replace(self, starts=self.starts[:, kept], places=tuple(places))


@dataclass(eq=False, repr=False)
class FoundAttention:
    """What was read of an attention.

    Attributes:
        core: as it runs.
        heads: how many there are.
        maps: role -> maps that are summed, of which one is all there is, as a rule.
        flags: what else was seen.
        notes: what is left out, in words.
        numbers: of each product with values, the head of each of its queries ``(n, queries)``; -1 for none.
        width: of a head's values.
        source: numbers of features of what it gives.
        outputs: products that take the heads side by side, with their columns.
        streams: the maps of further streams of tokens, each with some of its own.
        stream_of: of each query, the number of its stream.
        stream_of_output: of each output, that of the queries which it takes.
        members: claims of single heads that were put together.
        takers: products with parameters that take what it gives.
    """

    core: Core
    heads: int
    maps: dict[str, list[Projection]]
    flags: set[str]
    notes: list[str]
    numbers: list[Tensor] = field(default_factory=list)
    width: int = 0
    source: FeatureRange | None = None
    outputs: list[tuple[Step, Projection]] = field(default_factory=list)
    streams: list[dict[str, list[Projection]]] = field(default_factory=list)
    stream_of: Tensor | None = None
    stream_of_output: list[int] = field(default_factory=list)
    members: list[FoundAttention] = field(default_factory=list)
    takers: list[tuple[Step, Product]] = field(default_factory=list)

    def __repr__(self) -> str:
        names = {role: [name for part in parts for name in part.names] for role, parts in self.maps.items()}
        return f"<FoundAttention of {self.heads} heads in `{self.path}`: {names}>"

    @property
    def path(self) -> str | None:
        """The module that ran it."""
        return self.core.step.path


# from labels to heads


@dataclass(frozen=True, eq=False)
class _Found:
    """Heads of one part: the vector of each role, by stream."""

    heads: list[_Head]
    number: Tensor
    flags: set[str]
    owners: list[frozenset[int]]  # of each different query
    which: Tensor  # different query of each


def heads_of(labels: Labels, core: Core) -> FoundAttention:
    """Read the heads of an attention.

    Raises:
        Unreadable: if they cannot be told.
    """  # noqa: DOC201
    parts = [part for part in core.parts if bool(small(part.value.features).any())] or core.parts[:1]
    found = [_heads_of_part(labels, part) for part in parts]
    heads: dict[tuple[object, ...], _Head] = {}
    for one in found:
        if len({_name_of_asking(head) for head in one.heads}) < len(one.heads):
            raise Unreadable("several heads share queries and keys")
        for head in one.heads:
            heads.setdefault(_name_of_asking(head), head)
    claim = FoundAttention(core, len(heads), {}, set(core.flags).union(*(one.flags for one in found)), [])
    streams = _streams(list(heads.values()))
    first, *claim.streams = (_maps_of(labels, claim, list(heads.values()), stream) for stream in streams)
    claim.maps = first
    if claim.streams:
        order = list(next(iter(heads.values()))["query"])
        numbers = torch.tensor([order.index(one) if one in order else 0 for one in found[0].owners])
        claim.stream_of = numbers[found[0].which]
    _check(parts[0], claim)
    asked = torch.cat([one.number.flatten() for one in found])
    if len(set(asked[asked >= 0].bincount().tolist())) > 1:
        raise Unreadable("not all tokens have the same heads, as where experts make queries")
    _install(labels, claim, _values_of_parts(labels, claim, parts, found, heads))
    return claim


def _heads_of_part(labels: Labels, part: ValueProduct) -> _Found:
    given = {"query": part.query, "key": part.key, "value": part.value}
    n, queries, width = part.query.features.shape
    flags = {f"{role}: {flag}" for role, label in given.items() for flag in label.flags}
    vectors, which = {}, {}
    for role, label in given.items():
        which[role], vectors[role], is_sum = _vectors(labels, label.features)
        flags |= {f"{role}: sum"} if is_sum else set()
    heads: dict[tuple[object, ...], _Head] = {}
    number = torch.full((n, queries), -1)
    known: dict[tuple[object, ...], list[tuple[tuple[object, ...] | None, Sequence[int]]]] = {}
    for slot in range(n):
        mine, *others = (_in_order(which[role][slot]) for role in IN)
        key = (*others, mine)
        if key not in known:
            known[key] = []
            of_keys, of_values = (
                _streams_of_tokens([vectors[role][i] for i in numbers], given[role].features.shape[-1], role + "s")
                for role, numbers in zip(("key", "value"), others)
            )
            for of_queries, rows in _query_heads(vectors["query"], mine, width):
                head = {"query": of_queries, "key": of_keys, "value": of_values}
                name = tuple(_named(head[role]) for role in IN)
                is_whole = all(head[role] or not bool(small(given[role].features).any()) for role in IN)
                if is_whole:
                    heads.setdefault(name, head)
                known[key].append((name if is_whole else None, rows))
        for known_name, rows in known[key]:
            if known_name is not None:
                at = list(heads).index(known_name)
                is_mine = torch.isin(which["query"][slot], torch.tensor(rows))
                number[slot][is_mine] = at
    if not heads:
        raise Unreadable("neither its queries nor its keys come from a linear map")
    owners = [frozenset(vector) for vector in vectors["query"]]
    return _Found(list(heads.values()), thin(number), flags, owners, which["query"])


def _in_order(numbers: Tensor) -> tuple[int, ...]:
    """Give the different numbers, as they come."""
    return tuple(dict.fromkeys(small(numbers).tolist()))


def _vectors(labels: Labels, features: Tensor) -> tuple[Tensor, list[Vector], bool]:
    """Number the different vectors ``(n, tokens)`` of features, and say which features of which parameters each has."""
    n, tokens, width = features.shape
    short = features
    for dim in (0, 1):
        if short.stride(dim) == 0 and short.shape[dim] > 1:
            short = short.narrow(dim, 0, 1)
    rows, which = unique_rows(short.reshape(-1, width))
    vectors, is_sum = [], False
    for row in rows.tolist():
        taken: dict[int, dict[int, int]] = {}  # parameter -> place -> feature
        seen: dict[int, dict[int, bool]] = {}  # parameter -> feature -> whether it has a place
        for place, number in enumerate(row):
            owners: dict[int, list[int]] = {}
            for member in sorted(labels.members(number)):
                owners.setdefault(labels.owner(member), []).append(member)
            is_sum |= len(owners) > 1
            for owner, members in owners.items():
                known = seen.setdefault(owner, {})
                free = next((one for one in members if not known.get(one)), None)
                known.update({one: known.get(one, False) or one == free for one in members})
                if free is not None:
                    taken.setdefault(owner, {})[place] = free
        vectors.append({owner: _in_places(mine, seen[owner]) for owner, mine in taken.items()})
    return which.reshape(short.shape[:2]).expand(n, tokens), vectors, is_sum


def _in_places(taken: dict[int, int], seen: dict[int, bool]) -> tuple[tuple[int, int], ...]:
    """Features by their places; those of a sum that got no place come last."""
    return (*taken.items(), *((-1, one) for one, has_place in seen.items() if not has_place))


def _named(streams: dict[frozenset[int], Vector]) -> tuple[object, ...]:
    """Name a head by its features, in any order."""
    return tuple(
        sorted(
            (owner, tuple(sorted(f for _, f in places)))
            for vector in streams.values()
            for owner, places in vector.items()
        )
    )


def _name_of_asking(head: _Head) -> tuple[object, ...]:
    return _named(head["query"]), _named(head["key"])


def _streams_of_tokens(vectors: list[Vector], width: int, what: str) -> dict[frozenset[int], Vector]:
    """Put together what tokens of several streams have; within a stream all tokens have the same."""
    streams: dict[frozenset[int], Vector] = {}
    all_features: dict[int, set[int]] = {}
    for vector in vectors:
        if not vector:
            continue
        key = frozenset(vector)
        for owner, places in vector.items():
            if owner >= 10**6:
                continue
            if len(places) > width:
                raise Unreadable(f"its {what} mix features of several heads, or more than a head has")
            known = all_features.setdefault(owner, set())
            known.update(feature for _, feature in places)
            if len(known) > width:
                raise Unreadable(f"the features of its {what} differ between tokens")
        longest = streams.get(key)
        if longest is None or sum(map(len, vector.values())) > sum(map(len, longest.values())):
            streams[key] = vector
    for key in list(streams):  # some of what another stream has, of padding and the like
        if any(key < other for other in streams):
            del streams[key]
    return streams


def _query_heads(
    vectors: list[Vector], mine: Sequence[int], width: int
) -> list[tuple[dict[frozenset[int], Vector], Sequence[int]]]:
    """Tell whether rows of queries are several heads, or one whose tokens may be of several streams."""
    given = [(i, vectors[i]) for i in mine]
    owners = [owner for _, vector in given for owner in vector if owner < 10**6]
    if len(set(owners)) == len(owners):
        return [(_streams_of_tokens([vector for _, vector in given], width, "queries"), mine)]
    if any(set(vector) != set(given[0][1]) for _, vector in given if vector):
        raise Unreadable("the features of its queries differ between tokens")
    return [(_streams_of_tokens([vector], width, "queries"), [i]) for i, vector in given]


def _streams(heads: list[_Head]) -> list[int]:
    """Number the streams of tokens, each of which has maps of its own in all roles."""
    counts = {len(head[role]) for head in heads for role in IN if len(head[role]) > 1}
    return list(range(counts.pop())) if len(counts) == 1 else [0]


# from heads to maps


def _maps_of(labels: Labels, claim: FoundAttention, heads: list[_Head], stream: int) -> dict[str, list[Projection]]:
    maps: dict[str, list[Projection]] = {}
    for role in IN:
        mine = []
        for head in heads:
            streams = list(head[role].values())
            mine.append(streams[min(stream, len(streams) - 1)] if streams else {})
        found = _maps_of_role(labels, claim, role, mine)
        if found:
            maps[role] = found
    return maps


def _maps_of_role(labels: Labels, claim: FoundAttention, role: str, heads: list[Vector]) -> list[Projection]:
    owners = list(dict.fromkeys(owner for vector in heads for owner in vector))
    computed = [owner for owner in owners if labels.source_of(owner) is not None]
    for owner in computed:
        source = labels.source_of(owner)
        if source is not None and source.step is not None and (why := labels.products.changed_by(source.step)):
            raise Unreadable(f"its weight is computed from {why}")
        claim.flags.add(f"{role}: computed by {source.kind if source else ''}")
    heads = [{owner: places for owner, places in vector.items() if owner not in computed} for vector in heads]
    if f"{role}: sum" in claim.flags:
        still = [owner for owner in owners if owner not in labels.moving]  # maps of positions alone
        if not all(set(vector) <= set(still) for vector in heads):
            heads = [{o: places for o, places in vector.items() if o not in still} for vector in heads]
    if len({len(vector) for vector in heads}) > 1:
        claim.flags.add(f"{role}: some heads have more maps than others")
        return []
    if len({frozenset(vector) for vector in heads}) == 1:  # else each head has parameters of its own
        heads = [{owner: vector[owner] for owner in heads[0]} for vector in heads]
    found = [_map(labels, claim, role, list(mine)) for mine in zip(*(list(vector.items()) for vector in heads))]
    return [one for one in found if one is not None]


def _map(
    labels: Labels, claim: FoundAttention, role: str, of_heads: list[tuple[int, tuple[tuple[int, int], ...]]]
) -> Projection | None:
    owners = tuple(owner for owner, _ in of_heads)
    names = tuple(labels.tape.names[owner] for owner in owners)
    names = names[:1] if len(set(names)) == 1 else names
    if len({len(places) for _, places in of_heads}) > 1:
        claim.flags.add(f"{role}: heads of several widths in {names[0]}")
        return None
    features = [tuple(feature for _, feature in places) for _, places in of_heads]
    distinct = {frozenset(one) for one in features}
    if sum(map(len, distinct)) != len(frozenset().union(*distinct)):
        raise Unreadable(f"heads share features of `{names[0]}`")
    for owner in set(owners):
        if owner in labels.products.irregular:
            raise Unreadable(f"the rows of `{labels.tape.names[owner]}` lie in no regular order")
    stride, count = labels.products.stride[owners[0]]
    places = tuple(place for place, _ in of_heads[0][1])
    return Projection(names, owners, torch.tensor(features), stride, count, places)


def _check(part: ValueProduct, claim: FoundAttention) -> None:
    """Refuse what is no attention of heads after all."""
    maps, flags = claim.maps, claim.flags
    given = {"query": part.query, "key": part.key, "value": part.value}
    for role in ("query", "key"):
        tokens = small(given[role].tokens)
        is_one = repeats(tokens, 1) and given[role].tokens.shape[1] > 1
        if role in maps and is_one and bool((tokens > 0).all()):
            raise Unreadable(f"its {role} positions are not tokens")
    for role, label in given.items():
        if role in maps and f"{role}: {GROUPED}" in flags:
            raise Unreadable(f"the {role} map of each head takes an input of its own: a group of channels")
        if {f"{role}: {TIMES}", f"{role}: sum"} <= flags:
            raise Unreadable(f"its {role} is a product of two computed tensors (such as a map and the gain of DoRA)")
        if any(one.starts.shape[1] == 1 < label.features.shape[-1] for one in maps.get(role, [])):
            raise Unreadable(f"a map mixes the heads of its {role}")
    distinct = {role: len({tuple(row) for row in maps[role][0].starts.tolist()}) for role in maps}
    most = max(distinct.get("query", claim.heads), distinct.get("key", claim.heads))
    if claim.heads > 1 and most < claim.heads:
        raise Unreadable("several heads share queries and keys")
    if "query" not in maps and "key" not in maps:
        seen = f" ({'; '.join(sorted(flags))})" if flags else ""
        raise Unreadable(f"neither its queries nor its keys come from a linear map{seen}")


# what an attention gives


def _values_of_parts(
    labels: Labels,
    claim: FoundAttention,
    parts: Sequence[ValueProduct],
    found: list[_Found],
    heads: dict[tuple[object, ...], _Head],
) -> list[tuple[ValueProduct, Tensor, int]]:
    """Give parts with the heads of their queries, and where in the heads' values theirs begin.

    A product with further values of the same parameter stands beside the first; one of another parameter is left out.
    """  # noqa: DOC201
    order = {name: at for at, name in enumerate(heads)}
    kept, width = [], max(part.value.features.shape[-1] for part in parts)
    for part, one in zip(parts, found):
        offset = 0
        if any(_named(head["value"]) != _named(heads[_name_of_asking(head)]["value"]) for head in one.heads):
            further = _beside(labels, claim, one, width) if len(one.heads) == len(heads) else None
            if further is None:
                claim.notes.append("further values that its weights are multiplied with")
                continue
            claim.maps["value"], offset = [further], width
        at = torch.tensor([*(order[_name_of_asking(head)] for head in one.heads), -1])
        kept.append((part, thin(at[one.number]), offset))
    return kept


def _beside(labels: Labels, claim: FoundAttention, found: _Found, width: int) -> Projection | None:
    """Put further values of the heads beside the first, if they are of the same parameter."""
    first = claim.maps.get("value", [])
    other = _maps_of_role(labels, claim, "value", [next(iter(head["value"].values()), {}) for head in found.heads])
    if len(first) != 1 or len(other) != 1 or first[0].names != other[0].names or first[0].starts.shape[1] > width:
        return None
    places = (*first[0].places, *(place + width for place in other[0].places))
    starts = torch.cat([first[0].starts, other[0].starts], 1)
    return replace(first[0], starts=starts, places=places)


def _install(labels: Labels, claim: FoundAttention, parts: list[tuple[ValueProduct, Tensor, int]]) -> None:
    """Let what a core gives carry the numbers of its heads."""
    width = max(part.value.features.shape[-1] + offset for part, _, offset in parts)
    claim.width, claim.numbers = width, [number for _, number, _ in parts]
    claim.source = labels.new_source("attention", claim.heads * width, claim.core.step, ())
    for part, head, offset in parts:
        shape = n, queries, mine = (*head.shape, part.value.features.shape[-1])
        first = claim.source.start + offset + small(head)[..., None] * width
        features = torch.where(small(head)[..., None] < 0, 0, first + torch.arange(mine))
        tokens = (torch.arange(n)[:, None] * queries + torch.arange(queries) + 1)[..., None]
        placed, at = (part.placed(plane.expand(shape)) for plane in (features, tokens))
        labels.installed[part.step.number] = Label(placed, at)


def columns_of(labels: Labels, claim: FoundAttention) -> None:
    """Follow what an attention gives to the products with parameters that take it."""
    seen: set[int] = set()
    todo: list[tuple[int, Step]] = []
    first = min(part.step.number for part in claim.core.parts)
    for part in claim.core.parts:
        out = part.step.outputs[0]
        if out is not None:
            seen.add(id(out.cell))
            todo += [(user.number, user) for user in out.cell.users]
    heapq.heapify(todo)
    done: set[int] = set()
    while todo and len(done) < _FAR:
        number, step = heapq.heappop(todo)
        if number in done or number <= first:
            continue
        done.add(number)
        product = labels.products.of(step)
        if product is not None:
            if product.kind in {"weight", "filter"} and id(product.first.cell) in seen:
                _claim_columns(labels, claim, step, product)
            continue
        if step.op in {"add", "sub"} and _adds_something_else(labels, claim, step, seen):
            claim.flags.add("output: something is added before a map")
            continue
        for made in step.outputs:
            if made is not None and made.is_float:
                seen.add(id(made.cell))
                for user in made.cell.users:
                    heapq.heappush(todo, (user.number, user))


def _adds_something_else(labels: Labels, claim: FoundAttention, step: Step, seen: set[int]) -> bool:
    """Say whether a residual is added; other attention, and what comes of the layer's own maps, is none."""
    own = {owner for maps in claim.maps.values() for one in maps for owner in one.owners}
    for view in step.inputs:
        if (
            not view.is_float
            or view.cell.kind != DATA
            or id(view.cell) in seen
            or not view.shape
            or view.shape[-1] == 1
        ):
            continue
        label = labels.may_read(view)
        if label is None:
            return True
        owners = labels.owners(label.features)
        sources = [labels.source_of(owner) for owner in owners]
        if not owners <= own and not any(source is not None and source.kind != "input" for source in sources):
            return True
    return False


def _claim_columns(labels: Labels, claim: FoundAttention, step: Step, product: Product) -> None:
    if step.number in labels.deep:
        return
    claim.takers.append((step, product))
    try:
        label = labels.read(product.first)
    except Unreadable as error:
        claim.flags.add(f"output: not followed ({error})")
        return
    if label is None:
        return
    columns = product.second
    features = label.features
    if product.kind == "filter":
        if math.prod(columns.shape[2:]) > 1:
            claim.flags.add("output: a filter over several tokens")
            return
        columns = filter_features(step, columns)
        features = (
            reshaped(thin(features.movedim(1, -1)), (1, -1, features.shape[1]))
            if features.dim() > 2
            else features[None]
        )
    turned = column_numbers(labels, columns)
    if turned is None:
        claim.flags.add("output: columns in no regular order")
        return
    of_heads = _columns_by_head(labels, claim, features, turned[0])
    if of_heads is None:
        return
    starts = torch.tensor([list(of_heads[head]) for head in range(claim.heads)])
    owners = tuple(labels.owner(int(row[0])) for row in starts)
    names = tuple(labels.tape.names[owner] for owner in owners)
    found = Projection(names[:1] if len(set(names)) == 1 else names, owners, starts, turned[1], columns.shape[2])
    if all(known.key != found.key for _, known in claim.outputs):
        claim.outputs.append((step, found))
        claim.stream_of_output.append(_stream_of(claim, label.tokens))


def _stream_of(claim: FoundAttention, tokens: Tensor) -> int:
    """Say of which stream the tokens of an output are."""
    if claim.stream_of is None:
        return 0
    known = small(tokens)
    known = known[known > 0]
    return int(claim.stream_of.flatten()[int(known.min()) - 1]) if known.numel() else 0


def column_numbers(labels: Labels, weight: View) -> tuple[list[list[int]], int] | None:
    """Number the first element of each row of a weight ``(n, k, columns)``, and say how far it is to the next."""
    n, rows, columns = weight.shape
    weight = labels.products.through_copies(weight)
    if weight.cell.parameter is not None:
        first = labels.products.elements(weight.seen_as((n, rows, 1), weight.stride))[..., 0]
        return first.tolist(), weight.stride[2]
    numbers = labels.products.elements(weight)
    if columns == 1:
        return numbers[..., 0].tolist(), 1
    steps = numbers[..., 1:] - numbers[..., :-1]
    stride = int(steps.flatten()[0])
    return (numbers[..., 0].tolist(), stride) if bool((steps == stride).all()) else None


def _columns_by_head(
    labels: Labels, claim: FoundAttention, features: Tensor, turned: list[list[int]]
) -> dict[int, list[int]] | None:
    source = claim.source
    assert source is not None
    width = claim.width
    of_heads: dict[int, dict[int, int]] = {}  # head -> column -> feature of the head
    for batch in range(len(features)):
        rows, _ = unique_rows(features[batch])
        numbers = turned[batch if len(turned) > 1 else 0]
        for row in rows.tolist():
            for column, number in enumerate(row):
                mine = [one - source.start for one in labels.members(number) if source.start <= one < source.end]
                heads = {one // width for one in mine}
                if len(heads) > 1:
                    claim.flags.add("output: several heads are summed or mixed before the map")
                    return None
                for head in heads:
                    of_heads.setdefault(head, {}).setdefault(numbers[column], min(mine) % width)
    if not of_heads:
        return None
    if len(of_heads) != claim.heads or len({len(one) for one in of_heads.values()}) > 1:
        claim.flags.add("output: a map of some heads only")
        return None
    if len({column for one in of_heads.values() for column in one}) != sum(map(len, of_heads.values())):
        claim.flags.add("output: heads share columns")
        return None
    return {head: sorted(columns, key=columns.__getitem__) for head, columns in of_heads.items()}


# maps that take a part of features


def maps_that_are_shared(labels: Labels, core: Core) -> set[int]:
    """Find products whose map all heads share, each with a part of the features: they keep labels of what they take.

    Raises:
        Unreadable: if the map of each head takes a part of the features that is its own.
    """  # noqa: DOC201
    given = [label for part in core.parts for label in (part.query, part.key, part.value)]
    owners = set().union(*(labels.owners(label.features) for label in given))
    alike = {o for label in given if repeats(label.features, 0) for o in labels.owners(label.features)}
    found: set[int] = set()
    for step in _steps_leading_to(labels, core):
        product = labels.products.of(step)
        if product is None or product.kind not in {"weight", "filter"} or step.number in labels.deep:
            continue
        if product.kind == "filter":
            _refuse_filters_over_features(labels, step, product, owners)
            continue
        owner = labels.owner(int(labels.products.features(product.second)[0, 0]))
        if owner not in owners or not _takes_a_part(labels, product.first):
            continue
        rooted = Labels(labels.tape, of_inputs=True)
        rooted.deep = labels.deep
        label = rooted.may_read(product.first)
        if label is None or not _varies(rooted, small(label.features)[..., 0].unique().tolist()):
            continue
        is_of_each_head = product.second.shape[0] > 1 and product.second.stride[0] != 0
        if is_of_each_head or (owner in alike and labels.may_read(product.first) is None):
            raise Unreadable("the map of each head takes an input of its own: a part of the features")
        if owner in alike:
            found.add(step.number)
    return found


def _steps_leading_to(labels: Labels, core: Core) -> list[Step]:
    views = []
    for part in core.parts:
        views += part.step.inputs[:3] if part.product is None else [part.product.second]
    if core.score_step is not None:
        product = labels.products.of(core.score_step)
        views += [product.first, product.second] if product is not None else []
    return list(labels.leading_to(views))


def _refuse_filters_over_features(labels: Labels, step: Step, product: Product, owners: set[int]) -> None:
    weight = product.second
    if math.prod(weight.shape[2:]) == 1 or weight.shape[1] == 1:
        return
    if labels.owner(int(labels.products.features(filter_features(step, weight))[0, 0])) not in owners:
        return
    label = labels.may_read(product.first)
    if label is not None and _varies(labels, small(label.features)[:, 0].unique().tolist()):
        raise Unreadable("a filter runs over the features of a map")


def _varies(labels: Labels, numbers: list[int]) -> bool:
    """Say whether one feature of rows is now this one, now that one, of the same map."""
    seen: dict[int, set[frozenset[int]]] = {}
    for number in numbers:
        mine: dict[int, set[int]] = {}
        for member in labels.members(number):
            mine.setdefault(labels.owner(member), set()).add(member)
        for owner, members in mine.items():
            seen.setdefault(owner, set()).add(frozenset(members))
    return any(len(sets) > 1 for sets in seen.values())


def _takes_a_part(labels: Labels, x: View) -> bool:
    """Say whether a product takes a part of what the product before it gave, cheaply."""
    cell = x.cell
    for _ in range(40):
        written = cell.written
        if cell.step is None or written is None:
            return written is not None and bool(written.shape) and written.shape[-1] > x.shape[-1]
        product = labels.products.of(cell.step)
        if product is not None and product.kind in {"weight", "filter"}:
            columns = product.second.shape[0] if product.kind == "filter" else product.second.shape[-1]
            return columns > x.shape[-1]
        if product is not None:
            return written.shape[-1] >= x.shape[-1] and x.shape[0] * x.shape[1] > 1 and written.shape[0] > 1
        views = [view for view in cell.step.inputs if view.is_float and view.cell.kind == DATA]
        if not views:
            return False
        cell = views[0].cell
    return False
