"""Scores before they enter a softmax, however attention is written.

`Scores` is a mode: within it every softmax, torch's `scaled_dot_product_attention` and `multi_head_attention_forward`
with weights of its own hand their scores over, and go on with attention weights that can be changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hdi_callback.attention.dot_product import dot_product_scores, repeated_for_queries

_SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax)


class Scores(TorchFunctionMode):
    """Keeps the scores of attention, and hands on weights that are apart from them.

    Args:
        changed: takes which of the softmaxes it is, and the weights ``(..., keys)``, to the weights that are handed on.

    Attributes:
        scores: those of each softmax, ``(..., keys)``.
        weights: what was handed on, ``(..., keys)``.
    """

    def __init__(self, changed: Callable[[int, Tensor], Tensor]) -> None:
        super().__init__()
        self.changed = changed
        self.scores: list[Tensor] = []  # (..., keys)
        self.weights: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            given = inspect.signature(func).bind(*args, **kwargs)
            given.apply_defaults()
            if given.arguments["use_separate_proj_weight"] and given.arguments["static_k"] is None:
                return self._attend_with_weights(given.arguments), None
        if func in _SOFTMAX:
            scores = args[0] if args else kwargs["input"]
            dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
            if isinstance(scores, Tensor) and scores.requires_grad and isinstance(dim, int):
                return self._weigh(scores, dim)
        return func(*args, **kwargs)

    def _weigh(self, scores: Tensor, dim: int) -> Tensor:
        self.scores.append(scores.movedim(dim, -1))
        weights = scores.detach().softmax(dim).nan_to_num()
        leaf = self.changed(len(self.weights), weights.movedim(dim, -1))
        self.weights.append(leaf)
        return leaf.movedim(-1, dim)

    def _attend(
        self,
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
        scores = dot_product_scores(query, key, attn_mask, is_causal=is_causal, scale=scale)
        return self._weigh(scores, -1) @ value if scores.requires_grad else scores.softmax(-1) @ value

    def _attend_with_weights(self, given: dict[str, Any]) -> Tensor:
        """Do what torch does with a matrix for each role, ``(length, batch, features)``."""
        H = given["num_heads"]
        mapped = [_mapped(given[role], given[f"{role[0]}_proj_weight"]) for role in ("query", "key", "value")]
        query, key, value = (one.view(*one.shape[:2], H, -1).permute(1, 2, 0, 3) for one in mapped)
        mask, padding = given["attn_mask"], given["key_padding_mask"]
        if mask is not None and mask.dim() == 3:
            mask = mask.view(-1, H, *mask.shape[1:])
        if padding is not None:
            padding = padding[:, None, None]
            ignored = padding if padding.dtype == torch.bool else padding.isneginf()
            mask = ~ignored if mask is None else mask.masked_fill(ignored, -torch.inf)
        outputs = self._attend(query, key, value, mask)  # (batch, H, length, width)
        return _mapped(outputs.permute(2, 0, 1, 3).flatten(2), given["out_proj_weight"])


def _mapped(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply, or ask the stub that the weight belongs to."""
    stub = getattr(weight, "_stands_for", None)
    if stub is None:
        return F.linear(x, weight)
    stub.is_called = False
    mapped: Tensor = stub(x)
    return mapped
