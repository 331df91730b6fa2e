"""Claim 7: the best number of heads and head width under D = H d_k, from constants that are measured."""

from __future__ import annotations

import math

import matplotlib.pyplot as plt
import numpy as np
from scipy.optimize import minimize_scalar

from examples.theory.allocation import AllocationRanking, allocate_heads, rank_allocations
from examples.theory.claim import Claim, Number, Part, Size
from examples.theory.intervals import share_of
from examples.theory.models import NO_ENCODER, recorded_encoder, recorded_gpt, trained_gpt
from examples.theory.readings import effective_samples, spectrum


def closed_form_gap(draws: int) -> tuple[float, int]:
    """Largest excess error of the closed form, and how often the whole answer is not the best divisor."""
    draw, worst, wrong = np.random.default_rng(0), 0.0, 0
    for _ in range(draws):
        D = int(draw.choice([256, 384, 768, 1024, 4096]))
        g, L = draw.uniform(0.02, 0.3, 2)
        n = float(10 ** draw.uniform(3, 9))

        def error(width: float, D=D, g=g, L=L, n=n) -> float:
            return math.exp(-g * width) + (width / D * math.exp(min(L * width, 700)) + 1 - width / D) / n

        answer = allocate_heads(D, int(n), bias_decay=g, variance_growth=L)
        best = minimize_scalar(error, bounds=(1e-3, D), method="bounded", options={"xatol": 1e-6})
        inside = min(max(answer.continuous_head_dim, 1e-3), D)
        worst = max(worst, error(inside) / best.fun - 1)
        wrong += answer.head_dim != min((w for w in range(1, D + 1) if D % w == 0), key=error)
    return worst, wrong


def measured(layer) -> AllocationRanking:
    """Rank the head widths of one layer by its measured constants."""
    samples, visible = effective_samples(layer)
    width = layer.key.out_features
    return rank_allocations(
        width,
        visible,
        effective_samples=samples.clamp_max(visible).tolist(),
        head_dim=width // layer.heads,
        spectrum=spectrum(layer).tolist(),
    )


def run(size: Size) -> Claim:
    draws, sequences, steps = (20, 4, 30) if size == "small" else (300, 32, 400)
    worst, wrong = closed_form_gap(draws)
    layers = recorded_gpt(trained_gpt(steps), sequences)
    found_encoder = recorded_encoder(sequences) if size == "full" else []
    rankings = [(layer, measured(layer)) for layer in layers + found_encoder]
    conclusive = sum(ranking.is_conclusive for _, ranking in rankings)
    rows = [
        f"| {layer.name} | {layer.heads} x {layer.key.out_features // layer.heads} | {r.choices[0].head_dim} | "
        f"{r.span[0]} to {r.span[1]} | {', '.join(map(str, r.near_best))} | {r.variance_growth:.3f} | "
        f"{r.reason or 'conclusive'} |"
        for layer, r in rankings
    ]
    numbers = [
        Number("closed form over the numeric minimum, largest excess error", worst, of=f"{draws} draws of constants"),
        Number("draws in which the whole answer is not the best divisor", wrong, of=f"{draws} draws"),
        share_of("layers whose constants name a head width", conclusive, len(rankings), f"{len(rankings)} layers"),
    ]
    share = numbers[-1]
    figure, axis = plt.subplots(figsize=(6.4, 4), layout="constrained")
    for layer, ranking in rankings:
        curve = ranking.curve
        axis.plot([c.head_dim for c in curve], [1 + c.excess for c in curve], "o-", markersize=3, label=layer.name)
    axis.axhline(1.1, color="grey", linestyle="--", linewidth=1)
    axis.set(
        xlabel="head width", ylabel="modelled error over the smallest", xscale="log", yscale="log", ylim=(0.95, 30)
    )
    axis.set_xscale("log", base=2)
    axis.legend(fontsize=7)
    return Claim(
        name="best_allocation",
        title="The best number of heads, from measured constants",
        words=[
            "With a fixed total width $D = H d_k$, narrow heads miss part of the input (bias) and wide ones "
            'average over few tokens (variance). The abstract solves for the pair with the smallest error "from '
            'data distribution and regression smoothness". Our model of it has a closed form; see [the '
            "formulas](../mathematics.md#allocation-of-width-to-heads). First the closed form is compared with a "
            "numeric minimum. Then its constants are measured in trained layers: the effective sample size of each "
            "head, and the spectrum of the inputs of the layer. `rank_allocations` ranks the divisors of $D$, and "
            "says why where the measurements single out none.",
        ],
        parts=[
            Part(
                "the pair with the smallest error can be solved for",
                '"holds if" if the closed form is within 1 % of the numeric minimum and the whole answer is always '
                "the best divisor",
                "holds if" if worst < 0.01 and wrong == 0 else "fails",
                f"If the model's constants are known and its regime fits: within {worst:.1e} of the numeric minimum.",
            ),
            Part(
                "constants measured in a trained layer name the pair",
                "holds if over 90 % of layers are conclusive, fails if under 10 %, else open",
                "holds" if share.value > 0.9 else "fails" if share.value < 0.1 else "open",
                f"{conclusive} of {len(rankings)} layers are conclusive; the table has the reason for the others",
            ),
        ],
        numbers=numbers,
        tables={
            "Layers (the curve's best width, the best widths under all assumptions, and those within 10 % of the "
            "best)": "\n".join(
                [
                    "| layer | heads | best width | range | within 10 % | growth L | conclusive, or why not |",
                    "|---|---|---|---|---|---|---|",
                    *rows,
                ]
            )
        },
        seeds="0 (constants, the GPT), 1 (its text)",
        left="Whether the width that is named trains best is the subject of the next claim; noise and smoothness "
        "are assumed, as no reading measures them." + ("" if size == "small" or found_encoder else f" {NO_ENCODER}"),
        caption="Modelled error against head width, for the layers of two trained models; dashed: 10 % above the best",
        figure=figure,
    )
