"""A further family: faults and healthy trainings of kinds that no rule was made for, tried on the rules as they ship.

python -m tests.experiments.faults.further --part confirming --output docs/benchmarks/faults-further.md

Seeds of the looked-at part were seen while rules were mended; those of the confirming part were first used after that.
"""

from __future__ import annotations

import argparse
import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.experiments.faults.faults import START, Fault, Run, _set
from tests.experiments.faults.monitors import alarm_of_rules
from tests.experiments.faults.plan import HEALTHY, Job, Part
from tests.experiments.faults.report import COST, Result, bound
from tests.experiments.faults.run import RESULTS, train
from tests.experiments.faults.trainings import BASES, DEEP, PROVOKED

FIRST: dict[Part, int] = {"looked-at": 40_000, "confirming": 80_000}
TURNS: dict[Part, int] = {"looked-at": 1, "confirming": 2}


def _never_clear(run: Run, step: int) -> None:
    for place, parameter in enumerate(run.model.parameters()):
        if parameter.grad is not None:
            parameter.grad += run.kept.get(place, 0.0)
            run.kept[place] = parameter.grad.clone()


def _load_earlier(run: Run, step: int) -> None:
    if step == 10:
        run.kept["earlier"] = {name: value.clone() for name, value in run.model.state_dict().items()}
    if step == START:
        run.model.load_state_dict(run.kept["earlier"])


def _tie_layers(run: Run, step: int) -> None:
    first = run.model.blocks[0].attention
    for block in run.model.blocks[1:]:
        block.attention = first


def _turn_padding(run: Run, step: int) -> None:
    run.model.switches.padding = "inverted" if step >= START else "right"


def _large_adapters(run: Run, step: int) -> None:
    for module in run.model.modules():
        if hasattr(module, "lora_A"):
            module.scaling["default"] *= 100


def _other_heads(run: Run, step: int) -> None:
    if step == START:
        for layer in run.layers:
            layer.num_heads, layer.num_key_value_heads = layer.num_heads * 2, layer.num_key_value_heads * 2


def _leave_untrained(run: Run, step: int) -> None:
    for projection in (run.layer.q_proj, run.layer.k_proj, run.layer.v_proj, run.layer.out_proj):
        torch.nn.init.normal_(projection.weight, std=projection.weight.shape[1] ** -0.5)


def _forget_keys(run: Run, step: int) -> None:
    keys = {id(layer.k_proj.weight) for layer in run.layers}
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in keys]


def _shift_labels(run: Run, batch: Any, step: int) -> Any:
    x, y = batch
    return x, y.roll(-1, 1)


def _restart(run: Run, step: int) -> None:
    # Down to a hundredth at step 50, and up again to the full rate.
    run.scale_rates(max(0.01, 1 - (step % 50) / 50) / (1 - 0.9 * step / 100))


def _split_by_layer(run: Run, step: int) -> None:
    for optimizer in run.optimizers:
        for group in list(optimizer.param_groups):
            for depth, block in enumerate(run.model.blocks[:-1]):
                own = {id(parameter) for parameter in block.parameters()}
                mine = [parameter for parameter in group["params"] if id(parameter) in own]
                if mine:
                    group["params"] = [parameter for parameter in group["params"] if id(parameter) not in own]
                    rest = {name: value for name, value in group.items() if name != "params"}
                    rest["lr"] *= 0.3 ** (len(run.model.blocks) - 1 - depth)
                    optimizer.add_param_group({**rest, "params": mine})


def _freeze_at_first(run: Run, step: int) -> None:
    for layer in run.layers:
        for parameter in layer.parameters():
            parameter.requires_grad_(step >= START)
            if step < START:
                parameter.grad = None


def _freeze_late(run: Run, step: int) -> None:
    for layer in run.layers:
        for parameter in layer.parameters():
            parameter.requires_grad_(False)
            parameter.grad = None


def _lengthen(run: Run, batch: Any, step: int) -> Any:
    length = 16 if step < 30 else 32 if step < 60 else 64
    return tuple(part[:, :length] for part in batch)


def _average(run: Run, step: int) -> None:
    if 60 <= step <= 80:
        for name, value in run.model.state_dict().items():
            run.kept[name] = run.kept.get(name, 0.0) + value.clone() / 21
    if step == 80:
        run.model.load_state_dict({name: run.kept[name] for name in run.model.state_dict()})


