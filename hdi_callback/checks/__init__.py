"""What each attention of a model does, and what is wrong or odd about it, from one forward."""

from __future__ import annotations

from hdi_callback.checks.cards import Card
from hdi_callback.checks.check import Check, Diagnosis, check, examine

__all__ = ["Card", "Check", "Diagnosis", "check", "examine"]
