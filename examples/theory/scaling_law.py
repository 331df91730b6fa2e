"""Claim 8: the best head width grows with the logarithm of n; by simulation, and in small trained models."""

from __future__ import annotations

import math

import matplotlib.pyplot as plt
import numpy as np
import torch
from scipy import stats

from examples.theory.allocation import allocate_heads, rank_allocations
from examples.theory.claim import Claim, Number, Part, Size
from examples.theory.estimators import overlap_factor
from examples.theory.intervals import mean_of, share_of
from examples.theory.models import recorded_gpt, train, validation_loss
from examples.theory.readings import effective_samples, spectrum
from examples.train_gpt import GPT, read_standard_library

LATENT, DECAY, BANDWIDTH, NOISE, TOTAL = 12, 0.7, 0.7, 1.0, 48
WIDTHS = (4, 8, 16, 32, 64)  # of trained models of width 64
NEAR = 0.01  # a choice is a hit if its loss is within this share of the best


def best_widths(samples: int, seed: int, *, scaled: bool) -> float:
    """The best head width for n samples: bias and variance simulated, heads orthogonal to each other.

    A head of width k sees the k most relevant of twelve directions. Scaled: the squared bandwidth grows with k, as the
    1/sqrt(d_k) of attention makes it for queries and keys of unit variance.
    """
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, LATENT, generator=draw, dtype=torch.float64)
    q = torch.randn(100, LATENT, generator=draw, dtype=torch.float64)
    slope = torch.exp(-DECAY / 2 * torch.arange(LATENT, dtype=torch.float64))
    slope = slope / slope.norm()
    errors = []
    for k in range(1, LATENT + 1):
        bandwidth = BANDWIDTH * (k**0.5 if scaled else 1)
        weights = (-torch.cdist(q[:, :k], x[:, :k]).square() / (2 * bandwidth**2)).softmax(-1)
        # the noise-free part of a prediction, signs of the slope averaged out: its error in each direction
        bias = ((weights @ x - q) * slope).square().sum(-1).mean()
        own = weights.square().sum(-1).mean()
        errors.append(float(bias + NOISE * (k / TOTAL * own + (1 - k / TOTAL) / samples)))
    place = int(np.argmin(errors))
    if 0 < place < LATENT - 1:  # a parabola through the lowest three
        left, middle, right = errors[place - 1 : place + 2]
        return place + 1 + (left - right) / (2 * (left - 2 * middle + right))
    return place + 1.0


def slopes(sizes: list[int], seeds: int, *, scaled: bool) -> tuple[list[list[float]], list[float]]:
    """Best widths by seed and size, and the slope of each seed against log n."""
    widths = [[best_widths(n, 1000 * seed + 1, scaled=scaled) for n in sizes] for seed in range(seeds)]
    return widths, [float(stats.linregress(np.log(sizes), row).slope) for row in widths]


def trained_loss(text: torch.Tensor, validation: torch.Tensor, heads: int, seed: int, steps: int) -> tuple[float, GPT]:
    model = train(text, steps, seed, heads=heads, width=64, layers=1)
    return validation_loss(model, validation), model


