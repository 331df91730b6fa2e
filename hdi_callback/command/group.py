"""A group of commands with one-line errors and documented exit codes, and what the commands print with."""

from __future__ import annotations

import io
import json
import shutil
import sys
import traceback
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import click

from hdi_callback.errors import HDIError, HDIWarning

NOTHING_UNUSUAL, UNUSUAL, CANNOT_WORK, INTERRUPTED = 0, 1, 2, 130
CODES = {"clear": NOTHING_UNUSUAL, "alert": UNUSUAL, "nothing to judge": CANNOT_WORK}
"""State of a verdict -> exit code."""


class CommandGroup(click.Group):
    """Commands that return their exit code."""

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **options: Any
    ) -> NoReturn:
        """Run a command and end the process."""
        options["standalone_mode"] = False
        for stream in (sys.stdout, sys.stderr):  # names of layers and files may have any letters
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                warnings.simplefilter("default", HDIWarning)
                warnings.showwarning = lambda message, *_, **__: click.echo(f"hdi: {_one_line(message)}", err=True)
                code = super().main(args=args, prog_name=prog_name, **options)
        except (click.Abort, KeyboardInterrupt):
            sys.exit(INTERRUPTED)
        except click.exceptions.NoArgsIsHelpError as error:
            click.echo(error.format_message())
            sys.exit(CANNOT_WORK)
        except click.ClickException as error:
            where = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "hdi"
            _fail(f"{where}: {error.format_message()} See {where} --help.")
        except HDIError as error:
            _fail(f"hdi: {error}")
        except BrokenPipeError:  # `hdi report RUN | head`
            sys.stderr.close()
            sys.exit(NOTHING_UNUSUAL)
        except OSError as error:  # such as a folder without permission
            _fail(f"hdi: `{error.filename}`: {error.strerror}." if error.filename else f"hdi: {error}.")
        except Exception:  # a bug; Python's own exit code for it is 1, which means here that something is unusual
            traceback.print_exc()
            sys.exit(CANNOT_WORK)
        sys.exit(code if isinstance(code, int) else NOTHING_UNUSUAL)


def _fail(message: str) -> NoReturn:
    click.echo(_one_line(message), err=True)
    sys.exit(CANNOT_WORK)


def _one_line(text: object) -> str:
    return " ".join(str(text).split())


def print_json(data: Any) -> None:
    """Print plain data for programs; numbers that are not finite become null."""
    from hdi_callback.history.lines import plain

    is_unicode = (getattr(sys.stdout, "encoding", None) or "").lower().startswith("utf")  # else JSON's own escapes
    click.echo(json.dumps(plain(data), indent=2, ensure_ascii=not is_unicode, allow_nan=False))


def print_rows(rows: Iterable[tuple[str, str]]) -> None:
    """Print rows of a name and a text, wrapped to the terminal."""
    from hdi_callback.dashboards.layer_table import table_lines

    width = min(shutil.get_terminal_size().columns, 80) - 2
    for line in table_lines(("name", "text"), list(rows), width, has_header=False):
        click.echo(f"  {line}")
