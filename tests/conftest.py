"""What every test shares: a fixed number of threads, and skips only for a listed reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.skips import REASONS

torch.set_num_threads(1)


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
