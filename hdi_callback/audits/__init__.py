"""Audits: the heads of models and checkpoints judged without a training run."""

from hdi_callback.audits.audit import Audit, audit

__all__ = ["Audit", "audit"]
