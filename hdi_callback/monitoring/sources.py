"""What is computed from weights alone, by the name of its source."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

from torch import Tensor

from hdi_callback.attention import ROLES
from hdi_callback.core import HeadDiversity, head_diversity
from hdi_callback.monitoring.settings import Method
from hdi_callback.monitoring.weights import WeightSource


def weight_sources(names: Collection[str], *, rank_tol: float, method: Method) -> list[WeightSource]:
    """Choose what is computed from weights.

    Args:
        names: sources of the metrics that are asked for; the key weights are always read.
        rank_tol: singular values below ``rank_tol`` times a head's largest do not count.
        method: how overlaps are computed, see `head_diversity`.

    Returns:
        Sources, in a fixed order.
    """
    diversity = partial(_diversity, rank_tol=rank_tol, method=method)
    return [WeightSource(role, (role,), diversity) for role in ROLES if role == "key" or role in names]


def _diversity(names: Sequence[str], weight: Tensor, *, rank_tol: float, method: Method) -> HeadDiversity:
    return head_diversity(weight, rank_tol=rank_tol, method=method)
