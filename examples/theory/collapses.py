"""Claim 7: rank collapse, entropy collapse, and heads that only the output projection distinguishes."""

from __future__ import annotations

import math
from collections.abc import Callable

import matplotlib.pyplot as plt
import numpy as np
import torch
from scipy import stats
from torch import nn
from torch.nn import functional as F

from examples.theory.claim import Claim, Number, Part, Size
from examples.theory.models import LENGTH, batches, recorded_gpt
from examples.theory.readings import readings
from examples.train_gpt import GPT, read_standard_library

LAYER = 1  # of two
# Which reading is meant to detect which collapse, and in which direction it moves.
NAMED = {
    "rank collapse": ("token_rank", -1),
    "entropy collapse": ("attention_entropy", -1),
    "same heads": ("head_output_overlap", 1),
}


def collapse_rank(model: GPT, share: float) -> None:
    """Shrink the inputs of the layer towards one direction, by the gain of its norm in all but one basis direction."""
    norm = model.blocks[LAYER].norm_attention
    kept = torch.full_like(norm.weight, 1 - share)
    kept[0] = 1
    norm.weight.copy_(norm.weight * kept)
    norm.bias.copy_(norm.bias * kept)


def collapse_entropy(model: GPT, share: float) -> None:
    """Sharpen all heads: scale their queries by up to thirty."""
    model.blocks[LAYER].attention.q_proj.weight.mul_(1 + 29 * share)


def same_heads(model: GPT, share: float) -> None:
    """Make heads equal before the output projection, which differs: Q, K and V become those of head 0."""
    attention = model.blocks[LAYER].attention
    for linear in (attention.q_proj, attention.k_proj, attention.v_proj):
        heads = linear.weight.unflatten(0, (attention.num_heads, -1))
        heads.copy_((1 - share) * heads + share * heads[:1])


FAULTS: dict[str, Callable[[GPT, float], None]] = {
    "rank collapse": collapse_rank,
    "entropy collapse": collapse_entropy,
    "same heads": same_heads,
}


