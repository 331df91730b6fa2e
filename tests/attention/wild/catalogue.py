"""All modules by hand: importing this fills the list of cases."""

from __future__ import annotations

from tests.attention.wild import (  # noqa: F401  # noqa: F401
    decoders,
    fields,
    fused,
    grouped,
    handmade,
    imitations,
    language,
    lookalikes,
    lying,
    machinery,
    machines,
    plain,
    positions,
    recent,
    scores,
    several,
    streams,
    studies,
    tutorials,
    vision,
)
from tests.attention.wild.truth import CASES, Case


def cases() -> dict[str, Case]:
    """Give the cases by name."""
    return {case.name: case for case in CASES}
