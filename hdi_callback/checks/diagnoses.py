"""Diagnoses: conditions on the facts of an attention, each with its verdict, its evidence and what to write.

A diagnosis is a function in `DIAGNOSES`, and its name is that of the finding: it takes the facts of one attention, and
of all of the model, and returns what it found, or `None`. It says *wrong* only of what no design asks for, and *odd* of
what may be meant, or learns as well and disagrees with other code; where a fact is not known it says nothing.

A new one needs a bug with a right twin in ``tests/checks/corpus.py``, and a fact in `Facts` if none shows it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hdi_callback.arguments import listed
from hdi_callback.attention.discovery.cores import OVER_HEADS, OVER_QUERIES
from hdi_callback.attention.discovery.heads import IN, ONE_MAP
from hdi_callback.checks.blocks import ALONE, UNUSED
from hdi_callback.checks.facts import PLURAL, Facts, shown_heads
from hdi_callback.checks.scores import Change

Verdict = Literal["wrong", "odd"]
Found = tuple[Verdict, str] | None


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong or odd about an attention."""

    layer: str  #: its dotted name, or that of equal layers, ``blocks.0-11.attn``
    name: str  #: of the diagnosis, such as ``"split"``
    verdict: Verdict  #: ``"wrong"`` of what no design asks for; ``"odd"`` of what may be meant
    text: str  #: the evidence, and what to write
    line: str = ""  #: file and line of the forward where the softmax runs; ``""`` if that is not known

    def __str__(self) -> str:
        """The finding in a line."""
        return f"{self.verdict.upper()}  {self.layer}: {self.text}{f' ({self.line})' if self.line else ''}"


_CONVENTION = "it learns as well from scratch, but checkpoints of other code, and its own in other code, give noise"
_CAUSAL = "hide what torch.ones(T, T, dtype=torch.bool).triu(1) marks"


# heads that are cut or put together in the wrong order


def split(facts: Facts, _: Sequence[Facts]) -> Found:
    """Memory (token, head, width) is read as (head, token, width), or heads as tokens."""
    cut = [role for role in IN if role in facts.cut_across]
    if not facts.reason or not {"key", "value"} & set(cut):
        return None
    modules = listed(list(dict.fromkeys(facts.cut_across[role][0] for role in cut)))
    tokens, roles = facts.cut_across[cut[-1]][1], listed([PLURAL[role] for role in cut])
    text = f"each token attends to its own heads alone: {roles} of a matrix are those of one token, as the output of "
    view = "(batch, tokens, heads, width)"
    if any(tokens):
        text = f"the first head's {roles} are of tokens {_listed(tokens)} in turn, and of all heads: the output of "
        view = "(batch, heads, tokens, width) without a transpose"
    return "wrong", f"{text}{modules} is viewed as {view}; write .view(B, T, H, d).transpose(1, 2)"


def merge(facts: Facts, _: Sequence[Facts]) -> Found:
    """Memory (head, token, width) is read as (token, head, width)."""
    if not facts.mixed:
        return None
    parts = [f"head {head} at token {token}" for head, token in facts.mixed[:3]]
    return "wrong", (
        f"the output projection takes as its first token {', '.join(parts)}{', ...' if len(facts.mixed) > 3 else ''}: "
        "heads are put side by side without a transpose; write .transpose(1, 2).reshape(B, T, H * d)"
    )


def head_order(facts: Facts, _: Sequence[Facts]) -> Found:
    """Heads lie differently in queries, keys, values and the columns of the output, or in maps that are summed."""
    maps = [
        (role, head_rows) for role in (*IN, "output") for head_rows in facts.rows.get(role, ())
        if head_rows.rows.shape[0] > 1 and head_rows.order
    ]  # fmt: skip
    if len({head_rows.order for _, head_rows in maps}) < 2:
        return None
    orders = listed(
        [f"{PLURAL.get(role, 'outputs')} in {head_rows.module} lie {head_rows.order}" for role, head_rows in maps]
    )
    return "odd", f"{orders}: {_CONVENTION}; cut all of them alike, as .view(B, T, H, d) or as .view(B, T, d, H)"


def shared_map(facts: Facts, _: Sequence[Facts]) -> Found:
    """Heads are cut out of the input, and one map is used for each."""
    text = "all heads share one map, which each gives another part of the input: none has weights of its own; write "
    return ("odd", f"{text}nn.Linear(W, W), and cut what it gives into heads") if facts.reason == ONE_MAP else None


