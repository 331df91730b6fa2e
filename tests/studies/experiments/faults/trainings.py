"""The trainings: small models that learn in seconds on text, images, tables and copies, and odd healthy ones."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch
from sklearn.datasets import load_breast_cancer, load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from examples.theory.models import encoder, english
from examples.train_gpt import read_standard_library

Task = Literal["text", "digits", "table", "reversal", "order"]
Batch = tuple[Tensor, Tensor]
LENGTH = {"text": 64, "digits": 16, "table": 30, "reversal": 12, "order": 24}
CLASSES = {"text": 256, "digits": 10, "table": 2, "reversal": 20}


@dataclass(frozen=True)
class Base:
    """One kind of training."""

    task: Task
    layers: int
    heads: int
    key_heads: int
    width: int
    norm: Literal["pre", "post"] = "pre"
    is_rotary: bool = False
    optimizer: Literal["adamw", "sgd", "muon"] = "adamw"
    rate: float = 3e-3
    decay: float = 0.1
    warm_up: int = 20
    batch: int = 8
    steps: int = 100
    begin_keys_at_zero: bool = False
    begin_outputs_at_zero: bool = False
    begin_at_rate_zero: int = 0
    trained_before: int = 0
    adapter_rank: int = 0


BASES: dict[str, Base] = {
    "text": Base("text", 2, 4, 4, 32),
    "text, grouped": Base("text", 2, 8, 2, 64, is_rotary=True),
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
    "adapters of rank 1": replace(BASES["text"], trained_before=150, adapter_rank=1),
    "trained encoder, fine-tuned": Base("order", 6, 12, 12, 384, rate=5e-5, batch=4, steps=40),
    "no decay, no warm-up": replace(BASES["digits, post-norm, SGD"], optimizer="adamw", rate=2e-3, decay=0, warm_up=0),
}
LONG = frozenset({"long", "long, high decay", "long, table", "long, Muon", "trained encoder, fine-tuned"})
"""Those that take several times as long as the others."""


class Switches:
    """What faults turn; shared by all layers of a model.

    Attributes:
        scale: factor on the usual scale of scores.
        mask: what a query of a decoder may see; "self" itself alone.
        split: how heads are cut out of a projection.
        rounds_down: round what attention gives down to bf16, as a biased kernel does.
        has_skip: whether the residual connections are there.
        sink: added to the scores of the first token.
        rank: dimensions to which the inputs of attention are cut, 0 for all.
        common: a vector that is added to all tokens.
    """

    def __init__(self) -> None:
        self.scale, self.sink, self.rank = 1.0, 0.0, 0
        self.common: Tensor | float = 0.0
        self.mask: Literal["causal", "none", "self"] = "causal"
        self.split: Literal["right", "no transpose"] = "right"
        self.rounds_down, self.has_skip = False, True


class Attention(nn.Module):
    def __init__(self, base: Base, switches: Switches, *, is_causal: bool) -> None:
        super().__init__()
        self.num_heads, self.num_key_heads = base.heads, base.key_heads
        self.switches, self.is_causal, self.is_rotary = switches, is_causal, base.is_rotary
        width, key_width = base.width, base.key_heads * (base.width // base.heads)
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, key_width, bias=False)
        self.v_proj = nn.Linear(width, key_width, bias=False)
        self.out_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        source, switches = x if memory is None else memory, self.switches
        if switches.rank:
            x, source = (F.pad(item[..., : switches.rank], (0, item.shape[-1] - switches.rank)) for item in (x, source))
        q = self._split(self.q_proj(x), self.num_heads)
        k = self._split(self.k_proj(source), self.num_key_heads)
        v = self._split(self.v_proj(source), self.num_key_heads)
        if self.is_rotary:
            q, k = rotate(q), rotate(k)
        groups = self.num_heads // self.num_key_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scale = switches.scale * q.shape[-1] ** -0.5
        bias = self._bias(q.shape[-2], k.shape[-2])
        heads = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
        if switches.rounds_down:
            heads = heads + (_round_down(heads.detach()) - heads.detach())
        return self.out_proj(heads.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor, heads: int) -> Tensor:
        if self.switches.split == "no transpose":
            return x.reshape(x.shape[0], heads, x.shape[1], -1)
        return x.unflatten(-1, (heads, -1)).transpose(1, 2)

    def _bias(self, queries: int, keys: int) -> Tensor | None:
        """The mask and the sink, added to the scores."""
        if not self.is_causal and not self.switches.sink:
            return None
        bias = torch.zeros(queries, keys)
        if self.is_causal and self.switches.mask == "causal":
            bias = bias.masked_fill(torch.ones_like(bias, dtype=torch.bool).triu(1), -torch.inf)
        elif self.is_causal and self.switches.mask == "self":
            bias = bias.masked_fill(~torch.eye(len(bias), dtype=torch.bool), -torch.inf)
        return torch.cat([bias[:, :1] + self.switches.sink, bias[:, 1:]], -1)


def rotate(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2])[:, None] * 100.0 ** (-torch.arange(half) / half)
    left, right = x[..., :half], x[..., half:]
    return torch.cat([left * angles.cos() - right * angles.sin(), left * angles.sin() + right * angles.cos()], -1)


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
    """Embeddings, blocks and a linear layer; with an encoder of as many blocks to reverse a sequence."""

    def __init__(self, base: Base) -> None:
        super().__init__()
        self.task, self.switches = base.task, Switches()
        width, classes, encodes = base.width, CLASSES[base.task], base.task == "reversal"
        features = {"digits": 4, "table": 1}.get(base.task)
        self.embed: nn.Module = nn.Linear(features, width) if features else nn.Embedding(classes, width)
        self.places = None if base.is_rotary else nn.Parameter(0.1 * torch.randn(LENGTH[base.task], width))
        decodes = base.task in {"text", "reversal"}
        self.encoder = nn.ModuleList(
            Block(base, self.switches, is_causal=False) for _ in range(base.layers if encodes else 0)
        )
        self.blocks = nn.ModuleList(
            Block(base, self.switches, is_causal=decodes, has_memory=encodes) for _ in range(base.layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=width**-0.5)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.1)
        for module in self.modules():
            if isinstance(module, Attention) and base.begin_keys_at_zero:
                nn.init.zeros_(module.k_proj.weight)
            if isinstance(module, Attention) and base.begin_outputs_at_zero:
                nn.init.zeros_(module.out_proj.weight)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss."""
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
        if self.task in {"digits", "table"}:
            hidden = hidden.mean(1)
        return F.cross_entropy(self.head(hidden).flatten(0, -2), y.flatten())

    def _embed(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return x if self.places is None else x + self.places[: x.shape[1]]


class Encoder(nn.Module):
    """A trained encoder of sentences that learns to tell words in their order from shuffled ones."""

    def __init__(self) -> None:
        super().__init__()
        self.body = copy.deepcopy(encoder()[0])
        self.head = nn.Linear(self.body.config.hidden_size, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss."""
        return F.cross_entropy(self.head(self.body(input_ids=x).last_hidden_state.mean(1)), y)


class Data:
    """Batches of a task, drawn by a generator of their own, and a fixed validation set."""

    def __init__(self, task: Task, seed: int, batch: int) -> None:
        self.task, self.batch = task, batch
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self) -> Batch:
        if self.task == "reversal":
            return _reversal(self.batch, self.generator)
        train, _ = _read(self.task)
        if self.task == "order":
            return _order(train, self.batch, self.generator)
        if self.task == "text":
            return _windows(train, torch.randint(len(train) - 65, (self.batch,), generator=self.generator))
        x, y = train
        chosen = torch.randint(len(x), (4 * self.batch,), generator=self.generator)
        return x[chosen], y[chosen]

    @torch.no_grad()
    def validate(self, model: nn.Module) -> float:
        return float(model(*_validation(self.task)))


def _windows(text: Tensor, starts: Tensor) -> Batch:
    tokens = text[starts[:, None] + torch.arange(LENGTH["text"] + 1)].long()
    return tokens[:, :-1], tokens[:, 1:]


def _reversal(batch: int, generator: torch.Generator) -> Batch:
    x = torch.randint(1, CLASSES["reversal"], (batch, LENGTH["reversal"]), generator=generator)
    return x, x.flip(1)


def _order(text: Tensor, batch: int, generator: torch.Generator) -> Batch:
    """Pieces of a text, every second one shuffled."""
    length = LENGTH["order"]
    starts = torch.randint(len(text) - length, (batch, 1), generator=generator)
    x, y = text[starts + torch.arange(length)], torch.arange(batch) % 2
    for row in range(1, batch, 2):
        x[row] = x[row, torch.randperm(length, generator=generator)]
    return x, y


@cache
def _read(task: Task):
    """What is trained on, and what is validated on."""
    if task == "text":
        return read_standard_library()
    if task == "order":
        _, tokenizer = encoder()
        ids = torch.tensor(tokenizer(english(), verbose=False, add_special_tokens=False)["input_ids"])
        split = int(0.9 * len(ids))
        return ids[:split], ids[split:]
    if task == "digits":
        images, labels = load_digits(return_X_y=True)
        x = torch.tensor(images, dtype=torch.float32).view(-1, 4, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(-1, 16, 4)
        x, count = x / 8 - 1, 1400
    else:
        rows, labels = load_breast_cancer(return_X_y=True)
        x, count = torch.tensor((rows - rows.mean(0)) / rows.std(0), dtype=torch.float32)[..., None], 400
    order, y = torch.randperm(len(x), generator=torch.Generator().manual_seed(0)), torch.tensor(labels)
    train, validation = order[:count], order[count:]
    return (x[train], y[train]), (x[validation], y[validation])


@cache
def _validation(task: Task) -> Batch:
    generator = torch.Generator().manual_seed(-1)
    if task == "reversal":
        return _reversal(64, generator)
    _, validation = _read(task)
    if task == "order":
        return _order(validation, 32, generator)
    if task == "text":
        return _windows(validation, torch.arange(16) * ((len(validation) - 65) // 16))
    return validation


def make_model(base: Base) -> nn.Module:
    return Encoder() if base.task == "order" else Model(base)


def add_adapters(model: nn.Module, rank: int) -> None:
    """Freeze a model, and let adapters of queries and values train."""
    from peft import LoraConfig, inject_adapter_in_model

    inject_adapter_in_model(LoraConfig(r=rank, target_modules=["q_proj", "v_proj"]), model)


def make_optimizers(model: nn.Module, base: Base) -> Sequence[torch.optim.Optimizer]:
    if base.optimizer == "sgd":
        return [torch.optim.SGD(model.parameters(), lr=base.rate, momentum=0.9, weight_decay=base.decay * 1e-3)]
    if base.optimizer == "adamw":
        return [torch.optim.AdamW(model.parameters(), lr=base.rate, betas=(0.9, 0.95), weight_decay=base.decay)]
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.dim() == 2 and ("proj" in name or "mlp" in name)
        (matrices if is_matrix else others).append(parameter)
    return [
        torch.optim.Muon(matrices, lr=base.rate, weight_decay=base.decay),
        torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95), weight_decay=base.decay),
    ]
