"""Deprecated names: they work for a while, and warn; docs/api.md says for how long."""

import importlib
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def renamed(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a module whose names have moved.

    Args:
        module: the name of that module.
        names: old name -> where it is now, as ``"module:name"``.

    Returns:
        A function that finds an old name, with a `DeprecationWarning` that says what to write.
    """

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        place, now = names[name].split(":")
        warnings.warn(
            f"`{module}.{name}` is deprecated: write `from {place} import {now}`.", DeprecationWarning, stacklevel=2
        )
        return getattr(importlib.import_module(place), now)

    return find


def renamed_attribute(old: str, new: str) -> property:
    """An attribute under its old name.

    Args:
        old: the deprecated name.
        new: the name of the attribute now.

    Returns:
        A property that warns, and has the value of the attribute.
    """

    def value(self: Any) -> Any:
        warnings.warn(f"`{old}` is deprecated: write `{new}`.", DeprecationWarning, stacklevel=2)
        return getattr(self, new)

    return property(value, doc=f"Deprecated: an earlier name of `{new}`.")


def renamed_argument(old: str, new: str, value: T | None, otherwise: T) -> T:
    """Take the value of an argument that was passed under its old name.

    Args:
        old: the deprecated name.
        new: the name now.
        value: what was passed under the old name; `None` for nothing.
        otherwise: the value of the argument under the new name.

    Returns:
        The value to use, with a `DeprecationWarning` at the line that calls this package if it came under the old name.
    """
    if value is None:
        return otherwise
    level = 1
    while sys._getframe(level).f_globals.get("__name__", "").partition(".")[0] == __name__.partition(".")[0]:
        level += 1
    warnings.warn(
        f"The argument `{old}` is deprecated: write `{new}` in its place.", DeprecationWarning, stacklevel=level + 1
    )
    return value
