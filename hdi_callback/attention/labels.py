"""Labels: of each element of a tensor, from which row of which parameter it comes, and from which token.

Parts of a tape are replayed backwards, from an attention to the products with parameters that are nearest to it, so
that nothing else ever gets labels. A label belongs to the content of a storage (`Cell`), and is kept in the shape in
which it was written. An operation without a rule makes what depends on it unreadable, and its name is the reason.

A feature is one output of such a product (a row of an `nn.Linear`'s weight), named by the number of its first element
among those of all parameters, which begin at `Tape.first`. Its owner is that parameter, by its place in `Tape.names`,
or from `_OF_SOURCES` on a `FeatureRange`.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hdi_callback.attention.operations import (
    CUMULATIVE,
    EMPTY,
    INDEXED,
    LINEAR,
    MOVES,
    NORMS,
    POINTWISE,
    QUANTISATIONS,
    REDUCTIONS,
    RESAMPLINGS,
    SOFTMAXES,
    WHOLE_LAYERS,
    is_fused,
)
from hdi_callback.attention.planes import (
    Geometry,
    repeats,
    reshaped,
    same,
    seen_through,
    small,
    thin,
    unique_rows,
    written_out,
)
from hdi_callback.attention.products import Product, Products, Unreadable, geometry, reduced_dims, run_on, runs_of
from hdi_callback.attention.tape import CONSTANT, DATA, MADE, WEIGHT, Cell, Step, Tape, View

__all__ = ["SEVERAL", "FeatureRange", "Label", "Labels", "Unreadable"]

NOTHING, SEVERAL = 0, -1  # of a token; as features, numbers below -1 are sets
_OF_SOURCES = 10**6  # owners from here on are sources
_FIRST_OF_SOURCES = 1 << 48  # behind the elements of all parameters

# What labels say beside features and tokens.
NORMED, GATED, GAINED, TIMES, SHARED, RESAMPLED, FILTERED, GROUPED, WEIGHED = (
    "normed", "gated", "gain", "product of two", "through a map that heads share", "tokens resampled",
    "filter over several tokens", "filters of groups", "times a constant",
)  # fmt: skip
NONLINEAR = "nonlinear: "  # and the operation
CENTRED = "centred over "  # and how many features


@dataclass(frozen=True, eq=False, repr=False)
class Label:
    """Labels of a tensor, in its shape.

    Attributes:
        features: 0 for none; the number of the first element of the parameter's row, or one of a `FeatureRange`; below
            -1 a set of those.
        tokens: 0 for none, the number of the token, or `SEVERAL`.
        flags: what else happened to it.
    """

    features: Tensor
    tokens: Tensor
    flags: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        return f"<Label {tuple(self.features.shape)}: {sorted(self.flags)}>"

    def reshaped(self, shape: tuple[int, ...]) -> Label:
        """Give the labels another shape."""
        return Label(reshaped(self.features, shape), reshaped(self.tokens, shape), self.flags)

    def expanded(self, shape: tuple[int, ...]) -> Label:
        """Repeat the labels up to a shape."""
        return Label(self.features.expand(shape), self.tokens.expand(shape), self.flags)

    def flagged(self, *flags: str) -> Label:
        """Say more of the labels."""
        return Label(self.features, self.tokens, self.flags | set(flags))

    @property
    def is_activated(self) -> bool:
        """Whether an activation lies behind a map."""
        return any(flag.startswith(NONLINEAR) for flag in self.flags)

    @property
    def mT(self) -> Label:  # noqa: N802  as of a tensor
        """The last two dimensions exchanged."""
        return Label(self.features.mT, self.tokens.mT, self.flags)


@dataclass(frozen=True, eq=False)
class _Written:
    """Labels of a cell, through the geometry in which they were written."""

    label: Label
    geometry: Geometry


@dataclass(frozen=True)
class _Unknown:
    """Why a cell has no labels that could be known."""

    reason: str


@dataclass(frozen=True, eq=False)
class FeatureRange:
    """What has feature numbers of its own: rows of scores, features of what an attention gives."""

    kind: str
    start: int
    end: int
    step: Step | None
    shape: tuple[int, ...]


class Labels:
    """Replay parts of a tape on labels.

    Attributes:
        deep: products whose map all heads share, which keep the labels of what they take.
        installed: step -> labels that are known otherwise: those of an attention's output.
        score_steps: steps that multiply queries and keys of attentions that were read; later layers may add to them.
        moving: parameters whose products depend on what the model is given, and not on positions alone.
        products_of: parameter -> its products, as far as they were read.
    """

    def __init__(self, tape: Tape, *, of_inputs: bool = False) -> None:
        self.tape = tape
        self.products = Products(tape)
        self.deep: set[int] = set()
        self.installed: dict[int, Label] = {}
        self.moving: set[int] = set()
        self.products_of: dict[int, dict[int, Product]] = {}  # by the number of the step
        self.sources: list[FeatureRange] = []
        self.score_steps: set[int] = set()
        self._of_inputs = of_inputs
        self._starts: list[int] = []
        self._next = _FIRST_OF_SOURCES
        self._sets: list[tuple[frozenset[int], bool]] = []
        self._numbers: dict[tuple[frozenset[int], bool], int] = {}
        self._memo: dict[Cell, _Written | _Unknown | None] = {}

    def forget(self) -> None:
        """Read all labels anew, as something about them has changed."""
        self._memo.clear()

    # numbers of features, and sets of them

    def members(self, number: int) -> frozenset[int]:
        """Give the features of a number, which may be that of a set."""
        if number < -1:
            return self._sets[-2 - number][0]
        return frozenset((number,)) if number > 0 else frozenset()

    def is_statistic(self, number: int) -> bool:
        """Say whether a number is that of a sum, mean or norm over features."""
        return number < -1 and self._sets[-2 - number][1]

    def number(self, members: frozenset[int], *, statistic: bool = False) -> int:
        """Give a set of features a number."""
        if len(members) <= 1:
            return next(iter(members), 0)
        key = members, statistic
        if key not in self._numbers:
            self._numbers[key] = -2 - len(self._sets)
            self._sets.append(key)
        return self._numbers[key]

    def owner(self, number: int) -> int:
        """Say which parameter, or source, a feature is of; -1 for none."""
        if number <= 0:
            return -1
        if number < _FIRST_OF_SOURCES:
            return bisect.bisect_right(self.tape.first, number) - 1
        return _OF_SOURCES + bisect.bisect_right(self._starts, number) - 1

    def owners(self, features: Tensor) -> set[int]:
        """Say which parameters and sources are in a plane."""
        numbers = small(features).unique().tolist()
        own = numbers[bisect.bisect_right(numbers, 0) :]
        end = bisect.bisect_left(own, _FIRST_OF_SOURCES)
        found = {*runs_of(own[:end], self.tape.first), *(_OF_SOURCES + one for one in runs_of(own[end:], self._starts))}
        sets = numbers[: bisect.bisect_left(numbers, -1)]
        return found.union(*({self.owner(member) for member in self.members(one)} for one in sets))

    def source_of(self, owner: int) -> FeatureRange | None:
        """Give the source with the number of an owner."""
        return self.sources[owner - _OF_SOURCES] if owner >= _OF_SOURCES else None

    def sources_in(self, features: Tensor, kind: str) -> list[FeatureRange]:
        """List the sources of a plane, in the order of their steps."""
        found = [self.source_of(owner) for owner in self.owners(features)]
        return sorted((one for one in found if one is not None and one.kind == kind), key=lambda one: one.start)

    def new_source(self, kind: str, count: int, step: Step | None, shape: tuple[int, ...]) -> FeatureRange:
        """Give numbers to features that come from no parameter."""
        source = FeatureRange(kind, self._next, self._next + count, step, shape)
        self._starts.append(self._next)
        self.sources.append(source)
        self._next += count
        return source

    # reading

    def read(self, view: View) -> Label | None:
        """Give the labels of a tensor; `None` if it has none.

        Raises:
            Unreadable: if it depends on something that labels cannot follow.
        """  # noqa: DOC201
        if not view.is_float:
            return None
        written = self._of(view.cell)
        if written is None:
            return None
        if isinstance(written, _Unknown):
            raise Unreadable(written.reason)
        own, wanted, label = written.geometry, geometry(view), written.label
        if own == wanted and view.itemsize == view.cell.itemsize:
            return label
        if view.itemsize == 2 * view.cell.itemsize:  # complex numbers of pairs
            pairs = self._read(label, own, wanted.scaled(2), view.cell.numel)
            real, imaginary = (Label(pairs.features[..., i], pairs.tokens[..., i], pairs.flags) for i in (0, 1))
            if self.owners(real.features) != self.owners(imaginary.features):
                raise Unreadable("complex numbers, of which two maps make the parts")
            return self.union(real, imaginary)
        if 2 * view.itemsize == view.cell.itemsize:  # pairs of complex numbers
            label, own = label.reshaped((*own.shape, 1)).expanded((*own.shape, 2)), own.scaled(2)
            return self._read(label, own, wanted, 2 * view.cell.numel)
        if view.itemsize != view.cell.itemsize:
            raise Unreadable("a tensor is viewed in another type")
        return self._read(label, own, wanted, view.cell.numel)

    def _read(self, label: Label, own: Geometry, wanted: Geometry, numel: int) -> Label:
        planes = []
        for plane in (label.features, label.tokens):
            seen = seen_through(plane, own, wanted)
            if seen is None:
                flat = written_out(plane, own, numel)
                seen = thin(flat.as_strided(wanted.shape, wanted.stride, wanted.offset))
            planes.append(seen)
        return Label(planes[0], planes[1], label.flags)

    def may_read(self, view: View) -> Label | None:
        """Give the labels of a tensor, if it has some that can be known."""
        try:
            return self.read(view)
        except Unreadable:
            return None

    def _of(self, cell: Cell) -> _Written | _Unknown | None:
        todo = [] if cell in self._memo else [cell]
        while todo:  # no recursion: tapes are long
            one = todo[-1]
            if one in self._memo:
                todo.pop()
                continue
            needed = [other for other in self.needs(one) if other not in self._memo]
            if not needed:
                self._memo[one] = self._of_root(one) if one.step is None else self._evaluated(one, one.step)
                todo.pop()
            todo += needed
        return self._memo[cell]

    def _of_root(self, cell: Cell) -> _Written | None:
        view = cell.written
        if not self._of_inputs or cell.kind != DATA or view is None or not view.is_float or not view.shape:
            return None
        source = self.new_source("input", view.shape[-1], None, view.shape)
        features = (torch.arange(view.shape[-1]) + source.start).expand(view.shape)
        tokens = (torch.arange(view.numel // view.shape[-1]) + 1).reshape(*view.shape[:-1], 1).expand(view.shape)
        return _Written(Label(features, tokens), geometry(view))

    def needs(self, cell: Cell) -> list[Cell]:
        """List the cells on whose labels those of a cell depend."""
        step = cell.step
        if step is None or step.number in self.installed:
            return []
        product = self.products.of(step)
        if product is not None and product.sizes:
            cells = [view.cell for view in (product.first, product.second, *step.inputs)]
        elif (product is not None and product.kind == "scores") or is_fused(step.op) or step.op in WHOLE_LAYERS:
            cells = []
        elif product is not None and product.kind in {"weight", "filter"} and step.number not in self.deep:
            cells = [product.first.cell] if product.kind == "filter" and _is_depthwise(step, product) else []
        elif step.op in EMPTY:
            cells = []
        else:
            cells = [view.cell for view in step.inputs if view.is_float and view.cell.kind not in {CONSTANT, WEIGHT}]
        return [*cells, cell.before] if cell.before is not None else cells

    def leading_to(self, views: Iterable[View]) -> Iterator[Step]:
        """Walk over all steps that the labels of some tensors depend on."""
        todo, seen = [view.cell for view in views], set()
        while todo:
            cell = todo.pop()
            if id(cell) in seen:
                continue
            seen.add(id(cell))
            if cell.step is not None:
                yield cell.step
            todo += self.needs(cell)

    def _evaluated(self, cell: Cell, step: Step) -> _Written | _Unknown | None:
        view = cell.written
        if view is None or not view.is_float:
            return None
        before = self._memo[cell.before] if cell.before is not None else None
        is_whole = view.numel * view.itemsize >= cell.numel * cell.itemsize
        try:
            if step.number in self.installed and view is step.outputs[0]:
                label: Label | None = self.installed[step.number]
            else:
                label = self._replayed(step, step.outputs.index(view), view)
        except Unreadable as error:
            return _Unknown(str(error))
        except Exception as error:  # what labels cannot follow is unknown, and said
            return _Unknown(f"{step.op} ({type(error).__name__}: {str(error)[:80]})")
        if isinstance(before, _Unknown) and not is_whole:
            return before
        if isinstance(before, _Written) and not is_whole:
            return self._written_over(before, label, cell, view)
        return None if label is None else _Written(label, geometry(view))

    @staticmethod
    def _written_over(before: _Written, label: Label | None, cell: Cell, view: View) -> _Written:
        """Write into a part of what has labels already."""
        planes = []
        for old, new in (
            (before.label.features, None if label is None else label.features),
            (before.label.tokens, None if label is None else label.tokens),
        ):
            flat = written_out(old, before.geometry, cell.numel)
            part = flat.as_strided(view.shape, view.stride, view.offset)
            part.copy_(torch.zeros((), dtype=torch.int64) if new is None else new)
            planes.append(flat)
        flags = before.label.flags | (frozenset() if label is None else label.flags)
        whole = Geometry((cell.numel,), (1,), 0)
        return _Written(Label(planes[0], planes[1], flags), whole)

    # rules

    def _replayed(self, step: Step, place: int, out: View) -> Label | None:
        if step.op in EMPTY:
            return None
        product = self.products.of(step)
        if product is not None and not (product.sizes and self._is_weighing(product)):
            return (
                self._convolved(step, product, out)
                if "filter" in product.kind
                else self._multiplied(step, product, out)
            )
        if step.op in QUANTISATIONS:
            return self.read(step.inputs[0]) if place == 0 else None
        labels = [self.read(view) if view.cell.kind != WEIGHT else None for view in step.inputs]
        if all(one is None for one in labels):
            return None
        if step.op in MOVES:
            return self._moved(step, place, out, labels)
        if step.op in NORMS:
            width = (
                math.prod(step.argument("normalized_shape", ()))
                if step.op in {"native_layer_norm", "layer_norm"}
                else 1
            )
            flags = (NORMED, f"{CENTRED}{width}") if width > 1 else (NORMED,)
            return labels[0].flagged(*flags) if place == 0 and labels[0] is not None else None
        if step.op in {*SOFTMAXES, "_log_softmax"}:
            return labels[0].flagged(NONLINEAR + step.op) if place == 0 and labels[0] is not None else None
        if step.op in REDUCTIONS:
            return self._reduced(step, labels[0], out) if labels[0] is not None else None
        if step.op in RESAMPLINGS:
            return self._resampled(labels[0], out) if place == 0 and labels[0] is not None else None
        if step.is_pointwise or step.op in POINTWISE or step.op in LINEAR:
            return self._pointwise(step, place, out, labels)
        raise Unreadable(step.op)

    def _is_weighing(self, product: Product) -> bool:
        """Say whether a product that is written as a sum is a mean with weights, and not one of queries and keys."""
        labels = [self.read(view) for view in (product.first, product.second)]
        return any(one is None or one.is_activated for one in labels)

    def union(self, one: Label | None, other: Label | None) -> Label | None:
        """Put together the labels of what is added, or otherwise combined element by element."""
        if one is None or other is None:
            return one or other
        features, is_norm = self._union_of_features(one, other)
        flags = one.flags | other.flags
        if is_norm is not None:
            flags = is_norm.flags | {NORMED}
        return Label(features, self._union_of_tokens(one, other), flags)

    def _union_of_features(self, one: Label, other: Label) -> tuple[Tensor, Label | None]:
        shape = one.features.shape
        first, second = _small_together(one.features, other.features)
        features = torch.where(first == 0, second, first)
        apart = (first != second) & (first != 0) & (second != 0)
        statistic_of = None
        if bool(apart.any()):
            left, at_left = torch.unique(first[apart], return_inverse=True)
            right, at_right = torch.unique(second[apart], return_inverse=True)
            count = right.numel()
            pairs, back = torch.unique(at_left * count + at_right, return_inverse=True)
            numbers, are_statistics = [], True
            for one_number, other_number in zip(left[pairs // count].tolist(), right[pairs % count].tolist()):
                number, is_statistic = self._joined(one_number, other_number)
                numbers.append(number)
                are_statistics &= is_statistic
            features = features.masked_scatter(apart, torch.tensor(numbers)[back])
            if are_statistics:  # a norm, written out
                statistic_of = other if self.is_statistic(int(first[apart][0])) else one
        return features.expand(shape), statistic_of

    def _joined(self, one: int, other: int) -> tuple[int, bool]:
        """Join two numbers; a feature and a norm over it are that feature."""
        first, second = self.members(one), self.members(other)
        if self.is_statistic(other) and first <= second and not (self.is_statistic(one) and first == second):
            return one, True
        if self.is_statistic(one) and second <= first:
            return other, True
        return self.number(first | second), False

    def _union_of_tokens(self, one: Label, other: Label) -> Tensor:
        """Tokens that differ are several, if the features are of one parameter; else, of positions say, the first's."""
        shape = one.tokens.shape
        first, second = _small_together(one.tokens, other.tokens)
        tokens = torch.where((first == NOTHING) | ((first == SEVERAL) & (second > 0)), second, first)
        differ = (first > 0) & (second > 0) & (first != second)
        if not bool(differ.any()):
            return tokens.expand(shape)
        of_first, of_second = self.owners(one.features), self.owners(other.features)
        if len(of_first) == len(of_second) == 1:
            return (tokens.masked_fill(differ, SEVERAL) if of_first == of_second else tokens).expand(shape)
        alike = self._main_owner(one.features.expand(shape)) == self._main_owner(other.features.expand(shape))
        return torch.where(differ.expand(shape) & alike, SEVERAL, tokens.expand(shape))

    def _main_owner(self, features: Tensor) -> Tensor:
        unique, back = torch.unique(small(features), return_inverse=True)
        owners = [self.owner(max(self.members(one), default=0)) for one in unique.tolist()]
        return torch.tensor(owners, dtype=torch.int64)[back].expand(features.shape)

    def _pointwise(self, step: Step, place: int, out: View, labels: list[Label | None]) -> Label | None:
        if step.op == "native_dropout" and place:
            return None
        if step.op == "copy":  # what was there is gone
            labels = labels[1:]
        wide = [one.expanded(out.shape) for one in labels if one is not None]
        gates = [one for one in wide if one.is_activated and not self._has_statistics(one)]
        if step.op == "mul" and 0 < len(gates) < len(wide):
            wide = [one.flagged(GATED) for one in wide if one not in gates]
        if step.op == "complex" and len({frozenset(self.owners(one.features)) for one in wide}) > 1:
            raise Unreadable("complex numbers, of which two maps make the parts")
        result: Label | None = None
        for one in wide:
            result = self.union(result, one)
        if result is None:
            return None
        if step.op in {"mul", "div"} and NORMED not in result.flags and any(_is_gain(view) for view in step.inputs):
            result = result.flagged(GAINED)
        if step.op == "sub" and len(wide) == 2 and self._has_statistics(wide[1]):
            statistic = next(one for one in small(wide[1].features).unique().tolist() if self.is_statistic(one))
            return result.flagged(f"{CENTRED}{len(self.members(statistic))}")
        if step.op in {"mul", "div"} and len(wide) == 2 and NORMED not in result.flags:
            result = result if same(wide[0].features, wide[1].features) else result.flagged(TIMES)
        is_plain = step.op in LINEAR or self._has_statistics(result)
        return result if is_plain else result.flagged(NONLINEAR + step.op)

    def _has_statistics(self, label: Label) -> bool:
        return any(self.is_statistic(one) for one in small(label.features).unique().tolist())

    def _moved(self, step: Step, place: int, out: View, labels: list[Label | None]) -> Label:
        known = {id(view): label for view, label in zip(step.inputs, labels)}
        flags = frozenset().union(*(one.flags for one in labels if one is not None))
        planes = []
        for name in ("features", "tokens"):
            kept = [getattr(one, name) for one in labels if one is not None]
            narrow = _untouched(step, kept, out)

            def plane(view: View, name: str = name, narrow: tuple[int, ...] = narrow) -> Tensor:
                if not view.is_float:
                    return _index(view, step)
                label = known.get(id(view))
                found = torch.zeros((), dtype=torch.int64).expand(view.shape) if label is None else getattr(label, name)
                for dim in narrow:
                    found = found.narrow(dim, 0, 1)
                return found.double().contiguous()

            planes.append(thin(run_on(step, place, plane)).expand(out.shape))
        return Label(planes[0], planes[1], flags)

    def _reduced(self, step: Step, label: Label, out: View) -> Label:
        if step.op in CUMULATIVE:
            if not repeats(label.features, int(step.args[1]) % label.features.dim()):
                raise Unreadable(f"features are summed up by {step.op}")
            return label
        dims = reduced_dims(step)
        features = self.joined(_last(label.features, dims))
        tokens = only_one(_last(label.tokens, dims))
        return Label(reshaped(features, out.shape), reshaped(tokens, out.shape), label.flags)

    def joined(self, features: Tensor) -> Tensor:
        """Join the features along the last dimension: statistics of them, where they differ."""
        short = small(features)
        shape = features.shape[:-1]
        if short.shape[-1] == 1:
            return short[..., 0].expand(shape)
        first = short[..., 0].clone()
        apart = (short != first[..., None]).any(-1)
        if bool(apart.any()):
            unique, back = unique_rows(short[apart])
            numbers = [self.number(self.all_members(row), statistic=True) for row in unique.tolist()]
            first[apart] = torch.tensor(numbers, dtype=torch.int64)[back]
        return first.expand(shape)

    def all_members(self, row: Iterable[int]) -> frozenset[int]:
        """Give all features of some numbers."""
        return frozenset().union(*(self.members(one) for one in set(row)))

    @staticmethod
    def _resampled(label: Label, out: View) -> Label:
        """Features stay; tokens are new, whatever is between them."""
        before = label.features.shape
        channels = 2 if len(out.shape) > 2 and tuple(out.shape[:2]) == tuple(before[:2]) else len(out.shape) - 1
        flat = thin(reshaped(label.features, (*before[:channels], -1)))
        kept = flat.gather(-1, (flat != NOTHING).int().argmax(-1, keepdim=True))  # not of padding
        if not bool(((flat == kept) | (flat == NOTHING)).all()):
            raise Unreadable("tokens with different features are pooled together")
        kept = kept[..., 0]
        features = reshaped(kept, (*kept.shape, *[1] * (len(out.shape) - kept.dim()))).expand(out.shape)
        return Label(features, _new_tokens(out.shape, channels), label.flags | {RESAMPLED})

    # products

    def _multiplied(self, step: Step, product: Product, out: View) -> Label | None:
        if product.kind == "weight":
            label: Label | None = self._through_weight(step, product)
        elif product.kind == "constant":
            label = self._through_constant(product)
        else:
            label = self._scores(step, product)
        if label is None:
            return None
        features, tokens = (product.placed(plane, out) for plane in (label.features, label.tokens))
        return Label(features, tokens, label.flags)

    def _through_weight(self, step: Step, product: Product) -> Label:
        x, weight = product.first, product.second
        shape = n, rows, _ = product.shape
        if step.number in self.deep and (label := self.read(x)) is not None:
            features = self.plain(self.joined(label.features))[..., None].expand(shape)
            tokens = small(label.tokens).amin(-1, keepdim=True).expand(shape)
            return Label(features, tokens, label.flags | {SHARED})
        features = self.products.features(weight)
        self._note(step, product, features)
        is_shared = weight.shape[0] == 1 or weight.stride[0] == 0
        tokens = torch.arange(n * rows if is_shared else rows).reshape(-1, rows, 1) + 1
        return Label(features[:, None, :].expand(shape), tokens.expand(shape))

    def _note(self, step: Step, product: Product, features: Tensor) -> None:
        for owner in self.products.owners(features):
            self.products_of.setdefault(owner, {})[step.number] = product
            if product.first.cell.kind == DATA:
                self.moving.add(owner)

    def _through_constant(self, product: Product) -> Label | None:
        first, second = self.read(product.first), self.read(product.second)
        if first is not None:
            features, tokens, flags = (
                self.joined(first.features)[..., None],
                only_one(first.tokens)[..., None],
                first.flags,
            )
        elif second is not None:
            features, tokens = self.joined(second.features.mT)[:, None], only_one(second.tokens.mT)[:, None]
            flags = second.flags
        else:
            return None
        return Label(self.plain(features.expand(product.shape)), tokens.expand(product.shape), flags | {WEIGHED})

    def _scores(self, step: Step, product: Product) -> Label:
        n, rows, _ = product.shape
        source = self.new_source("scores", n * rows, step, product.shape)
        features = (torch.arange(n * rows) + source.start).reshape(n, rows, 1).expand(product.shape)
        tokens = (torch.arange(product.shape[2]) + 1).expand(product.shape)
        return Label(features, tokens)

    def plain(self, features: Tensor) -> Tensor:
        """Let sets be no statistics any more."""
        unique, back = torch.unique(small(features), return_inverse=True)
        numbers = [self.number(self.members(one)) if one < -1 else one for one in unique.tolist()]
        return torch.tensor(numbers, dtype=torch.int64)[back].expand(features.shape)

    def _convolved(self, step: Step, product: Product, out: View) -> Label:
        x, weight = product.first, product.second
        if product.kind != "filter":
            raise Unreadable("a convolution with filters that are computed")
        if _is_depthwise(step, product) and out.shape[1] == x.shape[1]:
            label = self.read(x)
            if label is not None:
                return self._resampled(label, out)
        features = self.products.features(filter_features(step, weight))[0]
        self._note(step, product, features)
        wide = features.reshape(1, -1, *[1] * (len(out.shape) - 2)).expand(out.shape)
        flags = {FILTERED} if math.prod(weight.shape[2:]) > 1 else set()
        flags |= {GROUPED} if step.argument("groups", 1) > 1 else set()
        return Label(wide, _new_tokens(out.shape, 2), frozenset(flags))


