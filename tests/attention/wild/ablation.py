# ruff: noqa: T201
"""Switch mechanisms of finding off, one at a time, and see which modules by hand are read otherwise.

    python -m tests.attention.wild.ablation trace.checks:require_tokens='None' --modules 40
    python -m tests.attention.wild.ablation --together trace.inputs:with_optional='()' trace.inputs:_words_in='[]'
    python -m tests.attention.wild.ablation --together --architectures bert,pypi.linformer trace.inputs:_words_in='[]'

With `--together` all are switched off at once, and again by halves where something is read otherwise: what no module
needs costs one more reading of each.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from hdi_callback.attention.trace import graph_cut

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
    from tests.attention.wild.catalogue import cases
    from tests.attention.wild.verdict import judge

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


def ablate_together(neutral: Mapping[str, Any], names: list[str], look: Callable[[str], str]) -> None:
    """Print which mechanisms each of several models needs, alone or with others.

    Args:
        neutral: mechanism -> what it gives in place of its answer.
        names: of the models.
        look: tells how a model is read.
    """

    def without(mechanisms: list[str], name: str) -> str:
        with ExitStack() as stack:
            for target in mechanisms:
                answer = neutral[target]
                stack.enter_context(replaced(target, lambda _, answer=answer: lambda *args, **kwargs: answer))
            return look(name)

    def needed(mechanisms: list[str], name: str, before: str) -> list[list[str]]:
        if not mechanisms or without(mechanisms, name) == before:
            return []
        half = len(mechanisms) // 2
        parts = (mechanisms[:half], mechanisms[half:]) if half else ()
        return [one for part in parts for one in needed(part, name, before)] or [mechanisms]  # or each does for another

    for name in names:
        for mechanisms in needed(list(neutral), name, before := look(name)):
            print(
                f"{name} needs {' or '.join(mechanisms)}: {before}\n    without: {without(mechanisms, name)}",
                flush=True,
            )


def _as_architecture(name: str) -> str:
    from tests.attention.sweep.examine import examine

    kept = {"verdict", "reason", "layers", "refused", "missed", "said"}
    return json.dumps({key: value for key, value in examine(name).items() if key in kept}, default=str)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mechanisms", nargs="+", help="module:function=what it gives in place of its answer")
    parser.add_argument("--modules", type=int, default=40, help="most modules that are read again for each")
    parser.add_argument("--together", action="store_true", help="switch all of them off at once, in one forward each")
    parser.add_argument("--architectures", help="names of the sweep, with commas between; modules by hand by default")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    neutral = {target: eval(answer) for target, _, answer in (one.partition("=") for one in arguments.mechanisms)}
    if arguments.together and arguments.architectures:
        from tests.attention.sweep import vision

        vision.declare_operators()  # before transformers is imported
        ablate_together(neutral, arguments.architectures.split(","), _as_architecture)
    elif arguments.together:
        from tests.attention.wild.catalogue import cases
        from tests.attention.wild.verdict import judge

        known = cases()
        ablate_together(neutral, list(known), lambda name: str(judge(known[name], "forward")))
    else:
        for target, answer in neutral.items():
            ablate(target, answer, arguments.modules)


if __name__ == "__main__":
    main()
