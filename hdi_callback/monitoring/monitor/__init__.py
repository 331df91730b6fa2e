"""One measurement: arm a forward, capture it, and measure weights, head outputs, attention rows and inputs."""

from hdi_callback.monitoring.monitor.monitor import HeadDiversityMonitor

__all__ = ["HeadDiversityMonitor"]