def tiled_key_heads(facts: Facts, _: Sequence[Facts]) -> Found:
    """Key heads are tiled (0, 1, 0, 1) where they should be repeated (0, 0, 1, 1)."""
    count = len(set(facts.key_head_of))
    if not 1 < count < facts.heads or facts.key_head_of != tuple(head % count for head in range(facts.heads)):
        return None
    shared, each = _listed(facts.key_head_of), facts.heads // count
    return "odd", (
        f"query heads 0 to {facts.heads - 1} meet key heads {shared}: the {count} key heads are tiled where neighbours "
        f"mostly share; {_CONVENTION}; write .repeat_interleave({each}, dim=1) in the place of .repeat"
    )


# scale and softmax


def scale(facts: Facts, among: Sequence[Facts]) -> Found:
    """Scores are not scaled by 1 / sqrt(width)."""
    is_normed = {*facts.normed} & {*IN} or facts.normaliser != "softmax"
    if facts.scale is None or facts.width < 2 or is_normed or facts.is_usual_scale:
        return None
    if facts.scale == 1 and any(len(change.bias) > 2 for layer in among for change in layer.changes):  # T5's
        return None
    if any(math.isclose(facts.scale, (terms * facts.width) ** -0.5, rel_tol=0.01) for terms in (2, 3)):  # DeBERTa's
        return None
    right = facts.width**-0.5
    inverse = f"they are multiplied with sqrt({facts.width}); divide by it"
    reasons = {
        1 / right: inverse,
        right * right: "they may be scaled twice",
        (facts.features or 1) ** -0.5: "it is 1/sqrt(the model's width)",
        (facts.heads or 1) ** -0.5: "it is 1/sqrt(the number of heads)",
        1.0: "they are not scaled",
    }
    why = next((why for number, why in reasons.items() if math.isclose(facts.scale, number, rel_tol=0.01)), "")
    text = f"scores are scaled by {facts.scale:.4g}, and 1/sqrt({facts.width}) is {right:.4g}"
    return "wrong" if why == inverse else "odd", f"{text}{why and ': '}{why}"


def softmax(facts: Facts, _: Sequence[Facts]) -> Found:
    """The softmax runs over something else than keys, or twice."""
    if facts.reason == OVER_QUERIES and not facts.is_renormalised:
        return "wrong", "the softmax runs over queries, so that the weights of a query do not add up to 1; write dim=-1"
    if facts.reason == OVER_HEADS:
        return "wrong", f"the {facts.reason.removeprefix('its ')}, so that they share each weight; write dim=-1"
    if facts.softmaxes > 1:
        return "wrong", "two softmaxes run one after the other, so that all weights are nearly equal; leave out one"
    return None


def dropout(facts: Facts, _: Sequence[Facts]) -> Found:
    """Scores are dropped, and not weights."""
    if not facts.score_dropout:
        return None
    text = f"scores are dropped with probability {facts.score_dropout:.3g} before the softmax, where 0 hides nothing"
    return "odd", f"{text}, as exp(0) is 1; drop weights behind it"


# masks


def mask_missing(facts: Facts, among: Sequence[Facts]) -> Found:
    """Only this layer has no mask."""
    if facts.hidden is None or bool(facts.hidden.any()) or facts.queries != facts.keys:
        return None
    siblings = {each.path: each for each in among if _pattern(each.path) == _pattern(facts.path)}
    del siblings[facts.path]
    if siblings and all(sibling.is_causal for sibling in siblings.values()):
        return "odd", f"no mask hides later tokens here, and the {len(siblings)} other layers of its kind have one"
    return None


