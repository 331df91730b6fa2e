"""Models of transformers whose weights begin small, healthy and with heads that are forced together.

python -m tests.experiments.faults.small_start --output docs/benchmarks/small-start.md

Their standard deviation of 0.02 is a seventh of the usual one at these widths, so that what training learns first soon
outweighs all else. One training each, resumable: runs that are there are not made again.
"""

from __future__ import annotations

import argparse
import json
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hdi_callback import Alert, find_attention, watch_heads
from tests.experiments.collapse.models import Data

SEED, EVERY, START, PULL = 0, 5, 100, 0.05
RESULTS = Path("runs/small-start")
Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Training:
    """One kind of training."""

    model: Callable[[], nn.Module]
    draw: Callable[[torch.Generator], dict[str, Tensor]]
    optimizer: Optimizer
    warm_up: int = 20
    is_cosine: bool = False
    steps: int = 200


@dataclass(frozen=True)
class Force:
    """Weights of some heads of the layer in the middle are pulled to their mean after every step."""

    roles: tuple[str, ...]
    heads: int
    start: int = START
    end: int = 10_000


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=3, n_head=4, n_embd=64, vocab_size=257, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
            bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip


_BERT = {
    "num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 257,
    "max_position_embeddings": 64,
}  # fmt: skip


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**_BERT))


def _albert() -> nn.Module:
    from transformers import AlbertConfig, AlbertForMaskedLM

    return AlbertForMaskedLM(AlbertConfig(**{**_BERT, "num_hidden_layers": 4}, embedding_size=32))


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            num_hidden_layers=4, num_attention_heads=4, hidden_size=48, intermediate_size=96, image_size=8,
            patch_size=2, num_channels=1, num_labels=10,
        )
    )  # fmt: skip


def _bart() -> nn.Module:
    from transformers import BartConfig, BartForConditionalGeneration

    return BartForConditionalGeneration(
        BartConfig(
            vocab_size=32, d_model=48, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96, max_position_embeddings=32, dropout=0.0,
            pad_token_id=31, bos_token_id=0, eos_token_id=30, forced_eos_token_id=30, decoder_start_token_id=0,
        )
    )  # fmt: skip


def _starts(generator: torch.Generator, count: int, below: int) -> Tensor:
    return torch.randint(below, (count,), generator=generator)


def _text(generator: torch.Generator) -> dict[str, Tensor]:
    text = Data("text", 0, 1).train
    tokens = text[_starts(generator, 8, len(text) - 48)[:, None] + torch.arange(48)].long()
    return {"input_ids": tokens, "labels": tokens}


def _masked(generator: torch.Generator) -> dict[str, Tensor]:
    tokens = _text(generator)["input_ids"]
    is_masked = torch.rand(tokens.shape, generator=generator) < 0.15
    is_masked[:, 0] = True
    return {"input_ids": tokens.masked_fill(is_masked, 256), "labels": tokens.masked_fill(~is_masked, -100)}


def _digits(generator: torch.Generator) -> dict[str, Tensor]:
    from sklearn.datasets import load_digits

    found = load_digits()
    chosen = _starts(generator, 32, 1500)
    images = torch.tensor(found.images, dtype=torch.float32)[chosen, None] / 16
    return {"pixel_values": images, "labels": torch.tensor(found.target)[chosen]}


def _to_sort(generator: torch.Generator) -> dict[str, Tensor]:
    tokens = torch.randint(1, 30, (32, 10), generator=generator)
    return {"input_ids": tokens, "labels": tokens.sort(1).values}


def _adamw(rate: float = 2e-3, decay: float = 0.01) -> Optimizer:
    return lambda weights: torch.optim.AdamW(weights, lr=rate, weight_decay=decay, betas=(0.9, 0.98))


def _sgd(weights: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=0.1, momentum=0.9, nesterov=True)