def in_trained_models(sizes: list[int], seeds: int, steps: int) -> list[dict]:
    """For each amount of text and seed: the loss at each head width, and what two rules would have chosen."""
    train, validation = read_standard_library()
    found = []
    for n in sizes:
        for seed in range(seeds):
            trained = {width: trained_loss(train[:n], validation, 64 // width, seed, steps) for width in WIDTHS}
            losses = {width: loss for width, (loss, _) in trained.items()}
            layer = recorded_gpt(trained[16][1], 8)[0]
            samples, visible = effective_samples(layer)
            ranking = rank_allocations(
                64,
                visible,
                effective_samples=samples.clamp_max(visible).tolist(),
                head_dim=16,
                spectrum=spectrum(layer).tolist(),
                multiple_of=4,
            )
            found.append(
                {
                    "n": n,
                    "seed": seed,
                    "losses": losses,
                    "model": ranking.choices[0].head_dim,
                    "conclusive": ranking.is_conclusive,
                }
            )
    return found


def is_hit(losses: dict[int, float], width: int) -> bool:
    return losses[width] <= (1 + NEAR) * min(losses.values())


def run(size: Size) -> Claim:
    if size == "small":
        sizes, seeds, texts, repeats, steps = [2**p for p in range(6, 12)], 3, [20_000], 1, 3
    else:
        sizes, seeds, texts, repeats, steps = [2**p for p in range(6, 14)], 10, [10_000, 100_000, 1_000_000], 3, 150
    fixed, fixed_slopes = slopes(sizes, seeds, scaled=False)
    scaled, scaled_slopes = slopes(sizes, seeds, scaled=True)
    growth = math.log(overlap_factor(1, BANDWIDTH, 1))
    predicted = [
        allocate_heads(TOTAL, n, bias_decay=DECAY, variance_growth=growth, noise=NOISE).continuous_head_dim
        for n in sizes
    ]
    of = f"{seeds} seeds"
    slope = mean_of("slope of the best width against log n, fixed bandwidth", fixed_slopes, of)
    other = mean_of("the same, bandwidth scaled by the root of the width", scaled_slopes, of)
    means = np.mean(fixed, 0)
    ratio = max(max(m / p, p / m) for m, p in zip(means, predicted))
    models = in_trained_models(texts, repeats, steps)
    by_model = [is_hit(m["losses"], m["model"]) for m in models]
    by_custom = [is_hit(m["losses"], 8) for m in models]  # min(64, d / 8) with d = 64
    by_one = {w: sum(is_hit(m["losses"], w) for m in models) / len(models) for w in WIDTHS}
    best = [(math.log(m["n"]), math.log2(min(m["losses"], key=m["losses"].get))) for m in models]
    of_models = f"{len(models)} trainings"
    numbers = [
        slope,
        other,
        Number("slope of the formula", float(stats.linregress(np.log(sizes), predicted).slope)),
        Number("best width over the formula's, largest factor either way", ratio, of=f"{len(sizes)} sizes"),
        share_of("hits of the measured model in trained models", sum(by_model), len(models), of_models),
        share_of("hits of the convention d_k = min(64, d/8)", sum(by_custom), len(models), of_models),
        *[Number(f"hits of always taking width {w}", share, of=of_models) for w, share in by_one.items()],
        Number("trainings in which the measurements name a width", sum(m["conclusive"] for m in models), of=of_models),
    ]
    if len(texts) > 1:
        trend = stats.spearmanr(*zip(*best))
        numbers.append(
            Number(
                "rank correlation of the best width with log n, trained models",
                float(np.nan_to_num(trend.statistic)),
                of=f"{of_models}, p = {trend.pvalue:.2f}",
            )
        )
    trained = "open"
    if len(texts) > 1 and trend.pvalue < 0.05:
        trained = "holds" if trend.statistic > 0 else "fails"
    difference = mean_of(
        "hits of the measured model less those of the convention",
        [a - b for a, b in zip(by_model, by_custom)],
        of_models,
    )
    numbers.append(difference)
    holds = slope.low > 0 and ratio < 2
    half = numbers[2].value / 2
    usual = "holds" if other.low > half else "fails" if other.high < half else "open"
    chooses = "open"
    if difference.low is not None:
        chooses = "holds" if difference.low > 0 else "fails" if difference.high < 0 else "open"

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for values, label in ((fixed, "fixed bandwidth"), (scaled, "bandwidth scaled with the width")):
        left.errorbar(sizes, np.mean(values, 0), np.std(values, 0), fmt="o-", capsize=3, label=label)
    left.plot(sizes, predicted, "--", color="grey", label="formula")
    left.set(xlabel="n", ylabel="best head width", xscale="log", title="simulated")
    left.legend(fontsize=8)
    for n in texts:
        losses = np.array([[m["losses"][w] for w in WIDTHS] for m in models if m["n"] == n])
        right.plot(WIDTHS, losses.mean(0) / losses.mean(0).min(), "o-", label=f"{n:,} bytes of text")
    right.axhline(1 + NEAR, color="grey", linestyle="--", linewidth=1)
    right.set(xlabel="head width (64 / heads)", ylabel="loss over the smallest", title="trained models")
    right.set_xscale("log", base=2)
    right.legend(fontsize=8)
    return Claim(
        name="scaling_law",
        title="The best head width grows with log n, in one regime",
        words=[
            "The abstract: the best head width grows with the logarithm of the training set, the number of heads "
            "nearly linearly with the width $D$. The simulation has a target in twelve directions of falling "
            "relevance, and a head of width $k$ sees the first $k$ of them. Bias and variance of its kernel average "
            "are simulated, and $H = D / k$ orthogonal heads share the variance down to the floor of $1/n$. With a "
            "kernel of fixed "
            "bandwidth, the variance grows exponentially in $k$. With the $1/\\sqrt{d_k}$ of attention and queries "
            "and keys of unit variance, the squared bandwidth grows with $k$ and the variance hardly does.",
            "Then one-layer decoders of width 64 are trained on 10 thousand to a million bytes of Python source, "
            "with 16 heads of width 4 up to one head of width 64. A rule hits if the loss of the width that it names "
            f"is within {NEAR:.0%} of the best of the five. Two rules are compared out of sample: `rank_allocations` "
            "from readings of the model with four heads (its best width, even where the measurements single out none), "
            "and the convention $d_k = 64$, or $d/8$ in narrow models, which is 8 here.",
        ],
        parts=[
            Part(
                "the best head width grows with the logarithm of n",
                '"holds if" if the slope lies above 0 with its interval at a fixed bandwidth, and the formula is '
                "within a factor of 2 at every n",
                "holds if" if holds else "fails",
                f"If the kernel has a fixed bandwidth and heads suffice alone: slope {slope.value:.2f} "
                f"({slope.low:.2f} to {slope.high:.2f}) per unit of log n, within a factor {ratio:.2f} of the formula.",
            ),
            Part(
                "it does so with the usual scaling by the root of the width",
                "holds if that slope is above half the formula's, interval included; fails if below, interval "
                "included; else open",
                usual,
                f"slope {other.value:.2f} ({other.low:.2f} to {other.high:.2f}), formula {numbers[2].value:.2f}",
            ),
            Part(
                "the best width of trained models grows with the amount of text",
                "holds or fails with the sign of the rank correlation if its p-value is below 0.05, else open",
                trained,
                f"{len(models)} trainings, rank correlation in the table" if len(texts) > 1 else "one amount of text",
            ),
            Part(
                "the model chooses better than the convention",
                "holds if it hits more often, with an interval above 0; fails if less often; else open",
                chooses,
                f"{sum(by_model)} of {len(models)} hits against {sum(by_custom)}",
            ),
        ],
        numbers=numbers,
        seeds=f"1, 1001, ... (simulation), 0 to {repeats - 1} (trainings)",
        left="Widths and amounts of text at which people train; deeper models; the linear growth of H with D.",
        caption="Left: best head width against n. Right: loss of trained models against head width",
        figure=figure,
    )
