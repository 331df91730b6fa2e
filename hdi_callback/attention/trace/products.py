"""Products and softmaxes in the autograd graph of a run, backwards."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hdi_callback.attention.trace.graph_walk import made_from, walk

# Node of a product -> the names under which it keeps its factors: `left (N, rows, inner) @ right (N, inner, columns)`.
_PRODUCTS = {
    "BmmBackward0": ("self", "mat2"),
    "MmBackward0": ("self", "mat2"),
    "BaddbmmBackward0": ("batch1", "batch2"),
    "AddmmBackward0": ("mat1", "mat2"),
}
_SOFTMAX = ("SoftmaxBackward0", "SafeSoftmaxBackward0", "LogSoftmaxBackward0")
_EXPONENTIAL = "ExpBackward0"
_ROUNDING = 1e-9  # of a derivative, relative to the largest


@dataclass(frozen=True, eq=False)
class Product:
    """A product of two tensors that are made in the run.

    Attributes:
        node: of the graph.
        sides: ``(N, rows, inner)`` and ``(N, columns, inner)``.
        factors: the two as the graph has them.
    """

    node: Any
    sides: tuple[Tensor, Tensor]
    factors: tuple[Tensor, Tensor]

    @property
    def is_made(self) -> bool:
        """Whether both of its factors are made in the run."""
        return all(factor.requires_grad for factor in self.factors)

    def acting_on(self, output: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Find the rows of both sides that something depends on.

        Args:
            output: what may be made of the product.
            weights: of its elements in the combination that is derived.

        Returns:
            Numbers of rows of both sides, counted over all ``N``.
        """
        found = torch.autograd.grad(output, self.factors, weights, retain_graph=True, allow_unused=True)
        left, right = (_rows_of(one, side) for side, one in enumerate(found))
        return left, right


def _rows_of(derivative: Tensor | None, side: int) -> Tensor:
    if derivative is None:
        return torch.zeros(0, dtype=torch.long)
    one = torch.nan_to_num(derivative if derivative.dim() > 2 else derivative[None])
    size = (one.mT if side else one).abs().amax(-1).flatten()
    return (size > _ROUNDING * size.max()).nonzero().flatten()


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
    left, right = (factor if factor.dim() > 2 else factor[None] for factor in factors)
    return Product(node, (left, right.mT), factors)


def is_product(node: Any) -> bool:
    """Return whether a node is a product of matrices."""
    return node.name() in _PRODUCTS


class UpstreamProducts:
    """The products and softmaxes that a tensor depends on, seen through products with parameters.

    Args:
        parameters: of the copy that was run.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = {id(parameter) for parameter in parameters}
        self._learned: dict[Any, bool] = {}
        self._mixed: dict[Any, Any | None] = {}  # of every product once: recurrent parts have long chains of them

    def first(self, node: Any) -> tuple[list[Any], list[Product]]:
        """Go back from a node to the nearest softmaxes and products.

        Args:
            node: of the graph.

        Returns:
            The nodes of the softmaxes, and the products.
        """
        softmaxes, products = self._first(node)
        return softmaxes, [product for product in map(product_at, products) if product is not None]

    def _first(self, node: Any) -> tuple[list[Any], list[Any]]:
        softmaxes: list[Any] = []
        products: list[Any] = []

        def onward(one: Any) -> list[Any]:
            if one.name() in _SOFTMAX:
                softmaxes.append(one)
                return []
            if one.name() not in _PRODUCTS:
                return made_from(one)
            mixed = self.mixed_at(one)
            if mixed is None:
                products.append(one)
            return [mixed]

        for _ in walk([node], onward):
            pass
        return softmaxes, products

    def are_weights(self, node: Any) -> bool:
        """Return whether a node depends on softmaxes of scores alone, as an iterative inverse of attention does."""
        ends = [end for end in walk([node], _up_to_softmaxes) if not _up_to_softmaxes(end)]
        softmaxes = [end for end in ends if end.name() in _SOFTMAX]
        return (
            bool(softmaxes) and softmaxes == ends and all(self.first(made_from(softmax)[0])[1] for softmax in softmaxes)
        )

    def mixed_at(self, node: Any) -> Any | None:
        """Return the scores or weights of heads that a product with parameters mixes, if it mixes any."""
        if node not in self._mixed:
            one, other = made_from(node)[-2:]
            self._mixed[node] = self._mixed_by(one, other) or self._mixed_by(other, one)
        return self._mixed[node]

    def _mixed_by(self, one: Any, other: Any) -> Any | None:
        if one is None or other is None or not self._is_learned(one) or self._is_learned(other):
            return None
        return other if any(self._first(other)) else None

    def _is_learned(self, node: Any) -> bool:
        """Return whether a node is made of parameters alone."""
        if node not in self._learned:
            ends = [end for end in walk([node]) if end.name() == "torch::autograd::AccumulateGrad"]
            self._learned[node] = bool(ends) and all(id(end.variable) in self._parameters for end in ends)
        return self._learned[node]


def are_scores(tensor: Tensor) -> bool:
    """Return whether a tensor depends on products of which none is a weighted average.

    Args:
        tensor: made in the run.

    Returns:
        True of scores; False of what attention gives, and of what maps give.
    """
    products = nearest_products(tensor)
    weighing = (*_SOFTMAX, _EXPONENTIAL)
    edges = [edge for product in products for edge in made_from(product)[-2:]]
    return bool(products) and not any(node.name() in weighing for edge in edges for node in _up_to_products(edge))


def upstream_exponential(edge: Any) -> Any | None:
    """Go back from a node to an exponential, without a product in between.

    Args:
        edge: the node.

    Returns:
        The node of the exponential.
    """
    return next((node for node in _up_to_products(edge) if node.name() == _EXPONENTIAL), None)


def nearest_products(tensor: Tensor) -> list[Any]:
    """Find the nearest products in the graph of a tensor.

    Args:
        tensor: made in the run.

    Returns:
        Their nodes.
    """
    return [node for node in _up_to_products(tensor.grad_fn) if node.name() in _PRODUCTS]


def _up_to_softmaxes(node: Any) -> list[Any]:
    return [] if node.name() in _SOFTMAX else [edge for edge in made_from(node) if edge is not None]


def _up_to_products(start: Any) -> Iterable[Any]:
    return walk([start], lambda node: [] if node.name() in _PRODUCTS else made_from(node))
