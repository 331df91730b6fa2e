"""Examine many architectures, and judge each claim about their heads by what the models themselves do.

    python -m tests.studies.zoo [--names bert gpt2 | --every 10] [--workers 2] [--output docs/supported-models.md]

Results go to a file of JSON lines, so that a run that was ended goes on.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tests.attention.models import contradiction
from tests.studies.zoo import configs, sources
from tests.studies.zoo.oracle import Oracle
from tests.studies.zoo.table import page, verdict_of

LIMIT = 300  # seconds for one architecture


def examine(name: str) -> dict[str, Any]:
    """Build, run, find and judge."""
    torch.set_num_threads(1)
    torch.backends.mha.set_fastpath_enabled(False)
    warnings.simplefilter("ignore")
    start, error = time.monotonic(), ""
    try:
        for model, forward in sources.examples(name):
            try:
                torch.manual_seed(0)
                with torch.no_grad():
                    forward()
            except Exception as failed:  # the next inputs may be what it takes
                error = error or f"{type(failed).__name__}: {str(failed)[:150]}"
                continue
            try:
                result = judged(model, forward)
            except Exception as failed:
                trace = traceback.format_exc(limit=-3)
                result = {"verdict": "wrong", "wrong": [f"{type(failed).__name__}: {failed} {trace}"]}
            return result | {"name": name, "seconds": round(time.monotonic() - start, 1)}
    except Exception as failed:  # it cannot be built
        error = f"{type(failed).__name__}: {str(failed)[:150]}"
    return {"name": name, "verdict": "did not run", "why": error, "seconds": round(time.monotonic() - start, 1)}


def judged(model: torch.nn.Module, forward: Any) -> dict[str, Any]:
    """Find the heads of a model, and say of each claim whether it is right."""
    from hdi_callback.attention import survey

    begin = time.monotonic()
    found = survey(model, forward)
    reading = round(time.monotonic() - begin, 2)
    oracle = Oracle(model, forward)
    counts = head_counts(model)
    kinds: dict[tuple[object, ...], Any] = {}
    wrong, open_questions = [], []
    for layer in found.layers:
        if reason := contradiction(layer):
            wrong.append(f"{layer.name}: {reason}")
        if counts and not {layer.num_heads, layer.num_key_heads} <= counts | {1}:
            wrong.append(f"{layer.name}: {layer.num_heads} heads, {layer.num_key_heads} of keys, of {sorted(counts)}")
        key = type(layer.module).__name__, layer.kind, layer.num_heads, layer.head_dim, *sorted(layer.weights)
        kinds.setdefault(key, layer)
    for layer in kinds.values():
        answer = oracle.judge(layer)
        if answer:
            (open_questions if answer.startswith("?") else wrong).append(f"{layer.name}: {answer}")
    refused = {one.name: one.reason for one in found.refused}
    named = {site.path for layer in found.layers for site in layer.sites} | {one.name for one in found.layers}
    missed = sorted(path for path in oracle.paths if not _is_named(path, named | set(refused)))
    result = {
        "layers": len(found.layers), "judged": len(kinds), "wrong": wrong, "missed": missed,
        "open": open_questions, "refused": sorted({(_place(n), reason) for n, reason in refused.items()}),
        "kinds": sorted({_kind(one) for one in found.layers}), "notes": sorted({one.notes for one in found.layers}),
        "reading": reading, "findings": findings(model, forward, found),
    }  # fmt: skip
    return {"verdict": verdict_of(result), **result}


def head_counts(model: torch.nn.Module) -> set[int]:
    """Give the numbers of heads that a model's config, or modules, speak of."""
    holders = [getattr(one, "config", None) for one in model.modules()] + list(model.modules())
    counts: set[int] = set()
    for one in {id(one): one for one in holders if one is not None}.values():
        for name, value in vars(one).items():
            if re.search("head|query_groups|top_k", name) and not re.search("dim|size|width", name):
                given = value if isinstance(value, (list, tuple)) else [value]
                counts |= {each for each in given if isinstance(each, int) and not isinstance(each, bool)}
    return counts - {0, 1}


