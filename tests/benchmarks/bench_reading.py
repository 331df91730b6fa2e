"""What a reading of one layer's weights costs, against the plain product `K @ K.T` and against SciPy pair by pair.

python -m tests.benchmarks.bench_reading --output docs/benchmarks/reading.md
"""

from __future__ import annotations

import argparse
from itertools import combinations
from pathlib import Path

import scipy.linalg
import torch

from hdi_callback.core import head_diversity, head_overlap, orthonormal_bases
from tests.benchmarks.memory import peak_mebibytes
from tests.benchmarks.ratios import measure, table, write

SHAPES = {"12 x 64 x 768": (12, 64, 768), "32 x 128 x 4096": (32, 128, 4096)}
SMALL = {"4 x 16 x 64": (4, 16, 64)}
PAIRS = 6  # of SciPy's; all pairs of the large shape would take minutes


def report(shapes: dict[str, tuple[int, int, int]], rounds: int, device: str) -> list[str]:
    lines = [
        "Made by `python -m tests.benchmarks.bench_reading --output docs/benchmarks/reading.md`",
        f"with {rounds} rounds, {torch.get_num_threads()} CPU threads, torch {torch.__version__.split('+')[0]}, "
        f"on {torch.cuda.get_device_name() if device == 'cuda' else 'a CPU'}.",
        "",
    ]
    for title, (H, k, d) in shapes.items():
        weight = torch.randn(H, k, d, generator=torch.Generator().manual_seed(0)).to(device)
        flat = weight.flatten(0, 1)
        heads = [head.double().cpu().numpy().T for head in weight]
        pairs = list(combinations(range(H), 2))
        sample = pairs[:: max(1, len(pairs) // PAIRS)][:PAIRS]
        scipy_name = f"SciPy, {len(sample)} of {len(pairs)} pairs"

        def scipy_pairs(heads=heads, sample=sample):
            return [scipy.linalg.subspace_angles(heads[h], heads[g]) for h, g in sample]

        def subspace(weight=weight):
            bases = orthonormal_bases(weight)
            return head_overlap(bases.rows, bases.rank)

        ratios = measure(
            {
                "`K @ K.T`, float32": lambda flat=flat: flat @ flat.T,
                "the HDI alone (whiten)": subspace,
                "`head_diversity`, both lenses": lambda weight=weight: head_diversity(weight),
                '`head_diversity(method="exact")`': lambda weight=weight: head_diversity(weight, method="exact"),
                '`head_diversity(method="svd")`': lambda weight=weight: head_diversity(weight, method="svd"),
                scipy_name: scipy_pairs,
            },
            rounds=rounds,
            device=device,
        )
        lines += table(f"{title}, time over the plain product", ratios, absolute=device == "cuda")
        sampled = ratios[-1]
        ours = next(ratio for ratio in ratios if "both lenses" in ratio.name)
        everything = sampled.median * len(pairs) / len(sample)
        lines += [
            f"SciPy for all {len(pairs)} pairs, extrapolated from the sample: {everything:.0f} times the plain product "
            f"and {everything / ours.median:.0f} times `head_diversity`.",
            *memory(H, k, d, device),
            "",
        ]
    return lines


def memory(H: int, k: int, d: int, device: str) -> list[str]:
    """What the product and a reading allocate at their peak, each in a process of its own."""
    # A small reading first, so that what libraries load at their first call is not counted.
    setup = (
        "import torch\nfrom hdi_callback.core import head_diversity\n"
        f"head_diversity(torch.randn(4, 8, 32, device={device!r}))\n"
        f"weight = torch.randn({H}, {k}, {d}, device={device!r})\nflat = weight.flatten(0, 1)"
    )
    product = peak_mebibytes(setup, "result = flat @ flat.T", device=device)
    reading = peak_mebibytes(setup, "result = head_diversity(weight)", device=device)
    if product is None or reading is None:
        return ["Peak memory: not measured, this system does not tell a process its own."]
    weight = H * k * d * 4 / 2**20
    return [
        f"Peak memory beyond the weight ({weight:.1f} MiB): the product {product:.1f} MiB, `head_diversity` "
        # Peaks are counted in pages, of which a small product may need no new one.
        f"{reading:.1f} MiB{f', {reading / product:.1f} times as much' if product >= 1 else ''}."
    ]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--small", action="store_true", help="a shape that takes a second, to try the command")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    write(report(SMALL if options.small else SHAPES, options.rounds, device), options.output)


if __name__ == "__main__":
    main()
