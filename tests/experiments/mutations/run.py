"""Break, test, and write down whether it was noticed; what the results hold already is not run again.

Every mutation has a process of its own, forked from one that has loaded the libraries and nothing of the package, in
which the file is compiled from the changed source. Nothing on the disk is changed. Tests that start further processes
see the code as it is there.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.machinery
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from types import CodeType
from typing import Any

from tests.experiments.mutations.mutate import Mutation, sample
from tests.experiments.mutations.plan import files, tests_of

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "hdi_callback"
SLACK = 20  # seconds of the processor, beyond three times what the tests take on the file as it is


def run(results: Path, *, per_file: int, minutes: float, only: str = "") -> None:
    """Run mutations for so many minutes, file by file, one of each file before the second of any."""
    _load_libraries()
    end = time.monotonic() + 60 * minutes
    results.parent.mkdir(parents=True, exist_ok=True)
    chosen = [path for path in files(PACKAGE) if only in path.as_posix()]
    usual: dict[tuple[str, ...], float] = {}  # tests -> what they take on the code as it is
    planned = {path: sample(path.read_text(), per_file, seed=len(path.read_text())) for path in chosen}
    for turn in range(per_file):
        for path, found in planned.items():
            # Another part of the file each turn, lest the top of all files comes first.
            mutation = found[(turn * 7 + len(found) // 2) % len(found)] if found else None
            if mutation is None or turn >= len(found):
                continue
            if time.monotonic() > end:
                return
            name = path.relative_to(PACKAGE).as_posix()
            digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
            held = read(results)
            if (name, mutation.key) in {(one["file"], one["change"]) for one in held if one["digest"] == digest}:
                continue
            tests = tests_of(path, PACKAGE, ROOT / "tests")
            line = {"file": name, "digest": digest, "change": mutation.key, **_try(path, mutation, tests, usual)}
            if line["usual"] is not None:
                usual[tuple(tests)] = line["usual"]
            with results.open("a") as file:
                file.write(json.dumps(line) + "\n")


def read(results: Path) -> list[dict[str, Any]]:
    """Read the results so far."""
    return [json.loads(line) for line in results.read_text().splitlines()] if results.is_file() else []


def _try(path: Path, mutation: Mutation, tests: list[str], usual: dict[tuple[str, ...], float]) -> dict[str, Any]:
    seconds = usual.get(tuple(tests))
    if seconds is None:
        outcome, seconds = _outcome(path, path.read_text(), tests, seconds=900)
        if outcome != "survived":
            return {"outcome": "the tests fail without a change", "usual": None}
    outcome, _ = _outcome(path, mutation.source, tests, seconds=3 * seconds + SLACK)
    return {"outcome": outcome, "usual": round(seconds, 1)}


def _outcome(path: Path, source: str, tests: list[str], *, seconds: float) -> tuple[str, float]:
    """Run tests of a file with this source; give what came of it, and the processor time that it took."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            # Of processor time, as the machine may be busy with other things.
            resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 1))
            _become(path, source, tests)
        os._exit(1)
    _, status, used = os.wait4(child, 0)
    taken = used.ru_utime + used.ru_stime
    if os.WIFSIGNALED(status):
        return ("ran out of time" if os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL) else "killed"), taken
    return ("survived" if os.WEXITSTATUS(status) == 0 else "killed"), taken


def _become(path: Path, source: str, tests: list[str]) -> None:
    """Load the package with one file changed, and run tests."""
    import pytest

    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    usual = importlib.machinery.SourceFileLoader.get_code

    def get_code(loader: importlib.machinery.SourceFileLoader, name: str) -> CodeType | None:
        if Path(loader.path) == path:
            return compile(source, str(path), "exec", dont_inherit=True)
        return usual(loader, name)

    importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign]
    code = pytest.main(["-q", "-x", "-m", "not slow", "-p", "no:cacheprovider", "-p", "no:xdist", *tests])
    os._exit(int(code))


def _load_libraries() -> None:
    """Load what the tests need besides the package, once for all."""
    import hypothesis
    import lightning.pytorch
    import numpy
    import pytest
    import scipy
    import torch
    import transformers

    torch.set_num_threads(1)
    loaded = [hypothesis, lightning.pytorch, numpy, pytest, scipy, torch, transformers]
    assert all(module.__name__ in sys.modules for module in loaded)
    assert not any(name.partition(".")[0] == "hdi_callback" for name in sys.modules)
