"""Everything that is to be measured on a GPU, one after the other.

    python -m tests.studies.gpu [--minutes 8] [--out runs/gpu] [--device cuda] [--only-training]

The tests of this folder; what a step and a reading cost, with peak memory; then a training with as many parameters as
GPT-2 small has, 124 million, on the bytes of Python's standard library, for as many minutes as are given. From the
middle on one of its attentions sees later tokens. The report of the run is kept.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import torch

from examples.train_gpt import read_standard_library
from hdi_callback import load_history, watch_heads, write_report
from tests.studies.benchmarks.gpt import GPT

SIZE = (17, 768, 12, 1024, 16)  # layers, width, heads, tokens, sequences: layers in place of a table of 50,257 tokens
COMMANDS = (
    "-m pytest -q -rA tests/studies/gpu",
    "-m tests.studies.benchmarks.step --device cuda --sizes gpt2-16 gpt2",
    "-m tests.studies.benchmarks.reading --device cuda",
)


def train(
    device: str, minutes: float, folder: Path, layers: int, width: int, heads: int, length: int, batch: int
) -> Path:
    """Train for some minutes, with a fault from the middle on, and return the path of the report."""
    torch.manual_seed(0)
    text, _ = read_standard_library(2**26)
    model = GPT(layers, width, heads, length).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    print(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters, {len(text):,} bytes of text")
    watched = watch_heads(model, optimizer, every_n_steps=50, log_dir=folder, tensorboard=True)
    broken, end = model.blocks[layers // 2].attention, time.monotonic() + 60 * minutes
    with watched:
        while (left := end - time.monotonic()) > 0:
            if broken.is_causal and left < 30 * minutes:
                print(f"From step {watched.global_step} on `blocks.{layers // 2}.attention` sees later tokens.")
                broken.is_causal = False
            starts = torch.randint(len(text) - length, (batch,)).tolist()
            tokens = torch.stack([text[start : start + length] for start in starts]).to(device, torch.int64)
            with watched.step():
                with torch.autocast(device, dtype=torch.bfloat16):
                    loss = watched.loss = model(tokens)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    if device == "cuda":
        print(f"{torch.cuda.max_memory_allocated() / 2**20:,.0f} MiB at the peak")
    return write_report(load_history(watched.history_path), folder / "report.html")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8, help="of the training")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder of the run and its report")
    parser.add_argument("--device", default="cuda", help="of the training")
    parser.add_argument("--size", type=int, nargs=5, default=SIZE, help="layers, width, heads, tokens, sequences")
    parser.add_argument("--only-training", action="store_true")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if torch.cuda.is_available() else 'no GPU'}")
    for command in () if options.only_training else COMMANDS:
        print(f"python {command}", flush=True)
        subprocess.run([sys.executable, *command.split()], check=False)
    print(train(options.device, options.minutes, options.out, *options.size))


if __name__ == "__main__":
    main()
