"""From maps to weights: a head's weight as a sum of products of rows of parameters.

A plain or packed projection is one map. A low rank, as latent attention has it, is a map of each head times one that
all heads share, and LoRA a second term beside a base.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from hdi_callback.attention.discovery.heads import Projection
from hdi_callback.attention.discovery.labels import Labels
from hdi_callback.attention.discovery.planes import small
from hdi_callback.attention.discovery.products import Product, Unreadable
from hdi_callback.attention.layer import HeadWeight, Term, WeightRows, owner_of
from hdi_callback.attention.operations import BETWEEN, KEEPS, NORMS
from hdi_callback.attention.tape import DATA, WEIGHT, Cell, Step, Tape, View, walk_back

_MOST_STEPS_BETWEEN_MAPS = 40


@dataclass(frozen=True, eq=False)
class _Inner:
    """The inner factor of a low-rank projection."""

    projection: Projection
    input: View
    gain: str
    scale: float


class Weights:
    """Makes the weights of heads of the projections that were read."""

    def __init__(self, labels: Labels, of_outputs: set[str]) -> None:
        self._labels, self._model = labels, labels.tape.model
        self._of_outputs = of_outputs  # parameters of output projections, with which a layer before ends

    def of(self, maps: Sequence[Projection], role: str, shared: frozenset[object], path: str) -> HeadWeight:
        """Return the sum of projections, each with those before it up to what is `shared`, within the module `path`."""
        if len(maps) == 1:
            return HeadWeight((self._term(maps[0], shared, path),))
        common = frozenset.intersection(*(self.inputs(projection, far=True) for projection in maps))
        if not common:
            raise Unreadable(f"its {role} is a sum of maps of several inputs, or of one that is not followed")
        terms = []
        for projection in maps:
            term = self._term(projection, common, "")
            first = self._labels.tape.steps[next(iter(self._labels.products_of[projection.names[0]]))]
            _, scale, _ = self._to_sum(first)
            terms.append(replace(term, scale=term.scale * scale))
        return HeadWeight(tuple(terms))

    def output(self, outputs: Sequence[tuple[Step, Projection]]) -> tuple[HeadWeight, Projection]:
        """Return the output weight, and the projection that is its base: others may update its output, as LoRA does."""
        weights = []
        for step, base in outputs:
            updates = (self._update(step, *output) for output in outputs if output[1] is not base)
            terms = (Term((self._rows(base),)), *(update for update in updates if update is not None))
            weights.append((HeadWeight(terms), base))
        if not weights:
            raise Unreadable("")
        return max(weights, key=lambda item: len(item[0].terms))

    def _update(self, base: Step, step: Step, projection: Projection) -> Term | None:
        """Return a projection of the heads, perhaps with a second one, as a term if its output is added to a base's."""
        products, scale, summand = self._to_sum(step, is_through=True)
        if summand is None or len(products) > 1 or not self._is_output_of(summand.cell, base):
            return None
        return Term((self._rows(projection), *map(self._rows_of, products)), scale)

    def _rows_of(self, product: Product) -> WeightRows:
        """Return the rows of a second projection, which all heads share."""
        starts, stride = self._labels.products.lines(product.second, 2)
        owner = self._labels.products.parameter_of(product.second)
        if len(starts) > 1 or owner < 0:
            raise Unreadable("an update of it is computed otherwise")
        return self._rows(Projection((self._labels.tape.names[owner],), starts, stride, product.second.shape[-1]))

    def _is_output_of(self, cell: Cell, base: Step) -> bool:
        """Whether a tensor is the output of a product, perhaps with other updates added."""

        def summands(cell: Cell) -> list[Cell]:
            is_sum = cell.step is not None and (_keeps(cell.step) or cell.step.op in {"add", "sub"})
            return [view.cell for view in cell.step.inputs if view.is_float] if is_sum and cell.step else []

        return any(cell.step is base for cell in islice(walk_back([cell], summands), _MOST_STEPS_BETWEEN_MAPS))

    def _to_sum(self, step: Step, *, is_through: bool = False) -> tuple[list[Product], float, View | None]:
        """Return maps before the next sum (`is_through`), the factor of a projection in it, and what is beside it."""
        products, scale, out = list[Product](), 1.0, step.output
        for _ in range(_MOST_STEPS_BETWEEN_MAPS):
            users = (user for user in out.cell.users if user.number > step.number)
            user = next((user for user in users if self._goes_on(user, out, is_through=is_through)), None)
            if user is None:
                break
            product = self._labels.products.of(user)
            summands = [view for view in user.inputs if view.cell.kind == DATA and view.is_float]
            if product is not None:
                products.append(product)
            elif user.op in {"add", "sub"} and len(summands) > 1:
                if user.inputs[1].cell is out.cell:
                    scale *= float(user.argument("alpha", 1)) * (-1 if user.op == "sub" else 1)
                return products, scale, next((view for view in summands if view.cell is not out.cell), None)
            elif user.op in {"mul", "div"} and not _keeps(user):
                if _gain_of([user], user.output.shape[-1]):
                    raise Unreadable("what a map gives is multiplied with something that is no plain number")
                scale *= _number(user)
            step, out = user, user.output
        return products, scale, None

    def _goes_on(self, user: Step, out: View, *, is_through: bool) -> bool:
        product = self._labels.products.of(user) if is_through else None
        is_second_map = product is not None and product.kind == "weight" and product.first.cell is out.cell
        return is_second_map or user.op in KEEPS | {"mul", "div", "add", "sub"}

    def inputs(self, projection: Projection, *, far: bool = False) -> frozenset[object]:
        """Return what a projection takes, if `far` also what those before it take."""
        inputs: set[object] = set()
        for name in set(projection.names):
            view = self._input(name)
            inputs.add(origin(view))
            for _ in range(3 if far else 0):
                inner = self._before(view)
                if inner is None:
                    break
                view = inner.input
                inputs.add(origin(view))
        return frozenset(inputs)

    def _term(self, projection: Projection, shared: frozenset[object], path: str) -> Term:
        """Return a projection times those before it, up to what is shared."""
        factors, scale, gain = [projection], 1.0, [""]
        while not self.inputs(factors[-1]) <= shared and len(factors) < 4:
            inner = self._before_all(factors[-1], path)
            if inner is None:
                break
            gain[-1], scale = inner.gain, scale * inner.scale
            factors.append(inner.projection)
            gain.append("")
        return Term(tuple(self._rows(*each) for each in zip(factors, gain)), scale)

    def _rows(self, projection: Projection, gain: str = "") -> WeightRows:
        labels = self._labels
        names = projection.names[:1] if len(set(projection.names)) == 1 else projection.names
        recipes = {name: labels.tape.recipes[name] for name in names if name in labels.tape.recipes}
        for recipe in recipes.values():
            if isinstance(recipe, str):
                raise Unreadable(recipe)
        first = torch.tensor([labels.tape.first[labels.tape.places[name]] for name in projection.names])
        starts, stride = projection.starts - first[:, None], projection.stride
        for name in names:
            if isinstance(owner_of(self._model, name)[0], torch.jit.ScriptModule):
                raise Unreadable("it is a module of torch.jit")
        if names[0] in labels.tape.local:
            starts, stride = _in_the_whole(labels.tape, names[0], starts, stride)
        return WeightRows(self._model, names, starts, projection.count, stride, gain, recipes)

    def _before_all(self, projection: Projection, path: str) -> _Inner | None:
        """Return the projection before those of all heads."""
        of_name = {name: self._before(self._input(name)) for name in dict.fromkeys(projection.names)}
        inner = [item for name in projection.names if (item := of_name[name]) is not None]
        items = [item.projection for item in inner]
        is_within = all(item.names[0].startswith(f"{path}.") for item in items) or not path
        if len(inner) < len(projection.names) or not is_within:
            return None
        if len(of_name) == 1:
            return inner[0]
        if len({(item.projection.count, item.projection.stride, item.gain, item.scale) for item in inner}) > 1:
            return None
        starts = torch.cat([item.starts for item in items])
        names = tuple(item.names[0] for item in items)
        return replace(inner[0], projection=replace(items[0], names=names, starts=starts))

    def _before(self, view: View) -> _Inner | None:
        """Return the projection whose output a tensor is, up to a norm, a gain and a number."""
        products, between = set[Product](), list[Step]()
        labels = self._labels
        for cell in walk_back([view.cell], lambda cell: [each for each in labels.needs(cell) if each.kind == DATA]):
            product = labels.products.of(cell.step)
            if product is not None:
                products.add(product)
            elif cell.step is not None and cell.step.op in BETWEEN and len(between) < _MOST_STEPS_BETWEEN_MAPS:
                between.append(cell.step)
            else:
                return None
        if len(products) != 1 or (product := products.pop()).kind not in {"weight", "filter"} or product.taps > 1:
            return None
        if product.kind == "weight" and 0 not in (product.first.stride[0], product.second.stride[0]):
            return None  # blocks of features, each with a map of its own
        try:
            label = labels.read(view)
            # A norm leaves nothing of a number that is multiplied with.
            is_normed = any(step.op in NORMS or step.op in {"rsqrt", "linalg_vector_norm", "sqrt"} for step in between)
            factors = [step for step in between if step.op in {"mul", "div"} and not _keeps(step) and not is_normed]
            scale, gain = math.prod(map(_number, factors)), _gain_of(between, view.shape[-1])
        except Unreadable:
            return None
        if label is None:
            return None
        rows = small(label.features.flatten(0, -2) if label.features.dim() > 1 else label.features[None])
        row = rows[0].tolist() if len(rows) == 1 or bool((rows == rows[:1]).all()) else []
        owner = labels.owner(row[0]) if row else -1
        if owner not in labels.products.stride or labels.tape.names[owner] in self._of_outputs:
            return None
        if not len(set(row)) == len(row) == view.shape[-1] or set(map(labels.owner, row)) != {owner}:
            return None
        stride, count = labels.products.stride[owner]
        inner = Projection((labels.tape.names[owner],), torch.tensor([row]), stride, count)
        return _Inner(inner, product.first, gain, scale)

    def _input(self, name: str) -> View:
        return next(iter(self._labels.products_of[name].values())).first


