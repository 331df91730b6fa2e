"""Heads of an attention: what of its queries, keys and values comes from the same rows of the same parameters.

A head is a set of rows for each role that is met together, whatever the sequence and token. `heads_of` reads them off
the labels of a `Core`; `columns_of` follows what the core gives to the output projection.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby

import torch
from torch import Tensor

from hdi_callback.attention.discovery.cores import Core, ValueProduct
from hdi_callback.attention.discovery.labels import (
    GROUPED,
    SUM,
    TIMES,
    FeatureRange,
    Flag,
    Label,
    Labels,
)
from hdi_callback.attention.discovery.planes import repeats, reshaped, small, thin, unique_rows
from hdi_callback.attention.discovery.products import Product, Unreadable
from hdi_callback.attention.layer import PLURAL
from hdi_callback.attention.tape import DATA, Cell, Step, WalkOn

IN = ("query", "key", "value")
ONE_MAP = "all heads share one map, which is given another part of the features for each"
_MOST_STEPS_TO_OUTPUT = 60

_Head = dict[str, "dict[frozenset[int], Vector]"]  # role -> its vectors, by the parameters of a stream of tokens
Vector = dict[int, tuple[tuple[int, int], ...]]  # of one token: parameter -> (place in the head, feature)
_Vectors = tuple[Tensor, list[Vector], bool]  # which different one each token has, these, and whether any is a sum
_Name = tuple[object, ...]  # of a head: features of its queries and keys, in any order


@dataclass(frozen=True, eq=False)
class Projection:
    """Rows (of an output: columns) of each head in one parameter."""

    names: tuple[str, ...]  # of each head's parameter
    starts: Tensor  # ``(heads, width)``, the first element of each row, numbered among those of all parameters
    stride: int  # elements from one of a row to the next
    count: int  # elements of a row
    places: tuple[int, ...] = ()  # positions of the rows in the head

    @property
    def key(self) -> tuple[object, ...]:
        """What tells it from other projections."""
        return self.names, tuple(self.starts.flatten().tolist()), self.count

    def at(self, places: Sequence[int]) -> Projection:
        """Return the rows at some positions of the head."""
        columns = [self.places.index(place) for place in places]
        return replace(self, starts=self.starts[:, columns], places=tuple(places))


@dataclass(eq=False, repr=False)
class FoundAttention:
    """What was read of an attention."""

    core: Core  # as it runs
    heads: int  # how many there are
    maps: dict[str, list[Projection]]  # role -> projections that are summed: one, as a rule
    flags: set[Flag]  # what else happens to queries, keys and values
    notes: list[str]  # what is left out, in words
    numbers: list[Tensor] = field(default_factory=list)  # of each product: ``(n, queries)``, the head of each; or -1
    width: int = 0  # of a head's values
    source: FeatureRange | None = None  # of what it returns
    outputs: list[tuple[Step, Projection]] = field(default_factory=list)  # products that take the heads side by side
    streams: list[dict[str, list[Projection]]] = field(default_factory=list)  # of tokens with projections of their own
    stream_of: Tensor | None = None  # of each query, the number of its stream
    stream_of_output: list[int] = field(default_factory=list)  # of each output, that of the queries which it takes
    members: list[FoundAttention] = field(default_factory=list)  # of single heads that were put together
    takers: list[tuple[Step, Product]] = field(default_factory=list)  # products with parameters that take its output

    @property
    def path(self) -> str | None:
        """The module that runs it."""
        return self.core.step.path


# from labels to heads


def heads_of(labels: Labels, core: Core) -> FoundAttention:
    """Return the heads of an attention; raise `Unreadable` if they cannot be told apart."""
    _refuse_parts_of_features(labels, core)
    attn = FoundAttention(core, 0, {}, set(), [*core.notes])
    with_values = [part for part in core.parts if bool(small(part.labels["value"].features).any())] or core.parts[:1]
    heads: dict[_Name, _Head] = {}
    parts: list[tuple[ValueProduct, Tensor]] = []  # with the head of each query
    tables = [{role: _vectors(labels, label.features) for role, label in part.labels.items()} for part in with_values]
    for part, table in zip(with_values, tables):
        attn.flags |= {flag.of(role) for role, label in part.labels.items() for flag in label.flags}
        attn.flags |= {SUM.of(role) for role, (_, _, is_sum) in table.items() if is_sum}
        own, number = _heads_of_part(labels, part, table)
        if any(_named(head["value"]) != _named(heads[name]["value"]) for name, head in own.items() if name in heads):
            attn.notes.append("further values that its weights are multiplied with")
            continue
        heads |= {name: head for name, head in own.items() if name not in heads}
        order = list(heads)
        at = torch.tensor([*(order.index(name) for name in own), -1])
        parts.append((part, thin(at[small(number)].expand(number.shape))))
    attn.heads = len(heads)
    # Streams of tokens, each of which has projections of its own in all roles.
    counts = {len(head[role]) for head in heads.values() for role in IN if len(head[role]) > 1}
    streams = range(counts.pop() if len(counts) == 1 else 1)
    attn.maps, *attn.streams = (
        {role: maps for role in IN if (maps := _maps_of_role(labels, attn, role, list(heads.values()), stream))}
        for stream in streams
    )
    if attn.streams:
        of_streams = list(next(iter(heads.values()))["query"])
        different, vectors, _ = tables[0]["query"]
        owners = map(frozenset, vectors)
        attn.stream_of = torch.tensor([of_streams.index(o) if o in of_streams else 0 for o in owners])[different]
    _check(parts[0][0], attn)
    head_of_queries = torch.cat([number.flatten() for _, number in parts])
    if len(set(head_of_queries[head_of_queries >= 0].bincount().tolist())) > 1:
        raise Unreadable("not all tokens have the same heads, as where experts make queries")
    _install(labels, attn, parts)
    labels.score_steps |= {core.score_step.number} if core.score_step is not None else set()
    return attn


def _heads_of_part(labels: Labels, part: ValueProduct, table: dict[str, _Vectors]) -> tuple[dict[_Name, _Head], Tensor]:
    """Return the heads of one product with values, whatever the sequence and token, and which each query is of."""
    heads: dict[_Name, _Head] = {}
    head_of: list[list[int]] = []
    # Matrices with the same different queries, keys and values have the same heads.
    head_of_row: dict[object, dict[int, int]] = {}  # of each different query
    different = {role: small(table[role][0]).tolist() for role in IN}
    for slot in range(len(table["query"][0])):
        rows_of = [different[role][slot % len(different[role])] for role in IN]
        of_query, of_key, of_value = key = tuple(tuple(dict.fromkeys(rows)) for rows in rows_of)
        if key not in head_of_row:
            head_of_row[key] = {}
            keys, values = (
                _streams_of_tokens(labels, [table[role][1][i] for i in numbers], part.width(role), role)
                for role, numbers in (("key", of_key), ("value", of_value))
            )
            for of_queries, rows in _query_heads(labels, table["query"][1], of_query, part.width("query")):
                head = {"query": of_queries, "key": keys, "value": values}
                if all(head[role] or not bool(small(part.labels[role].features).any()) for role in IN):
                    name = _named(head["query"]), _named(head["key"])
                    if _named(heads.setdefault(name, head)["value"]) != _named(values):
                        raise Unreadable("several heads share queries and keys")
                    head_of_row[key] |= dict.fromkeys(rows, list(heads).index(name))
        head_of.append([head_of_row[key].get(row, -1) for row in rows_of[0]])
    if not heads:
        raise Unreadable("neither its queries nor its keys come from a linear map")
    return heads, torch.tensor(head_of).expand(table["query"][0].shape)


def _vectors(labels: Labels, plane: Tensor) -> _Vectors:
    """Return which different vector each token has, these as features of parameters, and whether any is a sum."""
    n, tokens, width = plane.shape
    short = plane
    for dim in (0, 1):
        if short.stride(dim) == 0 and short.shape[dim] > 1:
            short = short.narrow(dim, 0, 1)
    rows, different = unique_rows(short.reshape(-1, width))
    vectors, is_sum = [], False
    for row in rows.tolist():
        if 0 < width == len({*row}) and min(row) > 0 and labels.owner(min(row)) == labels.owner(max(row)):
            vectors.append({labels.owner(row[0]): tuple(enumerate(row))})
            continue
        of_owner: dict[int, dict[int, int]] = {}  # parameter -> feature -> its position; summed ones may have none: -1
        for place, number in enumerate(row):
            members = [number] if number > 0 else sorted(labels.members(number))
            groups = [(owner, list(group)) for owner, group in groupby(members, labels.owner)]
            is_sum |= len(groups) > 1
            for owner, features in groups:
                positions = of_owner.setdefault(owner, {})
                free = next((feature for feature in features if positions.get(feature, -1) < 0), None)
                positions.update({feature: positions.get(feature, -1) for feature in features})
                if free is not None:
                    positions[free] = place
        pairs = {owner: [(at, feature) for feature, at in positions.items()] for owner, positions in of_owner.items()}
        # Summed features without a position come last.
        vectors.append({o: tuple(sorted(each, key=lambda at: (at[0] < 0, at[0]))) for o, each in pairs.items()})
    return different.reshape(short.shape[:2]).expand(n, tokens), vectors, is_sum


def _named(streams: dict[frozenset[int], Vector]) -> _Name:
    """Return a name of a head's features, whatever their order."""
    features = (places for vector in streams.values() for places in vector.items())
    return tuple(sorted((owner, tuple(sorted(feature for _, feature in places))) for owner, places in features))