def findings(model: torch.nn.Module, forward: Any, found: Any) -> list[str]:
    """Give what `check` calls wrong in a model of others, which is a false alarm until it is shown."""
    from hdi_callback import check

    if not found.layers:
        return []
    return sorted({f"{_place(one.layer)}: {one.text}" for one in check(model, forward).wrong})


def _is_named(path: str, names: set[str]) -> bool:
    """Say whether a module, one around it or one in it is named."""
    return any(path == one or path.startswith(f"{one}.") or one.startswith(f"{path}.") for one in names if one) or (
        path in names
    )


def _place(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _kind(layer: Any) -> str:
    weights, key = layer.weights, layer.weights["key"]
    if any(len(one.terms) > 1 for one in weights.values()):
        return "sum of a base and an update"
    if len(key.terms[0].factors) > 1:
        return "product of a shared map and one of each head"
    shared = "one key head" if layer.num_key_heads == 1 < layer.num_heads else "grouped keys"
    names = {tuple(weights[role].terms[0].factors[0].names) for role in ("query", "key") if role in weights}
    packed = "queries and keys in one parameter" if len(names) == 1 and "query" in weights else "maps of their own"
    return f"{packed}, {shared}" if layer.num_key_heads < layer.num_heads else packed


def run(names: list[str], workers: int, examine: Callable[[str], dict[str, Any]] = examine) -> Iterator[dict[str, Any]]:
    """Examine each in a process of its own, which is ended after a while."""
    context = multiprocessing.get_context("fork")
    waiting, running = list(names), {}
    while waiting or running:
        while waiting and len(running) < workers:
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_in_process, args=(examine, waiting[0], theirs))
            process.start()
            theirs.close()
            running[waiting.pop(0)] = process, ours, time.monotonic()
        for name, (process, ours, since) in list(running.items()):
            late = time.monotonic() - since > LIMIT
            if not (late or ours.poll(0.02) or not process.is_alive()):
                continue
            try:
                result = ours.recv() if ours.poll() else None
            except EOFError:
                result = None
            process.kill()
            process.join()
            del running[name]
            why = "takes too long" if late else "ended by itself"
            yield result or {"name": name, "verdict": "did not run", "why": why, "seconds": LIMIT}


def _in_process(examine: Callable[[str], dict[str, Any]], name: str, to: Any) -> None:
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    to.send(examine(name))
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", nargs="*", help="architectures, or the sources transformers, timm, packages")
    parser.add_argument("--every", type=int, default=1, help="a sample: one of so many")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--results", type=Path, default=Path("runs/zoo.jsonl"))
    parser.add_argument("--output", type=Path, help="the page to write")
    options = parser.parse_args()
    wanted = [
        name
        for one in options.names or ["packages", "timm", "transformers"]
        for name in (sources.names(one) if one in {"packages", "timm", "transformers"} else [one])
    ][:: options.every]
    options.results.parent.mkdir(parents=True, exist_ok=True)
    lines = options.results.read_text().splitlines() if options.results.exists() else []
    known = {one["name"]: one for one in map(json.loads, lines)}
    for common in ("bert", "clip"):  # what all of them import, before processes part
        next(configs.variants(common))
    with options.results.open("a") as file:
        for one in run([name for name in wanted if name not in known], options.workers):
            known[one["name"]] = one
            file.write(json.dumps(one) + "\n")
            file.flush()
            details = [one[key] for key in ("why", "wrong", "missed", "open", "findings") if one.get(key)]
            print(f"{one['verdict']:12} {one['name']:40} {one['seconds']:5}", *details, flush=True)
    text = page([known[name] for name in wanted])
    if options.output:
        options.output.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
