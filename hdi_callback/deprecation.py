"""Deprecated names: they work for a while, and warn; docs/api.md says for how long."""

import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any


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
