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
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hdi_callback.attention import projections
from hdi_callback.attention.finder import describe_kind, distinct_rows, fit_slice, linear_maps
from hdi_callback.attention.heads import AttentionLayer, HeadSlice, Role
from hdi_callback.attention.probe import MadeUp, Run, Stub, in_private, run_copy
from hdi_callback.attention.scores import Scores

_BASE = 64  # of the digits by which features and heads are known
_MATTERS = 1e-6  # a derivative, relative to the largest
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
        raise NoHeadsError
    if any(projections.objection(linear) is not None for linear in linears.values()):
        raise NoHeadsError
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


class _Leaves(Stub):
    """Answers with features of its own for each token of whatever it is given."""

    def __init__(self, linear: nn.Module, path: str, drawn: _Draw) -> None:
        super().__init__(*projections.features(linear))
        self.path, self.drawn, self.dim = path, drawn, projections.feature_dim(linear)
        if isinstance(getattr(linear, "bias", None), Tensor):  # some ask for it
            self.bias = torch.zeros(self.out_features)
        self.strides: tuple[int, ...] = getattr(linear, "stride", ()) if self.dim < -1 else ()
        self.is_called = True  # as a module; some only use its weight
        self.leaves: list[Tensor] = []  # (..., features)
        self.received: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        """Answer.

        Args:
            x: what the linear map would be given.

        Returns:
            What it is to give.
        """
        x = x.movedim(self.dim, -1)
        for dim, stride in enumerate(self.strides):  # of a convolution, which may leave tokens out
            x = x[(slice(None),) * (dim + x.dim() - 1 - len(self.strides)) + (slice(None, None, stride),)]
        self.received.append(x)
        leaf = self.drawn(self.path, len(self.leaves), (*x.shape[:-1], self.out_features))
        self.leaves.append(leaf.detach().requires_grad_())
        return self.leaves[-1].movedim(-1, self.dim).clone()  # some work in place


_CONVOLUTIONS = (
    F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d,
)  # fmt: skip
_ACTIVATIONS = (
    F.relu, F.relu_, torch.relu, Tensor.relu, F.relu6, F.gelu, F.silu, F.hardswish, F.leaky_relu, F.elu, F.mish,
)  # fmt: skip


class _Behind(TorchFunctionMode):
    """Follows what attention gives: through activations, and up to convolutions that mix positions.

    An activation leaves each feature where it is, but what comes of it is not proportional to the attention weights.
    """

    def __init__(self, scores: Scores, activations: set[int]) -> None:
        super().__init__()
        self.scores, self.activations = scores, set(activations)  # those behind attention, by their numbers
        self.count = 0
        self.convolved: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _CONVOLUTIONS and args:
            self.convolved.append(args[0])
        if func in _ACTIVATIONS and args:
            self.count += 1
            weights = self.scores.weights
            if all(one.requires_grad for one in weights) and _depends(args[0], weights):
                self.activations.add(self.count)
            if self.count in self.activations:
                return args[0].clone()
        return func(*args, **(kwargs or {}))


_Draw = Callable[[str, int, tuple[int, ...]], Tensor]  # what a linear map answers, in which of its calls
_Change = Callable[[int, Tensor], Tensor]  # what becomes of attention weights
_Where = tuple[str, int]  # a linear map, and which of its calls
_Elements = dict[_Where, Tensor]  # which features of which tokens: (tokens, features), of those calls that matter
_Features = tuple[tuple[str, tuple[int, ...]], ...]  # by linear map


@dataclass
class _Head:
    """What the scores of one head depend on, and the rows that belong to it: event and place among its rows."""

    rows: list[tuple[int, int]]
    key: tuple[str, tuple[int, ...]] = ("", ())
    is_spread: bool = False  # a key is made of several tokens, all of them by the same rows
    queries: _Features = ()  # whatever the query depends on
    query: tuple[str, tuple[int, ...]] | None = None  # if that is one map of one token


@dataclass
class _Seen:
    """What one run of a copy showed."""

    run: Run
    stubs: dict[str, _Leaves]
    watch: Scores
    behind: _Behind
    leaves: dict[_Where, Tensor] = field(default_factory=dict)


