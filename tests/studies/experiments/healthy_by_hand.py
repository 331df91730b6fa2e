"""Train small models that were written by hand, and some of transformers, all healthy, and count what is told.

    python -m tests.studies.experiments.healthy_by_hand [--only "speech CTC"] [--results runs/by-hand.jsonl]

Two hundred steps each. Seeds are a thousand and the place in the list; every third is read each 10 steps, the others
each 5.
"""

from __future__ import annotations

import copy
import io
import math
import random
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from scipy.optimize import linear_sum_assignment
from sklearn.datasets import load_breast_cancer, load_diabetes, load_wine
from torch import Tensor, nn
from torch.nn import functional as F

from hdi_callback import load_history, watch_heads
from tests.studies.experiments.healthy import TEXT, count_accused, digits, patches, text

STEPS, LETTERS, WIDTH, HEADS = 200, 128, 32, 4


@dataclass
class Training:
    """A model and the loss of a step; what differs from AdamW with a rate of 0.001 is named."""

    model: nn.Module
    loss: Callable[[int], Tensor]
    optimizer: Any = None
    rate: float = 1e-3
    factor: Callable[[int], float] = lambda step: 1.0  # of the rate
    before: Callable[[int], Any] = lambda step: None
    clip: Callable[[int], Any] = lambda step: None  # after the backward
    after: Callable[[int, float], Any] = lambda step, loss: None
    parts: Callable[[int], int] = lambda step: 1
    step: Callable[[Training, int], float] | None = None  # in place of backward and update
    strict: bool = True
    optimizers: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Make the optimizer, where none was named."""
        made = torch.optim.AdamW(self.model.parameters(), self.rate) if self.optimizer is None else self.optimizer
        self.optimizers = made if isinstance(made, list) else [made]

    def update(self, step: int) -> float:
        """Train one step, and return its loss."""
        self.before(step)
        parts, total = self.parts(step), 0.0
        for _ in range(parts):
            loss = self.loss(step) / parts
            loss.backward()
            total += loss.item()
        self.clip(step)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return total


TRAININGS: dict[str, Callable[[], Training]] = {}


def training(make: Callable[[], Training]) -> Callable[[], Training]:
    TRAININGS[make.__name__.strip("_").replace("_", " ")] = make
    return make


# --- parts of models


def rotate(x: Tensor, base: float = 1e4) -> Tensor:
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2])[:, None] / base ** (torch.arange(half) / half)
    first, second = x.chunk(2, -1)
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


class Attention(nn.Module):
    """Attention as people write it, with what they add to it."""

    def __init__(
        self,
        *,
        groups: int = HEADS,
        place: str = "",
        norm: bool = False,
        window: int = 0,
        cap: float = 0,
        top: int = 0,
        gate: bool = False,
        sink: bool = False,
        causal: bool = True,
        cosine: bool = False,
    ) -> None:
        super().__init__()
        self.groups, self.place, self.window, self.cap, self.top, self.causal = groups, place, window, cap, top, causal
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key, self.value = (nn.Linear(WIDTH, groups * 8, bias=False) for _ in range(2))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(8) for _ in range(2)) if norm else None
        self.gate = nn.Linear(WIDTH, WIDTH) if gate else None
        self.sink = nn.Parameter(torch.zeros(1, HEADS, 1, 8)) if sink else None
        self.scale = nn.Parameter(torch.full((HEADS, 1, 1), math.log(10.0))) if cosine else None
        self.relative = nn.Embedding(32, HEADS) if place == "relative" else None

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, 8)).transpose(1, 2) for each in (self.query, self.key, self.value))
        if self.norms is not None:
            q, k = self.norms[0](q), self.norms[1](k)
        if self.place == "rotary":
            q, k = rotate(q), rotate(k)
        k, v = (each.repeat_interleave(HEADS // self.groups, 1) for each in (k, v))
        if self.scale is not None:
            scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * self.scale.exp()
        else:
            scores = q @ k.mT / 8**0.5
        places = torch.arange(x.shape[1])
        far = places[:, None] - places
        if self.place == "alibi":
            scores = scores - 2.0 ** -(2 * torch.arange(1, HEADS + 1))[:, None, None] * far.abs()
        if self.relative is not None:
            scores = scores + self.relative(far.clamp(-15, 15) + 15).permute(2, 0, 1)
        if self.cap:
            scores = self.cap * torch.tanh(scores / self.cap)
        mask = far < 0 if self.causal else torch.zeros_like(far, dtype=torch.bool)
        mask = mask | (far >= self.window) if self.window else mask
        mask = mask if hidden is None else mask | hidden
        scores = scores.masked_fill(mask, -torch.inf)
        if self.top:
            least = scores.topk(min(self.top, scores.shape[-1]), -1).values[..., -1:]
            scores = scores.masked_fill(scores < least, -torch.inf)
        heads = scores.softmax(-1) @ v
        x = heads.transpose(1, 2).flatten(2)
        return self.out(x if self.gate is None else x * self.gate(x).sigmoid())


def mlp(width: int = WIDTH, into: int | None = None, out: int | None = None) -> nn.Module:
    return nn.Sequential(nn.Linear(into or width, 2 * width), nn.GELU(), nn.Linear(2 * width, out or width))


class Block(nn.Module):
    def __init__(self, kind: str = "before", **options: Any) -> None:
        super().__init__()
        self.kind, self.attention, self.mlp = kind, Attention(**options), mlp()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))
        self.gains = nn.Parameter(torch.full((2, WIDTH), {"scaled": 1e-3, "zero": 0.0}.get(kind, 1.0)))

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        first, second, third, fourth = self.norms
        if self.kind == "parallel":
            normed = first(x)
            return x + self.attention(normed, hidden) + self.mlp(normed)
        if self.kind == "after":
            x = first(x + self.attention(x, hidden))
            return second(x + self.mlp(x))
        if self.kind == "sandwich":
            x = x + second(self.attention(first(x), hidden))
            return x + fourth(self.mlp(third(x)))
        x = x + self.gains[0] * self.attention(first(x), hidden)
        return x + self.gains[1] * self.mlp(second(x))


class Letters(nn.Module):
    """A language model over bytes."""

    def __init__(self, blocks: list[nn.Module] | None = None, *, learnt: bool = True, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(LETTERS, WIDTH), nn.Parameter(0.02 * torch.randn(64, WIDTH))
        self.places.requires_grad_(learnt)
        self.blocks = nn.ModuleList(blocks or [Block() for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, LETTERS, bias=False)
        if tied:
            nn.init.normal_(self.embed.weight, std=0.05)
            self.head.weight = self.embed.weight

    def features(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.places[: tokens.shape[1]] if self.places.requires_grad else x
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.features(tokens))


def next_letter(model: nn.Module, tokens: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), **options)


def lm(model: nn.Module | None = None, **options: Any) -> Training:
    model = Letters() if model is None else model
    return Training(model, lambda step: next_letter(model, text()), **options)


def letters(**options: Any) -> Training:
    """A language model with two such blocks."""
    place = options.get("place")
    return lm(Letters([Block(**options) for _ in range(2)], learnt=not place))


def encoder(layers: int = 2, dropout: float = 0.0, first: bool = True, width: int = WIDTH) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, HEADS, 2 * width, dropout, batch_first=True, norm_first=first)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def causal(length: int) -> Tensor:
    return nn.Transformer.generate_square_subsequent_mask(length)


class Rows(nn.Module):
    """Rows of numbers, such as patches or points, to one or several outputs."""

    def __init__(self, features: int, outputs: int, *, pooled: bool = True, length: int = 64, body: Any = None) -> None:
        super().__init__()
        self.into, self.places = nn.Linear(features, WIDTH), nn.Parameter(0.02 * torch.randn(length, WIDTH))
        self.body, self.pooled, self.out = body or encoder(), pooled, nn.Linear(WIDTH, outputs)

    def forward(self, x: Tensor, **given: Any) -> Tensor:
        x = self.body(self.into(x) + self.places[: x.shape[1]], **given)
        return self.out(x.mean(1) if self.pooled else x)


def waves(count: int = 16, length: int = 48) -> Tensor:
    time = torch.arange(length)
    periods, phases = torch.randint(6, 20, (count, 1)), 6.3 * torch.rand(count, 1)
    return (
        (6.28 * time / periods + phases).sin() + 0.02 * time * torch.randn(count, 1) + 0.1 * torch.randn(count, length)
    )


def view(x: Tensor) -> Tensor:
    return F.unfold(x, 2, stride=2).mT


def classify(model: nn.Module, smoothing: float = 0.0) -> Callable[[int], Tensor]:
    def loss(step: int) -> Tensor:
        x, y = digits()
        return F.cross_entropy(model(view(x)), y, label_smoothing=smoothing)

    return loss


def pictures(**options: Any) -> Training:
    model = Rows(4, 10)
    return Training(model, classify(model), **options)


# --- architectures on letters


@training
def ALiBi() -> Training:
    return letters(place="alibi")


@training
def rotary_and_grouped_keys() -> Training:
    return letters(place="rotary", groups=2)


@training
def multi_query() -> Training:
    return letters(groups=1)


@training
def relative_bias() -> Training:
    return letters(place="relative")


@training
def normed_queries_and_keys() -> Training:
    return letters(place="rotary", norm=True)


@training
def cosine_scores() -> Training:
    return letters(cosine=True)


@training
def soft_cap() -> Training:
    return letters(cap=15.0)


@training
def gated_heads() -> Training:
    return letters(gate=True)


@training
def local_and_global() -> Training:
    return lm(Letters([Block(window=6), Block(), Block(window=6), Block()]))


@training
def top_keys_alone() -> Training:
    return letters(top=6)


@training
def parallel_blocks() -> Training:
    return letters(kind="parallel")


@training
def norm_after_with_warm_up() -> Training:
    blocks = [Block("after") for _ in range(6)]
    return lm(Letters(blocks), rate=2e-3, factor=lambda step: min(1, (step + 1) / 60))


@training
def sandwich_norms() -> Training:
    return letters(kind="sandwich")


@training
def layer_scale() -> Training:
    return lm(Letters([Block("scaled") for _ in range(4)]), rate=3e-3)


@training
def ReZero() -> Training:
    return lm(Letters([Block("zero") for _ in range(4)]), rate=3e-3)


@training
def outputs_begin_at_zero() -> Training:
    model = Letters()
    for block in model.blocks:
        nn.init.zeros_(block.attention.out.weight)
        nn.init.zeros_(block.mlp[2].weight)
    return lm(model, rate=2e-3)


@training
def tied_embedding() -> Training:
    return lm(Letters(tied=True), rate=2e-3)


@training
def maximal_update() -> Training:
    model = Letters(tied=False)
    nn.init.zeros_(model.head.weight)
    for block in model.blocks:
        nn.init.zeros_(block.attention.query.weight)
    hidden = [each for each in model.blocks.parameters() if each.dim() == 2]
    others = [each for each in model.parameters() if not any(each is other for other in hidden)]
    groups = [{"params": hidden, "lr": 2e-3}, {"params": others, "lr": 8e-3}]
    return lm(model, optimizer=torch.optim.Adam(groups), rate=1.0)


@training
def one_block_three_times() -> Training:
    block = Block()
    return lm(Letters([block, block, block]))


@training
def mixture_of_experts() -> Training:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.experts = nn.Linear(WIDTH, 4), nn.ModuleList(mlp() for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            share, chosen = self.router(x).softmax(-1).topk(2, -1)
            each = torch.stack([expert(x) for expert in self.experts], -2)
            return (each.gather(-2, chosen[..., None].expand(*chosen.shape, WIDTH)) * share[..., None]).sum(-2)

    model = Letters()
    for block in model.blocks:
        block.mlp = Experts()
    return lm(model)


@training
def linear_attention_and_softmax() -> Training:
    class Linear(Block):
        def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
            each, a = self.norms[0](x), self.attention
            q, k, v = (m(each).unflatten(-1, (HEADS, 8)) for m in (a.query, a.key, a.value))
            q, k = F.elu(q) + 1, F.elu(k) + 1
            memory = torch.einsum("blhi,blhj->blhij", k, v).cumsum(1)
            share = torch.einsum("blhi,blhi->blh", q, k.cumsum(1))
            x = x + a.out((torch.einsum("blhi,blhij->blhj", q, memory) / share[..., None]).flatten(2))
            return x + self.mlp(self.norms[1](x))

    training = lm(Letters([Linear(), Block()]))
    training.strict = False
    return training


@training
def attention_sinks_in_registers() -> Training:
    class WithRegisters(Rows):
        def forward(self, x: Tensor, **given: Any) -> Tensor:
            x = self.into(x) + self.places[: x.shape[1]]
            x = self.body(torch.cat([self.registers.expand(len(x), -1, -1), x], 1))
            return self.out(x[:, 4:].mean(1))

    model = WithRegisters(4, 10)
    model.registers = nn.Parameter(torch.randn(1, 4, WIDTH))
    return Training(model, classify(model))


@training
def weights_standardised() -> Training:
    class Standardised(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return (weight - weight.mean(1, keepdim=True)) / (weight.std(1, keepdim=True) + 1e-5) / WIDTH**0.5

    model = Letters()
    for block in model.blocks:
        for name in ("query", "key", "value"):
            nn.utils.parametrize.register_parametrization(getattr(block.attention, name), "weight", Standardised())
    return lm(model)


@training
def eight_tokens_ahead_in_patches() -> Training:
    class Mega(Letters):
        def __init__(self) -> None:
            super().__init__()
            self.join, self.split = nn.Linear(4 * WIDTH, WIDTH), nn.Linear(WIDTH, 4 * WIDTH)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.join(self.embed(tokens).unflatten(1, (-1, 4)).flatten(2)) + self.places[: tokens.shape[1] // 4]
            for block in self.blocks:
                x = block(x)
            return self.head(self.split(x).unflatten(-1, (4, WIDTH)).flatten(1, 2))

    model = Mega()

    def loss(step: int) -> Tensor:
        tokens = text(8, 68)
        return F.cross_entropy(model(tokens[:, :64]).flatten(0, 1), tokens[:, 4:].flatten())

    return Training(model, loss)


@training
def two_tokens_are_predicted() -> Training:
    model = Letters()
    model.second = nn.Linear(WIDTH, LETTERS)

    def loss(step: int) -> Tensor:
        tokens = text()
        x = model.features(tokens[:, :-2])
        first = F.cross_entropy(model.head(x).flatten(0, 1), tokens[:, 1:-1].flatten())
        return first + 0.5 * F.cross_entropy(model.second(x).flatten(0, 1), tokens[:, 2:].flatten())

    return Training(model, loss)


@training
def memory_of_the_segment_before() -> Training:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.norm, self.mlp = nn.Embedding(LETTERS, WIDTH), nn.LayerNorm(WIDTH), mlp()
            self.attention, self.head = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), nn.Linear(WIDTH, LETTERS)
            self.places = nn.Parameter(0.02 * torch.randn(32, WIDTH))
            self.memory: Tensor | None = None

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens) + self.places[16:]
            before = torch.zeros_like(x) if self.memory is None else self.memory
            self.memory = x.detach()
            context = self.norm(torch.cat([before + self.places[:16] - self.places[16:], x], 1))
            mask = torch.ones(16, 32, dtype=torch.bool).triu(17)
            x = x + self.attention(self.norm(x), context, context, attn_mask=mask, need_weights=False)[0]
            return self.head(x + self.mlp(x))

    model = Recurrent()
    starts = [1000 * place for place in range(8)]

    def loss(step: int) -> Tensor:
        tokens = torch.stack([TEXT[start + 16 * step : start + 16 * step + 17] for start in starts])
        return next_letter(model, tokens)

    return Training(model, loss)


@training
def prefix_sees_itself() -> Training:
    model = Letters()

    def loss(step: int) -> Tensor:
        tokens, first = text(), random.randint(4, 12)
        hidden = torch.ones(32, 32, dtype=torch.bool).triu(1)
        hidden[:first, :first] = False
        x = model.embed(tokens[:, :-1]) + model.places[:32]
        for block in model.blocks:
            block.attention.causal = False
            x = block(x, hidden)
        return F.cross_entropy(model.head(x)[:, first:].flatten(0, 1), tokens[:, first + 1 :].flatten())

    return Training(model, loss)


# --- tasks


@training
def forecasts_by_patches() -> Training:
    model = Rows(8, 8)

    def loss(step: int) -> Tensor:
        x = waves()
        mean, scale = x[:, :40].mean(1, keepdim=True), x[:, :40].std(1, keepdim=True) + 1e-5
        x = (x - mean) / scale
        return F.mse_loss(model(x[:, :40].unflatten(1, (5, 8))), x[:, 40:])

    return Training(model, loss, clip=lambda step: nn.utils.clip_grad_norm_(model.parameters(), 1.0))


@training
def forecasts_by_encoder_and_decoder() -> Training:
    class Forecaster(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.places = nn.Linear(1, WIDTH), nn.Parameter(0.1 * torch.randn(48, WIDTH))
            self.body = nn.Transformer(WIDTH, HEADS, 1, 1, 64, 0.1, batch_first=True)
            self.out = nn.Linear(WIDTH, 2)

        def forward(self, past: Tensor, now: Tensor) -> Tensor:
            past = self.into(past[..., None]) + self.places[:40]
            now = self.into(now[..., None]) + self.places[40:]
            return self.out(self.body(past, now, tgt_mask=causal(8)))

    model = Forecaster()

    def loss(step: int) -> Tensor:
        x = waves()
        mean, scale = model(x[:, :40], x[:, 39:47]).unbind(-1)
        return F.gaussian_nll_loss(mean, x[:, 40:], F.softplus(scale) + 1e-3)

    return Training(model, loss, rate=3e-3, factor=lambda step: 0.5 ** (step // 50))


class Table(nn.Module):
    def __init__(self, features: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.randn(features, WIDTH) / WIDTH**0.5) for _ in range(2))
        self.cls, self.body = nn.Parameter(torch.randn(1, 1, WIDTH) / WIDTH**0.5), encoder(2, 0.1)
        self.out = nn.Linear(WIDTH, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = x[..., None] * self.weight + self.bias
        return self.out(self.body(torch.cat([self.cls.expand(len(x), -1, -1), x], 1))[:, 0])


def table(load: Any, outputs: int) -> Training:
    x, y = load(return_X_y=True)
    x, y = torch.tensor((x - x.mean(0)) / x.std(0)).float(), torch.tensor(y)
    y = y if outputs > 1 else (y - y.mean()) / y.std()
    model = Table(x.shape[1], outputs)

    def loss(step: int) -> Tensor:
        at = torch.randint(len(x), (32,))
        out = model(x[at])
        return F.cross_entropy(out, y[at]) if outputs > 1 else F.mse_loss(out[:, 0], y[at].float())

    return Training(model, loss, torch.optim.AdamW(model.parameters(), weight_decay=1e-5))


@training
def tables_of_patients() -> Training:
    return table(load_diabetes, 1)


@training
def tables_of_tumours() -> Training:
    return table(load_breast_cancer, 2)


@training
def tables_of_wines() -> Training:
    return table(load_wine, 3)


@training
def notes_with_durations() -> Training:
    class Notes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pitch, self.length = nn.Embedding(24, WIDTH), nn.Embedding(4, WIDTH)
            self.blocks = nn.ModuleList(Block(place="relative") for _ in range(2))
            self.pitches, self.lengths = nn.Linear(WIDTH, 24), nn.Linear(WIDTH, 4)

        def forward(self, pitch: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
            x = self.pitch(pitch) + self.length(length)
            for block in self.blocks:
                x = block(x)
            return self.pitches(x), self.lengths(x)

    model, scale = Notes(), torch.tensor([0, 2, 4, 5, 7, 9, 11])

    def loss(step: int) -> Tensor:
        motif = torch.randint(7, (8, 8)).repeat(1, 3)
        motif[:, 8:16] = (motif[:, 8:16] + 2) % 7
        pitch, length = scale[motif] + torch.randint(12, (8, 1)), (motif % 4).roll(1, 1)
        of_pitch, of_length = model(pitch[:, :-1], length[:, :-1])
        return F.cross_entropy(of_pitch.mT, pitch[:, 1:]) + F.cross_entropy(of_length.mT, length[:, 1:])

    return Training(model, loss, rate=2e-3)


@training
def decisions_from_returns() -> Training:
    class Decisions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.returns, self.states, self.actions = nn.Linear(1, WIDTH), nn.Linear(2, WIDTH), nn.Embedding(4, WIDTH)
            self.times, self.body, self.out = nn.Embedding(10, WIDTH), encoder(2, 0.1), nn.Linear(WIDTH, 4)

        def forward(self, returns: Tensor, states: Tensor, actions: Tensor) -> Tensor:
            times = self.times(torch.arange(10))
            parts = self.returns(returns[..., None]), self.states(states), self.actions(actions)
            x = torch.stack([part + times for part in parts], 2).flatten(1, 2)
            return self.out(self.body(x, mask=causal(30), is_causal=True)[:, 1::3])

    model = Decisions()

    def loss(step: int) -> Tensor:
        goal, states = torch.randn(16, 1, 2), torch.randn(16, 10, 2)
        ways = torch.tensor([[1.0, 0], [-1, 0], [0, 1], [0, -1]])
        best = ((goal - states) @ ways.T).argmax(-1)
        actions = torch.where(torch.rand(16, 10) < 0.2, torch.randint(4, (16, 10)), best)
        returns = (actions == best).float().flip(1).cumsum(1).flip(1)
        return F.cross_entropy(model(returns, torch.cat([goal - states], -1), actions).mT, actions)

    return Training(model, loss)


@training
def masked_autoencoder() -> Training:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.places = nn.Linear(4, WIDTH), nn.Parameter(0.02 * torch.randn(16, WIDTH))
            self.encoder, self.decoder, self.out = encoder(2), encoder(1), nn.Linear(WIDTH, 4)
            self.token = nn.Parameter(0.02 * torch.randn(WIDTH))

        def forward(self, x: Tensor, order: Tensor) -> Tensor:
            places = self.places[order]
            seen = self.encoder((self.into(x) + places)[:, :4])
            full = torch.cat([seen, self.token.expand(len(x), 12, WIDTH)], 1) + places
            return self.out(self.decoder(full))[:, 4:]

    model = Masked()

    def loss(step: int) -> Tensor:
        x, order = patches(), torch.rand(16, 16).argsort(1)
        x = x.gather(1, order[..., None].expand_as(x))
        return F.mse_loss(model(x, order), x[:, 4:])

    return Training(model, loss, rate=2e-3)


@training
def detection_with_queries() -> Training:
    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.places = nn.Linear(4, WIDTH), nn.Parameter(torch.randn(64, WIDTH))
            self.queries = nn.Parameter(torch.randn(6, WIDTH))
            self.body = nn.Transformer(WIDTH, HEADS, 1, 2, 64, 0.0, batch_first=True)
            self.classes, self.boxes = nn.Linear(WIDTH, 11), mlp(out=2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = self.body(self.into(x) + self.places, self.queries.expand(len(x), -1, -1))
            return self.classes(x), self.boxes(x).sigmoid()

    model = Detector()

    def loss(step: int) -> Tensor:
        x, y = digits(16)
        board, at = torch.zeros(8, 1, 16, 16), torch.randint(2, (8, 2))
        for place in range(8):
            for digit in range(2):
                row, column = 8 * int(at[place, 0]) if digit else 8 - 8 * int(at[place, 0]), 8 * int(at[place, 1])
                board[place, :, row : row + 8, column : column + 8] = x[2 * place + digit]
        corners = torch.stack([torch.stack([1 - at[:, 0], at[:, 1]], 1), at], 1).float() * 0.5 + 0.25
        classes, boxes = model(view(board))
        total = torch.zeros(())
        for place in range(8):
            wanted = y[2 * place : 2 * place + 2]
            cost = torch.cdist(boxes[place], corners[place], 1) - classes[place].softmax(-1)[:, wanted]
            rows, columns = linear_sum_assignment(cost.detach().numpy())
            labels = torch.full((6,), 10)
            labels[rows] = wanted[columns]
            weight = torch.ones(11)
            weight[10] = 0.1
            total = total + F.cross_entropy(classes[place], labels, weight)
            total = total + 5 * F.l1_loss(boxes[place][rows], corners[place][columns])
        return total / 8

    return Training(model, loss, clip=lambda step: nn.utils.clip_grad_norm_(model.parameters(), 0.1))


def tones(count: int = 8) -> tuple[Tensor, Tensor]:
    labels = torch.randint(1, 9, (count, 5))
    sounds = F.one_hot(labels, 12).float().repeat_interleave(4, 1)
    return sounds + 0.3 * torch.randn_like(sounds), labels


@training
def speech_CTC() -> Training:
    model = Rows(12, 9, pooled=False, body=encoder(2, 0.1))

    def loss(step: int) -> Tensor:
        x, y = tones()
        log = model(x).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(log, y, torch.full((8,), 20), torch.full((8,), 5))

    return Training(model, loss, rate=2e-3, factor=lambda step: min(1, (step + 1) / 40))


@training
def graphs_with_distances() -> Training:
    model = Rows(3, 1)
    model.far = nn.Embedding(5, HEADS)

    def loss(step: int) -> Tensor:
        links = (torch.rand(16, 10, 10) < 0.2).float()
        links = ((links + links.mT) > 0).float()
        far = torch.full((16, 10, 10), 4)
        reach = torch.eye(10).expand(16, 10, 10)
        for hops in range(4):
            far = torch.where((reach > 0) & (far == 4), hops, far)
            reach = reach @ (links + torch.eye(10))
        x = torch.stack([links.sum(-1), torch.randn(16, 10), torch.ones(16, 10)], -1)
        triangles = (links @ links @ links).diagonal(dim1=1, dim2=2).sum(-1) / 20
        mask = model.far(far).permute(0, 3, 1, 2).flatten(0, 1)
        return F.mse_loss(model(x, mask=mask)[:, 0], triangles)

    return Training(model, loss)


@training
def graphs_of_neighbours() -> Training:
    model = Rows(4, 2, pooled=False)

    def loss(step: int) -> Tensor:
        groups = torch.randint(2, (8, 12))
        same = groups[:, :, None] == groups[:, None]
        links = torch.rand(8, 12, 12) < torch.where(same, 0.5, 0.1)
        links = links | links.mT | torch.eye(12, dtype=torch.bool)
        x = torch.randn(8, 12, 4)
        x[..., 0] += 0.7 * (2 * groups - 1)
        out = model(x, mask=~links.repeat_interleave(HEADS, 0))
        return F.cross_entropy(out.mT, groups)

    return Training(model, loss)


def clouds(count: int = 16) -> tuple[Tensor, Tensor]:
    kinds, x = torch.randint(3, (count,)), torch.randn(count, 24, 3)
    ball = x / x.norm(dim=-1, keepdim=True)
    cube = x / x.abs().amax(-1, keepdim=True)
    plane = torch.cat([x[..., :2], torch.zeros(count, 24, 1)], -1)
    return torch.where(kinds[:, None, None] == 0, ball, torch.where(kinds[:, None, None] == 1, cube, plane)), kinds


@training
def clouds_of_points() -> Training:
    model = Rows(3, 3)
    model.places.requires_grad_(False).zero_()

    def loss(step: int) -> Tensor:
        x, y = clouds()
        turn, _ = torch.linalg.qr(torch.randn(3, 3))
        return F.cross_entropy(model(x @ turn), y)

    return Training(model, loss, rate=2e-3)


class Latents(nn.Module):
    """A few learnt rows that attend to many."""

    def __init__(self, features: int, outputs: int, count: int = 4) -> None:
        super().__init__()
        self.into, self.latents = nn.Linear(features, WIDTH), nn.Parameter(0.2 * torch.randn(count, WIDTH))
        self.places = nn.Parameter(0.02 * torch.randn(64, WIDTH))
        self.cross, self.body = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), encoder()
        self.norms, self.out = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2)), nn.Linear(WIDTH, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x, latents = self.norms[0](self.into(x) + self.places[: x.shape[1]]), self.latents.expand(len(x), -1, -1)
        latents = latents + self.cross(self.norms[1](latents), x, x, need_weights=False)[0]
        return self.out(self.body(latents).mean(1))


@training
def Perceiver() -> Training:
    model = Latents(4, 10)
    return Training(model, classify(model))


@training
def sets_and_their_largest() -> Training:
    model = Latents(1, 1, 1)
    model.places.requires_grad_(False).zero_()

    def loss(step: int) -> Tensor:
        x = 2 * torch.randn(32, random.randint(4, 12), 1)
        return F.l1_loss(model(x)[:, 0], x.amax((1, 2)))

    return Training(model, loss)


@training
def slots() -> Training:
    class Slots(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.places = mlp(into=4), nn.Parameter(0.1 * torch.randn(16, WIDTH))
            self.mean, self.spread = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
            self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
            self.cell, self.norm, self.out = nn.GRUCell(WIDTH, WIDTH), nn.LayerNorm(WIDTH), mlp(out=5)
            self.body = encoder(1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.body(self.into(x) + self.places)
            slots = self.mean + self.spread.exp() * torch.randn(len(x), 3, WIDTH)
            for _ in range(3):
                scores = self.q(self.norm(slots)) @ self.k(x).mT / WIDTH**0.5
                share = scores.softmax(1) + 1e-8
                share = share / share.sum(-1, keepdim=True)
                slots = self.cell((share @ self.v(x)).flatten(0, 1), slots.flatten(0, 1)).unflatten(0, (-1, 3))
            out = self.out(slots[:, :, None] + self.places)
            return (out[..., :4] * out[..., 4:].softmax(1)).sum(1)

    model = Slots()

    def loss(step: int) -> Tensor:
        x = patches()
        return F.mse_loss(model(x), x)

    return Training(model, loss, strict=False, rate=2e-3, factor=lambda step: min(1, (step + 1) / 50))


@training
def quantised_tokens() -> Training:
    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = Rows(4, 8, pooled=False), Rows(8, 4, pooled=False)
            self.codes = nn.Parameter(torch.randn(32, 8))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            z = self.encoder(x)
            near = self.codes[torch.cdist(z, self.codes[None]).argmin(-1)]
            apart = F.mse_loss(near, z.detach()) + 0.25 * F.mse_loss(z, near.detach())
            return self.decoder(z + (near - z).detach()), apart

    model = Quantised()

    def loss(step: int) -> Tensor:
        x = patches()
        out, apart = model(x)
        return F.mse_loss(out, x) + apart

    return Training(model, loss, rate=2e-3)


class Pair(nn.Module):
    """An encoder and a decoder of torch's over letters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(LETTERS, WIDTH), nn.Parameter(0.1 * torch.randn(20, WIDTH))
        self.body = nn.Transformer(WIDTH, HEADS, 1, 1, 64, 0.0, batch_first=True, norm_first=True)
        self.out = nn.Linear(WIDTH, LETTERS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        source, target = (self.embed(each) + self.places[: each.shape[1]] for each in (source, target))
        return self.out(self.body(source, target, tgt_mask=causal(target.shape[1]), tgt_is_causal=True))


@training
def less_and_less_teacher_forcing() -> Training:
    model = Pair()

    def loss(step: int) -> Tensor:
        source = torch.randint(3, 20, (16, 8))
        target = torch.cat([torch.ones(16, 1, dtype=torch.long), source.flip(1)], 1)
        given = target[:, :-1]
        with torch.no_grad():
            own = torch.cat([given[:, :1], model(source, given)[:, :-1].argmax(-1)], 1)
        given = torch.where(torch.rand(given.shape) < max(0.3, 1 - step / 150), given, own)
        return F.cross_entropy(model(source, given).mT, target[:, 1:])

    return Training(model, loss, rate=3e-3)


def embedded(model: Letters, tokens: Tensor) -> Tensor:
    return F.normalize(model.features(tokens).mean(1), dim=-1)


def bidirectional() -> Letters:
    return Letters([Block(causal=False) for _ in range(2)])


@training
def retrieval_by_two_encoders() -> Training:
    model = nn.ModuleDict({"questions": bidirectional(), "pages": bidirectional()})
    model.scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def loss(step: int) -> Tensor:
        pages = text(16, 33)
        first = embedded(model["questions"], pages[:, 5:17])
        scores = first @ embedded(model["pages"], pages).T * model.scale.exp().clamp(max=100)
        return (F.cross_entropy(scores, torch.arange(16)) + F.cross_entropy(scores.T, torch.arange(16))) / 2

    return Training(model, loss)


@training
def siamese_with_a_margin() -> Training:
    model = Rows(4, 16)

    def loss(step: int) -> Tensor:
        (x, y), (z, w) = digits(), digits()
        far, same = F.pairwise_distance(model(view(x)), model(view(z))), (y == w).float()
        return (3 * same * far.square() + (1 - same) * (1 - far).clamp(min=0).square()).mean()

    return Training(model, loss)


@training
def triplets() -> Training:
    model = Rows(4, 16)

    def loss(step: int) -> Tensor:
        x, y = digits(48)
        z = F.normalize(model(view(x)), dim=-1)
        far, same = torch.cdist(z, z), y[:, None] == y
        hardest = (far * same).amax(1) - (far + 9 * same).amin(1)
        return (hardest + 0.3).clamp(min=0).mean()

    return Training(model, loss)


@training
def ranking_of_lists() -> Training:
    model = Rows(6, 1, pooled=False)
    model.places.requires_grad_(False).zero_()
    truth = torch.randn(6)

    def loss(step: int) -> Tensor:
        x = torch.randn(16, 10, 6)
        gains = (x @ truth + x[..., 0] * x[..., 1] + 0.3 * torch.randn(16, 10)).argsort(1).argsort(1).float()
        return F.cross_entropy(model(x)[..., 0], gains.softmax(-1))

    return Training(model, loss)


@training
def survival() -> Training:
    model, truth = Table(8, 1), torch.randn(8)

    def loss(step: int) -> Tensor:
        x = torch.randn(48, 8)
        times, seen = torch.empty(48).exponential_() / (x @ truth).exp(), torch.rand(48) < 0.7
        risk = model(x)[:, 0][times.argsort(descending=True)]
        return (risk.logcumsumexp(0) - risk)[seen[times.argsort(descending=True)]].mean()

    return Training(model, loss)


@training
def actor_and_critic() -> Training:
    model = Rows(5, 6, pooled=False)

    def loss(step: int) -> Tensor:
        goal, at = torch.randint(5, (32,)), torch.randint(5, (32,))
        seen, logs, rewards, values, entropies = [], [], [], [], []
        for _ in range(6):
            seen.append(F.one_hot(at, 5).float() - F.one_hot(goal, 5).float())
            out = model(torch.stack(seen, 1))[:, -1]
            choice = torch.distributions.Categorical(logits=out[:, :5])
            action = choice.sample()
            at = (at + action - 2).clamp(0, 4)
            logs.append(choice.log_prob(action))
            rewards.append((at == goal).float())
            values.append(out[:, 5])
            entropies.append(choice.entropy())
        returns = torch.stack(rewards).flip(0).cumsum(0).flip(0)
        values = torch.stack(values)
        gain = (returns - values).detach()
        policy = -(torch.stack(logs) * (gain - gain.mean()) / (gain.std() + 1e-5)).mean()
        return policy + 0.5 * F.mse_loss(values, returns) - 0.01 * torch.stack(entropies).mean()

    return Training(model, loss, clip=lambda step: nn.utils.clip_grad_norm_(model.parameters(), 0.5))


@training
def DQN_on_sequences() -> Training:
    model = Rows(4, 3)
    target = copy.deepcopy(model).requires_grad_(False)

    def reward(x: Tensor, action: Tensor) -> Tensor:
        return (action == (x[:, :, 0].sum(1) > 0).long() + (x[:, -1, 1] > 1).long()).float()

    def loss(step: int) -> Tensor:
        x, action = torch.randn(32, 8, 4), torch.randint(3, (32,))
        later = torch.cat([x[:, 1:], torch.randn(32, 1, 4)], 1)
        with torch.no_grad():
            best = model(later).argmax(1, keepdim=True)
            wanted = reward(x, action) + 0.9 * target(later).gather(1, best)[:, 0]
        return F.smooth_l1_loss(model(x).gather(1, action[:, None])[:, 0], wanted)

    def after(step: int, loss: float) -> None:
        if step % 40 == 39:
            target.load_state_dict(model.state_dict())

    return Training(model, loss, after=after)


@training
def diffusion_of_digits() -> Training:
    class Denoiser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.places = nn.Linear(4, WIDTH), nn.Parameter(0.02 * torch.randn(16, WIDTH))
            self.time, self.body, self.out = (
                mlp(into=8),
                nn.ModuleList(Block(causal=False) for _ in range(2)),
                nn.Linear(WIDTH, 4),
            )
            self.shift = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(2))
            for each in self.shift:
                nn.init.zeros_(each.weight)

        def forward(self, x: Tensor, time: Tensor) -> Tensor:
            angles = time[:, None] * 2.0 ** torch.arange(4)
            time = self.time(torch.cat([angles.sin(), angles.cos()], -1))
            x = self.into(x) + self.places
            for block, shift in zip(self.body, self.shift):
                scale, move = shift(F.silu(time))[:, None].chunk(2, -1)
                x = block(x * (1 + scale) + move)
            return self.out(x)

    model = Denoiser()
    average = copy.deepcopy(model).requires_grad_(False)

    def loss(step: int) -> Tensor:
        x, time = 2 * patches() - 1, torch.rand(16)
        noise, kept = torch.randn_like(x), (1.57 * time).cos()[:, None, None]
        return F.mse_loss(model(kept * x + (1 - kept**2).sqrt() * noise, time), noise)

    def after(step: int, loss: float) -> None:
        for mean, now in zip(average.parameters(), model.parameters()):
            mean.lerp_(now.detach(), 0.01)

    return Training(model, loss, after=after)


