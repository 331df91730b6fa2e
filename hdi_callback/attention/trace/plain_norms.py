"""Norms, dropout and the choice of the top k in a traced run, such that each feature depends on itself alone.

The factor of a norm for each token and the mean that it subtracts count as constants, so that a feature depends only
on itself; dropout is skipped, and all elements are chosen in place of the top k.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hdi_callback.attention.trace.plain_sums import as_product
from hdi_callback.attention.trace.products import are_scores
from hdi_callback.attention.trace.torch_arguments import torch_arguments

if TYPE_CHECKING:
    from hdi_callback.attention.trace.graph_cut import GraphCut


def dropout(cut: GraphCut, func: Any, args: Any, kwargs: Any) -> Any:
    """Skip dropout."""
    return args[0] if args else kwargs["input"]


def top(cut: GraphCut, func: Any, args: Any, kwargs: Any) -> Any:
    """Choose all elements in place of the top k, unless the forward fails with all of them."""
    if cut.keeps_top:
        return NotImplemented
    cut.has_all = True
    x, _, dim, is_largest, is_sorted = torch_arguments(args, kwargs, "input", "k", "dim", "largest", "sorted")
    dim = -1 if dim is None else dim
    if is_sorted is False:  # in whatever order, which is the same in all runs
        return torch.return_types.topk((x.clone(), _counted(x, dim)))
    return func(x, x.shape[dim], dim, is_largest is not False, is_sorted is not False)


def order(cut: GraphCut, func: Any, args: Any, kwargs: Any) -> Any:
    """Leave outputs of maps in their order, as where tokens are put into buckets by a hash of their keys."""
    x, dim = torch_arguments(args, kwargs, "input", "dim")
    dim = dim if type(dim) is int else -1
    is_made = isinstance(x, Tensor) and x.requires_grad and x.is_floating_point()
    return _counted(x, dim) if is_made and not _is_of_each_token(cut, x, dim) else NotImplemented


def _is_of_each_token(cut: GraphCut, x: Tensor, dim: int) -> bool:
    """Return whether what lies along a dim is of one token, as its heads are, which no order may swap."""
    ends = (x.select(dim, at).flatten()[:1] for at in (0, -1))
    first, last = (cut.run.support(end) for end in ends)
    return bool(first) and all(first.positions(leaf) == last.positions(leaf) for leaf in first.masks)


def _counted(x: Tensor, dim: int) -> Tensor:
    shape = [1] * x.dim()
    shape[dim] = -1
    return torch.arange(x.shape[dim]).view(shape).expand(x.shape).clone()


def factor(cut: GraphCut, func: Any, args: Any, kwargs: Any) -> Any:
    """Detach the scale of a norm, so that it counts as a constant."""
    return func(*args, **kwargs).detach()


def largest(cut: GraphCut, func: Any, args: Any, kwargs: Any) -> Any:
    """Detach a maximum that is subtracted from all elements, or from a row of scores: it changes no difference."""
    if len(args) == 1 and not kwargs:
        return factor(cut, func, args, kwargs)
    if (len(args) > 1 and isinstance(args[1], Tensor)) or not are_scores(args[0]):
        return NotImplemented
    result = func(*args, **kwargs)
    return type(result)((result.values.detach(), result.indices))


def rounded(cut: GraphCut, func: Any, args: Any, kwargs: Any) -> Any:
    """Keep half-precision numbers in full, as small ones would be lost."""
    result = func(*args, **kwargs)
    is_half = isinstance(result, Tensor) and result.dtype in (torch.float16, torch.bfloat16)
    if is_half and isinstance(args[0], Tensor) and args[0].is_floating_point():
        return args[0].float()
    return result


def statistic(cut: GraphCut, func: Any, args: Any, kwargs: Any) -> Any:
    """A factor for each token is a constant, and so is a mean over features."""
    result = func(*args, **kwargs)
    if not isinstance(result, Tensor):
        return result
    dim = kwargs.get("dim", next((arg for arg in args[1:] if isinstance(arg, (int, tuple, list))), None))
    if func in (Tensor.norm, torch.norm):
        dim = kwargs.get("dim", args[2] if len(args) > 2 else None)
    if func in (torch.amax, Tensor.amax) and are_scores(args[0]):
        return result.detach()
    dims = tuple(dim) if isinstance(dim, (tuple, list)) else (dim,)
    if func in (torch.sum, Tensor.sum):
        written = as_product(cut, args[0], dims, result)
        if written is not None:
            return written
    last = {-1, args[0].dim() - 1}
    if not kwargs.get("keepdim", result.dim() == args[0].dim()) or not set(dims) & last:
        return result
    is_of_sizes = bool((args[0].detach() >= 0).all())
    is_mean = func in (torch.mean, Tensor.mean) and not is_of_sizes
    if func in (torch.sum, Tensor.sum) and not is_of_sizes:  # of products, as of two vectors
        return result
    cut.run.centred |= is_mean
    cut.run.normed.append(args[0])
    return result if is_mean and cut.draw.keeps_means else result.detach()


def layer_norm(cut: GraphCut, func: Any, args: Any, kwargs: Any) -> Any:
    """Write `layer_norm` out."""
    x, shape, weight, bias, eps = torch_arguments(args, kwargs, "input", "normalized_shape", "weight", "bias", "eps")
    normed = _normed(cut, x, tuple(range(-len(shape), 0)), 1e-5 if eps is None else eps, has_mean=True)
    return _affine(normed, weight, bias)


def rms_norm(cut: GraphCut, func: Any, args: Any, kwargs: Any) -> Any:
    """Write `rms_norm` out."""
    x, shape, weight, eps = torch_arguments(args, kwargs, "input", "normalized_shape", "weight", "eps")
    return _affine(_normed(cut, x, tuple(range(-len(shape), 0)), eps or 1e-6, has_mean=False), weight, None)


def group_norm(cut: GraphCut, func: Any, args: Any, kwargs: Any) -> Any:
    """Write `group_norm` out."""
    x, groups, weight, bias, eps = torch_arguments(args, kwargs, "input", "num_groups", "weight", "bias", "eps")
    parts = x.unflatten(1, (groups, -1))
    normed = _normed(cut, parts, tuple(range(2, parts.dim())), eps or 1e-5, has_mean=True).flatten(1, 2)
    shape = (1, -1, *[1] * (x.dim() - 2))
    return _affine(normed, *(None if parameter is None else parameter.view(shape) for parameter in (weight, bias)))


def normalize(cut: GraphCut, func: Any, args: Any, kwargs: Any) -> Any:
    """Divide by the norm of each token as by a constant."""
    x, p, dim = torch_arguments(args, kwargs, "input", "p", "dim")
    if not x.dim() or not (dim is None or dim % x.dim() == x.dim() - 1 or x.dim() > 3):
        return NotImplemented
    cut.run.normed.append(x)
    size = torch.linalg.vector_norm(x.detach(), p or 2.0, 1 if dim is None else dim, keepdim=True)
    return x / size.clamp_min(1e-12)


def _normed(cut: GraphCut, x: Tensor, dims: Any, eps: float, *, has_mean: bool) -> Tensor:
    cut.run.normed.append(x)
    centred = x
    if has_mean:
        cut.run.centred = True
        mean = x.mean(dims, keepdim=True)
        centred = x - (mean if cut.draw.keeps_means else mean.detach())
    return centred * (centred.detach().square().mean(dims, keepdim=True) + eps).rsqrt()


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


HANDLERS = {
    dropout: ("dropout",),
    top: ("topk",),
    order: ("argsort",),
    factor: ("rsqrt",),
    largest: ("max",),
    rounded: ("to", "half", "bfloat16", "type", "type_as"),
    statistic: ("mean", "sum", "var", "std", "norm", "vector_norm", "amax"),
    layer_norm: ("layer_norm",),
    rms_norm: ("rms_norm",),
    group_norm: ("group_norm",),
    normalize: ("normalize",),
}
