"""Which files are broken, and which tests are to notice."""

from __future__ import annotations

from pathlib import Path

TRACE = [
    "attention/test_trace.py",
    "attention/test_kinds.py",
    "attention/test_cores.py",
    "attention/test_finder.py",
    "attention/test_variants.py",
]
OBSERVE = ["attention/observe/test_by_hand.py", "attention/observe/test_judge.py", "attention/observe/test_rows.py",
           "attention/observe/test_untouched.py", "monitoring/test_rows.py", "monitoring/test_claims.py"]  # fmt: skip
FINDING = ["attention/test_kinds.py", "attention/test_claims.py", "attention/test_conventions.py",
           "attention/test_search.py", "attention/test_check.py", "attention/test_refusals.py",
           "attention/test_finder.py"]  # fmt: skip
RULES = ["monitoring/test_rules.py", "monitoring/test_reading_rules.py", "monitoring/test_alerts.py",
         "monitoring/test_head_readings.py", "test_arguments.py"]  # fmt: skip
ALERTS = ["monitoring/test_series.py", "monitoring/test_alerts.py", "monitoring/test_state.py"]
HISTORY = ["monitoring/test_history.py", "monitoring/test_matrices.py"]
SESSION = ["monitoring/test_schedule.py", "monitoring/test_state.py", "monitoring/test_watch_interventions.py",
           "test_deprecation.py", "test_arguments.py"]  # fmt: skip
ROOMS = {"attention/finding": FINDING, "attention/trace": TRACE, "attention/observe": OBSERVE,
         "monitoring/rules": RULES,
         "monitoring/alerts": ALERTS, "monitoring/history": HISTORY, "monitoring/session": SESSION}  # fmt: skip
CORE = {
    "tensors": ["test_diversity", "test_subspaces", "test_arguments", "test_no_sync"],
    "pairs": ["test_diversity", "test_slices"],
    "whitening": ["test_diversity", "test_subspaces", "test_error_model"],
    "subspaces": ["test_subspaces", "test_diversity"],
    "diversity": ["test_diversity", "test_slices"],
    "covariance": ["test_covariance"],
    "slices": ["test_slices", "test_diversity"],
    "kernels": ["test_kernels"],
    "circuits": ["test_circuits"],
    "products": ["test_circuits", "test_covariance", "test_diversity"],
    "chance": ["test_chance"],
}
"""File of `core` -> its tests; any other has those that are named like it."""


def files(package: Path) -> list[Path]:
    """Give the files that are broken, `core` first, each folder by name."""
    return [path for folder in ("core", *ROOMS) for path in sorted((package / folder).glob("[!_]*.py"))]


def tests_of(path: Path, package: Path, tests: Path) -> list[str]:
    """Give the test files that are to notice a change of a file."""
    room = path.relative_to(package).parent.as_posix()
    if room == "core":
        named = [f"core/{name}.py" for name in CORE.get(path.stem, [f"test_{path.stem}"])]
    else:
        named = ROOMS[room]
    return [str(tests / name) for name in named if (tests / name).is_file()]
