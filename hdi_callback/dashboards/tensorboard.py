"""TensorBoard: one chart per metric with all layers in it, beside the curve of each layer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any


def lay_out_charts(writer: Any, metrics: Sequence[str], prefix: str = "") -> None:
    """Describe the page "Custom Scalars": for each metric one chart that holds the curves of all layers.

    Args:
        writer: a `torch.utils.tensorboard.SummaryWriter`.
        metrics: names of metrics.
        prefix: what stands before every tag.
    """
    charts = {metric: ["Multiline", [f"^{re.escape(prefix + metric)}/.*"]] for metric in metrics}
    writer.add_custom_scalars({f"{prefix}head diversity": charts})
