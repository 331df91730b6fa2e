"""All modules by hand: importing this fills the list of cases."""

from __future__ import annotations

from tests.attention.wild import fused, grouped, lying, plain, positions, recent, scores, several  # noqa: F401
from tests.attention.wild.truth import CASES, Case


def cases() -> dict[str, Case]:
    """Give the cases by name."""
    return {case.name: case for case in CASES}