@training
def normalising_flow() -> Training:
    class Coupling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nets = nn.ModuleList(Rows(2, 4, pooled=False, body=encoder(1)) for _ in range(4))
            for net in self.nets:
                nn.init.zeros_(net.out.weight)

        def forward(self, x: Tensor) -> Tensor:
            volume = torch.zeros(len(x))
            for net in self.nets:
                first, second = x.chunk(2, -1)
                scale, shift = net(first).chunk(2, -1)
                scale = 2 * torch.tanh(scale / 2)
                x = torch.cat([second * scale.exp() + shift, first], -1)
                volume = volume + scale.sum((1, 2))
            return (0.5 * x.square().sum((1, 2)) - volume) / x[0].numel()

    model = Coupling()

    def loss(step: int) -> Tensor:
        x = patches()
        return model((x + torch.rand_like(x) / 16) * 2 - 1).mean()

    return Training(model, loss, clip=lambda step: nn.utils.clip_grad_norm_(model.parameters(), 1.0))


@training
def world_model() -> Training:
    model = Rows(5, 5, pooled=False)

    def loss(step: int) -> Tensor:
        x, pushes = [torch.randn(16, 4)], torch.randn(16, 12)
        for time in range(12):
            place, speed = x[-1].chunk(2, -1)
            speed = 0.9 * speed - 0.2 * place + 0.3 * pushes[:, time : time + 1]
            x.append(torch.cat([place + 0.3 * speed, speed], -1))
        states = torch.stack(x, 1)
        out = model(torch.cat([states[:, :-1], pushes[..., None]], -1), mask=causal(12), is_causal=True)
        reward = -states[:, 1:, :2].square().sum(-1)
        return F.mse_loss(out[..., :4], states[:, 1:] - states[:, :-1]) + 0.1 * F.mse_loss(out[..., 4], reward)

    return Training(model, loss)


