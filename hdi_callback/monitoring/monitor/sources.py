"""The sources of a reading that are computed from weights alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hdi_callback.attention import ROLES, AttentionLayer, Role
from hdi_callback.core.circuits import CircuitProducts, ov_circuits_and_products, qk_circuits_from_products
from hdi_callback.core.diversity import HeadBlocks, blocks_and_products
from hdi_callback.core.tensors import may_decide_on_host
from hdi_callback.core.whitening import Method
from hdi_callback.monitoring.metrics import COVARIANCE, FINITENESS, MOVEMENT, OV, QK, UPDATES, UPDATES_OV, UPDATES_QK
from hdi_callback.monitoring.monitor.measuring import DEFAULT_MEMORY
from hdi_callback.monitoring.monitor.movement import LastWeights
from hdi_callback.monitoring.monitor.shared_products import SharedProducts
from hdi_callback.monitoring.monitor.update_lens import UpdateLens
from hdi_callback.monitoring.monitor.weights import WeightSource


@dataclass(frozen=True)
class WeightFiniteness:
    """Heads with NaN or infinite weights.

    Attributes:
        not_finite: ``(H,)``, number of roles in which a head's weights hold NaN or infinity; under grouped queries the
            keys and values of a group belong to all of its heads.
    """

    not_finite: Tensor


def weight_sources(
    names: Collection[str],
    last: LastWeights,
    *,
    rank_tol: float,
    method: Method,
    shared: SharedProducts | None = None,
    memory_budget: int = DEFAULT_MEMORY,
) -> list[WeightSource]:
    """The sources that are computed from weights for the metrics asked for.

    Args:
        names: sources of the metrics that are asked for; the key weights are always read.
        last: the weights of the last reading.
        rank_tol: singular values below ``rank_tol`` times a head's largest do not count.
        method: how overlaps are computed, see `head_diversity`.
        shared: shares products between sources; by default each source forms its own.
        memory_budget: bytes that a reading may take; one half is for computation and `shared`, the other half for
            copies of weights, see `WeightReader`.

    Returns:
        Sources, in a fixed order.
    """
    shared = SharedProducts(0, frozenset()) if shared is None else shared
    options: dict[str, Any] = {"rank_tol": rank_tol, "memory_budget": max(1, memory_budget // 2 - shared.budget)}
    diversity = partial(_diversity, shared=shared, method=method, **options)
    similarity = CircuitProducts.similarity
    lens = UpdateLens(last, **options)
    chosen = [
        WeightSource(role, _fixed(role), diversity, HeadBlocks.diversity)
        for role in ROLES
        if role == "key" or role in names
    ]
    others = (
        WeightSource(QK, _fixed("query", "key"), partial(_qk, shared=shared, **options), similarity),
        WeightSource(OV, _fixed("value", "output"), partial(_ov, shared=shared, **options), similarity),
        WeightSource(MOVEMENT, _all_roles, last.movement),
        WeightSource(FINITENESS, _all_roles, partial(_finiteness, last=last)),  # reuses what movement found
        WeightSource(UPDATES, _fixed("key"), lens.keys),
        WeightSource(UPDATES_QK, _fixed("query", "key"), lens.qk),
        WeightSource(UPDATES_OV, _fixed("value", "output"), lens.ov),
    )
    return chosen + [source for source in others if source.name in names]


def shared_roles(names: Collection[str]) -> frozenset[Role]:
    """Roles of the weights whose products two sources need.

    Args:
        names: sources of the metrics that are asked for.

    Returns:
        Their roles.
    """
    uses: dict[Role, set[str]] = {"key": {QK}, "output": {OV, COVARIANCE}}
    return frozenset(role for role, sources in uses.items() if sources <= set(names))


def _fixed(*roles: Role) -> Callable[[AttentionLayer], tuple[Role, ...]]:
    """The same roles for every layer."""
    return lambda layer: roles


def _all_roles(layer: AttentionLayer) -> tuple[Role, ...]:
    """The roles that a layer has: the output weight of some is not known."""
    return tuple(role for role in ROLES if role in layer.slices)


def _is_alone(names: Sequence[str], weights: Mapping[Role, Tensor]) -> bool:
    """Return whether this is a single layer whose results the host may read."""
    return len(names) == 1 and all(may_decide_on_host(weight) for weight in weights.values())


def _diversity(
    names: Sequence[str], weights: Mapping[Role, Tensor], *, shared: SharedProducts, method: Method, **options: Any
) -> HeadBlocks:
    ((role, weight),) = weights.items()
    keeps = shared.is_used(names[0], role) and _is_alone(names, weights)
    blocks, products = blocks_and_products(weight, method=method, keeps_products=keeps, **options)
    shared.keep(names[0], role, products)
    return blocks


def _qk(
    names: Sequence[str], weights: Mapping[Role, Tensor], *, shared: SharedProducts, **options: Any
) -> CircuitProducts:
    products = shared.take(names[0], "key") if _is_alone(names, weights) else None
    return qk_circuits_from_products(weights["query"], weights["key"], products, **options)


def _ov(
    names: Sequence[str], weights: Mapping[Role, Tensor], *, shared: SharedProducts, **options: Any
) -> CircuitProducts:
    keeps = shared.is_used(names[0], "output") and _is_alone(names, weights)
    found, products = ov_circuits_and_products(weights["value"], weights["output"], keeps_products=keeps, **options)
    shared.keep(names[0], "output", products)
    return found


def _finiteness(names: Sequence[str], weights: Mapping[Role, Tensor], *, last: LastWeights) -> WeightFiniteness:
    H = max(weight.shape[1] for weight in weights.values())
    if last.are_finite(names) or _have_norms(weights.values()):
        some = next(iter(weights.values()))
        return WeightFiniteness(torch.zeros(len(names), H, dtype=torch.float32, device=some.device))
    # 0 * x is 0 only for finite x; layer by layer, as a product of all layers does not fit into the cache.
    sums = [torch.stack([(own * 0).sum((-2, -1)) for own in weight]) for weight in weights.values()]
    return WeightFiniteness(torch.stack([by_head(count, H) for count in sums]).isnan().float().sum(0))


def _have_norms(weights: Iterable[Tensor]) -> bool:
    """Return whether the host may read norms of all weights and finds them finite: then the weights are."""
    return all(may_decide_on_host(weight) and bool(torch.linalg.vector_norm(weight).isfinite()) for weight in weights)


def by_head(values: Tensor, heads: int) -> Tensor:
    """Values of each head, from those of its group.

    Args:
        values: ``(layers, groups)``; the groups lie side by side.
        heads: H, a multiple of the groups.

    Returns:
        ``(layers, H)``.
    """
    groups = values.shape[1]
    return values[:, :, None].expand(-1, -1, heads // groups).reshape(-1, heads)
