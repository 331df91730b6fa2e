"""The linear algebra of heads: tensors in, tensors out. It knows no models and no training."""

from hdi_callback.core.circuits import CircuitSimilarity, circuit_similarity
from hdi_callback.core.covariance import HeadCovariance, head_covariance
from hdi_callback.core.diversity import HeadDiversity, Lens, head_diversity, principal_cosines
from hdi_callback.core.fresh import fold_head, fresh_head
from hdi_callback.core.rows import RowMetrics, RowSums, attention_rows, row_metrics

__all__ = [
    "CircuitSimilarity", "HeadCovariance", "HeadDiversity", "Lens", "RowMetrics", "RowSums", "attention_rows",
    "circuit_similarity", "fold_head", "fresh_head", "head_covariance", "head_diversity", "principal_cosines",
    "row_metrics",
]  # fmt: skip
