"""Claim 2: which attention is which kernel; sparse attention is a kernel of compact support."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import matplotlib.pyplot as plt
import numpy as np
import torch
from scipy.optimize import brentq
from sklearn.metrics.pairwise import laplacian_kernel, rbf_kernel
from torch import Tensor

from examples.theory.claim import Claim, Number, Part, Size

EXACT = 1e-7  # the oracles of alpha-entmax bisect, some in float32
HEADINGS = (
    "| attention | kernel | where | keys without weight | largest difference |",
    "|---|---|---|---|---|",
)
Attention = Callable[[Tensor, Tensor], Tensor]  # queries (q, d), keys (n, d) -> weights (q, n)


def threshold(scores: np.ndarray, power: float) -> float:
    """The t with sum_j (s_j - t)_+^power = 1, by Brent's method."""
    top = scores.max()
    return brentq(lambda t: (np.maximum(scores - t, 0) ** power).sum() - 1, top - 1.1, top, xtol=1e-15, rtol=1e-14)


def compact(alpha: float) -> Attention:
    r"""Kernel (R^2 - |q - k|^2)_+^p of alpha-entmax, p = 1 / (alpha - 1), for keys of one norm.

    The radius R is that of each query, so that the weights add up to 1: a bandwidth that adapts to the query.
    """

    def weights(q: Tensor, k: Tensor) -> Tensor:
        power, gamma = 1 / (alpha - 1), (alpha - 1) / (2 * q.shape[-1] ** 0.5)
        squared = torch.cdist(q, k, compute_mode="donot_use_mm_for_euclid_dist").square().numpy()
        radii = np.array([-threshold(-gamma * row, power) / gamma for row in squared])
        kernel = np.maximum(radii[:, None] - squared, 0) ** power
        return torch.tensor(kernel / kernel.sum(-1, keepdims=True))

    return weights


def entmax(alpha: float) -> Attention:
    """Attention with alpha-entmax in place of softmax, by the package `entmax` of its authors."""

    def weights(q: Tensor, k: Tensor) -> Tensor:
        from entmax import entmax15, entmax_bisect, sparsemax

        scores = q @ k.mT / q.shape[-1] ** 0.5
        if alpha == 2:
            return sparsemax(scores, -1)
        return entmax15(scores, -1) if alpha == 1.5 else entmax_bisect(scores, alpha, -1, n_iter=80)

    return weights


def scored(transform: Callable[[Tensor], Tensor], *, root: bool = True) -> Attention:
    def weights(q: Tensor, k: Tensor) -> Tensor:
        scores = q @ k.mT / (q.shape[-1] ** 0.5 if root else 1)
        rows = transform(scores)
        return rows / rows.sum(-1, keepdim=True)

    return weights


