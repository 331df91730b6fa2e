"""Train a byte model of twelve layers and ten million parameters, healthy, and print the alerts.

python -m tests.studies.experiments.held_out.long --steps 300 [--results runs/long.json]
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from examples.train_gpt import read_standard_library
from hdi_callback import watch_heads
from tests.studies.experiments.held_out.model import Net
from tests.studies.experiments.held_out.run import KeepReadings, judged

LENGTH, BATCH, EVERY = 64, 4, 10


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=Path("runs/long.json"))
    options = parser.parse_args(argv)
    torch.manual_seed(options.seed)
    model = Net(256, 256, width=264, heads=12, layers=12, is_causal=True)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    text, _ = read_standard_library()
    draw = torch.Generator().manual_seed(options.seed)
    keep, losses, began = KeepReadings(), [], time.perf_counter()
    settings: dict[str, Any] = {"history": False, "interventions": [keep]}
    with watch_heads(model, optimizer, EVERY, **settings) as heads:
        for step in range(options.steps):
            with heads.step():
                x = text[torch.randint(len(text) - LENGTH - 1, (BATCH, 1), generator=draw) + torch.arange(LENGTH + 1)]
                logits = model(x[:, :-1].long())
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), x[:, 1:].long().flatten())
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                factor = min(1, (step + 1) / 50) * (0.55 + 0.45 * math.cos(math.pi * step / options.steps))
                for group in optimizer.param_groups:
                    group["lr"] = 1e-3 * factor
                optimizer.step()
                optimizer.zero_grad()
                heads.loss = loss.detach()
            losses.append(float(loss))
            if step % 50 == 49:
                print(step + 1, f"{sum(losses[-50:]) / 50:.3f}", flush=True)
    result = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "steps": options.steps,
        "readings": len(keep.records),
        "losses": losses,
        "minutes": round((time.perf_counter() - began) / 60, 1),
        "alerts": judged(keep.records, keep.facts),
    }
    options.results.parent.mkdir(parents=True, exist_ok=True)
    options.results.write_text(json.dumps(result), encoding="utf-8")
    print({name: value for name, value in result.items() if name != "losses"})


if __name__ == "__main__":
    main()
