"""Audits: the heads of models and checkpoints judged without a training run."""

from hdi_callback.audits.audit import Audit, LayerAudit, audit
from hdi_callback.audits.comparison import Comparison, LayerComparison, compare

__all__ = ["Audit", "Comparison", "LayerAudit", "LayerComparison", "audit", "compare"]
