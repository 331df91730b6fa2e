"""Cards: what an attention does, in plain words; equal layers share one."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from hdi_callback.attention.heads import IN
from hdi_callback.attention.labels import NORMED
from hdi_callback.checks.facts import Facts, HeadRows, shown_rows

_LABEL = 24
UNKNOWN = "not known"


@dataclass(frozen=True)
class Card:
    """What one kind of attention does.

    Attributes:
        layer: its dotted name, or that of equal layers: ``blocks.0-11.attn``.
        heads: how many there are; 0 if that is not known.
        key_heads: different heads of keys.
        head_dim: features of a query in its head.
        width: features that its maps take.
        is_causal: whether no token sees later ones; `None` if that is not known, or does not apply.
        lines: what is said: ``"queries, keys, values"``, ``"positions"``, ``"scores"``, ``"softmax"``, ``"output"``;
            ``"why"`` heads are not known.

    Example:
        >>> from hdi_callback import check
        >>> model = torch.nn.MultiheadAttention(32, num_heads=4, batch_first=True)
        >>> x = torch.randn(2, 6, 32)
        >>> card = check(model, lambda: model(x, x, x, need_weights=False)).cards[0]
        >>> card.heads, card.head_dim, card.lines["scores"]
        (4, 8, 'scaled by 0.3536 = 1/sqrt(8)')
    """

    layer: str
    heads: int
    key_heads: int
    head_dim: int
    width: int
    is_causal: bool | None
    lines: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """The card as it is printed."""
        if not self.heads:
            title = "heads not known"
        else:
            each = self.heads // max(1, self.key_heads)
            shared = "none" if each == 1 else f"{each} heads each"
            title = f"{self.heads} heads of width {self.head_dim} on {self.width or UNKNOWN}, keys shared by {shared}"
        rows = [f"  {label:{_LABEL - 2}}{text}" for label, text in self.lines.items()]
        return "\n".join([f"{self.layer:{_LABEL}}{'' if len(self.layer) < _LABEL else ' '}{title}", *rows])


def card_of(one: Facts) -> Card:
    """Write down what an attention does."""
    lines = {"why": one.reason} if one.reason else {"queries, keys, values": _rows(one)}
    if one.queries:
        lines |= {"positions": _positions(one), "scores": _scores(one), "softmax": _softmax(one)}
    if not one.reason:
        lines["output"] = _output(one)
    key_heads = len(set(one.key_head_of)) or one.heads
    return Card(one.path, one.heads, key_heads, one.width, one.features, one.is_causal, lines)


def _rows(one: Facts) -> str:
    parts = []
    for role in IN:
        summed = [f"{shown_rows(made.rows)} of {made.module}" for made in one.rows.get(role, ())]
        parts.append(" + ".join(summed) or "no linear map")
    maps = [made for role in IN for made in one.rows.get(role, ())]
    names = {made.module for made in maps}
    if len(names) == 1 and len(maps) == len(IN):
        parts = [part.removesuffix(f" of {maps[0].module}") for part in parts]
        text = f"rows {', '.join(parts)} of {maps[0].module}"
    elif maps and all(len(made.rows.unique()) == made.total for made in maps):
        text = f"rows of {', '.join(dict.fromkeys(made.module for made in maps))}"
    else:
        text = f"rows {', '.join(parts)}"
    return f"{text}, {_order(maps)}"


def _order(maps: Sequence[HeadRows]) -> str:
    orders = {made.order for made in maps if made.rows.shape[0] > 1} or {"head by head"}
    return orders.pop() or "in another order" if len(orders) == 1 else "in different orders"


def _positions(one: Facts) -> str:
    turned = [role for role in IN if one.pairs.get(role)]
    if turned:
        pairs = one.pairs[turned[0]]
        steps = {second - first for first, second in pairs}
        kind = f", pairs (i, i+{steps.pop()})" if len(steps) == 1 else ""
        roles = " and ".join({"query": "queries", "key": "keys", "value": "values"}[role] for role in turned)
        return f"rotary on {2 * len(pairs)} of {one.width} features of {roles}{kind}"
    if any(change.bias for change in one.changes):
        return "a learned bias on the scores"
    return "none in the attention"


def _scores(one: Facts) -> str:
    return "; ".join([_scale(one), *_masks(one)])


def _scale(one: Facts) -> str:
    if one.scale is None:
        return f"scale {UNKNOWN}"
    if math.isclose(one.scale, 1):
        return "not scaled"
    normed = " behind a norm" if any(flag.endswith(NORMED) for flag in one.flags) else ""
    return f"scaled by {one.scale:.4g}{f' = 1/sqrt({one.width})' if one.is_usual_scale else ''}{normed}"


def _masks(one: Facts) -> list[str]:
    if one.hidden is None:
        return [f"mask {UNKNOWN}"]
    found = ["causal"] if one.is_causal else []
    if bool(one.hidden.any()):
        padded = bool(one.hidden.all(-2).any())
        found += ["padding masked"] if padded else []
        found += ["some keys masked"] if not found else []
    return found


def _softmax(one: Facts) -> str:
    behind = f"dropout {UNKNOWN}" if one.dropout is None else f"dropout {one.dropout:.3g} behind it"
    return f"over keys{f'; {behind}' if one.dropout != 0 else ''}"


def _output(one: Facts) -> str:
    maps = one.rows.get("output", ())
    if not maps:
        return UNKNOWN
    return f"columns {' + '.join(f'{shown_rows(made.rows)} of {made.module}' for made in maps)}, {_order(maps)}"


# names of several layers


def joined_name(paths: Sequence[str]) -> str:
    """Give equal layers one name.

    Args:
        paths: their dotted names.

    Returns:
        The names, with ranges in the place of numbers.

    Example:
        >>> joined_name(["blocks.0.attn", "blocks.1.attn", "blocks.2.attn"])
        'blocks.0-2.attn'
    """
    groups: dict[tuple[str, ...], list[tuple[int, ...]]] = {}
    for path in dict.fromkeys(paths):
        parts = re.split(r"(?<![^.])(\d+)(?![^.])", path)
        groups.setdefault(tuple(parts[::2]), []).append(tuple(map(int, parts[1::2])))
    return ", ".join(_with_ranges(texts, numbers) for texts, numbers in groups.items())


def _with_ranges(texts: tuple[str, ...], numbers: list[tuple[int, ...]]) -> str:
    ranges = [shown_rows(torch.tensor(column)).replace(" ", "") for column in zip(*numbers)]
    return "".join(text + number for text, number in zip(texts, [*ranges, ""])) or "the model"
