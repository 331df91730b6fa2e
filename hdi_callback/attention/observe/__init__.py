"""Attention as it runs: observed in a real forward, which is not touched by it."""

from hdi_callback.attention.observe.accounts import Unexplained
from hdi_callback.attention.observe.cores import ObservedCore
from hdi_callback.attention.observe.observer import AttentionObserver
from hdi_callback.attention.observe.rows import RowChunk
from hdi_callback.attention.observe.verdicts import RoleVerdict, Verdict

__all__ = ["AttentionObserver", "ObservedCore", "RoleVerdict", "RowChunk", "Unexplained", "Verdict"]
