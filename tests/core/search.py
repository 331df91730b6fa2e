"""How many cases a property is tried on, the same in every run."""

from __future__ import annotations

from hypothesis import settings

SEARCH = settings(max_examples=40, deadline=None, derandomize=True)
