"""Audits: the heads of models and checkpoints judged without a training run; models compared."""

from hdi_callback.audits.audit import Audit, audit
from hdi_callback.audits.comparison import Comparison, compare

__all__ = ["Audit", "Comparison", "audit", "compare"]
