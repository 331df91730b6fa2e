"""What makes weights of scores but torch's softmax: one that is written out, entmax, sparsemax, a ReLU over its sum.

It is known by what it does and not by a name: while a forward runs, what it makes of a product of queries and keys is
looked at. Rows that add up to one, and are not negative, are weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from hdi_callback.attention import operations as ops

if TYPE_CHECKING:
    from hdi_callback.attention.tape import Cell, Step, View

_MOST_PRODUCTS = 4  # of queries and keys that are followed at the same time
_KEEPS_PLACES = ops.COPIES | ops.DROPOUTS | {"tril", "triu"}  # besides what torch calls pointwise


@dataclass(frozen=True, eq=False)
class Normaliser:
    """How a step made weights of scores."""

    start: Step  # the product of queries and keys
    scores: View  # what the weights are made of
    dim: int  # over which they add up to one
    name: str  # of the function, in words
    is_causal: bool  # whether keys after a query have no weight


@dataclass(eq=False)
class _Product:
    """A product of batches, and what was made of it."""

    step: Step
    # It, and what scales, shifts and masks it: the tensor, how often that was written into, and its first matrix.
    scores: list[tuple[View, Tensor, int, Tensor]] = field(default_factory=list)
    is_past_scores: bool = False
    weights: Step | None = None  # the last step that made weights

    def add_scores(self, view: View, tensor: Tensor) -> None:
        version = -1 if tensor.is_inference() else tensor._version
        self.scores.append((view, tensor, version, _first_matrix(tensor).clone()))


class Normalisers:
    """Looks at what a forward makes of products of batches, and notes the normaliser on the step of the weights."""

    def __init__(self) -> None:
        self._products: list[_Product] = []
        self._product_of: dict[Cell, _Product | None] = {}  # of contents made of it; `None` behind a softmax

    def scores_of(self, normaliser: Normaliser) -> Tensor | None:
        """Return the scores of the last weights, `None` if they were written into since."""
        for product in self._products:
            for view, tensor, version, _ in product.scores:
                if view is normaliser.scores and version == (-1 if tensor.is_inference() else tensor._version):
                    return tensor
        return None

    def forget(self) -> None:
        """Release all tensors."""
        self._products, self._product_of = [], {}

    def look(self, step: Step, inputs: Iterable[Tensor], outputs: Iterable[Tensor]) -> None:
        """Look at what a step took and returned."""
        view, tensor = next(zip(step.outputs, outputs), (None, None))
        if view is None or tensor is None or not view.is_float or tensor.is_meta or type(tensor) is not Tensor:
            return
        of_scores = [item for item in zip(step.inputs, inputs) if item[0].cell in self._product_of]
        if not of_scores and step.op not in ops.BATCHED:
            return
        with torch.no_grad(), _disable_current_modes():  # modes of the user's see nothing of it
            products = [self._product_of[each.cell] for each, _ in of_scores]
            if step.op in ops.BATCHED:
                self._begin(step, view, tensor)
            elif step.op not in ops.SHAPED_LIKE | ops.MATMULS.keys():
                product = None if step.op in ops.SOFTMAXES or None in products else products[0]
                self._product_of.update({out.cell: product for out in step.outputs if out is not None})
                alike = [item for item in of_scores if item[0].numel == view.numel and item[0].is_float]
                if product is not None and alike and (step.is_pointwise or step.op in _KEEPS_PLACES):
                    product.is_past_scores |= step.op not in ops.OF_SCORES or len(of_scores) > 1
                    self._follow(product, step, *alike[0], tensor)

    def _begin(self, step: Step, view: View, tensor: Tensor) -> None:
        product = _Product(step)
        product.add_scores(view, tensor)
        self._products = [*self._products, product][-_MOST_PRODUCTS:]
        self._product_of = {cell: each for cell, each in self._product_of.items() if each in (None, *self._products)}
        self._product_of[view.cell] = product

    def _follow(self, product: _Product, step: Step, view: View, before: Tensor, tensor: Tensor) -> None:
        last = product.scores[-1][0]
        if last.cell is view.cell and last.shape != view.shape:
            product.add_scores(view, before)
        if not product.is_past_scores:
            product.add_scores(step.output, tensor)
        elif step.op not in ops.COPIES | ops.DROPOUTS and (dim := _dim_that_adds_up(tensor)) is not None:
            scores, name = _scores_and_name(product, tensor, dim)
            if scores is None:
                return
            if product.weights is not None:  # some divide once more by the sum
                product.weights.normaliser = None
            product.weights = step
            rows = tensor if dim == -1 else tensor.mT
            is_causal = rows.shape[-2] == rows.shape[-1] > 2 and not bool(rows.triu(1).any())
            step.normaliser = Normaliser(product.step, scores, dim, name, is_causal)
            step.path, step.line, step.padding = product.step.path, product.step.line, product.step.padding


def _first_matrix(x: Tensor) -> Tensor:
    return x.detach()[(0,) * (x.dim() - 2)].float()


def _error(x: Tensor) -> float:
    return 0.02 if x.element_size() < 4 else 1e-3


def _dim_that_adds_up(weights: Tensor) -> int | None:
    """Return the dimension over which weights that differ add up to one, or to nothing where nothing is seen."""
    for dim in range(-1, -weights.dim() - 1, -1) if weights.dim() > 1 else ():
        rows = weights.detach().movedim(dim, -1)
        if all(_adds_up(part, _error(weights)) for part in (_first_matrix(rows), rows.float())):  # the first is small
            return dim
    return None


def _adds_up(weights: Tensor, error: float) -> bool:
    sums = weights.sum(-1)
    is_one = (sums - 1).abs() < error
    differ = (weights != 0) & (weights < weights.amax(-1, keepdim=True) * (1 - 2 * error))
    conditions = ((is_one | (sums.abs() < error) | sums.isnan()).all(), is_one.float().mean() > 0.5,
                  ~(weights < -1e-5).any(), differ.any())  # fmt: skip
    return all(map(bool, conditions))


def _entmax(x: Tensor, order: float) -> Tensor:
    """Entmax by bisection (Peters, Niculae and Martins 2019); of order 2 it is sparsemax."""
    x, power = x * (order - 1), 1 / (order - 1)
    threshold = x.amax(-1, keepdim=True) - 1
    for halvings in range(1, 30):
        is_low = (x - threshold - 0.5**halvings).clamp(min=0).pow(power).sum(-1, keepdim=True) > 1
        threshold = threshold + is_low * 0.5**halvings
    return (x - threshold).clamp(min=0).pow(power)


def _over_its_sum(x: Tensor) -> Tensor:
    return x / x.sum(-1, keepdim=True).clamp_min(1e-9)


SOFTMAX = "softmax"  # written out
_NAMES: dict[str, Callable[[Tensor], Tensor]] = {
    SOFTMAX: lambda x: x.softmax(-1),
    "sparsemax": lambda x: _entmax(x, 2),
    "entmax of order 1.5": lambda x: _entmax(x, 1.5),
    "ReLU over its sum": lambda x: _over_its_sum(x.relu()),
    "squared ReLU over its sum": lambda x: _over_its_sum(x.relu().square()),
    "sigmoid over its sum": lambda x: _over_its_sum(x.sigmoid()),
}


def _scores_and_name(product: _Product, weights: Tensor, dim: int) -> tuple[View | None, str]:
    """Return the scores from which a function that has a name makes the weights; the last ones if it has none."""
    error, first = _error(weights), _first_matrix(weights)
    is_hidden = first == 0  # perhaps by a mask behind the function
    alike = [(view, scores) for view, _, _, scores in reversed(product.scores) if view.shape == tuple(weights.shape)]
    for view, scores in alike if dim >= -2 else ():
        inputs = scores.masked_fill(is_hidden, -1e4).movedim(dim, -1)
        expected = {name: function(inputs).movedim(-1, dim) * ~is_hidden for name, function in _NAMES.items()}
        name = min(expected, key=lambda name: float((expected[name] - first).abs().max()))
        if torch.allclose(expected[name], first, rtol=10 * error, atol=error / weights.shape[dim]):
            return view, name
    return alike[0][0] if alike else None, "weights that add up to one"
