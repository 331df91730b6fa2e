"""Claim 9: norms and the rank of tokens, residuals against rank collapse, and directions without effect."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from examples.theory.claim import Claim, Number, Part, Size
from examples.theory.intervals import mean_of
from examples.theory.models import NO_ENCODER, recorded_encoder, recorded_gpt, trained_gpt
from examples.theory.readings import head_outputs, token_rank, weights_of

EXACT = 1e-10


def affine_rank(x: Tensor) -> int:
    """Dimension of the smallest flat through all tokens."""
    return int(torch.linalg.matrix_rank(x - x.mean(0), rtol=1e-9))


def centred_rank(x: Tensor) -> int:
    """Rank of the tokens, each less its own mean over features, as in a layer norm."""
    return int(torch.linalg.matrix_rank(x - x.mean(-1, keepdim=True), rtol=1e-9))


def ranks_through_norm(draws: int) -> tuple[int, int, int]:
    """Count changes of rank and affine rank of random flat token sets by a layer norm; largest change of the latter."""
    draw = torch.Generator().manual_seed(0)
    changed = changed_affine = most = 0
    for _ in range(draws):
        n, d = 20, 12
        r = int(torch.randint(1, 8, (1,), generator=draw))
        offset = torch.randn(d, generator=draw, dtype=torch.float64)
        x = torch.randn(n, r, generator=draw, dtype=torch.float64) @ torch.randn(
            r, d, generator=draw, dtype=torch.float64
        )
        x = x + offset * torch.randint(2, (1,), generator=draw)
        y = F.layer_norm(x, (d,), eps=0.0)
        changed += centred_rank(x) != int(torch.linalg.matrix_rank(y, rtol=1e-9))
        moved = abs(affine_rank(x - x.mean(-1, keepdim=True)) - affine_rank(y))
        changed_affine += moved > 0
        most = max(most, moved)
    return changed, changed_affine, most


def rank_over_depth(depth: int, seed: int, *, residual: bool) -> list[float]:
    """Effective rank of the tokens after each layer of untrained attention, with layer norms in front."""
    draw = torch.Generator().manual_seed(seed)
    H, d, n = 4, 32, 24
    x = torch.randn(n, d, generator=draw, dtype=torch.float64)
    ranks = [token_rank(x)]
    for _ in range(depth):
        y = F.layer_norm(x, (d,))
        q, k, v = (torch.randn(H, d, d // H, generator=draw, dtype=torch.float64) / d**0.5 for _ in range(3))
        out = torch.randn(d, d, generator=draw, dtype=torch.float64) / d**0.5
        heads = ((y @ q) @ (y @ k).mT / (d // H) ** 0.5).softmax(-1) @ (y @ v)  # (H, n, d_v)
        added = heads.transpose(0, 1).flatten(1) @ out
        x = x + added if residual else added
        ranks.append(token_rank(x))
    return ranks


def hidden_directions(output: Tensor, tokens: int) -> int:
    """Number of directions of the heads' outputs at this many tokens that the projection (H, d_v, d) maps to zero."""
    stacked = output.flatten(0, 1)
    return tokens * (stacked.shape[0] - int(torch.linalg.matrix_rank(stacked, rtol=1e-6)))


def hidden_by_jacobian(output: Tensor, tokens: int) -> int:
    """The same, from the Jacobian of the map itself."""
    H, d_v, _ = output.shape
    jacobian = torch.autograd.functional.jacobian(
        lambda o: torch.einsum("thv,hvd->td", o, output), torch.zeros(tokens, H, d_v, dtype=torch.float64)
    ).reshape(-1, tokens * H * d_v)
    return jacobian.shape[1] - int(torch.linalg.matrix_rank(jacobian, rtol=1e-9))


def mean_of_heads(heads: int, width: int) -> Tensor:
    """The output projection that averages the heads."""
    return torch.eye(width, dtype=torch.float64).expand(heads, width, width) / heads


def movement_behind(output: Tensor, seed: int) -> tuple[float, float]:
    """Size of a movement of heads' outputs along a hidden direction, and of the change of the layer's output."""
    draw = torch.Generator().manual_seed(seed)
    stacked = output.flatten(0, 1)
    null = torch.linalg.svd(stacked.mT).Vh[int(torch.linalg.matrix_rank(stacked, rtol=1e-6)) :]
    moved = torch.randn(7, len(null), generator=draw, dtype=torch.float64) @ null
    return float(moved.norm()), float((moved @ stacked).norm())