def by_kernel(kernel: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Attention:
    def weights(q: Tensor, k: Tensor) -> Tensor:
        rows = torch.tensor(kernel(q.numpy(), k.numpy()))
        return rows / rows.sum(-1, keepdim=True)

    return weights


def nearest(q: Tensor, k: Tensor, count: int = 8) -> Tensor:
    """Gaussian kernel, cut off at the distance of the query's nearest neighbours: a variable bandwidth."""
    squared = torch.cdist(q, k, compute_mode="donot_use_mm_for_euclid_dist").square()
    kernel = torch.exp(-squared / (2 * q.shape[-1] ** 0.5)) * (
        squared <= squared.kthvalue(count, -1, keepdim=True).values
    )
    return kernel / kernel.sum(-1, keepdim=True)


def top_k(q: Tensor, k: Tensor, count: int = 8) -> Tensor:
    scores = q @ k.mT / q.shape[-1] ** 0.5
    kept = scores.topk(count, -1)
    return torch.zeros_like(scores).scatter(-1, kept.indices, kept.values.softmax(-1))


def hardmax(q: Tensor, k: Tensor) -> Tensor:
    scores = q @ k.mT
    return torch.zeros_like(scores).scatter(-1, scores.argmax(-1, keepdim=True), 1.0)


def one_neighbour(q: Tensor, k: Tensor) -> Tensor:
    from sklearn.neighbors import NearestNeighbors

    found = NearestNeighbors(n_neighbors=1).fit(k.numpy()).kneighbors(q.numpy(), return_distance=False)
    return torch.zeros(len(q), len(k), dtype=q.dtype).scatter(-1, torch.tensor(found), 1.0)


def cosine_attention(q: Tensor, k: Tensor) -> Tensor:
    q, k = torch.nn.functional.normalize(q, dim=-1), torch.nn.functional.normalize(k, dim=-1)
    return (5 * q @ k.mT).softmax(-1)


def von_mises_fisher(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    return np.exp(-2.5 * ((q[:, None] - k[None]) ** 2).sum(-1))  # on the sphere, |q - k|^2 = 2 - 2 cos


def linear_attention(q: Tensor, k: Tensor) -> Tensor:
    """As it is computed: keys are summed first; a row is the response of the sums to each unit value."""
    phi_q, phi_k = (torch.nn.functional.elu(x) + 1 for x in (q, k))
    values = torch.eye(len(k), dtype=k.dtype)
    return (phi_q @ (phi_k.mT @ values)) / (phi_q @ phi_k.sum(0))[:, None]


def finite_rank(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    phi = [np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))) for x in (q, k)]
    return np.einsum("qd,kd->qk", *phi)


def distances(q: Tensor, k: Tensor) -> Tensor:
    """Attention by distance instead of product (Lipschitz attention, Kim et al. 2021)."""
    return (-torch.cdist(q, k).square() / (2 * q.shape[-1] ** 0.5)).softmax(-1)


@dataclass(frozen=True)
class Entry:
    """A line of the table: an attention, the kernel that it is, and both as functions."""

    attention: str
    kernel: str
    condition: str
    compact: bool
    left: Attention
    right: Attention


ENTRIES = [
    Entry("softmax", "Gaussian, bandwidth $d_k^{1/4}$", "keys of one norm", False, scored(torch.exp),
          by_kernel(lambda q, k: rbf_kernel(q, k, gamma=1 / (2 * q.shape[-1] ** 0.5)))),
    Entry("softmax of $-\\lVert q-k \\rVert^2$", "Gaussian", "any keys", False, distances,
          by_kernel(lambda q, k: rbf_kernel(q, k, gamma=1 / (2 * q.shape[-1] ** 0.5)))),
    Entry("softmax of $-\\lVert q-k \\rVert_1$", "Laplace", "any keys", False,
          lambda q, k: (-0.3 * torch.cdist(q, k, p=1)).softmax(-1),
          by_kernel(lambda q, k: laplacian_kernel(q, k, gamma=0.3))),
    Entry("softmax of cosines", "von Mises-Fisher", "any keys", False, cosine_attention, by_kernel(von_mises_fisher)),
    Entry("sparsemax", "Epanechnikov, $(R^2 - u^2)_+$", "keys of one norm", True, entmax(2), compact(2)),
    Entry("1.5-entmax", "biweight, $(R^2 - u^2)_+^2$", "keys of one norm", True, entmax(1.5), compact(1.5)),
    Entry("4/3-entmax", "triweight, $(R^2 - u^2)_+^3$", "keys of one norm", True, entmax(4 / 3), compact(4 / 3)),
    Entry("3-entmax", "$(R^2 - u^2)_+^{1/2}$", "keys of one norm", True, entmax(3), compact(3)),
    Entry("hardmax", "one nearest neighbour", "keys of one norm", True, hardmax, one_neighbour),
    Entry("top-k softmax", "Gaussian, cut at the k-th neighbour", "keys of one norm", True, top_k, nearest),
    Entry("normalised ReLU", "$(q^\\top k)_+$, a cone around q", "any keys", True, scored(torch.relu),
          by_kernel(lambda q, k: np.maximum(q @ k.T, 0))),
    Entry("linear, $\\phi = 1 + \\mathrm{elu}$", "$\\phi(q)^\\top \\phi(k)$, of rank $d_k$ at most", "any keys", False,
          linear_attention,
          by_kernel(finite_rank)),
]  # fmt: skip


