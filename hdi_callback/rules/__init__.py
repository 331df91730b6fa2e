"""Readings in, alerts out: rules, their limits, and the engine that applies them.

A rule judges the readings of one layer and returns a finding, or nothing. `Alerts` keeps the findings that last, and
merges those of one event to one alert, which is reported when it begins, when it gets worse, and when it ends.
"""

from hdi_callback.rules.choice import RULES, default_rules
from hdi_callback.rules.engine import Alerts
from hdi_callback.rules.limits import LIMITS, check_thresholds
from hdi_callback.rules.rule import Finding, Rule

__all__ = ["LIMITS", "RULES", "Alerts", "Finding", "Rule", "check_thresholds", "default_rules"]
