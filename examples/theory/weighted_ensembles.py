"""Claim 4: heads that are weighted instead of averaged, and whether the error is still monotone in HDI."""

from __future__ import annotations

import math

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from examples.theory.claim import Claim, Number, Part, Size
from examples.theory.estimators import heads_at_angle, kernel_weights, noise_covariance, orthogonal_heads, random_heads
from examples.theory.intervals import mean_of
from hdi_callback.core import head_diversity

BANDWIDTH, SPREAD = 1.0, 0.5
EXACT = 1e-9
LEARNED = "holds if its excess error lies below the mean's, with intervals that do not meet; fails if above; else open"


def best_weights(covariance: Tensor) -> Tensor:
    """C^-1 1 / (1' C^-1 1): the weights that add up to 1 with the smallest error (Bates and Granger 1969)."""
    raw = torch.linalg.pinv(covariance, hermitian=True, rtol=1e-10).sum(-1)
    return raw / raw.sum()


def error(covariance: Tensor, weights: Tensor) -> float:
    return float(weights @ covariance @ weights)


def even(heads: int) -> Tensor:
    return torch.full((heads,), 1 / heads, dtype=torch.float64)


def with_copies(bases: Tensor, copies: int) -> Tensor:
    """The heads, the first of them repeated."""
    return torch.cat([bases, bases[:1].expand(copies, -1, -1)])


def counterexample() -> tuple[list[float], list[float]]:
    """HDI and best error of two layers of eight heads: all at equal angles, and four orthogonal ones with copies."""
    equal = heads_at_angle(8, 2, math.acos(0.3**0.25))  # overlap 0.3 for every pair
    eye = torch.eye(18, dtype=torch.float64)
    copied = with_copies(eye[:8].view(4, 2, 18), 4)  # ten of 28 pairs are copies
    index = [float(head_diversity(bases).subspace.index) for bases in (equal, copied)]
    matrices = [noise_covariance(bases, BANDWIDTH, SPREAD) for bases in (equal, copied)]
    return index, [error(C, best_weights(C)) for C in matrices]


def search(trials: int) -> tuple[int, int]:
    """Pairs of random layers whose more diverse one has the larger error: under best weights, and under the mean."""
    draw, layers = torch.Generator().manual_seed(3), []
    for _ in range(trials):
        bases = random_heads(6, 2, 12, draw)
        tilt = torch.rand(6, 1, 1, generator=draw, dtype=torch.float64).sqrt()
        towards = bases[torch.randint(6, (6,), generator=draw)]
        bases = torch.linalg.qr(((1 - tilt) * bases + tilt * towards).mT).Q.mT
        C = noise_covariance(bases, BANDWIDTH, SPREAD)
        layers.append((float(head_diversity(bases).subspace.index), error(C, best_weights(C)), error(C, even(6))))
    wrong = wrong_even = 0
    for i in range(trials):
        for j in range(i):
            more, less = sorted((layers[i], layers[j]), reverse=True)
            wrong += more[1] > less[1]
            wrong_even += more[2] > less[2]
    return wrong, wrong_even


