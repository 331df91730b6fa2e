"""What a reading of one layer's weights costs, against the plain product `K @ K.T` and against SciPy pair by pair.

python -m tests.benchmarks.bench_reading --output docs/benchmarks/reading.md
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import scipy.linalg
import torch
from torch import Tensor

from hdi_callback.core import head_diversity, ov_circuits, qk_circuits, whitening
from hdi_callback.core.subspaces import block_norms, normalised
from hdi_callback.core.whitening import whiten_heads
from tests.benchmarks.memory import peak_mebibytes
from tests.benchmarks.ratios import measure, table, write

Shape = tuple[int, int, int]

SHAPES = {"12 x 64 x 768": (12, 64, 768), "32 x 64 x 2048": (32, 64, 2048), "32 x 128 x 4096": (32, 128, 4096)}
LARGEST_COMPARED = 32 * 64 * 2048  # all but the plain product and the default is timed up to this size
MEMORY = {"32 x 128 x 4096": (32, 128, 4096), "64 x 128 x 8192": (64, 128, 8192)}
SMALL = {"4 x 16 x 64": (4, 16, 64)}
PAIRS = 6  # of SciPy's; all pairs of the large shape would take minutes


def report(shapes: dict[str, Shape], memory: dict[str, Shape], rounds: int, device: str) -> list[str]:
    lines = [
        "Made by `python -m tests.benchmarks.bench_reading --output docs/benchmarks/reading.md`",
        f"with {rounds} rounds, {torch.get_num_threads()} CPU threads, torch {torch.__version__.split('+')[0]}, "
        f"on {torch.cuda.get_device_name() if device == 'cuda' else 'a CPU, in CPU time'}.",
        "",
    ]
    if device == "cpu":
        lines += ["Not yet measured on a GPU.", ""]
    for title, shape in shapes.items():
        lines += times(title, shape, rounds, device)
    lines += ["### Peak memory", ""]
    for title, shape in memory.items():
        lines += [memory_of(title, shape, device), ""]
    smallest = min((shape for shape in shapes.values()), key=lambda shape: shape[0] * shape[1] * shape[2])
    largest = max((shape for shape in shapes.values() if size(shape) <= LARGEST_COMPARED), key=size)
    lines += ["### What was tried", "", *EXPLANATION, ""]
    for shape in dict.fromkeys((smallest, largest)):
        lines += tried(shape, rounds, device)
    return lines


def size(shape: Shape) -> int:
    return shape[0] * shape[1] * shape[2]


def heads_of(shape: Shape, device: str, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def times(title: str, shape: Shape, rounds: int, device: str) -> list[str]:
    H = shape[0]
    weight, other = heads_of(shape, device), heads_of(shape, device, seed=1)
    flat = weight.flatten(0, 1)
    work: dict[str, Callable[[], object]] = {
        "`K @ K.T`, float32": lambda: flat @ flat.T,
        "`head_diversity`, both lenses": lambda: head_diversity(weight),
    }
    sample = list(combinations(range(H), 2))
    if size(shape) <= LARGEST_COMPARED:
        heads = [head.double().cpu().numpy().T for head in weight]
        pairs = sample[:: max(1, len(sample) // PAIRS)][:PAIRS]
        work |= {
            "`qk_circuits`": lambda: qk_circuits(other, weight),
            "`ov_circuits`, values in groups of four": lambda: ov_circuits(weight[::4], other),
            '`head_diversity(method="exact")`': lambda: head_diversity(weight, method="exact"),
            '`head_diversity(method="svd")`': lambda: head_diversity(weight, method="svd"),
            f"SciPy, {len(pairs)} of {len(sample)} pairs": lambda: [
                scipy.linalg.subspace_angles(heads[h], heads[g]) for h, g in pairs
            ],
        }
    ratios = measure(work, rounds=rounds, device=device)
    lines = table(f"{title}, time over the plain product", ratios, absolute=device == "cuda")
    if size(shape) <= LARGEST_COMPARED:
        everything = ratios[-1].median * len(sample) / len(pairs)
        lines += [
            f"SciPy for all {len(sample)} pairs, extrapolated from the sample: {everything:.0f} times the plain "
            f"product and {everything / ratios[1].median:.0f} times `head_diversity`.",
            "",
        ]
    return lines


def memory_of(title: str, shape: Shape, device: str) -> str:
    """What a reading allocates at its peak, in a process of its own."""
    # A small reading first, so that what libraries load at their first call is not counted.
    setup = (
        "import torch\nfrom hdi_callback.core import head_diversity\n"
        f"head_diversity(torch.randn(4, 8, 32, device={device!r}))\n"
        f"weight = torch.empty({shape}, device={device!r}).normal_()"
    )
    peaks = {
        budget: peak_mebibytes(setup, f"result = head_diversity(weight, memory_budget={budget} * 2**20)", device=device)
        for budget in (64, 16)
    }
    if None in peaks.values():
        return "Not measured: this system does not tell a process its peak."
    reported = ", ".join(f"{peak:.0f} MiB with a budget of {budget} MiB" for budget, peak in peaks.items())
    return f"{title}, beyond the weight ({size(shape) * 4 / 2**20:.1f} MiB in float32): {reported}."


EXPLANATION = """\
Errors are the largest of one overlap against `method="exact"`, on random heads and on heads of condition 1e4. A product
for each lens costs more than one for both. More chunks than four save work for many heads and cost time for few, and
each is a launch more on a GPU. The polynomial in float32 gains little, and the index of rank-deficient heads then
misses the error that the tests hold it to. Slices are for GPUs whose float64 is slow; here one sees what they cost.
""".splitlines()


def tried(shape: Shape, rounds: int, device: str) -> list[str]:
    """Other ways to the same numbers: their time over the plain product, and their error."""
    H, k, d = shape
    weight = heads_of(shape, device)
    spread = torch.linalg.qr(heads_of((H, k, k), device, seed=2)).Q * torch.logspace(0, -4, k, device=device)
    conditioned = spread @ torch.linalg.qr(weight.mT).Q.mT
    flat = weight.flatten(0, 1)
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "as it is": lambda weight: head_diversity(weight).overlap,
        "two products, one for each lens": two_products,
        "sixteen chunks of heads": lambda weight: (
            head_diversity(weight, memory_budget=max(1, H // 16) * k * H * k * 8).overlap
        ),
        "polynomial of the whitener in float32": with_single_polynomial,
        "Gram matrices in slices of eight bits (for GPUs with slow float64)": with_slices,
    }
    work: dict[str, Callable[[], object]] = {"`K @ K.T`, float32": lambda: flat @ flat.T}
    work |= {name: lambda way=way: way(weight) for name, way in ways.items()}
    ratios = measure(work, rounds=rounds, device=device)[1:]
    lines = [
        f"| {H} x {k} x {d}, over the plain product | median ratio | 95 % interval | error, random | error, 1e4 |",
        "|---|---|---|---|---|",
    ]
    exact = [head_diversity(heads, method="exact").overlap for heads in (weight, conditioned)]
    for ratio, way in zip(ratios, ways.values()):
        errors = [float((way(heads) - true).abs().max()) for heads, true in zip((weight, conditioned), exact)]
        lines.append(ratio.row(absolute=False) + f" {errors[0]:.0e} | {errors[1]:.0e} |")
    return [*lines, ""]


def two_products(weight: Tensor) -> Tensor:
    heads = whiten_heads(weight, rank_tol=1e-6)
    shared, _ = block_norms(heads.rows)
    block_norms(weight / heads.norm[:, None, None].float())
    return normalised(shared, shared.diagonal().round())


def with_single_polynomial(weight: Tensor) -> Tensor:
    def whitener_of(gram: Tensor, rank_tol: float, tolerance: float = 0.0) -> Tensor:
        k = gram.shape[-1]
        eye = torch.eye(k, dtype=gram.dtype, device=gram.device)
        shift = rank_tol**2 * torch.linalg.matrix_norm(gram)[..., None, None]
        factor, _ = torch.linalg.cholesky_ex(gram + shift * eye, check_errors=False)
        T = torch.linalg.solve_triangular(factor, eye.expand_as(gram), upper=False)
        W, T = (eye - shift * (T @ T.mT)).float(), T.float()
        C = 2.5 * W - 1.5 * (W @ W)
        T, W = C @ T, C @ W @ C
        return (2.5 * W - 1.5 * (W @ W)) @ T

    with patched(whitener_of=whitener_of):
        return head_diversity(weight).overlap


def with_slices(weight: Tensor) -> Tensor:
    with patched(has_fast_float64=lambda device: False):
        return head_diversity(weight).overlap


@contextmanager
def patched(**parts: Any):
    with pytest.MonkeyPatch.context() as patch:
        for name, part in parts.items():
            patch.setattr(whitening, name, part)
        yield


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--small", action="store_true", help="a shape that takes a second, to try the command")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes, memory = (SMALL, SMALL) if options.small else (SHAPES, MEMORY)
    write(report(shapes, memory, options.rounds, device), options.output)


if __name__ == "__main__":
    main()
