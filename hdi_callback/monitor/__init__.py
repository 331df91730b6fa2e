"""One reading: arm a forward, measure weights, outputs, rows and tokens, and read the numbers out."""

from hdi_callback.monitor.metrics import DEFAULT_METRICS, METRICS, Metric
from hdi_callback.monitor.monitor import HeadDiversityMonitor
from hdi_callback.monitor.reading import Reading

__all__ = ["DEFAULT_METRICS", "METRICS", "HeadDiversityMonitor", "Metric", "Reading"]
