"""Diagnoses: conditions on the facts of an attention, each with its verdict, its evidence and what to write.

A diagnosis is a function in `DIAGNOSES`, and its name is that of the finding: it takes the facts of one attention, and
of all of the model, and returns what it found, or `None`. It says *wrong* only of what no design asks for, and *odd* of
what may be meant, or learns as well and disagrees with other code; where a fact is not known it says nothing.

A new one needs a bug with a right twin in ``tests/checks/corpus.py``, and a fact in `Facts` if none shows it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hdi_callback.attention.discovery.cores import OVER_HEADS, OVER_QUERIES
from hdi_callback.attention.discovery.heads import IN
from hdi_callback.attention.discovery.labels import CENTRED, NORMED, Flag
from hdi_callback.checks.facts import PLURAL, Facts, HeadRows, shown_rows
from hdi_callback.checks.scores import Change

Verdict = Literal["wrong", "odd"]
Found = tuple[Verdict, str] | None


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong or odd about an attention.

    Attributes:
        layer: its dotted name, or that of equal layers: ``blocks.0-11.attn``.
        name: of the diagnosis: ``"split"``.
        verdict: ``"wrong"`` of what no design asks for; ``"odd"`` of what may be meant, or learns as well and
            disagrees with other code.
        text: the evidence, and what to write.
        line: file and line of the forward where the softmax runs; ``""`` if that is not known.
    """

    layer: str
    name: str
    verdict: Verdict
    text: str
    line: str = ""

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
    modules = _and(list(dict.fromkeys(facts.cut_across[role][0] for role in cut)))
    tokens, roles = facts.cut_across[cut[-1]][1], _and([PLURAL[role] for role in cut])
    text = f"each token attends to its own heads alone: {roles} of a matrix are those of one token, as the output of "
    view = "(batch, tokens, heads, width)"
    if any(tokens):
        text = (
            f"the first head's {roles} are made of tokens {_listed(tokens)} in turn, and of all heads: the output of "
        )
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


def interleaved(facts: Facts, _: Sequence[Facts]) -> Found:
    """Heads lie differently in queries, keys and values."""
    maps = {role: head_rows for role in IN if (head_rows := _only(facts, role)) is not None}
    orders = {role: head_rows.order for role, head_rows in maps.items() if head_rows.rows.shape[0] > 1}
    if set(orders.values()) == {"head by head", "interleaved"}:
        orders_in_words = _and([f"{PLURAL[role]} in {maps[role].module} lie {order}" for role, order in orders.items()])
        return (
            "odd",
            f"{orders_in_words}: {_CONVENTION}; cut all of them alike, as .view(B, T, H, d) or as .view(B, T, d, H)",
        )
    for first, second in (("query", "key"), ("query", "value"), ("key", "value")):
        if first not in maps or second not in maps or maps[first].name != maps[second].name:
            continue
        rows, second_rows = maps[first].rows, maps[second].rows
        common = set(rows.flatten().tolist()) & set(second_rows.flatten().tolist())
        if (
            common
            and rows.shape == second_rows.shape
            and not torch.equal(rows.sort(-1).values, second_rows.sort(-1).values)
        ):
            return "wrong", (
                f"rows {shown_rows(torch.tensor(sorted(common)))} of {maps[first].module} make {PLURAL[first]} of "
                f"one head and {PLURAL[second]} of another: cut the projection in one order, as .chunk(3, -1) or "
                "as .view(B, T, H, 3, d)"
            )
    return None


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


def adapter_rows(facts: Facts, _: Sequence[Facts]) -> Found:
    """The rows of a map that is added belong to other heads than those of the base."""
    for role in IN:
        if len(facts.rows.get(role, ())) < 2:
            continue
        base, added = facts.rows[role][:2]
        if base.rows.shape == added.rows.shape and {base.order, added.order} == {"head by head", "interleaved"}:
            return "odd", (
                f"{PLURAL[role]} are the sum of {base.module}, where heads lie {base.order}, and of {added.module}, "
                f"where they lie {added.order}: head 1 adds rows {shown_rows(added.rows[1])} of {added.module}. It "
                "learns as well, but merged into the base, or in other code, it changes other heads; cut both alike"
            )
    return None


