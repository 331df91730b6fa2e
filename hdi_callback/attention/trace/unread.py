"""Softmaxes and exponentials over tokens that are weights of no core, and why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from hdi_callback.attention.trace.cores import Core
from hdi_callback.attention.trace.graph_walk import made_from, nodes_between, upstream_nodes
from hdi_callback.attention.trace.head_rows import SINGLE_KEYS, module_of
from hdi_callback.attention.trace.products import is_product, nearest_products, product_at, upstream_exponential
from hdi_callback.attention.trace.support import Support, element
from hdi_callback.attention.trace.traced_run import Leaf, TracedRun
from hdi_callback.attention.trace.weighed_tokens import weighs_tokens

NO_PRODUCTS = "its scores are not products of queries and keys"
_CONSTANTS = "its values are constants, such as positions, and not projections of tokens"
_NO_VALUES = "its values are not weighted by a matrix product"
_SIGNED = "its weights are signed scores divided by the sum of their absolute values, so its outputs are no averages"
_ADDS_BY_INDEX = ("ScatterAdd", "ScatterReduce", "IndexAdd", "IndexReduce")


def unread_softmaxes(run: TracedRun, cores: list[Core]) -> Iterator[tuple[Any, str]]:
    """Find softmaxes over tokens whose weighted sums were not found.

    Args:
        run: the run.
        cores: those that were found in it.

    Yields:
        The node of one, and why it is not read.
    """
    read = {node for core in cores for node in core.softmaxes}
    for node, logits in run.scores.items():
        if node in read:
            continue
        mixed = _mixing_map(run, node, cores)
        if mixed is not None:
            yield node, f"its heads mix: {mixed} the softmax"
        elif logits.shape[-1] == 1 and logits.requires_grad and logits.dim() > 2:
            yield node, SINGLE_KEYS
        elif is_over_tokens(run, logits) or _is_of_one_query(run, node, logits):
            yield (
                node,
                _CONSTANTS if _weighs_constants(run, node) else _NO_VALUES,
            )
        elif weighs_tokens(run, node):
            yield node, NO_PRODUCTS


def _weighs_constants(run: TracedRun, node: Any) -> bool:
    """Return whether weights are multiplied with constants, which depend on no input or map of the run."""
    pairs = [made_from(one)[-2:] for one in nodes_between(run.ends, node) if is_product(one)]
    alone = [side for pair in pairs if None in pair for side in pair if side is not None]
    return any(node in run.upstream_products.first(side)[0] for side in alone)


def unread_function(run: TracedRun) -> str:
    """Name a `torch.autograd.Function` that hides from the graph what it computes of three activations or more.

    Args:
        run: the run.

    Returns:
        Why nothing is seen in it, as a clause; empty if there is none.
    """
    for node in upstream_nodes(run.ends):
        own = getattr(type(node), "_forward_cls", None)
        edges = [one for one in made_from(node) if one is not None and "AccumulateGrad" not in one.name()]
        if own is not None and len(edges) > 2:
            return f"what the function `{own.__name__}` computes is in no graph, as it has a backward of its own"
    return ""


def unread_exponentials(run: TracedRun, cores: list[Core]) -> Iterator[tuple[Any, str]]:
    """Find exponentials of scores that are not normalised to sum to one.

    Args:
        run: the run.
        cores: those that were found in it.

    Yields:
        The node of one, and why the attention that it is of is not read.
    """
    nodes = list(upstream_nodes(run.ends))
    if any(node.name().startswith(_ADDS_BY_INDEX) for node in nodes):
        for node in nodes:
            if node.name() == "ExpBackward0":
                yield node, "its weights are exponentials that are summed by index, as over the edges of a graph"
    for node, edge, _ in _factors(run, cores):
        if _is_of_scores(run, upstream_exponential(edge)):
            yield node, "its weights are exponentials that are not normalised to sum to one"


def unread_averages(run: TracedRun, cores: list[Core]) -> Iterator[tuple[Any, str]]:
    """Find sums over tokens with weights s_j / sum_i abs(s_i): signed scores over the sum of their absolute values.

    Args:
        run: the run.
        cores: those that were found in it.

    Yields:
        The node of one, and why it is not read.
    """
    for node, edge, weights in _factors(run, cores):
        size = weights.detach().abs().sum(-1)
        are_divided = weights.shape[-1] > 1 and ((size - 1).abs() < 1e-3).all() and weights.min() < 0
        if are_divided and run.upstream_products.mixed_at(node) is None and _is_of_scores(run, edge):
            yield (
                node,
                _SIGNED,
            )


def _factors(run: TracedRun, cores: list[Core]) -> Iterator[tuple[Any, Any, Tensor]]:
    """Yield both factors of every product that is no core, each with the node of the product and its own."""
    read = {core.node for core in cores}
    for node in upstream_nodes(run.ends):
        product = None if node in read else product_at(node)
        if product is not None:
            for edge, factor in zip(made_from(node)[-2:], product.sides):
                if edge is not None:
                    yield node, edge, factor


def _is_of_scores(run: TracedRun, node: Any) -> bool:
    """Return whether a tensor depends on products of two activations."""
    return any(product.is_made for product in run.upstream_products.first(node)[1])


def _mixing_map(run: TracedRun, node: Any, cores: list[Core]) -> str | None:
    """Find a linear map that mixes the scores or the weights of all heads at a softmax, as in talking heads."""
    logits = run.scores[node]
    for leaf in (run.leaves[number] for number in run.support(logits).masks):
        if is_map_of_scores(leaf, logits, cores):
            return f"`{module_of(leaf.parameter)}` maps the scores of all heads before"
    for leaf in run.leaves:
        if _pairs_of(leaf) == logits.numel() and leaf.input.grad_fn is not None and is_over_tokens(run, logits):
            softmaxes, _ = run.upstream_products.first(leaf.input.grad_fn)
            if node in softmaxes:
                return f"`{module_of(leaf.parameter)}` maps the weights of all heads after"
    return None


def _pairs_of(leaf: Leaf) -> int:
    """Number of outputs of a map, each of which it computed from the numbers of all heads."""
    return leaf.input.numel() // max(1, leaf.input.shape[-1]) * leaf.output.shape[-1]


def is_map_of_scores(leaf: Leaf, logits: Tensor, cores: list[Core]) -> bool:
    """Return whether a map takes scores: for each pair of tokens one number from each head.

    Args:
        leaf: a call of the map.
        logits: the input of a softmax.
        cores: those of the run.

    Returns:
        True if its input is made of products that are no averages.
    """
    averages = {core.node for core in cores}
    return (
        _pairs_of(leaf) == logits.numel()
        and any(product not in averages for product in nearest_products(leaf.input))
        and _gives_columns_apart(leaf, logits)
    )


def _gives_columns_apart(leaf: Leaf, logits: Tensor) -> bool:
    """Return whether a map runs once for each pair of tokens, and its features are not the columns, as of classes."""
    if logits.shape[-1] < 2:
        return True
    flat = logits.reshape(-1, logits.shape[-1])
    some = (element(flat.shape, -1, column) for column in (0, 1))
    first, second = (Support.of_combination(flat, one, [leaf.output]) for one in some)
    return not first or first.positions(0) != second.positions(0)


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
    tokens = []
    for column in (columns // 2, columns // 2 - 1):
        score = element(flat.shape, 0, rows - 1 if column != rows - 1 else 0, column)
        tokens.append(_tokens_of(run, Support.of_combination(flat, score, run.tensors), columns * columns))
    return len(tokens[0]) > 1 and tokens[0] != tokens[1]


def _is_of_one_query(run: TracedRun, node: Any, logits: Tensor) -> bool:
    """Recognise scores of one query, an output of a map, with keys that maps make of one token each."""
    if logits.dim() < 3 or logits.shape[-2] != 1 or logits.shape[-1] < 2 or not logits.requires_grad:
        return False
    products = run.upstream_products.first(node.next_functions[0][0])[1]
    if len(products) != 1:
        return False
    left, right = products[0].sides
    query, keys = (left, right) if left.shape[1] == 1 else (right, left)
    if query.shape[1] != 1 or keys.shape[1] != logits.shape[-1]:
        return False
    supports = [run.support(keys, [place]) for place in (0, keys.shape[1] - 1)]
    tokens = [{(leaf, support.positions(leaf)) for leaf in support.masks} for support in supports]
    return bool(run.support(query)) and all(len(places) == 1 for places in tokens) and tokens[0] != tokens[1]


def _tokens_of(run: TracedRun, support: Support, pairs: int) -> set[tuple[Any, int]]:
    """The tokens that a score depends on; where maps compute it from a pair, those in the input of the first."""
    while True:
        found = {(run.leaves[leaf].input.shape[:-1], at) for leaf in support.masks for at in support.positions(leaf)}
        if len(found) != 1 or len(support.masks) != 1:
            return found
        ((leaf, mask),) = support.masks.items()
        map_input = run.leaves[leaf].input
        if map_input.shape[:-1].numel() < pairs:
            return found
        support = Support.of(map_input, run.tensors[:leaf], mask.any(1).nonzero().flatten())
        if not support:
            return found
