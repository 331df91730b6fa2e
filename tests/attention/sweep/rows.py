# ruff: noqa: T201
"""Hold what the monitor says of attention against the weights that models return, and write the table.

    python -m tests.attention.sweep.rows --output docs/attention-rows.md

Every architecture of transformers that can be built small is run three times: once with `output_attentions=True` under
its eager attention, and once with the monitor under eager and under sdpa each. From the weights that come back entropy,
sink, overlap and the largest score are computed here, by the formulas of the docs and nothing of the package.

Results are kept one file per architecture under `runs/rows`; a run that was stopped goes on where it was. With
``--again`` everything is run anew.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import itertools
import json
import math
import multiprocessing
import os
import resource
import sys
import time
import typing
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).parents[3]
MEMORY = 8 * 2**30
READINGS = ("attention_entropy", "attention_sink", "attention_overlap", "attention_logit")
TOLERANCE = 1e-5
WAYS = ("eager", "sdpa")

_HEAD = """\
# Attention rows against the weights that models return

`attention_entropy`, `attention_sink`, `attention_overlap` and `attention_logit`, read through the whole monitor in one
forward, against the same numbers computed from the weights that the model returns with `output_attentions=True`. Each
architecture of transformers is built from a small configuration with random weights, and read under its eager attention
and under `sdpa`, where the model gives the same under both: PaliGemma leaves its mask out under `sdpa`. The largest
score is taken from what the softmax was given, where the model subtracts nothing from it. A layer whose weights the
model does not return is compared with what the softmax in its own module gave under eager attention; a layer is wrong
where it differs from the weights of its own module, or from weights that no module is known to have computed.

{summary}

Written by `make zoo`, or by `python -m tests.attention.sweep.rows --output docs/attention-rows.md`, with torch {torch}
and transformers {transformers}.

{table}

## Not measured

{absent}

## Not compared

{rest}
"""


def truth_of(weights: Tensor) -> dict[str, float]:
    """The formulas of the docs.

    Args:
        weights: ``(batch, H, queries, keys)``; a key that no head weighs is one that is not seen.

    Returns:
        Name of a reading -> number.
    """
    a = weights.double()
    n = (a > 0).any(1).sum(-1)  # (batch, queries)
    kept = n >= 2
    if not bool(kept.any()):
        return {}
    rows = a.transpose(1, 2)[kept]  # (rows, H, keys)
    entropy = (torch.special.entr(rows).sum(-1) / n[kept].double().log()[:, None]).mean()
    product = torch.einsum("rhk,rgk->hg", rows, rows)
    above = torch.triu(torch.ones_like(product, dtype=torch.bool), 1)
    size = product.diagonal().sqrt()
    found = {"attention_entropy": float(entropy), "attention_sink": float(rows.mean(0).max())}
    if bool(above.any()):
        found["attention_overlap"] = float((product / size[:, None] / size[None])[above].mean())
    return found


def joined(weights: list[Tensor]) -> list[Tensor]:
    """Put those together that are parts of one softmax: of a query's own tokens, and of those of the encoder."""
    whole: list[Tensor] = []
    for one in weights:
        for place, other in enumerate(whole):
            if one.shape[:-1] != other.shape[:-1]:
                continue
            parts = torch.stack([other.sum(-1), one.sum(-1)]).double()
            if bool(((parts.sum(0) - 1).abs() < 1e-4).all()) and bool((parts < 1 - 1e-4).any()):
                whole[place] = torch.cat([other, one], -1)
                break
        else:
            whole.append(one)
    return whole


def whole_of(weights: Tensor, kept: list[Softmax]) -> Tensor:
    """Find the softmax that weights are the last queries and keys of: some models leave out those of a prompt."""
    queries, keys = weights.shape[-2:]
    for _, _, result, _ in kept:
        if result.dim() == 4 and result.shape[:2] == weights.shape[:2] and result.shape[-1] > keys:
            last = result[..., -queries:, -keys:].nan_to_num()
            if last.shape == weights.shape and torch.allclose(last.float(), weights.float(), atol=1e-7):
                return result.nan_to_num()
    return weights


class Softmax(typing.NamedTuple):
    """One softmax of a forward.

    Attributes:
        module: the dotted path of the module that called it.
        argument: what it was given.
        result: what it gave.
        call: which call of a module ran it, numbered over the forward.
    """

    module: str
    argument: Tensor
    result: Tensor
    call: int = 0


