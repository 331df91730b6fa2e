"""Claim 8: merging key heads by a closed form, which numbers predict its error, and whether HDI does."""

from __future__ import annotations

from itertools import combinations

import matplotlib.pyplot as plt
import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor

from examples.theory.claim import Claim, Number, Part, Size
from examples.theory.intervals import mean_of
from examples.theory.models import NO_ENCODER, Recorded, recorded_encoder, recorded_gpt, trained_gpt
from examples.theory.readings import weights_of
from hdi_callback.core import circuit_similarity, head_diversity

STRONG = 0.5  # a rank correlation from which on one number is said to predict another


def square_root(gram: Tensor) -> tuple[Tensor, Tensor]:
    """The symmetric root of a Gram matrix, and its inverse."""
    values, vectors = torch.linalg.eigh(gram)
    root = values.clamp_min(1e-12 * float(values[-1])).sqrt()
    return (vectors * root) @ vectors.mT, (vectors / root) @ vectors.mT


def merge(keys: Tensor, queries: Tensor) -> tuple[Tensor, float]:
    """Merge two key heads into one of the same width, with the smallest error of both heads' scores.

    The keys of both heads, weighed by the roots of their queries' Gram matrices, are one matrix of width 2 d_k; its
    best approximation of rank d_k is its singular value decomposition (KQ-SVD, Lesens et al. 2025).

    Args:
        keys: (2, tokens, d_k), centred: what all keys share moves all scores of a query alike, and no attention.
        queries: (2, tokens, d_k).

    Returns:
        The map (2 d_k, 2 d_k) of both heads' keys to their stand-ins, which pass through d_k numbers, and the share of
        energy in the tail: the relative squared error on these tokens.
    """
    roots = [square_root(q.mT @ q) for q in queries]
    L = torch.block_diag(*(root for root, _ in roots))
    inverse = torch.block_diag(*(inverse for _, inverse in roots))
    joined = torch.cat(list(keys), -1)
    values, vectors = torch.linalg.eigh(L @ (joined.mT @ joined) @ L)
    k = keys.shape[-1]
    top = vectors[:, k:]  # eigenvalues rise
    return L @ top @ top.mT @ inverse, float(values[:k].clamp_min(0).sum() / values.sum())


def pooled(k: int) -> Tensor:
    """The map that gives both heads the mean of their keys."""
    eye = torch.eye(k, dtype=torch.float64)
    return torch.cat([torch.cat([eye, eye], 1)] * 2) / 2


def score_error(keys: Tensor, queries: Tensor, mapped: Tensor) -> float:
    """Squared error of both heads' scores over their squared size, over all pairs of tokens."""
    away = torch.cat(list(keys), -1) @ mapped
    k = keys.shape[-1]
    wrong = total = 0.0
    for h in range(2):
        gram = queries[h].mT @ queries[h]
        gap = keys[h] - away[:, h * k : (h + 1) * k]
        wrong += float(((gap.mT @ gap) * gram).sum())
        total += float(((keys[h].mT @ keys[h]) * gram).sum())
    return wrong / total


def pairs_of(layer: Recorded) -> list[dict[str, float]]:
    """Every pair of heads: errors on held-out sequences, and the predictors."""
    half = layer.inputs.shape[0] // 2
    q, k = (layer.features(role).transpose(0, 1) for role in (layer.query, layer.key))  # (H, sequences, n, d_k)
    halves = [x[:, :half].flatten(1, 2) for x in (q, k)]
    held = [x[:, half:].flatten(1, 2) for x in (q, k)]
    centre = halves[1].mean(1, keepdim=True)
    diversity = head_diversity(weights_of(layer, "key"))
    circuits = circuit_similarity(weights_of(layer, "query"), weights_of(layer, "key")).cosine
    found = []
    for pair in combinations(range(layer.heads), 2):
        index = list(pair)
        mapped, tail = merge((halves[1] - centre)[index], halves[0][index])
        keys = (held[1] - centre)[index]
        found.append(
            {
                "closed form": score_error(keys, held[0][index], mapped),
                "mean pooling": score_error(keys, held[0][index], pooled(keys.shape[-1])),
                "tail energy": tail,
                "1 - overlap": 1 - float(diversity.subspace.overlap[pair]),
                "1 - energy overlap": 1 - float(diversity.energy.overlap[pair]),
                "1 - circuit cosine": 1 - float(circuits[pair]),
            }
        )
    return found


