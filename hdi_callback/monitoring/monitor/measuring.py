"""`MEASURING`: the arguments of `HeadDiversityMonitor`, and what checks each of them."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping
from typing import Any, get_args

from hdi_callback.arguments import flag, number, one_of, shown, whole_number, words
from hdi_callback.core.whitening import Method
from hdi_callback.errors import MisconfigurationError
from hdi_callback.monitoring.chosen_metrics import choose_metrics
from hdi_callback.monitoring.ranks import check_process_group

METHODS: tuple[Method, ...] = get_args(Method)

DEFAULT_MEMORY = 512 * 2**20
"""Default of `memory_budget`, in bytes."""


def _padding(value: Any) -> Any:
    if value is None or callable(value) or (isinstance(value, str) and value == "auto"):
        return value
    if not isinstance(value, bool) and isinstance(value, numbers.Integral):
        return int(value)
    raise MisconfigurationError(
        f'`padding` must be "auto", the number of the token that is padding, a function or None, got {shown(value)}: '
        'write "auto" to know it from masks.'
    )


MEASURING: Mapping[str, Callable[[Any], Any]] = {
    "metrics": choose_metrics,
    "include": lambda value: words("include", value, what="patterns of layer names", may_be_empty=False),
    "exclude": lambda value: words("exclude", value, what="patterns of layer names"),
    "max_tokens": lambda value: whole_number("max_tokens", value, least=2, example=2048),
    "padding": _padding,
    "rank_tol": lambda value: number("rank_tol", value, above=0, below=1, example="1e-6"),
    "method": lambda value: one_of("method", value, METHODS),
    "memory_budget": lambda value: whole_number(
        "memory_budget", value, least=1, example=DEFAULT_MEMORY, of=" of bytes"
    ),
    "strict": lambda value: flag("strict", value),
    "check_heads": lambda value: flag("check_heads", value),
    "process_group": check_process_group,
}
"""Argument -> its check: value -> value that is used; raises a `MisconfigurationError`."""


def check_arguments(**arguments: Any) -> dict[str, Any]:
    """Check the arguments of a measurement.

    Args:
        arguments: argument -> its value.

    Returns:
        The arguments in the form in which they are used.

    Raises:
        MisconfigurationError: if one of them cannot work.
    """
    return {name: MEASURING[name](value) for name, value in arguments.items()}
