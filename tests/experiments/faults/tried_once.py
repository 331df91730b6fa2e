"""More faults than the plan has, each tried in one training, to see which of them the rules report.

python -m tests.experiments.faults.tried_once --output docs/benchmarks/faults-tried-once.md

One seed each, which says whether a fault can be noticed, and not how often it is.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.experiments.faults.faults import START, Fault, Run, _round_weights, _set
from tests.experiments.faults.plan import HEALTHY, Job
from tests.experiments.faults.run import train

SEED = 9_000_001
TEXT, TRAINED, GROUPED, DIGITS = "text", "trained before, and trained on", "text, grouped", "digits, post-norm, SGD"


def _fault(**values: Any) -> Fault:
    return Fault("", is_cause=True, shows=True, **{"start": 0, **values})


def _keep_attention(run: Run, step: int) -> None:
    run.kept = {str(id(p)): p.clone() for layer in run.layers for p in layer.parameters()}


def _step_attention_30_times(run: Run, step: int) -> None:
    for layer in run.layers:
        for parameter in layer.parameters():
            before = run.kept[str(id(parameter))]
            parameter.copy_(before + 30 * (parameter - before))


def _shrink_queries_and_keys(run: Run, step: int) -> None:
    for layer in run.layers:
        for module in (layer.q_proj, layer.k_proj):
            module.weight *= 0.97


def _freeze_keys(run: Run, step: int) -> None:
    run.layer.k_proj.weight.requires_grad_(False)


def _interleave_heads(run: Run, step: int) -> None:
    """Rows (head, feature) of a checkpoint are read as (feature, head)."""
    for layer in run.layers:
        for role in ("q", "k", "v"):
            weight = getattr(layer, f"{role}_proj").weight
            weight.copy_(weight.unflatten(0, (-1, len(run.heads(role, layer)))).transpose(0, 1).flatten(0, 1).clone())


def _tie(one: str, other: str) -> Any:
    def act(run: Run, step: int) -> None:
        for layer in run.layers:
            getattr(layer, f"{one}_proj").weight = getattr(layer, f"{other}_proj").weight

    return act


def _clip_to_nothing(run: Run, step: int) -> None:
    for parameter in run.model.parameters():
        if parameter.grad is not None:
            parameter.grad *= 1e-6


def _turn_gradient(run: Run, step: int) -> None:
    for layer in run.layers:
        for module in (layer.q_proj, layer.k_proj):
            if module.weight.grad is not None:
                module.weight.grad.neg_()


def _pad_all_but_one(run: Run, batch: Any, step: int) -> Any:
    tokens, targets = batch
    tokens = tokens.clone()
    tokens[:, 1:] = 0
    return tokens, targets


def _silence_outputs(run: Run, step: int) -> None:
    for layer in run.layers:
        layer.out_proj.weight *= 0


def _zero_half(*roles: str) -> Any:
    def act(run: Run, step: int) -> None:
        for layer in run.layers:
            for role in roles:
                heads = run.heads(role, layer)
                heads[len(heads) // 2 :] = 0

    return act


def _duplicate(run: Run, step: int) -> None:
    """Every second head becomes a copy of the one before it, and both write half as much."""
    for layer in run.layers:
        for role in ("q", "k", "v", "out"):
            heads = run.heads(role, layer)
            heads[1::2] = heads[0::2]
            if role == "out":
                heads *= 0.5


def _begin_alike(run: Run, step: int) -> None:
    for layer in run.layers:
        for role in ("q", "k"):
            heads = run.heads(role, layer)
            heads[:] = heads[:1].clone()


def _pool_keys(run: Run, step: int) -> None:
    for layer in run.layers:
        for role in ("k", "v"):
            heads = run.heads(role, layer)
            means = torch.randn(4, *heads.shape, generator=run.generator).mean(0)
            heads.copy_(means * layer.k_proj.weight.shape[1] ** -0.5)


def _equal_embeddings(run: Run, step: int) -> None:
    weight = run.model.embed.weight
    weight.copy_(weight[:1].expand_as(weight).clone())


def _no_positions(run: Run, step: int) -> None:
    run.model.places.zero_().requires_grad_(False)


def _large_norms(run: Run, step: int) -> None:
    for module in run.model.modules():
        if isinstance(module, nn.LayerNorm):
            module.weight *= 8


def _large_epsilon(run: Run, step: int) -> None:
    for block in run.model.blocks:
        block.norms[0].eps = 1e3


FAULTS: dict[str, tuple[Fault, str]] = {
    "attention at 30 times the rate": (_fault(before=_keep_attention, after=_step_attention_30_times), TEXT),
    "attention at 30 times the rate, from step 40": (
        _fault(before=_keep_attention, after=_step_attention_30_times, start=START),
        TEXT,
    ),
    "queries and keys decay by 3 % a step": (_fault(after=_shrink_queries_and_keys), TEXT),
    "head outputs times 0": (_fault(after=_silence_outputs), TEXT),
    "duplicated heads, fresh": (_fault(begin=_duplicate), TEXT),
    "duplicated heads, trained": (_fault(begin=_duplicate), TRAINED),
    "heads begin with the queries and keys of one": (_fault(begin=_begin_alike), TEXT),
    "norm weights 8 times too large": (_fault(begin=_large_norms), TEXT),
    "epsilon of the norms before attention at 1000": (_fault(begin=_large_epsilon), TEXT),
    "half of the heads all zero": (_fault(begin=_zero_half("q", "k", "v", "out")), TEXT),
    "half of the heads with queries, keys and values of zero": (_fault(begin=_zero_half("q", "k", "v")), TEXT),
    "keys of one layer frozen": (_fault(begin=_freeze_keys), TEXT),
    "rows of heads in another order": (_fault(begin=_interleave_heads), TRAINED),
    "queries and keys tied": (_fault(begin=_tie("k", "q")), TEXT),
    "keys and values tied": (_fault(begin=_tie("v", "k")), TEXT),
    "bfloat16 without copies in float32": (_fault(after=_round_weights), TEXT),
    "gradients times a millionth, AdamW": (_fault(before=_clip_to_nothing), TEXT),
    "gradients times a millionth, SGD": (_fault(before=_clip_to_nothing), DIGITS),
    "all tokens but one are padding, without a mask": (_fault(data=_pad_all_but_one), TEXT),
    "causal mask missing": (_fault(begin=_set(mask="none")), TEXT),
    "no positions": (_fault(begin=_no_positions), TEXT),
    "rows of the embedding alike": (_fault(begin=_equal_embeddings), TEXT),
    "gradient of queries and keys with the wrong sign": (_fault(before=_turn_gradient), TEXT),
    "keys and values that are means of four": (_fault(begin=_pool_keys), GROUPED),
}


def tried(kind: str, steps: int | None = None) -> dict[str, Any]:
    """Train once with a fault, or once without on its training; give the result of `train`."""
    fault, base = FAULTS[kind] if kind in FAULTS else (_fault(), kind)
    return train(Job(kind if kind in FAULTS else HEALTHY, base, SEED), steps, fault=fault)


def row(kind: str, made: dict[str, Any], healthy: dict[str, Any]) -> str:
    begun: dict[str, tuple[int, str]] = {}
    for step, _, rule, level in made["alerts"]:
        begun.setdefault(rule, (step, level))
    named = ", ".join(f"*{rule}* ({level}, step {step})" for rule, (step, level) in begun.items())
    return (
        f"| {kind} | {made['base']} | {made['validation'][-1]:.2f} | {healthy['validation'][-1]:.2f} | {named or '-'} |"
    )


def page(kinds: list[str]) -> str:
    healthy = {base: tried(base) for base in dict.fromkeys(FAULTS[kind][1] for kind in kinds)}
    rows = [row(kind, made := tried(kind), healthy[made["base"]]) for kind in kinds]
    rows += [row("none", made, made) for made in healthy.values()]
    head = (
        "Made by `python -m tests.experiments.faults.tried_once --output docs/benchmarks/faults-tried-once.md`: one "
        f"training each, seed {SEED}, torch {torch.__version__.partition('+')[0]}. Losses of validation at the end, "
        "with the fault and without it; each rule that was raised, with its level and step when it first was.\n\n"
        "| fault | training | loss | healthy | rules |\n|---|---|---|---|---|"
    )
    return "\n".join([head, *rows, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("kinds", nargs="*", choices=[[], *FAULTS], help="faults; all by default")
    parser.add_argument("--output", type=Path, help="where to write the table; printed by default")
    arguments = parser.parse_args()
    text = page(arguments.kinds or list(FAULTS))
    if arguments.output is None:
        print(text)
    else:
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
