"""Audits: the heads of models and checkpoints judged without a training run; runs judged again."""

from hdi_callback.audits.audit import Audit, audit, judge_again

__all__ = ["Audit", "audit", "judge_again"]
