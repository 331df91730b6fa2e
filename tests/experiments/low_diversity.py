"""Does a low head diversity hurt? Heads held at graded HDI through training, against controls of the same freedom.

In each layer the key projections of all heads are confined to one fixed random subspace of
dimension m of the layer's input, ``W_h <- W_h P^T P`` after every optimizer step. In m dimensions heads overlap by
``d_k / m`` by chance, so m from d down to d_k takes HDI from chance to 0. The control confines each head to a subspace
of its own of the same dimension: the same number of free parameters and the same rank, and heads as diverse as by
chance. What separates the two is diversity and nothing else that we know of.

python -m tests.experiments.low_diversity --output docs/benchmarks/low-diversity.md
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from scipy.stats import pearsonr
from scipy.stats import t as student
from torch import Tensor

from hdi_callback import find_attention
from hdi_callback.attention import AttentionLayer, Role
from hdi_callback.core import head_diversity
from tests.experiments.collapse.models import Data, Model, Shape
from tests.experiments.pages import publish

RESULTS = Path("runs/low-diversity")
SEEDS = {"looked-at": (1,), "confirming": (11, 12, 13, 14, 15, 16, 17, 18)}
TASKS = ("recall", "offsets", "sorting", "digits", "text")
ROLES: dict[str, tuple[Role, ...]] = {"keys": ("key",), "queries and keys": ("query", "key")}
HEADS, WIDTH, LAYERS = 4, 64, 2
DIMENSIONS = (16, 32)  # of 64; the head width is 16
VOCABULARY = 32


@dataclass(frozen=True)
class Job:
    """One run."""

    task: str
    arm: Literal["free", "shared", "private", "copies"]
    roles: str
    dimension: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.task}-{self.arm}-{self.roles}-{self.dimension}-{self.seed}".replace(" ", "-")


def plan(seeds: Sequence[int]) -> list[Job]:
    jobs = []
    for seed in seeds:
        for task in TASKS:
            jobs.append(Job(task, "free", "keys", WIDTH, seed))
            for dimension in DIMENSIONS:
                jobs += [Job(task, arm, "keys", dimension, seed) for arm in ("shared", "private")]
            jobs += [Job(task, "copies", roles, WIDTH, seed) for roles in ROLES]
    return jobs


# --- tasks that need several heads


def recall(batch: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Pairs of a key and a value, then pairs of keys: the answer to each is the larger of both values.

    Two keys have to be looked up at once.
    """
    pairs, half = 8, VOCABULARY // 2
    keys = torch.rand(batch, half, generator=draw).argsort(-1)[:, :pairs]
    values = torch.randint(half, (batch, pairs), generator=draw)
    facts = torch.stack([keys, values + half], -1).flatten(1)  # (batch, 16)
    asked = torch.randint(pairs, (batch, 12, 2), generator=draw)
    questions = keys.gather(1, asked.flatten(1)).view(batch, 12, 2)
    answers = values.gather(1, asked.flatten(1)).view(batch, 12, 2).amax(-1)
    x = torch.cat([facts, questions.flatten(1)], -1)
    y = torch.full_like(x, -100)
    y[:, 17::2] = answers  # at the second key of each question
    return x, y