def run(size: Size) -> Claim:
    draws, seeds, depth = (40, 3, 10) if size == "small" else (1000, 20, 24)
    changed, changed_affine, most = ranks_through_norm(draws)
    plain = [rank_over_depth(depth, seed, residual=False) for seed in range(seeds)]
    added = [rank_over_depth(depth, seed, residual=True) for seed in range(seeds)]
    of = f"{seeds} seeds"
    without = mean_of(f"effective rank of tokens after {depth} layers, without residuals", [r[-1] for r in plain], of)
    with_them = mean_of("with residuals", [r[-1] for r in added], of)
    start = mean_of("at the start", [r[0] for r in added], of)

    gaps = []
    for H, d_k, n in ((2, 3, 2), (4, 2, 3), (3, 4, 2)):
        counted = hidden_by_jacobian(mean_of_heads(H, d_k), n)
        gaps += [counted - n * (H - 1) * d_k, counted - hidden_directions(mean_of_heads(H, d_k), n)]
    moved, shows = movement_behind(mean_of_heads(4, 8), 0)
    layers = recorded_gpt(trained_gpt(30 if size == "small" else 400), 2)
    layers += recorded_encoder(2) if size == "full" else []
    rows = []
    in_trained = []
    for layer in layers:
        output = weights_of(layer, "output")
        n = layer.inputs.shape[1]
        H, width, _ = output.shape
        in_trained.append(hidden_directions(output, n))
        values = torch.linalg.svdvals(output.flatten(0, 1))
        weak = n * int((values < 0.1 * values[0]).sum())
        outputs = head_outputs(layer)
        rows.append(
            f"| {layer.name} | {outputs.shape[1]} x {width} | {n * (H - 1) * width:,} | {in_trained[-1]:,} | {weak:,} |"
        )
    numbers = [
        Number("token sets whose rank a layer norm changes", changed, of=f"{draws} draws"),
        Number("token sets whose affine rank it changes", changed_affine, of=f"{draws} draws"),
        Number("by how much at most", most, of=f"{draws} draws"),
        start,
        without,
        with_them,
        Number(
            "hidden directions, counted from the Jacobian, less n (H - 1) d_k",
            max(map(abs, gaps)),
            of="3 layers that average heads",
        ),
        Number("norm of a movement along hidden directions", moved),
        Number("how much the layer's output moves", shows),
        Number("hidden directions of trained layers, largest", max(in_trained), of=f"{len(layers)} layers"),
    ]
    hides = "holds" if min(in_trained) > 0 else "fails" if max(in_trained) == 0 else "open"
    obstructs = "fails" if with_them.high < without.low else "open"
    if with_them.low > max(without.high, start.value / 2):
        obstructs = "holds"
    figure, axis = plt.subplots(figsize=(6, 3.8), layout="constrained")
    for ranks, label in ((plain, "attention alone"), (added, "with residuals")):
        values = np.array(ranks)
        axis.plot(values.mean(0), label=label)
        axis.fill_between(range(values.shape[1]), values.min(0), values.max(0), alpha=0.2)
    axis.set(xlabel="layers", ylabel="effective rank of the tokens", yscale="log")
    axis.legend()
    return Claim(
        name="rank_and_identifiability",
        title="Rank of tokens, and heads that cannot be identified",
        words=[
            "Heads differ only if tokens do. A layer norm subtracts from each token its mean over features and "
            "divides by its spread. So each (centred) token is multiplied by a factor of its own, and the rank of "
            "the tokens does not change. The *affine* rank, the dimension of the smallest flat through all tokens, "
            "is another "
            "matter, as tokens on a line that misses the origin are spread over an arc.",
            "Attention averages tokens, so that a stack of attention layers alone makes all tokens the same (Dong, "
            "Cordonnier and Loukas 2021); a residual connection carries their differences past it. This is tried in "
            "untrained layers with layer norms before them.",
            "After the output projection only a sum of the heads remains. Of the $n H d_k$ numbers that $H$ heads "
            "output at $n$ tokens, a plain mean keeps $n d_k$: in the other $n (H - 1) d_k$ directions heads can be "
            "moved without any effect, so that no data identifies them. In general these are $n (H d_v - "
            "\\operatorname{rank} W_O)$: none, where the output projection is square and of full rank, and many "
            "where heads are averaged.",
        ],
        parts=[
            Part(
                "n (H - 1) d_k directions do not show behind a mean of heads",
                "holds if counting them in the Jacobian gives that number in every case, and moving along them moves "
                f"the output by under {EXACT:g}",
                "holds" if not any(gaps) and shows < EXACT < moved else "fails",
                f"The counts agree; a movement of {moved:.1f} moves the output by {shows:.1e}.",
            ),
            Part(
                "they do not show behind a trained output projection either",
                "holds if every trained layer has them, fails if none has; else open",
                hides,
                f"at most {max(in_trained)} in {len(layers)} layers, whose projections are square",
            ),
            Part(
                "a layer norm keeps the affine rank of the tokens",
                "holds if it does in every draw; fails if not",
                "fails" if changed_affine else "holds",
                f"changes in {changed_affine} of {draws} draws, by {most} at most; the rank itself changes in "
                f"{changed}",
            ),
            Part(
                "residuals obstruct rank collapse",
                "holds if, after all layers, the interval with residuals lies above that without, and above half of "
                "the rank at the start",
                obstructs,
                f"effective rank {start.value:.1f} at the start, {with_them.value:.1f} with residuals, "
                f"{without.value:.1f} without",
            ),
        ],
        numbers=numbers,
        tables={
            "Directions of the heads' outputs at one sequence that do not show": "\n".join(
                [
                    "| layer | heads | if it averaged its heads | hidden | nearly hidden: below a tenth of the "
                    "largest singular value |",
                    "|---|---|---|---|---|",
                    *rows,
                ]
            )
        },
        seeds=f"0 to {seeds - 1}",
        left="Trained networks with their feed-forward layers, in which rank falls for other reasons too."
        + ("" if size == "small" or len(layers) > 2 else f" {NO_ENCODER}"),
        caption="Effective rank of the tokens over untrained layers; mean and range over seeds",
        figure=figure,
    )
