"""Trainings in whose middle a forward begins to compute something else outside its attention, or on the way into it.

A change is a value of `Ways`, set from `START` on; healthy ones are what people do on purpose, or what differs from one
batch to the next.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hdi_callback import watch_heads
from hdi_callback.interventions import Intervention
from hdi_callback.record import Alert, Record

VOCABULARY, WIDTH, HEADS, LENGTH = 24, 32, 4, 16
START, STEPS, EVERY_STEPS = 31, 60, 2


@dataclass
class Ways:
    """How the forward computes now, in the block `at` if a part of a block is meant."""

    fault: str = ""
    at: int = 1
    dropout: float = 0.0
    layer_drop: float = 0.0
    depth_drop: float = 0.0
    checkpoints: bool = False
    aux: bool = False
    quantises: bool = False
    experts: bool = False
    loops: bool = False


class Attention(nn.Module):
    """Causal attention, fused."""

    def __init__(self, ways: Ways, number: int) -> None:
        super().__init__()
        self.ways, self.number = ways, number
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, hidden: Tensor | None) -> Tensor:
        fault = self.ways.fault if self.number == self.ways.at else ""
        q, k, v = self.qkv(x).chunk(3, -1)
        if fault == "cut":
            q, k, v = (part.reshape(len(x), HEADS, x.shape[1], -1) for part in (q, k, v))
        elif fault == "keys cut":
            q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (q, k, v))
            k = k.transpose(1, 2).reshape(k.shape)
        else:
            q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (q, k, v))
        if fault == "keys flipped":
            k = k.flip(2)
        if fault == "queries of the next sample":
            q = torch.cat([q[1:], q[:1]])
        if fault == "values permuted":
            v = v[:, :, torch.randperm(v.shape[2])]
        if fault == "heads of values rolled":
            v = v.roll(1, 1)
        if fault == "keys averaged":
            k = (k + k.roll(1, 2)) / 2
        if fault == "values of the first token":
            v = v[:, :, :1].expand_as(v)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        if hidden is not None:
            mask = mask & ~hidden[:, None, None]
        heads = F.scaled_dot_product_attention(q, k, v, mask)
        if fault == "outputs of the next sample":
            heads = heads.roll(1, 0)
        if fault == "outputs transposed otherwise":
            return self.out(heads.reshape(x.shape))
        return self.out(heads.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, ways: Ways, number: int) -> None:
        super().__init__()
        self.ways, self.number = ways, number
        self.up, self.down, self.drop = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        fault = self.ways.fault if self.number == self.ways.at else ""
        weight = self.up.weight
        if self.ways.quantises:
            weight = torch.fake_quantize_per_tensor_affine(weight, 0.02, 0, -128, 127)
            x = torch.fake_quantize_per_tensor_affine(x, 0.05, 0, -128, 127)
        inner = F.linear(x, weight, self.up.bias) if self.ways.quantises else self.up(x)
        if fault != "no activation":
            inner = F.relu(inner) if fault == "relu" else F.gelu(inner)
        if fault == "only half":
            inner = inner.masked_fill(torch.arange(4 * WIDTH) % 2 == 0, 0.0)
        self.drop.p = 0.8 if fault == "dropout raised" else 0.1 + self.ways.dropout
        return self.drop(self.down(inner))


class Experts(nn.Module):
    """Experts that run if a token goes to them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 6)
        parts = [(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH)) for _ in range(6)]
        self.experts = nn.ModuleList(nn.Sequential(*each) for each in parts)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            where = (chosen == number).nonzero().flatten()
            if len(where) > 9:
                out = out.index_add(0, where, expert(flat[where]) * weights[where, None])
        return out.view_as(x)


class Block(nn.Module):
    def __init__(self, ways: Ways, number: int) -> None:
        super().__init__()
        self.ways, self.number = ways, number
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(ways, number)
        self.mlp = Experts() if ways.experts else Mlp(ways, number)

    def forward(self, x: Tensor, hidden: Tensor | None) -> Tensor:
        fault = self.ways.fault if self.number == self.ways.at else ""
        x = x + self.drop_path(self.attention(self.norm1(x), hidden))
        normed = x if fault == "norm before the MLP skipped" else self.norm2(x)
        if fault == "detached":
            normed = normed.detach()
        added = self.drop_path(self.mlp(normed))
        if fault == "skip lost":
            return added
        if fault == "MLP subtracted":
            return x - added
        if fault == "MLP twice":
            added = added + self.mlp(self.norm2(x))
        return x + (0.1 * added if fault == "share" else added)

    def drop_path(self, x: Tensor) -> Tensor:
        p = self.ways.depth_drop
        return x * (torch.rand(len(x), 1, 1) > p) / (1 - p) if p and self.training else x


