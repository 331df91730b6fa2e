"""Softmaxes and exponentials over tokens that are weights of no core, and why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hdi_callback.attention.trace.cores import Core, Learned, exponential_behind, made_of, product_at, products_behind
from hdi_callback.attention.trace.graph_walk import made_from, nodes_behind
from hdi_callback.attention.trace.head_rows import SINGLE_KEYS
from hdi_callback.attention.trace.support import Support, random_weights, weights_at
from hdi_callback.attention.trace.traced_run import Leaf, TracedRun
from hdi_callback.attention.trace.weighed_tokens import weighs_tokens

NO_PRODUCTS = "its scores are no products of queries and keys"
_ADDS_BY_INDEX = ("ScatterAdd", "ScatterReduce", "IndexAdd", "IndexReduce")


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
        elif is_over_tokens(run, logits) or _is_of_one_query(run, node, logits):
            yield node, "its values are weighted by no matrix product"
        elif weighs_tokens(run, node):
            yield node, NO_PRODUCTS


def unread_exponentials(run: TracedRun, cores: list[Core]) -> Iterator[tuple[Any, str]]:
    """Find exponentials of scores that are no weights of averages, alone or together.

    Args:
        run: the run.
        cores: those that were found in it.

    Yields:
        The node of one, and why the attention that it is of is not read.
    """
    read = {core.node for core in cores}
    nodes = list(_nodes_of(run))
    by_index = any(node.name().startswith(_ADDS_BY_INDEX) for node in nodes)
    for node in nodes:
        if by_index and node.name() == "ExpBackward0":
            yield node, "its weights are exponentials that are added up by an index, as over the edges of a graph"
        product = None if node in read else product_at(node)
        for edge in made_from(node)[-2:] if product is not None else ():
            behind = exponential_behind(edge)
            scores = [] if behind is None else [product_at(one) for one in made_of(behind, Learned(run))[1]]
            if any(one is not None and all(side.requires_grad for side in one.factors) for one in scores):
                yield node, "its weights are exponentials that do not add up to one, whatever is made of their sums"


def unread_averages(run: TracedRun, cores: list[Core]) -> Iterator[tuple[Any, str]]:
    """Find sums over tokens whose weights are scores that are divided by the sum of their sizes, with their signs.

    Args:
        run: the run.
        cores: those that were found in it.

    Yields:
        The node of one, and why it is not read.
    """
    read, learned = {core.node for core in cores}, Learned(run)
    for node in _nodes_of(run):
        product = None if node in read else product_at(node)
        if product is None or learned.mixes(node) is not None:
            continue
        for edge, weights in zip(made_from(node)[-2:], (product.left, product.right)):
            size = weights.detach().abs().sum(-1)
            if edge is None or weights.shape[-1] < 2 or not ((size - 1).abs() < 1e-3).all() or weights.min() >= 0:
                continue
            scores = [product_at(one) for one in made_of(edge, learned)[1]]
            if any(one is not None and all(side.requires_grad for side in one.factors) for one in scores):
                yield node, "its weights are scores with their signs, divided by the sum of their sizes: no averages"


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
            softmaxes, _ = made_of(leaf.taken.grad_fn, Learned(run))
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
    has_scores = any(product not in averages for product in products_behind(leaf.taken))
    return has_scores and _gives_columns_apart(leaf, logits)


def _gives_columns_apart(leaf: Leaf, logits: Tensor) -> bool:
    """Tell a map that is asked once for each pair of tokens from one whose features are the columns, as of classes."""
    if logits.shape[-1] < 2:
        return True
    found = []
    for column in (0, 1):
        weights = torch.zeros(logits.shape)
        weights.view(-1, logits.shape[-1])[-1, column] = 1.0
        found.append(Support.of(logits, weights, [leaf.tensor]))
    return any(one and one.positions(0) != found[0].positions(0) for one in found[1:]) or not all(found)


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
        met.append(_tokens_of(run, support, columns * columns))
    return len(met[0]) > 1 and met[0] != met[1]


def _is_of_one_query(run: TracedRun, node: Any, logits: Tensor) -> bool:
    """Recognise scores of one query, which a map gives, with keys that maps make of one token each."""
    if logits.dim() < 3 or logits.shape[-2] != 1 or logits.shape[-1] < 2 or not logits.requires_grad:
        return False
    products = [product_at(one) for one in made_of(node.next_functions[0][0], Learned(run))[1]]
    if len(products) != 1 or products[0] is None:
        return False
    left, right = products[0].left, products[0].right
    query, keys = (left, right) if left.shape[1] == 1 else (right, left)
    if query.shape[1] != 1 or keys.shape[1] != logits.shape[-1]:
        return False
    met = [Support.of(keys, weights_at(keys, torch.tensor([place])), run.tensors) for place in (0, keys.shape[1] - 1)]
    tokens = [{(leaf, one.positions(leaf)) for leaf in one.masks} for one in met]
    is_asked = bool(Support.of(query, random_weights(query.shape), run.tensors))
    return is_asked and all(len(one) == 1 for one in tokens) and tokens[0] != tokens[1]


def _tokens_of(run: TracedRun, support: Support, pairs: int) -> set[tuple[Any, int]]:
    """Name the tokens that a score is made of; where maps make it of a pair, those that the first of them takes."""
    while True:
        found = {(run.leaves[leaf].taken.shape[:-1], at) for leaf in support.masks for at in support.positions(leaf)}
        if len(found) != 1 or len(support.masks) != 1:
            return found
        ((leaf, mask),) = support.masks.items()
        taken = run.leaves[leaf].taken
        if taken.shape[:-1].numel() < pairs:
            return found
        support = Support.of(taken, weights_at(taken, mask.any(1).nonzero().flatten()), run.tensors[:leaf])
        if not support:
            return found


def _nodes_of(run: TracedRun) -> Iterator[Any]:
    """Every node behind what a run gave, and behind what its linear maps took."""
    return nodes_behind([*run.outputs, *(leaf.taken for leaf in run.leaves if leaf.taken.requires_grad)])