class _Look:
    def __init__(self, module: nn.Module, linears: dict[str, nn.Module], way: MadeUp) -> None:
        self.module, self.linears, self.way = module, linears, way
        self.width = projections.features(next(iter(linears.values())))[0]
        self.receiver: str | None = None  # the linear map that is given what attention gives
        self.convolution: int | None = None  # else the convolution that is, by its number
        self.place: int | None = None  # else the place of that in what comes back
        self.dim = -1  # of the features in what a convolution is given, or in what comes back
        self.activations: set[int] = set()  # behind attention
        self.seed = int(torch.randint(2**31, ()))

    def find(self) -> _Found:
        seen = self._run(_random, lambda _, weights: weights.requires_grad_())
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

    # --- running

    def _run(self, drawn: _Draw, changed: _Change) -> _Seen:
        stubs = {path: _Leaves(linear, path, drawn) for path, linear in self.linears.items()}
        watch = Scores(changed)
        behind = _Behind(watch, self.activations)
        replaced: dict[nn.Module, Stub] = {self.linears[path]: stub for path, stub in stubs.items()}
        torch.manual_seed(self.seed)  # the parameters that are left are the same in all runs
        with watch, behind:
            run = run_copy(self.module, replaced, self.way, batch=1, width=self.width)
        leaves = {(path, call): leaf for path, stub in stubs.items() for call, leaf in enumerate(stub.leaves)}
        return _Seen(run, stubs, watch, behind, leaves=leaves)

    # --- 1. and 2. queries and keys

    def _heads(self, seen: _Seen) -> list[_Head]:
        received = self._received(seen)
        heads: dict[Any, _Head] = {}
        why = NoHeadsError()
        for event, weights in enumerate(seen.watch.weights):
            if not _depends(received, [weights]):
                if self._leads_elsewhere(seen, event):
                    raise NoHeadsError("it computes more than one attention")
                continue
            for number, head in enumerate(self._by_features(seen, event)):
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

    def _by_features(self, seen: _Seen, event: int) -> list[_Head]:
        """Group rows of scores by the features that they depend on."""
        scores = seen.watch.scores[event]
        flat = scores.reshape(-1, scores.shape[-1])
        by_features: dict[_Features, _Head] = {}
        for row in _rows(scores.shape[:-1]):
            live = flat[row].isfinite()
            loss = (flat[row][live] * torch.randn_like(flat[row][live])).sum()
            features = _features(self._elements(seen, loss))
            if features:
                by_features.setdefault(features, _Head([])).rows.append((event, row))
        return list(by_features.values())

    def _leads_elsewhere(self, seen: _Seen, event: int) -> bool:
        """Tell whether attention weights are used; some modules compute some that are not."""
        used = [*_tensors(seen.run.output), *(one for stub in seen.stubs.values() for one in stub.received)]
        return any(_depends(tensor, [seen.watch.weights[event]]) for tensor in used)

    def _look_at(self, seen: _Seen, head: _Head) -> None:
        """Tell the query from the key of a head; an error if these are no scores of attention over tokens."""
        for event, row in head.rows:
            scores = seen.watch.scores[event]
            flat = scores.reshape(-1, scores.shape[-1])
            columns = self._columns(seen, flat[row])
            if len(columns) < 2:  # a single key shows nothing
                continue
            alone = {column: self._elements(seen, flat[row, column]) for column in columns}
            query = _common(list(alone.values()))
            keys = {column: _without(elements, query) for column, elements in alone.items()}
            # A column of padding has no key, though its position may meet the query.
            columns = [column for column, elements in keys.items() if elements]
            if len(columns) < 2:
                continue
            alone = {column: alone[column] for column in columns}
            if query:
                # What is added to the scores is no query and no key: both act on each other.
                first = columns[0]
                act = _common([keys[first], self._acting(seen, flat[row, first], query)])
                query = _common([query, self._acting(seen, flat[row, first], act)])
                keys = {column: _without(elements, query) for column, elements in alone.items()}
            if query:
                acting = {column: self._acting(seen, flat[row, column], query) for column in columns}
                keys = {column: _common([elements, acting[column]]) for column, elements in keys.items()}
            if len({path for path, _ in keys[columns[0]]}) > 1:
                both = keys
                keys = {column: self._shared(seen, scores, row, column, elements) for column, elements in both.items()}
                left = {path for elements in both.values() for path, _ in elements}
                left -= {path for elements in keys.values() for path, _ in elements}
                for column, elements in both.items():
                    left -= self._positions(seen, scores, row, column, _without(elements, keys[column]))
                if left:
                    raise NoHeadsError(_sums(both.values()))
            self._take(head, query, list(keys.values()))
            return
        raise NoHeadsError("it has one key for each query, which tells nothing")

    def _take(self, head: _Head, query: _Elements, keys: list[_Elements]) -> None:
        of_keys = {_features(elements) for elements in keys}
        if any(len(features) > 1 for features in of_keys):
            raise NoHeadsError(_sums(keys))
        if len(of_keys) != 1 or any(_are_same(one, other) for one, other in itertools.combinations(keys, 2)):
            raise NoHeadsError("its scores are not those of tokens")
        (of_key,) = of_keys
        head.key, head.queries = of_key[0], _features(query)
        head.is_spread = any(_token(elements) is None for elements in keys)
        # A query may be learned, or of several tokens: then it is no map of a token.
        head.query = head.queries[0] if len(head.queries) == 1 and _token(query) is not None else None

    def _columns(self, seen: _Seen, of_row: Tensor) -> list[int]:
        """Choose scores of a row that depend on something."""
        finite = of_row.isfinite().nonzero().flatten().tolist()
        chosen: list[int] = []
        for column in [finite[i] for i in torch.randperm(len(finite)).tolist()]:
            if len(chosen) == _COLUMNS:
                break
            if self._elements(seen, of_row[column]):
                chosen.append(column)
        return chosen

    def _are_linear(self, heads: list[_Head], seen: _Seen) -> bool:
        """Tell whether queries and keys are linear in what their maps answer, up to a factor for each token."""
        # The derivative of a score by its query is the key that it meets, and the other way round. Of two keys and
        # their sum the third is a sum of multiples of the others, which it is not behind an activation.
        head = heads[0]
        if head.query is None:
            return True
        event, row = head.rows[0]
        scores = seen.watch.scores[event]
        flat = scores.reshape(-1, scores.shape[-1])
        is_key = (_holds(self._elements(seen, flat[row, column]), head.key) for column in range(flat.shape[-1]))
        column = next(number for number, holds in enumerate(is_key) if holds)  # others may be padding
        keys, queries = [one.key for one in heads], [one.query for one in heads if one.query is not None]
        for (moved, _), (other, features), of_heads in ((head.key, head.query, keys), (head.query, head.key, queries)):
            changed = sorted({feature for _, own in of_heads for feature in own})
            met = []
            for shares in ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (1.0, 1.0)):
                again = self._run(_mixed(moved, changed, shares), lambda _, weights: weights)
                scores = again.watch.scores[event]
                gradients = self._gradients(again, scores.reshape(-1, scores.shape[-1])[row, column])
                parts = [one[:, features].flatten() for (path, _), one in gradients.items() if path == other]
                met.append(torch.cat(parts))
            constant, *others = met  # such as positions that are met as well
            sizes = torch.linalg.svdvals(torch.stack(others) - constant)
            if not sizes[2] < _BENT * sizes[0]:
                return False
        return True

    def _shared(self, seen: _Seen, scores: Tensor, row: int, column: int, elements: _Elements) -> _Elements:
        """Leave what other queries meet in this column too, which relative positions are not."""
        # Positions are shared by sequences, keys are not: nothing is left where rows differ in what they share.
        found = [_common([elements, other]) for other in self._of_others(seen, scores, row, column)]
        found = [common for common in found if common]
        return _common(found) if found else {}

    def _positions(self, seen: _Seen, scores: Tensor, row: int, column: int, elements: _Elements) -> set[str]:
        """Name the maps of relative positions: what other rows meet in another column."""
        others = [
            other
            for at in sorted({(column + step) % scores.shape[-1] for step in (1, -1)} - {column})
            for other in self._of_others(seen, scores, row, at)
        ]
        return {path for other in others for path, _ in _common([elements, other])}

    def _of_others(self, seen: _Seen, scores: Tensor, row: int, column: int) -> Iterator[_Elements]:
        """Give what rows depend on in a column that differ from one row in one dimension."""
        place = [int(i) for i in torch.unravel_index(torch.tensor(row), scores.shape[:-1])]
        by_key = scores[..., column]
        for dim, size in enumerate(by_key.shape):
            for step in sorted({1, 2 % size, size - 1} - {0}):
                score = by_key[tuple((at + step) % size if i == dim else at for i, at in enumerate(place))]
                if score.isfinite():
                    yield self._elements(seen, score)

    def _elements(self, seen: _Seen, loss: Tensor) -> _Elements:
        gradients = self._gradients(seen, loss)
        largest = max((float(one.abs().max()) for one in gradients.values()), default=0.0)
        if not largest > 0:
            return {}
        matter = {where: one.abs() > _MATTERS * largest for where, one in gradients.items()}
        return {where: one for where, one in matter.items() if one.any()}

    def _gradients(self, seen: _Seen, loss: Tensor, *, is_kept: bool = False) -> dict[_Where, Tensor]:
        if not loss.requires_grad:
            return {}
        gradients = torch.autograd.grad(
            loss, list(seen.leaves.values()), retain_graph=True, allow_unused=True, create_graph=is_kept
        )
        return {
            where: gradient.reshape(-1, gradient.shape[-1])
            for where, gradient in zip(seen.leaves, gradients)
            if gradient is not None
        }

    def _acting(self, seen: _Seen, score: Tensor, on: _Elements) -> _Elements:
        """Find what a derivative by some elements depends on."""
        gradients = self._gradients(seen, score, is_kept=True)
        chosen = [gradients[where][mask] for where, mask in on.items() if where in gradients]
        if not chosen:
            return {}
        flat = torch.cat(chosen)
        return self._elements(seen, (flat * torch.randn_like(flat)).sum())

    # --- 3. values and outputs

    def _find_receiver(self, seen: _Seen) -> None:
        """Find the first linear map that is given what depends on the attention weights; else it is what comes back."""
        for path, stub in seen.stubs.items():
            for call, received in enumerate(stub.received):
                if _depends(received, seen.watch.weights):
                    if call:
                        raise NoHeadsError(f"its projection `{path}` is called before and after attention")
                    self.receiver = path
                    return
        convolved = enumerate(seen.behind.convolved)
        self.convolution = next((i for i, one in convolved if _depends(one, seen.watch.weights)), None)
        if self.convolution is not None:
            return
        outputs = list(_tensors(seen.run.output))
        self.place = next((i for i, one in enumerate(outputs) if _depends(one, seen.watch.weights)), None)
        if self.place is None:
            raise NoHeadsError

    def _received(self, seen: _Seen) -> Tensor:
        """Give what the output projection receives, or what comes back, ``(tokens, features)``."""
        if self.receiver is not None:
            received = seen.stubs[self.receiver].received[0]
        elif self.convolution is not None:
            received = seen.behind.convolved[self.convolution].movedim(self.dim, -1)
        else:
            assert self.place is not None
            received = list(_tensors(seen.run.output))[self.place].movedim(self.dim, -1)
        return received.reshape(-1, received.shape[-1])

    def _is_fed(self, seen: _Seen, path: str) -> bool:
        """Tell whether a projection is fed by another: then the weights of heads are not its own alone."""
        received = seen.stubs[path].received
        return any(self._elements(seen, (one * torch.randn_like(one)).sum()) for one in received)

    def _difference(self, drawn: _Draw, factor: _Change, plain: _Change = lambda _, weights: weights) -> Tensor:
        """Give what comes of attention weights that are multiplied, less what comes of them as they are."""
        one, other = (self._received(self._run(drawn, changed)) for changed in (factor, plain))
        return (one - other).detach()

    def _claim(self, heads: list[_Head], seen: _Seen) -> _Found:
        H = len(heads)
        of_head = self._coded_heads(heads)
        if of_head is None or len(of_head) % H:
            raise NoHeadsError("what attention gives is mixed or normed before it reaches the output projection")
        order = list(dict.fromkeys(of_head.tolist()))
        if len(order) != H or len(set(of_head.bincount().tolist())) != 1:
            raise NoHeadsError("not every head has a part of its own in what the output projection takes")
        heads = [heads[number] for number in order]
        outputs = torch.stack([(of_head == number).nonzero().flatten() for number in order])  # (H, width)
        values = self._coded_values(seen, heads, outputs[0])
        if values is None:
            raise NoHeadsError("the features of its heads' outputs are not those of one value map at one token")
        path, numbers = values[0], values[1][outputs]
        # One half of a head's features may not depend on the values of the other half.
        received = self._received(seen)[:, outputs[:, ::2].flatten()]
        others = set(numbers.flatten().tolist()) - set(numbers[:, ::2].flatten().tolist())
        for (of, _), mask in self._elements(seen, (received * torch.randn_like(received)).sum()).items():
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
        is_told = self.receiver is not None and not self.activations
        if self.receiver is not None and is_told:
            rows["output"] = (self.receiver, tuple(map(tuple, outputs.tolist())))
        found = {role: one for role, one in rows.items() if one is not None}
        if len(found) < len(rows) or len(found["key"][1]) != len(found["value"][1]):
            raise NoHeadsError("its heads do not share keys and values in groups side by side")
        # Whoever captures its input expects the heads side by side.
        is_side_by_side = torch.equal(outputs.flatten(), torch.arange(len(of_head)))
        is_called = self.receiver is not None and is_told and seen.stubs[self.receiver].is_called
        return _Found(found, H, is_called and is_side_by_side, any(head.is_spread for head in heads))

    def _coded_heads(self, heads: list[_Head]) -> Tensor | None:
        """Tell for each feature of the output the head whose weights it is an average by, ``(features,)``."""

        def times(factors: Sequence[float]) -> _Change:
            def apply(event: int, weights: Tensor) -> Tensor:
                by_row = torch.ones(weights.shape[:-1].numel(), 1)
                for head, factor in zip(heads, factors):
                    for where, row in head.rows:
                        if where == event:
                            by_row[row] = 1 + factor
                return weights * by_row.view(*weights.shape[:-1], 1)

            return apply

        plain = self._difference(_varied, times([1.0] * len(heads)))
        digits = _digits(torch.arange(len(heads)))
        coded = [self._difference(_varied, times([1.0 + digit for digit in of_all.tolist()])) for of_all in digits]
        return _numbers(plain, coded, lambda ratio: ratio - 1)

    def _coded_values(self, seen: _Seen, heads: list[_Head], first: Tensor) -> tuple[str, Tensor] | None:
        """Tell for each feature of the output the value feature that it averages: their linear map, ``(features,)``."""
        received = self._received(seen)
        alone = self._values_of_a_token(seen, heads[0])
        if alone is None:
            return None
        paths = {path for path, _ in self._elements(seen, (received * torch.randn_like(received)).sum())}
        for path, (once, twice) in itertools.product(sorted(paths & alone.keys()), _SAME_WEIGHTS):
            plain = self._difference(_constant, twice, once)
            digits = _digits(torch.arange(projections.features(self.linears[path])[1]))
            coded = [self._difference(_times(path, 1 + (1 + digit) / _BASE), twice, once) for digit in digits]
            numbers = _numbers(plain, coded, lambda ratio: (ratio - 1) * _BASE - 1)
            if numbers is not None:
                # Seen by the derivatives too: values of this head alone.
                own = set(numbers[first].tolist())
                is_seen = alone == {path: own} and len(own) == len(first)
                return (path, numbers) if is_seen and not self._is_fed(seen, path) else None
        return None

    def _values_of_a_token(self, seen: _Seen, head: _Head) -> dict[str, set[int]] | None:
        """Find what is averaged by one attention weight of a head: features of one token, by their linear map."""
        received = self._received(seen)
        probe = torch.randn_like(received, requires_grad=True)
        event, row = head.rows[0]
        weights = seen.watch.weights[event]
        (gradient,) = torch.autograd.grad((received * probe).sum(), weights, create_graph=True)
        of_row = gradient.reshape(-1, gradient.shape[-1])[row]
        live = [column for column in range(len(of_row)) if float(of_row[column].detach()) != 0]
        if not live:
            return None
        # Far from each other, as values may be made of several tokens; padding has none. What they share are gates.
        columns = dict.fromkeys(live[i * (len(live) - 1) // 4] for i in range(5))
        alone = [elements for column in columns if (elements := self._elements(seen, of_row[column]))]
        gates = _common(alone) if len(alone) > 1 else {}
        own = [_without(elements, gates) for elements in alone]
        if len({_features(one) for one in own if one}) != 1:
            return None
        return {path: set(features) for one in own for path, features in _features(one)}


# --- what is drawn, and what is read


def _even(times: float) -> _Change:
    return lambda _, weights: torch.full_like(weights, times / weights.shape[-1])


# The weights of constant queries and keys, which leave out padding that is masked; and even ones, by which the values
# of padding that is zero are left out of all sums alike.
_SAME_WEIGHTS: tuple[tuple[_Change, _Change], ...] = (
    (lambda _, weights: weights, lambda _, weights: 2 * weights),
    (_even(1.0), _even(2.0)),
)


def _random(path: str, call: int, shape: tuple[int, ...]) -> Tensor:
    """Draw away from zero, and of a size that leaves products of order one both with and without a scale."""
    sizes: Tensor = torch.empty(shape).uniform_(0.5, 1.5) * float(shape[-1]) ** -0.125
    return sizes * torch.randn(shape).sign()


def _varied(path: str, call: int, shape: tuple[int, ...]) -> Tensor:
    """Draw features that differ from token to token, the same whenever they are asked for."""
    return torch.empty(shape).uniform_(0.5, 1.5, generator=_generator(path, call))


def _constant(path: str, call: int, shape: tuple[int, ...]) -> Tensor:
    """Draw features that are the same for all tokens."""
    drawn: Tensor = torch.empty(shape[-1]).uniform_(0.5, 1.5, generator=_generator(path, 0))
    return drawn.expand(shape)


def _mixed(path: str, features: list[int], shares: tuple[float, float]) -> _Draw:
    """Draw the same whenever asked, some features of one map as the sum of shares of two draws."""

    def drawn(other: str, call: int, shape: tuple[int, ...]) -> Tensor:
        one, second = (torch.empty(shape).uniform_(-1.5, 1.5, generator=_generator(other, n + call)) for n in (0, 999))
        if other == path:
            one[..., features] = shares[0] * one[..., features] + shares[1] * second[..., features]
        return one

    return drawn


def _times(path: str, factors: Tensor) -> _Draw:
    """Draw the same for all tokens, and multiply what one of the maps answers by a factor for each feature."""

    def drawn(other: str, call: int, shape: tuple[int, ...]) -> Tensor:
        answer = _constant(other, call, shape)
        return answer * factors if other == path else answer

    return drawn


def _generator(path: str, call: int) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(f"{path} {call}".encode()))


def _digits(numbers: Tensor) -> list[Tensor]:
    """Write numbers by their digits, the lowest first, and a last one that checks them."""
    digits = [numbers % _BASE]
    while int((numbers := numbers // _BASE).max()):
        digits.append(numbers % _BASE)
    return [*digits, _check_digit(digits)]


def _check_digit(digits: list[Tensor]) -> Tensor:
    total = torch.zeros_like(digits[0])
    for place, digit in enumerate(digits):
        total += (2 * place + 5) * digit
    return (total + 11) % _BASE


def _numbers(plain: Tensor, coded: list[Tensor], digit: Callable[[Tensor], Tensor]) -> Tensor | None:
    """Read the number of each feature from its digits, ``(tokens, features)`` each; all tokens have to agree."""
    counts = plain.abs() > 1e-3 * plain.abs().max()
    if not counts.any(0).all():
        return None
    digits: list[Tensor] = []
    for one in coded:
        read = digit(one / plain)
        whole = read.round()
        if not ((read - whole).abs() < 0.05)[counts].all():
            return None
        least, most = whole.where(counts, torch.inf).amin(0), whole.where(counts, -torch.inf).amax(0)
        if not torch.equal(least, most) or least.min() < 0 or most.max() >= _BASE:
            return None
        digits.append(least.long())
    *digits, check = digits
    if not torch.equal(_check_digit(digits), check):
        return None
    return torch.stack([one * _BASE**power for power, one in enumerate(digits)]).sum(0)


def _distinct(path: str, rows: list[list[int]]) -> _Rows | None:
    distinct = distinct_rows(torch.tensor(rows))
    if distinct is None or len(torch.unique(distinct, dim=0)) != len(distinct):
        return None
    return path, tuple(map(tuple, distinct.tolist()))


def _rows(shape: Sequence[int]) -> list[int]:
    """Choose rows of scores so that every dimension is gone through evenly, whichever of them numbers the heads."""
    count = math.prod(shape)
    if count <= _ROWS:
        return list(range(count))
    rows = torch.zeros(_ROWS, dtype=torch.long)
    for size in shape:
        rows = rows * size + torch.cat([torch.randperm(size) for _ in range(-(-_ROWS // size))])[:_ROWS]
    chosen: list[int] = torch.unique(rows).tolist()
    return chosen


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor) and output.dim() > 1:
        yield output
    elif isinstance(output, (tuple, list)):
        for one in output:
            yield from _tensors(one)
    elif isinstance(output, dict):
        for one in output.values():
            yield from _tensors(one)


def _depends(tensor: Tensor, on: list[Tensor]) -> bool:
    if not tensor.requires_grad or not on:
        return False
    loss = (tensor * torch.randn_like(tensor)).sum()
    gradients = torch.autograd.grad(loss, on, retain_graph=True, allow_unused=True)
    return any(gradient is not None and bool(gradient.any()) for gradient in gradients)


def _sums(keys: Iterable[_Elements]) -> str:
    names = sorted({path for elements in keys for path, _ in elements})
    return f"its keys are sums of what `{'` and `'.join(names)}` give"


# --- elements: features of tokens


def _common(all_of_them: list[_Elements]) -> _Elements:
    first, *others = all_of_them
    for other in others:
        first = {where: mask & other[where] for where, mask in first.items() if where in other}
    return {where: mask for where, mask in first.items() if mask.any()}


def _without(elements: _Elements, others: _Elements) -> _Elements:
    left = {where: mask & ~others[where] if where in others else mask for where, mask in elements.items()}
    return {where: mask for where, mask in left.items() if mask.any()}


def _features(elements: _Elements) -> _Features:
    found: dict[str, set[int]] = {}
    for (path, _), mask in elements.items():
        found.setdefault(path, set()).update(mask.any(0).nonzero().flatten().tolist())
    return tuple((path, tuple(sorted(features))) for path, features in sorted(found.items()))


def _are_same(one: _Elements, other: _Elements) -> bool:
    return one.keys() == other.keys() and all(torch.equal(mask, other[where]) for where, mask in one.items())


def _holds(elements: _Elements, of_map: tuple[str, tuple[int, ...]]) -> bool:
    return any(path == of_map[0] and bool(mask[:, of_map[1]].any()) for (path, _), mask in elements.items())


def _token(elements: _Elements) -> tuple[_Where, int] | None:
    """Name the token that all elements belong to; `None` if there are several."""
    tokens = [(where, token) for where, mask in elements.items() for token in mask.any(1).nonzero().flatten().tolist()]
    return tokens[0] if len(tokens) == 1 else None


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
