r"""Cosines of the heads' circuits: the weights of two projections -> `CircuitSimilarity`.

What a head computes from its input is a product of two projections: :math:`B_h = W_Q^{h\top} W_K^h` scores pairs of
tokens, :math:`C_h = W_V^{h\top} W_O^h` writes into the output. The products are ``d x d`` and are never formed: their
inner products are sums over blocks of ``d_k x d_k``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hdi_callback.core.pairs import clusters, largest_pair, live_pairs, mean_over_pairs
from hdi_callback.core.products import HeadProducts, products_of, row_products
from hdi_callback.core.tensors import may_decide_on_host, require_tensors
from hdi_callback.core.whitening import DEFAULT_BUDGET, head_chunks, require_rank_tol, whiten_heads
from hdi_callback.errors import MisconfigurationError, ShapeError

_TINY = 1e-30


@dataclass(frozen=True)
class CircuitSimilarity:
    """Cosines of the circuits of a layer's heads. All fields have the batch dimensions of the weights in front.

    Attributes:
        cosine: ``(H, H)``, cosine of every pair of circuits as vectors, in [-1, 1]: 1 is the same map up to a positive
            factor, 0 what independent heads have; diagonal 1 (0 for dead heads).
        mean: mean cosine over the pairs of live heads; NaN with fewer than two of them.
        worst: largest cosine of a pair.
        worst_pair: ``(2,)``, the two heads of that pair; -1 with fewer than two live heads.
        nearest: ``(H,)``, for each head the head whose circuit is most like its own; -1 if there is none.
        nearest_cosine: ``(H,)``, that cosine.
        cluster: ``(H,)``, the smallest head among those that a chain of cosines at or above the limit joins with this
            one: its own number for a head that stands alone.
        distinct: number of clusters of live heads.
        norm: ``(H,)``, Frobenius norm of each circuit.
        dead: ``(H,)``, True where a circuit is all but zero beside the largest of its layer.
    """

    cosine: Tensor
    mean: Tensor
    worst: Tensor
    worst_pair: Tensor
    nearest: Tensor
    nearest_cosine: Tensor
    cluster: Tensor
    distinct: Tensor
    norm: Tensor
    dead: Tensor


@dataclass(frozen=True)
class CircuitProducts:
    """Inner products and norms of the circuits of some layers, from which `CircuitSimilarity` is computed.

    Attributes:
        inner: ``(..., H, H)``, inner products of the circuits, up to a scale of each head.
        norm: ``(..., H)``, their norms.
        rank_tol: ``(...)``, a circuit whose norm is below this fraction of the layer's largest is dead.
        limit: ``(...)``, cosines from here on join heads to a cluster.
    """

    inner: Tensor
    norm: Tensor
    rank_tol: Tensor
    limit: Tensor

    def similarity(self) -> CircuitSimilarity:
        """Divide inner products by norms, all layers at once.

        Returns:
            The cosines.
        """
        return _summarise(self)


@torch.no_grad()
def qk_circuits(
    query: Tensor,
    key: Tensor,
    *,
    query_covariance: Tensor | None = None,
    key_covariance: Tensor | None = None,
    key_head: Tensor | None = None,
    limit: float = 0.9,
    rank_tol: float = 1e-6,
    memory_budget: int = DEFAULT_BUDGET,
) -> CircuitSimilarity:
    r"""Compute the cosines of the QK circuits :math:`B_h = W_Q^{h\top} W_K^h` of every two heads.

    .. math:: \langle B_h, B_g \rangle
              = \sum_{ij} (W_Q^h W_Q^{g\top})_{ij} \, (W_K^h W_K^{g\top})_{ij}

    Invariant under :math:`W_Q^h \to A W_Q^h, W_K^h \to A^{-\top} W_K^h`, which leaves attention as it is. A cosine of 1
    is the same kernel up to its temperature. With covariances it is the cosine of the scores on inputs so distributed,
    :math:`\operatorname{tr}(S_q B_h S_k B_g^\top)`. Biases are left out; with rotary positions B is the kernel at
    distance 0, and with a norm on queries or keys it is not the kernel exactly. Inner products of circuits: Elhage et
    al. 2021 name the circuits, the cosine over pairs in training is ours.

    Args:
        query: ``(..., H, d_k, d)``, rows are features as in ``nn.Linear.weight``.
        key: ``(..., G, d_k, d')``, the distinct key heads; G divides H.
        query_covariance: ``(..., d, d)``, covariance of the inputs of the queries; the identity by default.
        key_covariance: ``(..., d', d')``, covariance of the inputs of the keys.
        key_head: ``(H,)``, whole numbers: the key head of each query head; by default the groups lie side by side.
        limit: cosines from here on join heads to a cluster.
        rank_tol: a circuit whose norm is below this fraction of the layer's largest is dead, and directions of a key
            head below this fraction of its largest do not count.
        memory_budget: bytes of temporary memory beyond one copy of each of the two weights in the type of the result.

    Returns:
        The cosines, in float32 (float64 for float64 weights); NaN everywhere in a layer with a weight that is not
        finite.

    Raises:
        MisconfigurationError: if `limit` or `rank_tol` is not between 0 and 1.
        ShapeError: if the shapes do not belong together.

    Example:
        >>> weight = torch.eye(4).reshape(2, 2, 4)  # two heads that score in orthogonal planes
        >>> qk_circuits(weight, weight).cosine.tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """
    require_tensors(query=query, key=key)
    return _products(
        query, key, query_covariance, key_covariance, key_head, limit, rank_tol, memory_budget, ("query", "key")
    ).similarity()


@torch.no_grad()
def qk_circuits_from_products(
    query: Tensor,
    key: Tensor,
    products: HeadProducts | None,
    *,
    rank_tol: float = 1e-6,
    memory_budget: int = DEFAULT_BUDGET,
) -> CircuitProducts:
    """Compute the inner products of the QK circuits, with products of keys that are known already.

    Args:
        query: ``(..., H, d_k, d)``; of one layer, ``(1, H, d_k, d)``, where products are given.
        key: ``(..., G, d_k, d')``.
        products: of the keys, as `blocks_and_products` returns them; used where each head has keys of its own.
        rank_tol: as in `qk_circuits`.
        memory_budget: as in `qk_circuits`.

    Returns:
        The inner products.
    """
    require_tensors(query=query, key=key)
    names = ("query", "key")
    return _products(query, key, None, None, None, 0.9, rank_tol, memory_budget, names, products=products)


@torch.no_grad()
def ov_circuits_and_products(
    value: Tensor,
    output: Tensor,
    *,
    rank_tol: float = 1e-6,
    memory_budget: int = DEFAULT_BUDGET,
    keeps_products: bool = True,
) -> tuple[CircuitProducts, HeadProducts | None]:
    """Compute the inner products of the OV circuits; return the products of one layer's output weights for reuse.

    Args:
        value: ``(..., G, d_v, d)``; ``(1, G, d_v, d)`` on a CPU for products.
        output: ``(..., H, d_v, d')``, likewise.
        rank_tol: as in `ov_circuits`.
        memory_budget: as in `ov_circuits`, beside the products.
        keeps_products: return these products.

    Returns:
        The inner products; the products of the output weights, or `None` where the circuits are not computed from them.
    """
    require_tensors(value=value, output=output)
    kept: list[tuple[slice, Tensor]] | None = [] if keeps_products else None
    found = _products(
        output, value, None, None, None, 0.9, rank_tol, memory_budget, ("output", "value"), kept=kept
    )  # fmt: skip
    norm = torch.ones(output.shape[-3], device=output.device)
    return found, HeadProducts(tuple(kept), norm) if kept else None


@torch.no_grad()
def ov_circuits(
    value: Tensor,
    output: Tensor,
    *,
    value_covariance: Tensor | None = None,
    key_head: Tensor | None = None,
    limit: float = 0.9,
    rank_tol: float = 1e-6,
    memory_budget: int = DEFAULT_BUDGET,
) -> CircuitSimilarity:
    r"""Compute the cosines of the OV circuits :math:`C_h = W_V^{h\top} W_O^h` of every two heads.

    .. math:: \langle C_h, C_g \rangle
              = \sum_{ij} (W_V^h W_V^{g\top})_{ij} \, (W_O^h W_O^{g\top})_{ij}

    A cosine of 1 is the same message about every token, of -1 messages that cancel.

    Args:
        value: ``(..., G, d_v, d)``, the distinct value heads; G divides H.
        output: ``(..., H, d_v, d')``, the output projection's slice of each head.
        value_covariance: ``(..., d, d)``, covariance of the inputs of the values; the identity by default.
        key_head: ``(H,)``, whole numbers: the value head of each head; by default the groups lie side by side.
        limit: cosines from here on join heads to a cluster.
        rank_tol: as in `qk_circuits`.
        memory_budget: as in `qk_circuits`.

    Returns:
        The cosines, in float32 (float64 for float64 weights); NaN everywhere in a layer with a weight that is not
        finite.

    Raises:
        MisconfigurationError: if `limit` or `rank_tol` is not between 0 and 1.
        ShapeError: if the shapes do not belong together.

    Example:
        >>> value = torch.eye(4).reshape(2, 2, 4)
        >>> bool(ov_circuits(value, torch.ones(2, 2, 4)).worst.abs() < 1e-6)  # two sources, one message: not alike
        True
    """
    require_tensors(value=value, output=output)
    return _products(
        output, value, None, value_covariance, key_head, limit, rank_tol, memory_budget, ("output", "value")
    ).similarity()


def _products(
    own: Tensor,
    grouped: Tensor,
    own_covariance: Tensor | None,
    grouped_covariance: Tensor | None,
    key_head: Tensor | None,
    limit: float,
    rank_tol: float,
    memory_budget: int,
    names: tuple[str, str],
    *,
    products: HeadProducts | None = None,
    kept: list[tuple[slice, Tensor]] | None = None,
) -> CircuitProducts:
    """Multiply the products of `own` (..., H, k, d) with `grouped` (..., G, k, d') of each head's group."""
    if not 0 < limit <= 1:
        raise MisconfigurationError(f"`limit` is a cosine in (0, 1], got {limit}. Write limit=0.9.")
    require_rank_tol(rank_tol)
    require_circuit_shapes(own, grouped, *names)
    H, G = own.shape[-3], grouped.shape[-3]
    group = torch.arange(H, device=own.device) // (H // G) if key_head is None else key_head
    if group.shape != (H,):
        raise ShapeError(f"`key_head` has one entry for each of the {H} heads, got {tuple(group.shape)}.")
    batch, features = own.shape[:-3], (own.shape[-3:], grouped.shape[-3:])
    own, grouped = (side.reshape(-1, *shape) for side, shape in zip((own, grouped), features))
    has_metric = own_covariance is not None or grouped_covariance is not None
    if not has_metric and may_decide_on_host(own) and may_decide_on_host(grouped):
        inner, is_clear = _from_grams(own, grouped, group, memory_budget, products, kept)
        norm = inner.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt().double()
        for row in (~is_clear).nonzero()[:, 0].tolist():
            one = slice(row, row + 1)
            inner[one], norm[one] = _whitened(own[one], grouped[one], None, None, group, rank_tol, memory_budget)
    else:
        of_own, of_grouped = (_by_layer(S, batch) for S in (own_covariance, grouped_covariance))
        inner, norm = _whitened(own, grouped, of_own, of_grouped, group, rank_tol, memory_budget)
    inner, norm = inner.reshape(*batch, H, H), norm.reshape(*batch, H)
    return CircuitProducts(inner, norm, norm.new_full(batch, rank_tol), inner.new_full(batch, limit))


def _summarise(products: CircuitProducts) -> CircuitSimilarity:
    """Divide inner products by norms."""
    inner, norm = products.inner, products.norm
    H, device = inner.shape[-1], inner.device
    out = inner.dtype
    in_metric = inner.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
    largest = norm.amax(-1, keepdim=True)
    dead = ((norm < products.rank_tol[..., None] * largest) | (largest == 0)) & largest.isfinite()

    diagonal = torch.eye(H, dtype=torch.bool, device=device)
    live = ~dead
    unit = torch.where(largest.isfinite(), in_metric.masked_fill(dead, 1), torch.nan)
    cosine = (inner / (unit[..., :, None] * unit[..., None, :])).clamp(-1, 1)
    cosine = torch.where(diagonal & cosine.isfinite(), 1, cosine)
    cosine = torch.where(live[..., :, None] & live[..., None, :], cosine, 0)
    pairs = live_pairs(dead)
    worst, worst_pair, nearest, nearest_cosine = largest_pair(cosine, pairs)
    cluster = clusters(cosine, pairs, products.limit[..., None, None])
    first = cluster == torch.arange(H, device=device)
    return CircuitSimilarity(
        cosine=cosine,
        mean=mean_over_pairs(cosine, pairs),
        worst=worst,
        worst_pair=worst_pair,
        nearest=nearest,
        nearest_cosine=nearest_cosine,
        cluster=cluster,
        distinct=(first & live).sum(-1).to(out),
        norm=torch.where(largest.isfinite(), norm, torch.nan).to(out),
        dead=dead,
    )


_CANCELLATION = 100.0
"""Largest product of the norms of a circuit's two Gram matrices, over their inner product, at which float32 gives
cosines to 1e-6."""


def _from_grams(
    own: Tensor,
    grouped: Tensor,
    group: Tensor,
    budget: int,
    products: HeadProducts | None,
    kept: list[tuple[slice, Tensor]] | None,
) -> tuple[Tensor, Tensor]:
    r"""Compute inner products of circuits from the unwhitened Gram matrices of both sides, layer by layer.

    The circuit's own is :math:`\langle Q_h Q_h^\top, K_h K_h^\top \rangle`. Where that is far below the product of the
    two norms, as with a scale that is shared unevenly between Q and K, digits cancel.

    Args:
        own: ``(L, H, k, d)``.
        grouped: ``(L, G, k, d')``.
        group: ``(H,)``.
        budget: bytes of temporary memory.
        products: of `grouped` with itself, of one layer, if they are known.
        kept: receives the products of `own` with itself, of one layer.

    Returns:
        Inner products ``(L, H, H)``, and in which layers they are exact to rounding, ``(L,)``.
    """
    L, H, k, _ = own.shape
    G = grouped.shape[1]
    inner = own.new_empty(L, H, H, dtype=torch.float32)
    size = inner.new_empty(2, L, H)
    is_own = H == G and group.tolist() == list(range(H))
    known = products if is_own else None
    for row in range(L):
        left, right = own[row].float().flatten(0, 1), grouped[row].float().flatten(0, 1)
        parts = head_chunks(H, 4 * k * (2 * H * k + (0 if is_own else 2 * G * k)), budget, at_least=4)
        if known is not None:
            parts = (part for part, _ in known.parts)
        others = None if known is None else iter(known.parts)
        for part, product in products_of(left, H, parts):
            start = part.start
            if others is not None:
                _, other = next(others)
            elif is_own:
                _, other = next(products_of(right, H, iter([part])))
            else:
                # Heads of one group have one block.
                mine = sorted(set(group[part].tolist()))
                place = [mine.index(one) for one in group[part].tolist()]
                other = row_products(right.view(G, k, -1)[mine].flatten(0, 1), right)
                other = other.view(len(mine), k, G, k)[place][:, :, group[start:]]
            for side, blocks in zip(size, (product, other)):
                side[row, part] = torch.linalg.vector_norm(blocks.diagonal(dim1=0, dim2=2), dim=(0, 1))
            if kept is None:
                sums = product.mul_(other).sum((1, 3))
            else:
                kept.append((part, product))
                sums = other.mul_(product).sum((1, 3))
            if known is not None:
                sums *= known.scales(part)
                size[1, row, part] *= known.norm[part].square()
            inner[row, part, start:] = sums
            inner[row, start:, part] = sums.T
    scale, met = size.prod(0), inner.diagonal(dim1=-2, dim2=-1)
    # Products of these squares must not leave the range either.
    is_clear = (scale > 1e-24) & (scale < 1e30) & (scale <= _CANCELLATION * met)
    return inner, is_clear.all(-1)


def _whitened(
    own: Tensor,
    grouped: Tensor,
    own_covariance: Tensor | None,
    grouped_covariance: Tensor | None,
    group: Tensor,
    rank_tol: float,
    memory_budget: int,
) -> tuple[Tensor, Tensor]:
    """Compute inner products of circuits ``(L, H, H)`` up to a scale of each head, and the circuits' norms."""
    # K = M R with R a frame of the rows of K (in the metric of the covariance), so that Q^T K = (M^T Q)^T R and the
    # circuit's norm is ||M^T Q||: nothing cancels, however unevenly a head shares its scale between Q and K.
    keys = whiten_heads(
        grouped.to(torch.promote_types(own.dtype, grouped.dtype)),
        rank_tol=rank_tol,
        metric=grouped_covariance,
        memory_budget=memory_budget,
        precise=True,
    )
    left, size = _left(own, keys.back, group, keys.rows.dtype, memory_budget)
    inner = _inner_products(left, own_covariance, keys.rows, grouped_covariance, group, memory_budget)
    in_metric = inner.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
    return inner, size * in_metric * keys.norm.index_select(-1, group)


def _by_layer(covariance: Tensor | None, batch: torch.Size) -> Tensor | None:
    """Covariance with the flat batch dimension of the weights; one without batch dimensions is shared by all layers."""
    if covariance is None or covariance.dim() == 2:
        return covariance
    return covariance.expand(*batch, *covariance.shape[-2:]).reshape(-1, *covariance.shape[-2:])


def _left(own: Tensor, back: Tensor, group: Tensor, out: torch.dtype, budget: int) -> tuple[Tensor, Tensor]:
    """M^T Q of every head with its group's matrix M, scaled to norm 1, and the norms."""
    *batch, H, k, d = own.shape
    left = torch.empty(*batch, H, k, d, dtype=out, device=own.device)
    size = torch.empty(*batch, H, dtype=back.dtype, device=own.device)
    for part in head_chunks(H, torch.Size(batch).numel() * k * d * 24, budget):
        heads = own[..., part, :, :].to(back.dtype)
        peak = heads.abs().amax((-2, -1), keepdim=True)
        peak = torch.where((peak > 0) & peak.isfinite(), peak, 1)
        taken = back.index_select(-3, group[part]).mT @ (heads / peak)
        norm = torch.linalg.vector_norm(taken, dim=(-2, -1), keepdim=True)
        left[..., part, :, :] = taken / torch.where(norm == 0, 1, norm)
        size[..., part] = (norm * peak)[..., 0, 0]
    return left, size


def _inner_products(
    left: Tensor, left_metric: Tensor | None, rows: Tensor, metric: Tensor | None, group: Tensor, budget: int
) -> Tensor:
    """Sums of the products of two blocks, for each pair of heads; in chunks of heads, upper triangle only."""
    *batch, H, k, d = left.shape
    G, d_grouped = rows.shape[-3], rows.shape[-1]
    inner = left.new_empty(*batch, H, H)
    flat, flat_rows = left.reshape(*batch, H * k, d), rows.reshape(*batch, G * k, d_grouped)
    # Two products of the size of a chunk by all heads, one of the groups, and the rows of a chunk.
    each = torch.Size(batch).numel() * left.element_size() * k * (2 * H * k + G * k + 2 * d + 2 * d_grouped)
    for part in head_chunks(H, each, budget, at_least=4):
        start, heads = part.start, part.stop - part.start
        mine = left[..., part, :, :].flatten(-3, -2)
        mine = mine if left_metric is None else mine @ left_metric.to(mine.dtype)
        product = (mine @ flat[..., start * k :, :].mT).reshape(*batch, heads, k, H - start, k)
        theirs = rows.index_select(-3, group[part]).flatten(-3, -2)
        theirs = theirs if metric is None else theirs @ metric.to(theirs.dtype)
        of_groups = (theirs @ flat_rows.mT).reshape(*batch, heads, k, G, k)
        blocks = product.mul_(of_groups.index_select(-2, group[start:])).sum((-3, -1))
        inner[..., part, start:] = blocks
        inner[..., start:, part] = blocks.mT
    return inner


def require_circuit_shapes(own: Tensor, grouped: Tensor, own_name: str, grouped_name: str) -> None:
    """Check that two weights are of heads of equal width, and that the groups divide the heads."""
    fits = own.dim() >= 3 and grouped.dim() == own.dim() and own.shape[:-3] == grouped.shape[:-3]
    fits = fits and own.shape[-2] == grouped.shape[-2] and 0 not in own.shape[-3:] + grouped.shape[-3:]
    if not fits or own.shape[-3] % grouped.shape[-3]:
        raise ShapeError(
            f"A circuit needs `{own_name}` (..., heads, width, features) and `{grouped_name}` (..., groups, width, "
            f"features) of equal widths, the groups dividing the heads; got {tuple(own.shape)} and "
            f"{tuple(grouped.shape)}."
        )