def output_order(facts: Facts, _: Sequence[Facts]) -> Found:
    """Heads enter the output projection in another order than they leave the value projection."""
    output, value = _only(facts, "output"), _only(facts, "value")
    if output is None or value is None or facts.heads < 2 or output.rows.shape[0] != facts.heads:
        return None
    if {value.order, output.order} == {"head by head", "interleaved"}:
        return "odd", (
            f"heads lie {value.order} in {value.module} and {output.order} in the columns of {output.module}; write "
            ".transpose(1, 2).reshape(B, T, H * d)"
        )
    first = output.rows.amin(1)
    if output.order == "head by head" and len(first.unique()) == facts.heads and not bool((first.diff() > 0).all()):
        return "odd", f"heads enter {output.module} in the order {_listed(first.argsort().tolist())}"
    return None


# scale and softmax


def scale(facts: Facts, among: Sequence[Facts]) -> Found:
    """Scores are not scaled by 1 / sqrt(width)."""
    is_normed = any(flag.kind == NORMED.kind for flag in facts.flags)
    if facts.scale is None or facts.width < 2 or is_normed or facts.is_usual_scale:
        return None
    if facts.scale == 1 and any(len(change.bias) > 2 for layer in among for change in layer.changes):  # T5's
        return None
    if any(math.isclose(facts.scale, (terms * facts.width) ** -0.5, rel_tol=0.01) for terms in (2, 3)):  # DeBERTa's
        return None
    right = facts.width**-0.5
    text = f"scores are scaled by {facts.scale:.4g}, and 1/sqrt({facts.width}) is {right:.4g}"

    def is_near(number: float) -> bool:
        return math.isclose(facts.scale or 0, number, rel_tol=0.01)

    if is_near(1 / right):
        return "wrong", f"{text}: they are multiplied with sqrt({facts.width}); divide by it"
    if is_near(right * right):
        return "odd", f"{text}: they may be scaled twice"
    if is_near(1):
        return "odd", f"scores are not scaled, and 1/sqrt({facts.width}) is {right:.4g}"
    for name, size in (("the model's width", facts.features), ("the number of heads", facts.heads)):
        if size and is_near(size**-0.5):
            return "odd", f"{text}: it is 1/sqrt({name})"
    return "odd", text


def softmax(facts: Facts, _: Sequence[Facts]) -> Found:
    """The softmax runs over something else than keys, or twice."""
    if facts.reason == OVER_QUERIES and not facts.is_renormalised:
        return "wrong", "the softmax runs over queries, so that the weights of a query do not add up to 1; write dim=-1"
    if facts.reason == OVER_HEADS:
        return "wrong", "the softmax runs over heads (or sequences), so that they share each weight; write dim=-1"
    if facts.softmaxes > 1:
        return "wrong", "two softmaxes run one after the other, so that all weights are nearly equal; leave out one"
    return None


def dropout(facts: Facts, _: Sequence[Facts]) -> Found:
    """Scores are dropped, and not weights."""
    if not facts.score_dropout:
        return None
    return "odd", (
        f"scores are dropped with probability {facts.score_dropout:.3g} before the softmax, where 0 hides nothing, as "
        "exp(0) is 1; drop weights behind it"
    )


# masks


def mask_missing(facts: Facts, among: Sequence[Facts]) -> Found:
    """A mask has no effect, or only this layer has none."""
    for at, change in enumerate(facts.changes):
        text = _without_effect(change, before=facts.changes[:at], behind=facts.changes[at + 1 :])
        if text is not None:
            return "wrong", text
    if facts.hidden is None or bool(facts.hidden.any()) or facts.queries != facts.keys:
        return None
    siblings = {sibling.path: sibling for sibling in among if _pattern(sibling.path) == _pattern(facts.path)}
    del siblings[facts.path]
    if siblings and all(sibling.is_causal for sibling in siblings.values()):
        return "odd", f"no mask hides later tokens here, and the {len(siblings)} other layers of its kind have one"
    return None


def _without_effect(change: Change, before: Sequence[Change], behind: Sequence[Change]) -> str | None:
    value, remedy = change.value, "write scores.masked_fill(mask == 0, -torch.inf)"
    if value is None:
        return None
    is_of_0_and_1 = value.dtype != torch.bool and value.unique().tolist() == [0, 1] and _is_mask(value == 0)
    is_added = change.op in {"add", "attn_mask"} or change.op.startswith("score_mod")
    if is_added and is_of_0_and_1:
        return f"a mask of 0 and 1 is added to the scores, which hides nothing; {remedy}"
    if _sets_to_zero(change) and not _may_hide([*before, *behind]):
        return f"a mask sets scores to 0, which hides nothing, as exp(0) is 1; {remedy}"
    if change.op == "mul" and bool((value == 0).any()) and _may_hide(before):
        return (
            "scores are multiplied with 0 behind the mask, which is gone there: those queries see every key; multiply "
            "the weights behind the softmax"
        )
    return None


