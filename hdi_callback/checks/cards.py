"""Cards: what an attention does, in plain words; equal layers share one."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hdi_callback.attention.discovery.find import short_names
from hdi_callback.attention.discovery.heads import IN
from hdi_callback.attention.layer import ROOT
from hdi_callback.checks.facts import PLURAL, Facts, HeadRows, ranges, shown_rows

_LABEL = 24
UNKNOWN = "not known"


@dataclass(frozen=True)
class Card:
    """What one kind of attention does.

    Example:
        >>> import torch
        >>> from hdi_callback import check
        >>> model = torch.nn.MultiheadAttention(32, num_heads=4, batch_first=True)
        >>> x = torch.randn(2, 6, 32)
        >>> card = check(model, lambda: model(x, x, x, need_weights=False)).cards[0]
        >>> card.heads, card.head_dim, card.lines["scores"]
        (4, 8, 'scaled by 0.3536 = 1/sqrt(8)')
    """

    layer: str  #: its dotted name, or that of equal layers, ``blocks.0-11.attn``
    heads: int  #: how many there are; 0 if that is not known
    key_heads: int  #: different heads of keys
    head_dim: int  #: features of a query in its head
    width: int  #: features that its maps take
    is_causal: bool | None  #: whether no token sees later ones; `None` if that is not known, or does not apply
    #: What is said of ``"queries, keys, values"``, ``"positions"``, ``"scores"``, ``"softmax"``, ``"output"``,
    #: ``"norms"``, ``"block"``; ``"why"`` heads are not known.
    lines: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """The card as it is printed."""
        each = self.heads // max(1, self.key_heads)
        shared = "none" if each == 1 else f"{each} heads each"
        title = f"{self.heads} heads of width {self.head_dim} on {self.width or UNKNOWN}, keys shared by {shared}"
        name = f"{self.layer:{_LABEL}}{'' if len(self.layer) < _LABEL else ' '}"
        rows = [f"  {label:{_LABEL - 2}}{text}" for label, text in self.lines.items()]
        return "\n".join([f"{name}{title if self.heads else 'heads not known'}", *rows])


def card_of(facts: Facts) -> Card:
    """Return the card of an attention."""
    lines = {"why": facts.reason} if facts.reason else {"queries, keys, values": _rows(facts)}
    if facts.queries:
        lines["positions"] = _positions(facts)
        lines["scores"] = "; ".join([_scale(facts), *_masks(facts)])
        lines["softmax"] = "over keys" if facts.normaliser == "softmax" else f"none: {facts.normaliser}, over keys"
        if facts.dropout != 0:
            dropout = UNKNOWN if facts.dropout is None else f"{facts.dropout:.3g} behind it"
            lines["softmax"] += f"; dropout {dropout}"
    if not facts.reason:
        maps = facts.rows.get("output", ())
        lines["output"] = f"columns {_summed(maps)}, {_order(maps)}" if maps else UNKNOWN
        lines |= {"norms": f"of {' and '.join(PLURAL[role] for role in facts.normed)}"} if facts.normed else {}
        lines |= {"block": facts.block} if facts.block else {}
    key_heads = len(set(facts.key_head_of)) or facts.heads
    return Card(facts.path, facts.heads, key_heads, facts.width, facts.features, facts.is_causal, lines)


def _rows(facts: Facts) -> str:
    maps = [head_rows for role in IN for head_rows in facts.rows.get(role, ())]
    modules = short_names(head_rows.name for head_rows in maps)
    if len(modules) == 1 and len(maps) == len(IN):
        rows = f"rows {', '.join(shown_rows(head_rows.rows) for head_rows in maps)} of {modules[0]}"
    elif maps and all(len(head_rows.rows.unique()) == head_rows.total for head_rows in maps):
        rows = f"rows of {', '.join(modules)}"
    else:
        rows = f"rows {', '.join(_summed(facts.rows.get(role, ())) or 'no linear map' for role in IN)}"
    return f"{rows}, {_order(maps)}"


def _summed(maps: Sequence[HeadRows]) -> str:
    return " + ".join(f"{shown_rows(head_rows.rows)} of {head_rows.module}" for head_rows in maps)


def _order(maps: Sequence[HeadRows]) -> str:
    orders = {head_rows.order for head_rows in maps if head_rows.rows.shape[0] > 1} or {"head by head"}
    return orders.pop() or "in another order" if len(orders) == 1 else "in different orders"


def _positions(facts: Facts) -> str:
    turned = [role for role in IN if facts.pairs.get(role)]
    if turned:
        pairs = facts.pairs[turned[0]]
        steps = {second - first for first, second in pairs}
        kind = f", pairs (i, i+{steps.pop()})" if len(steps) == 1 else ""
        roles = " and ".join(PLURAL[role] for role in turned)
        return f"rotary on {2 * len(pairs)} of {facts.width} features of {roles}{kind}"
    biases = [change.op for change in facts.changes if change.op.startswith("score_mod")]
    if biases:
        return f"scores changed by its {biases[0]}"
    if any(change.bias and change.is_added for change in facts.changes):
        return "a learned bias on the scores"
    factors = [change.value for change in (*facts.changes, *facts.changes_behind) if change.op in {"mul", "baddbmm"}]
    return UNKNOWN if any(value is None or value.dim() > 1 for value in factors) else "none in the attention"


def _scale(facts: Facts) -> str:
    if facts.scale is None:
        return f"scale {UNKNOWN}"
    if math.isclose(facts.scale, 1):
        return "not scaled"
    return f"scaled by {facts.scale:.4g}{f' = 1/sqrt({facts.width})' if facts.is_usual_scale else ''}"


def _masks(facts: Facts) -> list[str]:
    if facts.hidden is None:
        return [f"mask {UNKNOWN}"]
    words = ["causal"] if facts.is_causal else []
    words += ["padding masked"] if bool(facts.hidden.all(-2).any()) else []
    return words or (["some keys masked"] if bool(facts.hidden.any()) else [])


def joined_name(paths: Iterable[str]) -> str:
    """Return the names of layers in few words, with ranges for numbers that run on.

    Example:
        >>> joined_name([f"blocks.{i}.attn" for i in (0, 1, 2, 5)]), joined_name(["encoder.attn", "decoder.attn"])
        ('blocks.0-2,5.attn', 'encoder.attn, decoder.attn')
    """
    groups: dict[tuple[str, ...], list[list[int]]] = {}
    for path in dict.fromkeys(paths):
        parts = re.split(r"(\d+)", path)
        groups.setdefault(tuple(parts[::2]), []).append(list(map(int, parts[1::2])))
    names = []
    for texts, numbers in groups.items():
        columns = [set(column) for column in zip(*numbers)]
        is_grid = math.prod(map(len, columns)) == len(numbers)  # each number with each of the other places
        texts_of_numbers = [",".join(ranges(column)) for column in columns] if is_grid else map(str, numbers[0])
        name = "".join(text + number for text, number in zip(texts, [*texts_of_numbers, ""])) or ROOT
        names.append(name if is_grid else f"{name} and {len(numbers) - 1} more")
    return ", ".join(names)