def _streams_of_tokens(labels: Labels, vectors: list[Vector], width: int, role: str) -> dict[frozenset[int], Vector]:
    """Return the vector of each stream of tokens, by its parameters; within a stream all tokens have the same."""
    streams: dict[frozenset[int], Vector] = {}
    all_features: dict[int, set[int]] = {}
    for vector in vectors:
        if not vector:
            continue
        key = frozenset(vector)
        for owner, places in vector.items():
            if owner in labels.ranges:
                continue
            if len(places) > width:
                raise Unreadable(f"its {PLURAL[role]} mix features of several heads, or more than a head has")
            features = all_features.setdefault(owner, set())
            features.update(feature for _, feature in places)
            if len(features) > width:
                raise Unreadable(f"the features of its {PLURAL[role]} differ between tokens")
        longest = streams.get(key)
        if longest is None or sum(map(len, vector.values())) > sum(map(len, longest.values())):
            streams[key] = vector
    return streams


def _query_heads(
    labels: Labels, all_vectors: list[Vector], rows: Sequence[int], width: int
) -> list[tuple[dict[frozenset[int], Vector], Sequence[int]]]:
    """Return one head, whose tokens may be of several streams, or a head for each row of queries; with their rows."""
    vectors = [all_vectors[row] for row in rows]
    owners = [owner for vector in vectors for owner in vector if owner not in labels.ranges]
    if len(set(owners)) == len(owners):
        return [(_streams_of_tokens(labels, vectors, width, "query"), rows)]
    if any(set(vector) != set(vectors[0]) for vector in vectors if vector):
        raise Unreadable("the features of its queries differ between tokens")
    return [(_streams_of_tokens(labels, [vector], width, "query"), [row]) for row, vector in zip(rows, vectors)]


