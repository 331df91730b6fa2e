"""Heads and layers in words."""

from __future__ import annotations

from collections.abc import Sequence

from hdi_callback.arguments import listed


def heads_in_words(groups: Sequence[Sequence[int]], layer: str, kind: str = "head", count: int | None = None) -> str:
    """Return heads of a layer in words, up to a verb in the plural; one empty group stands for all `count` of them.

    Example:
        >>> heads_in_words([(0, 1), (2, 3)], "blocks.0.attn", "key head", 8)
        'key heads 0 and 1 as well as 2 and 3 of blocks.0.attn'
    """
    if not any(groups) or (len(groups) == 1 and len(groups[0]) == count):
        many = {1: f"{kind} 0", 2: f"both {kind}s"}.get(count or 0, f"all {count} {kind}s" if count else f"all {kind}s")
        return f"{many} of {layer}"
    only_one = sum(map(len, groups)) == 1
    return f"{kind}{'' if only_one else 's'} {' as well as '.join(listed(group) for group in groups)} of {layer}"
