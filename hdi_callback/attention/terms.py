"""From maps to weights: a head's weight as a sum of products of rows of parameters.

A plain or packed projection is one map. A low rank, as latent attention has it, is a map of each head times one that
all heads share, and LoRA a second term beside a base.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hdi_callback.attention.heads import Projection, column_numbers
from hdi_callback.attention.labels import Labels, Unreadable
from hdi_callback.attention.layer import HeadWeight, Rows, Term, owner_of
from hdi_callback.attention.operations import BETWEEN, KEEPS, NORMS
from hdi_callback.attention.planes import small
from hdi_callback.attention.products import Product
from hdi_callback.attention.tape import DATA, WEIGHT, Cell, Step, Tape, View

__all__ = ["Weights", "origin"]

_FAR = 40  # steps between two maps


@dataclass(frozen=True, eq=False)
class _Inner:
    """A map in front of another."""

    map: Projection
    input: View
    gain: str
    scale: float
    centred: str


class Weights:
    """Make the weights of heads of the maps that were read.

    Args:
        labels: of the tape.
        behind: parameters of output projections, with which a layer before ends.
    """

    def __init__(self, labels: Labels, behind: set[int]) -> None:
        self._labels, self._model = labels, labels.tape.model
        self._behind = behind

    def of(
        self, maps: Sequence[Projection], role: str, shared: frozenset[object], path: str, centred: str = ""
    ) -> HeadWeight:
        """Give the weight of a role that one map makes, or several that are summed.

        Args:
            maps: the maps.
            role: in words.
            shared: what queries, keys and values all take; maps in front of it are not of this attention.
            path: the module in which maps in front may lie.
            centred: whether a norm behind takes away the mean of the rows: of a ``"head"``, or of ``"all"``.

        Returns:
            The weight.

        Raises:
            Unreadable: if it is computed otherwise.
        """
        if len(maps) == 1:
            return HeadWeight((self._product(maps[0], shared, path, centred),))
        common = frozenset.intersection(*(self.inputs(one, far=True) for one in maps))
        if not common:
            raise Unreadable(f"its {role} is a sum of maps of several inputs")
        terms = []
        for one in maps:
            term = self._product(one, common, "", centred)
            scale = self._scale_behind(next(iter(self._labels.products_of[one.owners[0]])))
            terms.append(replace(term, scale=term.scale * scale))
        return HeadWeight(tuple(terms))

    def output(self, outputs: Sequence[tuple[Step, Projection]]) -> tuple[HeadWeight, Projection]:
        """Give the weight behind the heads, and the map that is its base: others may update what that gives, as LoRA.

        Raises:
            Unreadable: if there is none, or an update that is no sum of products.
        """  # noqa: DOC201
        chosen: tuple[list[Term], Projection] | None = None
        for step, base in outputs:
            updates = [self._update(step, *other) for other in outputs if other[1] is not base]
            terms = [Term((self._rows(base),)), *(one for one in updates if one is not None)]
            if chosen is None or len(terms) > len(chosen[0]):
                chosen = terms, base
        if chosen is None:
            raise Unreadable("")
        return HeadWeight(tuple(chosen[0])), chosen[1]

    def _update(self, base: Step, step: Step, one: Projection) -> Term | None:
        """Follow what a map of the heads gives, perhaps through a second map, to a sum with what a base gives."""
        factors, scale, out = [self._rows(one)], 1.0, step.outputs[0]
        for _ in range(_FAR):
            user = next((user for user in out.cell.users if user.number > step.number), None) if out else None
            product = None if user is None else self._labels.products.of(user)
            if user is None or out is None:
                return None
            if product is not None:
                if product.kind != "weight" or product.first.cell is not out.cell or len(factors) > 1:
                    return None
                factors.append(self._rows_of(product))
            elif user.op in {"add", "sub"} and len(user.inputs) > 1:
                other = next(view for view in user.inputs if view.cell is not out.cell)
                is_second = user.inputs[1].cell is out.cell
                sign = float(user.argument("alpha", 1)) * (-1 if user.op == "sub" else 1) if is_second else 1.0
                return Term(tuple(factors), scale * sign) if self._is_given_by(other.cell, base) else None
            elif user.op in {"mul", "div"} and not _keeps(user):
                scale *= _number(user)
            elif not _keeps(user):
                return None
            out = user.outputs[0]
        return None

    def _rows_of(self, product: Product) -> Rows:
        """Give the rows of a second map, which all heads share."""
        found = column_numbers(self._labels, product.second)
        owner = self._labels.products.parameter_of(product.second)
        if found is None or len(found[0]) > 1 or owner < 0:
            raise Unreadable(", of which an update is computed otherwise")
        (starts,), stride = found
        names = (self._labels.tape.names[owner],)
        return self._rows(Projection(names, (owner,), torch.tensor([starts]), stride, product.second.shape[-1]))

    def _is_given_by(self, cell: Cell, base: Step) -> bool:
        """Say whether a tensor is what a product gave, perhaps with other updates added."""
        todo = [cell]
        for _ in range(_FAR):
            step = todo.pop().step if todo else None
            if step is base:
                return True
            if step is not None and (_keeps(step) or step.op in {"add", "sub"}):
                todo += [view.cell for view in step.inputs if view.is_float]
        return False

    def inputs(self, one: Projection, *, far: bool = False) -> frozenset[object]:
        """Say what a map takes, and what the maps in front of it take."""
        given: set[object] = set()
        for owner in set(one.owners):
            taken = self._taken(owner)
            given.add(origin(taken))
            for _ in range(3 if far else 0):
                inner = self._in_front(taken)
                if inner is None:
                    break
                taken = inner.input
                given.add(origin(taken))
        return frozenset(given)

    def _product(self, one: Projection, shared: frozenset[object], path: str, centred: str) -> Term:
        """Put a map together with those in front of it, up to what is shared."""
        factors, scale, gain, means = [one], 1.0, [""], [centred]
        while not self.inputs(factors[-1]) <= shared and len(factors) < 4:
            inner = self._all_in_front(factors[-1], path)
            if inner is None:
                break
            gain[-1], scale = inner.gain, scale * inner.scale
            factors.append(inner.map)
            gain.append("")
            means.append(inner.centred)
        return Term(tuple(self._rows(*each) for each in zip(factors, gain, means)), scale)

    def _rows(self, one: Projection, gain: str = "", centred: str = "") -> Rows:
        labels = self._labels
        recipes = {name: labels.tape.recipes[name] for name in one.names if name in labels.tape.recipes}
        for recipe in recipes.values():
            if isinstance(recipe, str):
                raise Unreadable(recipe)
        first = torch.tensor([labels.tape.first[owner] for owner in one.owners])
        starts, stride = one.starts - first[:, None], one.stride
        for name in one.names:
            if isinstance(owner_of(self._model, name)[0], torch.jit.ScriptModule):
                raise Unreadable("it is a module of torch.jit")
        if one.names[0] in labels.tape.local:
            starts, stride = _in_the_whole(labels.tape, one.names[0], starts, stride)
        return Rows(self._model, one.names, starts, one.count, stride, gain, centred, recipes)

    # maps in front of maps

    def _all_in_front(self, one: Projection, path: str) -> _Inner | None:
        """Find the map in front of all heads' maps."""
        inner = {owner: self._in_front(self._taken(owner)) for owner in dict.fromkeys(one.owners)}
        found = [inner[owner] for owner in one.owners]
        if any(each is None or (path and not each.map.names[0].startswith(f"{path}.")) for each in found):
            return None
        known = [each for each in found if each is not None]
        if len(inner) == 1:
            return known[0]
        if len({(each.map.count, each.map.stride, each.gain, each.scale) for each in known}) > 1:
            return None
        starts = torch.cat([each.map.starts for each in known])
        owners, names = (tuple(one[0] for one in each) for each in zip(*((k.map.owners, k.map.names) for k in known)))
        names = names[:1] if len(set(names)) == 1 else names
        return replace(known[0], map=replace(known[0].map, names=names, starts=starts, owners=owners))

    def _in_front(self, taken: View) -> _Inner | None:
        """Find the map whose output a tensor is, up to a norm, a gain and a number."""
        steps = _path_to_product(self._labels, taken.cell)
        if steps is None:
            return None
        product, between = steps
        if product.kind == "weight" and 0 not in (product.first.stride[0], product.second.stride[0]):
            return None  # blocks of features, each with a map of its own
        try:
            label = self._labels.read(taken)
            scale, gain = _scale_of(between), _gain_of(between, taken.shape[-1])
            centred = "head" if any(step.op in {"native_layer_norm", "sub"} for step in between) else ""
        except Unreadable:
            return None
        if label is None:
            return None
        rows = small(label.features.flatten(0, -2) if label.features.dim() > 1 else label.features[None])
        row = rows[0].tolist() if len(rows) == 1 or bool((rows == rows[:1]).all()) else []
        owner = self._labels.owner(row[0]) if row else -1
        if owner in self._behind or owner not in self._labels.products.stride:
            return None
        if (
            len(row) != taken.shape[-1]
            or len(set(row)) < len(row)
            or {self._labels.owner(one) for one in row} != {owner}
        ):
            return None
        stride, count = self._labels.products.stride[owner]
        names = (self._labels.tape.names[owner],)
        return _Inner(
            Projection(names, (owner,), torch.tensor([row]), stride, count), product.first, gain, scale, centred
        )

    def _taken(self, owner: int) -> View:
        return next(iter(self._labels.products_of[owner].values())).first

    def _scale_behind(self, number: int) -> float:
        """Give the numbers that what a map gives is multiplied with, before it is added to something."""
        step = self._labels.tape.steps[number]
        scale, cell = 1.0, step.outputs[0].cell if step.outputs[0] is not None else None
        for _ in range(_FAR):
            users = [one for one in cell.users if one.number > step.number] if cell is not None else []
            user = next((one for one in users if one.op in KEEPS | {"mul", "div", "add", "sub"}), None)
            if user is None or user.outputs[0] is None:
                return scale
            mine = next(at for at, view in enumerate(user.inputs) if view.cell is cell)
            data = [view for view in user.inputs if view.cell.kind == DATA and view.is_float]
            if user.op in {"add", "sub"} and (len(data) > 1):
                if mine == 1:
                    scale *= float(user.argument("alpha", 1)) * (-1 if user.op == "sub" else 1)
                return scale
            if user.op in {"mul", "div"}:
                if _gain_of([user], user.outputs[0].shape[-1]):
                    raise Unreadable("what a map gives is multiplied with something that is no plain number")
                scale *= _number(user)
            cell, step = user.outputs[0].cell, user
        return scale


