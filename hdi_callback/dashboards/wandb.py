"""Weights & Biases: what the summary of a run keeps of the curves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def define_metrics(run: Any, metrics: Sequence[str], prefix: str = "") -> None:
    """Let the summary of the run keep the lowest index and the highest overlap, as those are what one looks for.

    Args:
        run: a `wandb` run.
        metrics: names of metrics.
        prefix: what stands before every tag.
    """
    extremes = {"hdi": "min", "hdi_worst_pair": "max", "head_correlation": "max"}
    for metric in metrics:
        if metric in extremes:
            run.define_metric(
                f"{prefix}{metric}/*", step_metric="trainer/global_step", summary=f"{extremes[metric]},last"
            )
