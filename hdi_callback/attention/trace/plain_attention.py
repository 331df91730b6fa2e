"""Torch's attention in a traced run: written out as plain products, so that its scores and weights are in the graph."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hdi_callback.attention.trace.dot_product import dot_product_scores, repeated_for_queries
from hdi_callback.attention.trace.products import are_scores

if TYPE_CHECKING:
    from hdi_callback.attention.trace.graph_cut import GraphCut

# The same code, with its first test (is a mode active?) replaced.
_WITHIN = types.FunctionType(
    F.multi_head_attention_forward.__code__,
    {**vars(F), "has_torch_function": lambda *_: False},
    F.multi_head_attention_forward.__name__,
    F.multi_head_attention_forward.__defaults__,
    F.multi_head_attention_forward.__closure__,
)


def softmax(cut: GraphCut, func: Any, args: Any, kwargs: Any) -> Any:
    """Record the input of a softmax."""
    scores = args[0] if args else kwargs["input"]
    result = func(*args, **kwargs)
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    _note(cut, scores if dim is None else scores.movedim(dim, -1), result)
    return result


def attention(cut: GraphCut, func: Any, args: Any, kwargs: Any) -> Any:
    """Write scaled dot-product attention out."""
    return _attend(cut, *args, **kwargs)


def torch_attention(cut: GraphCut, func: Any, args: Any, kwargs: Any) -> Any:
    """Trace through the function of `nn.MultiheadAttention`."""
    with cut:
        return _WITHIN(*args, **kwargs)


def exponential(cut: GraphCut, func: Any, args: Any, kwargs: Any) -> Any:
    """Note an exponential, which may be that of a softmax that is written out."""
    if not torch.is_grad_enabled():
        cut.exponentials += 1
    elif args and isinstance(args[0], Tensor) and are_scores(args[0]):
        cut.of_scores += 1
    return NotImplemented


def _note(cut: GraphCut, scores: Any, result: Any) -> None:
    """Record the input of a softmax by the node of that softmax, found behind the result."""
    cut.hidden += not torch.is_grad_enabled()
    node = getattr(result, "grad_fn", None)
    while node is not None and "Softmax" not in node.name():
        node = node.next_functions[0][0] if len(node.next_functions) == 1 else None
    if node is not None and isinstance(scores, Tensor):
        cut.run.scores[node] = scores


def _attend(
    cut: GraphCut,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if enable_gqa:
        key, value = repeated_for_queries(query, key, value)
    # With a finite score for hidden keys, a row without any key has an average of all.
    scores = dot_product_scores(query, key, attn_mask, is_causal=is_causal, scale=scale, hidden=-1e9)
    weights = scores.softmax(-1)
    _note(cut, scores, weights)
    return weights @ value


HANDLERS = {
    softmax: ("softmax",),
    exponential: ("exp", "exp_", "exp2"),
    attention: ("scaled_dot_product_attention",),
    torch_attention: ("multi_head_attention_forward",),
}
