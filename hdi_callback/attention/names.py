"""Names as every outlet can write them."""

from __future__ import annotations

from collections.abc import Sequence


def printable(text: str) -> str:
    r"""Write out what no text file can hold: lone surrogates, which UTF-8 and protocol buffers refuse.

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
    """Leave out of names what is the same in all of them.

    Args:
        names: dotted names.

    Returns:
        Names as short as they can be told apart; the whole names if that leaves nothing of one.

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
