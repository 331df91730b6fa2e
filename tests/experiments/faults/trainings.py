"""The healthy trainings: seven kinds of small models that learn in seconds, on text, images, tables and copies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn
from torch.nn import functional as F

from tests.experiments.collapse.models import Data as TextOrDigits
from tests.experiments.collapse.models import rotate
from tests.experiments.faults import encoder

Task = Literal["text", "digits", "table", "reversal", "order"]


@dataclass(frozen=True)
class Base:
    """One kind of training."""

    task: Task
    layers: int
    heads: int
    key_heads: int
    width: int
    norm: Literal["pre", "post"] = "pre"
    positions: Literal["learned", "rotary"] = "learned"
    optimizer: Literal["adamw", "sgd", "muon"] = "adamw"
    rate: float = 3e-3
    decay: float = 0.1
    warm_up: int = 20
    batch: int = 8
    begin_keys_at_zero: bool = False
    begin_outputs_at_zero: bool = False
    trained_before: int = 0
    begin_at_rate_zero: int = 0
    steps: int = 100
    adapter_rank: int = 0


BASES: dict[str, Base] = {
    "text": Base("text", 2, 4, 4, 32),
    "text, grouped": Base("text", 2, 8, 2, 64, positions="rotary"),
    "text, multi-query, Muon": Base("text", 2, 4, 1, 32, optimizer="muon", rate=2e-2),
    "text, four layers": Base("text", 4, 2, 2, 24, rate=2e-3),
    "digits, post-norm, SGD": Base("digits", 2, 4, 4, 32, norm="post", optimizer="sgd", rate=5e-2),
    "table": Base("table", 1, 4, 4, 32),
    "reversal, encoder-decoder": Base("reversal", 1, 4, 4, 32, rate=4e-3, batch=32),
}

# Healthy as well, and odd enough that a rule may stumble over them.
PROVOKED: dict[str, Base] = {
    "high decay": replace(BASES["text"], decay=1.0),
    "keys begin at zero, rate begins at zero": replace(BASES["text"], begin_keys_at_zero=True, begin_at_rate_zero=15),
    "outputs begin at zero": replace(BASES["text, grouped"], begin_outputs_at_zero=True),
    "trained before, and trained on": replace(BASES["text"], trained_before=150, rate=1e-3),
    "plain SGD, high rate": replace(BASES["text"], optimizer="sgd", rate=0.5),
    "narrow": replace(BASES["text"], width=16, heads=2, key_heads=2),
    "wide": replace(BASES["text"], width=96, heads=6, key_heads=6, rate=1e-3),
    "long": replace(BASES["text"], steps=400),
    "long, high decay": replace(BASES["text, grouped"], steps=300, decay=1.0),
    "long, table": replace(BASES["table"], steps=400),
    "long, Muon": replace(BASES["text, multi-query, Muon"], steps=300),
    "adapters of rank 1": replace(BASES["text"], trained_before=150, rate=3e-3, adapter_rank=1),
    "trained encoder, fine-tuned": Base("order", 6, 12, 12, 384, norm="post", rate=5e-5, batch=4, steps=40),
    "no decay, no warm-up": replace(BASES["digits, post-norm, SGD"], optimizer="adamw", rate=2e-3, decay=0, warm_up=0),
}

# Of the further family alone.
DEEP: dict[str, Base] = {"text, eight layers": replace(BASES["text"], layers=8)}

LONG = frozenset(name for name, base in PROVOKED.items() if base.steps > 100 or base.task == "order")
"""Those that take several times as long as the others."""


class Switches:
    """What faults turn; shared by all layers of a model.

    Attributes:
        scale: factor on the usual scale of scores.
        mask: what a query of a decoder may see; "next" the token after it as well, "window" itself and three before.
        slopes: of a penalty on distant tokens, one for each head, as in ALiBi; none by default.
        split: how heads are cut out of a projection.
        rounds_down: round what attention gives down to bf16, as a biased kernel does.
        has_skip: whether the residual connections are there.
        sink: added to the scores of the first token.
        rank: dimensions to which what attention is given is cut, 0 for all.
        common: a vector that is added to all tokens, not along the ones, which a norm takes away; 0 for none.
        dropout: share of the attention weights that is dropped.
        has_places: whether tokens are given learned positions of their own; else all are given the first.
        is_detached: whether the graph is cut behind queries and keys, so that their weights get no gradient.
        padding: what attention over all tokens sees where the last quarter of them is padding.
        axis: over which the scores are made weights: that of the keys, or by mistake that of the queries.
    """

    def __init__(self) -> None:
        self.scale, self.sink = 1.0, 0.0
        self.common: Tensor | float = 0.0
        self.mask: Literal["causal", "none", "self", "next", "window"] = "causal"
        self.slopes: Tensor | None = None
        self.split: Literal["right", "no transpose"] = "right"
        self.rounds_down, self.has_skip, self.rank = False, True, 0
        self.dropout, self.has_places, self.is_detached = 0.0, True, False
        self.padding: Literal["none", "right", "inverted"] = "none"
        self.axis: Literal["keys", "queries"] = "keys"


class Attention(nn.Module):
    def __init__(self, base: Base, switches: Switches, *, is_causal: bool) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads = base.heads, base.key_heads
        self.switches, self.is_causal, self.is_rotary = switches, is_causal, base.positions == "rotary"
        width, head = base.width, base.width // base.heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, base.key_heads * head, bias=False)
        self.v_proj = nn.Linear(width, base.key_heads * head, bias=False)
        self.out_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        source, switches = x if memory is None else memory, self.switches
        if switches.rank:
            x, source = (_cut(item, switches.rank) for item in (x, source))
        q = self._split(self.q_proj(x), self.num_heads)
        k = self._split(self.k_proj(source), self.num_key_value_heads)
        v = self._split(self.v_proj(source), self.num_key_value_heads)
        if self.is_rotary:
            q, k = rotate(q), rotate(k)
        if switches.is_detached:
            q, k = q.detach(), k.detach()
        groups = self.num_heads // self.num_key_value_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        bias = None
        if switches.padding != "none" and not self.is_causal:
            is_padding = torch.arange(k.shape[-2]) >= k.shape[-2] * 3 // 4
            visible = is_padding if switches.padding == "inverted" else ~is_padding
            bias = torch.zeros(q.shape[-2], k.shape[-2]).masked_fill(~visible, -torch.inf)
        if self.is_causal or switches.sink:
            bias = torch.zeros(q.shape[-2], k.shape[-2])
            if self.is_causal and switches.mask == "causal":
                bias = bias.masked_fill(torch.ones_like(bias, dtype=torch.bool).triu(1), -torch.inf)
            elif self.is_causal and switches.mask == "self":
                bias = bias.masked_fill(~torch.eye(len(bias), dtype=torch.bool), -torch.inf)
            elif self.is_causal and switches.mask == "next":
                bias = bias.masked_fill(torch.ones_like(bias, dtype=torch.bool).triu(2), -torch.inf)
            elif self.is_causal and switches.mask == "window":
                near = torch.ones_like(bias, dtype=torch.bool).tril().triu(-3)
                bias = bias.masked_fill(~near, -torch.inf)
            bias = torch.cat([bias[:, :1] + switches.sink, bias[:, 1:]], -1)
        if bias is not None and switches.slopes is not None:
            places = torch.arange(len(bias))
            bias = bias - switches.slopes[:, None, None] * (places[:, None] - places).abs()
        scale = switches.scale * q.shape[-1] ** -0.5
        if switches.axis == "queries":
            scores = scale * q @ k.mT if bias is None else scale * q @ k.mT + bias
            heads = torch.nan_to_num(scores.softmax(-2)) @ v
        else:
            heads = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale, dropout_p=switches.dropout)
        if switches.rounds_down:
            heads = heads + (_round_down(heads.detach()) - heads.detach())
        return self.out_proj(heads.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor, heads: int) -> Tensor:
        if self.switches.split == "no transpose":
            return x.reshape(x.shape[0], heads, x.shape[1], -1)
        return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _cut(x: Tensor, rank: int) -> Tensor:
    return torch.cat([x[..., :rank], torch.zeros_like(x[..., rank:])], -1)


def _round_down(x: Tensor) -> Tensor:
    nearest = x.bfloat16()
    below = torch.nextafter(nearest, torch.full_like(nearest, -torch.inf))
    return torch.where(nearest.float() > x, below, nearest).float()


class Block(nn.Module):
    def __init__(self, base: Base, switches: Switches, *, is_causal: bool, has_memory: bool = False) -> None:
        super().__init__()
        self.is_pre, self.switches = base.norm == "pre", switches
        width = base.width
        self.attention = Attention(base, switches, is_causal=is_causal)
        self.cross = Attention(base, switches, is_causal=False) if has_memory else None
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        x = x + self.switches.common
        x = self._add(x, self.attention, 0)
        if self.cross is not None:
            x = self._add(x, lambda tokens: self.cross(tokens, memory), 2)
        return self._add(x, self.mlp, 1)

    def _add(self, x: Tensor, part, norm: int) -> Tensor:
        skip = 1.0 if self.switches.has_skip else 0.0
        if self.is_pre:
            return skip * x + part(self.norms[norm](x))
        return self.norms[norm](skip * x + part(x))


class Model(nn.Module):
    def __init__(self, base: Base) -> None:
        super().__init__()
        self.task, self.switches = base.task, Switches()
        symbols, classes, places = {
            "text": (256, 256, 64), "digits": (0, 10, 16), "table": (0, 2, 30), "reversal": (20, 20, 12),
        }[base.task]  # fmt: skip
        features = {"digits": 4, "table": 1}.get(base.task, 0)
        self.embed: nn.Module = nn.Embedding(symbols, base.width) if symbols else nn.Linear(features, base.width)
        learned = base.positions == "learned"
        self.places = nn.Parameter(0.1 * torch.randn(places, base.width)) if learned else None
        decodes = base.task in ("text", "reversal")
        self.encoder = nn.ModuleList(
            Block(base, self.switches, is_causal=False) for _ in range(base.layers if base.task == "reversal" else 0)
        )
        self.blocks = nn.ModuleList(
            Block(base, self.switches, is_causal=decodes, has_memory=base.task == "reversal")
            for _ in range(base.layers)
        )
        self.norm, self.head = nn.LayerNorm(base.width), nn.Linear(base.width, classes, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=base.width**-0.5)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.1)
        for module in self.modules():
            if isinstance(module, Attention) and base.begin_keys_at_zero:
                nn.init.zeros_(module.k_proj.weight)
            if isinstance(module, Attention) and base.begin_outputs_at_zero:
                nn.init.zeros_(module.out_proj.weight)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        memory = None
        if self.task == "reversal":
            memory = self._embed(x)
            for block in self.encoder:
                memory = block(memory)
            x = F.pad(y[:, :-1], (1, 0))
        hidden = self._embed(x)
        for block in self.blocks:
            hidden = block(hidden, memory)
        hidden = self.norm(hidden)
        if self.task in ("digits", "table"):
            hidden = hidden.mean(1)
        return F.cross_entropy(self.head(hidden).flatten(0, -2), y.flatten())

    def _embed(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        if self.places is None:
            return x
        return x + (self.places[: x.shape[1]] if self.switches.has_places else self.places[:1])


class Data:
    """Batches of a task, drawn by a generator of their own, and a fixed validation set."""

    def __init__(self, task: Task, seed: int, batch: int) -> None:
        self.task, self.batch = task, batch
        self.generator = torch.Generator().manual_seed(seed)
        self.shared = TextOrDigits(task, seed, batch) if task in ("text", "digits") else None

    def draw(self) -> tuple[Tensor, Tensor]:
        if self.task == "order":
            return encoder.draw(self.batch, self.generator)
        if self.shared is not None:
            return self.shared.draw()
        if self.task == "reversal":
            return _reversal(self.batch, self.generator)
        x, y = _table()[0]
        chosen = torch.randint(len(x), (4 * self.batch,), generator=self.generator)
        return x[chosen], y[chosen]

    @torch.no_grad()
    def validate(self, model: nn.Module) -> float:
        return float(model.loss(*_validation(self.task)))


def _reversal(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randint(1, 20, (batch, 12), generator=generator)
    return x, x.flip(1)


@cache
def _validation(task: Task) -> tuple[Tensor, Tensor]:
    if task == "order":
        return encoder.draw(32, torch.Generator().manual_seed(-1), validates=True)
    if task == "reversal":
        return _reversal(64, torch.Generator().manual_seed(-1))
    if task == "table":
        return _table()[1]
    if task == "digits":
        return TextOrDigits("digits", 0, 1).validation
    text = TextOrDigits("text", 0, 1).validation
    starts = torch.arange(16) * ((len(text) - 65) // 16)
    tokens = text[starts[:, None] + torch.arange(65)].long()
    return tokens[:, :-1], tokens[:, 1:]


@cache
def _table():
    rows, labels = load_breast_cancer(return_X_y=True)
    x = torch.tensor((rows - rows.mean(0)) / rows.std(0), dtype=torch.float32)[..., None]
    y = torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, validation = order[:400], order[400:]
    return (x[train], y[train]), (x[validation], y[validation])


def make_model(base: Base) -> nn.Module:
    return encoder.Encoder() if base.task == "order" else Model(base)


def add_adapters(model: nn.Module, rank: int) -> None:
    """Freeze a model, and let adapters of queries and values train."""
    from peft import LoraConfig, inject_adapter_in_model

    inject_adapter_in_model(LoraConfig(r=rank, target_modules=["q_proj", "v_proj"]), model)


def make_optimizers(model: nn.Module, base: Base) -> list[torch.optim.Optimizer]:
    if base.optimizer == "sgd":
        return [torch.optim.SGD(model.parameters(), lr=base.rate, momentum=0.9, weight_decay=base.decay * 1e-3)]
    if base.optimizer == "adamw":
        return [torch.optim.AdamW(model.parameters(), lr=base.rate, betas=(0.9, 0.95), weight_decay=base.decay)]
    is_matrix = {name for name, p in model.named_parameters() if p.dim() == 2 and ("proj" in name or "mlp" in name)}
    matrices = [parameter for name, parameter in model.named_parameters() if name in is_matrix]
    others = [parameter for name, parameter in model.named_parameters() if name not in is_matrix]
    return [
        torch.optim.Muon(matrices, lr=base.rate, weight_decay=base.decay),
        torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95), weight_decay=base.decay),
    ]