def _in_the_whole(tape: Tape, name: str, starts: Tensor, stride: int) -> tuple[Tensor, int]:
    """Number elements of this rank's part among those of the whole parameter."""
    (shape, begin), whole = tape.local[name], tape.shapes[name]
    if shape == whole:
        return starts, stride
    at, number, step = starts, torch.zeros_like(starts), 1
    strides: dict[int, tuple[int, int]] = {}
    for size, full, first in zip(reversed(shape), reversed(whole), reversed(begin)):
        strides[len(strides)] = int(math.prod(shape[len(shape) - len(strides) :])), step
        number = number + (at % size + first) * step
        at, step = at // size, step * full
    return number, dict(strides.values())[stride]


def origin(view: View) -> object:
    """Name a tensor, whatever copies and dropout lie between it and who takes it."""
    cell = view.cell
    offset, numel = view.offset, view.numel
    while cell.step is not None and _keeps(cell.step) and cell.before is None and cell.written is not None:
        inner = next((one for one in cell.step.inputs if one.is_float and one.numel == cell.written.numel), None)
        if inner is None or numel != cell.written.numel:
            break
        cell, offset, numel = inner.cell, inner.offset, inner.numel
    return id(cell), offset, numel


def _keeps(step: Step) -> bool:
    """Say whether an operation leaves features as they are: a copy, or dropout."""
    writers = (one for view in step.inputs for one in view.cell.writers())
    return step.op in KEEPS or (step.op == "mul" and any(one.op == "bernoulli" for one in writers))