def mask_inverted(facts: Facts, among: Sequence[Facts]) -> Found:
    """Each token sees later ones, and none before it."""
    if facts.seen is None or facts.queries < 3 or any(layer.is_causal for layer in among):
        return None  # beside a layer that reads from left to right, one from right to left is meant
    earlier, itself, later = facts.seen
    if bool(earlier.any()) or not bool(later.any()):
        return None
    if not bool(itself.any()):
        return "wrong", f"each token sees later ones alone, and the last one none: the mask is inverted; {_CAUSAL}"
    return "odd", (
        "token 1 sees the tokens behind it and not token 0, as in a model that reads from right to left: if it is to "
        f"predict the next token, it sees it, and the causal mask is inverted; {_CAUSAL}"
    )


def mask_off_by_one(facts: Facts, _: Sequence[Facts]) -> Found:
    """Each token sees the next one."""
    if (
        facts.seen is None
        or facts.queries < 4
        or bool(facts.seen[2][:, 1:].any())
        or not bool((facts.seen[2] == 1).any())
    ):
        return None
    text = f"each token attends to the next one, which it must predict: the causal mask is off by one; {_CAUSAL}"
    return ("wrong", text) if bool((facts.seen[0] == 1).all()) else None


def window(facts: Facts, _: Sequence[Facts]) -> Found:
    """A query sees more tokens than its module declares, or hides the next one and shows later ones."""
    if facts.seen is None or facts.queries < 4:
        return None
    earlier, _itself, later = facts.seen
    if any(not bool(shares[0]) and bool(shares.any()) for shares in later):
        text = f"the next token is hidden, and later ones are seen: a mask of a window lacks .tril(); {_CAUSAL}"
        return "wrong", text
    most = 1 + int((earlier > 0).sum(-1).max())
    if not facts.is_causal or not 0 < facts.window < most:
        return None
    text = f"sliding_window={facts.window}, and the last token sees {most} tokens, with itself; hide those where "
    return "odd" if most == facts.window + 1 else "wrong", f"{text}query - key >= window"


def distance(facts: Facts, _: Sequence[Facts]) -> Found:
    """A constant bias prefers far tokens in each head."""
    last = None if facts.bias is None or facts.queries < 4 else facts.bias[:, -1]
    if last is None or not facts.is_causal or not bool((last.diff(dim=-1) < 0).all()):
        return None
    return "wrong", (
        "the bias of scores grows with the distance, so that far tokens are preferred: the sign of ALiBi is reversed; "
        "add -slope * (query - key)"
    )


def mask_behind_softmax(facts: Facts, _: Sequence[Facts]) -> Found:
    """Keys are hidden behind the softmax, and not before it."""
    if facts.hidden is None or bool(facts.hidden.any()) or facts.is_renormalised:
        return None
    if not any(map(_sets_to_zero, facts.changes_behind)):
        return None
    return "wrong", (
        "keys are hidden behind the softmax: hidden tokens take part in its sum, and the weights of a query do not add "
        "up to 1; write scores.masked_fill(hidden, -torch.inf) before it"
    )


# positions, norms, biases


def rotation(facts: Facts, _: Sequence[Facts]) -> Found:
    """Rotary positions are wrong, or of something else than queries and keys."""
    text = _wrong_angles(facts)
    if text is not None:
        return "wrong", text
    by_head = [role for role, table in facts.cosines.items() if _is_by_head(table[:, : facts.keys])]
    if by_head:
        return "odd", (
            f"{_and([PLURAL[role] for role in by_head])} of all tokens are turned by the same angle, and those of each "
            "head by another: positions run along heads, and the order of tokens is not seen; transpose before the "
            "rotation"
        )
    pairs = [facts.pairs[role] for role in ("query", "key") if facts.pairs.get(role)]
    if facts.heads and len(pairs) == 2 and pairs[0] != pairs[1]:
        return "wrong", "queries and keys are rotated in different pairs of features; use one layout for both"
    if facts.length is not None and abs(facts.length - 1) > 0.02:
        return "odd", (
            f"rotary positions turn queries and keys, and make them {facts.length:.3g} times as long, so that scores "
            f"are scaled by {facts.length**2:.3g} too: cos^2 + sin^2 is not 1"
        )
    if facts.pairs.get("value"):
        return "odd", "rotary positions are applied to values as well; queries and keys are enough"
    turned = [role for role in ("query", "key") if facts.pairs.get(role)]
    if facts.heads and len(turned) == 1 and {"query", "key"} <= facts.pairs.keys():
        text = f"rotary positions are applied to {PLURAL[turned[0]]} alone, so that scores depend on absolute ones"
        return "odd", f"{text}; rotate {'keys' if turned == ['query'] else 'queries'} too"
    return None


