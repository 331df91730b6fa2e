"""Which layers of a model are watched, and why others are not."""

from hdi_callback.monitoring.layers.layers import WatchedLayers

__all__ = ["WatchedLayers"]
