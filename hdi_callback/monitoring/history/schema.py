"""Checks of plain data read from disk."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hdi_callback.monitoring.alerts import LEVELS

_MOST = 2**63  # what a table can hold


def is_whole(value: Any, least: int = 0) -> bool:
    """Return whether a value is a whole number, of steps or heads.

    Args:
        value: anything.
        least: lower bound.

    Returns:
        True for an integer in the range; a boolean is none.
    """
    return type(value) is int and least <= value < _MOST


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number.

    Args:
        value: anything.

    Returns:
        True for a float or an integer that a float can hold; a boolean is none.
    """
    return (type(value) is float and math.isfinite(value)) or (type(value) is int and abs(value) < _MOST)


def is_value(value: Any) -> bool:
    """Return whether a value is a number, or null as written for one that is not finite.

    Args:
        value: anything.

    Returns:
        True for a number and for None, NaN and infinity.
    """
    return value is None or type(value) is float or is_number(value)


def is_text_map(value: Any) -> bool:
    """Return whether a value is a dictionary with string keys.

    Args:
        value: anything.

    Returns:
        True if it is.
    """
    return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)


def is_alert(value: Any) -> bool:
    """Return whether a value has the form of `Alert.to_dict`.

    Args:
        value: anything.

    Returns:
        True if `Alert.from_dict` makes an alert of it in which every field has its type.
    """
    if not is_text_map(value) or not _is_finding(value.get("finding")):
        return False
    return (
        is_whole(value.get("step"))
        and all(isinstance(value.get(name), str) for name in ("layer", "rule", "message"))
        and _is_level(value.get("level"))
        and isinstance(value.get("is_resolved", False), bool)
        and isinstance(value.get("ending", ""), str)
    )


def _is_finding(value: Any) -> bool:
    if not is_text_map(value) or not isinstance(value.get("what"), str):
        return False
    heads, groups, since = value.get("heads", ()), value.get("groups", ()), value.get("since")
    return (
        _is_level(value.get("level", "warning"))
        and all(is_value(value.get(name)) for name in ("value", "threshold"))
        and isinstance(value.get("metric", ""), str | None)
        and all(isinstance(group, list | tuple) for group in (heads, groups, *groups))
        and all(is_whole(head) for group in (heads, *groups) for head in group)
        and (since is None or is_whole(since))
        and all(isinstance(value.get(name, ""), str) for name in ("certainty", "remedy"))
    )


def _is_level(value: Any) -> bool:
    return isinstance(value, str) and value in LEVELS