def mask_without_effect(facts: Facts, _: Sequence[Facts]) -> Found:
    """A mask hides nothing, or hides behind the softmax."""
    for at, change in enumerate(facts.changes if facts.normaliser == "softmax" else ()):  # a ReLU hides what is 0
        value, further_changes, text = change.value, [*facts.changes[:at], *facts.changes[at + 1 :]], ""
        is_number = change.is_added and value is not None and value.dtype != torch.bool
        numbers = value if value is not None and is_number else torch.empty(0)
        if _sets_to_zero(change) and all(
            each.hides is not None and not bool(each.hides.any()) for each in further_changes
        ):
            text = "a mask sets scores to 0, which hides nothing, as exp(0) is 1"
        elif numbers.unique().tolist() == [0, 1] and _is_mask(numbers == 0):
            text = "a mask of 0 and 1 is added to the scores, which hides nothing"
        if text:
            return "wrong", f"{text}; write scores.masked_fill(mask == 0, -torch.inf)"
        is_shown = change.hides is not None and not bool(change.hides.any())
        if numbers.dim() > 1 and numbers.shape[-1] == 1 < facts.keys and is_shown:
            text = f"one number for all {facts.keys} keys of a query is added to its scores, which does nothing in a "
            return "odd", f"{text}softmax: a bias of positions has to be as long as the keys are"
    if facts.hidden is None or bool(facts.hidden.any()) or facts.is_renormalised:
        return None
    if not any(map(_sets_to_zero, facts.changes_behind)):
        return None
    return "wrong", (
        "keys are hidden behind the softmax: hidden tokens take part in its sum, and the weights of a query do not add "
        "up to 1; write scores.masked_fill(hidden, -torch.inf) before it"
    )


def mask(facts: Facts, among: Sequence[Facts]) -> Found:
    """A mask is inverted, off by one, or of a window that is wider than its module declares."""
    if facts.seen is None or facts.queries < 4:
        return None
    earlier, itself, later = facts.seen
    if not bool(earlier.any()) and bool(later.any()):
        if any(layer.is_causal for layer in among):  # beside one that reads from left to right, this one is meant
            return None
        if not bool(itself.any()):
            return "wrong", f"each token sees later ones alone, and the last one none: the mask is inverted; {_CAUSAL}"
        text = "token 1 sees those behind it and not token 0, as in a model that reads from right to left: if it is to "
        return "odd", f"{text}predict the next token, it sees it, and the causal mask is inverted; {_CAUSAL}"
    if bool((earlier == 1).all()) and bool((later[:, 0] == 1).any()) and not bool(later[:, 1:].any()):
        text = "each token attends to the next one, which it must predict: the causal mask is off by one"
        return "wrong", f"{text}; {_CAUSAL}"
    if any(not bool(shares[0]) and bool(shares.any()) for shares in later):
        text = "the next token is hidden, and later ones are seen: a mask of a window lacks .tril()"
        return "wrong", f"{text}; {_CAUSAL}"
    most = 1 + int((earlier > 0).sum(-1).max())
    farthest = int((later > 0).sum(-1).max())
    if 1 < most <= facts.window + 1 and bool((later[:, : facts.window + 1] == 1).all()) and farthest > facts.window:
        text = f"sliding_window={facts.window} hides earlier tokens, and token 0 sees {farthest} later ones"
        return "wrong", f"{text}: a window needs two ends; {_CAUSAL} too"
    if not facts.is_causal or not 0 < facts.window < most:
        return None
    text = f"sliding_window={facts.window}, and the last token sees {most} tokens, with itself; hide those where "
    return "odd" if most == facts.window + 1 else "wrong", f"{text}query - key >= window"


def single_key(facts: Facts, _: Sequence[Facts]) -> Found:
    """Each token sees one key alone, in all heads or in some."""
    heads = facts.sees_single_key.nonzero().flatten().tolist()
    if facts.keys < 2 or not heads:
        return None
    where = "" if len(heads) >= facts.heads else f"in {shown_heads(heads)} "
    text = "each token of this batch sees a single key, whose weight is 1: queries and keys do nothing, and get no "
    return "odd", f"{where}{text}gradient; where that is not meant, the mask hides too much"


def distance(facts: Facts, _: Sequence[Facts]) -> Found:
    """A constant bias prefers far tokens in each head."""
    last = None if facts.bias is None or facts.queries < 4 else facts.bias[:, -1]
    if last is None or not facts.is_causal or not bool((last.diff(dim=-1) < 0).all()):
        return None
    return "wrong", "the bias grows with the distance: the sign of ALiBi is reversed; add -slope * (query - key)"


# positions, norms, biases


