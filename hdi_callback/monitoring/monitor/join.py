"""Results of several layers as one measurement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from hdi_callback.monitoring.readings import Measurement


def join(source: str, results: Sequence[tuple[str, Any]]) -> Measurement:
    """Join the results of several layers along a new first dimension.

    Args:
        source: the source of the results.
        results: names of the layers, and frozen records of tensors of one shape.

    Returns:
        One measurement.
    """
    record = type(results[0][1])
    stacked: Mapping[str, Tensor] = {
        item.name: torch.stack([getattr(result, item.name) for _, result in results]) for item in fields(record)
    }
    return Measurement(tuple(name for name, _ in results), source, record(**stacked))