# from heads to maps


def _maps_of_role(labels: Labels, attn: FoundAttention, role: str, heads: list[_Head], stream: int) -> list[Projection]:
    """Return the projections that make a role, each with the rows of every head; without those of positions alone."""
    of_heads = [list(head[role].values()) for head in heads]
    vectors = [streams[min(stream, len(streams) - 1)] if streams else {} for streams in of_heads]
    owners = list(dict.fromkeys(owner for vector in vectors for owner in vector))
    computed = [owner for owner in owners if owner in labels.ranges]
    if any(labels.ranges[owner].kind == "scores" for owner in computed):
        raise Unreadable(f"its {role} is a product of two computed tensors")
    vectors = [{owner: places for owner, places in vector.items() if owner not in computed} for vector in vectors]
    if SUM.of(role) in attn.flags:
        still = [owner for owner in owners if owner not in labels.moving]  # maps of positions alone
        if not all(set(vector) <= set(still) for vector in vectors):
            vectors = [{o: places for o, places in vector.items() if o not in still} for vector in vectors]
    if len({len(vector) for vector in vectors}) > 1:
        raise Unreadable(f"some heads have more maps of their {role} than others")
    if len({frozenset(vector) for vector in vectors}) == 1:  # else each head has parameters of its own
        vectors = [{owner: vector[owner] for owner in vectors[0]} for vector in vectors]
    return [_projection(labels, items) for items in zip(*(vector.items() for vector in vectors))]


