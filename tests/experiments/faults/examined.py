"""Further kinds, healthy and faulty, each in one training, against what the rules should say: that was written before.

python -m tests.experiments.faults.examined --output docs/benchmarks/examined.md
"""

from __future__ import annotations

import argparse
import copy
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.experiments.faults.faults import START, Act, Fault, Run, _set
from tests.experiments.faults.plan import HEALTHY, Job
from tests.experiments.faults.run import train

SEED = 9_200_001
RESULTS = Path("runs/examined")
TEXT, TRAINED, GROUPED = "text", "trained before, and trained on", "text, grouped"
DEEP = "text, four layers"
SILENT = "silence"
BROKEN = "an alarm"
HIDDEN = "cannot show"
"""What should be: no warning in a healthy training, one about a fault, or neither as no reading can show it."""


@dataclass(frozen=True)
class Kind:
    """What is done, on which training, and what should be said."""

    truth: str
    base: str
    fault: Fault


def _kind(truth: str, base: str = TEXT, **acts: Any) -> Kind:
    begins = acts.pop("start", START if truth != SILENT else 0)
    return Kind(truth, base, Fault("", truth != SILENT, truth == BROKEN, start=begins, **acts))


# --- healthy


def _alibi(run: Run, step: int) -> None:
    run.model.places.zero_().requires_grad_(False)
    heads = run.layers[0].num_heads
    run.model.switches.slopes = 2.0 ** (-8 * torch.arange(1, heads + 1) / heads)


def _warm_up_slowly(run: Run, step: int) -> None:
    run.scale_rates(min(1.0, (step + 1) / 90))


def _noisy_labels(run: Run, batch: Any, step: int) -> Any:
    x, y = batch
    drawn = y.flatten()[torch.randint(y.numel(), y.shape, generator=run.generator)]
    return x, torch.where(torch.rand(y.shape, generator=run.generator) < 0.3, drawn, y)


def _two_of_a_batch(run: Run, batch: Any, step: int) -> Any:
    return tuple(part[:2] for part in batch)


def _mask_tokens(run: Run, batch: Any, step: int) -> Any:
    x, y = batch
    return x.masked_fill(torch.rand(x.shape, generator=run.generator) < 0.15, 0), y