def learned(seeds: int, keys: int, points: int, steps: int, *, alike: bool) -> tuple[list[float], ...]:
    """Excess error over the best weights: of the mean, of least squares, and of a projection trained by Adam.

    The error is over fresh points. Alike: every head sees random directions. Else: the target depends on two
    directions alone, which the first of four orthogonal heads sees and the others do not.
    """
    excess: tuple[list[float], list[float], list[float]] = ([], [], [])
    for seed in range(seeds):
        draw = torch.Generator().manual_seed(100 + seed)
        bases = with_copies(random_heads(4, 2, 8, draw) if alike else orthogonal_heads(4, 2, 8), 2)
        slope = torch.randn(8, generator=draw, dtype=torch.float64)
        slope = slope if alike else torch.where(torch.arange(8) < 2, slope, 0)

        def outputs(count: int, bases=bases, slope=slope, draw=draw) -> tuple[Tensor, Tensor]:
            x = torch.randn(count // 20, keys, 8, generator=draw, dtype=torch.float64)
            q = torch.randn(count // 20, 20, 8, generator=draw, dtype=torch.float64)
            y = torch.sin(x @ slope) + torch.randn(count // 20, keys, generator=draw, dtype=torch.float64)
            z = (kernel_weights(bases, x, q, BANDWIDTH) @ y[:, None, :, None]).squeeze(-1)
            return z.transpose(1, 2).reshape(-1, len(bases)), torch.sin(q @ slope).flatten()

        train, test = outputs(points), outputs(4000)
        noisy = train[1] + torch.randn(len(train[1]), generator=draw, dtype=torch.float64)
        away = test[0] - test[1][:, None]  # errors of the heads at fresh points, biases included
        C = away.mT @ away / len(away)
        reference = error(C, best_weights(C))
        fitted = torch.linalg.lstsq(train[0], noisy[:, None], driver="gelsd").solution[:, 0]
        weights = even(len(bases)).clone().requires_grad_()
        optimizer = torch.optim.Adam([weights], lr=0.02)
        for _ in range(steps):
            (train[0] @ weights - noisy).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        for place, used in enumerate((even(len(bases)), fitted, weights.detach())):
            excess[place].append(float((test[0] @ used - test[1]).square().mean()) / reference - 1)
    return excess


def compared(seeds: int, steps: int, *, alike: bool) -> tuple[list[Number], str, str]:
    """Excess errors with intervals, the verdict on the trained projection, and why."""
    where = "heads alike" if alike else "one head that sees the target"
    names = ("mean", "least squares", "a projection trained by Adam")
    found = learned(seeds, 100, 400, steps, alike=alike)
    numbers = [mean_of(f"excess error of {name}, {where}", one, f"{seeds} seeds") for name, one in zip(names, found)]
    worse, _, better = numbers
    verdict = "holds" if better.high < worse.low else "fails" if better.low > worse.high else "open"
    return numbers, verdict, f"{better.value:+.1%} over the best weights that add up to 1, the mean {worse.value:+.1%}"


def run(size: Size) -> Claim:
    seeds, trials, steps = (2, 12, 50) if size == "small" else (20, 120, 400)
    base = random_heads(4, 2, 10, torch.Generator().manual_seed(1))
    copies = list(range(7))
    family = [with_copies(base, count) for count in copies]
    matrices = [noise_covariance(bases, BANDWIDTH, SPREAD) for bases in family]
    index = [float(head_diversity(bases).subspace.index) for bases in family]
    by_mean = [error(C, even(len(C))) for C in matrices]
    by_best = [error(C, best_weights(C)) for C in matrices]
    drift = max(abs(value / by_best[0] - 1) for value in by_best)

    (index_equal, index_copied), (best_equal, best_copied) = counterexample()
    wrong, wrong_even = search(trials)
    pairs = trials * (trials - 1) // 2
    alike, alike_verdict, alike_why = compared(seeds, steps, alike=True)
    unlike, unlike_verdict, unlike_why = compared(seeds, steps, alike=False)
    numbers = [
        Number("HDI, four random heads", index[0]),
        Number("HDI, the first of them copied six times", index[-1]),
        Number("error of the mean, from none to six copies, relative change", by_mean[-1] / by_mean[0] - 1),
        Number("error under best weights, largest relative change", drift),
        Number("HDI of eight heads at equal angles", index_equal),
        Number("their best error, times n / sigma^2", best_equal),
        Number("HDI of four orthogonal heads and four copies of one", index_copied),
        Number("its best error", best_copied),
        Number("share of pairs of random layers in the wrong order, best weights", wrong / pairs, of=f"{pairs} pairs"),
        Number("the same under the mean", wrong_even / pairs, of=f"{pairs} pairs"),
        *alike,
        *unlike,
    ]
    is_reversed = index_equal > index_copied and best_equal > 1.01 * best_copied
    order = "fails" if is_reversed else "holds" if wrong == 0 else "open"

    figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
    axis.plot(index, by_mean, "o-", label="mean of the heads")
    axis.plot(index, by_best, "s-", label="best weights")
    for count in (0, 2, 6):
        axis.annotate(f"{count} copies", (index[count], by_mean[count]), textcoords="offset points", xytext=(6, 4))
    axis.set(xlabel="HDI", ylabel="noise variance, times n / σ²")
    axis.legend()
    return Claim(
        name="weighted_ensembles",
        title="Weighted heads: a copy costs nothing",
        words=[
            "The abstract names a general theory of weighting as one of its three strands. If the heads' errors have "
            "the covariance matrix $C$, the mean has the error $\\mathbf{1}^\\top C \\mathbf{1} / H^2$, and the best "
            "weights that add up to 1 are $C^{-1} \\mathbf{1} / \\mathbf{1}^\\top C^{-1} \\mathbf{1}$ (Bates and "
            "Granger 1969), with the error $1 / \\mathbf{1}^\\top C^{-1} \\mathbf{1}$. An output projection is free "
            "to learn weights, so that a transformer is not bound to the mean.",
            "First heads are copied: HDI falls, the error of the mean rises, and best weights share out among the "
            "copies. Then two layers are shown whose order by HDI is not their order by error. Then weights are "
            "learned from 400 noisy points, by least squares and by Adam.",
            'What can be said instead of "falls with HDI": under best weights the error falls as $C$ falls (if '
            "$C' - C$ is positive semi-definite, $1 / \\mathbf{1}^\\top C^{-1} \\mathbf{1}$ is no larger). Where "
            "all pairs have one overlap, best weights are the mean, and the statement in HDI is back. The pair of "
            "layers that is shown was chosen after a first one had not reversed the order: it proves that such pairs "
            "exist, and the random pairs below show how common they are.",
        ],
        parts=[
            Part(
                "with weights, the error falls with HDI",
                "fails if one pair of layers has the larger HDI and the larger best error by over 1 %; holds if no "
                "pair of the search is in the wrong order",
                order,
                f"HDI {index_equal:.2f} with error {best_equal:.3f} against HDI {index_copied:.2f} with "
                f"{best_copied:.3f}; {wrong / pairs:.0%} of random pairs are in the wrong order.",
            ),
            Part(
                "a copied head costs nothing under best weights",
                f"holds if the error changes by less than {EXACT:g}",
                "holds" if drift < EXACT else "fails",
                f"changes by {drift:.1e}, while that of the mean changes by {by_mean[-1] / by_mean[0] - 1:+.0%}",
            ),
            Part(
                "a trained output projection finds better weights than the mean, where heads are alike",
                LEARNED,
                alike_verdict,
                alike_why,
            ),
            Part(
                "it does so where one head sees the target",
                LEARNED + " (added after the one above came out open)",
                unlike_verdict,
                unlike_why,
            ),
        ],
        numbers=numbers,
        seeds="1 and 3 (layers), 100 onwards (learning)",
        left="Projections that learn directions as well as weights, as those of a transformer do: here every head "
        "gives one number.",
        caption="Error against HDI as the first of four heads is copied up to six times",
        figure=figure,
    )