def _adafactor(weights: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(weights, lr=1e-2)


FAST = "GPT-2, rate of 4e-3 without warm-up"
TRAININGS: dict[str, Training] = {
    "GPT-2": Training(_gpt2, _text, _adamw()),
    FAST: Training(_gpt2, _text, _adamw(4e-3), warm_up=1, is_cosine=True),
    "GPT-2, decay of 2.0": Training(_gpt2, _text, _adamw(3e-3, 2.0)),
    "GPT-2, Adafactor": Training(_gpt2, _text, _adafactor),
    "BERT": Training(_bert, _masked, _adamw()),
    "ALBERT": Training(_albert, _masked, _adamw()),
    "ViT": Training(_vit, _digits, _adamw(2e-3, 0.05), is_cosine=True),
    "ViT, SGD": Training(_vit, _digits, _sgd),
    "BART that sorts": Training(_bart, _to_sort, _adamw(3e-3), warm_up=40, steps=300),
}
FORCES: dict[str, Force] = {
    "two heads' queries and keys merge": Force(("query", "key"), 2),
    "all heads' queries and keys merge": Force(("query", "key"), 4),
    "two heads' values and outputs merge": Force(("value", "output"), 2),
    "all heads' values and outputs merge": Force(("value", "output"), 4),
    "two heads' values and outputs merge late": Force(("value", "output"), 2, start=160),
    "two heads' values and outputs merge by half": Force(("value", "output"), 2, start=100, end=130),
    "all heads' queries merge": Force(("query",), 4),
}
FORCED = (FAST, "ViT", "BART that sorts")


def made(name: str, force: str, folder: Path) -> dict[str, Any]:
    """Train once, unless that was done; give the losses and the alerts."""
    path = folder / ("".join(c if c.isalnum() else "-" for c in f"{name} {force}") + ".json")
    if not path.is_file():
        path.write_text(json.dumps(train(TRAININGS[name], FORCES.get(force))), "utf-8")
        print(path.stem, flush=True)
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return found


def train(training: Training, force: Force | None = None, steps: int | None = None) -> dict[str, Any]:
    """Train once; give the losses, the alerts and how alike the forced heads came to be."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    model = training.model().train()
    optimizer = training.optimizer(list(model.parameters()))
    rates = [group["lr"] for group in optimizer.param_groups]
    generator = torch.Generator().manual_seed(SEED + 1000)
    losses: list[float] = []
    alerts: list[Alert] = []
    steps = training.steps if steps is None else steps
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layers = find_attention(model)
        pulled = layers[len(layers) // 2]
        watched = watch_heads(
            model, optimizer, every_n_steps=EVERY, history=False, verbose=False, on_alert=alerts.append
        )
        with watched as heads:
            for step in range(steps):
                factor = min(1.0, (step + 1) / training.warm_up)
                factor *= 0.5 + 0.5 * math.cos(math.pi * step / steps) if training.is_cosine else 1.0
                for group, rate in zip(optimizer.param_groups, rates):
                    group["lr"] = rate * factor
                with heads.step():
                    loss = model(**training.draw(generator)).loss
                    loss.backward()
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss.detach()))
                if force is not None and force.start <= step < force.end:
                    _pull(pulled, force)
    raised = [
        (alert.step, alert.layer, alert.rule, alert.level, list(alert.finding.heads))
        for alert in alerts
        if not alert.is_resolved
    ]
    return {"losses": [float(f"{loss:.4g}") for loss in losses], "alerts": raised, "pulled": pulled.name}


@torch.no_grad()
def _pull(layer: Any, force: Force) -> None:
    for role in force.roles:
        weights = layer.weight(role)[: force.heads]
        weights += PULL * (weights.mean(0, keepdim=True) - weights)


def row(name: str, force: str, found: dict[str, Any]) -> str:
    begun: dict[tuple[str, str], list[int]] = {}
    for step, layer, rule, level, _ in found["alerts"]:
        where = "" if not force else " there" if layer == found["pulled"] else " elsewhere"
        begun.setdefault((f"*{rule}* ({level}){where}", level), []).append(step)
    named = ", ".join(f"{what} at step {steps[0]}" for (what, _), steps in begun.items())
    first, last = found["losses"][0], sum(found["losses"][-10:]) / 10
    return f"| {name} | {force or '-'} | {first:.2f} to {last:.2f} | {named or '-'} |"


def page(folder: Path) -> str:
    jobs = [(name, "") for name in TRAININGS] + [(name, force) for name in FORCED for force in FORCES]
    rows = [row(name, force, made(name, force, folder)) for name, force in jobs]
    head = (
        "Made by `python -m tests.experiments.faults.small_start --output docs/benchmarks/small-start.md`: one "
        f"training each, seed {SEED}, a reading every {EVERY} steps, torch {torch.__version__.partition('+')[0]}. A "
        f"force pulls heads of the layer in the middle to their mean by {100 * PULL:g} % after each step from {START} "
        "on (late: from 160; by half: until 130). Loss of the first step and mean of the last ten; each rule that was "
        "raised, and when it first was, in the layer that is pulled and elsewhere.\n\n"
        "| training | force | loss | rules |\n|---|---|---|---|"
    )
    return "\n".join([head, *rows, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="runs that are there are not made again")
    parser.add_argument("--output", type=Path, help="where to write the table; printed by default")
    options = parser.parse_args()
    options.results.mkdir(parents=True, exist_ok=True)
    write: Callable[[str], object] = print if options.output is None else partial(_write, options.output)
    write(page(options.results))


def _write(path: Path, text: str) -> None:
    path.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
