"""The command `hdi`: models, checkpoints and runs judged from a terminal."""


def main() -> None:
    """Run the command line; ends the process with an exit code."""
    from hdi_callback.command.commands import hdi

    hdi.main(prog_name="hdi")
