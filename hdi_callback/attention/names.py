"""Names as every outlet can write them."""

from __future__ import annotations


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
