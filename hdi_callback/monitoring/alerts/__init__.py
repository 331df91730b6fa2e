"""Rules over the readings of a run -> `Alert`.

A rule judges the readings of one layer and returns a finding, or nothing. `Alerts` keeps the findings that are active,
so that each is reported once when it begins, once more if it gets worse, and once when it is resolved. Everything a
rule needs is in the readings, so that a run can be judged while it goes on, after a resumption, or from its history
file (`replay`).
"""

from hdi_callback.monitoring.alerts.alert import LEVELS, Alert, Finding, Level, is_at_least
from hdi_callback.monitoring.alerts.engine import Alerts, heads_written
from hdi_callback.monitoring.alerts.rule import Rule, check_finding, check_rule
from hdi_callback.monitoring.alerts.series import Row, Series

__all__ = [
    "LEVELS",
    "Alert",
    "Alerts",
    "Finding",
    "Level",
    "Row",
    "Rule",
    "Series",
    "check_finding",
    "check_rule",
    "heads_written",
    "is_at_least",
]
