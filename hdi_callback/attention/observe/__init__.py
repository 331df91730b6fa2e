"""Attention as it runs: observed in a real forward, which is not touched by it."""

from hdi_callback.attention.observe.accounts import CoreAccount, Unexplained
from hdi_callback.attention.observe.cores import ObservedCore
from hdi_callback.attention.observe.judge import RoleVerdict, Verdict
from hdi_callback.attention.observe.observer import AttentionObserver
from hdi_callback.attention.observe.rows import RowChunk

__all__ = ["AttentionObserver", "CoreAccount", "ObservedCore", "RoleVerdict", "RowChunk", "Unexplained", "Verdict"]
