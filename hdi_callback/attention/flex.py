"""FlexAttention without a kernel: its scores, which keys a query sees, its outputs, for some queries at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hdi_callback.attention.releases import FLEX_HAS_MAXIMUM, TransformGetItemToIndex, identity, vmap

_SCORES_AT_ONCE = 2**26


@dataclass(frozen=True)
class FlexCall:
    """One call of FlexAttention, by the arguments of its operator."""

    query: Tensor  # ``(b, H, q, width)``
    key: Tensor  # ``(b, key heads, k, width)``
    value: Tensor  # ``(b, key heads, k, d_v)``
    score_mod: Any  # changes scores: ``score_mod(score, b, h, q, k, *buffers)``
    block_mask: Any  # its last item is ``mask_mod(b, h, q, k, *buffers)``
    scale: float  # what products of queries and keys are multiplied by
    kernel_options: Any = None
    score_buffers: tuple[Any, ...] = ()
    mask_buffers: tuple[Any, ...] = ()

    @property
    def changes_scores(self) -> str:
        """The name of the function that changes scores; ``""`` if there is none."""
        return "" if self.score_mod is identity else str(getattr(self.score_mod, "__name__", "score_mod"))

    def visible(self, queries: Tensor, keys: Tensor, *, batch: int | None = None, heads: int | None = None) -> Tensor:
        """Return ``(batch, heads, q, k)``, true where a query sees a key, of some positions, sequences and heads."""
        b, h = (self._range(size) for size in (batch or len(self.query), heads or self.query.shape[1]))
        is_visible = vmap(self.block_mask[-1], prefix=(), suffix=(None,) * len(self.mask_buffers))
        with TransformGetItemToIndex():
            grid: Tensor = is_visible(b, h, queries, keys, *self.mask_buffers)
        visible: Tensor = grid.expand(len(b), len(h), len(queries), len(keys))
        return visible

    def logits(self, positions: Tensor) -> Tensor:
        """Compute the scores of some queries as they enter the softmax, ``(b, H, q, k)``."""
        query = self.query[:, :, positions].to(torch.promote_types(self.query.dtype, torch.float32))
        key = self.key.repeat_interleave(query.shape[1] // self.key.shape[1], 1).to(query.dtype)
        scores = self.changed(query @ key.mT * self.scale, positions)
        logits: Tensor = scores.masked_fill(~self.visible(positions, self._range(scores.shape[3])), -math.inf)
        return logits

    def changed(self, scores: Tensor, positions: Tensor) -> Tensor:
        """Return scores, ``(b, H, q, k)``, of queries at some positions, as `score_mod` changes them."""
        b, h, keys = (self._range(scores.shape[dim]) for dim in (0, 1, 3))
        change = vmap(self.score_mod, prefix=(0,), suffix=(None,) * len(self.score_buffers))
        with TransformGetItemToIndex():
            changed: Tensor = change(scores, b, h, positions, keys, *self.score_buffers)
        return changed

    def run(self) -> tuple[Tensor, ...]:
        """Return what the operator does: outputs, log-sum-exp and, if it has them, largest scores, both to base 2."""
        at_once = max(1, _SCORES_AT_ONCE // max(1, self.query[..., :1, :1].numel() * self.key.shape[-2]))
        parts = [self._rows(positions) for positions in self._range(self.query.shape[2]).split(at_once)]
        outputs = tuple(torch.cat(each, 2) for each in zip(*parts))
        return outputs if FLEX_HAS_MAXIMUM else outputs[:2]

    def _rows(self, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.logits(positions)
        value = self.value.repeat_interleave(logits.shape[1] // self.value.shape[1], 1)
        weights = torch._safe_softmax(logits, -1).to(self.query.dtype)
        return weights @ value.to(weights.dtype), logits.logsumexp(-1) / math.log(2), logits.amax(-1) / math.log(2)

    def _range(self, size: int) -> Tensor:
        return torch.arange(size, device=self.query.device)
