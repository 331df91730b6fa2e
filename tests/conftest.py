"""What every test shares: one thread, and a process in which nothing is compiled."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)

collect_ignore = ["goldens/make_faults.py"]  # runs on the commit before the rebuild


@pytest.fixture(autouse=True)
def _forget_compiled_code():
    """Drop compiled graphs behind a test: rows of attention are not read in a process that has some."""
    yield
    if "torch._dynamo.convert_frame" in sys.modules:
        sys.modules["torch._dynamo"].reset()


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the repository."""
    return Path(__file__).parent.parent
