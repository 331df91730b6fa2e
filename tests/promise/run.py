"""Run a training with and without the monitor, compare, and find the least that still differs."""

from __future__ import annotations

import logging
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.modules import module as torch_module

from tests.promise import traits
from tests.promise.plan import COMPILED, Training, fits
from tests.promise.shells import train
from tests.promise.trace import Trace, listening, settings_kept, spying

_SHRINKING = 40  # trainings at most


@dataclass(frozen=True)
class Result:
    """The result of a training.

    Attributes:
        training: which one.
        differences: what differs with the monitor, the first first.
        readings: how many there were with the monitor.
        measurements: of layers, in all readings.
        said: the package's warnings.
    """

    training: Training
    differences: tuple[str, ...]
    readings: int = 0
    measurements: int = 0
    said: tuple[str, ...] = ()


def run(training: Training, *, is_watched: bool) -> Trace:
    """Run a training once, in a state of the process as if nothing had been before."""
    trace = Trace()
    with settings_kept(), _private(training), tempfile.TemporaryDirectory() as folder:
        with spying() as counts, listening(trace), redirect_stdout(StringIO()):
            train(training, trace, Path(folder), is_watched=is_watched)
        trace.keep("calls of global functions", dict(counts))
    return trace


def compare(training: Training) -> Result:
    """Run a training without and with the monitor; uncompiled if torch cannot run its graph without the monitor."""
    try:
        alone = run(training, is_watched=False)
    except Exception:
        if not training.is_compiled:
            raise
        return compare(replace(training, traits=training.traits - set(COMPILED)))
    try:
        watched = run(training, is_watched=True)
    except Exception as error:
        return Result(training, (f"the training ended: {type(error).__name__}: {error}",))
    differences = tuple(alone.differences(watched))
    if differences:  # what an import does once in a process, or a warning that comes once, is nobody's doing
        again = run(training, is_watched=False)
        differences = tuple(again.differences(watched, among=alone))
    return Result(
        training,
        differences,
        watched.readings,
        watched.measurements,
        tuple(watched.said),
    )


def shrink(result: Result) -> Result:
    """Leave out traits, and take a simpler shell and model, while something still differs."""
    budget = _SHRINKING
    is_smaller = True
    while is_smaller and budget > 0:
        is_smaller = False
        for simpler in _simpler(result.training):
            budget -= 1
            with _skipping_broken():
                found = compare(simpler)
                if found.differences:
                    result, is_smaller = found, True
                    break
            if budget <= 0:
                break
    return result


def _simpler(training: Training) -> Iterator[Training]:
    for trait in sorted(training.traits):
        yield replace(training, traits=training.traits - {trait})
    for name, value in (("family", "separate"), ("shell", "by hand"), ("shell", "loop")):
        other = replace(training, **{name: value})
        is_simpler = getattr(training, name) != value and (name, training.shell) != ("shell", "by hand")
        if is_simpler and all(fits(trait, other.family, other.shell, other.traits) for trait in other.traits):
            yield other


@contextmanager
def _skipping_broken() -> Iterator[None]:
    try:
        yield
    except Exception:  # it does not run without the monitor either
        logging.getLogger(__name__).debug("a simpler training does not run", exc_info=True)


def report(result: Result) -> str:
    """Say what differs, and how to see it again."""
    shown = "\n".join(f"  {difference}" for difference in result.differences[:6])
    more = f"\n  and {len(result.differences) - 6} more" if len(result.differences) > 6 else ""
    said = "".join(f"\n  warned: {message[:300]}" for message in result.said)
    return f'{result.training}\n{shown}{more}{said}\n  again: python -m tests.promise --training "{result.training}"'


@contextmanager
def _private(training: Training) -> Iterator[None]:
    """Begin a training from states of its own, and put back what was."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    hooks = {name: dict(getattr(torch_module, name)) for name in vars(torch_module) if _is_hooks(name)}
    level = {name: logging.getLogger(name).level for name in ("lightning", "transformers", "lightning.pytorch")}
    for name in level:
        logging.getLogger(name).setLevel(logging.ERROR)
    traits.reset()
    if training.is_compiled:
        torch._dynamo.reset()
    torch.manual_seed(training.seed)
    random.seed(training.seed)
    np.random.seed(training.seed)  # noqa: NPY002
    torch.use_deterministic_algorithms("deterministic algorithms" in training)
    torch.autograd.set_detect_anomaly("anomaly detection" in training)
    try:
        yield
    finally:
        for name, kept in hooks.items():
            current: Any = getattr(torch_module, name)
            for key in set(current) - set(kept):
                del current[key]
        torch_module._global_is_full_backward_hook = None
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])  # noqa: NPY002
        for name, number in level.items():
            logging.getLogger(name).setLevel(number)
        if training.is_compiled:
            torch._dynamo.reset()


def _is_hooks(name: str) -> bool:
    return name.startswith("_global_") and name.endswith("hooks")
