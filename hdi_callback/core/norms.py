"""Norms of queries and keys: `NormSums` -> a bound on attention scores."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hdi_callback.errors import ShapeError


@dataclass(frozen=True)
class NormSums:
    """Sums of the norms of a layer's queries or keys. All add up over disjoint tokens; `largest` merges by maximum.

    Attributes:
        count: ``(H,)``, number of tokens.
        total: ``(H,)``, sum of the norms.
        squares: ``(H,)``, sum of their squares.
        largest: ``(H,)``, the largest norm; 0 without tokens.
    """

    count: Tensor
    total: Tensor
    squares: Tensor
    largest: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, features: Tensor, valid: Tensor | None = None) -> NormSums:
        """Add up the norms of some tokens of one layer.

        Args:
            features: ``(..., H, tokens, width)``, as they enter the product of queries and keys; all dimensions in
                front of the heads are further tokens.
            valid: boolean, broadcastable to ``(..., H, tokens)``; False for padding.

        Returns:
            Their sums, in float64 where the device has it: a spread far below the mean would drown in float32.

        Raises:
            ShapeError: if `features` has fewer than three dimensions.
        """
        if features.dim() < 3:
            raise ShapeError(f"Features have the shape (..., heads, tokens, width), got {tuple(features.shape)}.")
        single = torch.promote_types(features.dtype, torch.float32)
        wide = torch.float32 if features.device.type == "mps" else torch.float64
        norm = torch.linalg.vector_norm(features, dim=-1, dtype=single).to(wide)
        counts = torch.ones_like(norm) if valid is None else valid.expand(norm.shape).to(wide)
        norm = torch.where(counts > 0, norm, 0)
        flat = norm.movedim(-2, 0).flatten(1)
        # A zero more, as an empty tensor has no largest entry.
        largest = torch.nn.functional.pad(flat, (0, 1)).amax(-1)
        return cls(counts.movedim(-2, 0).flatten(1).sum(-1), flat.sum(-1), flat.square().sum(-1), largest)

    def __add__(self, other: NormSums) -> NormSums:
        """Join disjoint tokens of the same heads."""
        return NormSums(
            self.count + other.count,
            self.total + other.total,
            self.squares + other.squares,
            torch.maximum(self.largest, other.largest),
        )

    @property
    def mean(self) -> Tensor:
        """Mean norm of each head, ``(H,)``; NaN without tokens."""
        return self.total / self.count

    @property
    def spread(self) -> Tensor:
        """Coefficient of variation of the norms of each head, ``(H,)``.

        Softmax attention is the Gaussian kernel exactly where all keys have one norm, that is where this is 0.
        """
        return (self.squares / self.count - self.mean.square()).clamp_min(0).sqrt() / self.mean


@torch.no_grad()
def logit_bound(
    query: NormSums,
    key: NormSums,
    scale: float | Tensor,
    *,
    bias: float | Tensor = 0.0,
    key_head: Tensor | None = None,
) -> Tensor:
    r"""Bound the largest score of all queries, not only of those that were sampled.

    .. math:: \max_{q,k} s_h(q, k) \le |\mathrm{scale}| \, \max \lVert q \rVert \, \max \lVert k \rVert + \max b

    by the inequality of Cauchy and Schwarz. A softcap only lowers scores.

    Args:
        query: norms of all queries, ``(H,)``.
        key: norms of all keys, ``(G,)``; G divides H.
        scale: factor of the products, a number or ``(H,)``.
        bias: largest additive term of the scores, a number or ``(H,)``.
        key_head: ``(H,)``, the key head of each query head; by default the groups lie side by side.

    Returns:
        ``(H,)``; NaN without a query or without a key.

    Raises:
        ShapeError: if the heads cannot be divided among the key heads.

    Example:
        >>> queries, keys = torch.full((2, 3, 4), 2.0), torch.ones(1, 5, 4)  # norms 4 and 2
        >>> logit_bound(NormSums.of(queries), NormSums.of(keys), 0.5).tolist()
        [4.0, 4.0]
    """
    H, G = query.largest.shape[0], key.largest.shape[0]
    if key_head is None and H % G:
        raise ShapeError(f"{H} heads cannot be divided among {G} key heads: give `key_head`.")
    group = torch.arange(H, device=query.largest.device) // (H // G) if key_head is None else key_head
    size = scale.abs() if isinstance(scale, Tensor) else abs(scale)
    bound = query.largest * key.largest.index_select(0, group) * size + bias
    known = (query.count > 0) & (key.count.index_select(0, group) > 0)
    return torch.where(known, bound, torch.nan)
