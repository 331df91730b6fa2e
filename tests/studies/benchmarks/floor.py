"""What a reading of one layer computes, part by part, and what the matrix products in it take alone.

    python -m tests.studies.benchmarks.floor [--rounds 15]

A layer of 12 heads of width 64 and 512 tokens, in float32. Products of overlaps and circuits are symmetric: of eight
chunks of heads, each against all from its first one on, nine sixteenths are formed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from hdi_callback.core.circuits import circuit_norms, circuit_sums
from hdi_callback.core.covariance import contribution_sums
from hdi_callback.core.diversity import diversity_sums
from hdi_callback.core.movement import movement_sums, not_finite
from hdi_callback.core.rows import attention_rows
from hdi_callback.core.whitening import whiten_layers
from tests.studies.benchmarks.timing import arguments, seconds, table

H, K, D, TOKENS, QUERIES = 12, 64, 768, 512, 64


def main() -> None:
    options = arguments(__doc__, rounds=15).parse_args()
    torch.manual_seed(0)
    query, key, value, output = weights = torch.randn(4, 1, H, K, D)
    before, outputs = weights + 1e-3, torch.randn(1, TOKENS, H, K)
    keys, values = whiten_layers(key), whiten_layers(value)
    logits, positions = torch.randn(1, 1, H, QUERIES, TOKENS), torch.arange(4, TOKENS, TOKENS // QUERIES)
    visible = (torch.arange(TOKENS) <= positions[:, None]).expand_as(logits)
    rows = logits.masked_fill(~visible, -torch.inf).softmax(-1)
    square, wide = 9 / 16 * 2 * (H * K) ** 2 * D, 2 * H * K * K * D  # of heads by heads; of each head by itself
    parts: dict[str, tuple[Callable[[], object], float]] = {  # and the operations of its products
        "whitened keys and values": (lambda: (whiten_layers(key), whiten_layers(value)), 4 * wide),
        "overlaps of keys": (lambda: diversity_sums(keys), square + 9 / 8 * wide),
        "norms of QK circuits": (lambda: circuit_norms(query, keys), wide),
        "OV circuits": (lambda: circuit_sums(output, values), 2 * square + wide),
        "outputs": (lambda: contribution_sums(outputs, output), 2 * TOKENS * H * K * (D + K) + wide),
        "rows": (lambda: attention_rows(rows, visible, logits=logits, positions=positions, layers=True), 0),
        "movement, finiteness": (lambda: (movement_sums(weights, before), not_finite(weights)), 0),
    }
    matrix = torch.randn(D, D)
    times: dict[str, list[float]] = {name: [] for name in ("product", *parts)}
    for _ in range(options.rounds):
        times["product"].append(seconds(lambda: matrix @ matrix, "cpu"))
        for name, (measure, _) in parts.items():
            times[name].append(seconds(measure, "cpu"))
    typical = {name: 1e3 * statistics.median(each) for name, each in times.items()}
    alone = {name: typical["product"] * count / (2 * D**3) for name, (_, count) in parts.items()}
    whole = ("all", f"{sum(typical[name] for name in parts):.1f}", f"{sum(alone.values()):.1f}")
    table(
        ("of one layer", "ms", "its products alone, ms"),
        *((name, f"{typical[name]:.1f}", f"{alone[name]:.1f}") for name in parts),
        whole,
    )


if __name__ == "__main__":
    main()
