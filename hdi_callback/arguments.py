"""Checks of arguments at the door; each error says what was expected, what came, and what to write instead."""

from __future__ import annotations

import difflib
import math
import numbers
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from hdi_callback.errors import MisconfigurationError

_LONGEST_SHOWN = 80


def shown(value: Any) -> str:
    """Return a short one-line representation of any value."""
    try:
        text = repr(value)
    except Exception:
        text = ""
    return text if text and len(text) <= _LONGEST_SHOWN and "\n" not in text else f"a {type(value).__name__}"


def did_you_mean(word: Any, words: Iterable[str]) -> str:
    """Return a sentence that suggests the closest known word, with a leading blank; empty if none is close."""
    close = difflib.get_close_matches(word.lower(), list(words), 1) if isinstance(word, str) else []
    return f" Did you mean {close[0]!r}?" if close else ""


def listed(items: Sequence[object]) -> str:
    """Join items: ``"2, 5 and 7"``."""
    *most, last = map(str, items)
    return f"{', '.join(most)} and {last}" if most else last


def quoted(names: Sequence[str]) -> str:
    """Join names as code; of more than four the first three."""
    more = [f"{len(names) - 3} more"] if len(names) > 4 else []
    return listed([f"`{name}`" for name in names[: 3 if more else 4]] + more)


def whole_number(argument: str, value: Any, *, least: int, example: object) -> int:
    """Return a count, checked; numpy's whole numbers are counts as well."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise MisconfigurationError(
            f"`{argument}` must be a whole number of at least {least}, got {shown(value)}: write {example}."
        )
    return int(value)


def number(argument: str, value: Any, *, example: float, most: float = math.inf, allows_zero: bool = False) -> float:
    """Return a finite number above zero, or from zero on, checked."""
    is_number = type(value) is not bool and isinstance(value, numbers.Real) and math.isfinite(value)
    if not is_number or not (0 < value <= most or (value == 0 and allows_zero)):
        bounds = ("of at least 0" if allows_zero else "above 0") + (f", at most {most:g}" if most < math.inf else "")
        raise MisconfigurationError(
            f"`{argument}` must be a finite number {bounds}, got {shown(value)}: write {example:g}."
        )
    return float(value)


def torch_module(argument: str, value: Any) -> nn.Module:
    """Return a model, checked."""
    if not isinstance(value, nn.Module):
        raise MisconfigurationError(f"`{argument}` must be a torch.nn.Module, got {shown(value)}.")
    return value


def function(argument: str, value: Any, example: str) -> Callable[..., Any] | None:
    """Return a function or `None`, checked."""
    if value is not None and not callable(value):
        raise MisconfigurationError(f"`{argument}` must be a function, got {shown(value)}: write {example}.")
    return value  # type: ignore[no-any-return]


def file_path(argument: str, value: Any, example: str, others: str = "") -> Path:
    """Return a path, with the home directory for ``~``, checked."""
    if not isinstance(value, str | os.PathLike) or not isinstance(os.fspath(value), str) or not os.fspath(value):
        raise MisconfigurationError(f'`{argument}` must be {others}a path, got {shown(value)}: write "{example}".')
    return Path(value).expanduser()


def one_of(argument: str, value: Any, choices: Sequence[Any]) -> Any:
    """Return a value that must be one of a few, checked."""
    # By type as well: 1 is not True here.
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        listed = " or ".join(f'"{choice}"' if isinstance(choice, str) else str(choice) for choice in choices)
        words = [choice for choice in choices if isinstance(choice, str)]
        raise MisconfigurationError(f"`{argument}` must be {listed}, got {shown(value)}.{did_you_mean(value, words)}")
    return value


def strings(argument: str, value: Any, content: str) -> tuple[str, ...] | None:
    """Return a list of names or patterns, or `None`, checked."""
    if value is None:
        return None
    is_list = isinstance(value, Iterable) and not isinstance(value, str | bytes)
    items = tuple(value) if is_list else ()
    if not is_list or not all(isinstance(item, str) for item in items):
        hint = f": write [{shown(value)}]" if isinstance(value, str) else ""
        raise MisconfigurationError(f"`{argument}` must be a list of {content} or None, got {shown(value)}{hint}.")
    return items
