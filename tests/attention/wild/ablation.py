# ruff: noqa: T201
"""Switch mechanisms of finding off, one at a time, and see which modules by hand are read otherwise.

python -m tests.attention.wild.ablation trace.checks:HeadChecks.require_tokens='None' --modules 40
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hdi_callback.attention.trace import graph_cut
from tests.attention.wild.catalogue import cases
from tests.attention.wild.verdict import judge

WAYS = ("model", "forward")


@contextmanager
def replaced(target: str, change: Callable[[Any], Any]) -> Iterator[None]:
    """Put another function in the place of one, ``module:name`` or ``module:Class.name``, wherever it is imported."""
    path, _, name = target.partition(":")
    owner: Any = importlib.import_module(f"hdi_callback.attention.{path}")
    *parts, last = name.split(".")
    for part in parts:
        owner = getattr(owner, part)
    known = owner.__dict__[last]
    rooms = [module for one, module in list(sys.modules.items()) if one.startswith("hdi_callback.")]
    places = [(vars(room), key) for room in rooms for key, value in vars(room).items() if value is known]
    places += [(graph_cut._HANDLERS, key) for key, value in graph_cut._HANDLERS.items() if value is known]
    new = change(known)
    for place, key in places:
        place[key] = new
    setattr(owner, last, new)
    try:
        yield
    finally:
        for place, key in places:
            place[key] = known
        setattr(owner, last, known)


def ablate(target: str, neutral: Any, most: int) -> None:
    """Print which modules a mechanism says something of, and how they are read without it."""
    known, before, concerned = cases(), {}, []
    for name, case in known.items():
        for way in WAYS:
            answers: list[Any] = []

            def recording(function: Any, answers: list[Any] = answers) -> Any:
                def call(*args: Any, **kwargs: Any) -> Any:
                    answers.append(None)  # also of a call that raises
                    answers[-1] = answer = function(*args, **kwargs)
                    if type(answer) is type(neutral) and (answer is neutral or answer == neutral):
                        answers.pop()
                    return answer

                return call

            with replaced(target, recording):
                before[name, way] = judge(case, way)
            concerned += [(name, way)] if answers else []
    modules = list(dict.fromkeys(name for name, _ in concerned))
    chosen = modules[:: max(1, -(-len(modules) // most))]
    changed = []
    for name, way in concerned:
        if name in chosen:
            with replaced(target, lambda _: lambda *args, **kwargs: neutral):
                after = judge(known[name], way)
            if after != before[name, way]:
                changed.append((name, before[name, way].verdict, after.verdict))
    print(f"{target}: of {len(modules)} modules, {len(chosen)} tried, {len({one for one, *_ in changed})} change")
    print(f"    {dict(Counter(f'{one} -> {other}' for _, one, other in changed))}")
    print(f"    {sorted({one for one, *_ in changed})}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mechanisms", nargs="+", help="module:function=what it gives in place of its answer")
    parser.add_argument("--modules", type=int, default=40, help="most modules that are read again for each")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for one in arguments.mechanisms:
        target, _, neutral = one.partition("=")
        ablate(target, eval(neutral), arguments.modules)


if __name__ == "__main__":
    main()
