r"""Cosines of the heads' circuits: the weights of two projections -> `CircuitSimilarity`.

What a head computes from its input is a product of two projections: :math:`B_h = W_Q^{h\top} W_K^h` scores pairs of
tokens, :math:`C_h = W_V^{h\top} W_O^h` writes into the output (Elhage et al. 2021). The products are ``d x d`` and are
never formed: their inner products are sums over blocks of ``d_k x d_k``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hdi_callback.core.pairs import at_least, head_chunks, largest_pair, live_pairs, mean_over_pairs, symmetric
from hdi_callback.core.whitening import WhitenedHeads, by_layers, dead_heads, whiten_layers
from hdi_callback.errors import ShapeError

_RANK_TOL = 1e-6


@dataclass(frozen=True)
class CircuitSimilarity:
    """Cosines of the circuits of a layer's heads. All fields have the batch dimensions of the weights in front.

    Attributes:
        cosine: ``(H, H)``, cosine of every pair of circuits as vectors, in [-1, 1]: 1 is the same map up to a positive
            factor, 0 what independent heads have; diagonal 1 (0 for dead heads).
        mean: mean cosine over the pairs of live heads; NaN with fewer than two of them.
        worst: largest cosine of a pair.
        worst_pair: ``(2,)``, the two heads of that pair; -1 with fewer than two live heads.
        norm: ``(H,)``, Frobenius norm of each circuit.
        dead: ``(H,)``, True where a circuit is all but zero beside the largest of its layer.
    """

    cosine: Tensor
    mean: Tensor
    worst: Tensor
    worst_pair: Tensor
    norm: Tensor
    dead: Tensor


@torch.no_grad()
def qk_circuits(query: Tensor, key: Tensor, key_of: Sequence[int] | None = None) -> CircuitSimilarity:
    r"""Compute the cosines of the QK circuits :math:`B_h = W_Q^{h\top} W_K^h` of every two heads.

    .. math:: \langle B_h, B_g \rangle
              = \sum_{ij} (W_Q^h W_Q^{g\top})_{ij} \, (W_K^h W_K^{g\top})_{ij}

    Invariant under :math:`W_Q^h \to A W_Q^h, W_K^h \to A^{-\top} W_K^h`, which leaves attention as it is. A cosine of 1
    is the same kernel up to its temperature. Biases are left out; with rotary positions B is the kernel at distance 0,
    and with a norm on queries or keys it is not the kernel exactly. The cosine over pairs in training is ours.

    Args:
        query: ``(..., H, d_k, d)``, rows are features as in ``nn.Linear.weight``.
        key: ``(..., G, d_k, d')``, the distinct key heads.
        key_of: the key head of each query head; by default groups of equal size lie side by side.

    Returns:
        The cosines, in float32 (float64 for float64 weights); NaN everywhere in a layer with a weight that is not
        finite.

    Raises:
        ShapeError: if the shapes do not belong together.

    Example:
        >>> weight = torch.eye(4).reshape(2, 2, 4)  # two heads that score in orthogonal planes
        >>> qk_circuits(weight, weight).cosine.tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """
    require_circuit(query, key, key_of, "query", "key")
    return _similarity(query, key, key_of)


@torch.no_grad()
def ov_circuits(value: Tensor, output: Tensor, value_of: Sequence[int] | None = None) -> CircuitSimilarity:
    r"""Compute the cosines of the OV circuits :math:`C_h = W_V^{h\top} W_O^h` of every two heads.

    .. math:: \langle C_h, C_g \rangle
              = \sum_{ij} (W_V^h W_V^{g\top})_{ij} \, (W_O^h W_O^{g\top})_{ij}

    A cosine of 1 is the same message about every token, of -1 messages that cancel.

    Args:
        value: ``(..., G, d_v, d)``, the distinct value heads.
        output: ``(..., H, d_v, d')``, the output projection's slice of each head.
        value_of: the value head of each head; by default groups of equal size lie side by side.

    Returns:
        The cosines, as `qk_circuits` gives them.

    Raises:
        ShapeError: if the shapes do not belong together.

    Example:
        >>> value = torch.eye(4).reshape(2, 2, 4)
        >>> bool(ov_circuits(value, torch.ones(2, 2, 4)).worst.abs() < 1e-6)  # two sources, one message: not alike
        True
    """
    require_circuit(output, value, value_of, "output", "value")
    return _similarity(output, value, value_of)


def _similarity(own: Tensor, shared: Tensor, group_of: Sequence[int] | None) -> CircuitSimilarity:
    """Compare the circuits of `own` (..., H, k, d) and `shared` (..., G, k, d')."""
    *batch, H, k, d = own.shape
    wide = torch.promote_types(own.dtype, shared.dtype)
    heads = whiten_layers(shared.to(wide).reshape(-1, *shared.shape[-3:]), _RANK_TOL)
    sums = circuit_sums(own.reshape(-1, H, k, d), heads, group_of)
    return circuits_of(CircuitSums(*(part.reshape(*batch, *part.shape[1:]) for part in vars(sums).values())))


@dataclass(frozen=True)
class CircuitSums:
    """Inner products and norms of circuits; layers in front."""

    inner: Tensor  # ``(..., H, H)``, inner products of circuits, up to a scale of each head
    norm: Tensor  # ``(..., H)``, the circuits' norms


@torch.no_grad()
def circuit_sums(own: Tensor, shared: WhitenedHeads, group_of: Sequence[int] | None = None) -> CircuitSums:
    """Compute inner products of circuits, some layers at a time.

    Args:
        own: ``(L, H, k, d)``, queries or outputs.
        shared: keys or values ``(L, G, k, d')``, whitened.
        group_of: the one of G of each of the H heads.

    Returns:
        What `circuits_of` takes.
    """
    group = groups_of(own.shape[1], shared.rows.shape[1], group_of, own.device)
    of_layers = lambda some, *tensors: _inner_products(some, WhitenedHeads(*tensors), group)  # noqa: E731
    return by_layers(of_layers, own, *vars(shared).values())


def _inner_products(own: Tensor, keys: WhitenedHeads, group: Tensor | None) -> CircuitSums:
    # K = M R with R a frame of the rows of K, so that Q^T K = (M^T Q)^T R and the circuit's norm is ||M^T Q||: nothing
    # cancels, however unevenly a head shares its scale between Q and K.
    mixed, norm = _mixed(own, keys, group)
    H, k = own.shape[1:3]
    G = keys.rows.shape[1]
    inner = []
    flat, rows = mixed.flatten(1, 2), keys.rows.flatten(1, 2)
    each = len(mixed) * mixed.element_size() * k * k * (H + H)
    for part in head_chunks(H, each, at_least=at_least(mixed)):
        first = slice(part.start * k, None)
        product = flat[:, part.start * k : part.stop * k] @ flat[:, first].mT
        product = product.unflatten(1, (-1, k)).unflatten(-1, (-1, k))  # (L, heads, k, others, k)
        if group is None:
            of_keys = rows[:, part.start * k : part.stop * k] @ rows[:, first].mT
            of_keys = of_keys.view_as(product)
        else:
            rows_of_group = keys.rows.index_select(1, group[part]).flatten(1, 2)
            of_keys = (
                (rows_of_group @ rows.mT)
                .unflatten(1, (-1, k))
                .unflatten(-1, (G, k))
                .index_select(-2, group[part.start :])
            )
        inner.append((part, product.mul_(of_keys).sum((2, 4))))
    return CircuitSums(symmetric(H, inner), norm)


def _mixed(own: Tensor, keys: WhitenedHeads, group: Tensor | None) -> tuple[Tensor, Tensor]:
    """M^T Q of every head with its group's matrix M, scaled to norm 1, and the norms of the circuits."""
    mixing, norm = keys.mixing, keys.norm
    if group is not None:
        mixing, norm = mixing.index_select(1, group), norm.index_select(1, group)
    mixed = mixing.mT @ own.to(mixing.dtype)
    size = torch.linalg.vector_norm(mixed, dim=(-2, -1), dtype=torch.float64)
    mixed = (mixed / torch.where(size == 0, 1, size)[..., None, None]).to(keys.rows.dtype)
    return mixed, size * norm


@torch.no_grad()
def circuits_of(sums: CircuitSums) -> CircuitSimilarity:
    """Divide inner products by norms."""
    inner = sums.inner
    norm, dead = dead_heads(sums.norm, _RANK_TOL)
    live, pairs = ~dead, live_pairs(dead)
    unit = inner.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt().masked_fill(dead, 1)
    unit = torch.where(norm.isfinite(), unit, torch.nan)
    cosine = (inner / (unit[..., :, None] * unit[..., None, :])).clamp(-1, 1)
    eye = torch.eye(dead.shape[-1], dtype=torch.bool, device=dead.device)
    cosine = torch.where(eye & cosine.isfinite(), 1, cosine)
    cosine = torch.where(live[..., :, None] & live[..., None, :], cosine, 0)
    worst, worst_pair, *_ = largest_pair(cosine, pairs)
    return CircuitSimilarity(
        cosine=cosine,
        mean=mean_over_pairs(cosine, pairs),
        worst=worst,
        worst_pair=worst_pair,
        norm=norm.to(inner.dtype),
        dead=dead,
    )


def groups_of(heads: int, groups: int, group_of: Sequence[int] | None, device: torch.device) -> Tensor | None:
    """Key head of each query head as a tensor ``(H,)``; `None` if each head has its own, in order."""
    if group_of is None:
        group_of = [head * groups // heads for head in range(heads)]
    if list(group_of) == list(range(groups)):
        return None
    return torch.tensor(group_of).to(device, non_blocking=True)


def require_circuit(
    own: Tensor, shared: Tensor, group_of: Sequence[int] | None, own_name: str, shared_name: str
) -> None:
    """Check that two weights are of heads of equal width, and that each head has a group."""
    fits = own.dim() >= 3 and own.shape[:-3] == shared.shape[:-3] and own.shape[-2] == shared.shape[-2]
    if not fits or 0 in own.shape[-3:] + shared.shape[-3:]:
        raise ShapeError(
            f"A circuit needs `{own_name}` (..., heads, width, features) and `{shared_name}` (..., groups, width, "
            f"features) of equal widths, got {tuple(own.shape)} and {tuple(shared.shape)}."
        )
    H, G = own.shape[-3], shared.shape[-3]
    if H % G if group_of is None else len(group_of) != H or not all(0 <= group < G for group in group_of):
        raise ShapeError(
            f"`{own_name}` has {H} heads and `{shared_name}` {G}: write `{shared_name}_of`, for each of the {H} heads "
            f"one of range({G}); got {group_of}."
        )
