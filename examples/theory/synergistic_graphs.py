"""Claim 10: heads as graphs with a common sink: do they mix faster, and lose less of a message, where they differ?"""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.theory.claim import Claim, Number, Part, Size
from examples.theory.intervals import mean_of, rank_correlation, share_of, sign_test
from examples.train_gpt import GPT

TOKENS, HEADS, HOPS = 16, 4, 3
SHARPNESS = 3.0  # standard deviation of the scores of the heads that are made by hand
LEVELS = (0.0, 0.25, 0.5, 0.75, 1.0)  # share of a head's scores that is its own
SYMBOLS, COPIED = 16, 10  # the task: so many symbols are drawn, and then written backwards
WIDTH = 32


# --- a head as a graph: token i passes to earlier tokens, and the first one is the sink


def with_sink(rows: Tensor) -> Tensor:
    """Let rows of attention ``(..., n, n)`` to earlier tokens be the steps of a walk that ends at the first token."""
    steps = rows.double().tril(-1)
    steps = steps / steps.sum(-1, keepdim=True).clamp_min(1e-12)
    steps[..., 0, :] = 0
    steps[..., 0, 0] = 1
    return steps


def mixing_time(steps: Tensor) -> Tensor:
    """Steps until three quarters of what began at the worst token are at the sink, between whole steps by a line."""
    at = torch.eye(steps.shape[-1], dtype=steps.dtype).expand_as(steps)
    before = torch.ones(steps.shape[:-2], dtype=steps.dtype)
    time = torch.full_like(before, torch.nan)
    for step in range(1, 4 * steps.shape[-1]):
        at = at @ steps
        missing = 1 - at[..., 0].amin(-1)
        crossed = time.isnan() & (missing <= 0.25)
        part = (before - 0.25) / (before - missing).clamp_min(1e-12)
        time = torch.where(crossed, step - 1 + part, time)
        before = missing
    return time


def fidelity(steps: Tensor) -> Tensor:
    """Return what of each token's message is at the sink after three steps, ``(..., n)``."""
    return torch.linalg.matrix_power(steps, HOPS)[..., 0]


def alike(rows: Tensor) -> float:
    """Mean cosine of the rows of two heads ``(..., H, n, n)``, over all of their queries together."""
    units = F.normalize(rows.movedim(-3, 0).flatten(1), dim=-1)
    first, second = torch.triu_indices(len(units), len(units), 1)
    return float((units @ units.mT)[first, second].mean())


def measured(rows: Tensor) -> dict[str, float]:
    """Compare heads ``(H, n, n)`` with the graph that takes one of them at random at each step."""
    steps = with_sink(rows)
    alone, together = mixing_time(steps), mixing_time(with_sink(steps.mean(0)))
    arrived = fidelity(steps)
    return {
        "diversity": 1 - alike(steps[:, 1:].float()),
        "faster": float(alone.mean() / together),
        # The worst served token, by the head that serves it best, over what a head does for its own worst token.
        "fidelity": float(arrived.amax(0).amin() / arrived.amin(-1).mean().clamp_min(1e-9)),
    }


def by_hand(diversity: float, draw: torch.Generator) -> Tensor:
    """Heads that share a part of their scores, and have the rest of their own."""
    shared = torch.randn(1, TOKENS, TOKENS, generator=draw)
    own = torch.randn(HEADS, TOKENS, TOKENS, generator=draw)
    scores = SHARPNESS * ((1 - diversity) ** 0.5 * shared + diversity**0.5 * own)
    earlier = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril(-1)
    return scores.masked_fill(~earlier, -1e9).softmax(-1)


# --- trained heads: one, or four of a quarter of the width, with as many parameters


def reversal(count: int, draw: torch.Generator) -> Tensor:
    """Symbols, a mark, and the symbols backwards."""
    symbols = torch.randint(1, SYMBOLS, (count, COPIED), generator=draw)
    return torch.cat([symbols, torch.zeros(count, 1, dtype=torch.int64), symbols.flip(1)], 1)


def trained(seed: int, heads: int, steps: int) -> tuple[list[Tensor], float]:
    """Train a decoder to write symbols backwards; return rows of each layer ``(batch, H, n, n)`` and its hits."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GPT(layers=2, heads=heads, width=WIDTH, length=2 * COPIED)
    draw = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        text = reversal(64, draw)
        logits = model(text[:, :-1])[:, COPIED:]
        F.cross_entropy(logits.flatten(0, 1), text[:, COPIED + 1 :].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    text = reversal(64, torch.Generator().manual_seed(10_000 + seed))
    rows: list[Tensor] = []

    def keep(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        q, k = (one(args[0]).unflatten(-1, (heads, -1)).transpose(1, 2) for one in (layer.q_proj, layer.k_proj))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        rows.append(scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf).softmax(-1))

    handles = [block.attention.register_forward_pre_hook(keep) for block in model.blocks]
    with torch.no_grad():
        hits = (model(text[:, :-1])[:, COPIED:].argmax(-1) == text[:, COPIED + 1 :]).float().mean()
    for handle in handles:
        handle.remove()
    return rows, float(hits)


def of_model(layers: list[Tensor]) -> tuple[float, float]:
    """Mixing time of a token's walk over the mean of the heads, and fidelity of the best head, over layers."""
    steps = [with_sink(rows) for rows in layers]
    times = [mixing_time(one.mean(1)).nanmean() for one in steps]
    arrived = [fidelity(one).amax(1).amin(-1).mean() for one in steps]
    return float(np.mean([float(t) for t in times])), float(np.mean([float(a) for a in arrived]))