@training
def GAN() -> Training:
    model = nn.ModuleDict({"maker": Rows(8, 4, pooled=False, body=encoder(1)), "judge": Rows(4, 1, body=encoder(1))})

    def update(training: Training, step: int) -> float:
        of_maker, of_judge = training.optimizers
        real, noise = 2 * patches() - 1, torch.randn(16, 16, 8)
        fake = model["maker"](noise)
        judged = F.softplus(-model["judge"](real)).mean() + F.softplus(model["judge"](fake.detach())).mean()
        of_judge.zero_grad()
        judged.backward()
        of_judge.step()
        loss = F.softplus(-model["judge"](fake)).mean()
        of_maker.zero_grad()
        loss.backward()
        of_maker.step()
        return loss.item()

    both = [torch.optim.Adam(part.parameters(), 5e-4, betas=(0.5, 0.99)) for part in model.values()]
    return Training(model, lambda step: torch.zeros(()), both, step=update)


@training
def Reptile() -> Training:
    model = Rows(2, 1, pooled=False)

    def update(training: Training, step: int) -> float:
        before = [each.detach().clone() for each in model.parameters()]
        height, phase = 1 + random.random(), 3 * random.random()
        for _ in range(3):
            x = 4 * torch.rand(8, 10, 1) - 2
            y = height * (2 * x + phase).sin()
            loss = F.mse_loss(model(torch.cat([x, x * x], -1)), y)
            inner = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for each, gradient in zip(model.parameters(), inner):
                    each -= 0.02 * gradient
        with torch.no_grad():
            for each, was in zip(model.parameters(), before):
                each.grad = was - each
                each.copy_(was)
        training.optimizers[0].step()
        return loss.item()

    return Training(
        model, lambda step: torch.zeros(()), torch.optim.SGD(model.parameters(), 0.5), step=update, rate=0.5
    )


