"""The linear algebra of heads: tensors in, tensors out. It knows no models and no training."""

from hdi_callback.core.circuits import (
    CircuitSimilarity,
    CircuitSums,
    circuit_sums,
    circuits_of,
    ov_circuits,
    qk_circuits,
)
from hdi_callback.core.covariance import (
    CovarianceSums,
    HeadCovariance,
    OutputMoments,
    count_and_total,
    covariance_from,
    covariance_sums,
    head_covariance,
    outputs_not_finite,
)
from hdi_callback.core.diversity import (
    DiversitySums,
    HeadDiversity,
    Lens,
    diversity_of,
    diversity_sums,
    head_diversity,
    principal_cosines,
)
from hdi_callback.core.fresh import Folding, attention_agreement, fold_head, folding_error, fresh_head
from hdi_callback.core.movement import HeadMovement, MovementSums, movement_of, movement_sums, not_finite
from hdi_callback.core.rows import PATTERN, RowMetrics, RowSums, attention_rows, row_metrics
from hdi_callback.core.tokens import TokenSpread, TokenSums, token_metrics, token_spread
from hdi_callback.core.whitening import WhitenedHeads, whiten_layers

__all__ = [
    "PATTERN",
    "CircuitSimilarity",
    "CircuitSums",
    "CovarianceSums",
    "DiversitySums",
    "Folding",
    "HeadCovariance",
    "HeadDiversity",
    "HeadMovement",
    "Lens",
    "MovementSums",
    "OutputMoments",
    "RowMetrics",
    "RowSums",
    "TokenSpread",
    "TokenSums",
    "WhitenedHeads",
    "attention_agreement",
    "attention_rows",
    "circuit_sums",
    "circuits_of",
    "count_and_total",
    "covariance_from",
    "covariance_sums",
    "diversity_of",
    "diversity_sums",
    "fold_head",
    "folding_error",
    "fresh_head",
    "head_covariance",
    "head_diversity",
    "movement_of",
    "movement_sums",
    "not_finite",
    "outputs_not_finite",
    "ov_circuits",
    "principal_cosines",
    "qk_circuits",
    "row_metrics",
    "token_metrics",
    "token_spread",
    "whiten_layers",
]
