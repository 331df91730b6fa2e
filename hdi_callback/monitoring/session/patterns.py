"""Patterns of layer names, checked against the layers of a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from hdi_callback.errors import MisconfigurationError


def check_patterns(what: str, patterns: Iterable[str], names: Sequence[str]) -> None:
    """Refuse patterns that match no layer.

    Args:
        what: the argument they come from.
        patterns: patterns of layer names.
        names: names of layers.

    Raises:
        MisconfigurationError: if one matches none; the message lists the layers.
    """
    for pattern in patterns:
        if names and not any(fnmatchcase(name, pattern) for name in names):
            raise MisconfigurationError(
                f"The pattern {pattern!r} in {what} matches no attention layer. There are: {', '.join(names)}."
            )
