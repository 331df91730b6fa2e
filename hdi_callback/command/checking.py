"""`hdi check`: the attention of a model, read from its first forward that runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import nn

from hdi_callback.audits.sources import open_target
from hdi_callback.audits.weight_files import first_line
from hdi_callback.errors import MisconfigurationError

Result = TypeVar("Result")
_REMEDY = "write module:function that gives a model and a batch, or set example_input_array"


def with_target(
    target: str,
    work: Callable[[nn.Module, Callable[[], object]], Result],
    *,
    model: str | None,
) -> Result:
    """Return what work returns of a model that is named on the command line, and of its first forward that runs."""
    opened = open_target(target, model=model, needs_weights=False).load()
    reason = "its attention is read from a forward, and no batch is known"
    for forward in opened.forwards:
        try:
            return work(opened.model, forward)
        except Exception as error:  # noqa: PERF203  the next batch may run
            reason = f"its forward raised {type(error).__name__} ({first_line(error)})"
    raise MisconfigurationError(f"`{target}` cannot be checked: {reason}: {_REMEDY}.")
