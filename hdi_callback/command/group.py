"""A group of commands with one-line errors and documented exit codes, and what the commands print with."""

from __future__ import annotations

import os
import shutil
import sys
import traceback
import warnings
from collections.abc import Iterable
from typing import NoReturn

import click

from hdi_callback.errors import HDIError, HDIWarning

CODES = {"clear": 0, "alert": 1, "nothing to judge": 2, "interrupted": 130}  # 2 also for what cannot work


class _CannotWorkError(click.ClickException):
    exit_code = CODES["nothing to judge"]


class CommandGroup(click.Group):
    """Commands that return a state, from which their exit code follows."""

    def invoke(self, ctx: click.Context) -> NoReturn:
        """Run a command and end the process; an error of this package is one line."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                warnings.simplefilter("default", HDIWarning)
                warnings.showwarning = lambda message, *_, **__: click.echo(f"hdi: {_one_line(message)}", err=True)
                state = super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit):
            raise
        except BrokenPipeError:  # `hdi explain | head -1`, which click would end with 1
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            state = "clear"
        except (HDIError, OSError) as error:  # such as a folder without permission
            raise _CannotWorkError(_one_line(error)) from error
        except KeyboardInterrupt:
            state = "interrupted"
        except Exception:  # a bug; Python's own exit code for it is 1, which means here that something is unusual
            traceback.print_exc()
            state = "nothing to judge"
        ctx.exit(CODES[state or "clear"])


def _one_line(text: object) -> str:
    return " ".join(str(text).split())


def print_rows(rows: Iterable[tuple[str, str]]) -> None:
    """Print rows of a name and a text, wrapped to the terminal."""
    from hdi_callback.dashboards.layer_table import table_lines

    width = min(shutil.get_terminal_size().columns, 80) - 2
    for line in table_lines(("name", "text"), list(rows), width, has_header=False):
        click.echo(f"  {line}")
