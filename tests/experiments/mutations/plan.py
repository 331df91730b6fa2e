"""Which files are broken, in which order, and how often."""

from __future__ import annotations

from pathlib import Path

CHANGES = {
    "attention/finding": 8,
    "attention/observe": 8,
    "attention/observe/compare": 8,
    "attention/observe/scores": 8,
    "attention/trace": 8,
    "attention": 4,
    "attention/layer": 4,
    "attention/capture": 4,
    "attention/isolation": 4,
    "monitoring/rules": 4,
    "monitoring/monitor": 4,
    "core": 8,
    "monitoring/alerts": 4,
    "monitoring/layers": 4,
    "monitoring/interventions": 4,
    "monitoring/session": 4,
    "monitoring/ranks": 4,
    "monitoring/history": 4,
    "monitoring": 4,
    "audits": 4,
    "dashboards": 4,
    "dashboards/report": 4,
    "command": 4,
}
"""Folder -> the changes of each of its files."""
TESTS = [
    *("tests/attention", "tests/core", "tests/monitoring", "tests/audits", "tests/dashboards", "tests/command"),
    *("tests/test_arguments.py", "tests/test_deprecation.py"),
]
"""The tests that are to notice."""


def files(package: Path) -> list[Path]:
    """Give the files that are broken, in the order of the folders."""
    return [path for folder in CHANGES for path in sorted((package / folder).glob("*.py")) if path.stem != "__init__"]


def changes(path: Path, package: Path) -> int:
    """Give how many changes of a file are tried."""
    return CHANGES[path.relative_to(package).parent.as_posix()]


MANY = ("tests/attention/observe", "tests/attention/test_support", "tests/attention/test_behind_attention")
"""Where tests that are marked slow are taken along, as each of them takes a second at most."""
