"""Attention cores in the graph of a traced run.

A core is a product of weights and values. The weights come from a softmax, or are not negative and add up to one over
what is averaged, by themselves or together with those of other products (`softmax_parts`); and they are made of scores,
which are a product of two tensors, queries and keys. No name of a module, a parameter or a function is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hdi_callback.attention.trace.graph_walk import made_from, nodes_behind, walk
from hdi_callback.attention.trace.softmax_parts import parts_that_add_up
from hdi_callback.attention.trace.traced_run import TracedRun

# Node of a product -> the names under which it keeps its factors: `left (N, rows, inner) @ right (N, inner, columns)`.
_PRODUCTS = {
    "BmmBackward0": ("self", "mat2"),
    "MmBackward0": ("self", "mat2"),
    "BaddbmmBackward0": ("batch1", "batch2"),
    "AddmmBackward0": ("mat1", "mat2"),
}
_SOFTMAX = ("SoftmaxBackward0", "SafeSoftmaxBackward0", "LogSoftmaxBackward0")
_SUMS_TO_ONE = 1e-3
_ROUNDING = 1e-9  # of a derivative, relative to the largest


@dataclass(frozen=True, eq=False)
class Product:
    """A product of two tensors that are made in the run.

    Attributes:
        node: of the graph.
        left: ``(N, rows, inner)``.
        right: ``(N, columns, inner)``.
        factors: the two as the graph has them.
    """

    node: Any
    left: Tensor
    right: Tensor
    factors: tuple[Tensor, Tensor]

    def acting_on(self, output: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Find the rows of both factors that something depends on.

        Args:
            output: what may be made of the product.
            gradient: the weights of its elements in the combination that is derived.

        Returns:
            Numbers of rows of `left` and `right`, counted over all ``N``.
        """
        found = torch.autograd.grad(output, self.factors, gradient, retain_graph=True, allow_unused=True)
        left, right = (_rows_of(one, place) for place, one in enumerate(found))
        return left, right


def _rows_of(derivative: Tensor | None, place: int) -> Tensor:
    if derivative is None:
        return torch.zeros(0, dtype=torch.long)
    one = torch.nan_to_num(derivative if derivative.dim() > 2 else derivative[None])
    size = (one.mT if place else one).abs().amax(-1).flatten()
    return (size > _ROUNDING * size.max()).nonzero().flatten()


@dataclass(frozen=True, eq=False)
class Core:
    """One weighted sum over what may be tokens.

    Attributes:
        node: that of the product of weights and values.
        output: edge of what it gives, ``(N, rows, width)``, or ``(N, width, rows)`` if it is turned.
        is_turned: values are on the left of the product.
        weights: ``(N, rows, columns)``.
        values: ``(N, columns, width)``.
        softmaxes: how many the weights are made of.
        scores: the products that the weights are made of.
        logits: the input of each softmax.
        nodes: of the softmaxes.
        path: the module in whose forward it was computed.
        is_part: its weights are exponentials that add up to one only together with those of other cores, or once they
            are divided by their sum.
    """

    node: Any
    output: Any
    is_turned: bool
    weights: Tensor
    values: Tensor
    softmaxes: int
    scores: tuple[Product, ...]
    logits: tuple[Tensor, ...]
    nodes: tuple[Any, ...]
    path: str
    is_part: bool = False

    @property
    def given(self) -> Tensor:
        """What it gives, as its output has it."""
        sums = self.weights.detach() @ self.values.detach()
        return sums.mT if self.is_turned else sums


def cores_of(run: TracedRun) -> list[Core]:
    """Find the attention cores of a run, in the order in which they were computed.

    Args:
        run: the run.

    Returns:
        The cores, those too whose scores are no products.
    """
    ends = [*run.outputs, *(leaf.taken for leaf in run.leaves if leaf.taken.requires_grad)]
    learned = Learned(run)
    found = [core for node in nodes_behind(ends) if (core := _core_at(node, run, learned)) is not None]
    parts = [core for core in found if core.is_part]
    whole = parts_that_add_up(parts, ends) if parts else set()
    kept = [core for core in found if not core.is_part or core in whole]
    return sorted(kept, key=lambda core: core.node._sequence_nr())


class Learned:
    """Tells what is made of parameters alone."""

    def __init__(self, run: TracedRun) -> None:
        self.parameters = {id(one) for name, one in run.others.items() if name.startswith("parameter")}
        self.known: dict[Any, bool] = {}
        self._mixed: dict[Any, Any | None] = {}  # of every product once: recurrent parts have long chains of them

    def __call__(self, node: Any) -> bool:
        """Return whether a node is made of parameters alone."""
        if node not in self.known:
            ends = [one for one in walk([node]) if one.name() == "torch::autograd::AccumulateGrad"]
            self.known[node] = bool(ends) and all(id(one.variable) in self.parameters for one in ends)
        return self.known[node]

    def mixes(self, node: Any) -> Any | None:
        """Give what a product with parameters mixes, if that is made of products itself: scores or weights of heads."""
        if node not in self._mixed:
            self._mixed[node] = self._mixed_by(node)
        return self._mixed[node]

    def _mixed_by(self, node: Any) -> Any | None:
        sides = made_from(node)[-2:]
        for one, other in (sides, sides[::-1]):
            if one is not None and other is not None and self(one) and not self(other):
                softmaxes, products = made_of(other, self)
                return other if softmaxes or products else None
        return None


