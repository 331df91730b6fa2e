"""The watched layers of a model, and the refused ones with reasons."""

from hdi_callback.monitoring.layers.layers import WatchedLayers
from hdi_callback.monitoring.layers.verifier import HeadVerifier

__all__ = ["HeadVerifier", "WatchedLayers"]
