"""Which tests run which lines: the tests that may notice a change of a line are those that run it."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.experiments.mutations import plan

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "hdi_callback"
CALLS = 100  # of a function in one test whose lines are recorded: the further ones seldom run others


@dataclass
class Reach:
    """Which tests run which lines of the package.

    Attributes:
        seconds: each test -> what it takes, of the processor.
        lines: file -> line -> the tests that run it.
        shares: test -> file -> its share of the lines of the package that the test runs.
    """

    seconds: dict[str, float]
    lines: dict[str, dict[int, set[str]]]
    shares: dict[str, dict[str, float]]

    def tests_of(self, file: str, first: int, last: int) -> list[str]:
        """Give the tests that run one of these lines of a file, those first that are quick and run little else.

        A line that no test runs, such as a constant of the module, is left to all the tests of its file.
        """
        own = self.lines.get(file, {})
        found = {test for line in range(first, last + 1) for test in own.get(line, ())}
        found = found or {test for tests in own.values() for test in tests}
        return sorted(found, key=lambda test: ((self.seconds[test] + 0.01) / self.shares[test].get(file, 1e-3), test))


def read(path: Path, tests: Sequence[str] = ("",)) -> Reach:
    """Read what `Recorder` wrote about tests of some files and folders; of a test that is there twice the later one."""
    records = {record["test"]: record for record in _records(path) if record["test"].startswith(tuple(tests))}
    seconds: dict[str, float] = {}
    lines: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    shares: dict[str, dict[str, float]] = {}
    for test, record in records.items():
        if record["passed"]:
            seconds[test] = record["seconds"]
            run = {file: list(_numbers(numbers)) for file, numbers in record["lines"].items()}
            whole = sum(map(len, run.values()))
            shares[test] = {file: len(numbers) / whole for file, numbers in run.items()}
            for file, numbers in run.items():
                for number in numbers:
                    lines[file][number].add(test)
    return Reach(seconds, lines, shares)


def record(path: Path, tests: Sequence[str]) -> None:
    """Run tests, but for those that are recorded already, and write down which lines each of them runs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests], plugins=[Recorder(path)])


def is_slow(item: pytest.Item) -> bool:
    """Tell whether a test is left out: those of `plan.MANY` are slow together and quick one by one."""
    return item.get_closest_marker("slow") is not None and not item.nodeid.startswith(plan.MANY)


class Recorder:
    """A plugin of pytest that appends a line of JSON to a file for each test."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._held = {record["test"] for record in _records(path)}
        self._files = {file.as_posix(): file.relative_to(PACKAGE).as_posix() for file in PACKAGE.rglob("*.py")}
        self._run: dict[str, set[int]] = {}  # file -> lines
        self._calls: Counter[tuple[str, int]] = Counter()  # file and line of a function -> how often it was called
        self._shared: dict[str, dict[str, set[int]]] = {}  # test file -> what setting up its tests ran
        self._passed = True

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid not in self._held and not is_slow(item)]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._run, self._passed, start = {file: set() for file in self._files}, True, time.process_time()
        self._calls.clear()
        threading.settrace(self._enter)
        sys.settrace(self._enter)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
            self._write(item, time.process_time() - start)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        """A fixture that several tests of a file share is set up for the first of them, and counts for all."""
        if _shares_fixtures(item):
            shared = self._shared.setdefault(item.nodeid.partition("::")[0], {})
            for file, lines in self._run.items():
                shared.setdefault(file, set()).update(lines)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._passed = self._passed and report.passed

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        lines = self._run.get(code.co_filename)
        if lines is None:
            return None
        lines.add(frame.f_lineno)
        called = code.co_filename, code.co_firstlineno
        self._calls[called] += 1
        return self._step if self._calls[called] <= CALLS else None

    def _step(self, frame: FrameType, event: str, argument: Any) -> Any:
        self._run[frame.f_code.co_filename].add(frame.f_lineno)
        return self._step

    def _write(self, item: pytest.Item, seconds: float) -> None:
        shared = self._shared.get(item.nodeid.partition("::")[0], {}) if _shares_fixtures(item) else {}
        ranges = {}
        for file, name in self._files.items():
            if lines := self._run[file] | shared.get(file, set()):
                ranges[name] = _ranges(sorted(lines))
        line = {"test": item.nodeid, "seconds": round(seconds, 3), "passed": self._passed, "lines": ranges}
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def _shares_fixtures(item: pytest.Item) -> bool:
    found = item._fixtureinfo.name2fixturedefs if isinstance(item, pytest.Function) else {}
    return any(fixture.scope != "function" and fixture.baseid for several in found.values() for fixture in several)


def _ranges(numbers: Iterable[int]) -> str:
    """Write ascending numbers as in "3-5,9"."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in found)


def _numbers(ranges: str) -> Iterator[int]:
    """Read what `_ranges` wrote."""
    for part in ranges.split(",") if ranges else []:
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)
