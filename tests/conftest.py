"""What every test shares: one thread, and a process in which nothing is compiled."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _forget_compiled_code():
    """Drop compiled graphs after a test, so that the next one compiles its own."""
    yield
    if "torch._dynamo.convert_frame" in sys.modules:
        sys.modules["torch._dynamo"].reset()


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the repository."""
    return Path(__file__).parent.parent