def _pad_at_random(run: Run, batch: Any, step: int) -> Any:
    x, y = (part.clone() for part in batch)
    for row, length in enumerate(torch.randint(16, 64, (len(x),), generator=run.generator).tolist()):
        x[row, length:] = 0
        y[row, length:] = 0
    return x, y


KINDS: dict[str, Fault] = {
    "gradients are never cleared": Fault("optimisation", True, True, before=_never_clear, start=0),
    "weights of an early step are loaded": Fault("code", True, True, before=_load_earlier, start=10),
    "dropout of 0.9 on the weights of attention": Fault("code", True, False, begin=_set(dropout=0.9), start=0),
    "all tokens are given the first position": Fault(
        "code", True, False, begin=_set(has_places=False), start=0, bases=("text", "reversal, encoder-decoder")
    ),
    "labels shifted by two": Fault("data", True, False, data=_shift_labels, start=0, bases=("text", "text, grouped")),
    "all layers are one": Fault("code", True, False, begin=_tie_layers, start=0, bases=("text, four layers", "text")),
    "padding mask inverted when training goes on": Fault(
        "code", True, True, before=_turn_padding, begin=_set(padding="right"), start=0,
        bases=("digits, post-norm, SGD", "table"),
    ),
    "adapters with alpha 100": Fault(
        "optimisation", True, True, begin=_large_adapters, start=0, bases=("adapters of rank 1",)
    ),
    "other number of heads when training goes on": Fault(
        "code", True, True, before=_other_heads, bases=("text", "digits, post-norm, SGD")
    ),
    "a layer of a loaded model is left untrained": Fault(
        "code", True, False, begin=_leave_untrained, start=0, bases=("trained before, and trained on",)
    ),
    "no gradient reaches queries and keys": Fault("code", True, True, begin=_set(is_detached=True), start=0),
    "keys are not given to the optimizer": Fault(
        "optimisation", True, True, begin=_forget_keys, start=0, bases=("text", "digits, post-norm, SGD")
    ),
    "softmax over the queries": Fault("code", True, True, begin=_set(axis="queries"), start=0),
}  # fmt: skip

GOOD: dict[str, Fault] = {
    "cosine restarts": Fault("", False, False, before=_restart, start=0),
    "rates by layer": Fault("", False, False, begin=_split_by_layer, start=0, bases=("text, four layers", "text")),
    "attention frozen until step 40": Fault("", False, False, before=_freeze_at_first, start=0),
    "attention frozen from step 40 on": Fault("", False, False, before=_freeze_late),
    "sequences get longer": Fault("", False, False, data=_lengthen, start=0, bases=("text", "text, grouped")),
    "averaged weights are loaded": Fault("", False, False, after=_average, start=0),
    "sequences padded at random": Fault(
        "", False, False, data=_pad_at_random, start=0, bases=("text", "text, grouped")
    ),
    "dropout of 0.1 on the weights of attention": Fault("", False, False, begin=_set(dropout=0.1), start=0),
    "padded, with a mask": Fault(
        "", False, False, begin=_set(padding="right"), start=0, bases=("digits, post-norm, SGD", "table")
    ),
}


def _put_norms_last(run: Run, step: int) -> None:
    for block in run.model.blocks:
        block.is_pre = False


OF_DEPTH = {
    "post-norm too deep": Fault("code", True, True, begin=_put_norms_last, start=0, bases=("text, eight layers",)),
}
"""Added later, behind the others, whose trainings go by their places."""
FAULTY = KINDS | OF_DEPTH
EVERY_KIND = KINDS | GOOD | OF_DEPTH
TRIED_ON = ("text", "text, grouped", "digits, post-norm, SGD", "reversal, encoder-decoder", "table")


def plan(part: Part, turns: int | None = None) -> list[Job]:
    """Each kind on trainings by turns; runs of one turn on one training have one seed, and so one healthy twin."""
    jobs = []
    for turn in range(TURNS[part] if turns is None else turns):
        for place, (kind, fault) in enumerate(EVERY_KIND.items()):
            bases = TRIED_ON if fault.bases == ("",) else fault.bases
            base = bases[(turn + (1 if part == "looked-at" else 0) + place) % len(bases)]
            jobs.append(Job(kind, base, FIRST[part] + 100 * turn + list(BASES | PROVOKED | DEEP).index(base)))
    return jobs