def offsets(batch: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """The sum of the numbers from 0 to 3 that stand two, five, nine and fourteen places back."""
    places = (2, 5, 9, 14)
    x = torch.randint(4, (batch, 40), generator=draw)
    y = torch.full_like(x, -100)
    y[:, 14:] = sum(x[:, 14 - place : 40 - place] for place in places)
    return x, y


def sorting(batch: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Twelve numbers, a mark, and the same numbers in order."""
    numbers = torch.randint(1, VOCABULARY, (batch, 12), generator=draw)
    ordered = numbers.sort(-1).values
    whole = torch.cat([numbers, torch.zeros(batch, 1, dtype=torch.long), ordered], -1)
    x, y = whole[:, :-1], whole[:, 1:].clone()
    y[:, :12] = -100
    return x, y


SYNTHETIC: dict[str, Callable[[int, torch.Generator], tuple[Tensor, Tensor]]] = {
    "recall": recall, "offsets": offsets, "sorting": sorting,
}  # fmt: skip
STEPS = {"recall": 400, "offsets": 400, "sorting": 400, "digits": 300, "text": 400}


# --- the runs


class Confinement:
    """Keeps the heads of a layer in subspaces of a given dimension.

    Args:
        layer: the layer.
        role: whose weights.
        dimension: m.
        is_shared: one subspace for all heads, or one for each.
        draw: of the subspaces.
    """

    def __init__(
        self, layer: AttentionLayer, role: Role, dimension: int, is_shared: bool, draw: torch.Generator
    ) -> None:
        self.layer, self.role = layer, role
        heads, _, width = layer.weight(role).shape
        number = 1 if is_shared else heads
        self.bases = torch.linalg.qr(torch.randn(number, width, dimension, generator=draw)).Q  # (1 or H, d, m)

    @torch.no_grad()
    def __call__(self) -> None:
        weight = self.layer.weight(self.role)
        weight.copy_(weight @ self.bases @ self.bases.mT)


class Copies:
    """Keeps the heads of a layer copies of each other.

    Args:
        layer: the layer.
        role: whose weights.
    """

    def __init__(self, layer: AttentionLayer, role: Role) -> None:
        self.layer, self.role = layer, role

    @torch.no_grad()
    def __call__(self) -> None:
        weight = self.layer.weight(self.role)
        weight.copy_(weight.mean(0, keepdim=True).expand_as(weight))


def train(job: Job, steps: int | None = None) -> dict[str, float]:
    """Train one model as its job says; give its losses and the HDI that its layers ended with."""
    torch.set_num_threads(1)
    torch.manual_seed(job.seed)  # the same initial weights and the same batches in all arms of a seed
    kind: Literal["digits", "text"] = "digits" if job.task == "digits" else "text"
    model = Model(Shape(kind, LAYERS, HEADS, HEADS, WIDTH))
    draw = torch.Generator().manual_seed(job.seed)
    if job.task in SYNTHETIC:
        make = SYNTHETIC[job.task]
        fixed = make(512, torch.Generator().manual_seed(0))

        def batch() -> tuple[Tensor, Tensor]:
            return make(32, draw)

        def validate() -> float:
            with torch.no_grad():
                return float(model.loss(*fixed))
    else:
        data = Data(kind, job.seed, 12)
        batch = data.draw

        def validate() -> float:
            return data.validate(model)

    layers = find_attention(model)
    confined: list[Confinement | Copies] = []
    if job.arm == "copies":
        confined = [Copies(layer, role) for layer in layers for role in ROLES[job.roles]]
    elif job.arm != "free":
        generator = torch.Generator().manual_seed(1000 + job.seed)
        confined = [
            Confinement(layer, role, job.dimension, job.arm == "shared", generator)
            for layer in layers
            for role in ROLES[job.roles]
        ]
    for confine in confined:
        confine()
    steps = STEPS[job.task] if steps is None else steps
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 40) * (1 - step / steps))
    for _ in range(steps):
        model.loss(*batch()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        for confine in confined:
            confine()
    index = [float(head_diversity(layer.weight("key").detach()).index) for layer in layers]
    return {"validation_loss": validate(), "hdi": statistics.fmean(index)}


def run(work: tuple[Job, Path]) -> None:
    job, folder = work
    done = folder / f"{job.name}.json"
    if not done.is_file():
        partial = done.with_suffix(".partial")
        partial.write_text(json.dumps({**job.__dict__, **train(job)}))
        partial.rename(done)


# --- the report


def interval(differences: Sequence[float]) -> tuple[float, float, float]:
    """Give a mean with its 95 % interval (Student)."""
    mean = statistics.fmean(differences)
    half = student.ppf(0.975, len(differences) - 1) * statistics.stdev(differences) / math.sqrt(len(differences))
    return mean, mean - half, mean + half


def report(results: Sequence[dict], seeds: Sequence[int]) -> list[str]:
    by = {(r["task"], r["arm"], r["roles"], r["dimension"], r["seed"]): r for r in results if r["seed"] in seeds}
    lines = [
        "Made by `python -m tests.experiments.low_diversity --output docs/benchmarks/low-diversity.md`.",
        f"Seeds {', '.join(map(str, seeds))}; looked at before the design was fixed: "
        f"{', '.join(map(str, SEEDS['looked-at']))}. {LAYERS} layers, {HEADS} heads of {WIDTH // HEADS} in {WIDTH}.",
        "Losses in nats; differences are paired by seed, with their 95 % intervals (Student).",
        "",
        "| task | confined | m | HDI: all in one | each its own | loss, free | each its own - free | "
        "all in one - each its own |",
        "|---" * 8 + "|",
    ]
    pooled = []
    for task in TASKS:
        for roles, dimension in [("keys", m) for m in DIMENSIONS]:
            triples = [
                (by[task, "shared", roles, dimension, seed], by[task, "private", roles, dimension, seed], free)
                for seed in seeds
                if (task, "shared", roles, dimension, seed) in by
                and (task, "private", roles, dimension, seed) in by
                and (free := by.get((task, "free", "keys", WIDTH, seed))) is not None
            ]
            if len(triples) < 2:
                continue
            hdi = [statistics.fmean(triple[arm]["hdi"] for triple in triples) for arm in (0, 1)]
            losses = [[triple[arm]["validation_loss"] for triple in triples] for arm in (0, 1, 2)]
            cells = []
            for left, right in ((1, 2), (0, 1)):
                cells.append(_signed([a - b for a, b in zip(losses[left], losses[right])]))
            free_loss = statistics.fmean(losses[2])
            lines.append(
                f"| {task} | {roles} | {dimension} | {hdi[0]:.2f} | {hdi[1]:.2f} | {free_loss:.3f} | {cells[0]} | "
                f"{cells[1]} |"
            )
        points = [
            (item["hdi"], item["validation_loss"] - by[task, "free", "keys", WIDTH, seed]["validation_loss"])
            for (t, arm, roles, _, seed), item in by.items()
            if t == task and arm == "shared" and roles == "keys" and (task, "free", "keys", WIDTH, seed) in by
        ]
        if len(points) > 3:
            together = pearsonr(*zip(*points))
            low, high = together.confidence_interval(0.95)
            pooled.append(f"| {task} | {len(points)} | {together.statistic:+.2f} ({low:+.2f} to {high:+.2f}) |")
    lines += [
        "",
        "`**`: the interval leaves out zero. Correlation of HDI with the loss above that of the free twin, over the "
        "runs with one subspace for all heads:",
        "",
        "| task | runs | Pearson correlation |",
        "|---|---|---|",
        *pooled,
        "",
        "Heads that are copies of each other (HDI 0):",
        "",
        "| task | loss, free | copied keys - free | copied keys and queries - free |",
        "|---|---|---|---|",
        *(_copies(by, task, seeds) for task in TASKS),
    ]
    return lines


def _copies(by: dict[tuple, dict], task: str, seeds: Sequence[int]) -> str:
    cells = []
    free = {seed: by[task, "free", "keys", WIDTH, seed]["validation_loss"] for seed in seeds}
    for roles in ROLES:
        losses = {seed: by[task, "copies", roles, WIDTH, seed]["validation_loss"] for seed in seeds}
        cells.append(_signed([losses[seed] - free[seed] for seed in seeds]))
    return f"| {task} | {statistics.fmean(free.values()):.3f} | {' | '.join(cells)} |"


def _signed(differences: Sequence[float]) -> str:
    mean, low, high = interval(differences)
    return f"{mean:+.3f} ({low:+.3f} to {high:+.3f})" + (" **" if low > 0 or high < 0 else "")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=list(SEEDS), default="confirming")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(argv)
    options.results.mkdir(parents=True, exist_ok=True)
    jobs = plan(SEEDS[options.part])
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        for number, _ in enumerate(pool.imap_unordered(run, [(job, options.results) for job in jobs]), 1):
            if number % 10 == 0:
                print(f"{number}/{len(jobs)}", flush=True)
    results = [json.loads(path.read_text()) for path in sorted(options.results.glob("*.json"))]
    publish(report(results, SEEDS[options.part]), options.output)


if __name__ == "__main__":
    main()
