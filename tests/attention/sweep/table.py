"""The table of supported models, from the reports of the sweep."""

from __future__ import annotations

from collections import Counter
from typing import Any


def summary(reports: list[dict[str, Any]]) -> str:
    """Count the verdicts."""
    counts = Counter(report["verdict"] for report in reports)
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())


def table(reports: list[dict[str, Any]]) -> str:
    return summary(reports)
