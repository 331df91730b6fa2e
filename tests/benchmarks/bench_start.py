"""What happens once: the import of the package, finding the heads of a model, and checking them, in CPU time.

    python -m tests.benchmarks.bench_start --output docs/benchmarks/start.md

Every number is of a process of its own, as nothing is imported and no layer is known there yet.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

from tests.attention.models import Einops, FusedGrouped, Grouped, NanoGPT, Timm
from tests.benchmarks.differences import interval
from tests.benchmarks.memory import peak
from tests.benchmarks.ratios import write
from tests.models import Classifier

IMPORTS = {
    "`import hdi_callback`, beyond torch": ("import torch", "import hdi_callback"),
    "`from hdi_callback import watch_heads`, beyond torch": ("import torch", "from hdi_callback import watch_heads"),
    "`from hdi_callback import HDICallback`, beyond lightning": (
        "import lightning",
        "from hdi_callback import HDICallback",
    ),
}


def _kinds(layers: int) -> nn.Module:
    kinds = (NanoGPT, Timm, Einops, Grouped, FusedGrouped)
    return nn.ModuleList(kinds[layer % len(kinds)]() for layer in range(layers))


def _llama(layers: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaModel

    return LlamaModel(
        LlamaConfig(
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=layers,
            num_attention_heads=8,
            num_key_value_heads=2,
            vocab_size=64,
        )
    )


def _neox(layers: int, width: int, heads: int) -> nn.Module:
    from transformers import GPTNeoXConfig, GPTNeoXModel

    return GPTNeoXModel(
        GPTNeoXConfig(
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            vocab_size=64,
        )
    )


def _on_meta(layers: int, width: int, heads: int) -> nn.Module:
    with torch.device("meta"):
        return _neox(layers, width, heads)


MODELS: dict[str, tuple[int, Callable[[], nn.Module]]] = {
    "500 layers of five kinds": (500, lambda: _kinds(500)),
    "500 layers of one kind": (500, lambda: nn.ModuleList(NanoGPT() for _ in range(500))),
    "48 layers of Llama": (48, lambda: _llama(48)),
    "48 hand-written layers of one kind": (48, lambda: Classifier(blocks=48)),
    "GPT-NeoX, 24 layers, 512 wide": (24, lambda: _neox(24, 512, 8)),
    "20 billion parameters on `meta` (GPT-NeoX, 44 layers, 6144 wide)": (44, lambda: _on_meta(44, 6144, 64)),
}
SMALL: dict[str, tuple[int, Callable[[], nn.Module]]] = {
    "5 layers of five kinds": (5, lambda: _kinds(5)),
    "2 layers on `meta` (GPT-NeoX, 64 wide)": (2, lambda: _on_meta(2, 64, 4)),
}


def seconds_to_import(before: str, line: str) -> float:
    """CPU seconds of `line` in a new process that has run `before`, with the bytecode at hand."""
    script = f"import time\n{before}\nstart = time.process_time()\n{line}\nprint(time.process_time() - start)"
    return float(_run(script))


def find(name: str) -> dict[str, float]:
    """Find the heads of a model of `MODELS`: CPU seconds, layers, and MiB at the peak beyond the model."""
    _, make = {**MODELS, **SMALL}[name]
    from hdi_callback import find_attention

    find_attention(nn.Linear(2, 2))  # what is loaded when the first model is looked at is part of the import
    model = make()
    gc.collect()  # of what building the model has left
    before, start = peak("cpu"), time.process_time()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", module="hdi_callback")  # a layer that is left out would make finding cheap
        found = find_attention(model)
    seconds = time.process_time() - start
    return {
        "seconds": seconds,
        "layers": len(found),
        "memory": (peak("cpu") - before) / 2**20,
        "weights": sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20,
    }


class _Block(nn.Module):
    """A layer whose heads are read, or one whose keys are sums, which nothing explains."""

    def __init__(self, is_read: bool) -> None:
        super().__init__()
        self.norm, self.after, self.is_read = nn.LayerNorm(32), nn.LayerNorm(32), is_read
        self.query, self.key, self.value, self.out = (nn.Linear(32, 32) for _ in range(4))
        self.feed_forward = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = (of(y).unflatten(-1, (4, 8)).transpose(1, 2) for of in (self.query, self.key, self.value))
        if not self.is_read:
            q, k = q.tanh(), k + v
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.after(x))


def first_reading(layers: int, is_read: bool) -> dict[str, float]:
    """CPU seconds of a step with the first reading, which checks the heads, and of one with the second."""
    from hdi_callback import HeadDiversityMonitor

    torch.manual_seed(0)
    model, x, seconds = nn.Sequential(*(_Block(is_read) for _ in range(layers))), torch.randn(2, 16, 32), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the layers that nothing explains
        with HeadDiversityMonitor(model) as monitor:
            for step in range(2):
                start = time.process_time()
                monitor.arm()
                model(x).sum().backward()
                monitor.measure(step)
                seconds.append(time.process_time() - start)
            watched = len(monitor.layers)
    assert watched == (layers if is_read else 0)
    return {"first": seconds[0], "second": seconds[1]}


def _run(script: str) -> str:
    root = Path(__file__).parents[2]
    # Environments that forbid bytecode would measure the compiler.
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with_bytecode = {**kept, "PYTHONPYCACHEPREFIX": str(Path(tempfile.gettempdir()) / "hdi-bytecode")}
    ran = subprocess.run(
        [sys.executable, "-c", script], cwd=root, env=with_bytecode, capture_output=True, text=True, check=True
    )
    return ran.stdout.split("\n")[-2]


def report(
    models: dict[str, tuple[int, Callable[[], nn.Module]]], depths: Sequence[int], rounds: int, command: str
) -> list[str]:
    lines = [
        f"Made by `{command}`",
        f"with {rounds} processes each, in turn, 1 CPU thread, torch {torch.__version__.split('+')[0]}, in CPU time.",
        "",
        "| import | median, milliseconds | 95 % interval |",
        "|---|---|---|",
    ]
    times: dict[str, list[float]] = {name: [] for name in IMPORTS}
    for turn in range(rounds + 1):
        for name, (before, line) in IMPORTS.items():
            seconds = seconds_to_import(before, line)
            if turn:  # the first writes the bytecode
                times[name].append(seconds * 1e3)
    for name, values in times.items():
        low, high = interval(values)
        lines.append(f"| {name} | {statistics.median(values):.1f} | {low:.1f} - {high:.1f} |")
    lines += [
        "",
        "| finding the heads of | layers found | median, seconds | 95 % interval | memory, MiB | its weights, MiB |",
        "|---|---|---|---|---|---|",
    ]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in models}
    for _ in range(rounds):
        for name in models:
            script = f"import json\nfrom tests.benchmarks.bench_start import find\nprint(json.dumps(find({name!r})))"
            found[name].append(json.loads(_run(script)))
    for name, (layers, _) in models.items():
        values = [one["seconds"] for one in found[name]]
        low, high = interval(values)
        memory = max(one["memory"] for one in found[name])
        lines.append(
            f"| {name} | {found[name][0]['layers']} of {layers} | {statistics.median(values):.2f} | "
            f"{low:.2f} - {high:.2f} | {memory:.0f} | {found[name][0]['weights']:.0f} |"
        )
    lines += [
        "",
        "| a step with the first reading, 32 wide | median, seconds | 95 % interval | with the second, seconds |",
        "|---|---|---|---|",
    ]
    for is_read, what in ((True, "layers"), (False, "layers whose heads nothing explains")):
        for layers in depths:
            script = "import json\nfrom tests.benchmarks.bench_start import first_reading\n"
            script += f"print(json.dumps(first_reading({layers}, {is_read})))"
            readings = [json.loads(_run(script)) for _ in range(rounds)]
            low, high = interval([one["first"] for one in readings])
            first, second = (statistics.median(one[name] for one in readings) for name in ("first", "second"))
            lines.append(f"| {layers} {what} | {first:.2f} | {low:.2f} - {high:.2f} | {second:.2f} |")
    return [*lines, ""]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="processes for each number")
    parser.add_argument("--small", action="store_true", help="models that take a second, to try the command")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(argv)
    arguments = " ".join(sys.argv[1:] if argv is None else argv)
    command = f"python -m tests.benchmarks.bench_start {arguments}".strip()
    models, depths = (SMALL, (2,)) if options.small else (MODELS, (4, 16, 48))
    write(report(models, depths, options.rounds, command), options.output)


if __name__ == "__main__":
    main()
