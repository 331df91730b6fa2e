"""Claim 11: related attention designs, built small: what HDI means in each, and what does not change it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune

from examples.theory.claim import Claim, Number, Part, Size
from examples.theory.sparse_kernels import entmax, scored
from hdi_callback import find_attention
from hdi_callback.core import circuit_similarity, head_diversity

EXACT = 1e-5  # weights are in float32 where modules are built
D, H, K = 24, 4, 6
ONE_HEAD = "one head: nothing to compare"


class Attention(nn.Module):
    """Attention with separate projections; each related design overrides a method."""

    def __init__(self, key_heads: int = H, key_width: int = D) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads = H, key_heads
        self.q_proj = nn.Linear(D, H * K, bias=False)
        self.k_proj = nn.Linear(key_width, key_heads * K, bias=False)
        self.v_proj = nn.Linear(key_width, key_heads * K, bias=False)
        self.out_proj = nn.Linear(H * K, D, bias=False)

    def keys(self, x: Tensor) -> Tensor:
        return self.k_proj(x).unflatten(-1, (self.num_key_value_heads, K)).transpose(1, 2)

    def values(self, x: Tensor) -> Tensor:
        return self.v_proj(x).unflatten(-1, (self.num_key_value_heads, K)).transpose(1, 2)

    def weigh(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)

    def gate(self, x: Tensor, heads: Tensor) -> Tensor:
        return heads

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (H, K)).transpose(1, 2)
        groups = H // self.num_key_value_heads
        k, v = self.keys(x).repeat_interleave(groups, 1), self.values(x).repeat_interleave(groups, 1)
        heads = self.weigh(q @ k.mT / K**0.5) @ v
        return self.out_proj(self.gate(x, heads).transpose(1, 2).flatten(2))


class MixtureOfHeads(Attention):
    """A router gives each token a weight for each head (MoH, Jin et al. 2024)."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, H)

    def gate(self, x: Tensor, heads: Tensor) -> Tensor:
        return heads * self.router(x).softmax(-1).transpose(1, 2)[..., None]


class KnockingHeads(Attention):
    """One map that all heads share acts on the keys of each (after knocking-heads attention, Zhou et al. 2025)."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Parameter(torch.eye(K) + 0.3 * torch.randn(K, K))

    def keys(self, x: Tensor) -> Tensor:
        return super().keys(x) @ self.shared.mT


class TiedGroups(Attention):
    """Two groups of query heads, whose keys are their values (after grouped-tied attention, Zadouri et al. 2025)."""

    def __init__(self) -> None:
        super().__init__(key_heads=2)
        self.v_proj = self.k_proj


class ReLUAttention(Attention):
    def weigh(self, scores: Tensor) -> Tensor:
        rows = scores.relu()
        return rows / rows.sum(-1, keepdim=True).clamp_min(1e-9)


class EntmaxAttention(Attention):
    def weigh(self, scores: Tensor) -> Tensor:
        from entmax import entmax15

        return entmax15(scores, -1)


class TemporalLatent(nn.Module):
    """Keys and values come from a latent that two neighbouring tokens share (after MTLA, Deng and Woodland 2025)."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = H
        self.q_proj, self.down = nn.Linear(D, H * K, bias=False), nn.Linear(D, 12, bias=False)
        self.k_up, self.v_up = nn.Linear(12, H * K, bias=False), nn.Linear(12, H * K, bias=False)
        self.out_proj = nn.Linear(H * K, D, bias=False)

    def weight(self) -> Tensor:
        """(H, d_k, d): what the keys are made of, latent included."""
        return (self.k_up.weight @ self.down.weight).detach().view(H, K, D)

    def forward(self, x: Tensor) -> Tensor:
        latent = self.down(F.pad(x, (0, 0, 0, x.shape[1] % 2))).unflatten(1, (-1, 2)).mean(2)
        q, k, v = (
            y.unflatten(-1, (H, K)).transpose(1, 2) for y in (self.q_proj(x), self.k_up(latent), self.v_up(latent))
        )
        return self.out_proj(((q @ k.mT / K**0.5).softmax(-1) @ v).transpose(1, 2).flatten(2))


class Hopfield(Attention):
    """A hidden state that begins at the query and is updated several times before it reads values."""

    def forward(self, x: Tensor) -> Tensor:
        state = self.q_proj(x).unflatten(-1, (H, K)).transpose(1, 2)
        memories = self.keys(x)
        for _ in range(2):
            state = self.weigh(state @ memories.mT) @ memories
        return self.out_proj((self.weigh(state @ memories.mT) @ self.values(x)).transpose(1, 2).flatten(2))


