"""A group of commands with one-line errors and documented exit codes, and what the commands print with."""

from __future__ import annotations

import json
import os
import shutil
import sys
import traceback
import warnings
from collections.abc import Iterable
from typing import Any, NoReturn

import click

from hdi_callback.errors import HDIError, HDIWarning

NOTHING_UNUSUAL, UNUSUAL, CANNOT_WORK, INTERRUPTED = 0, 1, 2, 130
CODES = {"clear": NOTHING_UNUSUAL, "alert": UNUSUAL, "nothing to judge": CANNOT_WORK}
"""State of a verdict -> exit code."""


class _CannotWorkError(click.ClickException):
    exit_code = CANNOT_WORK


class CommandGroup(click.Group):
    """Commands that return their exit code."""

    def invoke(self, ctx: click.Context) -> NoReturn:
        """Run a command and end the process; an error of this package is one line."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                warnings.simplefilter("default", HDIWarning)
                warnings.showwarning = lambda message, *_, **__: click.echo(f"hdi: {_one_line(message)}", err=True)
                code = super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit):
            raise
        except BrokenPipeError:  # `hdi explain | head -1`, which click would end with 1
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = NOTHING_UNUSUAL
        except (HDIError, OSError) as error:  # such as a folder without permission
            raise _CannotWorkError(_one_line(error)) from error
        except KeyboardInterrupt:
            code = INTERRUPTED
        except Exception:  # a bug; Python's own exit code for it is 1, which means here that something is unusual
            traceback.print_exc()
            code = CANNOT_WORK
        ctx.exit(code if isinstance(code, int) else NOTHING_UNUSUAL)


def _one_line(text: object) -> str:
    return " ".join(str(text).split())


def print_json(data: Any) -> None:
    """Print plain data for programs; numbers that are not finite become null."""
    from hdi_callback.history.lines import plain

    click.echo(json.dumps(plain(data), indent=2, allow_nan=False))


def print_rows(rows: Iterable[tuple[str, str]]) -> None:
    """Print rows of a name and a text, wrapped to the terminal."""
    from hdi_callback.dashboards.layer_table import table_lines

    width = min(shutil.get_terminal_size().columns, 80) - 2
    for line in table_lines(("name", "text"), list(rows), width, has_header=False):
        click.echo(f"  {line}")