def compare(entry: Entry, draws: int, keys: int = 60) -> tuple[float, float]:
    """Largest difference of the weights, and the share of keys that get none."""
    draw, worst, empty = torch.Generator().manual_seed(0), 0.0, []
    for _ in range(draws):
        q, k = (torch.randn(n, 6, generator=draw, dtype=torch.float64) for n in (9, keys))
        k = 3 * torch.nn.functional.normalize(k, dim=-1) if entry.condition == "keys of one norm" else k
        left, right = entry.left(q, k), entry.right(q, k)
        worst = max(worst, float((left - right).abs().max()))
        empty.append(float((right == 0).double().mean()))
    return worst, float(np.mean(empty))


def run(size: Size) -> Claim:
    draws = 2 if size == "small" else 40
    found = [(entry, *compare(entry, draws)) for entry in ENTRIES]
    rows = [
        f"| {entry.attention} | {entry.kernel} | {entry.condition} | {empty:.0%} | {worst:.1e} |"
        for entry, worst, empty in found
    ]
    worst_of_all = max(worst for _, worst, _ in found)
    supports = all((empty > 0) == entry.compact for entry, _, empty in found)
    is_so = worst_of_all < EXACT and supports

    u = np.linspace(0, 1.6, 300)
    figure, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
    shapes = {"softmax: Gaussian": np.exp(-2 * u**2), "sparsemax: Epanechnikov": np.maximum(1 - u**2, 0)}
    shapes |= {
        "1.5-entmax: biweight": np.maximum(1 - u**2, 0) ** 2,
        "4/3-entmax: triweight": np.maximum(1 - u**2, 0) ** 3,
    }
    shapes |= {"3-entmax": np.maximum(1 - u**2, 0) ** 0.5}
    for name, values in shapes.items():
        axis.plot(u, values, label=name)
    axis.set(xlabel="distance of query and key, over the radius of the query", ylabel="weight, over that at distance 0")
    axis.legend()
    return Claim(
        name="sparse_kernels",
        title="Sparse attention is a kernel of compact support",
        words=[
            "Softmax gives every token a positive weight. Sparsemax (Martins and Astudillo 2016) and $\\alpha$-entmax "
            "(Peters, Niculae and Martins 2019) give most tokens none: $p_j = [(\\alpha - 1) s_j - "
            "t]_+^{1/(\\alpha-1)}$, with $t$ such that the weights add up to 1. If all keys have one norm, a score "
            "is a distance up to a constant of the query, and the weights are kernels known from statistics: "
            "Epanechnikov, biweight, triweight. Their radius is not fixed: for each query it is the one with which "
            "the weights add up to 1.",
            "Each line of the table is computed twice, once as the attention is written (entmax by the package of "
            "its authors, top-k by sorting, linear attention by its running sums) and once as a kernel of the "
            "distance (kernels and neighbours of scikit-learn, radii by Brent's method), and the weights are "
            "compared.",
        ],
        parts=[
            Part(
                "each attention of the table is the kernel beside it",
                f"holds if no weight differs by {EXACT:g}, and exactly the kernels of compact support give zeros",
                "holds" if is_so else "fails", f"The largest difference in the table is {worst_of_all:.1e}.",
            ),
        ],
        numbers=[Number("largest difference of a weight, all entries", worst_of_all, of=f"{draws} draws of 60 keys")],
        tables={"Which attention is which kernel": "\n".join([*HEADINGS, *rows])},
        seeds="0",
        left="Where key norms differ, the kernels of compact support gain prior offsets in the score instead of "
            "prior weights: the radius then depends on the key as well.",
        caption="The kernels of softmax and of alpha-entmax, for keys of one norm",
        figure=figure,
    )  # fmt: skip