def _another_alphabet_each_time(run: Run, batch: Any, step: int) -> Any:
    turned = 7 * (step // 20)
    return tuple((part + turned) % 256 for part in batch)


def _longer_each_time(run: Run, batch: Any, step: int) -> Any:
    length = (8, 16, 32, 48, 64)[min(4, step // 20)]
    return tuple(part[:, :length] for part in batch)


def _backwards(run: Run, batch: Any, step: int) -> Any:
    x, y = batch
    whole = torch.cat([x, y[:, -1:]], 1).flip(1)
    return whole[:, :-1], whole[:, 1:]


def _drop_layers(run: Run, step: int) -> None:
    for layer in run.layers:
        whole = layer.forward

        def forward(x: Tensor, memory: Tensor | None = None, whole: Callable[..., Tensor] = whole) -> Tensor:
            is_dropped = torch.is_grad_enabled() and float(torch.rand((), generator=run.generator)) < 0.3
            return 0.0 * x if is_dropped else whole(x, memory)

        layer.forward = forward


def _autocast(run: Run, step: int) -> None:
    whole = run.model.loss

    def loss(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return whole(x, y)

    run.model.loss = loss


def _distil(run: Run, step: int) -> None:

    teacher = copy.deepcopy(run.model).eval()
    whole = run.model.loss
    seen: list[Tensor] = []
    for model in (teacher, run.model):
        model.head.register_forward_hook(lambda module, inputs, output: seen.append(output))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        seen.clear()
        with torch.no_grad():
            teacher.loss(x, y)
        hard = whole(x, y)
        soft = F.kl_div(seen[1].log_softmax(-1), (seen[0] / 2).softmax(-1), reduction="none").sum(-1).mean()
        return hard + 0.5 * soft

    run.model.loss = loss


def _restart_rate(run: Run, step: int) -> None:
    run.scale_rates(0.5 + 0.5 * math.cos(math.pi * (step % 25) / 25))


# --- faults


def _zero_rows(*roles: str, count: int = 1) -> Act:
    def act(run: Run, step: int) -> None:
        for role in roles:
            run.heads(role)[:count] = 0

    return act


def _equal_keys(run: Run, step: int) -> None:
    if "hook" not in run.kept:
        run.kept["hook"] = run.layer.k_proj.register_forward_hook(
            lambda module, inputs, output: output.mean(1, keepdim=True).expand_as(output)
        )


def _fresh_heads(run: Run, step: int) -> None:
    if step != START:
        return
    for role in ("q", "k", "v"):
        heads = run.heads(role)[:2]
        heads.copy_(torch.randn(heads.shape, generator=run.generator) * heads.shape[-1] ** -0.5)


def _keep_layer(run: Run, step: int) -> None:
    run.kept["layer"] = [parameter.clone() for parameter in run.layer.parameters()]


def _step_layer_30_times(run: Run, step: int) -> None:
    for before, parameter in zip(run.kept["layer"], run.layer.parameters()):
        parameter.copy_(before + 30 * (parameter - before))


def _decay_outputs(run: Run, step: int) -> None:
    for layer in run.layers:
        layer.out_proj.weight *= 0.95


def _skip_steps(run: Run, step: int) -> None:
    run.scale_rates(0.0)


def _forget_moments(run: Run, step: int) -> None:
    if step == START:
        for optimizer in run.optimizers:
            optimizer.state.clear()


def _other_layer_order(run: Run, step: int) -> None:
    if step != START:
        return
    first, last = run.layers[0], run.layers[-1]
    for one, other in zip(first.parameters(), last.parameters()):
        kept = one.clone()
        one.copy_(other)
        other.copy_(kept)


def _silence_norm(run: Run, step: int) -> None:
    run.model.blocks[-1].norms[0].weight.zero_()


def _cool(run: Run, step: int) -> None:
    run.model.switches.scale *= 0.93


def _nan_in_one_head(run: Run, step: int) -> None:
    if step == START:
        run.heads("v")[1, 0, 0] = math.nan


def _exchange_queries_and_keys(run: Run, step: int) -> None:
    for layer in run.layers:
        kept = layer.q_proj.weight.clone()
        layer.q_proj.weight.copy_(layer.k_proj.weight)
        layer.k_proj.weight.copy_(kept)


def _tiny_rate(run: Run, step: int) -> None:
    """The rate of attention is a thousandth of what was meant."""
    before, run.kept["all"] = run.kept.get("all"), {}
    for layer in run.layers:
        for parameter in layer.parameters():
            if before is not None:
                last = before[str(id(parameter))]
                parameter.copy_(last + 1e-3 * (parameter - last))
            run.kept["all"][str(id(parameter))] = parameter.clone()


def _prune(run: Run, step: int) -> None:
    """Two heads are cut off: their outputs are multiplied by zero from now on."""
    run.heads("out")[:2] = 0


def _repeat_key_heads_wrongly(run: Run, step: int) -> None:
    """All key heads of a checkpoint are read from its first one."""
    for layer in run.layers:
        for role in ("k", "v"):
            heads = run.heads(role, layer)
            heads[1:] = heads[:1].clone()


KINDS: dict[str, Kind] = {
    "ALiBi in place of positions": _kind(SILENT, begin=_alibi),
    "warm-up over nine tenths of training": _kind(SILENT, before=_warm_up_slowly),
    "rate that restarts every 25 steps": _kind(SILENT, DEEP, before=_restart_rate),
    "a third of the labels wrong": _kind(SILENT, data=_noisy_labels),
    "two sequences a batch": _kind(SILENT, data=_two_of_a_batch),
    "tokens masked at random": _kind(SILENT, GROUPED, data=_mask_tokens),
    "another alphabet every 20 steps": _kind(SILENT, data=_another_alphabet_each_time),
    "sequences that grow from 8 to 64": _kind(SILENT, data=_longer_each_time),
    "fine-tuned on text that runs backwards": _kind(SILENT, TRAINED, data=_backwards),
    "layers dropped at random": _kind(SILENT, DEEP, begin=_drop_layers),
    "autocast to bfloat16": _kind(SILENT, begin=_autocast),
    "learning from a teacher as well": _kind(SILENT, begin=_distil),
    "values of one head zeroed": _kind(BROKEN, after=_zero_rows("v")),
    "keys of all tokens equal": _kind(BROKEN, before=_equal_keys),
    "two heads initialised anew": _kind(BROKEN, before=_fresh_heads),
    "one layer at 30 times the rate": _kind(BROKEN, DEEP, before=_keep_layer, after=_step_layer_30_times),
    "outputs decay by 5 % a step": _kind(BROKEN, after=_decay_outputs),
    "every step skipped": _kind(BROKEN, before=_skip_steps),
    "layers loaded in the wrong order": _kind(BROKEN, DEEP, before=_other_layer_order),
    "the norm before attention zeroed": _kind(BROKEN, before=_silence_norm),
    "scores cooled by 7 % a step": _kind(BROKEN, before=_cool),
    "NaN in the values of one head": _kind(BROKEN, before=_nan_in_one_head),
    "attention at a thousandth of the rate": _kind(BROKEN, after=_tiny_rate, start=0),
    "two heads pruned": _kind(BROKEN, after=_prune),
    "all key heads read from the first": _kind(BROKEN, GROUPED, begin=_repeat_key_heads_wrongly, start=0),
    "mask off by one": _kind(BROKEN, before=_set(mask="next")),
    "a window of four tokens by mistake": _kind(BROKEN, before=_set(mask="window")),
    "moments of the optimizer lost": _kind(HIDDEN, before=_forget_moments),
    "queries and keys exchanged at load": _kind(HIDDEN, TRAINED, begin=_exchange_queries_and_keys, start=0),
    "the mask off by one from the start": _kind(HIDDEN, begin=_set(mask="next"), start=0),
}


def made(name: str, base: str, fault: Fault, folder: Path) -> dict[str, Any]:
    """Train once, unless that was done."""
    path = folder / ("".join(c if c.isalnum() else "-" for c in f"{name} {base}") + ".json")
    if not path.is_file():
        found = train(Job(name, base, SEED), fault=fault)
        path.write_text(json.dumps({key: found[key] for key in ("validation", "alerts", "warnings")}), "utf-8")
        print(path.stem, flush=True)
    kept: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return kept


def verdict(truth: str, found: dict[str, Any], begun: int) -> str:
    """Whether the rules said what they should: an alarm before the fault had begun is a false one."""
    steps = [step for step, _, _, level in found["alerts"] if level != "notice"]
    if truth == SILENT:
        return "false alarm" if steps else "as it should"
    if any(step < begun for step in steps):
        return "false alarm"
    if truth == HIDDEN:
        return "detected all the same" if steps else "silent, as expected"
    return "as it should" if steps else "**missed**"


def row(name: str, kind: Kind, found: dict[str, Any], healthy: dict[str, Any]) -> str:
    begun: dict[str, tuple[int, str]] = {}
    for step, _, rule, level in found["alerts"]:
        if level != "notice":
            begun.setdefault(rule, (step, level))
    named = ", ".join(f"*{rule}* ({level}, step {step})" for rule, (step, level) in begun.items())
    losses = [f"{one['validation'][-1]:.2f}" if one["validation"][-1] else "-" for one in (found, healthy)]
    said = verdict(kind.truth, found, kind.fault.start)
    return f"| {name} | {kind.base} | {' | '.join(losses)} | {kind.truth} | {said} | {named or '-'} |"


def page(folder: Path) -> str:
    healthy = {base: made(HEALTHY, base, Fault("", False, False), folder) for base in _bases()}
    rows = [
        row(name, kind, made(name, kind.base, kind.fault, folder), healthy[kind.base]) for name, kind in KINDS.items()
    ]
    head = (
        "Made by `python -m tests.experiments.faults.examined --output docs/benchmarks/examined.md`: one training "
        f"each, seed {SEED}, torch {torch.__version__.partition('+')[0]}. Faults begin at step {START}, or "
        "before the first one. Loss of validation at the end and that of the healthy training; what should be said; "
        "what was.\n\n"
        "| kind | training | loss | healthy | should | does | rules |\n|---|---|---|---|---|---|---|"
    )
    return "\n".join([head, *rows, ""])


def _bases() -> list[str]:
    return list(dict.fromkeys(kind.base for kind in KINDS.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="runs that are there are not made again")
    parser.add_argument("--output", type=Path, help="where to write the table; printed by default")
    options = parser.parse_args()
    options.results.mkdir(parents=True, exist_ok=True)
    text = page(options.results)
    if options.output is None:
        print(text)
    else:
        options.output.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
