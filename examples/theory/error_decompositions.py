"""Claim 3: the error of the mean head, decomposed; and its variance against the number of heads."""

from __future__ import annotations

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from examples.theory.claim import Claim, Number, Part, Size, bars
from examples.theory.error_model import bias_variance_covariance
from examples.theory.estimators import (
    aligned_heads,
    kernel_weights,
    noise_covariance,
    orthogonal_heads,
    random_heads,
)
from examples.theory.intervals import mean_of

EXACT = 1e-12
NEAR = 0.05  # relative: the closed form is the leading term in 1/n
BANDWIDTH, SPREAD, K = 1.0, 0.5, 2
HEADS = (1, 2, 4, 8)


def target(x: Tensor) -> Tensor:
    return torch.sin(x[..., 0]) + 0.5 * x[..., 2] - 0.3 * x[..., -1] ** 2


def predictions(draws: int, keys: int, seed: int) -> tuple[Tensor, Tensor]:
    """Predictions (training sets, H, points) of heads trained on noisy targets, and the truth at the points."""
    draw = torch.Generator().manual_seed(seed)
    H, d = 4, 8
    bases = random_heads(H, K, d, draw)
    points = torch.randn(30, d, generator=draw, dtype=torch.float64)
    x = torch.randn(draws, keys, d, generator=draw, dtype=torch.float64)
    y = target(x) + 0.5 * torch.randn(draws, keys, generator=draw, dtype=torch.float64)
    weights = kernel_weights(bases, x, points.expand(draws, -1, -1), BANDWIDTH)  # (draws, H, points, keys)
    return (weights @ y[:, None, :, None]).squeeze(-1), target(points)


def gaps(draws: int, keys: int) -> tuple[float, float]:
    """Largest relative gap of both decompositions."""
    worst_bvc = worst_ambiguity = 0.0
    for seed in range(3):
        heads, truth = predictions(draws, keys, seed)  # (draws, H, points)
        parts = bias_variance_covariance(heads, truth)
        mean = heads.mean(1)
        error = (mean - truth).square().mean()
        H = heads.shape[1]
        total = parts.bias + parts.variance / H + (1 - 1 / H) * parts.covariance
        worst_bvc = max(worst_bvc, float((total - error).abs() / error))
        # Krogh and Vedelsby: for every training set and every point on its own
        single, ambiguity = (heads - truth).square().mean(1), (heads - mean[:, None]).square().mean(1)
        worst_ambiguity = max(worst_ambiguity, float(((mean - truth).square() - (single - ambiguity)).abs().max()))
    return worst_bvc, worst_ambiguity


def noise_variance(bases: Tensor, repeats: int, keys: int, seed: int) -> list[float]:
    """n / sigma^2 times the noise variance of the mean head, one number per draw of keys and queries."""
    draw = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(repeats):
        x = torch.randn(keys, bases.shape[-1], generator=draw, dtype=torch.float64)
        q = SPREAD * torch.randn(64, bases.shape[-1], generator=draw, dtype=torch.float64)
        mean = kernel_weights(bases, x, q, BANDWIDTH).mean(0)  # noise that is independent adds up squared weights
        found.append(float(keys * mean.square().sum(-1).mean()))
    return found


def run(size: Size) -> Claim:
    draws, keys, repeats = (20, 50, 4) if size == "small" else (200, 200, 40)
    bvc, ambiguity = gaps(draws, keys)
    d = K * max(HEADS)
    draw = torch.Generator().manual_seed(7)
    families = {
        "aligned": lambda H: aligned_heads(H, K, d),
        "random": lambda H: random_heads(H, K, d, draw),
        "orthogonal": lambda H: orthogonal_heads(H, K, d),
    }
    numbers = [
        Number("bias^2 + variance/H + (1 - 1/H) covariance against the error, relative", bvc, of="3 ensembles"),
        Number(
            "mean error - ambiguity against the error, largest at a point", ambiguity, of=f"{3 * draws * 30} errors"
        ),
    ]
    figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
    off = []
    n = 2000 if size == "small" else 4000
    for color, (family, make) in zip(("tab:red", "tab:blue", "tab:green"), families.items()):
        theory, points = [], []
        for H in HEADS:
            bases = make(H)
            theory.append(float(noise_covariance(bases, BANDWIDTH, SPREAD).mean()))
            number = mean_of(f"variance, {family}, H = {H}", noise_variance(bases, repeats, n, 11), f"{repeats} draws")
            numbers += [number, Number(f"its closed form, {family}, H = {H}", theory[-1])]
            off.append(max(abs(edge / theory[-1] - 1) for edge in (number.low, number.high)))
            points.append(number)
        axis.plot(HEADS, theory, color=color, label=f"{family}: closed form")
        axis.errorbar(HEADS, [p.value for p in points], bars(points), fmt="o", color=color, capsize=3)
    axis.set(xlabel="heads", ylabel="noise variance of the mean head, times n / σ²", xscale="log", xticks=HEADS)
    axis.set_xticklabels(list(map(str, HEADS)))
    axis.legend()
    numbers.append(
        Number("farthest end of an interval from the closed form, relative", max(off), of=f"{len(off)} points")
    )
    return Claim(
        name="error_decompositions",
        title="The error of the mean head is bias, variance and covariance",
        words=[
            "Averaging helps as far as errors differ. Two identities make this exact. Over training sets (Ueda and "
            "Nakano 1996): $\\mathrm{MSE} = \\mathrm{bias}^2 + \\frac{v}{H} + (1 - \\frac1H) c$, with $v$ the mean "
            "variance of a head and $c$ the mean covariance of two. For one training set and one point (Krogh and "
            "Vedelsby 1995): the squared error of the mean head is the mean squared error of the heads less their "
            "*ambiguity*, the variance of the heads around their mean.",
            "Heads are Nadaraya-Watson estimators with Gaussian kernels, each in its own subspace. Then the noise "
            "variance of their mean is shown over the number of heads, for heads that share one subspace, "
            "random ones and orthogonal ones. The curves are the closed form: the covariance of two heads is "
            "$\\frac{\\sigma^2}{n} \\prod_i O(\\cos \\theta_i)$ over their principal angles, to leading order in "
            "$1/n$, with $O(c) = B / \\sqrt{(B-q)^2 - p^2}$, $B = 1 + b^2$, $q = \\tau^2 c^2 / B$, $p = c (1 - "
            "\\tau^2 / B)$, bandwidth $b$ and queries of variance $\\tau^2$.",
        ],
        parts=[
            Part(
                "the error of the mean head is bias, variance and covariance",
                f"holds if the relative gap is below {EXACT:g}",
                "holds" if bvc < EXACT else "fails",
                f"The largest relative gap is {bvc:.1e}.",
            ),
            Part(
                "the error is the mean error less the ambiguity, at every point",
                f"holds if the largest gap is below {EXACT:g}",
                "holds" if ambiguity < EXACT else "fails",
                f"largest gap {ambiguity:.1e}",
            ),
            Part(
                "orthogonal heads reduce the variance most, aligned heads not at all, along the closed form",
                f"holds if every interval lies within {NEAR:.0%} of the closed form",
                "holds" if max(off) < NEAR else "fails",
                f"the farthest end of an interval is {max(off):.1%} away",
            ),
        ],
        numbers=numbers,
        seeds="0 to 2 (identities), 7 and 11 (variance)",
        left="Attention over tokens that are correlated with each other: keys here are independent.",
        caption="Noise variance of the mean head against the number of heads; points are simulated, with 95 % "
        "intervals",
        figure=figure,
    )
