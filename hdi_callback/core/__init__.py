"""The linear algebra of heads: tensors in, tensors out. It knows no models and no training."""

from hdi_callback.core.circuits import CircuitSimilarity, ov_circuits, qk_circuits
from hdi_callback.core.covariance import (
    HeadCovariance,
    OutputMoments,
    count_and_total,
    covariance_of,
    head_covariance,
    outputs_not_finite,
)
from hdi_callback.core.diversity import HeadDiversity, Lens, head_diversity, principal_cosines
from hdi_callback.core.fresh import Folding, attention_agreement, fold_head, folding_error, fresh_head
from hdi_callback.core.movement import HeadMovement, head_movement, not_finite
from hdi_callback.core.penalties import circuit_penalty, diversity_penalty
from hdi_callback.core.rows import RowMetrics, RowSums, attention_rows, row_metrics
from hdi_callback.core.tokens import TokenSpread, TokenSums, token_metrics, token_spread

__all__ = [
    "CircuitSimilarity",
    "Folding",
    "HeadCovariance",
    "HeadDiversity",
    "HeadMovement",
    "Lens",
    "OutputMoments",
    "RowMetrics",
    "RowSums",
    "TokenSpread",
    "TokenSums",
    "attention_agreement",
    "attention_rows",
    "circuit_penalty",
    "count_and_total",
    "covariance_of",
    "diversity_penalty",
    "fold_head",
    "folding_error",
    "fresh_head",
    "head_covariance",
    "head_diversity",
    "head_movement",
    "not_finite",
    "outputs_not_finite",
    "ov_circuits",
    "principal_cosines",
    "qk_circuits",
    "row_metrics",
    "token_metrics",
    "token_spread",
]
