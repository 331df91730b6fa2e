"""A progress bar over layers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from hdi_callback.audits.audit import Progress


@contextmanager
def layer_progress(*, is_quiet: bool) -> Iterator[Progress | None]:
    """Show the progress of an audit on standard error, if that is a terminal.

    Args:
        is_quiet: show nothing.

    Yields:
        The argument `progress` of `audit`; `None` if nothing is shown.
    """
    if is_quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from hdi_callback.command.terminal import console

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task("finding the heads", total=None)

        def show(done: int, all_of_them: int, name: str) -> None:
            bar.update(task, completed=done, total=all_of_them, description=name)

        yield show
