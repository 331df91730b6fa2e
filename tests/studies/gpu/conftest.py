"""These tests need a CUDA device; elsewhere they are skipped."""

from __future__ import annotations

import pytest
import torch

from tests.studies.gpu.training import DEVICE


@pytest.fixture(autouse=True)
def _on_cuda():
    """Let kernels give the same bits each time, as bit-identity is what most tests ask for."""
    if DEVICE.type == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