def _in_the_whole(tape: Tape, name: str, starts: Tensor, stride: int) -> tuple[Tensor, int]:
    """Return the numbers of elements of this rank's part among those of the whole parameter."""
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
    """Return a name of a tensor that copies and dropout do not change."""
    cell = view.cell
    offset, numel = view.offset, view.numel
    while cell.step is not None and _keeps(cell.step) and cell.before is None and cell.written is not None:
        inner = next((view for view in cell.step.inputs if view.is_float and view.numel == cell.written.numel), None)
        if inner is None or numel != cell.written.numel:
            break
        cell, offset, numel = inner.cell, inner.offset, inner.numel
    return id(cell), offset, numel


def _keeps(step: Step) -> bool:
    """Whether an operation leaves features as they are: a copy, or dropout, perhaps by a factor that was drawn."""
    if step.op != "mul":
        return step.op in KEEPS
    written = walk_back([view.cell for view in step.inputs], lambda cell: [cell.before] if cell.before else [])
    return any(cell.step is not None and cell.step.op == "bernoulli" for cell in written)


def _gain_of(steps: Sequence[Step], width: int) -> str:
    """Return the name of the vector that features are multiplied with between two projections, ``""`` if none is."""
    for step in steps:
        factors = [step.argument("weight")] if step.op in NORMS else step.inputs if step.op == "mul" else []
        for view in factors:
            if isinstance(view, View) and view.cell.kind == WEIGHT and view.numel == width and view.cell.parameter:
                return view.cell.parameter
    return ""


def _number(step: Step) -> float:
    """Return the number that an operation multiplies with; of a division its inverse."""
    factors = [item for item in step.args[:2] if not (isinstance(item, View) and item.cell.kind == DATA)]
    factor = factors[0] if factors else None
    if isinstance(factor, View) and factor.cell.kind == WEIGHT and factor.numel > 1:
        return 1.0  # a gain
    if isinstance(factor, View):
        factor = factor.value if factor.numel == 1 else None
    if len(factors) != 1 or factor is None:
        raise Unreadable("what a map gives is multiplied with something that is no plain number")
    return 1 / float(factor) if step.op == "div" else float(factor)