class ClassificationHead(nn.Module):
    """Class shares of queries by their kernel distance to labelled examples (Nadaraya and Watson)."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(D, K, bias=False)

    def forward(self, x: Tensor, examples: Tensor, labels: Tensor) -> Tensor:
        q, k = self.project(x), F.normalize(self.project(examples), dim=-1)
        return F.scaled_dot_product_attention(q[None], k[None], labels[None])[0]


@dataclass(frozen=True)
class Finding:
    """A related design: what HDI means in it, what was checked, and by how much the check was off."""

    name: str
    meaning: str
    checked: str
    gap: float
    read: str


def index(weight: Tensor) -> float:
    return float(head_diversity(weight.detach()).subspace.index)


def as_heads(linear: nn.Linear, heads: int = H) -> Tensor:
    return linear.weight.detach().unflatten(0, (heads, -1))


def how_read(module: nn.Module, key: Tensor | None = None) -> str:
    """Return the heads that `find_attention` reports, if their keys are the known ones; else the reason."""
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        try:
            layers = find_attention(nn.Sequential(module), forward=lambda: module(torch.randn(2, 6, D)))
        except TypeError:
            return "left out: it takes other inputs than tokens"
    if not layers:
        return "left out, with a warning" if messages else "left out, in silence"
    weight = layers[0].weight("key").detach()
    is_right = key is None or (weight.shape == key.shape and torch.allclose(weight, key))
    return f"{layers[0].num_heads} heads on {layers[0].num_key_heads}" if is_right else "misread"


def mixture_of_heads() -> Finding:
    module = MixtureOfHeads()
    K_matrix = head_diversity(as_heads(module.k_proj)).subspace.overlap.double()
    weights = torch.zeros(H, dtype=torch.float64)
    weights[2] = 1
    alone = 1 / float(weights @ K_matrix @ weights)
    even = torch.full((H,), 1 / H, dtype=torch.float64)
    all_heads = 1 / float(even @ K_matrix @ even)
    gap = max(abs(alone - 1), abs(all_heads - float(head_diversity(as_heads(module.k_proj)).subspace.effective_heads)))
    return Finding(
        "mixture-of-head attention",
        "the index of the pool of heads; for a token with gates g the effective heads are 1 / (g' K g)",
        "1 for a gate on one head; the package's effective heads for even gates",
        gap,
        how_read(module, as_heads(module.k_proj)),
    )


def knocking_heads() -> Finding:
    module = KnockingHeads()
    key = as_heads(module.k_proj)
    return Finding(
        "knocking heads",
        "the same as without: a map within each head leaves its subspace unchanged",
        "index before and after the shared map",
        abs(index(key) - index(module.shared.detach() @ key)),
        how_read(module),
    )


def temporal_latent() -> Finding:
    module = TemporalLatent()
    turn = torch.randn(12, 12) + 4 * torch.eye(12)
    turned = ((module.k_up.weight @ torch.linalg.inv(turn)) @ (turn @ module.down.weight)).detach().view(H, K, D)
    gap = abs(index(module.weight()) - index(turned))
    return Finding(
        "temporal latent attention",
        "the index of latent and up-projection taken together; merging tokens in time does not enter the weights",
        "index after another basis of the latent",
        gap,
        how_read(module),
    )


def grouped() -> Finding:
    module = Attention(key_heads=2)
    key = as_heads(module.k_proj, 2)
    expanded = index(key.repeat_interleave(2, 0))
    return Finding(
        "grouped queries",
        "the index of the distinct key heads; expanded to query heads it is H (G-1) / (G (H-1)) times that",
        "index of the expanded heads",
        abs(expanded - index(key) * H / (2 * (H - 1))),
        how_read(module, key),
    )


def tied_groups() -> Finding:
    module = TiedGroups()
    gap = abs(index(as_heads(module.k_proj, 2)) - index(as_heads(module.v_proj, 2)))
    return Finding(
        "grouped-tied attention",
        "one index for keys and values, as they are one",
        "index of values less that of keys",
        gap,
        how_read(module, as_heads(module.k_proj, 2)),
    )


def relu_attention() -> Finding:
    q, k = torch.randn(5, K, dtype=torch.float64), torch.randn(30, K, dtype=torch.float64)
    rows = scored(torch.relu)
    gap = float((rows(q, k) - rows(7 * q, k)).abs().max())
    module = ReLUAttention()
    return Finding(
        "normalised-ReLU attention",
        "the same: it depends on weights and not on the kernel; a temperature changes neither rows nor index",
        "rows after queries grew sevenfold",
        gap,
        how_read(module, as_heads(module.k_proj)),
    )


def entmax_attention() -> Finding:
    q, k = torch.randn(5, K, dtype=torch.float64), torch.randn(30, K, dtype=torch.float64)
    rows = entmax(1.5)
    shifted = float((rows(q, k) - rows(q, k + torch.randn(K, dtype=torch.float64))).abs().max())
    module = EntmaxAttention()
    return Finding(
        "entmax attention",
        "the same; a vector that is added to all keys changes neither rows nor, as keys are centred, the index of the "
        "data",
        "rows after one vector was added to all keys",
        shifted,
        how_read(module, as_heads(module.k_proj)),
    )


def symmetric_and_antisymmetric() -> Finding:
    module = Attention()
    query, key = as_heads(module.q_proj).double(), as_heads(module.k_proj).double()
    B = query.mT @ key
    S, A = (B + B.mT) / 2, (B - B.mT) / 2
    norm = B.flatten(1).norm(dim=1)
    parts = torch.einsum("hij,gij->hg", S, S) + torch.einsum("hij,gij->hg", A, A)
    cosine = circuit_similarity(query, key).cosine
    return Finding(
        "symmetric and antisymmetric part of W_Q' W_K",
        "the circuits' cosine splits into both parts exactly: similarity of tokens, and direction of attention",
        "cosine less the sum of both parts",
        float((cosine - parts / (norm[:, None] * norm)).abs().max()),
        how_read(module, as_heads(module.k_proj)),
    )


def hopfield() -> Finding:
    memories, state, beta = torch.randn(20, K, dtype=torch.float64), torch.randn(K, dtype=torch.float64), 1.5

    def energy(x: Tensor) -> float:
        return float(-torch.logsumexp(beta * memories @ x, 0) / beta + x @ x / 2)

    rises, x = 0.0, state
    for _ in range(20):
        new = (beta * memories @ x).softmax(0) @ memories
        rises, x = max(rises, energy(new) - energy(x)), new
    return Finding(
        "modern Hopfield network with a hidden state",
        "the index of the memories' projections; it does not depend on how often the state is updated",
        "largest rise of the energy in 20 updates (Ramsauer et al. 2021)",
        max(rises, 0.0),
        how_read(Hopfield()),
    )


def classification_head() -> Finding:
    q, k = torch.randn(7, K, dtype=torch.float64), F.normalize(torch.randn(40, K, dtype=torch.float64), dim=-1)
    labels = torch.randint(3, (40,))
    attention = F.scaled_dot_product_attention(q[None], k[None], F.one_hot(labels, 3).double()[None])[0]
    kernel = torch.exp(-torch.cdist(q, k).square() / (2 * K**0.5))
    votes = torch.stack([kernel[:, labels == c].sum(-1) for c in range(3)], -1)
    head = ClassificationHead()
    diversity = head_diversity(head.project.weight.detach()[None])
    has_one_head = float(diversity.subspace.effective_heads) == 1 and bool(diversity.subspace.index.isnan())
    gap = float((attention - votes / votes.sum(-1, keepdim=True)).abs().max()) if has_one_head else 1.0
    return Finding(
        "Nadaraya-Watson classification head",
        "one head: no index (NaN), one effective head",
        "class shares by attention over one-hot labels, by kernel votes",
        gap,
        ONE_HEAD if how_read(head).startswith("left out") else "misread",
    )


def two_modalities() -> Finding:
    weight = torch.zeros(H, K, 2 * D)
    weight[:2, :, :D], weight[2:, :, D:] = torch.randn(2, K, D), torch.randn(2, K, D)
    across = float(head_diversity(weight).subspace.overlap[:2, 2:].abs().max())
    module = nn.MultiheadAttention(D, H, kdim=2 * D, vdim=2 * D, batch_first=True)
    (layer,) = find_attention(nn.ModuleDict({"cross": module}))
    chance = float(head_diversity(layer.weight("key").detach()).chance)
    gap = max(across, abs(chance - (1 - K / (2 * D))))
    return Finding(
        "cross-attention over two modalities",
        "heads of different modalities are orthogonal by construction; chance is that of the keys' width, 1 - d_k / "
        "d_kv",
        "overlap across modalities; chance of keys of another width",
        gap,
        f"{layer.num_heads} heads on {layer.num_key_heads}",
    )


def adapters() -> Finding:
    module = Attention()
    before = as_heads(module.k_proj).clone()
    rank = 3
    mask = (torch.rand(H, K, 1).argsort(1) < 4).float()  # four of six rows stay, which is more than the rank
    after = before + 0.1 * mask * (torch.randn(H, K, rank) @ torch.randn(rank, D))
    update = head_diversity(after - before, rank_tol=1e-4)
    with torch.no_grad():
        module.k_proj.weight.copy_(after.flatten(0, 1))
    meaning = (
        "in an adapter of rank below d_k the updates of all heads share one row space: the index of the update is 0, "
        "whichever rows are masked, as long as each head keeps at least as many as the rank"
    )
    gap = abs(float(update.subspace.index))
    return Finding("adapters under sparsity", meaning, "index of the update", gap, how_read(module, after))


def lottery_tickets(draws: int = 60) -> Finding:
    distances = []
    for _ in range(draws):
        weight = torch.randn(H, K, D, dtype=torch.float64)
        distances.append(index(weight * (torch.rand(H, K, D) < 0.5)) - (1 - K / D))
    mean, error = float(np.mean(distances)), float(np.std(distances, ddof=1) / draws**0.5)
    module = Attention()
    prune.random_unstructured(module.k_proj, "weight", 0.5)
    return Finding(
        "strong lottery tickets",
        "heads of a pruned, untrained layer are at chance: random pruning neither adds nor removes diversity",
        "mean distance of HDI from chance, beyond three standard errors",
        max(0.0, abs(mean) - 3 * error),
        how_read(module, as_heads(module.k_proj)),
    )


NEIGHBOURS: list[Callable[[], Finding]] = [
    mixture_of_heads,
    knocking_heads,
    temporal_latent,
    grouped,
    tied_groups,
    relu_attention,
    entmax_attention,
    symmetric_and_antisymmetric,
    hopfield,
    classification_head,
    two_modalities,
    adapters,
    lottery_tickets,
]


def run(size: Size) -> Claim:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        findings = [neighbour() for neighbour in NEIGHBOURS]
    off = [finding.name for finding in findings if not finding.gap < EXACT]
    modules = [finding for finding in findings if finding.read != ONE_HEAD]
    wrong = [finding.name for finding in modules if "heads" not in finding.read]
    silent = [finding.name for finding in modules if finding.read in ("misread", "left out, in silence")]
    rows = [f"| {f.name} | {f.meaning} | {f.checked} | {f.gap:.1e} | {f.read} |" for f in findings]
    figure, axis = plt.subplots(figsize=(7, 3.8), layout="constrained")
    axis.barh([f.name for f in findings][::-1], [max(f.gap, 1e-17) for f in findings][::-1])
    axis.axvline(EXACT, color="grey", linestyle="--", linewidth=1)
    axis.set(xscale="log", xlabel="how far the check is off")
    axis.tick_params(axis="y", labelsize=7)
    return Claim(
        name="neighbours",
        title="HDI in related designs",
        words=[
            "Heads are routed, grouped, tied, compressed, pruned and adapted in many designs. Each of them is built "
            "here in small. The table says what HDI means in it, which exact property must hold if that is so, and "
            "what `find_attention` reports. `Left out` is a valid answer: heads that cannot be established are never "
            "guessed.",
        ],
        parts=[
            Part(
                "HDI means in each design what the table states",
                f"holds if no check is off by {EXACT:g}",
                "fails" if off else "holds",
                f"off: {', '.join(off)}"
                if off
                else f"All {len(findings)} checks hold; the largest gap is {max(f.gap for f in findings):.1e}.",
            ),
            Part(
                "the package reads each of these modules",
                'holds if the heads of all are found right; "holds if" if the others are left out with a warning; '
                "fails if one is misread, or left out without a warning",
                "fails" if silent else "holds if" if wrong else "holds",
                f"misread or silent: {', '.join(silent)}"
                if silent
                else f"with the exception of {', '.join(wrong)}, left out with a warning"
                if wrong
                else f"The heads of {len(modules)} of the {len(modules)} designs that have several are found right; "
                f"{len(findings) - len(modules)} of the {len(findings)} has one head, and so nothing to compare.",
            ),
        ],
        numbers=[Number("largest gap of a check", max(f.gap for f in findings), of=f"{len(findings)} designs")],
        tables={
            "Designs": "\n".join(
                [
                    "| design | what HDI means in it | checked | off by | find_attention |",
                    "|---|---|---|---|---|",
                    *rows,
                ]
            )
        },
        seeds="0",
        left="These are small stand-ins with the structure of the designs, not the published implementations, and "
        "are not trained.",
        caption="Error of the check of each design; dashed: the limit",
        figure=figure,
    )