def _core_at(node: Any, run: TracedRun, learned: Learned) -> Core | None:
    product = product_at(node)
    if product is None or learned.mixes(node) is not None:
        return None
    for is_turned, edge in enumerate(made_from(node)[-2:]):
        if edge is None:
            continue
        weights, values = (product.right, product.left) if is_turned else (product.left, product.right)
        # (N, rows, columns) and (N, columns, width)
        values = values.mT
        softmaxes, products = made_of(edge, learned)
        is_whole = bool(softmaxes) or (bool(products) and (_are_averages(weights) or _are_exponentials(edge, weights)))
        if not is_whole and not (products and _may_be_parts(edge, weights)):
            continue
        logits = tuple(run.scores[one] for one in softmaxes if one in run.scores)
        scores = [one for one in map(product_at, products) if one is not None]
        for one in softmaxes:
            scores += [two for two in map(product_at, made_of(one.next_functions[0][0], learned)[1]) if two is not None]
        scores = list({id(one.node): one for one in scores}.values())
        output = torch.autograd.graph.GradientEdge(node, 0)
        path = run.path_of(node)
        nodes = tuple(softmaxes)
        return Core(
            node,
            output,
            bool(is_turned),
            weights,
            values,
            len(softmaxes),
            tuple(scores),
            logits,
            nodes,
            path,
            not is_whole,
        )
    return None


def product_at(node: Any) -> Product | None:
    """Read the factors of a product.

    Args:
        node: of the graph.

    Returns:
        The product; `None` if the node is none of two tensors, or they were written over since.
    """
    names = _PRODUCTS.get(node.name())
    if names is None:
        return None
    try:
        left, right = (getattr(node, f"_saved_{name}") for name in names)
    except RuntimeError:  # it was written over since
        return None
    if left is None or right is None:
        return None
    factors = left, right
    left, right = (one if one.dim() > 2 else one[None] for one in factors)
    return Product(node, left, right.mT, factors)


def _are_averages(weights: Tensor) -> bool:
    one = weights.detach()
    return bool(one.min() > -1e-6) and bool(((one.sum(-1) - 1).abs() < _SUMS_TO_ONE).all()) and one.shape[-1] > 1


def _are_exponentials(edge: Any, weights: Tensor) -> bool:
    """Recognise a softmax that is written out and leaves a part of its sum to nobody."""
    one = weights.detach()
    if one.min() < -1e-6 or one.sum(-1).max() > 1 + _SUMS_TO_ONE or one.shape[-1] < 2:
        return False
    return exponential_behind(edge) is not None


def _may_be_parts(edge: Any, weights: Tensor) -> bool:
    """Recognise exponentials of scores that are not divided by their sum yet."""
    return bool((weights.detach() > -1e-6).all()) and exponential_behind(edge) is not None


def are_scores(tensor: Tensor) -> bool:
    """Tell what is made of products, none of which averages anything.

    Args:
        tensor: made in the run.

    Returns:
        True of scores; False of what attention gives, and of what maps give.
    """
    products = products_behind(tensor) if tensor.requires_grad else []
    weighing = (*_SOFTMAX, "ExpBackward0")
    edges = (edge for product in products for edge in made_from(product)[-2:] if edge is not None)
    return bool(products) and not any(
        node.name() in weighing for edge in edges for node in walk([edge], _up_to_products)
    )


def exponential_behind(edge: Any) -> Any | None:
    """Go back from an edge to an exponential, without a product in between.

    Args:
        edge: a node of the graph.

    Returns:
        The node of the exponential.
    """
    behind = walk([edge], _up_to_products)
    return next((node for node in behind if node.name() == "ExpBackward0"), None)


def products_behind(tensor: Tensor) -> list[Any]:
    """Find the products that a tensor is made of, those that are met first.

    Args:
        tensor: made in the run.

    Returns:
        Their nodes.
    """
    return [node for node in walk([tensor.grad_fn], _up_to_products) if is_product(node)]


def is_product(node: Any) -> bool:
    """Return whether a node is that of a product of two tensors.

    Args:
        node: of the graph.

    Returns:
        True if so.
    """
    return node.name() in _PRODUCTS


def _up_to_products(node: Any) -> list[Any]:
    return [] if is_product(node) else made_from(node)


def made_of(node: Any, learned: Learned) -> tuple[list[Any], list[Any]]:
    """Go back from a node to the softmaxes and products that are met first.

    Args:
        node: of the graph.
        learned: tells products with parameters, which mix heads and are passed.

    Returns:
        The nodes of the softmaxes, and those of the products.
    """
    softmaxes: list[Any] = []
    products: list[Any] = []

    def onward(one: Any) -> list[Any]:
        if one.name() in _SOFTMAX:
            softmaxes.append(one)
            return []
        if not is_product(one):
            return made_from(one)
        mixed = learned.mixes(one)
        if mixed is None:
            products.append(one)
        return [mixed]

    for _ in walk([node], onward):
        pass
    return softmaxes, products
