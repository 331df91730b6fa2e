"""States of interventions: plain data only, as checkpoints of all trainers keep them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hdi_callback.arguments import shown
from hdi_callback.errors import MisconfigurationError


def plain_state(state: Any) -> Any:
    """Check that a state can be written to any checkpoint, JSON included, and read again.

    Args:
        state: the result of `Intervention.state_dict`.

    Returns:
        The same state of plain types only: dictionaries, lists, strings, numbers, booleans and `None`.

    Raises:
        MisconfigurationError: if it holds another type, or itself.

    Example:
        >>> plain_state({"count": 3, "layers": ("a", "b")})
        {'count': 3, 'layers': ['a', 'b']}
    """
    if not isinstance(state, Mapping):
        raise MisconfigurationError(f"`state_dict` of an intervention must return a dictionary, got {shown(state)}.")
    try:
        return _plain(state)
    except RecursionError:
        raise MisconfigurationError("`state_dict` of an intervention must not hold itself.") from None


def _plain(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        if strangers := [key for key in value if not isinstance(key, str)]:
            raise MisconfigurationError(
                f"`state_dict` of an intervention must have strings as keys, got {shown(strangers[0])}."
            )
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    raise MisconfigurationError(
        "`state_dict` of an intervention must hold plain data (dictionaries, lists, strings, numbers), got "
        f"{shown(value)}."
    )