def rotation(facts: Facts, _: Sequence[Facts]) -> Found:
    """Rotary positions are wrong, or of something else than queries and keys."""
    for role, table in facts.cosines.items():
        for place, partner in sorted(facts.pairs.get(role, ())):
            if _differ(table[:, :, place], table[:, :, partner]):
                return "wrong", (
                    f"features {place} and {partner} of {PLURAL[role]} are turned together, by two different angles: "
                    "the angles are laid out for other pairs; write torch.cat([angles, angles], -1) for halves, "
                    "angles.repeat_interleave(2, -1) for neighbours"
                )
    if facts.shift and facts.queries == facts.keys:
        tokens = f"{abs(facts.shift)} token{'s' if abs(facts.shift) > 1 else ''}"
        side = "later" if facts.shift > 0 else "earlier"
        return "wrong", f"queries are turned as if they were {tokens} {side} than keys; turn both by the same positions"
    pairs = {role: facts.pairs[role] for role in ("query", "key") if facts.pairs.get(role)}
    if facts.heads and len(set(pairs.values())) == 2:
        return "wrong", "queries and keys are rotated in different pairs of features; use one layout for both"
    if by_head := [role for role, table in facts.cosines.items() if _is_by_head(table)]:
        text = f"{listed([PLURAL[role] for role in by_head])} are turned by an angle of each head, not of each token"
        return "odd", f"{text}: positions run along heads; transpose before the rotation"
    if facts.length is not None and abs(facts.length - 1) > 0.02:
        return "odd", f"rotary positions make queries and keys {facts.length:.3g} times as long: cos^2 + sin^2 is not 1"
    if facts.pairs.get("value"):
        return "odd", "rotary positions are applied to values as well; queries and keys are enough"
    if facts.heads and len(pairs) == 1 and {"query", "key"} <= facts.pairs.keys():
        turned, unturned = ("queries", "keys") if "query" in pairs else ("keys", "queries")
        text = f"rotary positions are applied to {turned} alone, so that scores depend on absolute ones"
        return "odd", f"{text}; rotate {unturned} too"
    return None


def norm_of_values(facts: Facts, _: Sequence[Facts]) -> Found:
    """Keys and values are normed, and queries are not."""
    text = "keys and values are normed, and queries are not: values may be meant to stay, and queries to be normed"
    return ("odd", text) if facts.normed[:2] == ("key", "value") else None


def block(facts: Facts, among: Sequence[Facts]) -> Found:
    """Its input is lost, or only some of its maps take the norm of its input."""
    text = facts.block or ""
    siblings = {each.path: each for each in among if _pattern(each.path) == _pattern(facts.path)}
    is_stack = len(siblings) > 1 and all(each.queries == each.keys for each in siblings.values())
    if text in {ALONE, UNUSED} and is_stack and all(each.block == text for each in siblings.values()):
        lost = "nothing takes what attention gives"
        lost = lost if text == UNUSED else "what attention gives takes the place of its input, which is not added to it"
        return "wrong", f"{lost}; write x = x + attention(norm(x))"
    if not {"norm(x)", "x"} <= {*re.findall(r"norm\(x\)|x", text.partition("attention")[2])}:
        return None
    return "odd", f"the block is {text}: some of queries, keys and values are made of norm(x), and some of x itself"


DIAGNOSES = (
    split, merge, head_order, shared_map, tiled_key_heads, scale, softmax, dropout, mask_missing, mask_without_effect,
    mask, single_key, distance, rotation, norm_of_values, block,
)  # fmt: skip


# what conditions and texts are made of


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")


def _pattern(path: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def _is_mask(marks: Tensor) -> bool:
    """Whether marks have the form of a causal mask, or of one of padding: other numbers may be meant."""
    if marks.dim() < 2 or not bool((marks != marks[..., :1]).any()):
        return False
    is_padding = bool((marks == marks[..., :1, :]).all())
    return is_padding or any(not bool(half.any()) for side in (marks, ~marks) for half in (side.triu(1), side.tril(-1)))


def _sets_to_zero(change: Change) -> bool:
    """Whether a mask is multiplied with, or fills 0 in."""
    value = change.value
    if change.op not in {"mul", "masked_fill", "where"} or value is None:
        return False
    zeros = value.double().abs() < 1e-3
    return bool((zeros | value.isnan() | (value == 1)).all()) and _is_mask(zeros)


def _differ(first: Tensor, second: Tensor) -> bool:
    """Whether two tables differ where both are known."""
    is_read = ~(first.isnan() | second.isnan())
    return bool(((first - second).abs()[is_read] > 1e-4).any())


def _is_by_head(table: Tensor) -> bool:
    """Whether angles are the same at all tokens, and differ between heads."""
    angles = table[:, ~table[0, :, 0].isnan()]
    is_read = len(angles) > 1 and angles.shape[1] > 1
    return is_read and not _differ(angles, angles[:, :1].expand_as(angles)) and _differ(angles[0], angles[1])
