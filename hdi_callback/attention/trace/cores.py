"""Attention cores in the graph of a traced run.

A core is a product of weights and values. The weights come from a softmax, or are not negative and add up to one over
what is averaged; and they are made of scores, which are a product of two tensors, queries and keys. No name of a
module, a parameter or a function is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hdi_callback.attention.trace.head_rows import SINGLE_KEYS
from hdi_callback.attention.trace.support import Support, random_weights
from hdi_callback.attention.trace.traced_run import Leaf, TracedRun

# Node of a product -> the names under which it keeps its factors: `left (N, rows, inner) @ right (N, inner, columns)`.
_PRODUCTS = {
    "BmmBackward0": ("self", "mat2"),
    "MmBackward0": ("self", "mat2"),
    "BaddbmmBackward0": ("batch1", "batch2"),
    "AddmmBackward0": ("mat1", "mat2"),
}
_SOFTMAX = ("SoftmaxBackward0", "SafeSoftmaxBackward0", "LogSoftmaxBackward0")
_ADDS_BY_INDEX = ("ScatterAdd", "ScatterReduce", "IndexAdd", "IndexReduce")
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
    learned = _Learned(run)
    found = [core for node in _nodes_behind(ends) if (core := _core_at(node, run, learned)) is not None]
    return sorted(found, key=lambda core: core.node._sequence_nr())


class _Learned:
    """Tells what is made of parameters alone."""

    def __init__(self, run: TracedRun) -> None:
        self.parameters = {id(one) for name, one in run.others.items() if name.startswith("parameter")}
        self.known: dict[Any, bool] = {}

    def __call__(self, node: Any) -> bool:
        if node not in self.known:
            ends = [one for one in _nodes_from([node]) if one.name() == "torch::autograd::AccumulateGrad"]
            self.known[node] = bool(ends) and all(id(one.variable) in self.parameters for one in ends)
        return self.known[node]

    def mixes(self, node: Any) -> Any | None:
        """Give what a product with parameters mixes, if that is made of products itself: scores or weights of heads."""
        sides = [edge for edge, _ in node.next_functions][-2:]
        for one, other in (sides, sides[::-1]):
            if one is not None and other is not None and self(one) and not self(other):
                softmaxes, products = _made_of(other, self)
                return other if softmaxes or products else None
        return None


def _core_at(node: Any, run: TracedRun, learned: _Learned) -> Core | None:
    product = _product_at(node)
    if product is None or learned.mixes(node) is not None:
        return None
    edges = [edge for edge, _ in node.next_functions][-2:]
    for is_turned, edge in enumerate(edges):
        if edge is None:
            continue
        weights, values = (product.right, product.left) if is_turned else (product.left, product.right)
        # (N, rows, columns) and (N, columns, width)
        values = values.mT
        softmaxes, products = _made_of(edge, learned)
        if not softmaxes and not (products and (_are_averages(weights) or _are_exponentials(edge, weights))):
            continue
        logits = tuple(run.scores[one] for one in softmaxes if one in run.scores)
        scores = [one for one in map(_product_at, products) if one is not None]
        for one in softmaxes:
            scores += [
                two for two in map(_product_at, _made_of(one.next_functions[0][0], learned)[1]) if two is not None
            ]
        scores = list({id(one.node): one for one in scores}.values())
        output = torch.autograd.graph.GradientEdge(node, 0)
        path = run.path_of(node)
        nodes = tuple(softmaxes)
        return Core(node, output, bool(is_turned), weights, values, len(softmaxes), tuple(scores), logits, nodes, path)
    return None


def _product_at(node: Any) -> Product | None:
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
    return _exponential_behind(edge) is not None


def _exponential_behind(edge: Any) -> Any | None:
    """Go back from an edge to an exponential, without a product in between."""
    todo, visited = [edge], set()
    while todo:
        node = todo.pop()
        if node is None or node in visited or node.name() in _PRODUCTS:
            continue
        if node.name() == "ExpBackward0":
            return node
        visited.add(node)
        todo += [other for other, _ in node.next_functions]
    return None


def products_behind(tensor: Tensor) -> list[Any]:
    """Find the products that a tensor is made of, those that are met first.

    Args:
        tensor: made in the run.

    Returns:
        Their nodes.
    """
    if tensor.grad_fn is None:
        return []
    todo: list[Any] = [tensor.grad_fn]
    visited: set[Any] = set()
    found = []
    while todo:
        node = todo.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if node.name() in _PRODUCTS:
            found.append(node)
        else:
            todo += [other for other, _ in node.next_functions]
    return found


def unread_softmaxes(run: TracedRun, cores: list[Core]) -> Iterator[tuple[Any, str]]:
    """Find softmaxes over tokens whose weighted sums were not found.

    Args:
        run: the run.
        cores: those that were found in it.

    Yields:
        The node of one, and why it is not read.
    """
    read = {node for core in cores for node in core.nodes}
    for node, logits in run.scores.items():
        if node in read:
            continue
        mixed = mixing_map(run, node, cores)
        if mixed is not None:
            path, what = mixed
            where = "before" if what == "scores" else "after"
            yield node, f"its heads mix: `{path}` maps the {what} of all of them {where} the softmax"
        elif logits.shape[-1] == 1 and logits.requires_grad and logits.dim() > 2:
            yield node, SINGLE_KEYS
        elif is_over_tokens(run, logits):
            yield node, "its values are weighted by no matrix product"


def unread_exponentials(run: TracedRun, cores: list[Core]) -> Iterator[tuple[Any, str]]:
    """Find exponentials that are divided by their sums elsewhere than in a softmax.

    Args:
        run: the run.
        cores: those that were found in it.

    Yields:
        The node of one, and why the attention that it is of is not read.
    """
    read = {core.node for core in cores}
    nodes = list(_nodes_behind([*run.outputs, *(leaf.taken for leaf in run.leaves if leaf.taken.requires_grad)]))
    by_index = any(node.name().startswith(_ADDS_BY_INDEX) for node in nodes)
    for node in nodes:
        if by_index and node.name() == "ExpBackward0":
            yield node, "its weights are exponentials that are added up by an index, as over the edges of a graph"
        product = None if node in read else _product_at(node)
        for edge, _ in node.next_functions[-2:] if product is not None else ():
            behind = _exponential_behind(edge)
            scores = [] if behind is None else [_product_at(one) for one in _made_of(behind, _Learned(run))[1]]
            if any(one is not None and all(side.requires_grad for side in one.factors) for one in scores):
                yield node, "its weights are exponentials that are divided by their sum after values are added up"


def mixing_map(run: TracedRun, node: Any, cores: list[Core]) -> tuple[str, str] | None:
    """Find a linear map that mixes the scores or the weights of all heads, as in talking heads.

    Args:
        run: the run.
        node: that of a softmax.
        cores: those that were found in the run.

    Returns:
        The path of the map, and what it takes: "scores" before the softmax, or "weights" after it.
    """
    logits = run.scores[node]
    leaf = next((leaf for leaf in made_of_leaves(run, logits) if is_map_of_scores(leaf, logits, cores)), None)
    if leaf is not None:
        return leaf.parameter.removesuffix(".weight"), "scores"
    for leaf in run.leaves:
        count = leaf.taken.numel() // max(1, leaf.taken.shape[-1]) * leaf.tensor.shape[-1]
        if count == logits.numel() and leaf.taken.grad_fn is not None and is_over_tokens(run, logits):
            softmaxes, _ = _made_of(leaf.taken.grad_fn, _Learned(run))
            if node in softmaxes:
                return leaf.parameter.removesuffix(".weight"), "weights"
    return None


def made_of_leaves(run: TracedRun, tensor: Tensor) -> list[Leaf]:
    """Give the calls of linear maps that a tensor is made of, without another map in between.

    Args:
        run: the run.
        tensor: made in it.

    Returns:
        The calls.
    """
    if not tensor.requires_grad:
        return []
    return [run.leaves[leaf] for leaf in Support.of(tensor, random_weights(tensor.shape), run.tensors).masks]


def is_map_of_scores(leaf: Leaf, logits: Tensor, cores: list[Core]) -> bool:
    """Tell a map that takes scores: for each pair of tokens one number from each head.

    Args:
        leaf: a call of the map.
        logits: the input of a softmax.
        cores: those of the run.

    Returns:
        True if its input is made of products that are no averages.
    """
    if leaf.taken.numel() // leaf.taken.shape[-1] * leaf.tensor.shape[-1] != logits.numel():
        return False
    averages = {core.node for core in cores}
    return any(product not in averages for product in products_behind(leaf.taken))


def is_over_tokens(run: TracedRun, logits: Tensor) -> bool:
    """Recognise scores of pairs of tokens: one depends on two tokens, and its neighbour on another one.

    Args:
        run: the run.
        logits: the input of a softmax, columns last.

    Returns:
        True if so; the scores of a router are those of one token, and learned pooling has one for each.
    """
    if not logits.requires_grad or logits.dim() < 2 or logits.shape[-1] < 2 or logits.shape[-2] < 2:
        return False
    flat = logits.reshape(-1, *logits.shape[-2:])
    rows, columns = flat.shape[-2:]
    met = []
    for column in (columns // 2, columns // 2 - 1):
        weights = torch.zeros(flat.shape)
        weights[0, rows - 1 if column != rows - 1 else 0, column] = 1.0
        support = Support.of(logits, weights.reshape(logits.shape), run.tensors)
        met.append(
            {(run.leaves[leaf].taken.shape[:-1], at) for leaf in support.masks for at in support.positions(leaf)}
        )
    return len(met[0]) > 1 and met[0] != met[1]


def _made_of(node: Any, learned: _Learned) -> tuple[list[Any], list[Any]]:
    """Go back from a node to the softmaxes and products that are met first."""
    softmaxes, products = [], []
    todo, visited = [node], set()
    while todo:
        one = todo.pop()
        if one is None or one in visited:
            continue
        visited.add(one)
        if one.name() in _SOFTMAX:
            softmaxes.append(one)
        elif one.name() in _PRODUCTS:
            mixed = learned.mixes(one)
            if mixed is None:
                products.append(one)
            else:
                todo.append(mixed)
        else:
            todo += [other for other, _ in one.next_functions]
    return softmaxes, products


def _nodes_behind(tensors: list[Tensor]) -> Iterator[Any]:
    return _nodes_from([one.grad_fn for one in tensors])


def _nodes_from(nodes: list[Any]) -> Iterator[Any]:
    todo = list(nodes)
    visited: set[Any] = set()
    while todo:
        node = todo.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        yield node
        todo += [other for other, _ in node.next_functions]


def nodes_between(ends: list[Tensor], start: Any) -> list[Any]:
    """Give the nodes on the ways from a node to what is made of it.

    Args:
        ends: tensors that are made of it.
        start: the node.

    Returns:
        The nodes, without the start.
    """
    behind = list(_nodes_behind(ends))
    on_the_way = {start}
    is_changed = True
    while is_changed:
        is_changed = False
        for node in behind:
            if node not in on_the_way and any(other in on_the_way for other, _ in node.next_functions):
                on_the_way.add(node)
                is_changed = True
    return [node for node in on_the_way if node is not start]