def run(size: Size) -> Claim:
    draws, seeds, steps = (8, 2, 4) if size == "small" else (60, 8, 400)
    draw = torch.Generator().manual_seed(0)
    made = {level: [measured(by_hand(level, draw)) for _ in range(draws)] for level in LEVELS}
    every = [one for of_level in made.values() for one in of_level]
    of = f"{draws} draws"
    numbers = [mean_of(f"heads' mixing time over the joint one, own share {level:g}",
                       [one["faster"] for one in found], of) for level, found in made.items()]  # fmt: skip
    numbers += [mean_of(f"fidelity of the worst served token over a head's, own share {level:g}",
                        [one["fidelity"] for one in found], of) for level, found in made.items()]  # fmt: skip
    shares = {level: np.mean([one["faster"] > 1 + 1e-9 for one in found]) for level, found in made.items() if level > 0}
    faster = sum(one["faster"] > 1 + 1e-9 for level, found in made.items() if level > 0 for one in found)
    apart = draws * len(shares)
    unequal = "share of draws that mix faster together, heads not equal"
    numbers.append(share_of(unequal, faster, apart, f"{apart} draws"))
    rising = rank_correlation("rank correlation of diversity and faster mixing",
                              [(one["diversity"], one["faster"]) for one in every], f"{len(every)} draws")  # fmt: skip
    kept = rank_correlation("rank correlation of diversity and fidelity",
                            [(one["diversity"], one["fidelity"]) for one in every], f"{len(every)} draws")  # fmt: skip
    numbers += [rising, kept]

    models = {heads: [trained(seed, heads, steps) for seed in range(seeds)] for heads in (1, HEADS)}
    for heads, found in models.items():
        numbers.append(mean_of(f"share of symbols written right, {heads} heads", [hits for _, hits in found],
                               f"{seeds} seeds"))  # fmt: skip
    found = {heads: [of_model(rows) for rows, _ in of_heads] for heads, of_heads in models.items()}
    gains = {
        "mixing time": [one[0] - four[0] for one, four in zip(found[1], found[HEADS])],
        "fidelity": [four[1] - one[1] for one, four in zip(found[1], found[HEADS])],
    }
    parts = [
        Part(
            "heads mix faster together than alone, where they differ",
            "holds if the joint graph is the faster one in at least 95 % of the draws at each own share above 0; "
            "fails if it is slower in half of them at one; else holds if",
            "fails" if min(shares.values()) <= 0.5 else "holds" if min(shares.values()) >= 0.95 else "holds if",
            ", ".join(f"{share:.0%} of the draws at an own share of {level:g}" for level, share in shares.items()),
        ),
        Part(
            "the more they differ, the faster",
            "the interval of the rank correlation: holds if above 0, fails if below; else open",
            _by_sign(rising),
            f"rank correlation {rising.value:.2f}",
        ),
        Part(
            "the more they differ, the more of the worst served token's message arrives",
            "the interval of the rank correlation: holds if above 0, fails if below; else open",
            _by_sign(kept),
            f"rank correlation {kept.value:.2f}",
        ),
    ]
    for what, differences in gains.items():
        p = sign_test(differences)
        numbers.append(mean_of(f"gain of {what} of four trained heads over one", differences, f"{seeds} seeds"))
        numbers.append(Number(f"p-value, {what}", p, of=f"sign test, {seeds} seeds"))
        better = sum(one > 0 for one in differences)
        parts.append(
            Part(
                f"four trained heads have a better {what} than one, with as many parameters",
                "sign test over seeds at 0.05: holds if better, fails if worse; else open",
                "open" if p >= 0.05 else "holds" if better > seeds / 2 else "fails",
                f"better in {better} of {seeds} trainings, p = {p:.3f}",
            )
        )

    figure, axes = plt.subplots(1, 2, figsize=(8, 3.4), layout="constrained")
    for axis, what, label in zip(
        axes, ("faster", "fidelity"), ("mixing time of a head / of all", "fidelity of all / of a head")
    ):
        for level, of_level in made.items():
            points = [[one["diversity"] for one in of_level], [one[what] for one in of_level]]
            axis.plot(*points, ".", label=f"own share {level:g}")
        axis.axhline(1, color="grey", linewidth=1)
        axis.set(xlabel="diversity of the rows: 1 - mean cosine", ylabel=label)
    axes[1].legend(fontsize=7)
    return Claim(
        name="synergistic_graphs",
        title="Heads as graphs with a common sink",
        words=[
            "One neighbour of the paper (*Beyond Parallelism: Synergistic Computational Graph Effects in Multi-Head "
            "Attention*) takes each head for a directed graph without cycles whose paths end in a common sink, and "
            "states that several heads mix faster and lose less of a message, under conditions on their diversity. "
            "Only its abstract was available, so the definitions are ours. A token passes its message to earlier ones, "
            "as its row of attention says, and the first token is the sink. *Mixing time*: steps until three quarters "
            f"of the message of the worst token are there. *Fidelity*: what is there after {HOPS} steps; its minimax "
            "is that of the token served worst, by the head that serves it best. Together, heads take turns at random.",
            f"By hand: {HEADS} heads on {TOKENS} tokens share a part of their random scores; the rest is their own. "
            f"Trained: decoders of two layers of width {WIDTH} write symbols backwards, with one head or with {HEADS} "
            "heads of a quarter of the width, and so with as many parameters.",
        ],
        parts=parts,
        numbers=numbers,
        seeds=f"0 for heads by hand, 0 to {seeds - 1} for trainings",
        left="Other definitions of the sink and of fidelity, such as the last token, or messages with noise; values "
        "and residuals, which carry messages as well; larger models, and other tasks than reversal.",
        caption="What heads gain together over one alone, against how much their rows differ; heads made by hand",
        figure=figure,
    )


def _by_sign(number: Number) -> str:
    if number.low is None or number.high is None:
        return "open"
    return "holds" if number.low > 0 else "fails" if number.high < 0 else "open"
