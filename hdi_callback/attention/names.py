"""Dotted paths of modules, and names as every outlet can write them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from fnmatch import fnmatchcase


def printable(text: str) -> str:
    r"""Escape lone surrogates, which UTF-8 and protocol buffers refuse.

    Args:
        text: any string.

    Returns:
        The same string, each lone surrogate as its escape.

    Example:
        >>> printable("blocks.\ud800.attn") == r"blocks.\ud800.attn", printable("häupter.0")
        (True, 'häupter.0')
    """
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def short_names(names: Sequence[str]) -> list[str]:
    """Shorten names by the parts that all of them share.

    Args:
        names: dotted names.

    Returns:
        Names as short as they can be while they differ; the whole names if that leaves nothing of one.

    Example:
        >>> short_names(["model.layers.0.self_attn", "model.layers.11.self_attn"])
        ['0', '11']
        >>> short_names(["encoder.0.attn", "decoder.0.attn"])
        ['encoder', 'decoder']
    """
    parts = [name.split(".") for name in names]
    if len(parts) < 2:
        return list(names)
    start = 0
    while all(len(part) > start + 1 for part in parts) and len({part[start] for part in parts}) == 1:
        start += 1
    end = 0
    while all(len(part) > start + end + 1 for part in parts) and len({part[-1 - end] for part in parts}) == 1:
        end += 1
    short = [".".join(part[start : len(part) - end]) for part in parts]
    return short if len(set(short)) == len(short) else list(names)


def matches(name: str, patterns: Iterable[str] | None) -> bool:
    """Return whether a dotted path has one of some patterns.

    Args:
        name: the path.
        patterns: such as ``"encoder.*"``; `None` for all paths.

    Returns:
        True if so.
    """
    return patterns is None or any(fnmatchcase(name, pattern) for pattern in patterns)


def containers(name: str) -> list[str]:
    """Return the dotted paths around one.

    Args:
        name: a dotted path.

    Returns:
        The innermost first, without the path itself; the empty path, last, is the whole model.
    """
    parts = name.split(".") if name else []
    return [".".join(parts[:count]) for count in reversed(range(len(parts)))]


def is_within(name: str, names: Container[str]) -> bool:
    """Return whether a dotted path or one around it is among some.

    Args:
        name: a dotted path.
        names: of modules.

    Returns:
        True if so.
    """
    return name in names or any(around in names for around in containers(name))


def is_inside(name: str, container: str) -> bool:
    """Return whether a dotted path lies within another.

    Args:
        name: a dotted path.
        container: that of a module.

    Returns:
        True if so; a module is not inside itself.
    """
    return name != container and (container == "" or name.startswith(f"{container}."))
