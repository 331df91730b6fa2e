"""Break, test, and write down whether it was noticed; what the results hold already is not run again.

One process loads the package and collects the tests; for each change it forks, puts the changed code into the functions
of the fork, and runs the tests that run the changed line, those first that are quick and run little else, until one
fails. What runs on import, such as a constant of a module, is changed in a fork of a process that has not loaded the
package yet.
Nothing on the disk is changed. Tests that start further processes see the code as it is there.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import importlib.machinery
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

from tests.experiments.mutations import plan, reach
from tests.experiments.mutations.mutate import Mutation, sample, spread
from tests.experiments.mutations.reach import PACKAGE, ROOT, Reach

SLACK = 10  # seconds of the processor, beyond three times that
WAIT = 900  # seconds on the clock, should a change make threads wait for each other
OPTIONS = ["-q", "-s", "-p", "no:cacheprovider", "-p", "no:xdist"]


def run(
    results: Path,
    reached: Path,
    *,
    minutes: float,
    budget: float,
    tests: Sequence[str] = plan.TESTS,
    only: str = "",
    part: str = "0/1",
    changes: int | None = None,
) -> None:
    """Run the changes of the plan for so many minutes, a few of each file before more of any.

    Args:
        results: lines of JSON, to which those of the changes are appended that it does not hold yet.
        reached: what `reach.record` wrote.
        minutes: after which no change is begun.
        budget: seconds of the processor for the tests of one change. What has survived is tried again with more tests.
        tests: files and folders of tests; others are not run.
        only: parts of the paths of the files to break, with commas between.
        part: such as "1/2", for the second of two processes that run side by side.
        changes: of each file; those of the plan by default.
    """
    end = time.monotonic() + 60 * minutes
    results.parent.mkdir(parents=True, exist_ok=True)
    place, parts = map(int, part.split("/"))
    every = [change for change in _changes(only, changes) if change[2]]
    work = _Work(results, reach.read(reached, tests), end, budget)
    warm = [change for number, change in enumerate(every) if number % parts == place and change[1].function is not None]
    cold = [change for number, change in enumerate(every) if number % parts == place and change[1].function is None]
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            _quiet()
            pytest.main([*OPTIONS, f"--basetemp={results}.tmp{place}", *tests], plugins=[_Loop(work, warm)])
        os._exit(0)
    os.waitpid(child, 0)
    _load_libraries()
    for path, mutation, digest in cold:
        work.do(path, mutation, digest, lambda tests, path=path, change=mutation: _become(path, change, tests))


def read(results: Path) -> list[dict[str, Any]]:
    """Read the results so far, of each change the last."""
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results.is_file() else []
    return list({(result["file"], result.get("digest"), result["change"]): result for result in lines}.values())


def digest(path: Path) -> str:
    """Tell one state of a file from another."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def _changes(only: str, wished: int | None) -> Iterator[tuple[Path, Mutation, str]]:
    """Give changes in the order in which they are run: one in each file, then the second of each, and so on."""
    files = plan.chosen(only, PACKAGE)
    drawn = {path: sample(path.read_text(), plan.changes(path, PACKAGE, wished), seed=0) for path in files}
    orders = {path: spread(len(found)) for path, found in drawn.items()}
    for turn in range(max(map(len, drawn.values()), default=0)):
        for path, found in drawn.items():
            if turn < len(found):
                yield path, found[orders[path][turn]], digest(path)


class _Work:
    """The changes that are left to do, and where their outcomes are written."""

    def __init__(self, results: Path, reached: Reach, end: float, budget: float) -> None:
        self._results = results
        self._reached = reached
        self._end = end
        self._budget = budget
        self._held = {(result["file"], result["digest"], result["change"]): result for result in read(results)}

    def do(self, path: Path, mutation: Mutation, state: str, test: Callable[[list[str]], str | None]) -> None:
        """Run the tests of a change in a fork; `test` gives the first that fails."""
        file = path.relative_to(PACKAGE).as_posix()
        tests = self._reached.tests_of(file, *mutation.run)
        chosen, seconds = _affordable(tests, self._reached.seconds, self._budget)
        held = self._held.get((file, state, mutation.key))
        if held is not None and (held["outcome"] != "survived" or held.get("budget", 0) >= self._budget):
            return
        if time.monotonic() > self._end:
            return
        outcome, by, taken = _outcome(lambda: test(chosen), 3 * seconds + SLACK) if chosen else ("survived", "", 0.0)
        line = {"file": file, "digest": state, "change": mutation.key, "outcome": outcome, "by": by,
                "tests": len(chosen), "of": len(tests), "budget": self._budget, "seconds": round(taken, 1)}  # fmt: skip
        with self._results.open("a") as written:
            written.write(json.dumps(line) + "\n")