def _projection(labels: Labels, of_heads: Sequence[tuple[int, tuple[tuple[int, int], ...]]]) -> Projection:
    names = tuple(labels.tape.names[owner] for owner, _ in of_heads)
    if len({len(places) for _, places in of_heads}) > 1:
        raise Unreadable(f"heads of several widths in `{names[0]}`")
    features = [tuple(feature for _, feature in places) for _, places in of_heads]
    distinct = set(map(frozenset, features))
    if sum(map(len, distinct)) != len(frozenset().union(*distinct)):
        raise Unreadable(f"heads share features of `{names[0]}`")
    stride, count = labels.products.stride[of_heads[0][0]]
    places = tuple(place for place, _ in of_heads[0][1])
    return Projection(names, torch.tensor(features), stride, count, places)


def _check(part: ValueProduct, attn: FoundAttention) -> None:
    """Refuse what is no attention of heads after all."""
    for role, label in part.labels.items():
        tokens, projections = small(label.tokens), attn.maps.get(role, [])
        is_single = role != "value" and label.tokens.shape[1] > 1 and repeats(tokens, 1)
        if projections and is_single and bool((tokens > 0).all()):
            raise Unreadable(f"its {role} positions are not tokens")
        if projections and GROUPED.of(role) in attn.flags:
            raise Unreadable(f"the {role} map of each head takes an input of its own: a group of channels")
        if {TIMES.of(role), SUM.of(role)} <= attn.flags:
            raise Unreadable(f"its {role} is a product of two computed tensors (such as a map and the gain of DoRA)")
        if any(projection.starts.shape[1] == 1 < part.width(role) for projection in projections):
            raise Unreadable(f"a map mixes the heads of its {role}")


# what an attention gives


def _install(labels: Labels, attn: FoundAttention, parts: list[tuple[ValueProduct, Tensor]]) -> None:
    """Label what a core returns with the heads that it comes from."""
    width = max(part.width("value") for part, _ in parts)
    attn.width, attn.numbers = width, [number for _, number in parts]
    attn.source = labels.new_source("attention", attn.heads * width, attn.core.step, ())
    for part, head in parts:
        shape = n, queries, columns = (*head.shape, part.width("value"))
        first = attn.source.start + small(head)[..., None] * width
        features = torch.where(small(head)[..., None] < 0, 0, first + torch.arange(columns))
        tokens = (torch.arange(n)[:, None] * queries + torch.arange(queries) + 1)[..., None]
        placed, at = (part.placed(plane.expand(shape)) for plane in (features, tokens))
        labels.installed[part.step.number] = Label(placed, at)


def columns_of(labels: Labels, attn: FoundAttention) -> None:
    """Find the products with parameters that take what an attention returns."""
    walk = WalkOn([part.step.output.cell for part in attn.core.parts], most=_MOST_STEPS_TO_OUTPUT)
    for step in walk:
        product = labels.products.of(step)
        if product is not None:
            if product.kind in {"weight", "filter"} and product.first.cell in walk.met:
                attn.takers.append((step, product))
                with suppress(Unreadable):
                    _read_columns(labels, attn, step, product)
        elif step.op not in {"add", "sub"} or not _adds_something_else(labels, attn, step, walk.met):
            walk.follow(step)


def _adds_something_else(labels: Labels, attn: FoundAttention, step: Step, met: set[Cell]) -> bool:
    """Whether a residual is added; other attention, and what comes of the layer's own projections, is none."""
    names = {name for maps in attn.maps.values() for projection in maps for name in projection.names}
    projected = {labels.tape.places[name] for name in names}
    for view in step.inputs:
        if not view.is_float or view.cell.kind != DATA or view.cell in met or not view.shape or view.shape[-1] == 1:
            continue
        label = labels.may_read(view)
        if label is None:
            return True
        owners = labels.owners(label.features)
        if not owners <= projected and not owners & labels.ranges.keys():
            return True
    return False