def _wrong_angles(facts: Facts) -> str | None:
    cosines = {role: table[:, : facts.keys] for role, table in facts.cosines.items()}  # of one sequence
    for role, table in cosines.items():
        for place, partner in sorted(facts.pairs[role]):
            if _differ(table[:, :, place], table[:, :, partner]):
                return (
                    f"features {place} and {partner} of {PLURAL[role]} are turned together, by two different angles: "
                    "the angles are laid out for other pairs; write torch.cat([angles, angles], -1) for halves, "
                    "angles.repeat_interleave(2, -1) for neighbours"
                )
    if facts.shift and facts.queries == facts.keys:
        tokens = f"{abs(facts.shift)} token{'s' if abs(facts.shift) > 1 else ''}"
        return (
            f"queries are turned as if they were {tokens} {'later' if facts.shift > 0 else 'earlier'} than keys; turn "
            "both by the same positions"
        )
    return None


def shared_bias(facts: Facts, _: Sequence[Facts]) -> Found:
    """All heads add the same learned bias."""
    for change in facts.changes:
        *heads, queries, keys = (1, 1, *change.bias)
        if change.op == "add" and min(queries, keys) > 1 and math.prod(heads) == 1 < facts.heads:
            return "odd", (
                f"a learned bias {change.bias} is added to the scores of all {facts.heads} heads: each head may have "
                "one of its own, (heads, queries, keys)"
            )
    return None


def norm_over_heads(facts: Facts, _: Sequence[Facts]) -> Found:
    """One norm runs over the features of all heads."""
    width = facts.heads * facts.width
    normed = [PLURAL[role] for role in ("query", "key") if Flag(CENTRED, width, role) in facts.flags]
    if facts.heads < 2 or not normed:
        return None
    return "odd", (
        f"the norm of {_and(normed)} runs over {width} features of all heads, so that a head's size depends on the "
        f"others; write LayerNorm({facts.width}) behind the split for one of each head"
    )


def norm_of_values(facts: Facts, _: Sequence[Facts]) -> Found:
    """Keys and values are normed, and queries are not."""
    text = "keys and values are normed, and queries are not: values may be meant to stay, and queries to be normed"
    return ("odd", text) if [role for role in IN if NORMED.of(role) in facts.flags] == ["key", "value"] else None


DIAGNOSES = (
    split, merge, interleaved, tiled_key_heads, adapter_rows, output_order, scale, softmax, dropout, mask_missing,
    mask_inverted, mask_off_by_one, window, distance, mask_behind_softmax, rotation, shared_bias, norm_over_heads,
    norm_of_values,
)  # fmt: skip


# what conditions and texts are made of


def _only(facts: Facts, role: str) -> HeadRows | None:
    """Return the rows of a role, if one parameter alone has them."""
    rows = facts.rows.get(role, ())
    return rows[0] if len(rows) == 1 else None


def _and(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


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


def _may_hide(changes: Sequence[Change]) -> bool:
    return any(change.hides is None or bool(change.hides.any()) for change in changes)


def _differ(first: Tensor, second: Tensor) -> bool:
    """Whether two tables differ where both are known."""
    is_read = ~(first.isnan() | second.isnan())
    return bool(((first - second).abs()[is_read] > 1e-4).any())


def _is_by_head(table: Tensor) -> bool:
    """Whether angles are the same at all tokens, and differ between heads."""
    read_angles = table[:, ~table[0, :, 0].isnan()]
    if len(read_angles) < 2 or read_angles.shape[1] < 2:
        return False
    return not _differ(read_angles, read_angles[:, :1].expand_as(read_angles)) and _differ(
        read_angles[0], read_angles[1]
    )