@training
def regressions_in_context() -> Training:
    model = Rows(4, 1, pooled=False)

    def loss(step: int) -> Tensor:
        dims = min(3, 1 + step // 60)
        w = torch.randn(32, 3, 1) * (torch.arange(3) < dims).float()[:, None]
        x = torch.randn(32, 12, 3) * (torch.arange(3) < dims)
        y = (x @ w)[..., 0]
        before = torch.cat([torch.zeros(32, 1), y[:, :-1]], 1)
        out = model(torch.cat([x, before[..., None]], -1), mask=causal(12), is_causal=True)[..., 0]
        return F.mse_loss(out, y)

    return Training(model, loss)


@training
def tasks_one_after_another_with_rehearsal() -> Training:
    model = Rows(4, 10)
    orders = [torch.randperm(16) for _ in range(4)]
    old: list[tuple[Tensor, Tensor]] = []

    def loss(step: int) -> Tensor:
        x, y = digits()
        x = view(x)[:, orders[min(3, step // 50)]]
        if step % 10 == 0:
            old.append((x, y))
        again, labels = random.choice(old)
        return F.cross_entropy(model(x), y) + F.cross_entropy(model(again), labels)

    return Training(model, loss)


@training
def classes_come_in_one_by_one() -> Training:
    model = Rows(4, 10)

    def loss(step: int) -> Tensor:
        x, y = digits(64)
        known = y < min(10, 2 + step // 20)
        return F.cross_entropy(model(view(x[known])), y[known])

    return Training(model, loss)


def noisy(x: Tensor) -> Tensor:
    return x.roll(random.randint(-1, 1), 2) + 0.1 * torch.randn_like(x)


@training
def SimSiam() -> Training:
    model = nn.ModuleDict(
        {
            "body": Rows(4, 32),
            "head": nn.Sequential(nn.Linear(32, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 32)),
        }
    )

    def loss(step: int) -> Tensor:
        x, _ = digits(32)
        z, w = (model["body"](view(noisy(x))) for _ in range(2))
        p, r = model["head"](z), model["head"](w)
        return -(F.cosine_similarity(p, w.detach()).mean() + F.cosine_similarity(r, z.detach()).mean()) / 2

    return Training(model, loss)


@training
def teacher_of_averages() -> Training:
    model = Rows(4, 16)
    teacher, centre = copy.deepcopy(model).requires_grad_(False), torch.zeros(16)

    def loss(step: int) -> Tensor:
        x, _ = digits(32)
        with torch.no_grad():
            out = teacher(view(noisy(x)))
            wanted = ((out - centre) / 0.07).softmax(-1)
            centre.lerp_(out.mean(0), 0.1)
        return -(wanted * (model(view(noisy(x))) / 0.2).log_softmax(-1)).sum(-1).mean()

    def after(step: int, loss: float) -> None:
        for mean, now in zip(teacher.parameters(), model.parameters()):
            mean.lerp_(now.detach(), 0.02)

    return Training(model, loss, after=after)


@training
def captions_of_digits() -> Training:
    class Captions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.embed = Rows(4, WIDTH, pooled=False, body=encoder(1)), nn.Embedding(LETTERS, WIDTH)
            layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 64, 0.0, batch_first=True)
            self.decoder, self.out = nn.TransformerDecoder(layer, 2), nn.Linear(WIDTH, LETTERS)
            self.places = nn.Parameter(0.1 * torch.randn(8, WIDTH))

        def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
            given = self.embed(tokens) + self.places[: tokens.shape[1]]
            return self.out(self.decoder(given, self.encoder(x), tgt_mask=causal(tokens.shape[1])))

    model = Captions()
    words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    table = torch.tensor([[1, *map(ord, word.ljust(6, "\n"))] for word in words])

    def loss(step: int) -> Tensor:
        x, y = digits()
        tokens = table[y]
        return F.cross_entropy(model(view(x), tokens[:, :-1]).mT, tokens[:, 1:])

    return Training(model, loss, rate=2e-3)


@training
def tags_of_letters() -> Training:
    model = bidirectional()
    model.head = nn.Linear(WIDTH, 4)

    def loss(step: int) -> Tensor:
        tokens = text()
        space, digit = tokens <= 32, (tokens >= 48) & (tokens < 58)
        tags = torch.where(space, 0, torch.where(digit, 1, torch.where(space.roll(1, 1), 2, 3)))
        return F.cross_entropy(model(tokens).mT, tags, torch.tensor([1.0, 3.0, 1.0, 1.0]))

    return Training(model, loss)


@training
def a_query_for_each_label() -> Training:
    class Labelled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.queries = (
                Rows(4, WIDTH, pooled=False, body=encoder(1)),
                nn.Parameter(torch.randn(10, WIDTH)),
            )
            self.attention, self.out = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), nn.Linear(WIDTH, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.body(x)
            return self.out(self.attention(self.queries.expand(len(x), -1, -1), x, x)[0])[..., 0]

    model = Labelled()

    def loss(step: int) -> Tensor:
        (x, y), (z, w) = digits(), digits()
        both = torch.cat([view(x), view(z)], 1)
        return F.binary_cross_entropy_with_logits(model(both), (F.one_hot(y, 10) | F.one_hot(w, 10)).float())

    return Training(model, loss, rate=2e-3)


@training
def pointing_while_sorting() -> Training:
    class Pointer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.q, self.k = Rows(1, WIDTH, pooled=False), nn.Embedding(8, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.q.weight @ self.k(self.body(x)).mT / WIDTH**0.5

    model = Pointer()

    def loss(step: int) -> Tensor:
        x = torch.rand(32, 8, 1)
        return F.cross_entropy(model(x).flatten(0, 1), x[..., 0].argsort(1).flatten())

    return Training(model, loss, rate=2e-3)


@training
def frames_by_space_and_time() -> Training:
    class Video(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.space, self.time = nn.Linear(4, WIDTH), encoder(1), encoder(1)
            self.places, self.times = (
                nn.Parameter(0.02 * torch.randn(16, WIDTH)),
                nn.Parameter(0.02 * torch.randn(4, 1, WIDTH)),
            )
            self.out = nn.Linear(WIDTH, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.into(x) + self.places + self.times
            x = self.space(x.flatten(0, 1)).unflatten(0, (-1, 4)).transpose(1, 2)
            return self.out(self.time(x.flatten(0, 1)).unflatten(0, (-1, 16)).mean((1, 2)))

    model = Video()

    def loss(step: int) -> Tensor:
        x, way = digits()[0], torch.randint(4, (16,))
        frames = torch.stack(
            [
                torch.stack([picture.roll((-1 if int(each) % 2 else 1) * t, 1 + int(each) // 2) for t in range(4)])
                for picture, each in zip(x, way)
            ]
        )
        return F.cross_entropy(model(view(frames.flatten(0, 1)).unflatten(0, (16, 4))), way)

    return Training(model, loss, rate=2e-3)


@training
def recommendations() -> Training:
    model = Letters()
    nn.init.normal_(model.embed.weight, std=0.1)
    follows = torch.randint(1, LETTERS, (LETTERS, 3))

    def loss(step: int) -> Tensor:
        items = [torch.randint(1, LETTERS, (16,))]
        for _ in range(12):
            items.append(follows[items[-1], torch.randint(3, (16,))])
        bought = torch.stack(items, 1)
        x, wanted = model.features(bought[:, :-1]), model.embed(bought[:, 1:])
        others = model.embed(torch.randint(1, LETTERS, wanted.shape[:2]))
        return -F.logsigmoid((x * (wanted - others)).sum(-1)).mean()

    return Training(model, loss, torch.optim.Adam(model.parameters(), betas=(0.9, 0.98)), rate=2e-3)


@training
def order_of_sentences() -> Training:
    model = bidirectional()
    model.head = nn.Linear(WIDTH, 2)

    def loss(step: int) -> Tensor:
        tokens, turned = text(16), torch.rand(16) < 0.5
        tokens = torch.where(turned[:, None], tokens.flip(1), tokens)
        return F.cross_entropy(model.head(model.features(tokens).mean(1)), turned.long())

    return Training(model, loss)


@training
def bodies_that_attract() -> Training:
    model = Rows(5, 2, pooled=False)
    model.places.requires_grad_(False).zero_()

    def loss(step: int) -> Tensor:
        place, mass = 2 * torch.randn(16, 6, 2), torch.rand(16, 6, 1) + 0.5
        apart = place[:, None] - place[:, :, None]
        pull = (mass[:, None] * apart / (apart.square().sum(-1, keepdim=True) + 0.5)).sum(2)
        return F.mse_loss(model(torch.cat([place, place.square(), mass], -1)), pull)

    return Training(model, loss, rate=2e-3)


@training
def predicting_what_is_coded() -> Training:
    model = nn.ModuleDict({"body": Rows(4, WIDTH, pooled=False), "ahead": nn.Linear(WIDTH, WIDTH)})

    def loss(step: int) -> Tensor:
        x = waves(16, 48).unflatten(1, (12, 4))
        z = model["body"](x, mask=causal(12), is_causal=True)
        now, later = model["ahead"](z[:, 6]), z[:, 8]
        return F.cross_entropy(now @ later.T / WIDTH**0.5, torch.arange(16))

    return Training(model, loss)


@training
def VAE_whose_divergence_comes_in() -> Training:
    model = nn.ModuleDict({"into": Rows(4, 16), "out": Rows(8, 4, pooled=False, body=encoder(1))})

    def loss(step: int) -> Tensor:
        x = patches()
        mean, spread = model["into"](x).chunk(2, -1)
        z = mean + (spread / 2).exp() * torch.randn_like(mean)
        apart = 0.5 * (mean.square() + spread.exp() - spread - 1).sum(-1).mean()
        out = model["out"](z[:, None].expand(-1, 16, -1))
        return 16 * F.mse_loss(out, x) + min(1, step / 150) * 0.02 * apart

    return Training(model, loss, rate=2e-3)


@training
def bags_of_instances() -> Training:
    model = Latents(64, 2, 1)
    model.places.requires_grad_(False).zero_()

    def loss(step: int) -> Tensor:
        x, y = digits(16 * 6)
        return F.cross_entropy(model(x.flatten(1).unflatten(0, (16, 6))), (y.unflatten(0, (16, 6)) == 7).any(1).long())

    return Training(model, loss, rate=2e-3)


@training
def sounds_from_letters() -> Training:
    class Voice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.into = nn.Embedding(16, WIDTH), nn.Sequential(nn.Linear(12, WIDTH), nn.Dropout(0.5))
            self.body = nn.Transformer(WIDTH, HEADS, 1, 1, 64, 0.1, batch_first=True)
            self.out, self.stop = nn.Linear(WIDTH, 12), nn.Linear(WIDTH, 1)
            self.places = nn.Parameter(0.1 * torch.randn(20, WIDTH))

        def forward(self, letters: Tensor, sound: Tensor) -> tuple[Tensor, Tensor]:
            letters, sound = self.embed(letters) + self.places[:5], self.into(sound) + self.places
            x = self.body(letters, sound, tgt_mask=causal(20))
            return self.out(x), self.stop(x)[..., 0]

    model = Voice()

    def loss(step: int) -> Tensor:
        x, y = tones()
        out, stop = model(y, torch.cat([torch.zeros(8, 1, 12), x[:, :-1]], 1))
        ends = (torch.arange(20) == 19).float().expand(8, -1)
        return F.l1_loss(out, x) + F.mse_loss(out, x) + F.binary_cross_entropy_with_logits(stop, ends)

    return Training(model, loss, rate=2e-3)


@training
def preferences_beside_a_reference() -> Training:
    model = Letters()
    start = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(40):
        next_letter(model, text()).backward()
        start.step()
        start.zero_grad()
    reference = copy.deepcopy(model).requires_grad_(False)

    def log(each: nn.Module, tokens: Tensor) -> Tensor:
        return each(tokens[:, :-1]).log_softmax(-1).gather(-1, tokens[:, 1:, None]).sum((1, 2))

    def loss(step: int) -> Tensor:
        good = text()
        bad = torch.where(torch.rand(good.shape) < 0.15, torch.randint(LETTERS, good.shape), good)
        margin = log(model, good) - log(reference, good) - log(model, bad) + log(reference, bad)
        return -F.logsigmoid(0.1 * margin).mean()

    return Training(model, loss, rate=5e-4)


@training
def proximal_policy() -> Training:
    model = Letters()
    model.value = nn.Linear(WIDTH, 1)
    kept: dict[str, Tensor] = {}

    def loss(step: int) -> Tensor:
        if step % 4 == 0:
            with torch.no_grad():
                tokens = text(16, 9)
                choice = torch.distributions.Categorical(logits=model(tokens)[:, -1])
                action = choice.sample()
                kept.update(tokens=tokens, action=action, log=choice.log_prob(action), reward=(action % 8 < 2).float())
        x = model.features(kept["tokens"])[:, -1]
        choice, value = torch.distributions.Categorical(logits=model.head(x)), model.value(x)[:, 0]
        gain = kept["reward"] - kept["reward"].mean()
        ratio = (choice.log_prob(kept["action"]) - kept["log"]).exp()
        policy = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
        return policy + 0.5 * F.mse_loss(value, kept["reward"]) - 0.01 * choice.entropy().mean()

    return Training(model, loss)


# --- optimizers


class Own(torch.optim.Optimizer):
    """An optimizer that is one function of a parameter, its state, the rate and the step."""

    def __init__(
        self,
        parameters: Any,
        change: Callable[[Tensor, Tensor, dict[str, Any], int], Tensor],
        lr: float = 1e-3,
        decay: float = 0.01,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "decay": decay})
        self.change, self.count = change, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.mul_(1 - group["lr"] * group["decay"])
                    each.sub_(group["lr"] * self.change(each, each.grad, self.state[each], self.count))


def mean_of(state: dict[str, Any], name: str, value: Tensor, share: float) -> Tensor:
    state[name] = state.get(name, torch.zeros_like(value)).lerp(value, 1 - share)
    return state[name]


def own(change: Any, rate: float, **options: Any) -> Training:
    model = Letters()
    return lm(model, optimizer=Own(model.parameters(), change), rate=rate, **options)


@training
def Lion() -> Training:
    def change(each: Tensor, grad: Tensor, state: dict[str, Any], step: int) -> Tensor:
        before = state.get("m", torch.zeros_like(grad))
        mean_of(state, "m", grad, 0.99)
        return (0.9 * before + 0.1 * grad).sign()

    return own(change, 3e-4)


@training
def Muon() -> Training:
    def change(each: Tensor, grad: Tensor, state: dict[str, Any], step: int) -> Tensor:
        m = mean_of(state, "m", grad, 0.95)
        if m.dim() < 2:
            return m / (mean_of(state, "v", grad.square(), 0.95).sqrt() + 1e-8)
        x = m / (m.norm() + 1e-7)
        x = x.mT if x.shape[0] > x.shape[1] else x
        for _ in range(5):
            a = x @ x.mT
            x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
        return 0.2 * max(m.shape) ** 0.5 * (x.mT if m.shape[0] > m.shape[1] else x)

    return own(change, 3e-3)


@training
def Shampoo() -> Training:
    def change(each: Tensor, grad: Tensor, state: dict[str, Any], step: int) -> Tensor:
        if grad.dim() < 2:
            return mean_of(state, "m", grad, 0.9) / (mean_of(state, "v", grad.square(), 0.99).sqrt() + 1e-8)
        left, right = mean_of(state, "l", grad @ grad.mT, 0.95), mean_of(state, "r", grad.mT @ grad, 0.95)
        if step % 5 == 1:
            for name, each in (("lr", left), ("rr", right)):
                values, vectors = torch.linalg.eigh(each)
                state[name] = (
                    vectors @ (values.clamp(min=0) + 1e-6 * values[-1].clamp(min=1e-12)).pow(-0.25).diag() @ vectors.mT
                )
        x = state["lr"] @ mean_of(state, "m", grad, 0.9) @ state["rr"]
        return x / (x.square().mean().sqrt() + 1e-8) * 0.3

    return own(change, 3e-3)


@training
def LAMB() -> Training:
    def change(each: Tensor, grad: Tensor, state: dict[str, Any], step: int) -> Tensor:
        m, v = mean_of(state, "m", grad, 0.9), mean_of(state, "v", grad.square(), 0.999)
        x = m / (1 - 0.9**step) / ((v / (1 - 0.999**step)).sqrt() + 1e-6)
        size, far = each.norm(), x.norm()
        return x * (size / far if size > 0 and far > 0 else 1.0)

    return own(change, 1e-2, factor=lambda step: min(1, (step + 1) / 20) * (1 - step / 220))


@training
def Sophia() -> Training:
    def change(each: Tensor, grad: Tensor, state: dict[str, Any], step: int) -> Tensor:
        m = mean_of(state, "m", grad, 0.96)
        if step % 10 == 1:
            mean_of(state, "h", 256 * grad.square(), 0.9)
        return (m / (0.05 * state["h"]).clamp(min=1e-12)).clamp(-1, 1)

    return own(change, 5e-4)


@training
def AdaBelief() -> Training:
    def change(each: Tensor, grad: Tensor, state: dict[str, Any], step: int) -> Tensor:
        m = mean_of(state, "m", grad, 0.9)
        v = mean_of(state, "v", (grad - m).square() + 1e-12, 0.99)
        return m / (1 - 0.9**step) / ((v / (1 - 0.99**step)).sqrt() + 1e-8)

    return own(change, 1e-3)


@training
def schedule_free() -> Training:
    model = Letters()
    base = [each.detach().clone() for each in model.parameters()]
    means = [each.clone() for each in base]
    square = [torch.zeros_like(each) for each in base]

    class Free(torch.optim.Optimizer):
        def __init__(self) -> None:
            super().__init__(model.parameters(), {"lr": 3e-3})
            self.count = 0

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            self.count += 1
            for each, z, x, v in zip(model.parameters(), base, means, square):
                if each.grad is not None:
                    v.lerp_(each.grad.square(), 0.01)
                    z.sub_(3e-3 * each.grad / ((v / (1 - 0.99**self.count)).sqrt() + 1e-8))
                    x.lerp_(z, 1 / self.count)
                    each.copy_(0.1 * z + 0.9 * x)

    return lm(model, optimizer=Free(), rate=3e-3)


@training
def Nesterov_with_decay() -> Training:
    model = Rows(4, 10)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, 0.9, weight_decay=5e-4, nesterov=True)
    return Training(model, classify(model), optimizer, 0.05, lambda step: 0.5 * (1 + math.cos(math.pi * step / STEPS)))


@training
def Adamax() -> Training:
    model = Letters()
    return lm(model, optimizer=torch.optim.Adamax(model.parameters()), rate=4e-3)


@training
def AMSGrad_with_short_memory() -> Training:
    model = Letters()
    return lm(model, optimizer=torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), amsgrad=True), rate=3e-3)


@training
def sharpness_aware() -> Training:
    model = Rows(4, 10)

    def update(training: Training, step: int) -> float:
        x, y = digits()
        loss = F.cross_entropy(model(view(x)), y)
        loss.backward()
        size = nn.utils.get_total_norm([each.grad for each in model.parameters()])
        moves = [0.05 * each.grad / (size + 1e-12) for each in model.parameters()]
        with torch.no_grad():
            for each, move in zip(model.parameters(), moves):
                each.add_(move)
        model.zero_grad()
        F.cross_entropy(model(view(x)), y).backward()
        with torch.no_grad():
            for each, move in zip(model.parameters(), moves):
                each.sub_(move)
        training.optimizers[0].step()
        training.optimizers[0].zero_grad()
        return loss.item()

    return Training(model, classify(model), step=update)


@training
def lookahead() -> Training:
    model = Letters()
    slow = [each.detach().clone() for each in model.parameters()]

    def after(step: int, loss: float) -> None:
        if step % 5 == 4:
            with torch.no_grad():
                for mean, now in zip(slow, model.parameters()):
                    mean.lerp_(now, 0.5)
                    now.copy_(mean)

    return lm(model, after=after, rate=3e-3)


# --- schedules


@training
def warm_up_stable_decay() -> Training:
    return lm(rate=4e-3, factor=lambda step: min((step + 1) / 20, 1.0, (STEPS - step) / 40))


@training
def restarts_ever_longer() -> Training:
    def factor(step: int) -> float:
        start, length = (0, 30) if step < 30 else (30, 60) if step < 90 else (90, 120)
        return 0.05 + 0.475 * (1 + math.cos(math.pi * (step - start) / length))

    return lm(rate=5e-3, factor=factor)


@training
def one_cycle_of_momentum() -> Training:
    model = Rows(4, 10)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, 0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, STEPS)
    return Training(
        model,
        classify(model),
        optimizer,
        after=lambda step, loss: schedule.step() if step < STEPS - 1 else None,
        rate=0,
    )


@training
def warm_up_from_zero_for_long() -> Training:
    return lm(rate=3e-3, factor=lambda step: min(1, step / 120))


@training
def plateau() -> Training:
    model = Rows(4, 10)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=10)
    return Training(model, classify(model), optimizer, after=lambda step, loss: schedule.step(loss), rate=0)


@training
def Noam() -> Training:
    training = less_and_less_teacher_forcing()
    training.rate, training.factor = 1.0, lambda step: WIDTH**-0.5 * min((step + 1) ** -0.5, (step + 1) * 40**-1.5)
    return training


# --- tricks


@training
def averages_swapped_in_to_evaluate() -> Training:
    model = Letters()
    average = copy.deepcopy(model.state_dict())

    def after(step: int, loss: float) -> None:
        for name, now in model.state_dict().items():
            average[name].lerp_(now, 0.05)
        if step % 25 == 24:
            kept = copy.deepcopy(model.state_dict())
            model.load_state_dict(average)
            with torch.no_grad():
                next_letter(model.eval(), text())
            model.train().load_state_dict(kept)

    return lm(model, after=after, rate=3e-3)


@training
def stochastic_weight_averaging() -> Training:
    model = Rows(4, 10)
    average = torch.optim.swa_utils.AveragedModel(model)

    def after(step: int, loss: float) -> None:
        if step > 100 and step % 10 == 9:
            average.update_parameters(model)

    return Training(
        model, classify(model), after=after, factor=lambda step: 1.0 if step < 80 else 2 - 1.5 * (step % 20) / 20
    )


@training
def noise_in_gradients() -> Training:
    model = Letters()

    def clip(step: int) -> None:
        for each in model.parameters():
            if each.grad is not None:
                each.grad.add_(torch.randn_like(each) * 1e-3 / (1 + step) ** 0.275)

    return lm(model, clip=clip)


@training
def dropout_falls() -> Training:
    model = Rows(4, 10, body=encoder(2, 0.4))

    def before(step: int) -> None:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.4 * max(0, 1 - step / 150)

    return Training(model, classify(model), before=before)


@training
def thawed_from_the_top() -> Training:
    model = Letters([Block() for _ in range(4)])

    def before(step: int) -> None:
        for place, block in enumerate(model.blocks):
            block.requires_grad_(step >= 40 * (3 - place))

    return lm(model, before=before)


@training
def layers_frozen_from_below() -> Training:
    model = Letters([Block() for _ in range(4)])

    def before(step: int) -> None:
        for place, block in enumerate(model.blocks):
            block.requires_grad_(step < 80 + 40 * place)

    return lm(model, before=before)


class Adapted(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.a, self.b = (
            nn.Parameter(torch.randn(4, WIDTH) / WIDTH**0.5),
            nn.Parameter(torch.zeros(len(linear.weight), 4)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + 2 * (x @ self.a.T) @ self.b.T


@training
def adapters_merged_and_begun_again() -> Training:
    model = Letters()
    start = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(40):
        next_letter(model, text()).backward()
        start.step()
        start.zero_grad()
    model.requires_grad_(False)
    for block in model.blocks:
        block.attention.query, block.attention.value = Adapted(block.attention.query), Adapted(block.attention.value)
    adapted = [module for module in model.modules() if isinstance(module, Adapted)]

    @torch.no_grad()
    def after(step: int, loss: float) -> None:
        if step in (66, 133):
            for module in adapted:
                module.linear.weight += 2 * module.b @ module.a
                module.b.zero_()
                module.a.normal_(0, WIDTH**-0.5)

    return Training(
        model,
        lambda step: next_letter(model, text()),
        torch.optim.AdamW([each for each in model.parameters() if each.requires_grad]),
        3e-3,
        after=after,
    )


@training
def weights_pruned_step_by_step() -> Training:
    model = Rows(4, 10)
    masks: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def after(step: int, loss: float) -> None:
        if step >= 60 and step % 20 == 0:
            share = 0.5 * min(1, (step - 40) / 100)
            for each in model.body.parameters():
                if each.dim() == 2:
                    masks[each] = (each.abs() > each.abs().flatten().quantile(share)).float()
        for each, mask in masks.items():
            each.mul_(mask)

    return Training(model, classify(model), after=after)


@training
def quantised_while_it_trains() -> Training:
    class Rounded(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            scale = weight.detach().abs().amax(1, keepdim=True) / 7
            return weight + ((weight / scale).round() * scale - weight).detach()

    model = Letters()
    for block in model.blocks:
        for linear in [module for module in block.modules() if isinstance(module, nn.Linear)]:
            nn.utils.parametrize.register_parametrization(linear, "weight", Rounded())
    return lm(model)


@training
def distilled_by_layers() -> Training:
    teacher, model = Letters([Block() for _ in range(4)]), Letters()
    start = torch.optim.AdamW(teacher.parameters(), 3e-3)
    for _ in range(60):
        next_letter(teacher, text()).backward()
        start.step()
        start.zero_grad()
    teacher.requires_grad_(False)

    def loss(step: int) -> Tensor:
        tokens = text()
        wanted, out = teacher.features(tokens), model.features(tokens)
        soft = F.kl_div((model.head(out) / 2).log_softmax(-1), (teacher.head(wanted) / 2).softmax(-1), reduction="none")
        return 4 * soft.sum(-1).mean() + F.mse_loss(out, wanted) + next_letter(model, tokens)

    return Training(model, loss, rate=2e-3)


@training
def noise_grows_by_stages() -> Training:
    model = Rows(4, 10)

    def loss(step: int) -> Tensor:
        x, y = digits()
        return F.cross_entropy(model(view(x + 0.15 * (step // 60) * torch.randn_like(x))), y)

    return Training(model, loss)


@training
def hidden_states_mixed() -> Training:
    model = Rows(4, 10)

    def loss(step: int) -> Tensor:
        (x, y), order, share = digits(), torch.randperm(16), random.betavariate(1, 1)
        z = model.into(view(x)) + model.places[:16]
        out = model.out(model.body(share * z + (1 - share) * z[order]).mean(1))
        return share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y[order])

    return Training(model, loss)


@training
def middle_layer_sees_some_tokens() -> Training:
    model = Letters([Block() for _ in range(3)])

    class Some(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: Tensor) -> Tensor:
            kept = torch.randperm(x.shape[1])[: x.shape[1] // 2].sort().values
            return x.index_copy(1, kept, self.block(x[:, kept]))

    model.blocks[1] = Some(model.blocks[1])
    return lm(model)


@training
def batches_double_and_rate_rises() -> Training:
    model = Letters()
    return Training(
        model, lambda step: next_letter(model, text(4 * 2 ** (step // 50))), factor=lambda step: 2 ** (step // 100)
    )


@training
def accumulation_changes() -> Training:
    return lm(parts=lambda step: (4, 1, 2, 8)[step // 50])


@training
def clipped_by_weight_norms() -> Training:
    model = Letters()

    def clip(step: int) -> None:
        for each in model.parameters():
            if each.grad is not None:
                limit = 0.02 * each.detach().norm().clamp(min=1e-3)
                each.grad.mul_((limit / (each.grad.norm() + 1e-9)).clamp(max=1))

    return lm(model, clip=clip, rate=3e-3)


@training
def scaler_skips_steps() -> Training:
    model = Letters()
    scaler: dict[str, float] = {"scale": 2.0**12}

    def update(training: Training, step: int) -> float:
        loss = next_letter(model, text())
        (loss * scaler["scale"]).backward()
        largest = max(float(each.grad.abs().max()) for each in model.parameters() if each.grad is not None)
        if largest > 6e4 or step in (40, 120):
            scaler["scale"] /= 2
        else:
            for each in model.parameters():
                if each.grad is not None:
                    each.grad /= scaler["scale"]
            training.optimizers[0].step()
            scaler["scale"] *= 2 if step % 60 == 59 else 1
        training.optimizers[0].zero_grad()
        return loss.item()

    return lm(model, step=update)


@training
def resumed_from_a_checkpoint() -> Training:
    model = Letters()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)

    def before(step: int) -> None:
        if step == 100:
            kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            model.load_state_dict(kept[0])
            optimizer.load_state_dict(kept[1])

    return lm(model, optimizer=optimizer, rate=3e-3, before=before)


@training
def rolled_back_after_a_spike() -> Training:
    model = Letters()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    kept: list[Any] = []

    def before(step: int) -> None:
        if step == 90:
            kept.append(copy.deepcopy((model.state_dict(), optimizer.state_dict())))
        if step == 110:
            model.load_state_dict(kept[0][0])
            optimizer.load_state_dict(kept[0][1])

    return lm(model, optimizer=optimizer, rate=3e-3, before=before)


@training
def fine_tuned_with_a_new_optimizer_state() -> Training:
    model = Letters()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)

    def before(step: int) -> None:
        if step == 120:
            optimizer.state.clear()

    def loss(step: int) -> Tensor:
        return next_letter(model, text() if step < 120 else text().clamp(max=96))

    return Training(
        model, loss, optimizer, 3e-3, lambda step: 1.0 if step < 120 else 0.1 * min(1, (step - 119) / 20), before=before
    )


@training
def sequences_double() -> Training:
    model = Letters([Block(place="rotary") for _ in range(2)], learnt=False)
    return Training(model, lambda step: next_letter(model, text(8, 1 + 8 * 2 ** (step // 60))), rate=2e-3)


@training
def term_switched_off_at_half() -> Training:
    model = Letters()

    def loss(step: int) -> Tensor:
        tokens = text()
        x = model.features(tokens[:, :-1])
        main = F.cross_entropy(model.head(x).flatten(0, 1), tokens[:, 1:].flatten())
        return main + (0.1 * x.square().mean() if step < 100 else 0.0)

    return Training(model, loss, rate=2e-3)


@training
def last_layer_begun_anew() -> Training:
    model = Rows(4, 10)

    def before(step: int) -> None:
        if step == 120:
            model.out.reset_parameters()

    return Training(model, classify(model), before=before, rate=2e-3)


@training
def heads_kept_orthogonal() -> Training:
    model = Letters()

    def loss(step: int) -> Tensor:
        apart = torch.zeros(())
        for block in model.blocks:
            weight = F.normalize(block.attention.key.weight, dim=1)
            apart = apart + (weight @ weight.T - torch.eye(WIDTH)).square().mean()
        return next_letter(model, text()) + 0.1 * apart

    return Training(model, loss)


@training
def noisy_labels_corrected() -> Training:
    model = Rows(4, 10)

    def loss(step: int) -> Tensor:
        x, y = digits()
        given = torch.where(torch.rand(16) < 0.3, torch.randint(10, (16,)), y)
        out = model(view(x))
        soft = F.one_hot(given, 10) if step < 100 else 0.7 * F.one_hot(given, 10) + 0.3 * out.detach().softmax(-1)
        return F.cross_entropy(out, soft.float())

    return Training(model, loss)


@training
def hard_samples_mined() -> Training:
    model = Rows(4, 10)

    def loss(step: int) -> Tensor:
        x, y = digits(64)
        each = F.cross_entropy(model(view(x)), y, reduction="none")
        return each.topk(max(16, 64 - step // 2)).values.mean()

    return Training(model, loss)


@training
def labels_made_by_the_model() -> Training:
    model = Rows(4, 10)

    def loss(step: int) -> Tensor:
        (x, y), (z, _) = digits(), digits(32)
        with torch.no_grad():
            sure, guess = model(view(z)).softmax(-1).max(-1)
        again = F.cross_entropy(model(view(noisy(z))), guess, reduction="none")
        return F.cross_entropy(model(view(x)), y) + (again * (sure > 0.9)).mean()

    return Training(model, loss)


@training
def adversarial_pictures() -> Training:
    model = Rows(4, 10)

    def loss(step: int) -> Tensor:
        x, y = digits()
        x = x.requires_grad_(True)
        (slope,) = torch.autograd.grad(F.cross_entropy(model(view(x)), y), x)
        return F.cross_entropy(model(view(x.detach() + 0.1 * min(1, step / 100) * slope.sign())), y)

    return Training(model, loss)


# --- models of transformers


def library(name: str, kind: str, data: str, **options: Any) -> None:
    def make() -> Training:
        config = getattr(transformers, f"{name}Config")(**options)
        model = getattr(transformers, kind)(config).train()

        def loss(step: int) -> Tensor:
            tokens = text()
            if data == "next":
                return model(input_ids=tokens, labels=tokens, **({"use_cache": False} if name != "XLNet" else {})).loss
            if data == "masked":
                is_masked = torch.rand(tokens.shape) < 0.15
                return model(
                    input_ids=tokens.masked_fill(is_masked, 127), labels=tokens.masked_fill(~is_masked, -100)
                ).loss
            if data == "pairs":
                return model(input_ids=tokens[:, :17], labels=tokens[:, :17].flip(1)).loss
            x, y = digits()
            if data == "restored":
                return model(pixel_values=x).loss
            if data == "series":
                return model(past_values=waves()[:, :32, None], future_values=waves()[:, :8, None]).loss
            return F.cross_entropy(model(pixel_values=x).logits, y)

        return Training(model, loss)

    TRAININGS[f"{name} of transformers"] = make


_SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GPT = {
    "vocab_size": 128,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_PAIR = {
    "vocab_size": 128, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64,
}  # fmt: skip
_PICTURES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 8,
    "patch_size": 2,
    "num_channels": 1,
}

library("XLNet", "XLNetLMHeadModel", "next", vocab_size=128, d_model=32, n_layer=2, n_head=4, d_inner=64)
library("BioGpt", "BioGptForCausalLM", "next", **_SIZES)
library("XGLM", "XGLMForCausalLM", "next", vocab_size=128, d_model=32, ffn_dim=64, num_layers=2, attention_heads=4)
library("CodeGen", "CodeGenForCausalLM", "next", **_GPT, n_ctx=64, rotary_dim=4)
library("GPTBigCode", "GPTBigCodeForCausalLM", "next", **_GPT)
library("CTRL", "CTRLLMHeadModel", "next", vocab_size=128, n_embd=32, n_layer=2, n_head=4, dff=64, n_positions=64)
library("Persimmon", "PersimmonForCausalLM", "next", **_SIZES)
library("Nemotron", "NemotronForCausalLM", "next", **_SIZES, num_key_value_heads=2)
library("Olmoe", "OlmoeForCausalLM", "next", **_SIZES, num_key_value_heads=4, num_experts=4, num_experts_per_tok=2)
library("Phi3", "Phi3ForCausalLM", "next", **_SIZES, num_key_value_heads=2)
library("SmolLM3", "SmolLM3ForCausalLM", "next", **_SIZES, num_key_value_heads=2)
library("RemBert", "RemBertForMaskedLM", "masked", **_SIZES)
library("Data2VecText", "Data2VecTextForMaskedLM", "masked", **{**_SIZES, "pad_token_id": 1})
library("MBart", "MBartForConditionalGeneration", "pairs", **_PAIR)
library("Blenderbot", "BlenderbotForConditionalGeneration", "pairs", **_PAIR)
library(
    "UMT5",
    "UMT5ForConditionalGeneration",
    "pairs",
    vocab_size=128,
    d_model=32,
    d_kv=8,
    d_ff=64,
    num_layers=2,
    num_heads=4,
)
library("DeiT", "DeiTForImageClassification", "classes", **_PICTURES, num_labels=10)
library(
    "ViTMAE",
    "ViTMAEForPreTraining",
    "restored",
    **_PICTURES,
    decoder_hidden_size=32,
    decoder_num_hidden_layers=1,
    decoder_num_attention_heads=4,
    decoder_intermediate_size=64,
)
library(
    "PatchTST",
    "PatchTSTForPrediction",
    "series",
    num_input_channels=1,
    context_length=32,
    prediction_length=8,
    patch_length=4,
    patch_stride=4,
    d_model=32,
    num_attention_heads=4,
    num_hidden_layers=2,
    ffn_dim=64,
)


def train(name: str) -> dict[str, Any]:
    """Train, and return the losses and what is told, but for ends of alerts."""
    place = list(TRAININGS).index(name)
    seed = 1000 + place
    torch.manual_seed(seed)
    random.seed(seed)
    each = TRAININGS[name]()
    each.model.train()
    bases = [[group["lr"] for group in optimizer.param_groups] for optimizer in each.optimizers]
    if each.optimizer is not None and not isinstance(each.optimizer, list) and each.rate not in (0, 1.0):
        bases = [[each.rate] * len(of) for of in bases]
    losses = []
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        every = 5 if place % 3 else 10
        with watch_heads(each.model, each.optimizers, every, log_dir=folder, strict=each.strict) as heads:
            for step in range(STEPS):
                if each.rate != 0 and not isinstance(each.optimizer, list):
                    for optimizer, of in zip(each.optimizers, bases):
                        for group, base in zip(optimizer.param_groups, of):
                            group["lr"] = base * each.factor(step)
                with heads.step():
                    heads.loss = loss = each.step(each, step) if each.step else each.update(step)
                losses.append(loss)
                each.after(step, loss)
        run = load_history(folder)
    alerts = [alert for record in run.records for alert in record.alerts if not alert.is_over]
    told = [{key: getattr(alert, key) for key in ("step", "level", "rule", "message")} for alert in alerts]
    return {"name": name, "seed": seed, "readings": len(run.records), "told": told, "losses": losses}


if __name__ == "__main__":
    count_accused(__doc__, TRAININGS, train, Path("runs/by-hand.jsonl"))
