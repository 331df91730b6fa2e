"""Every name that a user sees is known where it is looked up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import hdi_callback


@pytest.mark.slow
def test_a_type_checker_knows_every_public_name_as_what_it_is(tmp_path: Path) -> None:
    functions = [name for name in hdi_callback.__all__ if name[0].islower()]
    program = [f"from hdi_callback import {', '.join(hdi_callback.__all__)}", "import hdi_callback"]
    program += [f"reveal_type({name})\nreveal_type(hdi_callback.{name})" for name in functions]
    (tmp_path / "program.py").write_text("\n".join(program))
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", "--cache-dir", str(tmp_path), "program.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    revealed = [line for line in done.stdout.splitlines() if "Revealed type" in line]
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(revealed) == 2 * len(functions)
    assert not [line for line in revealed if "Module" in line and "def (" not in line]
