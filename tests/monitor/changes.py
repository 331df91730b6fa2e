"""Trainings in whose middle an attention begins to compute something else, and healthy ones in which something moves.

A change is a few values of `Ways`, set at a step; what it does is written in `Attention`, in the way in which code of
others does it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, WIDTH, HEADS, LENGTH = 20, 32, 4, 12


@dataclass
class Ways:
    """How attention is computed now, in all layers but for what names one."""

    dropout: float = 0.1
    window: int = 0
    mask: str = "causal"
    blind_head: int = -1  # a head of the last layer that does not see the token itself
    hides_padding: bool = True
    documents: bool = False
    scale: float = 1.0
    rotary: float = 0.0  # its base; 0 for none
    turned_by_heads: bool = False  # by the number of a head, not of a token
    query_shift: int = 0
    both_shift: int = 0
    slope: float = 0.0  # of a bias that grows with the distance
    swaps: bool = False  # keys and values
    stale: bool = False  # keys and values of the batch before
    cap: float = 0.0
    weights: str = "softmax"
    tiled: bool = False
    flipped: bool = False  # heads, on their way out
    detached: bool = False  # queries
    borrowed: bool = False  # queries of the second layer, from the projection of the first
    unnormed: bool = False  # values are made of tokens before the norm
    normed: str = ""  # what has a norm of its own: "values", "heads"
    block: str = "pre"  # where the norm is: "pre", "none", or "alone" without the input
    fused: bool = False


class Attention(nn.Module):
    """Causal attention of grouped heads, as `Ways` say."""

    def __init__(self, ways: Ways, layer: int) -> None:
        super().__init__()
        self.ways, self.layer, self.d = ways, layer, WIDTH // HEADS
        self.q_proj, self.out_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH // 2, bias=False) for _ in range(2))
        self.borrowed: list[nn.Linear] = []
        self.before: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor, raw: Tensor, padding_mask: Tensor | None) -> Tensor:
        ways = self.ways
        project = self.borrowed[0] if ways.borrowed and self.borrowed else self.q_proj
        q, k, v = project(x), self.k_proj(x), self.v_proj(raw if ways.unnormed else x)
        q, k, v = (part.unflatten(-1, (-1, self.d)).transpose(1, 2) for part in (q, k, v))
        q = q.detach() if ways.detached else q
        k, v = (v, k) if ways.swaps else (k, v)
        v = F.layer_norm(v, v.shape[-1:]) if ways.normed == "values" else v
        fresh = k.detach(), v.detach()
        if ways.stale and self.before is not None and self.before[0].shape == k.shape:
            k, v = self.before
        self.before = fresh
        if ways.turned_by_heads:
            q, k = (turn(part.transpose(1, 2), ways.rotary, 0).transpose(1, 2) for part in (q, k))
        elif ways.rotary:
            q, k = turn(q, ways.rotary, ways.query_shift + ways.both_shift), turn(k, ways.rotary, ways.both_shift)
        k, v = (part.repeat(1, 2, 1, 1) if ways.tiled else part.repeat_interleave(2, 1) for part in (k, v))
        visible = self.visible(q.shape[2], padding_mask)
        if ways.fused:
            p = ways.dropout if self.training else 0.0
            heads = F.scaled_dot_product_attention(q, k, v, visible, p, scale=ways.scale / math.sqrt(self.d))
        else:
            heads = F.dropout(self.weigh(self.score(q, k), visible), ways.dropout, self.training) @ v
        heads = F.layer_norm(heads, heads.shape[-1:]) if ways.normed == "heads" else heads
        return self.out_proj((heads.flip(1) if ways.flipped else heads).transpose(1, 2).flatten(2))

    def visible(self, count: int, hidden: Tensor | None) -> Tensor:
        ways, at = self.ways, torch.arange(count)
        behind = at[:, None] - at
        last = {"causal": 0, "off by one": -1, "strict": 1, "none": -count}[ways.mask]
        seen = (behind >= last) | ((at[:, None] == 0) & (at == 0))  # the first token would see none
        if ways.window:
            seen = seen & (behind < ways.window)
        if ways.documents:
            seen = seen & (at[:, None] // 6 == at // 6)
        seen = seen[None, None].repeat(1, HEADS, 1, 1)
        if self.layer == 1 and ways.blind_head >= 0:
            seen[:, ways.blind_head] &= (behind != 0) | (at == 0)
        if hidden is not None and ways.hides_padding:
            seen = seen & ~hidden[:, None, None]
        return seen

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        ways = self.ways
        scores = q @ k.mT * (ways.scale / math.sqrt(self.d))
        if ways.cap:
            scores = ways.cap * torch.tanh(scores / ways.cap)
        if ways.slope:
            at = torch.arange(q.shape[2])
            scores = scores - ways.slope * (at[:, None] - at).abs()
        return scores

    def weigh(self, scores: Tensor, visible: Tensor) -> Tensor:
        scores = scores.masked_fill(~visible, -1e9)
        if self.ways.weights == "twice":
            return scores.softmax(-1).softmax(-1)
        return scores.softmax(-2 if self.ways.weights == "over queries" else -1)


def turn(x: Tensor, base: float, start: int) -> Tensor:
    half = x.shape[-1] // 2
    angles = torch.arange(start, start + x.shape[-2])[:, None] * base ** (-torch.arange(half) / half)
    angles = torch.cat([angles, angles], -1)
    return x * angles.cos() + torch.cat([-x[..., half:], x[..., :half]], -1) * angles.sin()


class Model(nn.Module):
    """Two blocks; gives a loss."""

    def __init__(self, ways: Ways) -> None:
        super().__init__()
        self.ways = ways
        self.embed, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(64, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.layers = nn.ModuleList(Attention(ways, layer) for layer in range(2))
        self.layers[1].borrowed.append(self.layers[0].q_proj)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = tokens == 0
        x = self.embed(tokens) + self.places(torch.arange(tokens.shape[1]))
        for norm, attention in zip(self.norms, self.layers):
            normed = x if self.ways.block == "none" else norm(x)
            added = attention(normed, x, hidden if bool(hidden.any()) else None)
            x = added if self.ways.block == "alone" else x + added
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def batch(step: int, *, padded: bool = False, lengths: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    length = LENGTH - step % 4 if lengths else LENGTH
    tokens = torch.randint(1, VOCABULARY, (4, length), generator=generator)
    tokens[:, 1::2] = tokens[:, ::2][:, : tokens[:, 1::2].shape[1]]  # each second token is the one before it
    if padded:
        tokens[step % 3, -2 - step % 2 :] = 0
    return tokens


@dataclass(frozen=True)
class Change:
    """A training.

    Attributes:
        ways: as it begins.
        act: what is done to them before each step from `START` on.
        data: how batches are made.
        tells: words of the alert, if there is one.
        first: whether an alert named it before there was a contract.
    """

    ways: dict[str, Any]
    act: Callable[[Ways, int], None]
    tells: str = ""
    first: bool = False
    padded: bool = False
    lengths: bool = False


START = 15


def _to(**values: Any) -> Callable[[Ways, int], None]:
    def act(ways: Ways, step: int) -> None:
        for name, value in values.items():
            setattr(ways, name, value)

    return act


def _fall(ways: Ways, step: int) -> None:
    ways.scale = 0.97 ** (step - START)


def _grow(ways: Ways, step: int) -> None:
    ways.window = 3 + (step - START) // 2


def _anneal(ways: Ways, step: int) -> None:
    ways.dropout = max(0.0, 0.3 - 0.005 * (step - START))


CHANGES: dict[str, Change] = {
    "dropout at 0.9": Change({}, _to(dropout=0.9), tells="dropout is 0.9, and 0.1 before"),
    "no dropout any more": Change({}, _to(dropout=0.0), tells="dropout is 0, and 0.1 before"),
    "fused dropout at 0.9": Change({"fused": True}, _to(dropout=0.9), tells="dropout is 0.9, and 0.1 before"),
    "one head does not see the token itself": Change(
        {}, _to(blind_head=3), tells="head 3 no longer sees the token itself"
    ),
    "no token sees itself": Change({}, _to(mask="strict"), tells="each head no longer sees the token itself"),
    "fused, no token sees itself": Change(
        {"fused": True}, _to(mask="strict"), tells="each head no longer sees the token itself"
    ),
    "each token sees the next": Change({}, _to(mask="off by one"), tells="each head now sees later tokens", first=True),
    "no mask any more": Change({}, _to(mask="none"), tells="each head now sees later tokens", first=True),
    "a window is lost": Change(
        {"window": 4}, _to(window=0), tells="each head sees all tokens before, and 4 tokens till then"
    ),
    "a window appears": Change({}, _to(window=4), tells="each head sees 4 tokens, and all tokens before till then"),
    "padding is seen": Change({}, _to(hides_padding=False), padded=True, tells="padding is seen, and hidden before"),
    "documents see each other": Change(
        {"documents": True}, _to(documents=False), tells="no token is hidden from some queries of a distance any more"
    ),
    "keys and values swapped": Change({}, _to(swaps=True), tells="keys are made by v_proj, and k_proj before"),
    "keys of the batch before": Change({}, _to(stale=True), tells="keys are made by no parameter"),
    "another rope base": Change({"rotary": 100.0}, _to(rotary=1e4), tells="another base"),
    "rope counts heads": Change({"rotary": 100.0}, _to(turned_by_heads=True), tells="turn by other angles"),
    "queries shifted by a token": Change(
        {"rotary": 100.0}, _to(query_shift=1), tells="the shift of positions from queries to keys is 1, and 0 before"
    ),
    "rope is lost": Change(
        {"rotary": 100.0}, _to(rotary=0.0), tells="positions turn nothing, and queries and keys before"
    ),
    "scores four times as large": Change({}, _to(scale=4.0), tells="scores are scaled by 1.414, and 0.3536 before"),
    "a soft cap on scores": Change({}, _to(cap=2.0), tells="scores are bent by tanh, and nothing before"),
    "the sign of a bias": Change({"slope": 0.5}, _to(slope=-0.5), tells="the bias of token"),
    "softmax over queries": Change({}, _to(weights="over queries"), tells="over queries, not over keys"),
    "softmax twice": Change({}, _to(weights="twice"), tells="a softmax of a softmax, and softmax before", first=True),
    "key heads tiled": Change({}, _to(tiled=True), tells="head 1 is 8-15, and 0-7 before"),
    "heads in another order": Change({}, _to(flipped=True), tells="head 0 is 24-31, and 0-7 before"),
    "queries detached": Change({}, _to(detached=True), tells="queries of heads 0, 1, 2, 3 get exactly no gradient"),
    "queries of another layer's map": Change(
        {}, _to(borrowed=True), tells="queries are made by layers.0.q_proj, and q_proj before"
    ),
    "values of tokens before the norm": Change(
        {}, _to(unnormed=True), tells="is x + attention(norm(x), norm(x), x), and x + attention(norm(x)) before"
    ),
    "the input is not added any more": Change(
        {}, _to(block="alone"), tells="is attention(x), and its input is not added, and x + attention(norm(x)) before"
    ),
    "values get a norm": Change(
        {}, _to(normed="values"), tells="what has a norm in the attention is values, and nothing before"
    ),
    "heads lose their norm": Change(
        {"normed": "heads"}, _to(normed=""), tells="what has a norm in the attention is nothing, and outputs before"
    ),
    "the norm is lost": Change({}, _to(block="none"), tells="x + attention(x), and x + attention(norm(x)) before"),
}


HEALTHY: dict[str, Change] = {
    "nothing": Change({}, _to()),
    "fused": Change({"fused": True}, _to()),
    "rotary, in a window": Change({"rotary": 100.0, "window": 5}, _to()),
    "padding that moves": Change({}, _to(), padded=True),
    "lengths that change": Change({"window": 5}, _to(), lengths=True),
    "lengths and rotary": Change({"rotary": 100.0, "documents": True}, _to(), lengths=True, padded=True),
    "positions of both shifted": Change({"rotary": 100.0}, _to(both_shift=5)),
}

SCHEDULES: dict[str, Change] = {
    "a falling temperature": Change({}, _fall, tells="scores are scaled by"),
    "a growing window": Change({"window": 3}, _grow, tells="3 tokens till then"),
    "dropout that is annealed": Change({"dropout": 0.3}, _anneal, tells="and 0.3 before"),
}
