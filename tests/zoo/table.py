"""The page of supported models, from what was examined."""

from __future__ import annotations

from typing import Any


def page(results: list[dict[str, Any]]) -> str:
    return str(len(results))
