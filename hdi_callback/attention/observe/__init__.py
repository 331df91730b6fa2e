"""Attention as it runs: observed in a real forward, which is not touched by it."""

from hdi_callback.attention.observe.compare.cores import ObservedCore, are_pieces
from hdi_callback.attention.observe.compare.unexplained import Unexplained
from hdi_callback.attention.observe.compare.verdicts import RoleVerdict, Verdict
from hdi_callback.attention.observe.observer import AttentionObserver
from hdi_callback.attention.observe.scores.rows import RowChunk

__all__ = ["AttentionObserver", "ObservedCore", "RoleVerdict", "RowChunk", "Unexplained", "Verdict", "are_pieces"]