class _Loop:
    """A plugin of pytest that runs the tests of each change in a fork, in place of all tests once."""

    def __init__(self, work: _Work, changes: Sequence[tuple[Path, Mutation, str]]) -> None:
        self._work = work
        self._changes = changes
        self._failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.append(report.nodeid)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items if not reach.is_slow(item)}
        for path, *_ in self._changes:  # some are loaded only when they are needed
            importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        functions = [function for function in gc.get_objects() if isinstance(function, FunctionType)]
        gc.freeze()  # so that collecting in a fork copies no pages
        for path, mutation, state in self._changes:
            own = [function for function in functions if function.__code__.co_filename == str(path)]

            def test(tests: list[str], path: Path = path, change: Mutation = mutation, own=own) -> str | None:
                _replace(path, change, own)
                return self._first_failure([items[test] for test in tests if test in items])

            self._work.do(path, mutation, state, test)
        return True

    def _first_failure(self, items: list[pytest.Item]) -> str | None:
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
            if self._failed:
                return self._failed[0]
        return None


def _replace(path: Path, mutation: Mutation, functions: Sequence[FunctionType]) -> None:
    """Put the changed code into functions of a file that is loaded."""
    changed: dict[tuple[str, int], CodeType] = {}
    left = [compile(mutation.tree, str(path), "exec", dont_inherit=True)]
    while left:
        code = left.pop()
        changed[code.co_qualname, code.co_firstlineno] = code
        left += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    done = 0
    for function in functions:
        code = changed.get((function.__code__.co_qualname, function.__code__.co_firstlineno), function.__code__)
        done += code.co_firstlineno == mutation.function
        function.__code__ = code
    assert done, f"{path} has no function at line {mutation.function}"


def _affordable(tests: Sequence[str], seconds: dict[str, float], budget: float) -> tuple[list[str], float]:
    """Choose the tests that are run: as many as the budget allows, in their order."""
    chosen, total = [], 0.0
    for test in tests:
        if not chosen or total + seconds[test] <= budget:
            chosen.append(test)
            total += seconds[test]
    return chosen, total


def _outcome(test: Callable[[], str | None], seconds: float) -> tuple[str, str, float]:
    """Run tests in a fork; return the outcome, the test that failed, and the processor time."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            # Of processor time, as the machine may be busy with other things.
            resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 1))
            signal.alarm(WAIT)
            failed = test()
            os.write(writing, (failed or "").encode())
            os._exit(0 if failed is None else 1)
        os._exit(2)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        by = pipe.read()
    _, status, used = os.wait4(child, 0)
    taken = used.ru_utime + used.ru_stime
    if os.WIFSIGNALED(status):
        late = os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL, signal.SIGALRM)
        return ("ran out of time" if late else "killed"), by, taken
    return {0: "survived", 1: "killed"}.get(os.WEXITSTATUS(status), "the tool failed"), by, taken


def _become(path: Path, mutation: Mutation, tests: list[str]) -> str | None:
    """Load the package with one file changed, and run tests."""
    _quiet()
    usual = importlib.machinery.SourceFileLoader.get_code

    def get_code(loader: importlib.machinery.SourceFileLoader, name: str) -> CodeType | None:
        if Path(loader.path) == path:
            return compile(mutation.tree, str(path), "exec", dont_inherit=True)
        return usual(loader, name)

    importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign]
    chosen = _Chosen(tests)
    files = dict.fromkeys(test.partition("::")[0] for test in tests)
    code = pytest.main(["-x", *OPTIONS, f"--basetemp={ROOT}/build/cold", *files], plugins=[chosen])
    return chosen.failed if code == pytest.ExitCode.TESTS_FAILED else None if code == pytest.ExitCode.OK else "import"


class _Chosen:
    """A plugin of pytest that runs some tests, in their order."""

    def __init__(self, tests: Sequence[str]) -> None:
        self._places = {test: place for place, test in enumerate(tests)}
        self.failed = ""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted(
            (item for item in items if item.nodeid in self._places), key=lambda item: self._places[item.nodeid]
        )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid


def _quiet() -> None:
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)


def _load_libraries() -> None:
    """Load what the tests need besides the package, once for all."""
    import hypothesis
    import lightning.pytorch
    import numpy
    import scipy
    import torch
    import transformers

    torch.set_num_threads(1)
    loaded = [hypothesis, lightning.pytorch, numpy, scipy, torch, transformers]
    assert all(module.__name__ in sys.modules for module in loaded)
    assert not any(name.partition(".")[0] == "hdi_callback" for name in sys.modules)