def _path_to_product(labels: Labels, cell: Cell) -> tuple[Product, list[Step]] | None:
    """Walk back to the only product with a parameter that a tensor comes from, through norms and the like."""
    found: Product | None = None
    todo, seen = [cell], set[int]()
    between: list[Step] = []
    while todo:
        one = todo.pop()
        step = one.step
        if id(one) in seen:
            continue
        seen.add(id(one))
        if step is None or len(between) > _FAR:
            return None
        product = labels.products.of(step)
        if product is not None and product.kind in {"weight", "filter"}:
            is_filter = product.kind == "filter" and math.prod(product.second.shape[2:]) > 1
            if is_filter or (found is not None and found is not product):
                return None
            found = product
            continue
        if product is not None or step.op not in BETWEEN:
            return None
        between.append(step)
        todo += [view.cell for view in step.inputs if view.is_float and view.cell.kind == DATA]
        if one.before is not None and step.op not in {"mul", "div", "add", "native_dropout"}:
            return None
    return None if found is None else (found, between)


def _is_norm(steps: Sequence[Step]) -> bool:
    return any(step.op in NORMS or step.op in {"rsqrt", "linalg_vector_norm", "sqrt"} for step in steps)


def _scale_of(steps: Sequence[Step]) -> float:
    """Give the number that is multiplied with between two maps; behind a norm it has none."""
    if _is_norm(steps):
        return 1.0
    return math.prod(_number(step) for step in steps if step.op in {"mul", "div"} and not _keeps(step))


def _gain_of(steps: Sequence[Step], width: int) -> str:
    """Name the vector that features are multiplied with between two maps."""
    for step in steps:
        given = [step.argument("weight")] if step.op in NORMS else step.inputs if step.op == "mul" else []
        for view in given:
            if isinstance(view, View) and view.cell.kind == WEIGHT and view.numel == width and view.cell.parameter:
                return view.cell.parameter
    return ""


def _number(step: Step) -> float:
    """Give the number that an operation multiplies with, or divides by."""
    others = [one for one in step.args[:2] if not (isinstance(one, View) and one.cell.kind == DATA)]
    if len(others) != 1 or (isinstance(others[0], View) and (others[0].value is None or others[0].numel > 1)):
        if others and isinstance(others[0], View) and others[0].cell.kind == WEIGHT and others[0].numel > 1:
            return 1.0  # a gain
        raise Unreadable("what a map gives is multiplied with something that is no plain number")
    other = others[0].value if isinstance(others[0], View) else others[0]
    number = float(other)  # type: ignore[arg-type]
    return 1 / number if step.op == "div" else number
