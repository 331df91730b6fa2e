"""Checks of arguments; each error says what was expected, what was passed, and what to write instead."""

from __future__ import annotations

import difflib
import numbers
import os
from collections.abc import Iterable, Sequence, Set
from typing import Any

from hdi_callback.errors import MisconfigurationError

_LONGEST_SHOWN = 80
_LONGEST_FILE_NAME = 255  # bytes, on every common file system


def shown(value: Any) -> str:
    """A short one-line representation of any value.

    Args:
        value: anything, also an object whose `__repr__` raises.

    Returns:
        Its `repr`, or its type if that is long or raises.

    Example:
        >>> shown(2.5), shown("x" * 200)
        ('2.5', 'a str')
    """
    try:
        text = repr(value)
    except Exception:
        text = ""
    if not text or len(text) > _LONGEST_SHOWN or "\n" in text:
        return f"a {type(value).__name__}"
    return text


def did_you_mean(word: Any, known: Iterable[str]) -> str:
    """A suggestion of the known word that is closest to a misspelt one.

    Args:
        word: the misspelt word.
        known: what there is.

    Returns:
        A sentence with a leading blank; empty if nothing is close.

    Example:
        >>> did_you_mean("hdi_worst_pairs", ["hdi", "hdi_worst_pair"])
        " Did you mean 'hdi_worst_pair'?"
    """
    close = difflib.get_close_matches(word.lower(), list(known), 1) if isinstance(word, str) else []
    return f" Did you mean {close[0]!r}?" if close else ""


def flag(argument: str, value: Any) -> bool:
    """Check a switch.

    Args:
        argument: its name.
        value: its value.

    Returns:
        It.

    Raises:
        MisconfigurationError: if it is neither True nor False.
    """
    if isinstance(value, bool) or (type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_")):
        return bool(value)
    raise MisconfigurationError(f"{_quoted(argument)} must be True or False, got {shown(value)}.")


def whole_number(argument: str, value: Any, *, least: int, example: Any, of: str = "") -> int:
    """Check a count; numpy's whole numbers are counts as well.

    Args:
        argument: its name.
        value: its value.
        least: lower bound.
        example: what to write instead.
        of: the text after "whole number", such as what is counted.

    Returns:
        It.

    Raises:
        MisconfigurationError: if it is no whole number, or too small.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise MisconfigurationError(
            f"{_quoted(argument)} must be a whole number{of} of at least {least}, got {shown(value)}: write {example}."
        )
    return int(value)


def number(
    argument: str, value: Any, *, above: float, below: float, example: Any, includes: str = "", remedy: str = ""
) -> float:
    """Check a number within bounds.

    Args:
        argument: its name.
        value: its value.
        above: lower bound.
        below: upper bound; infinity for none.
        example: what to write instead.
        includes: the bounds that may be reached: ``"["``, ``"]"`` or ``"[]"``.
        remedy: the advice, in place of "write" and the example.

    Returns:
        It.

    Raises:
        MisconfigurationError: if it is no number, or not within the bounds.
    """
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if is_number:
        x = _as_float(value)
        if (above < x or ("[" in includes and x == above)) and (x < below or ("]" in includes and x == below)):
            return x
    if below == float("inf"):
        bounds = "be a positive number" if above == 0 and not includes else f"be a number of at least {above:g}"
    elif includes:
        bounds = f"lie in {'[' if '[' in includes else '('}{above:g}, {below:g}{']' if ']' in includes else ')'}"
    else:
        bounds = f"lie between {above:g} and {below:g}"
    raise MisconfigurationError(
        f"{_quoted(argument)} must {bounds}, got {shown(value)}{remedy or f': write {example}'}."
    )


def _can_be_written(found: str) -> bool:
    try:
        parts = os.fsencode(found).split(os.fsencode(os.sep))
    except UnicodeEncodeError:
        return False
    return "\0" not in found and all(len(part) <= _LONGEST_FILE_NAME for part in parts)


def _quoted(argument: str) -> str:
    """A name in quotes, without its owner: "`rules` of StopTraining"."""
    name, _, owner = argument.partition(" of ")
    return f"`{name}` of {owner}" if owner else f"`{name}`"


def _as_float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def one_of(argument: str, value: Any, choices: Sequence[str]) -> str:
    """Check a word that must be one of a few.

    Args:
        argument: its name.
        value: its value.
        choices: the words.

    Returns:
        It.

    Raises:
        MisconfigurationError: if it is none of them.
    """
    if isinstance(value, str) and value in choices:
        return str(value)
    quoted = [f'"{choice}"' for choice in choices]
    listed = f"{', '.join(quoted[:-1])} or {quoted[-1]}" if len(quoted) > 1 else quoted[0]
    raise MisconfigurationError(
        f"{_quoted(argument)} must be {listed}, got {shown(value)}.{did_you_mean(value, choices)}"
    )


def words(argument: str, value: Any, *, what: str, may_be_empty: bool = True) -> list[str] | None:
    """Check a list of names or patterns, or `None`.

    Args:
        argument: its name.
        value: its value.
        what: what is in the list, in the plural.
        may_be_empty: an empty list can work.

    Returns:
        The list.

    Raises:
        MisconfigurationError: if it is something else; for a single string the message says to put it in a list.
    """
    if value is None:
        return None
    if isinstance(value, str):
        raise MisconfigurationError(
            f"{_quoted(argument)} must be a list of {what}, got the string {shown(value)}: write [{shown(value)}]."
        )
    if isinstance(value, bytes | bytearray) or not isinstance(value, Sequence | Set):
        raise MisconfigurationError(f"{_quoted(argument)} must be a list of {what} or None, got {shown(value)}.")
    found = sorted(value, key=str) if isinstance(value, Set) else list(value)
    strangers = [item for item in found if not isinstance(item, str)]
    if strangers:
        raise MisconfigurationError(
            f"{_quoted(argument)} must be a list of {what}, that is of strings; it holds {shown(strangers[0])}."
        )
    if not found and not may_be_empty:
        raise MisconfigurationError(
            f"{_quoted(argument)} is an empty list: name at least one of the {what}, or write None."
        )
    return found


def function(argument: str, value: Any, takes: str) -> Any:
    """Check a function of the user's, or `None`.

    Args:
        argument: its name.
        value: its value.
        takes: what it takes.

    Returns:
        It.

    Raises:
        MisconfigurationError: if it is something else.
    """
    if value is not None and not callable(value):
        raise MisconfigurationError(f"{_quoted(argument)} must be a function that takes {takes}, got {shown(value)}.")
    return value


def path(argument: str, value: Any, example: str) -> str:
    """Check a path.

    Args:
        argument: its name.
        value: its value.
        example: what to write instead.

    Returns:
        It, as a string.

    Raises:
        MisconfigurationError: if it is none.
    """
    found: Any = None
    if isinstance(value, str | os.PathLike):
        try:
            found = os.fspath(value)
        except Exception:
            found = None
    if not isinstance(found, str) or not found or not _can_be_written(found):
        raise MisconfigurationError(f"{_quoted(argument)} must be a path, got {shown(value)}: write {example!r}.")
    return found
