r"""Norms and cosines of the heads' circuits, from the weights of two projections.

What a head computes from its input is a product of two projections: :math:`B_h = W_Q^{h\top} W_K^h` scores pairs of
tokens, :math:`C_h = W_V^{h\top} W_O^h` writes into the output (Elhage et al. 2021). The products are ``d x d`` and are
never formed: their inner products are sums over blocks of ``d_k x d_k``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hdi_callback.core.pairs import at_least, head_chunks, largest_pair, live_pairs, symmetric
from hdi_callback.core.whitening import WhitenedHeads, by_layers, dead_heads, whiten_layers

_RANK_TOL = 1e-6


class CircuitSimilarity(NamedTuple):
    """Cosines of the circuits of a layer's heads. All fields have the batch dimensions of the weights in front."""

    # ``(H, H)``, of every pair of circuits as vectors, in [-1, 1]: 1 is the same map up to a positive factor, 0 what
    # independent heads have; diagonal 1 (0 for dead heads, all but zero beside the largest).
    cosine: Tensor
    worst: Tensor  # largest cosine of a pair; NaN with fewer than two live heads
    worst_pair: Tensor  # ``(2,)``, the two heads of that pair; -1 with fewer than two live heads
    norm: Tensor  # ``(H,)``, Frobenius norm of each circuit


class CircuitSums(NamedTuple):
    """Inner products and norms of circuits; layers in front."""

    inner: Tensor  # ``(..., H, H)``, inner products of circuits, up to a scale of each head
    norm: Tensor  # ``(..., H)``, the circuits' norms


@torch.no_grad()
def circuit_similarity(own: Tensor, shared: Tensor, group_of: Sequence[int] | None = None) -> CircuitSimilarity:
    r"""Return the cosines of the circuits of every two heads, of queries and keys or of outputs and values.

    .. math:: \langle B_h, B_g \rangle
              = \sum_{ij} (W_Q^h W_Q^{g\top})_{ij} \, (W_K^h W_K^{g\top})_{ij}

    Invariant under :math:`W_Q^h \to A W_Q^h, W_K^h \to A^{-\top} W_K^h`, which leaves attention as it is. A cosine of 1
    is the same kernel up to its temperature, or the same message about every token; -1 are messages that cancel. Biases
    are left out; with rotary positions B is the kernel at distance 0, and with a norm on queries or keys it is not the
    kernel exactly. The cosine over pairs in training is ours.

    `own` are the weights ``(..., H, k, d)`` of the queries or outputs, `shared` those ``(..., G, k, d')`` of the
    distinct key or value heads, of which `group_of` is that of each head; by default groups of equal size lie side by
    side. NaN everywhere in a layer with a weight that is not finite.

    Example:
        >>> weight = torch.eye(4).reshape(2, 2, 4)  # two heads that score in orthogonal planes
        >>> circuit_similarity(weight, weight).cosine.tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """
    layers = shared.to(torch.promote_types(own.dtype, shared.dtype)).reshape(-1, *shared.shape[-3:])
    sums = circuit_sums(own.reshape(-1, *own.shape[-3:]), whiten_layers(layers, _RANK_TOL), group_of)
    return circuits_of(CircuitSums(*(total.reshape(*own.shape[:-3], *total.shape[1:]) for total in sums)))


@torch.no_grad()
def circuit_norms(own: Tensor, shared: WhitenedHeads, group_of: Sequence[int] | None = None) -> Tensor:
    """Return the norms ``(L, H)`` of circuits of weights ``(L, H, k, d)`` and of whitened keys or values."""
    group = _groups(own.shape[1], shared.rows.shape[1], group_of, own.device)
    return by_layers(lambda some, *heads: _mixed(some, WhitenedHeads(*heads), group)[2:], own, *shared)[0]


@torch.no_grad()
def circuit_sums(own: Tensor, shared: WhitenedHeads, group_of: Sequence[int] | None = None) -> CircuitSums:
    """Return what `circuits_of` takes, of weights ``(L, H, k, d)`` and of whitened keys or values ``(L, G, k, d')``."""
    group = _groups(own.shape[1], shared.rows.shape[1], group_of, own.device)
    return CircuitSums(
        *by_layers(lambda some, *heads: _inner_products(some, WhitenedHeads(*heads), group), own, *shared)
    )


def _inner_products(own: Tensor, keys: WhitenedHeads, group: Tensor | None) -> tuple[Tensor, Tensor]:
    # K = M R with R a frame of the rows of K, so that Q^T K = (M^T Q)^T R and the circuit's norm is ||M^T Q||: nothing
    # cancels, however unevenly a head shares its scale between Q and K.
    mixed, size, norm = _mixed(own, keys, group)
    mixed = (mixed / torch.where(size == 0, 1, size).to(mixed.dtype)[..., None, None]).to(keys.rows.dtype)
    H, k = own.shape[1:3]
    flat, rows = mixed.flatten(1, 2), keys.rows
    inner = []
    for part in head_chunks(H, len(mixed) * mixed.element_size() * k * k * 2 * H, at_least=at_least(mixed)):
        first = slice(part.start * k, None)
        product = flat[:, part.start * k : part.stop * k] @ flat[:, first].mT
        product = product.unflatten(1, (-1, k)).unflatten(-1, (-1, k))  # (L, heads, k, others, k)
        if group is None:
            of_keys = (rows[:, part].flatten(1, 2) @ rows[:, part.start :].flatten(1, 2).mT).view_as(product)
        else:
            of_groups = rows.index_select(1, group[part]).flatten(1, 2) @ rows.flatten(1, 2).mT
            of_groups = of_groups.unflatten(1, (-1, k)).unflatten(-1, (-1, k))
            of_keys = of_groups.index_select(-2, group[part.start :])
        inner.append((part, product.mul_(of_keys).sum((2, 4))))
    return symmetric(H, inner), norm


def _mixed(own: Tensor, keys: WhitenedHeads, group: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return M^T Q of every head with its group's matrix M, their norms, and the norms of the circuits."""
    mixing, norm = keys.mixing, keys.norm
    if group is not None:
        mixing, norm = mixing.index_select(1, group), norm.index_select(1, group)
    mixed = mixing.mT @ own.to(mixing.dtype)
    size = torch.linalg.vector_norm(mixed, dim=(-2, -1), dtype=torch.float64)
    return mixed, size, size * norm


@torch.no_grad()
def circuits_of(sums: CircuitSums) -> CircuitSimilarity:
    """Divide inner products by norms."""
    inner = sums.inner
    norm, dead = dead_heads(sums.norm, _RANK_TOL)
    live = ~dead
    unit = inner.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt().masked_fill(dead, 1)
    unit = torch.where(norm.isfinite(), unit, torch.nan)
    cosine = (inner / (unit[..., :, None] * unit[..., None, :])).clamp(-1, 1)
    eye = torch.eye(dead.shape[-1], dtype=torch.bool, device=dead.device)
    cosine = torch.where(eye & cosine.isfinite(), 1, cosine)
    cosine = torch.where(live[..., :, None] & live[..., None, :], cosine, 0)
    return CircuitSimilarity(cosine, *largest_pair(cosine, live_pairs(dead)), norm.to(inner.dtype))


def _groups(heads: int, groups: int, group_of: Sequence[int] | None, device: torch.device) -> Tensor | None:
    """Key head of each query head as a tensor ``(H,)``; `None` if each head has its own, in order."""
    group_of = [head * groups // heads for head in range(heads)] if group_of is None else group_of
    return None if list(group_of) == list(range(groups)) else torch.tensor(group_of).to(device, non_blocking=True)