class Model(nn.Module):
    """Three blocks; gives a loss."""

    def __init__(self, ways: Ways) -> None:
        super().__init__()
        self.ways = ways
        self.embed, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Block(ways, number) for number in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        fault = self.ways.fault
        hidden = tokens == 0
        x = self.embed(tokens)
        x = x if fault == "embedding not scaled" else x * math.sqrt(WIDTH) / 4
        x = x if fault == "no positions" else x + self.places(torch.arange(tokens.shape[1]))
        x = x + 0.5 * torch.randn_like(x) if fault == "noise" else x
        order = self.blocks[:2] if fault == "last block skipped" else self.blocks
        for block in order:
            if self.training and self.ways.layer_drop and float(torch.rand(())) < self.ways.layer_drop:
                continue
            given = hidden if bool(hidden.any()) else None
            x = checkpoint(block, x, given, use_reentrant=False) if self.ways.checkpoints else block(x, given)
        logits = self.head(x if fault == "final norm skipped" else self.norm(x))
        if fault == "logits cooled":
            logits = logits / 5
        if fault == "logits dropped":
            logits = F.dropout(logits, 0.5)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        return loss + 1e-2 * logits.logsumexp(-1).square().mean() if self.ways.aux else loss


def batch(step: int, *, length: int = LENGTH, size: int = 8, padded: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(1, VOCABULARY, (size, length), generator=generator)
    tokens[:, 1::2] = tokens[:, ::2][:, : tokens[:, 1::2].shape[1]]
    if padded and step % 3:
        tokens[step % size, -3:] = 0
    return tokens


FAULTS: dict[str, str] = {
    "cut": "tokens of queries, keys and values come cut across heads, and in their order before",
    "keys cut": "tokens of keys come cut across heads, and in their order before",
    "keys flipped": "tokens of keys come in another order, and in their order before",
    "queries of the next sample": "tokens of queries come under other samples, and in their order before",
    "values permuted": "tokens of values come in another order, and in their order before",
    "keys averaged": "tokens of keys come several together, and in their order before",
    "values of the first token": "tokens of values come in another order, and in their order before",
    "outputs of the next sample": "tokens of outputs come in another order, and in their order before",
    "outputs transposed otherwise": "tokens of outputs come cut across heads, and in their order before",
    "no activation": "gelu runs never in `blocks.1.mlp`, and once before",
    "relu": "gelu runs never in `blocks.1.mlp`, and once before; relu runs once in `blocks.1.mlp`, and never before",
    "only half": "masked_fill runs once with 0 in `blocks.1.mlp`, and never before",
    "dropout raised": "dropout runs once with 0.8 in `blocks.1.mlp.drop`, and once with 0.1 before",
    "norm before the MLP skipped": "nothing runs in `blocks.1.norm2` any more",
    "detached": "",
    "skip lost": "add runs once in `blocks.1`, and 2 times before",
    "MLP subtracted": "sub runs once in `blocks.1`, and never before",
    "MLP twice": "gelu runs 2 times in `blocks.1.mlp`, and once before",
    "share": "mul runs once with 0.1 in `blocks.1`, and never before",
    "embedding not scaled": "mul runs never in `the model`, and once with 5.657 before",
    "no positions": "add runs never in `the model`, and once before",
    "noise": "randn_like runs once in `the model`, and never before",
    "last block skipped": "nothing runs in `blocks.2` any more",
    "final norm skipped": "nothing runs in `norm` any more",
    "logits cooled": "",
    "logits dropped": "",
}
"""What the forward does from `START` on -> what is told of it; nothing of what follows the last map, or is cut off."""


@dataclass
class Training:
    model: Model
    ways: Ways
    optimizer: torch.optim.Optimizer
    step: int = 0
    data: dict[str, Any] | None = None
    autocasts: bool = False


def _merge(run: Training) -> None:
    for block in run.model.blocks:
        if not isinstance(block.mlp.up, Adapted):
            block.mlp.up = Adapted(block.mlp.up)
            run.optimizer.add_param_group({"params": [*block.mlp.up.a.parameters(), *block.mlp.up.b.parameters()]})
        if run.step == START:
            block.mlp.up.merge()


class Adapted(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.is_merged = base, False
        self.in_features, self.out_features = base.in_features, base.out_features
        self.a, self.b = nn.Linear(base.in_features, 4, bias=False), nn.Linear(4, base.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    @property
    def bias(self) -> Tensor:
        return self.base.bias

    def merge(self) -> None:
        self.is_merged = True
        with torch.no_grad():
            self.base.weight.add_(2 * self.b.weight @ self.a.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) if self.is_merged else self.base(x) + self.b(self.a(x)) * 2


def _evaluate(run: Training) -> None:
    if run.step % 7 == 3:
        average = copy.deepcopy(run.model).eval()
        run.model.eval()
        with torch.no_grad():
            average(batch(run.step)), run.model(batch(run.step, length=9))
        run.model.train()


def _unfreeze(run: Training) -> None:
    run.model.embed.requires_grad_(run.step >= START)
    run.model.blocks[0].requires_grad_(run.step >= START)


def _from(**values: Any) -> Callable[[Training], None]:
    def act(run: Training) -> None:
        if run.step >= START:
            for name, value in values.items():
                setattr(run.ways, name, value)

    return act


def _data(make: Callable[[int], dict[str, Any]]) -> Callable[[Training], None]:
    return lambda run: setattr(run, "data", make(run.step))


def _anneal(run: Training) -> None:
    run.ways.dropout = 0.2 * (1 - run.step / STEPS)


def _drop_at_once(run: Training) -> None:
    run.ways.dropout = 0.3 if run.step < START else -0.1


def _mode(run: Training) -> None:
    run.model.train(run.step % 5 != 0)


def _mode_at_once(run: Training) -> None:
    run.model.train(run.step < START)


HEALTHY: dict[str, tuple[dict[str, Any], Callable[[Training], None]]] = {
    "nothing": ({}, lambda run: None),
    "longer and longer": ({}, _data(lambda step: {"length": 8 + 2 * (step // 12)})),
    "lengths at random": ({}, _data(lambda step: {"length": 8 + step * 7 % 9})),
    "a last smaller batch": ({}, _data(lambda step: {"size": 3 if step % 20 == 18 else 8})),
    "padding in some batches": ({}, _data(lambda step: {"padded": True})),
    "padding from the middle on": ({}, _data(lambda step: {"padded": step >= START})),
    "layer drop": ({"layer_drop": 0.1}, lambda run: None),
    "layer drop, rare": ({"layer_drop": 0.03}, lambda run: None),
    "stochastic depth": ({"depth_drop": 0.2}, lambda run: None),
    "stochastic depth that begins": ({}, _from(depth_drop=0.1)),
    "experts": ({"experts": True}, lambda run: None),
    "an auxiliary loss begins": ({}, _from(aux=True)),
    "an auxiliary loss ends": ({"aux": True}, _from(aux=False)),
    "adapters merged": ({}, _merge),
    "quantised from the middle on": ({}, _from(quantises=True)),
    "evaluation in between": ({}, _evaluate),
    "dropout annealed": ({}, _anneal),
    "dropout switched off": ({}, _drop_at_once),
    "checkpointing begins": ({}, _from(checkpoints=True)),
    "evaluation mode now and then": ({}, _mode),
    "evaluation mode from the middle on": ({}, _mode_at_once),
    "autocast begins": ({}, lambda run: setattr(run, "autocasts", run.step >= START)),
    "unfreezing": ({}, _unfreeze),
}


class Keep(Intervention):
    """Keep the alerts of a run, but for those that end one."""

    name = "Keep"

    def __init__(self) -> None:
        self.alerts: list[Alert] = []

    def on_alert(self, alert: Alert) -> None:
        return None

    def on_reading(self, record: Record) -> tuple[()]:
        self.alerts += [alert for alert in record.alerts if not alert.is_over]
        return ()


def train(
    fault: str = "", healthy: str = "nothing", *, seed: int = 0, watched: bool = True
) -> tuple[list[Alert], list[float]]:
    """Train, and return the alerts and the losses."""
    torch.manual_seed(seed)
    values, act = HEALTHY[healthy]
    ways = Ways(**values)
    model = Model(ways)
    run = Training(model, ways, torch.optim.AdamW(model.parameters(), lr=3e-3))
    act(run)
    keep, losses = Keep(), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        heads = watch_heads(model, run.optimizer, EVERY_STEPS, history=False, interventions=[keep])
        for step in range(STEPS):
            run.step = step
            act(run)
            ways.fault = fault if step >= START else ""
            tokens = batch(step + 1000 * seed, **(run.data or {}))
            with heads.step(), torch.autocast("cpu", torch.bfloat16, enabled=run.autocasts):
                loss = model(tokens)
                heads.loss = loss.detach()
                loss.backward()
                run.optimizer.step()
            run.optimizer.zero_grad()
            losses.append(loss.item())
        heads.finish()
    return keep.alerts, losses
