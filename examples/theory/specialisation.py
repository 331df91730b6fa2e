"""Claim 9: does HDI rise in training, and more so with noise, with more heads, with less data?"""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from examples.theory.claim import Claim, Number, Part, Size
from examples.theory.intervals import mean_of, sign_test
from examples.theory.models import LENGTH, batches
from examples.train_gpt import GPT, read_standard_library
from hdi_callback.core import head_diversity

# The ordinary training, and one thing changed at a time.
ORDINARY = {"noise": 0.0, "heads": 4, "text": 1_000_000}
CHANGED = {"with noise": {"noise": 0.5}, "with 8 heads": {"heads": 8}, "with 5,000 bytes": {"text": 5_000}}


def diversity(model: GPT) -> tuple[float, float]:
    """Mean over layers of the index, and of its excess over chance: minus the alignment."""
    layers = [block.attention for block in model.blocks]
    found = [head_diversity(layer.k_proj.weight.detach().unflatten(0, (layer.num_heads, -1))) for layer in layers]
    return float(np.mean([float(d.subspace.index) for d in found])), -float(
        np.mean([float(d.subspace.alignment) for d in found])
    )


def train(
    seed: int, steps: int, *, noise: float, heads: int, text: int, readings: int = 6
) -> list[tuple[float, float]]:
    """Train a decoder; a share of the targets is replaced by random bytes. Return the diversity over the training."""
    train_text, _ = read_standard_library()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GPT(layers=1, heads=heads, width=64, length=LENGTH)
    draw = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    found = [diversity(model)]
    for step, x in zip(range(steps), batches(train_text[:text], seed, 16)):
        y = x[:, 1:]
        random = torch.randint(256, y.shape, generator=draw)
        y = torch.where(torch.rand(y.shape, generator=draw) < noise, random, y)
        F.cross_entropy(model(x[:, :-1]).flatten(0, 1), y.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % max(1, steps // readings) == 0:
            found.append(diversity(model))
    return found


def run(size: Size) -> Claim:
    seeds, steps = (2, 6) if size == "small" else (8, 100)
    kinds = {"ordinary": {}, **CHANGED}
    runs = {
        kind: [train(seed, steps, **{**ORDINARY, **change}) for seed in range(seeds)] for kind, change in kinds.items()
    }
    gains = {kind: [run[-1][1] - run[0][1] for run in of] for kind, of in runs.items()}
    of = f"{seeds} seeds"
    numbers = [mean_of(f"gain of diversity over chance, {kind}", values, of) for kind, values in gains.items()]
    index = [run[-1][0] - run[0][0] for run in runs["ordinary"]]
    numbers.append(mean_of("change of HDI, ordinary", index, of))
    rises = sign_test(index)
    numbers.append(Number("p-value that HDI moves one way, ordinary", rises, of=f"sign test, {of}"))
    parts = []
    rule = "sign test over seeds at 0.05: holds if HDI rises, fails if it falls; else open"
    verdict = "open" if rises >= 0.05 else "holds" if np.median(index) > 0 else "fails"
    parts.append(
        Part(
            "HDI rises in healthy training",
            rule,
            verdict,
            f"HDI rises in {sum(v > 0 for v in index)} of {seeds} trainings, by {np.mean(index):+.4f} on average: "
            f"healthy heads {'drift together' if np.mean(index) < 0 else 'move apart'}.",
        )
    )
    for kind in CHANGED:
        differences = [a - b for a, b in zip(gains[kind], gains["ordinary"])]
        p = sign_test(differences)
        numbers.append(mean_of(f"gain {kind}, less that of the ordinary training", differences, of))
        numbers.append(Number(f"p-value, {kind}", p, of=f"sign test, {of}"))
        verdict = "open" if p >= 0.05 else "holds" if np.median(differences) > 0 else "fails"
        more = sum(v > 0 for v in differences)
        parts.append(
            Part(
                f"diversity gains more {kind}",
                "sign test over pairs of seeds at 0.05: holds if more, fails if less; else open",
                verdict,
                f"more in {more} of {seeds} pairs, p = {p:.3f}",
            )
        )

    figure, axis = plt.subplots(figsize=(6, 3.8), layout="constrained")
    for kind, of_kind in runs.items():
        values = np.array([[point[1] for point in run] for run in of_kind])
        axis.plot(values.mean(0), "o-", markersize=3, label=kind)
        axis.fill_between(range(values.shape[1]), values.min(0), values.max(0), alpha=0.12)
    axis.axhline(0, color="grey", linewidth=1)
    axis.set(xlabel="reading", ylabel="diversity above chance (minus the alignment)")
    axis.legend()
    return Claim(
        name="specialisation",
        title="Do heads specialise in training?",
        words=[
            "The abstract offers its theorem as an explanation of why heads specialise. If training minimised the "
            "error of an ensemble, HDI would rise, and would rise more where averaging gains more: "
            "with noisy targets, with many heads, with little data. One-layer decoders of bytes are trained: "
            "ordinarily (4 heads, a million bytes), with half of the targets replaced by random bytes, with 8 heads, "
            "and with 5,000 bytes. Trainings of one seed begin with the same weights and text where that is "
            "possible, and are compared pair by pair.",
            "As chance depends on the number of heads, what is compared is diversity above chance: minus the "
            "[alignment](../mathematics.md#head-diversity-index), 0 for random heads.",
        ],
        parts=parts,
        numbers=numbers,
        seeds=f"0 to {seeds - 1}",
        left=f"Longer trainings (these have {steps} steps), deeper and larger models, and other ways to measure "
        "specialisation than by key weights.",
        caption="Diversity of the key weights above chance over training; mean and range over seeds",
        figure=figure,
    )
