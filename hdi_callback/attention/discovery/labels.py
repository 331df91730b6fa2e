"""Labels: of each element of a tensor, from which row of which parameter it comes, and from which token.

Parts of a tape are replayed backwards, from an attention to the products with parameters that are nearest to it, so
that nothing else ever gets labels. A label belongs to the content of a storage (`Cell`), and is kept in the shape in
which it was written. An operation without a rule makes what depends on it unreadable, and its name is the reason.

A feature is one output of such a product (a row of an `nn.Linear`'s weight), named by the number of its first element
among those of all parameters, which begin at `Tape.first`. Its owner is that parameter, or a `FeatureRange`, by the
place in `Tape.names`.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from hdi_callback.attention import operations as ops
from hdi_callback.attention.discovery.planes import (
    by_value,
    reshaped,
    seen_through,
    small,
    thin,
    unique_rows,
    written_out,
)
from hdi_callback.attention.discovery.products import (
    Product,
    Products,
    Unreadable,
    owners_of,
    reduced_dims,
    run_on,
)
from hdi_callback.attention.tape import CONSTANT, DATA, MADE, WEIGHT, Cell, Step, Tape, View, walk_back

_ENDS = {*ops.EMPTY, *ops.FUSED, *ops.WHOLE_LAYERS}  # what they return has no labels of what they take
NOTHING, SEVERAL = 0, -1  # of a token; as features, numbers below -1 are sets


class Flag(NamedTuple):
    """What else happens to queries, keys or values of an attention."""

    kind: str
    detail: str = ""
    role: str = ""

    def __str__(self) -> str:
        return f"{self.role}: {self.kind} {self.detail}".removeprefix(": ").rstrip()

    def of(self, role: str) -> Flag:
        """Return the same of a role."""
        return self._replace(role=role)


NORMED, GATED, GAINED, TIMES, RESAMPLED, FILTERED, GROUPED, WEIGHED, SUM = map(
    Flag, ("normed", "gated", "gain", "product of two", "tokens resampled", "filter over several tokens",
           "filters of groups", "times a constant", "sum"),
)  # fmt: skip
NONLINEAR = "nonlinear:"  # a kind; its detail is the operation


@dataclass(frozen=True, eq=False, repr=False)
class Label:
    """Labels of a tensor, in its shape: which feature of which parameter each element is, and of which token."""

    # The id of the first element of the parameter's row, or one of a `FeatureRange`; below -1 a set; 0 for none.
    features: Tensor
    tokens: Tensor  # the number of the token, or `SEVERAL`; 0 for none
    flags: frozenset[Flag] = frozenset()  # what else happened to it

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Label:
        """Return the labels with both planes changed in the same way."""
        return Label(function(self.features), function(self.tokens), self.flags)

    def reshaped(self, shape: tuple[int, ...]) -> Label:
        """Return the labels in another shape."""
        return self.mapped(lambda plane: reshaped(plane, shape))

    def expanded(self, shape: tuple[int, ...]) -> Label:
        """Return the labels expanded to a shape."""
        return self.mapped(lambda plane: plane.expand(shape))

    def flagged(self, *flags: Flag) -> Label:
        """Return a copy with further flags."""
        return Label(self.features, self.tokens, self.flags | set(flags))

    @property
    def is_activated(self) -> bool:
        """Whether an activation follows a projection."""
        return any(flag.kind == NONLINEAR for flag in self.flags)

    @property
    def mT(self) -> Label:  # noqa: N802  as of a tensor
        """The last two dimensions exchanged."""
        return self.mapped(lambda plane: plane.mT)


_Written = tuple[Label, View]  # labels of a storage's content, and the view through which they were written


@dataclass(frozen=True, eq=False)
class FeatureRange:
    """A range of feature ids that belong to no parameter: score rows, attention outputs, model inputs."""

    kind: str
    start: int
    end: int
    step: Step | None
    shape: tuple[int, ...]


class Labels:
    """Replay parts of a tape on labels."""

    def __init__(self, tape: Tape, *, of_inputs: bool = False) -> None:
        self.tape = tape
        self.products = Products(tape)
        self.installed: dict[int, Label] = {}  # step -> labels that are known otherwise: those of an attention's output
        self.moving: set[int] = set()  # parameters applied to data, not only to positions
        self.products_of: dict[str, dict[int, Product]] = {}  # parameter -> step -> product with it, as far as read
        self.ranges: dict[int, FeatureRange] = {}  # by their owner
        self.score_steps: set[int] = set()  # that multiply queries and keys; later layers may add to their scores
        self._of_inputs = of_inputs
        self._sets: list[tuple[frozenset[int], bool]] = []
        self._numbers: dict[tuple[frozenset[int], bool], int] = {}
        self._memo: dict[Cell, _Written | str | None] = {}  # labels, or why there are none that could be known

    def forget(self) -> None:
        """Drop all labels, as something about them has changed."""
        self._memo.clear()

    # numbers of features, and sets of them

    def members(self, number: int) -> frozenset[int]:
        """Return the features of an id, which may be that of a set."""
        if number < -1:
            return self._sets[-2 - number][0]
        return frozenset((number,)) if number > 0 else frozenset()

    def members_of(self, features: Tensor) -> frozenset[int]:
        """Return the features in a plane, also those of sets."""
        return frozenset().union(*map(self.members, small(features).unique().tolist()))

    def is_statistic(self, number: int) -> bool:
        """Whether an id is that of a sum, mean or norm over features."""
        return number < -1 and self._sets[-2 - number][1]

    def number(self, members: frozenset[int], *, statistic: bool = False) -> int:
        """Return the id of a set of features."""
        if len(members) <= 1:
            return next(iter(members), 0)
        key = members, statistic
        if key not in self._numbers:
            self._numbers[key] = -2 - len(self._sets)
            self._sets.append(key)
        return self._numbers[key]

    def owner(self, number: int) -> int:
        """Return the parameter, or feature range, that a feature is of; -1 for none."""
        return bisect.bisect_right(self.tape.first, number) - 1

    def owners(self, features: Tensor) -> set[int]:
        """Return the parameters and feature ranges in a plane."""
        numbers = small(features).unique().tolist()
        at = bisect.bisect_right(numbers, 0)
        return {*owners_of(sorted({*numbers[at:]}.union(*map(self.members, numbers[:at]))), self.tape)}

    def sources_in(self, features: Tensor, kind: str) -> list[FeatureRange]:
        """Return the feature ranges of a kind in a plane, in the order of their steps."""
        ranges = (self.ranges[owner] for owner in sorted(self.owners(features)) if owner in self.ranges)
        return [item for item in ranges if item.kind == kind]

    def new_source(self, kind: str, count: int, step: Step | None, shape: tuple[int, ...]) -> FeatureRange:
        """Return a new range of ids, for features that come from no parameter."""
        source = FeatureRange(kind, self.tape.end, self.tape.end + count, step, shape)
        self.ranges[self.tape.add_range(kind, count)] = source
        return source

    def read(self, view: View) -> Label | None:
        """Return the labels of a tensor, `None` if it has none; raise `Unreadable` if they cannot be followed."""
        if not view.is_float:
            return None
        written = self._of(view.cell)
        if written is None:
            return None
        if isinstance(written, str):
            raise Unreadable(written)
        label, stored = written
        is_same = (stored.shape, stored.stride, stored.offset) == (view.shape, view.stride, view.offset)
        if is_same and view.itemsize == view.cell.itemsize:
            return label
        if view.itemsize == 2 * view.cell.itemsize:  # complex numbers of pairs
            pairs = self._read(label, stored, _in_pairs(view), view.cell.numel)
            real, imaginary = pairs.mapped(lambda plane: plane[..., 0]), pairs.mapped(lambda plane: plane[..., 1])
            if self.owners(real.features) != self.owners(imaginary.features):
                raise Unreadable("complex numbers, of which two maps make the parts")
            return self.union(real, imaginary)
        if 2 * view.itemsize == view.cell.itemsize:  # pairs of complex numbers
            label, stored = label.reshaped((*stored.shape, 1)).expanded((*stored.shape, 2)), _in_pairs(stored)
            return self._read(label, stored, view, 2 * view.cell.numel)
        if view.itemsize != view.cell.itemsize:
            raise Unreadable("a tensor is viewed in another type")
        return self._read(label, stored, view, view.cell.numel)

    def _read(self, label: Label, stored: View, wanted: View, numel: int) -> Label:
        def through(plane: Tensor) -> Tensor:
            view = seen_through(plane, stored, wanted)
            if view is not None:
                return view
            return thin(written_out(plane, stored, numel).as_strided(wanted.shape, wanted.stride, wanted.offset))

        return label.mapped(through)

    def may_read(self, view: View) -> Label | None:
        """Return the labels of a tensor if they can be followed, else `None`."""
        with suppress(Unreadable):
            return self.read(view)
        return None

    def _of(self, cell: Cell) -> _Written | str | None:
        todo = [] if cell in self._memo else [cell]
        while todo:  # no recursion: tapes are long
            current = todo[-1]
            needed = [] if current in self._memo else [cell for cell in self.needs(current) if cell not in self._memo]
            if not needed:
                todo.pop()
                if current not in self._memo:
                    written = None if current.step is None else self._evaluated(current, current.step)
                    self._memo[current] = self._of_root(current) if written is None else written
            todo += needed
        return self._memo[cell]

    def _of_root(self, cell: Cell) -> _Written | None:
        view = cell.written
        if not self._of_inputs or cell.kind != DATA or view is None or not view.is_float or not view.shape:
            return None
        source = self.new_source("input", view.shape[-1], None, view.shape)
        features = (torch.arange(view.shape[-1]) + source.start).expand(view.shape)
        tokens = (torch.arange(view.numel // view.shape[-1]) + 1).reshape(*view.shape[:-1], 1).expand(view.shape)
        return Label(features, tokens), view

    def needs(self, cell: Cell) -> list[Cell]:
        """Return the contents on whose labels those of a content depend."""
        step = cell.step
        if step is None or step.number in self.installed:
            return []
        product = self.products.of(step)
        if product is not None and product.sizes:
            cells = [view.cell for view in (product.first, product.second, *step.inputs)]
        elif product is not None and product.kind == "filter" and _is_depthwise(step, product):
            cells = [product.first.cell]
        elif self.products.kind(step) in {"scores", "weight", "filter"} or step.op in _ENDS:
            cells = []
        else:
            cells = [view.cell for view in step.inputs if view.is_float and view.cell.kind not in {CONSTANT, WEIGHT}]
        return [*cells, cell.before] if cell.before is not None else cells

    def leading_to(self, views: Iterable[View]) -> Iterator[Step]:
        """Return all steps that the labels of some tensors depend on."""
        cells = walk_back([view.cell for view in views], self.needs)
        return (cell.step for cell in cells if cell.step is not None)

    def _evaluated(self, cell: Cell, step: Step) -> _Written | str | None:
        view = cell.written
        if view is None or not view.is_float:
            return None
        before = self._memo.get(cell.before) if cell.before is not None else None  # none is read before weights
        is_whole = view.numel * view.itemsize >= cell.numel * cell.itemsize
        try:
            if step.number in self.installed and view is step.outputs[0]:
                label: Label | None = self.installed[step.number]
            else:
                label = self._replayed(step, step.outputs.index(view), view)
        except Unreadable as error:
            return str(error)
        except Exception as error:  # what labels cannot follow is unknown, and said
            return f"{step.op} ({type(error).__name__}: {str(error)[:80]})"
        if isinstance(before, str) and not is_whole:
            return before
        if isinstance(before, tuple) and not is_whole:
            return self._written_over(before, label, cell, view)
        return None if label is None else (label, view)

    @staticmethod
    def _written_over(before: _Written, label: Label | None, cell: Cell, view: View) -> _Written:
        """Return labels of a content of which a part is overwritten."""
        nothing = torch.zeros((), dtype=torch.int64)
        part = Label(nothing, nothing) if label is None else label
        label_before, stored = before
        whole = label_before.mapped(lambda plane: written_out(plane, stored, cell.numel))
        for flat, plane in ((whole.features, part.features), (whole.tokens, part.tokens)):
            flat.as_strided(view.shape, view.stride, view.offset).copy_(plane)
        return whole.flagged(*part.flags), view.seen_as((cell.numel,), (1,), 0)

    def _replayed(self, step: Step, place: int, out: View) -> Label | None:
        if step.op in ops.EMPTY:
            return None
        product = self.products.of(step)
        factors = (product.first, product.second) if product is not None and product.sizes else ()
        # A product that is written as a sum is one of queries and keys, or a weighted mean.
        is_mean = any(label is None or label.is_activated for label in map(self.read, factors))
        if product is not None and "filter" in product.kind:
            return self._convolved(step, product, out)
        if product is not None and not is_mean:
            rules = {"weight": self._through_weight, "constant": self._through_constant}
            label = rules.get(product.kind, self._scores)(step, product)
            return None if label is None else label.mapped(lambda plane: product.placed(plane, out))
        if step.op in ops.QUANTISATIONS:
            return self.read(step.inputs[0]) if place == 0 else None
        labels = [self.read(view) if view.cell.kind != WEIGHT else None for view in step.inputs]
        if all(label is None for label in labels):
            return None
        if step.op in ops.MOVES:
            return self._moved(step, place, out, labels)
        if step.op in ops.NORMS:
            return labels[0].flagged(NORMED) if place == 0 and labels[0] is not None else None
        if step.op in {*ops.SOFTMAXES, "_log_softmax"}:
            return labels[0].flagged(Flag(NONLINEAR, step.op)) if place == 0 and labels[0] is not None else None
        if step.op in ops.CUMULATIVE:
            if labels[0] is not None:
                of_tokens = small(labels[0].features.movedim(int(step.args[1]), -1))
                _only_feature(of_tokens, f"features are summed up by {step.op}")
            return labels[0]
        if step.op in ops.REDUCTIONS:
            return self._reduced(step, labels[0], out) if labels[0] is not None else None
        if step.op in ops.RESAMPLINGS:
            return self._resampled(labels[0], out) if place == 0 and labels[0] is not None else None
        if step.is_pointwise or step.op in ops.POINTWISE or step.op in ops.LINEAR:
            return self._pointwise(step, place, out, labels)
        raise Unreadable(step.op)

    def union(self, label: Label | None, summand: Label | None) -> Label | None:
        """Return the labels of a sum, or of another combination element by element."""
        if label is None or summand is None:
            return label or summand
        features, normed = self._union_of_features(label, summand)
        flags = label.flags | summand.flags if normed is None else normed.flags | {NORMED}
        return Label(features, self._union_of_tokens(label, summand), flags)

    def _union_of_features(self, label: Label, summand: Label) -> tuple[Tensor, Label | None]:
        """Return the features of a sum, and the label that is normed if the other is a statistic of it everywhere."""
        shape = label.features.shape
        first, second = _small_together(label.features, summand.features)
        features = torch.where(first == 0, second, first)
        apart = (first != second) & (first != 0) & (second != 0)
        statistic_of = None
        if bool(apart.any()):
            pairs, back = unique_rows(torch.stack([first[apart], second[apart]], 1))
            numbers, are_statistics = zip(*(self._feature_of_sum(*pair) for pair in pairs.tolist()))
            features = features.masked_scatter(apart, torch.tensor(numbers)[back])
            if all(are_statistics):  # a norm, written out
                statistic_of = summand if self.is_statistic(int(first[apart][0])) else label
        return features.expand(shape), statistic_of

    def _feature_of_sum(self, number: int, summand: int) -> tuple[int, bool]:
        """Return the id of two features together, and whether one is a norm over the other: then it is that feature."""
        first, second = self.members(number), self.members(summand)
        if self.is_statistic(summand) and first <= second and not (self.is_statistic(number) and first == second):
            return number, True
        if self.is_statistic(number) and second <= first:
            return summand, True
        return self.number(first | second), False

    def _union_of_tokens(self, label: Label, summand: Label) -> Tensor:
        """Return `SEVERAL` where tokens differ if features are of one parameter, else (positions) the first."""
        shape = label.tokens.shape
        first, second = _small_together(label.tokens, summand.tokens)
        tokens = torch.where((first == NOTHING) | ((first == SEVERAL) & (second > 0)), second, first)
        differ = (first > 0) & (second > 0) & (first != second)
        if not bool(differ.any()):
            return tokens.expand(shape)
        of_first, of_second = (by_value(self._main_owner, plane) for plane in (label.features, summand.features))
        return torch.where(differ & (of_first == of_second), SEVERAL, tokens).expand(shape)

    def _main_owner(self, number: int) -> int:
        return self.owner(max(self.members(number), default=0))

    def _pointwise(self, step: Step, place: int, out: View, labels: list[Label | None]) -> Label | None:
        """Return the union of labels, with flags: a gate, gain, subtracted mean, product or activation."""
        if step.op == "native_dropout" and place:
            return None
        if step.op == "copy":  # what was there is gone
            labels = labels[1:]
        wide = [label.expanded(out.shape) for label in labels if label is not None]
        gates = [label for label in wide if label.is_activated and not self._has_statistics(label)]
        if step.op == "mul" and 0 < len(gates) < len(wide):
            wide = [label.flagged(GATED) for label in wide if label not in gates]
        if step.op == "complex" and len({frozenset(self.owners(label.features)) for label in wide}) > 1:
            raise Unreadable("complex numbers, of which two maps make the parts")
        result = reduce(self.union, wide, None)
        if result is None:
            return None
        is_scaled = step.op in {"mul", "div"} and NORMED not in result.flags
        weights = (view for view in step.inputs if view.cell.kind in {WEIGHT, MADE} and view.cell.is_mapped)
        if is_scaled and any(view.numel > 1 for view in weights):
            result = result.flagged(GAINED)
        if is_scaled and len(wide) == 2 and bool((small(wide[0].features) != small(wide[1].features)).any()):
            result = result.flagged(TIMES)
        is_plain = step.op in ops.LINEAR or self._has_statistics(result)
        return result if is_plain else result.flagged(Flag(NONLINEAR, step.op))

    def _has_statistics(self, label: Label) -> bool:
        return any(map(self.is_statistic, small(label.features).unique().tolist()))

    def _moved(self, step: Step, place: int, out: View, labels: list[Label | None]) -> Label:
        label_of = {id(view): label for view, label in zip(step.inputs, labels)}
        flags = frozenset().union(*(label.flags for label in labels if label is not None))
        planes = []
        for name in ("features", "tokens"):
            narrow = _untouched(step, [getattr(label, name) for label in labels if label is not None], out)

            def plane(view: View, name: str = name, narrow: tuple[int, ...] = narrow) -> Tensor:
                if not view.is_float:
                    return _index(view, step)
                label = label_of.get(id(view))
                ids = torch.zeros((), dtype=torch.int64).expand(view.shape) if label is None else getattr(label, name)
                for dim in narrow:
                    ids = ids.narrow(dim, 0, 1)
                return ids.double().contiguous()

            planes.append(thin(run_on(step, place, plane)).expand(out.shape))
        return Label(planes[0], planes[1], flags)

    def _reduced(self, step: Step, label: Label, out: View) -> Label:
        dims = reduced_dims(step)
        features = self.summed_features(_last(label.features, dims))
        tokens = only_one(_last(label.tokens, dims))
        return Label(reshaped(features, out.shape), reshaped(tokens, out.shape), label.flags)

    def summed_features(self, features: Tensor) -> Tensor:
        """Return features of a sum over the last dimension: the feature if all agree, else a statistic over the set."""
        short = small(features)
        shape = features.shape[:-1]
        if short.shape[-1] == 1:
            return short[..., 0].expand(shape)
        first = short[..., 0].clone()
        apart = (short != first[..., None]).any(-1)
        if bool(apart.any()):
            unique, back = unique_rows(short[apart])
            members = (frozenset().union(*map(self.members, set(row))) for row in unique.tolist())
            numbers = [self.number(features_of_row, statistic=True) for features_of_row in members]
            first[apart] = torch.tensor(numbers, dtype=torch.int64)[back]
        return first.expand(shape)

    @staticmethod
    def _resampled(label: Label, out: View) -> Label:
        """Return labels with the same features, and tokens that are numbered anew."""
        before = label.features.shape
        channels = 2 if len(out.shape) > 2 and tuple(out.shape[:2]) == tuple(before[:2]) else len(out.shape) - 1
        flat = thin(reshaped(label.features, (*before[:channels], -1)))
        features = _only_feature(flat, "tokens with different features are pooled together")[..., 0]
        features = reshaped(features, (*features.shape, *[1] * (len(out.shape) - features.dim()))).expand(out.shape)
        return Label(features, _new_tokens(out.shape, channels), label.flags | {RESAMPLED})

    def _through_weight(self, step: Step, product: Product) -> Label:
        weight = product.second
        shape = n, rows, _ = product.shape
        features = self.products.features(weight)
        self._note(step, product, features)
        is_shared = weight.shape[0] == 1 or weight.stride[0] == 0
        tokens = torch.arange(n * rows if is_shared else rows).reshape(-1, rows, 1) + 1
        return Label(features[:, None, :].expand(shape), tokens.expand(shape))

    def _note(self, step: Step, product: Product, features: Tensor) -> None:
        for owner in self.owners(features):
            self.products_of.setdefault(self.tape.names[owner], {})[step.number] = product
            if product.first.cell.kind == DATA:
                self.moving.add(owner)

    def _through_constant(self, _: Step, product: Product) -> Label | None:
        first, second = self.read(product.first), self.read(product.second)
        label = second.mT if first is None and second is not None else first
        if label is None:
            return None
        dim = 1 if first is None else -1
        features, tokens = self.summed_features(label.features).unsqueeze(dim), only_one(label.tokens).unsqueeze(dim)
        plain = by_value(lambda number: self.number(self.members(number)), features.expand(product.shape))
        return Label(plain, tokens.expand(product.shape), label.flags | {WEIGHED})

    def _scores(self, step: Step, product: Product) -> Label:
        """Return labels of new features: a row of scores is a feature, and a column a token."""
        n, rows, _ = product.shape
        source = self.new_source("scores", n * rows, step, product.shape)
        features = (torch.arange(n * rows) + source.start).reshape(n, rows, 1).expand(product.shape)
        return Label(features, (torch.arange(product.shape[2]) + 1).expand(product.shape))

    def _convolved(self, step: Step, product: Product, out: View) -> Label:
        x = product.first
        if product.kind != "filter":
            raise Unreadable("a convolution with filters that are computed")
        if _is_depthwise(step, product) and out.shape[1] == x.shape[1]:
            label = self.read(x)
            if label is not None:
                return self._resampled(label, out)
        features = self.products.features(product.second)[0]
        self._note(step, product, features)
        wide = features.reshape(1, -1, *[1] * (len(out.shape) - 2)).expand(out.shape)
        flags = {FILTERED} if product.taps > 1 else set()
        flags |= {GROUPED} if step.argument("groups", 1) > 1 else set()
        return Label(wide, _new_tokens(out.shape, 2), frozenset(flags))


def _in_pairs(view: View) -> View:
    """Return a view in elements of half the size, two along a new last dimension."""
    return view.seen_as((*view.shape, 2), (*(step * 2 for step in view.stride), 1), view.offset * 2)


def _index(view: View, step: Step) -> Tensor:
    if view.value is not None:
        return view.value.cpu()
    if step.op in ops.INDEXED:
        raise Unreadable(f"{step.op} with an index that has no values here (meta)")
    return torch.zeros(view.shape, dtype=torch.int64)


def _untouched(step: Step, planes: list[Tensor], out: View) -> tuple[int, ...]:
    """Return dims that an operation leaves as they are, and along which all its inputs are expanded."""
    # A padding that crops may shift, and a roll without dims is one of all elements in a row.
    moves_all = step.op == "roll" and not any(step.args[2:])
    moves_all |= step.op == "constant_pad_nd" and min(step.args[1], default=0) < 0
    shapes = [view.shape for view in step.inputs if view.is_float]
    if step.op not in {"cat", "roll", "flip", "constant_pad_nd"} or moves_all or len({*map(len, shapes)}) > 1:
        return ()
    unmoved = (d for d, size in enumerate(out.shape) if size > 1 and all(shape[d] == size for shape in shapes))
    return tuple(d for d in unmoved if all(plane.stride(d) == 0 for plane in planes))


def _last(plane: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return a plane with some dims flattened into its last."""
    moved = plane.movedim(dims, tuple(range(-len(dims), 0)))
    leading = moved.shape[: -len(dims)]
    for dim in range(-len(dims), 0):
        if moved.stride(dim) == 0 and moved.shape[dim] > 1:
            moved = moved.narrow(dim, 0, 1)
    return reshaped(moved, (*leading, moved.shape[-len(dims) :].numel()))