@contextmanager
def softmaxes(model: nn.Module) -> Iterator[list[Softmax]]:
    """Keep what every softmax is given and gives, and the module that calls it."""
    kept: list[Softmax] = []
    running: list[tuple[str, int]] = [("", 0)]
    calls = itertools.count(1)
    hooks = []
    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(lambda *_, name=name: running.append((name, next(calls)))))
        hooks.append(module.register_forward_hook(lambda *_: (running.pop(), None)[1], always_call=True))
    places = ((nn.functional, "softmax"), (torch, "softmax"), (Tensor, "softmax"))
    plain = [getattr(owner, name) for owner, name in places]

    def watching(function: Any) -> Any:
        def softmax(argument: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            result = function(argument, *args, **kwargs)
            module, call = running[-1]
            kept.append(Softmax(module, argument.detach(), result.detach(), call))
            return result

        return softmax

    for (owner, name), function in zip(places, plain):
        setattr(owner, name, watching(function))
    try:
        yield kept
    finally:
        for (owner, name), function in zip(places, plain):
            setattr(owner, name, function)
        for hook in hooks:
            hook.remove()


def _softmax_of(weights: Tensor, kept: list[Softmax]) -> tuple[Softmax, Tensor] | None:
    """Find the softmax that gave some weights, and its argument in their shape."""
    for one in kept:
        if one.argument.numel() != one.result.numel() or one.result.dim() < 3:
            continue
        with suppress(RuntimeError):
            mine = one.result.reshape(*weights.shape[:-1], -1)[..., : weights.shape[-1]]
            if torch.allclose(mine.float(), weights.float(), atol=1e-6):
                return one, one.argument.reshape(*weights.shape[:-1], -1)
    return None


def largest_score(weights: Tensor, kept: list[Softmax]) -> float | None:
    """The largest score of a key that is seen; None where what the softmax was given was shifted before."""
    found = _softmax_of(weights, kept)
    if found is None or found[1].shape[-1] > weights.shape[-1] or bool((found[1].amax(-1) == 0).all()):
        return None
    return float(found[1][weights > 0].max())


def module_of(weights: Tensor, kept: list[Softmax]) -> str | None:
    """The module whose softmax gave some weights; None where no softmax that was seen gave them."""
    found = _softmax_of(weights, kept)
    return None if found is None else found[0].module


def of_pieces(weights: list[Tensor], kept: list[Softmax]) -> list[list[Tensor]]:
    """Put those together that one call of a module gave: of packed pictures, say, each of which attends to itself."""
    pieces: dict[tuple[Any, ...], list[Tensor]] = {}
    for number, one in enumerate(weights):
        found = _softmax_of(one, kept)
        place = (None, number) if found is None else (found[0].call, *one.shape[:2])
        pieces.setdefault(place, []).append(one)
    return list(pieces.values())


def _truth_together(pieces: list[Tensor], kept: list[Softmax]) -> dict[str, Any]:
    """The truth of rows that stand in several tensors."""
    truths = [_truth(piece, kept) for piece in pieces]
    if len(pieces) == 1:
        return truths[0]
    queries, keys = sum(piece.shape[-2] for piece in pieces), max(piece.shape[-1] for piece in pieces)
    whole, row = pieces[0].new_zeros(*pieces[0].shape[:2], queries, keys), 0
    for piece in pieces:
        whole[..., row : row + piece.shape[-2], : piece.shape[-1]] = piece  # each with its own first key as the first
        row += piece.shape[-2]
    scores = [truth["attention_logit"] for truth in truths if "attention_logit" in truth]
    known = {"attention_logit": max(scores)} if len(scores) == len(pieces) else {}
    return truth_of(whole) | known | {"heads": whole.shape[1], "module": truths[0]["module"]}


def _truth(weights: Tensor, kept: list[Softmax]) -> dict[str, Any]:
    score = largest_score(weights, kept)
    truth = truth_of(weights) | {"heads": weights.shape[1], "module": module_of(weights, kept)}
    return truth | ({} if score is None else {"attention_logit": score})


def compare(model_type: str, batch: int = 2) -> dict[str, Any]:
    """Build an architecture, run it, and compare.

    Returns:
        ``verdict`` (``"right"``, ``"wrong"``, ``"not measured"``, ``"returns none"``, ``"computes otherwise"``,
        ``"does not run"``), ``worst``:
        reading -> largest difference, ``absent``: reasons, ``layers``: how many were compared under each attention.
    """
    from hdi_callback import HeadDiversityMonitor
    from tests.attention.observe.oracle import returned

    torch.manual_seed(0)
    model, arguments, alone = _that_runs(model_type, batch)
    if arguments is None:
        if type(model).forward is nn.Module.forward:
            return {"verdict": "returns none", "reason": "it has no forward of its own, only its parts have"}
        if not can_return(model):
            return {"verdict": "returns none", "reason": "it has no attention whose weights it could return"}
        return {"verdict": "does not run", "reason": "no inputs fit"}
    with softmaxes(model) as kept, torch.no_grad():
        try:
            asked = model(**arguments, output_attentions=True)
        except Exception as error:
            reason = f"asked for its weights, it fails: {type(error).__name__}: {error}"
            return {"verdict": "returns none", "reason": reason[:200]}
    # LongT5 fills its blocks up with padding of its own, whose queries weigh all keys alike and are of no token.
    given_back = [one for one in returned(asked) if one.dim() < 5 or one.shape[-1] != 3 * one.shape[-2]]
    every = [one.flatten(0, -4) if one.dim() > 4 else one for one in given_back]
    weights = [whole_of(one, kept) for one in joined([one for one in every if _are_weights(one)])]
    if not _are_equal(alone, asked):
        return {"verdict": "computes otherwise", "reason": "asked for its weights, it computes something else"}
    if not weights:
        odd = "what it returns is not, for each head, what its queries weigh their keys with"
        return {"verdict": "returns none", "reason": odd if every else "it returns no attention weights"}
    truths = [_truth_together(pieces, kept) for pieces in of_pieces(weights, kept)]
    own = [_truth(one.result, [one]) for one in kept if _are_weights(one.result)]
    report: dict[str, Any] = {"returned": len(weights), "layers": {}, "worst": {}, "wrong": [], "absent": {}}
    with HeadDiversityMonitor(model, metrics=READINGS, padding=None) as monitor:
        monitor._rows.observer._max_queries = 10**6  # all queries, as the truth has them
        for way in WAYS:
            try:
                model.set_attn_implementation(way)
            except Exception:
                if way == "sdpa":
                    report["layers"][way] = None  # of a family that has none
                    continue
            monitor.arm()
            argument = model(**arguments)
            record = monitor.measure(0).record()
            if not _are_equal(alone, argument):
                report["layers"][way] = None  # the weights that eager returned are not those of this attention
                continue
            refused = {refusal.name: refusal.reason for refusal in monitor.refused}
            _compare_all(record, refused, truths, own, way, report)
    measured = sum(count or 0 for count in report["layers"].values())
    report["verdict"] = "wrong" if report["wrong"] else "right" if measured else "not measured"
    return report


def _that_runs(model_type: str, batch: int) -> tuple[Any, dict[str, Any] | None, Any]:
    """Build an architecture, larger where it is too small to run, with what it runs on and what it gives."""
    from tests.attention.sweep import architectures, inputs

    first: Any = None
    for variant in architectures.variants(model_type):
        model: Any = variant.eval()
        first = first or model
        with suppress(Exception):
            model.set_attn_implementation("eager")
        # One at a time, where a model takes no more.
        for arguments in itertools.chain.from_iterable(
            itertools.islice(inputs.for_model(model, count), 40) for count in (batch, 1)
        ):
            with suppress(Exception):
                return model, arguments, model(**arguments)
    return first, None, None


def can_return(model: nn.Module) -> bool:
    """Say whether what a model gives has a place for attention weights, and whether there is any that gives some."""
    if not _has_place(model):
        return False
    for module in model.modules():
        if "output_attentions" in inspect.signature(module.forward).parameters:
            return True
        for name, recorded in (getattr(module, "_can_record_outputs", None) or {}).items():
            for kind in recorded if isinstance(recorded, (list, tuple)) else [recorded]:
                kind = getattr(kind, "target_class", kind)
                is_there = not isinstance(kind, type) or any(isinstance(part, kind) for part in module.modules())
                if "attentions" in name and is_there:
                    return True
    return False


def _has_place(model: nn.Module) -> bool:
    """Look at what a forward says that it returns, and at what it takes."""
    if "output_attentions" in inspect.signature(model.forward).parameters:
        return True
    with suppress(NameError, TypeError):
        said = typing.get_type_hints(model.forward).get("return")
        outputs = [one for one in (said, *typing.get_args(said)) if dataclasses.is_dataclass(one)]
        names = [field.name for one in outputs for field in dataclasses.fields(one)]
        return not outputs or any("attentions" in name or name.endswith(("output", "outputs")) for name in names)
    return True


def _are_equal(alone: Any, asked: Any) -> bool:
    """Compare what a model gives with what it gives when it is asked for its weights, or computes them otherwise."""
    pairs = [(alone[name], asked[name]) for name in getattr(alone, "keys", list)() if name in asked]
    return all(
        torch.allclose(one, other, rtol=1e-4, atol=1e-5, equal_nan=True)
        for one, other in pairs
        if isinstance(one, Tensor) and one.is_floating_point() and one.shape == other.shape
    )


def _are_weights(one: Tensor) -> bool:
    """Leave out scores, and means over heads, which some models return under the name of attentions."""
    if one.dim() != 4 or (one.shape[1] > 1 and torch.equal(one, one[:, :1].expand_as(one))):  # a mean over heads
        return False
    return bool((one >= 0).all()) and bool((one.sum(-1) < 1 + 1e-3).all()) and bool(one.any())


def _compare_all(
    record: Any,
    refused: dict[str, str],
    truths: list[dict[str, Any]],
    own: list[dict[str, Any]],
    way: str,
    report: dict[str, Any],
) -> None:
    """Put layers and returned weights together, those that agree best first; each is taken once.

    A layer whose weights the model does not return is held against the softmaxes in its own module.

    Args:
        record: what the monitor says of the layers.
        refused: name -> reason.
        truths: of the returned weights.
        own: of every softmax of the eager forward whose result has the shape of attention weights.
        way: how attention is computed.
        report: takes the result.
    """
    found = {name: layer for name, layer in record.layers.items() if "attention_entropy" in layer.values}
    pairs = []
    for name, layer in found.items():
        for place, truth in enumerate(truths):
            if truth["heads"] == len(layer.arrays["attention_entropy"]):
                apart = _all_apart(layer.values, truth)
                pairs.append((max(apart.values(), default=math.inf), name, place, apart))
    pairs.sort(key=lambda pair: pair[:3])
    layers, places = set(found), set(range(len(truths)))
    agreed = 0
    for worst, name, place, apart in pairs:
        if worst < TOLERANCE and name in layers and place in places:
            layers.remove(name)
            places.remove(place)
            agreed += 1
            _note(report["worst"], apart)

    def call_wrong(of_the_layer: Callable[[str, str | None], bool]) -> None:
        for _, name, place, apart in pairs:
            if name in layers and place in places and of_the_layer(name, truths[place]["module"]):
                layers.remove(name)
                places.remove(place)
                report["wrong"].append([way, name, apart])

    # What is left of both does not agree, and is wrong where a softmax of the layer's own module gave the weights.
    call_wrong(lambda name, module: module is not None and _is_same(name, module))
    # What is left of the layers is not returned, but softmaxes of their own modules may have been seen.
    for name in sorted(layers):
        heads = len(found[name].arrays["attention_entropy"])
        mine = [truth for truth in own if truth["heads"] == heads and _is_same(name, truth["module"])]
        every = [_all_apart(found[name].values, truth) for truth in mine]
        apart = min(every, key=lambda one: max(one.values(), default=math.inf), default={})
        if apart:
            layers.remove(name)
            if max(apart.values()) < TOLERANCE:
                agreed += 1
                _note(report["worst"], apart)
                report.setdefault("by their softmax", {}).setdefault(way, []).append(name)
            else:
                report["wrong"].append([way, name, apart])
    # Weights of no module that is known may be of any layer that is left, unless fewer come back than are read.
    known = [*record.layers, *refused]
    if len(found) <= len(truths):
        call_wrong(lambda _, module: module is None or not any(_is_same(one, module) for one in known))
    report["layers"][way] = agreed
    report.setdefault("not returned", {})[way] = sorted(layers)
    if places:
        report["absent"].update({f"{name} [{way}]": why for name, why in {**record.absent, **refused}.items()})
        report.setdefault("weights without a layer", {})[way] = len(places)


def _is_same(layer: str, module: str) -> bool:
    """Say whether a softmax that ran in a module may be of a layer: one is the other, or around it."""
    return f"{module}.".startswith(f"{layer}.") or f"{layer}.".startswith(f"{module}.")


def _all_apart(values: dict[str, float], truth: dict[str, Any]) -> dict[str, float]:
    return {key: _apart(values[key], truth[key]) for key in READINGS if key in truth and key in values}


def _note(worst: dict[str, float], apart: dict[str, float]) -> None:
    for key, value in apart.items():
        worst[key] = max(worst.get(key, 0.0), value)


def _apart(one: float, other: float) -> float:
    return abs(one - other) / max(1.0, abs(other))


# --- all of them


def _run(name: str, path: Path, seconds: int) -> None:
    """Run in a process of its own."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        report = compare(name)
    except BaseException as error:
        report = {"verdict": "does not run", "reason": f"{type(error).__name__}: {error}"[:200]}
    path.write_text(json.dumps({"name": name, **report}, indent=1))
    os._exit(0)


def run(names: list[str], folder: Path, timeout: int, *, again: bool, until: float) -> None:
    """Compare the architectures that have no result yet, one after the other."""
    # Once, before the forks: what nearly every model imports takes longer than to compare one.
    import transformers.models.llama.modeling_llama  # noqa: F401
    import transformers.models.vit.modeling_vit  # noqa: F401

    import hdi_callback  # noqa: F401
    from tests.attention.observe import oracle  # noqa: F401
    from tests.attention.sweep import architectures, inputs  # noqa: F401

    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("fork")
    for name in names:
        path = folder / f"{name}.json"
        if (path.exists() and not again) or time.monotonic() > until:
            continue
        process = context.Process(target=_run, args=(name, path, timeout))
        process.start()
        process.join(10 * timeout)  # on a machine that others use
        if process.is_alive():
            process.kill()
            process.join()
        if not path.exists():
            reason = f"it took over {timeout} s of CPU time, or more memory than there is"
            path.write_text(json.dumps({"name": name, "verdict": "does not run", "reason": reason}))
        report = json.loads(path.read_text())
        print(name, report["verdict"], report.get("wrong") or report.get("reason", ""), flush=True)


def table(reports: list[dict[str, Any]], known: int) -> str:
    """Write the page; `known` is how many architectures there are."""
    import transformers

    counts = Counter(report["verdict"] for report in reports)
    compared = [report for report in reports if report["verdict"] in ("right", "wrong")]
    lines = ["| architecture | layers: eager | sdpa | " + " | ".join(_short(key) for key in READINGS) + " |"]
    lines.append("|---" * (3 + len(READINGS)) + "|")
    for report in compared:
        cells = [str("-" if report["layers"].get(way) is None else report["layers"][way]) for way in WAYS]
        cells += [f"{report['worst'][key]:.0e}" if key in report["worst"] else "-" for key in READINGS]
        mark = " (**wrong**)" if report["verdict"] == "wrong" else ""
        lines.append(f"| {report['name']}{mark} | " + " | ".join(cells) + " |")
    reasons: dict[str, list[str]] = {}
    for report in reports:
        for name, reason in report.get("absent", {}).items():
            reasons.setdefault(_cell(reason), []).append(f"{report['name']}: `{name.removeprefix('attention rows/')}`")
    absent = [
        f"- {reason} ({'; '.join(where[:6])}{'; ...' if len(where) > 6 else ''})" for reason, where in reasons.items()
    ]
    rest = [
        f"- {verdict} ({counts[verdict]}): "
        + ", ".join(report["name"] for report in reports if report["verdict"] == verdict)
        for verdict in ("not measured", "computes otherwise", "returns none", "does not run")
        if counts[verdict]
    ]
    worst = max((value for report in compared for value in report["worst"].values()), default=0.0)
    summary = (
        f"Of {known} architectures {len(reports)} were run; {len(compared) + counts['not measured']} of them return "
        "attention weights. All "
        f"layers that are measured agree in {counts['right']} of them, to {worst:.0e} at most; wrong: "
        f"{counts['wrong'] or 'none'}; in {counts['not measured']} no layer is measured."
    )
    versions = {"torch": torch.__version__.split("+")[0], "transformers": transformers.__version__}
    return _HEAD.format(
        summary=summary, table="\n".join(lines), absent="\n".join(absent) or "None.", rest="\n".join(rest) or "None.",
        **versions,
    )  # fmt: skip


def _short(key: str) -> str:
    return key.removeprefix("attention_")


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="model types; all of them if none is given")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/rows")
    parser.add_argument("--timeout", type=int, default=60, help="seconds of CPU time for one architecture")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin with no further one after this time")
    parser.add_argument("--again", action="store_true", help="compare again what is known")
    parser.add_argument("--as-is", action="store_true", help="compare nothing, write the table from what is there")
    parser.add_argument("--output", type=Path, help="where to write the table")
    arguments = parser.parse_args()
    from tests.attention.sweep import vision

    if vision.is_here():  # some of transformers need timm
        vision.declare_operators()
    from tests.attention.sweep.architectures import architectures

    names = arguments.names or list(architectures())
    if not arguments.as_is:
        until = time.monotonic() + 60 * arguments.minutes
        run(names, arguments.folder, arguments.timeout, again=arguments.again, until=until)
    paths = [arguments.folder / f"{name}.json" for name in names]
    reports = [json.loads(path.read_text()) for path in paths if path.exists()]
    print(dict(Counter(report["verdict"] for report in reports)))
    if arguments.output is not None:
        arguments.output.write_text(table(reports, len(architectures())))


if __name__ == "__main__":
    sys.exit(main())
