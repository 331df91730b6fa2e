"""What each attention of a model does, and what is wrong or odd about it, from one forward."""

from hdi_callback.checks.cards import Card, joined_name
from hdi_callback.checks.check import Check, check, examine
from hdi_callback.checks.diagnoses import Diagnosis
from hdi_callback.checks.facts import Facts, facts_of, ranges, shown_rows

__all__ = ["Card", "Check", "Diagnosis", "Facts", "check", "examine", "facts_of", "joined_name", "ranges", "shown_rows"]
