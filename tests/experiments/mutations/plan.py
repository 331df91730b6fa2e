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
    "monitoring/ranks": 8,
    "monitoring/history": 4,
    "monitoring": 4,
    "audits": 4,
    "dashboards": 4,
    "dashboards/report": 4,
    "command": 4,
    "integrations": 6,
}
"""Folder -> the changes of each of its files."""
TESTS = [
    *("tests/attention", "tests/core", "tests/monitoring", "tests/audits", "tests/dashboards", "tests/command"),
    *("tests/integrations", "tests/regimes", "tests/test_arguments.py", "tests/test_deprecation.py"),
]
"""The tests that are to notice."""
SUBJECTS = {
    "audits": ["tests/audits", "tests/command"],
    "command": ["tests/command"],
    "core": ["tests/core"],
    "dashboards": ["tests/dashboards", "tests/command", "tests/integrations"],
    "integrations": ["tests/integrations", "tests/dashboards", "tests/regimes"],
    "monitoring/history": [
        "tests/monitoring",
        "tests/command",
        "tests/dashboards",
        "tests/integrations",
        "tests/regimes",
    ],
    "monitoring/ranks": ["tests/monitoring", "tests/integrations", "tests/regimes"],
}
"""Folder -> its own tests, where recording those is enough: the others take much longer than they find."""


def files(package: Path) -> list[Path]:
    """Give the files that are broken, in the order of the folders."""
    return [path for folder in CHANGES for path in sorted((package / folder).glob("*.py")) if path.stem != "__init__"]


def changes(path: Path, package: Path, wished: int | None = None) -> int:
    """Give how many changes of a file are tried: those of its folder, unless others are wished."""
    return CHANGES[path.relative_to(package).parent.as_posix()] if wished is None else wished


def chosen(only: str, package: Path) -> list[Path]:
    """Give the files whose path has one of some parts in it.

    Args:
        only: parts of paths, with commas between; nothing for all files.
        package: the folder of the package.

    Returns:
        The files, in the order of the folders.
    """
    return [path for path in files(package) if any(part in path.as_posix() for part in only.split(","))]


def tests(only: str, package: Path) -> list[str]:
    """Give the tests that are to notice changes of the files that are chosen.

    Args:
        only: parts of paths, with commas between; nothing for all files.
        package: the folder of the package.

    Returns:
        The tests of their subjects, or all of them where a file has no subject of its own.
    """
    inside = [path.relative_to(package).as_posix() for path in chosen(only, package)]
    subjects = {next((name for name in SUBJECTS if file.startswith(f"{name}/")), "") for file in inside}
    if "" in subjects:
        return TESTS
    return list(dict.fromkeys(test for name in sorted(subjects) for test in SUBJECTS[name]))


MANY = ("tests/attention/observe", "tests/attention/test_support", "tests/attention/test_behind_attention")
"""Where tests that are marked slow are taken along, as each of them takes a second at most."""
