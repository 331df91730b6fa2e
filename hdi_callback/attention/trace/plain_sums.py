"""Sums of elementwise products in a traced run, written as the matrix products that they are.

``(q[:, :, :, None] * k[:, :, None]).sum(-1)`` and `torch.einsum` give the same scores; the graph shows queries and
keys only of the latter. The same holds for cosines of all pairs, and for distances: a squared distance is a product of
both vectors plus a number of each, which does not mix features.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hdi_callback.attention.trace.torch_arguments import torch_arguments

if TYPE_CHECKING:
    from hdi_callback.attention.trace.graph_cut import GraphCut

_LETTERS = "abcdefghijklmnop"


def as_product(cut: GraphCut, summed: Tensor, dims: tuple[Any, ...], result: Tensor) -> Tensor | None:
    """Write a sum of elementwise products as a product of matrices.

    Args:
        cut: of the run.
        summed: the terms, as ``left * right`` returned them.
        dims: over which it is summed.
        result: the sum.

    Returns:
        The same numbers, made by one product: all rows of one meet all columns of the other, or each row has columns of
        its own, as a query its neighbours. `None` where neither has several, where each feature has weights of its
        own, and where one of the two is a parameter.
    """
    node = summed.grad_fn
    if node is None or node.name() != "MulBackward0" or not all(type(dim) is int for dim in dims):
        return None
    try:
        factors = [getattr(node, name) for name in ("_saved_self", "_saved_other")]
    except RuntimeError:  # written over since
        return None
    if any(
        factor is None or not factor.requires_grad or factor.is_leaf or cut.views.is_of_parameter(factor)
        for factor in factors
    ):
        return None
    over = {dim % summed.dim() for dim in dims}
    own = [_own_dims(factor, summed) for factor in factors]
    if any(not over <= dims_of for dims_of in own) or own[0] == own[1] or summed.dim() > len(_LETTERS):
        return None
    wider = factors[own[0] < own[1]]
    if (own[0] < own[1] or own[1] < own[0]) and cut.run.upstream_products.first(wider.grad_fn)[0]:
        return None  # weights of each feature by itself
    terms = ["".join(_LETTERS[dim] for dim in sorted(dims_of)) for dims_of in own]
    kept = sorted((own[0] | own[1]) - over)
    parts = [_without(factor, summed.dim(), dims_of) for factor, dims_of in zip(factors, own)]
    made = torch.einsum(f"{','.join(terms)}->{''.join(_LETTERS[dim] for dim in kept)}", *parts)
    whole = made.reshape([summed.shape[dim] if dim in kept else 1 for dim in range(summed.dim()) if dim not in over])
    return whole.expand(torch.Size(size for dim, size in enumerate(summed.shape) if dim not in over)).view(result.shape)


def _own_dims(factor: Tensor, product: Tensor) -> set[int]:
    """Dims of a product in which a factor differs; in the others it is repeated."""
    first = product.dim() - factor.dim()
    return {first + dim for dim, size in enumerate(factor.shape) if size > 1 and factor.stride(dim) > 0}


def _without(factor: Tensor, count: int, own: set[int]) -> Tensor:
    first = count - factor.dim()
    for dim in reversed(range(factor.dim())):
        if first + dim not in own:
            factor = factor.select(dim, 0)
    return factor


def cosines(cut: GraphCut, func: Any, args: Any, kwargs: Any) -> Any:
    """Divide by norms as by constants, and multiply."""
    one, other, dim = torch_arguments(args, kwargs, "x1", "x2", "dim")
    dim = 1 if dim is None else dim
    cut.run.normed.extend((one, other))
    sizes = [torch.linalg.vector_norm(x.detach(), 2.0, dim, keepdim=True).clamp_min(1e-8) for x in (one, other)]
    product = (one / sizes[0]) * (other / sizes[1])
    result = product.sum(dim)
    written = as_product(cut, product, (dim,), result)
    return result if written is None else written


def distances(cut: GraphCut, func: Any, args: Any, kwargs: Any) -> Any:
    """Return p = 2 distances in which the squared norm of each of the two vectors counts as a constant."""
    one, other, p = torch_arguments(args, kwargs, "x1", "x2", "p")
    if p not in (None, 2, 2.0):
        return NotImplemented
    alone = one.detach().square().sum(-1)[..., :, None] + other.detach().square().sum(-1)[..., None, :]
    return (alone - 2 * one @ other.mT).clamp_min(1e-12).sqrt()


HANDLERS = {cosines: ("cosine_similarity",), distances: ("cdist",)}