def _read_columns(labels: Labels, attn: FoundAttention, step: Step, product: Product) -> None:
    """Enter the columns of each head in a product that takes the output; raise `Unreadable` if they cannot be told."""
    label = labels.read(product.first)
    if label is None:
        return
    columns, features = product.second, label.features
    if product.kind == "filter":
        if product.taps > 1:
            raise Unreadable("a filter over several tokens")
        is_grid = features.dim() > 2
        features = reshaped(thin(features.movedim(1, -1)), (1, -1, features.shape[1])) if is_grid else features[None]
    first, stride = labels.products.lines(columns, 2)
    of_heads = _columns_by_head(labels, attn, features, first.tolist())
    starts = [list(of_heads[head]) for head in range(attn.heads)]
    names = tuple(labels.tape.names[labels.owner(row[0])] for row in starts)
    output = Projection(names, torch.tensor(starts), stride, columns.shape[2])
    if all(projection.key != output.key for _, projection in attn.outputs):
        attn.outputs.append((step, output))
        tokens, stream = small(label.tokens), 0
        tokens = tokens[tokens > 0]
        if attn.stream_of is not None and tokens.numel():
            stream = int(attn.stream_of.flatten()[int(tokens.min()) - 1])
        attn.stream_of_output.append(stream)


def _columns_by_head(
    labels: Labels, attn: FoundAttention, features: Tensor, columns: list[list[int]]
) -> dict[int, list[int]]:
    source, width = attn.source, attn.width
    assert source is not None
    of_heads: dict[int, dict[int, int]] = {}  # head -> column -> feature of the head
    for batch in range(len(features)):
        rows, _ = unique_rows(features[batch])
        numbers = columns[batch if len(columns) > 1 else 0]
        for row in rows.tolist():
            for column, number in enumerate(row):
                places = [at - source.start for at in labels.members(number) if source.start <= at < source.end]
                heads = {at // width for at in places}
                if len(heads) > 1:
                    raise Unreadable("several heads are summed or mixed before the map")
                for head in heads:
                    of_heads.setdefault(head, {}).setdefault(numbers[column], min(places) % width)
    if len(of_heads) != attn.heads or len(set(map(len, of_heads.values()))) > 1:
        raise Unreadable("a map of some heads only")
    if len(set().union(*of_heads.values())) != sum(map(len, of_heads.values())):
        raise Unreadable("heads share columns")
    return {head: sorted(columns, key=columns.__getitem__) for head, columns in of_heads.items()}


# maps that take a part of features


def _refuse_parts_of_features(labels: Labels, core: Core) -> None:
    """Raise `Unreadable` if a weight of queries, keys or values is applied to several slices of the features."""
    factors = [label for part in core.parts for label in part.labels.values()]
    owners = set().union(*(labels.owners(label.features) for label in factors))
    alike = {o for label in factors if repeats(label.features, 0) for o in labels.owners(label.features)}
    of_inputs = Labels(labels.tape, of_inputs=True)
    views, scores = core.step.inputs[:3], labels.products.of(core.score_step)  # of a fused operation
    if scores is not None:
        views = [scores.first, scores.second, *(part.product.second for part in core.parts if part.product)]
    split: list[bool] = []
    for step in list(labels.leading_to(views)):
        product = labels.products.of(step)
        if product is None or not labels.products.is_projection(step):
            continue
        weight, is_filter = product.second, product.kind == "filter"
        is_of_each_head = weight.shape[0] > 1 and weight.stride[0] != 0
        owner = labels.owner(int(labels.products.features(weight)[0, 0]))
        if owner not in owners or not (is_filter or is_of_each_head or owner in alike):
            continue
        inputs = labels if is_filter else of_inputs
        label = inputs.may_read(product.first)
        if label is None or not _varies(inputs, label.features[:, 0] if is_filter else label.features[..., 0]):
            continue
        if not is_filter:
            split.append(not is_of_each_head and bool((label.tokens == label.tokens[..., :1]).all()))
        elif weight.shape[1] > product.taps > 1:
            raise Unreadable("a filter runs over the features of a map")
    if split:
        text = "the map of each head takes an input of its own: a part of the features"
        raise Unreadable(ONE_MAP if all(split) and len(split) >= len(factors) else text)


def _varies(labels: Labels, column: Tensor) -> bool:
    """Whether a column holds different features of the same projection in different rows."""
    members = map(labels.members, small(column).unique().tolist())
    groups = (groupby(sorted(each), labels.owner) for each in members)
    products = {owner for owner, ids in labels.ranges.items() if ids.kind == "scores"}  # of which each row differs
    different = {(owner, tuple(members)) for group in groups for owner, members in group if owner not in products}
    return len(different) > len({owner for owner, _ in different})
