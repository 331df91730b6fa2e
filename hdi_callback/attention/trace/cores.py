"""Attention cores in the graph of a traced run.

A core is a product of weights and values. The weights come from a softmax, or are not negative and add up to one over
what is averaged, by themselves or together with those of other products (`softmax_parts`); and they are made of scores,
which are a product of two tensors, queries and keys. No name of a module, a parameter or a function matters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hdi_callback.attention.trace.graph_walk import made_from, upstream_nodes
from hdi_callback.attention.trace.products import Product, product_at, upstream_exponential
from hdi_callback.attention.trace.softmax_parts import parts_that_add_up
from hdi_callback.attention.trace.traced_run import TracedRun

_SUMS_TO_ONE = 1e-3


@dataclass(frozen=True, eq=False)
class Core:
    """One weighted sum, possibly over tokens.

    Attributes:
        node: that of the product of weights and values.
        is_turned: values are on the left of the product.
        weights: ``(N, rows, columns)``.
        values: ``(N, columns, width)``.
        softmaxes: nodes of the softmaxes that the weights are made of.
        scores: the products that the weights are made of.
        logits: the input of each softmax.
        path: the module in whose forward it was computed.
        is_part: its weights are exponentials that add up to one only together with those of other cores, or once they
            are divided by their sum.
    """

    node: Any
    is_turned: bool
    weights: Tensor
    values: Tensor
    softmaxes: tuple[Any, ...]
    scores: tuple[Product, ...]
    logits: tuple[Tensor, ...]
    path: str
    is_part: bool = False

    @property
    def output(self) -> Any:
        """Graph edge of the output, ``(N, rows, width)``, or ``(N, width, rows)`` if it is turned."""
        return torch.autograd.graph.GradientEdge(self.node, 0)

    @property
    def sums(self) -> Tensor:
        """Product weights @ values, transposed where the output is."""
        sums = self.weights.detach() @ self.values.detach()
        return sums.mT if self.is_turned else sums

    def by_row(self, output: Tensor) -> Tensor:
        """View a tensor with an element for each of the output's as ``(N, rows, width)``.

        Args:
            output: such as a derivative by it.

        Returns:
            The view.
        """
        matrices = output.view(self.weights.shape[0], -1, output.shape[-1])
        return matrices.mT if self.is_turned else matrices


def cores_of(run: TracedRun) -> list[Core]:
    """Find the attention cores of a run, in the order in which they were computed.

    Args:
        run: the run.

    Returns:
        The cores, those too whose scores are no products.
    """
    found = [core for node in upstream_nodes(run.ends) if (core := _core_at(node, run)) is not None]
    parts = [core for core in found if core.is_part]
    whole = parts_that_add_up(parts, run.ends) if parts else set()
    kept = [core for core in found if not core.is_part or core in whole]
    return sorted(kept, key=lambda core: core.node._sequence_nr())


def _core_at(node: Any, run: TracedRun) -> Core | None:
    product, behind = product_at(node), run.upstream_products
    if product is None or behind.mixed_at(node) is not None:
        return None
    for is_turned, edge in enumerate(made_from(node)[-2:]):
        if edge is None:
            continue
        weights, values = product.sides[is_turned], product.sides[1 - is_turned].mT
        softmaxes, products = behind.first(edge)
        is_whole = bool(softmaxes) or (bool(products) and (_are_averages(weights) or _are_exponentials(edge, weights)))
        if not is_whole and not (products and _may_be_parts(edge, weights)):
            continue
        logits = tuple(run.scores[one] for one in softmaxes if one in run.scores)
        for softmax in softmaxes:
            products += behind.first(softmax.next_functions[0][0])[1]
        scores = tuple({id(one.node): one for one in products}.values())
        path = run.path_of(node)
        return Core(node, bool(is_turned), weights, values, tuple(softmaxes), scores, logits, path, not is_whole)
    return None


def _are_averages(weights: Tensor) -> bool:
    one = weights.detach()
    return bool(one.min() > -1e-6) and bool(((one.sum(-1) - 1).abs() < _SUMS_TO_ONE).all()) and one.shape[-1] > 1


def _are_exponentials(edge: Any, weights: Tensor) -> bool:
    """Recognise a softmax that is written out, with a term in its denominator that no token receives."""
    one = weights.detach()
    if one.min() < -1e-6 or one.sum(-1).max() > 1 + _SUMS_TO_ONE or one.shape[-1] < 2:
        return False
    return upstream_exponential(edge) is not None


def _may_be_parts(edge: Any, weights: Tensor) -> bool:
    """Recognise exponentials of scores that are not divided by their sum yet."""
    return bool((weights.detach() > -1e-6).all()) and upstream_exponential(edge) is not None
