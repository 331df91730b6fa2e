"""Audits: the heads of models and checkpoints judged without a training run; runs judged again; models compared."""

from hdi_callback.audits.audit import Audit, audit, judge_again
from hdi_callback.audits.comparison import Comparison, compare

__all__ = ["Audit", "Comparison", "audit", "compare", "judge_again"]
