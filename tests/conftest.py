"""What every test shares: a fixed number of threads, and skips only for a listed reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.skips import REASONS

torch.set_num_threads(1)

# One state of the code passes or fails the same each time; `make promise` draws fresh trainings.
_PROMISE_SEED = 450710


def pytest_addoption(parser):
    parser.addoption(
        "--promise-seed", type=int, default=_PROMISE_SEED, help="what the trainings of tests/promise are drawn from"
    )


def pytest_terminal_summary(terminalreporter, config):
    if any(
        "tests/promise" in report.nodeid for kind in ("passed", "failed") for report in _reports(terminalreporter, kind)
    ):
        seed = config.option.promise_seed
        terminalreporter.write_line(f"trainings drawn from seed {seed}: pytest tests/promise --promise-seed {seed}")


def _reports(terminalreporter, kind):
    return terminalreporter.stats.get(kind, ())


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items):
    """Spread the quick cases of a test that is marked ``some_slow`` evenly over all of them."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("some_slow") is not None:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for group in cases.values():
        quick = group[0].get_closest_marker("some_slow").kwargs["quick"]
        for place, item in enumerate(group):
            if place * quick // len(group) == (place - 1) * quick // len(group):
                item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = call.excinfo.value.msg if call.excinfo is not None else ""
        if reason not in REASONS:
            report.outcome = "failed"
            report.longrepr = f"{item.nodeid} was skipped for a reason that tests/skips.py does not list: {reason!r}"
    return report


@pytest.fixture
def root() -> Path:
    """The root of the repository."""
    return Path(__file__).parent.parent


@pytest.fixture
def dynamo():
    """Compile as if nothing had been compiled before; the counters of what is."""
    import torch._dynamo

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo.utils.counters
    torch._dynamo.reset()
