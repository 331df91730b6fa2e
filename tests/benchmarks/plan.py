"""What travels between ranks for one reading of key weights and head outputs, from the sizes of a model.

python -m tests.benchmarks.plan --output docs/benchmarks/plan.md
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.ratios import write

METRICS = ["hdi", "hdi_alignment", "head_correlation", "head_output_overlap"]
"""The metrics that it is of; others of the same sources add nothing."""

NUMBER = 8  # bytes; sums are added up in float64
SCATTER = 4  # bytes of a number of a scatter


@dataclass(frozen=True)
class Model:
    """The sizes of a model.

    Attributes:
        layers: how many attention layers.
        heads: H.
        key_heads: G.
        value_dim: d_v.
        width: d, input features of a layer.
    """

    layers: int
    heads: int
    key_heads: int
    value_dim: int
    width: int


def bytes_of_weights(model: Model) -> int:
    """Four G x G matrices, nine numbers a key head, and 22 of the layer."""
    G = model.key_heads
    return NUMBER * model.layers * (4 * G**2 + 9 * G + 22)


def bytes_of_outputs(model: Model, *, with_overlap: bool = True) -> int:
    """The count and sum of tokens first, then their count, the traces, and for `head_output_overlap` the scatter.

    Of the scatter, the blocks of every two heads once, in four chunks of heads. One rank computes the squares of its
    blocks, which are added up with the traces.
    """
    H = model.heads
    step = -(-H // 4)
    pairs = sum(min(step, H - start) * (H - start) for start in range(0, H, step))
    scatter = SCATTER * pairs * model.value_dim**2 + NUMBER * H**2
    return model.layers * (NUMBER * (1 + H * model.value_dim + 1 + H**2) + (scatter if with_overlap else 0))


def bytes_of_tokens(model: Model) -> int:
    """Counts and sums of tokens and of their directions, and a scatter of which each pair of features travels once."""
    d = model.width
    step = -(-d // 4)
    pairs = sum(min(step, d - start) * (d - start) for start in range(0, d, step))
    return model.layers * (NUMBER * (2 * d + 4) + SCATTER * pairs)


def ring_bytes(total: float, ranks: int) -> float:
    """Bytes that each rank sends in an all-reduce of `total` bytes along a ring."""
    return 2 * total * (ranks - 1) / ranks


MODELS = {
    "GPT-2 small": Model(12, 12, 12, 64, 768),
    "7 billion, 32 heads": Model(32, 32, 32, 128, 4096),
    "70 billion, 64 heads, 8 key heads": Model(80, 64, 8, 128, 8192),
}


def report(ranks: int) -> list[str]:
    def shown(size: float) -> str:
        power = min(3, int(math.log(max(size, 1), 1000)))
        return f"{size / 1000**power:.1f} {('B', 'kB', 'MB', 'GB')[power]}"

    lines = [
        "Made by `python -m tests.benchmarks.plan --output docs/benchmarks/plan.md`; computed, not measured: "
        f"what each of {ranks:,} ranks sends for one reading, if sums go along a ring.",
        "",
        "| model | weights alone | with head outputs | with `head_output_overlap` | with `token_cosine` | the latter a "
        "step, one reading in 50 |",
        "|---|---|---|---|---|---|",
    ]
    for name, model in MODELS.items():
        weights = bytes_of_weights(model)
        without = weights + bytes_of_outputs(model, with_overlap=False)
        total = weights + bytes_of_outputs(model)
        tokens = total + bytes_of_tokens(model)
        sizes = (weights, without, total, tokens, tokens / 50)
        cells = [ring_bytes(size, ranks) for size in sizes]
        lines.append(f"| {name} | {' | '.join(shown(size) for size in cells)} |")
    return [*lines, ""]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=10_000)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(argv)
    write(report(options.ranks), options.output)


if __name__ == "__main__":
    main()
