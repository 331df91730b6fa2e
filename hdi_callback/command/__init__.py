"""The command `hdi`: models, checkpoints and runs judged from a terminal."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; ends the process with an exit code."""
    try:
        from hdi_callback.command.commands import hdi
    except ModuleNotFoundError as error:
        if error.name != "click":
            raise
        sys.exit("hdi needs click: pip install click.")
    hdi.main(prog_name="hdi")