def run(size: Size) -> Claim:
    layers = recorded_encoder(32) if size == "full" else []
    of_encoder = bool(layers)
    if not layers:
        layers = recorded_gpt(trained_gpt(30 if size == "small" else 400, heads=8), 4 if size == "small" else 32)
    by_layer = [pairs_of(layer) for layer in layers]
    everything = [pair for pairs in by_layer for pair in pairs]
    of = f"{len(layers)} layers, {len(everything)} pairs"

    def per_layer(error: str, known: str) -> list[float]:
        return [float(spearmanr([p[error] for p in pairs], [p[known] for p in pairs]).statistic) for pairs in by_layer]

    beaten = np.mean([p["closed form"] < p["mean pooling"] for p in everything])
    numbers = [
        mean_of(
            "relative error of scores, closed form", [np.mean([p["closed form"] for p in x]) for x in by_layer], of
        ),
        mean_of(
            "relative error of scores, mean pooling", [np.mean([p["mean pooling"] for p in x]) for x in by_layer], of
        ),
        Number("pairs in which the closed form is better", float(beaten), of=of),
    ]
    names = ("tail energy", "1 - overlap", "1 - energy overlap", "1 - circuit cosine")
    correlations = {
        name: mean_of(f"rank correlation of its error with {name}", per_layer("closed form", name), of)
        for name in names
    }
    numbers += correlations.values()
    numbers += [
        mean_of(f"rank correlation of mean pooling's error with {name}", per_layer("mean pooling", name), of)
        for name in names[1:]
    ]

    def verdict(number: Number) -> str:
        if number.low is None:
            return "open"
        return "holds" if number.low > STRONG else "fails" if number.high < STRONG else "open"

    def why(number: Number) -> str:
        interval = "" if number.low is None else f" ({number.low:+.2f} to {number.high:+.2f})"
        return f"rank correlation {number.value:+.2f}{interval}, mean over layers"

    rule = (
        f"holds if the rank correlation within layers is above {STRONG}, interval included; fails if below; else open"
    )
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained", sharey=True)
    for axis, name in zip(axes, ("tail energy", "1 - overlap")):
        for layer, pairs in zip(layers, by_layer):
            axis.scatter([p[name] for p in pairs], [p["closed form"] for p in pairs], s=9, label=layer.name)
        axis.set(xlabel=f"{name} of a pair", yscale="log")
    axes[0].set(ylabel="error of the merged pair, held out", xscale="log")
    axes[1].legend(fontsize=6)
    return Claim(
        name="merging_key_heads",
        title="Which key heads may be merged",
        words=[
            "Models are converted to fewer key heads to save memory, often by taking the mean of two heads' keys. "
            "There is a closed form for the best merging: both heads' scores, weighted by the size of their queries, "
            "form one matrix of width $2 d_k$, and its best approximation of width $d_k$ is its singular value "
            "decomposition (KQ-SVD). Its relative error on the data that it was made from is the *tail energy*, the "
            "share of squared singular values that is dropped.",
            "Each pair of heads of each layer is merged from half of the sequences, and the error of its scores is "
            "measured on the other half. The question is whether a number that is known beforehand predicts which "
            "pairs lose least. "
            "The overlap of HDI uses weights alone; the tail energy uses the queries and keys of the data.",
        ],
        parts=[
            Part(
                "the overlap of HDI predicts which heads may be merged",
                rule,
                verdict(correlations["1 - overlap"]),
                why(correlations["1 - overlap"]),
            ),
            Part(
                "the tail energy predicts it",
                rule,
                verdict(correlations["tail energy"]),
                why(correlations["tail energy"]),
            ),
            Part(
                "the cosine of the circuits predicts it",
                rule,
                verdict(correlations["1 - circuit cosine"]),
                why(correlations["1 - circuit cosine"]),
            ),
            Part(
                "the closed form is better than mean pooling",
                "holds if for every pair, on sequences that it was not made from; fails if for under half",
                "holds" if beaten == 1 else "fails" if beaten < 0.5 else "open",
                f"for {beaten:.0%} of pairs; error {numbers[0].value:.3f} against {numbers[1].value:.3f}",
            ),
        ],
        numbers=numbers,
        seeds="none for the encoder, 0 and 1 for the small GPT" if of_encoder else "0 and 1",
        left="What merging costs in loss, and after further training; values; groups of more than two heads."
        + ("" if size == "small" or of_encoder else f" {NO_ENCODER} The layers are those of a small GPT."),
        caption="Error of merging a pair of key heads, against numbers that are known beforehand",
        figure=figure,
    )
