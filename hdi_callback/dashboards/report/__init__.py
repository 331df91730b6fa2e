"""The report of a run: one HTML file that opens without a network."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from pathlib import Path

from hdi_callback.audits import Audit
from hdi_callback.dashboards.report.page import differences_of, page
from hdi_callback.dashboards.report.runs import RunPage, page_of_audit, page_of_run
from hdi_callback.errors import MisconfigurationError
from hdi_callback.monitoring.history.run_folder import find_history

__all__ = ["Report", "report", "require_plotly"]


@dataclass(frozen=True)
class Report:
    """A report that was written.

    Attributes:
        path: the file.
        verdicts: name of each run -> its verdict in a sentence or two.
        is_unusual: whether an alert is active in any of them.
    """

    path: Path
    verdicts: dict[str, str]
    is_unusual: bool


def report(
    *runs: str | os.PathLike[str] | Audit, path: str | os.PathLike[str] | None = None, title: str | None = None
) -> Report:
    """Write one HTML file about a run, or several side by side; it opens without a network.

    Args:
        runs: histories, folders of runs, or results of `audit`.
        path: the file to write; ``report.html`` beside the first history by default.
        title: the title of the page.

    Returns:
        Path and verdicts.

    Raises:
        MisconfigurationError: if there is no such run, plotly is not installed, or the file cannot be written.
    """
    if not runs:
        raise MisconfigurationError("A report needs at least one run: write the path of a history, or its folder.")
    script = require_plotly()
    names = _names(runs)
    pages = [page_of_audit(run) if isinstance(run, Audit) else page_of_run(run, name) for run, name in zip(runs, names)]
    *others, last = (page.name for page in pages)
    heading = title or "Attention heads of " + (f"{', '.join(others)} and {last}" if others else last)
    text = page(heading, pages, differences_of(pages) if len(pages) > 1 else [], script)
    target = Path(path).expanduser() if path is not None else _report_path(runs[0])
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise MisconfigurationError(f"`{target}` cannot be written ({error.strerror}): write another path.") from error
    return Report(target, _verdicts(pages), any(page.state == "bad" for page in pages))


def require_plotly() -> str:
    """The script of plotly, which is a part of its package.

    Returns:
        The source of plotly.js.

    Raises:
        MisconfigurationError: if plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise MisconfigurationError("A report needs plotly: pip install 'hdi-callback[reports]'.") from error
    script: str = get_plotlyjs()
    return script


def _report_path(run: str | os.PathLike[str] | Audit) -> Path:
    return Path("audit.html") if isinstance(run, Audit) else find_history(run).with_name("report.html")


def _names(runs: tuple[str | os.PathLike[str] | Audit, ...]) -> list[str | None]:
    """Names of runs; folders of one name are distinguished by their paths."""
    if len(runs) < 2 or any(isinstance(run, Audit) for run in runs):
        return [None] * len(runs)
    parts = [find_history(run).resolve().parts for run in runs if not isinstance(run, Audit)]
    shared = sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, zip(*parts)))
    ends = [
        "/".join(folder for folder in part[shared:-1] if folder != "hdi") or part[-1].removesuffix(".jsonl")
        for part in parts
    ]
    return list(ends) if len(set(ends)) == len(ends) else [str(run) for run in runs]


def _verdicts(pages: list[RunPage]) -> dict[str, str]:
    verdicts: dict[str, str] = {}
    for number, run in enumerate(pages):
        verdicts[run.name if run.name not in verdicts else f"{run.name} ({number + 1})"] = run.verdict
    return verdicts
