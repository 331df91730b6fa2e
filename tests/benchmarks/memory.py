"""The memory that a piece of work takes at its peak, beyond what it was given."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")


def peak_mebibytes(setup: str, work: str, *, device: str) -> float | None:
    """Run `work` after `setup` in a process of its own; None where the system does not tell a process its peak.

    A process of its own, because an allocator that has grown for earlier work hides what this one needs.
    """
    if device == "cpu" and not (_STATUS.exists() and "VmHWM" in _STATUS.read_text()):
        return None
    script = f"from tests.benchmarks.memory import peak\n{setup}\nbefore = peak({device!r})\n{work}\n"
    script += f"print(peak({device!r}) - before)"
    root = Path(__file__).parents[2]
    ran = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True)
    return float(ran.stdout.split()[-1]) / 2**20


def peak(device: str) -> int:
    """Bytes at the highest point so far."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
