"""The layers of a model that are watched, and why others are not."""

from hdi_callback.monitoring.layers.layers import WatchedLayers
from hdi_callback.monitoring.layers.verifier import HeadVerifier

__all__ = ["HeadVerifier", "WatchedLayers"]