# what operations do, by name


def _is_gain(view: View) -> bool:
    """Say whether a tensor is a parameter, or made of some, with more than one element."""
    return view.cell.kind in {WEIGHT, MADE} and view.cell.is_mapped and view.numel > 1


def _index(view: View, step: Step) -> Tensor:
    if view.value is not None:
        return view.value.cpu()
    if step.op in INDEXED:
        raise Unreadable(f"{step.op} with an index that has no values here (meta)")
    return torch.zeros(view.shape, dtype=torch.int64)


def _untouched(step: Step, planes: list[Tensor], out: View) -> tuple[int, ...]:
    """List dims that an operation leaves as they are, and along which all that it moves repeats."""
    moved: set[int] | None = None
    dims = len(out.shape)
    if step.op in {"cat", "roll", "flip"}:
        given = step.args[2 if step.op == "roll" else 1] if len(step.args) > (2 if step.op == "roll" else 1) else 0
        moved = {one % dims for one in (given if isinstance(given, tuple) else (given,))} if given != () else None
    elif step.op == "constant_pad_nd":
        moved = {dims - 1 - i // 2 for i, one in enumerate(step.args[1]) if one}
    views = [one for one in step.inputs if one.is_float]
    if moved is None or any(len(one.shape) != dims for one in views):
        return ()
    return tuple(
        d for d in range(dims) if d not in moved and all(one.shape[d] > 1 and one.stride(d) == 0 for one in planes)
    )


def _last(plane: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Put some dims together, in the last place."""
    moved = plane.movedim(dims, tuple(range(-len(dims), 0)))
    kept = moved.shape[: -len(dims)]
    for dim in range(-len(dims), 0):
        if moved.stride(dim) == 0 and moved.shape[dim] > 1:
            moved = moved.narrow(dim, 0, 1)
    return reshaped(moved, (*kept, moved.shape[-len(dims) :].numel()))


def only_one(tokens: Tensor) -> Tensor:
    """Give the token along the last dimension, if there is only one."""
    short = small(tokens)
    first = short[..., 0]
    return torch.where((short == first[..., None]).all(-1), first, SEVERAL).expand(tokens.shape[:-1])


def _small_together(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Leave one of what repeats in both."""
    for dim, size in enumerate(one.shape):
        if size > 1 and one.stride(dim) == other.stride(dim) == 0:
            one, other = one.narrow(dim, 0, 1), other.narrow(dim, 0, 1)
    return one, other


def _new_tokens(shape: tuple[int, ...], channels: int) -> Tensor:
    """Number places: sequences times what follows the channels."""
    inner = math.prod(shape[channels:])
    places = torch.arange(inner).reshape(*[1] * channels, *shape[channels:])
    batch = torch.arange(shape[0]).reshape(-1, *[1] * (len(shape) - 1)) * inner
    return (places + batch + 1).expand(shape)


def _is_depthwise(step: Step, product: Product) -> bool:
    groups = step.argument("groups", 1)
    return isinstance(groups, int) and groups > 1 and groups == product.first.shape[1]


def filter_features(step: Step, weight: View) -> View:
    """Let the filters of a convolution be a matrix ``(1, what each takes, filters)``."""
    along = 1 if step.argument("transposed", default=False) else 0
    count = weight.shape[along]
    shape = (1, weight.numel // count, count)
    return weight.seen_as(shape, (0, 1, weight.stride[along]))
