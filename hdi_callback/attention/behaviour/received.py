"""Find heads by their scores, where tokens are taken apart in a way that cannot be followed from outside.

Windows, images, pooled tokens and tables of positions change what a token is between the projections and attention. So
a copy of the module runs with stubs that answer with random features for whatever they are given, and the scores that
enter the softmax are looked at themselves:

1. The derivative of one score by all answers says which features of which tokens it depends on. What it has in common
   with another score of the same row is of the query, and what differs is of the key.
2. Only what acts through a product counts: the second derivative tells a key from what is merely added to the scores,
   as biases of positions are. Keys of relative positions are no token's: two rows do not share them.
3. Twice the attention weights change what reaches the output projection by what attention gives, and by nothing that
   is added there. Weights times a number for each head, and answers times a number for each feature, then say which
   head and which value each of its features comes from.

Names play no part, and neither do shapes. A layer comes of it only if every feature that reaches the output projection
is accounted for, and if another draw shows the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hdi_callback.attention import projections
from hdi_callback.attention.behaviour.codes import (
    BASE,
    SAME_WEIGHTS,
    Change,
    Draw,
    digits_of,
    draw_mixed,
    draw_random,
    draw_times,
    draw_varied,
    read_numbers,
)
from hdi_callback.attention.behaviour.elements import (
    Elements,
    Features,
    are_same,
    common_to,
    depends_on,
    elements_of,
    features_of,
    gradients_of,
    have,
    token_of,
    without,
)
from hdi_callback.attention.behaviour.finder import describe_kind, distinct_rows, fit_slice, linear_maps
from hdi_callback.attention.behaviour.probe import MadeUp, in_private
from hdi_callback.attention.behaviour.seen import Seen, look, tensors_in
from hdi_callback.attention.heads import AttentionLayer, HeadSlice, Role

_BENT = 1e-3  # the third singular value of two vectors and their sum, relative to the first
_ROWS = 128  # of the scores, that are looked at
_COLUMNS = 3
_MOST_LINEARS = 16
_MOST_IN_VAIN = 4  # ways that run, and show no heads
_MOST_SCORES = 2**24


class NoHeadsError(Exception):
    """A module has no heads that can be read: what its scores show instead, nothing if it could not be run."""


def find_by_scores(name: str, module: nn.Module, ways: Iterable[MadeUp]) -> AttentionLayer:
    """Find the heads of a module by what its scores depend on.

    Args:
        name: its dotted path.
        module: the module.
        ways: inputs to try it with.

    Returns:
        The layer, without a query where that is no projection of an input.

    Raises:
        NoHeadsError: if it computes no attention with heads of their own, or could not be run.
    """
    linears = linear_maps(module, projections.is_map)
    if not 1 <= len(linears) <= _MOST_LINEARS:
        many = f"more than {_MOST_LINEARS}" if linears else "no"
        raise NoHeadsError(f"it holds {many} linear maps or 1x1 convolutions that could be its projections")
    for path, linear in linears.items():
        objection = projections.objection(linear)
        if objection is not None:
            raise NoHeadsError(f"its projection `{path}` is {objection}")
    seen: list[str] = []
    for way in ways:
        try:
            found = _found(module, linears, way, 0)
            if found == _found(module, linears, way, 1):
                return _layer(name, module, linears, found)
        except NoHeadsError as error:
            seen.append(str(error))
        except Exception:  # a module that cannot be run so is not known
            continue
        if len(seen) == _MOST_IN_VAIN:
            break
    raise NoHeadsError(next((why for why in seen if why), ""))


_Rows = tuple[str, tuple[tuple[int, ...], ...]]  # a linear map, and the features of each head in it


@dataclass(frozen=True)
class _Found:
    """What one draw showed."""

    rows: Mapping[Role, _Rows]
    heads: int
    is_called: bool  # the output projection, as a module
    is_spread: bool  # keys are made of several tokens


def _layer(name: str, module: nn.Module, linears: dict[str, nn.Module], found: _Found) -> AttentionLayer:
    slices = {role: _slice(module, linears, *rows) for role, rows in found.rows.items()}
    output = linears[found.rows["output"][0]] if found.is_called else None
    key, value = slices["key"], slices["value"]
    kind = describe_kind(slices) + (", keys of several tokens" if found.is_spread else "")
    return AttentionLayer(name, module, found.heads, key.heads, key.width, value.width, kind, slices, output)


def _slice(module: nn.Module, linears: dict[str, nn.Module], path: str, rows: tuple[tuple[int, ...], ...]) -> HeadSlice:
    try:
        return fit_slice(module, f"{path}.weight", torch.tensor(rows), projections.is_transposed(linears[path]))
    except ValueError as error:
        raise NoHeadsError(f"{error} in its projection `{path}`") from None


# --- one draw


def _found(module: nn.Module, linears: dict[str, nn.Module], way: MadeUp, seed: int) -> _Found:
    with in_private(seed), torch.enable_grad():
        return _Look(module, linears, way).find()


@dataclass
class _Head:
    """What the scores of one head depend on, and the rows that belong to it: event and place among its rows."""

    rows: list[tuple[int, int]]
    key: tuple[str, tuple[int, ...]] = ("", ())
    is_spread: bool = False  # a key is made of several tokens, all of them by the same rows
    queries: Features = ()  # whatever the query depends on
    query: tuple[str, tuple[int, ...]] | None = None  # if that is one map of one token


class _Look:
    def __init__(self, module: nn.Module, linears: dict[str, nn.Module], way: MadeUp) -> None:
        self.module, self.linears, self.way = module, linears, way
        self.receiver: str | None = None  # the linear map that is given what attention gives
        self.convolution: int | None = None  # else the convolution that is, by its number
        self.place: int | None = None  # else the place of that in what comes back
        self.dim = -1  # of the features in what a convolution is given, or in what comes back
        self.activations: set[int] = set()  # behind attention
        self.seed = int(torch.randint(2**31, ()))

    def find(self) -> _Found:
        seen = self._run(draw_random, lambda _, weights: weights.requires_grad_())
        if not seen.watch.scores:
            raise NoHeadsError
        if sum(scores.numel() for scores in seen.watch.scores) > _MOST_SCORES:
            raise NoHeadsError("it computes more scores than a trial can look at")
        self._find_receiver(seen)
        heads = self._heads(seen)
        if not self._are_linear(heads, seen):
            raise NoHeadsError("between a projection and the scores lies an activation")
        self.activations = seen.behind.activations
        dims = {-1} if self.receiver is not None else {-1, *map(projections.feature_dim, self.linears.values())}
        if self.convolution is not None:
            dims = {1 - seen.behind.convolved[self.convolution].dim()}
        first: NoHeadsError | None = None
        for self.dim in sorted(dims, reverse=True):
            try:
                return self._claim(heads, seen)
            except NoHeadsError as error:  # noqa: PERF203
                first = first or error
        raise first or NoHeadsError

    def _run(self, drawn: Draw, changed: Change) -> Seen:
        # The parameters that are left are the same in all runs.
        return look(self.module, self.linears, self.way, drawn, changed, activations=self.activations, seed=self.seed)

    # --- 1. and 2. queries and keys

    def _heads(self, seen: Seen) -> list[_Head]:
        received = self._received(seen)
        loss = (received * torch.randn_like(received)).sum()
        used = torch.autograd.grad(loss, seen.watch.weights, retain_graph=True, allow_unused=True)
        heads: dict[Any, _Head] = {}
        why = NoHeadsError()
        for event, weights in enumerate(used):
            if weights is None or not weights.any():
                if self._leads_elsewhere(seen, event):
                    raise NoHeadsError("it computes more than one attention")
                continue
            for number, head in enumerate(self._by_features(seen, event, weights)):
                try:
                    self._look_at(seen, head)
                except NoHeadsError as error:
                    if number:
                        raise
                    why = error  # no scores of attention, but those of a router, say
                    break
                for path in {head.key[0], *(path for path, _ in head.queries)} if not heads else ():
                    if self._is_fed(seen, path):
                        raise NoHeadsError(f"its projection `{path}` is given what another one makes")
                known = heads.setdefault((head.queries, head.key), head)
                known.rows += [] if known is head else head.rows
        found = list(heads.values())
        if not found:
            raise why
        if len(found) == 1:
            raise NoHeadsError("all its scores depend on the same features, as those of one head or of heads that mix")
        if not _are_apart(found):
            raise NoHeadsError("its heads share features, or differ in width")
        return found

    def _by_features(self, seen: Seen, event: int, used: Tensor) -> list[_Head]:
        """Group rows of scores by the features that they depend on; what padding gives is not used."""
        scores = seen.watch.scores[event]
        flat = scores.reshape(-1, scores.shape[-1])
        is_used = used.reshape(-1, used.shape[-1]).any(1)
        by_features: dict[Features, _Head] = {}
        for row in _rows(scores.shape[:-1], is_used):
            live = flat[row].isfinite()
            loss = (flat[row][live] * torch.randn_like(flat[row][live])).sum()
            features = features_of(elements_of(seen.leaves, loss))
            if features:
                by_features.setdefault(features, _Head([])).rows.append((event, row))
        return list(by_features.values())

    def _leads_elsewhere(self, seen: Seen, event: int) -> bool:
        """Tell whether attention weights are used; some modules compute some that are not."""
        used = [*tensors_in(seen.run.output), *(one for stub in seen.stubs.values() for one in stub.received)]
        return any(depends_on(tensor, [seen.watch.weights[event]]) for tensor in used)

    def _look_at(self, seen: Seen, head: _Head) -> None:
        """Tell the query from the key of a head; an error if these are no scores of attention over tokens."""
        for event, row in head.rows:
            scores = seen.watch.scores[event]
            flat = scores.reshape(-1, scores.shape[-1])
            columns = self._columns(seen, flat[row])
            if len(columns) < 2:  # a single key shows nothing
                continue
            alone = {column: elements_of(seen.leaves, flat[row, column]) for column in columns}
            query = common_to(list(alone.values()))
            keys = {column: without(elements, query) for column, elements in alone.items()}
            # A column of padding has no key, though its position may meet the query.
            columns = [column for column, elements in keys.items() if elements]
            if len(columns) < 2:
                continue
            alone = {column: alone[column] for column in columns}
            if query:
                # What is added to the scores is no query and no key: both act on each other.
                first = columns[0]
                act = common_to([keys[first], self._acting(seen, flat[row, first], query)])
                query = common_to([query, self._acting(seen, flat[row, first], act)])
                keys = {column: without(elements, query) for column, elements in alone.items()}
            if query:
                acting = {column: self._acting(seen, flat[row, column], query) for column in columns}
                keys = {column: common_to([elements, acting[column]]) for column, elements in keys.items()}
            if len({path for path, _ in keys[columns[0]]}) > 1:
                both = keys
                keys = {column: self._shared(seen, scores, row, column, elements) for column, elements in both.items()}
                left = {path for elements in both.values() for path, _ in elements}
                left -= {path for elements in keys.values() for path, _ in elements}
                for column, elements in both.items():
                    left -= self._positions(seen, scores, row, column, without(elements, keys[column]))
                if left:
                    raise NoHeadsError(_sums(both.values()))
            self._take(head, query, list(keys.values()))
            return
        raise NoHeadsError("it has one key for each query, which tells nothing")

    def _take(self, head: _Head, query: Elements, keys: list[Elements]) -> None:
        of_keys = {features_of(elements) for elements in keys}
        if any(len(features) > 1 for features in of_keys):
            raise NoHeadsError(_sums(keys))
        if len(of_keys) != 1 or any(are_same(one, other) for one, other in itertools.combinations(keys, 2)):
            raise NoHeadsError("its scores are not those of tokens")
        (of_key,) = of_keys
        head.key, head.queries = of_key[0], features_of(query)
        head.is_spread = any(token_of(elements) is None for elements in keys)
        # A query may be learned, or of several tokens: then it is no map of a token.
        head.query = head.queries[0] if len(head.queries) == 1 and token_of(query) is not None else None

    def _columns(self, seen: Seen, of_row: Tensor) -> list[int]:
        """Choose scores of a row that depend on something."""
        finite = of_row.isfinite().nonzero().flatten().tolist()
        chosen: list[int] = []
        for column in [finite[i] for i in torch.randperm(len(finite)).tolist()]:
            if len(chosen) == _COLUMNS:
                break
            if elements_of(seen.leaves, of_row[column]):
                chosen.append(column)
        return chosen

    def _are_linear(self, heads: list[_Head], seen: Seen) -> bool:
        """Tell whether queries and keys are linear in what their maps answer, up to a factor for each token."""
        # The derivative of a score by its query is the key that it meets, and the other way round. Of two keys and
        # their sum the third is a sum of multiples of the others, which it is not behind an activation.
        head = heads[0]
        if head.query is None:
            return True
        event, row = head.rows[0]
        scores = seen.watch.scores[event]
        flat = scores.reshape(-1, scores.shape[-1])
        is_key = (have(elements_of(seen.leaves, flat[row, column]), head.key) for column in range(flat.shape[-1]))
        column = next(number for number, holds in enumerate(is_key) if holds)  # others may be padding
        keys, queries = [one.key for one in heads], [one.query for one in heads if one.query is not None]
        for (moved, _), (other, features), of_heads in ((head.key, head.query, keys), (head.query, head.key, queries)):
            changed = sorted({feature for _, own in of_heads for feature in own})
            met = []
            for shares in ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (1.0, 1.0)):
                again = self._run(draw_mixed(moved, changed, shares), lambda _, weights: weights)
                scores = again.watch.scores[event]
                gradients = gradients_of(again.leaves, scores.reshape(-1, scores.shape[-1])[row, column])
                parts = [one[:, features].flatten() for (path, _), one in gradients.items() if path == other]
                met.append(torch.cat(parts))
            constant, *others = met  # such as positions that are met as well
            sizes = torch.linalg.svdvals(torch.stack(others) - constant)
            if not sizes[2] < _BENT * sizes[0]:
                return False
        return True

    def _shared(self, seen: Seen, scores: Tensor, row: int, column: int, elements: Elements) -> Elements:
        """Leave what other queries meet in this column too, which relative positions are not."""
        # Positions are shared by sequences, keys are not: nothing is left where rows differ in what they share.
        found = [common_to([elements, other]) for other in self._of_others(seen, scores, row, column)]
        found = [common for common in found if common]
        return common_to(found) if found else {}

    def _positions(self, seen: Seen, scores: Tensor, row: int, column: int, elements: Elements) -> set[str]:
        """Name the maps of relative positions: what other rows meet in another column."""
        others = [
            other
            for at in sorted({(column + step) % scores.shape[-1] for step in (1, -1)} - {column})
            for other in self._of_others(seen, scores, row, at)
        ]
        return {path for other in others for path, _ in common_to([elements, other])}

    def _of_others(self, seen: Seen, scores: Tensor, row: int, column: int) -> Iterator[Elements]:
        """Give what rows depend on in a column that differ from one row in one dimension."""
        place = [int(i) for i in torch.unravel_index(torch.tensor(row), scores.shape[:-1])]
        by_key = scores[..., column]
        for dim, size in enumerate(by_key.shape):
            for step in sorted({1, 2 % size, size - 1} - {0}):
                score = by_key[tuple((at + step) % size if i == dim else at for i, at in enumerate(place))]
                if score.isfinite():
                    yield elements_of(seen.leaves, score)

    def _acting(self, seen: Seen, score: Tensor, on: Elements) -> Elements:
        """Find what a derivative by some elements depends on."""
        gradients = gradients_of(seen.leaves, score, is_kept=True)
        chosen = [gradients[where][mask] for where, mask in on.items() if where in gradients]
        if not chosen:
            return {}
        flat = torch.cat(chosen)
        return elements_of(seen.leaves, (flat * torch.randn_like(flat)).sum())

    # --- 3. values and outputs

    def _find_receiver(self, seen: Seen) -> None:
        """Find the first linear map that is given what depends on the attention weights; else it is what comes back."""
        for path, stub in seen.stubs.items():
            depending = [depends_on(received, seen.watch.weights) for received in stub.received]
            if any(depending) and not all(depending):
                raise NoHeadsError(f"its projection `{path}` is called before and after attention")
            if any(depending):
                self.receiver = path
                return
        convolved = enumerate(seen.behind.convolved)
        self.convolution = next((i for i, one in convolved if depends_on(one, seen.watch.weights)), None)
        if self.convolution is not None:
            return
        outputs = list(tensors_in(seen.run.output))
        self.place = next((i for i, one in enumerate(outputs) if depends_on(one, seen.watch.weights)), None)
        if self.place is None:
            raise NoHeadsError

    def _received(self, seen: Seen) -> Tensor:
        """Give what the output projection receives, or what comes back, ``(tokens, features)``."""
        if self.receiver is not None:
            calls = seen.stubs[self.receiver].received
            received = torch.cat([one.reshape(-1, one.shape[-1]) for one in calls])
        elif self.convolution is not None:
            received = seen.behind.convolved[self.convolution].movedim(self.dim, -1)
        else:
            assert self.place is not None
            received = list(tensors_in(seen.run.output))[self.place].movedim(self.dim, -1)
        return received.reshape(-1, received.shape[-1])

    def _is_fed(self, seen: Seen, path: str) -> bool:
        """Tell whether a projection is fed by another: then the weights of heads are not its own alone."""
        received = seen.stubs[path].received
        return any(elements_of(seen.leaves, (one * torch.randn_like(one)).sum()) for one in received)

    def _difference(self, drawn: Draw, factor: Change, plain: Change = lambda _, weights: weights) -> Tensor:
        """Give what comes of attention weights that are multiplied, less what comes of them as they are."""
        one, other = (self._received(self._run(drawn, changed)) for changed in (factor, plain))
        return (one - other).detach()

    def _claim(self, heads: list[_Head], seen: Seen) -> _Found:
        H = len(heads)
        of_head = self._coded_heads(heads)
        if of_head is None:
            raise NoHeadsError("what attention gives is mixed or normed before it reaches the output projection")
        order = [number for number in dict.fromkeys(of_head.tolist()) if number >= 0]
        if len(order) != H or len({int((of_head == number).sum()) for number in order}) != 1:
            raise NoHeadsError("not every head has a part of its own in what the output projection takes")
        heads = [heads[number] for number in order]
        outputs = torch.stack([(of_head == number).nonzero().flatten() for number in order])  # (H, width)
        values = self._coded_values(seen, heads[0], outputs)
        if values is None:
            raise NoHeadsError("the features of its heads' outputs are not those of one value map at one token")
        path, numbers = values
        # One half of a head's features may not depend on the values of the other half.
        received = self._received(seen)[:, outputs[:, ::2].flatten()]
        others = set(numbers.flatten().tolist()) - set(numbers[:, ::2].flatten().tolist())
        for (of, _), mask in elements_of(seen.leaves, (received * torch.randn_like(received)).sum()).items():
            if of == path and set(mask.any(0).nonzero().flatten().tolist()) & others:
                raise NoHeadsError("the outputs of its heads are no averages of their values")
        rows: dict[Role, _Rows | None] = {
            "value": _distinct(path, numbers.tolist()),
            "key": _distinct(heads[0].key[0], [list(head.key[1]) for head in heads]),
        }
        queries = [head.query for head in heads if head.query is not None]
        if queries:
            rows["query"] = (queries[0][0], tuple(tuple(features) for _, features in queries))
        # Behind an activation the output projection is not given what the heads give.
        output = None if self.activations else self.receiver
        if output is not None:
            rows["output"] = (output, tuple(map(tuple, outputs.tolist())))
        found = {role: one for role, one in rows.items() if one is not None}
        if len(found) < len(rows) or len(found["key"][1]) != len(found["value"][1]):
            raise NoHeadsError("its heads do not share keys and values in groups side by side")
        # Whoever captures its input expects the heads side by side, and so does a projection beside the module.
        is_side_by_side = torch.equal(outputs.flatten(), torch.arange(len(of_head)))
        if self.receiver is None and not is_side_by_side and outputs.numel() == len(of_head):
            raise NoHeadsError("the outputs of its heads do not lie side by side in what it returns")
        is_called = output is not None and seen.stubs[output].is_called
        return _Found(found, H, is_called and is_side_by_side, any(head.is_spread for head in heads))

    def _coded_heads(self, heads: list[_Head]) -> Tensor | None:
        """Tell for each feature of the output the head whose weights it is an average by, -1 for no head's."""
        # What depends on other rows of the same scores is of heads that are not known: then nothing can be read.
        events = {event for head in heads for event, _ in head.rows}

        def twice(event: int, weights: Tensor) -> Tensor:
            return weights * (1 + (event in events))

        def times(factors: Sequence[float]) -> Change:
            def apply(event: int, weights: Tensor) -> Tensor:
                by_row = torch.ones(weights.shape[:-1].numel(), 1)
                for head, factor in zip(heads, factors):
                    for where, row in head.rows:
                        if where == event:
                            by_row[row] = 1 + factor
                return weights * by_row.view(*weights.shape[:-1], 1)

            return apply

        whole = self._difference(draw_varied, twice).abs().amax(0)
        is_any = whole > 1e-6 * whole.max()
        plain = self._difference(draw_varied, times([1.0] * len(heads)))[:, is_any]
        coded = [
            self._difference(draw_varied, times([1.0 + digit for digit in digits.tolist()]))[:, is_any]
            for digits in digits_of(torch.arange(len(heads)))
        ]
        numbers = read_numbers(plain, coded, lambda ratio: ratio - 1)
        return None if numbers is None else torch.full(is_any.shape, -1).masked_scatter(is_any, numbers)

    def _coded_values(self, seen: Seen, head: _Head, outputs: Tensor) -> tuple[str, Tensor] | None:
        """Tell which value feature each feature of the heads' outputs averages: its linear map, ``(heads, width)``."""
        alone = self._values_of_a_token(seen, head)
        if len(alone) != 1 or self._is_fed(seen, path := alone[0][0]):
            return None
        digits = digits_of(torch.arange(projections.features(self.linears[path])[1]))
        draws = [draw_times(path, factors) for factors in (torch.ones(()), *(1 + (1 + one) / BASE for one in digits))]
        for once, twice in SAME_WEIGHTS:
            plain, *coded = (self._difference(drawn, twice, once)[:, outputs.flatten()] for drawn in draws)
            numbers = read_numbers(plain, coded, lambda ratio: (ratio - 1) * BASE - 1)
            if numbers is not None:
                numbers = numbers.view(outputs.shape)
                # Seen by the derivatives too: values of this head alone.
                return (path, numbers) if alone[0][1] == tuple(sorted(numbers[0].tolist())) else None
        return None

    def _values_of_a_token(self, seen: Seen, head: _Head) -> Features:
        """Find what is averaged by one attention weight of a head: features of one token, by their linear map."""
        received = self._received(seen)
        probe = torch.randn_like(received, requires_grad=True)
        event, row = head.rows[0]
        weights = seen.watch.weights[event]
        (gradient,) = torch.autograd.grad((received * probe).sum(), weights, create_graph=True)
        of_row = gradient.reshape(-1, gradient.shape[-1])[row]
        live = [column for column in range(len(of_row)) if float(of_row[column].detach()) != 0]
        if not live:
            return ()
        # Far from each other, as values may be made of several tokens; padding has none. What they share are gates.
        columns = dict.fromkeys(live[i * (len(live) - 1) // 4] for i in range(5))
        alone = [elements for column in columns if (elements := elements_of(seen.leaves, of_row[column]))]
        gates = common_to(alone) if len(alone) > 1 else {}
        own = [without(elements, gates) for elements in alone]
        found = {features_of(one) for one in own if one}
        return found.pop() if len(found) == 1 else ()


def _distinct(path: str, rows: list[list[int]]) -> _Rows | None:
    distinct = distinct_rows(torch.tensor(rows))
    if distinct is None or len(torch.unique(distinct, dim=0)) != len(distinct):
        return None
    return path, tuple(map(tuple, distinct.tolist()))


def _rows(shape: Sequence[int], is_used: Tensor) -> list[int]:
    """Choose rows of scores so that every dimension is gone through evenly, whichever of them numbers the heads."""
    used = is_used.nonzero().flatten()
    if len(used) <= _ROWS:
        return [int(row) for row in used]
    rows = torch.zeros(_ROWS, dtype=torch.long)
    for size in shape:
        rows = rows * size + torch.cat([torch.randperm(size) for _ in range(-(-_ROWS // size))])[:_ROWS]
    rows = torch.unique(rows)
    rows = rows[is_used[rows]]
    others = used[torch.randperm(len(used))[: _ROWS - len(rows)]]
    chosen: list[int] = torch.unique(torch.cat([rows, others])).tolist()
    return chosen


def _sums(keys: Iterable[Elements]) -> str:
    names = sorted({path for elements in keys for path, _ in elements})
    return f"its keys are sums of what `{'` and `'.join(names)}` give"


def _are_apart(heads: list[_Head]) -> bool:
    """Tell whether heads have queries of their own, and keys of their own or those of a whole group."""
    widths = {len(head.key[1]) for head in heads} | {len(head.query[1]) for head in heads if head.query}
    paths = {(head.key[0], head.query[0] if head.query else None) for head in heads}
    if len(widths) != 1 or len(paths) != 1:
        return False
    keys = list(dict.fromkeys(head.key for head in heads))
    of_keys = [{(path, feature) for feature in features} for path, features in keys]
    of_queries = [{(path, feature) for path, features in head.queries for feature in features} for head in heads]
    # Where the query is learned, heads are known by their keys.
    groups = [of_keys, of_queries if all(of_queries) else [set(own) for own in of_keys]]
    return len(groups[1]) == len(heads) and all(
        len(set().union(*group)) == sum(len(own) for own in group) for group in groups
    )
