"""The command `hdi`: models, checkpoints and runs judged from a terminal."""

import os


def main() -> None:
    """Run the command line; ends the process with an exit code."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # findings say what of a file was not loaded
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from hdi_callback.command.commands import hdi

    hdi.main(prog_name="hdi")
