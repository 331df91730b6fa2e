"""What a person sees of a run: the console, TensorBoard, W&B, pictures and the report."""

from hdi_callback.dashboards.console import Console
from hdi_callback.dashboards.loggers import Curves, TensorBoard, Wandb, sink_for

__all__ = ["Console", "Curves", "TensorBoard", "Wandb", "sink_for"]
