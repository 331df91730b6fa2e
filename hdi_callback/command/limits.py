"""Limits of rules from the command line."""

from __future__ import annotations

from collections.abc import Iterable

from hdi_callback.errors import MisconfigurationError

_EXAMPLE = "write --threshold pair=0.9, --threshold 'encoder.*:mean=0.6' or --threshold trend=off"


def parse_limits(texts: Iterable[str]) -> dict[str, dict[str, float | None]] | None:
    """Parse limits of the default rules.

    Args:
        texts: each ``name=number`` or ``pattern:name=number``; ``off`` in the place of a number switches a limit off.

    Returns:
        Pattern of layer names -> limits, as `HDICallback` takes them; `None` if there are none.

    Raises:
        MisconfigurationError: if one cannot be read.

    Example:
        >>> parse_limits(["pair=0.9", "encoder.*:trend=off"])
        {'*': {'pair': 0.9}, 'encoder.*': {'trend': None}}
    """
    limits: dict[str, dict[str, float | None]] = {}
    for text in texts:
        left, equals, right = text.rpartition("=")
        pattern, _, name = left.rpartition(":")
        if not equals or not name:
            raise MisconfigurationError(f"`--threshold {text}` cannot be read: {_EXAMPLE}.")
        try:
            value = None if right.strip().lower() in ("off", "none", "null") else float(right)
        except ValueError:
            raise MisconfigurationError(f"`--threshold {text}` has no number after the sign: {_EXAMPLE}.") from None
        limits.setdefault(pattern.strip() or "*", {})[name.strip()] = value
    return limits or None