def train(seed: int, steps: int, fault: str | None, model: GPT | None = None) -> tuple[GPT, list[dict[str, float]]]:
    """Train; with a fault, apply a growing share of it after each of the steps. Return the readings."""
    text, _ = read_standard_library()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        new = GPT(layers=2, heads=4, width=64, length=LENGTH)
    if model is not None:
        new.load_state_dict(model.state_dict())
    optimizer = torch.optim.AdamW(new.parameters(), lr=2e-3 if model is None else 5e-4, weight_decay=0.1)
    found = []
    for step, x in zip(range(steps), batches(text, seed + (0 if model is None else 1000), 16)):
        F.cross_entropy(new(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(new.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if fault is not None and step >= steps // 4 and step % max(1, steps // 12) == 0:
            with torch.no_grad():
                FAULTS[fault](new, (step / steps) ** 2)
        if model is not None and step % max(1, steps // 12) == 0:
            found.append(readings(recorded_gpt(new, 8)[LAYER]))
    if model is not None:
        found.append(readings(recorded_gpt(new, 8)[LAYER]))
    return new, found


def run(size: Size) -> Claim:
    seeds, before, after = (2, 10, 12) if size == "small" else (5, 150, 48)
    runs: dict[str, list[list[dict[str, float]]]] = {"healthy": [], **{fault: [] for fault in FAULTS}}
    for seed in range(seeds):
        model, _ = train(seed, before, None)
        for kind in runs:
            runs[kind].append(train(seed, after, None if kind == "healthy" else kind, model)[1])
    names = list(runs["healthy"][0][0])
    ends = {kind: {name: [run[-1][name] for run in of] for name in names} for kind, of in runs.items()}
    numbers, detected = [], {}
    for name in names:
        healthy = np.array(ends["healthy"][name])
        half = stats.t.ppf(0.975, seeds - 1) * healthy.std(ddof=1) * math.sqrt(1 + 1 / seeds)  # of one further run
        low, high = healthy.mean() - half, healthy.mean() + half
        numbers.append(
            Number(f"{name}, healthy", float(healthy.mean()), low, high, f"{seeds} seeds; interval of a further run")
        )
        for fault in FAULTS:
            values = ends[fault][name]
            outside = sum(not low <= value <= high for value in values)
            detected[fault, name] = outside / seeds
            numbers.append(
                Number(
                    f"{name}, {fault}",
                    float(np.mean(values)),
                    float(min(values)),
                    float(max(values)),
                    f"{seeds} seeds; range",
                )
            )

    def caught(fault: str) -> bool:
        name, sign = NAMED[fault]
        middle = np.mean(ends["healthy"][name])
        return detected[fault, name] == 1 and all(sign * (value - middle) > 0 for value in ends[fault][name])

    table = ["| reading | " + " | ".join(FAULTS) + " |", "|---" * (1 + len(FAULTS)) + "|"]
    table += [
        f"| `{name}` | " + " | ".join(f"{detected[fault, name]:.0%}" for fault in FAULTS) + " |" for name in names
    ]
    blind = {fault: [name for name in names if detected[fault, name] < 0.5] for fault in FAULTS}
    hdi = {fault: detected[fault, "hdi"] for fault in FAULTS}
    behind = detected["same heads", "head_correlation"]
    correlation = "holds" if behind > 0.9 else "fails" if behind < 0.5 else "open"

    shown = ["hdi", "head_correlation", "head_output_overlap", "attention_entropy", "attention_alike", "token_rank"]
    figure, axes = plt.subplots(2, 3, figsize=(9, 4.8), layout="constrained", sharex=True)
    for axis, name in zip(axes.flat, shown):
        for kind, of in runs.items():
            axis.plot(np.mean([[point[name] for point in run] for run in of], 0), label=kind)
        axis.set_title(name, fontsize=9)
    axes[0, 0].legend(fontsize=7)
    figure.supxlabel("readings; the fault grows from the fourth on")
    return Claim(
        name="collapses",
        title="Three collapses, and which reading detects which",
        words=[
            "Heads fail in ways that are nearly independent of each other. *Rank collapse*: the input tokens of a "
            "layer become alike, so that no head can distinguish them (Dong, Cordonnier and Loukas 2021). "
            "*Entropy collapse*: scores grow until each query looks at one token (Zhai et al. 2023). *Same heads*: "
            "heads compute the same, while their output projections differ, so that their contributions to the output "
            "are not correlated. Each is induced alone, in small decoders that continue to train; a growing share of "
            "the fault is applied after some of the steps.",
            "A reading detects a collapse in a run if it ends outside the 95 % interval of one further healthy run, "
            "over seeds.",
        ],
        parts=[
            Part(
                "each collapse is detected by the reading that is meant for it",
                "holds if `token_rank` falls in every run of rank collapse, `attention_entropy` in every one of "
                "entropy collapse, and `head_output_overlap` rises in every one of same heads, all outside the "
                "interval of healthy runs",
                "holds" if all(caught(fault) for fault in FAULTS) else "fails",
                ", ".join(f"{fault}: {detected[fault, NAMED[fault][0]]:.0%} of runs" for fault in FAULTS),
            ),
            Part(
                "the index of the key weights detects all three",
                "holds if it does in over 90 % of the runs of each; fails if in under half of the runs of any; else "
                "open",
                "holds" if min(hdi.values()) > 0.9 else "fails" if min(hdi.values()) < 0.5 else "open",
                ", ".join(f"{fault}: {share:.0%} of runs" for fault, share in hdi.items()),
            ),
            Part(
                "the correlation of heads' contributions detects heads that are the same",
                "holds if in over 90 % of the runs; fails if in under half; else open",
                correlation,
                f"{behind:.0%} of runs",
            ),
        ],
        numbers=numbers,
        tables={"Share of runs that end outside the interval of healthy ones": "\n".join(table)},
        seeds=f"0 to {seeds - 1}",
        left="Spontaneous collapses, in large models and over long trainings: these were induced. Not detected here: "
        + "; ".join(f"for {fault}, {', '.join(f'`{name}`' for name in blind[fault]) or 'none'}" for fault in FAULTS)
        + ".",
        caption="Six readings of the layer, mean over seeds, in healthy runs and under each fault",
        figure=figure,
    )