def _place(job: Job, folder: Path) -> Path:
    return folder / f"{job.name}.json.gz"


def make(job: Job, folder: Path) -> Result:
    """Make a run, if it is not made."""
    done = _place(job, folder)
    if not done.is_file():
        result = train(job, fault=EVERY_KIND.get(job.kind))
        partial = done.with_suffix(".partial")
        partial.write_bytes(gzip.compress(json.dumps(result).encode(), mtime=0))
        partial.rename(done)
        print(job, result["validation"][-1], result["alerts"][:4], result["warnings"][:1], flush=True)
    return json.loads(gzip.decompress(done.read_bytes()))


ONSET = {
    "weights of an early step are loaded": START, "padding mask inverted when training goes on": START,
}  # fmt: skip
"""Steps from which an alarm counts, of those that prepare something before."""


def reported(run: Result) -> tuple[int, str] | None:
    """Give the step of the first alarm, and its rule; -1 and the beginning of a warning before training."""
    if run["kind"] in FAULTY and run["warnings"]:
        return -1, run["warnings"][0]
    fault = EVERY_KIND[run["kind"]]
    step = alarm_of_rules(run, ONSET.get(run["kind"], fault.start))
    if step is None:
        return None
    return step, next(rule for at, _, rule, level in run["alerts"] if at == step and level != "notice")


def report(part: Part, folder: Path, turns: int | None = None, *, only_made: bool = False) -> list[str]:
    """Make the runs and write what was reported."""
    lines = [
        "| fault or healthy change | training | cost | reported |",
        "|---|---|---|---|",
    ]
    found, false, shown, healthy = 0, 0, 0, 0
    for job in plan(part, turns):
        if only_made and not (_place(job, folder).is_file() and _place(replace(job, kind=HEALTHY), folder).is_file()):
            continue
        run, twin = make(job, folder), make(replace(job, kind=HEALTHY), folder)
        final, usual = run["validation"][-1], twin["validation"][-1]
        cost = "not finite" if final is None else f"{final - usual:+.2f}"
        alarm = reported(run)
        is_fault = job.kind in FAULTY
        shows = is_fault and FAULTY[job.kind].shows
        shown, found = shown + shows, found + (shows and alarm is not None)
        healthy, false = healthy + (not is_fault), false + (not is_fault and alarm is not None)
        said = "-" if alarm is None else "warning before training" if alarm[0] < 0 else f"{alarm[1]}, step {alarm[0]}"
        name = job.kind if shows else f"*{job.kind}*" if is_fault else f"healthy: {job.kind}"
        lines.append(f"| {name} | {job.base} | {cost} | {said} |")
    twins = [json.loads(gzip.decompress(path.read_bytes())) for path in folder.glob(f"{HEALTHY}*.json.gz")]
    alarmed = sum(alarm_of_rules(twin, 0) is not None for twin in twins)
    head = [
        f"Made by `python -m tests.experiments.faults.further --part {part}`. *Cost*: final validation loss above that "
        f"of the healthy run of the same seed, in nats; more than {COST} is a cost. In italics what attention cannot "
        "show. *Reported*: the first alarm of the rules as they ship.",
        "",
        f"Reported: {found} of {shown} runs with faults that attention can show. Alarmed: {bound(false, healthy)} of "
        f"the healthy runs with a change that rules may stumble over, {bound(alarmed, len(twins))} of their plain "
        "twins.",
        "",
    ]
    return [*head, *lines]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=FIRST, required=True)
    parser.add_argument("--results", type=Path, default=RESULTS / "further")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--turns", type=int, help="how often each kind is tried, on other trainings")
    parser.add_argument("--only-made", action="store_true", help="write of the runs that there are")
    options = parser.parse_args(argv)
    folder = options.results / options.part
    folder.mkdir(parents=True, exist_ok=True)
    text = "\n".join(report(options.part, folder, options.turns, only_made=options.only_made)) + "\n"
    print(text)
    if options.output is not None:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
