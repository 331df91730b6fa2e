"""A group of commands with one-line errors and documented exit codes."""

from __future__ import annotations

import io
import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import click

from hdi_callback.errors import HDIError, HDIWarning

NOTHING_UNUSUAL, UNUSUAL, CANNOT_WORK, INTERRUPTED = 0, 1, 2, 130


class CommandGroup(click.Group):
    """Commands that return their exit code."""

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **others: Any
    ) -> NoReturn:
        """Run a command and end the process.

        Args:
            args: the words of the command line; those of the process by default.
            prog_name: name of the program in messages.
            others: further arguments of `click.Command.main`.
        """
        others["standalone_mode"] = False
        _escape_foreign_letters()
        try:
            with _short_warnings():
                code = super().main(args=args, prog_name=prog_name, **others)
        except click.Abort:
            sys.exit(INTERRUPTED)
        except KeyboardInterrupt:
            sys.exit(INTERRUPTED)
        except click.exceptions.NoArgsIsHelpError as error:
            click.echo(error.format_message())
            sys.exit(CANNOT_WORK)
        except click.ClickException as error:
            where = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "hdi"
            _fail(f"{where}: {error.format_message()} See {where} --help.")
        except HDIError as error:
            _fail(f"hdi: {error}")
        except BrokenPipeError:  # for instance with `hdi alerts RUN | head`
            sys.stderr.close()
            sys.exit(NOTHING_UNUSUAL)
        except OSError as error:  # such as a folder without permission; 1 would mean that something is unusual
            _fail(f"hdi: `{error.filename}`: {error.strerror}." if error.filename else f"hdi: {error}.")
        sys.exit(code if isinstance(code, int) else NOTHING_UNUSUAL)


def _escape_foreign_letters() -> None:
    """Write letters that a stream has no code for as escapes: names of layers and files may have any."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _fail(message: str) -> NoReturn:
    click.echo(" ".join(message.split()), err=True)
    sys.exit(CANNOT_WORK)


@contextmanager
def _short_warnings() -> Iterator[None]:
    """Print this package's warnings as one line each, and no others."""

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        click.echo(f"hdi: {' '.join(str(message).split())}", err=True)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("default", HDIWarning)
        warnings.showwarning = show
        yield


def print_json(data: Any) -> None:
    """Print plain data for programs.

    Args:
        data: plain data; numbers that are not finite become null.
    """
    is_unicode = (getattr(sys.stdout, "encoding", None) or "").lower().startswith("utf")  # else JSON's own escapes
    click.echo(json.dumps(_finite(data), indent=2, ensure_ascii=not is_unicode, allow_nan=False))


def _finite(data: Any) -> Any:
    if isinstance(data, float):
        return data if data == data and abs(data) != float("inf") else None
    if isinstance(data, dict):
        return {str(key): _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return data