def _only_feature(plane: Tensor, reason: str) -> Tensor:
    """Return the only feature along the last dimension, padding aside; raise `Unreadable` if there are several."""
    feature = plane.gather(-1, (plane != NOTHING).int().argmax(-1, keepdim=True))
    if not bool(((plane == feature) | (plane == NOTHING)).all()):
        raise Unreadable(reason)
    return feature


def only_one(tokens: Tensor) -> Tensor:
    """Return the token along the last dimension if there is one, else `SEVERAL`."""
    short = small(tokens)
    first = short[..., 0]
    return torch.where((short == first[..., None]).all(-1), first, SEVERAL).expand(tokens.shape[:-1])


def _small_together(plane: Tensor, summand: Tensor) -> tuple[Tensor, Tensor]:
    """Return both planes with size 1 along the dimensions that are expanded in both."""
    for dim, size in enumerate(plane.shape):
        if size > 1 and plane.stride(dim) == summand.stride(dim) == 0:
            plane, summand = plane.narrow(dim, 0, 1), summand.narrow(dim, 0, 1)
    return plane, summand


def _new_tokens(shape: tuple[int, ...], channels: int) -> Tensor:
    """Return new numbers of tokens: sequences times the positions after the channels."""
    inner = math.prod(shape[channels:])
    places = torch.arange(inner).reshape(*[1] * channels, *shape[channels:])
    batch = torch.arange(shape[0]).reshape(-1, *[1] * (len(shape) - 1)) * inner
    return (places + batch + 1).expand(shape)


def _is_depthwise(step: Step, product: Product) -> bool:
    groups = step.argument("groups", 1)
    return isinstance(groups, int) and groups > 1 and groups == product.first.shape[1]
