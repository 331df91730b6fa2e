"""Runs judged again, from what was read of them, by the rules as they are now."""

from __future__ import annotations

import math
import zlib
from typing import Any

from hdi_callback.monitoring.alerts import Alerts
from hdi_callback.monitoring.readings import LayerRecord, Record
from hdi_callback.monitoring.rules import choose_rules, default_rules
from tests.experiments.faults.monitors import Result


def _named(rules: list[Any]) -> str:
    asked = sorted((rule.name, sorted((name, repr(value)) for name, value in vars(rule).items())) for rule in rules)
    return f"{len(asked)} rules, {zlib.crc32(repr(asked).encode()):08x}"


NOW = _named(default_rules())
"""Names the rules as they ship, with their limits: other rules, or other limits, have another name."""


def judge_again(run: Result) -> Result:
    """Replace the alerts of a run; of one whose readings were not kept they stay what they were."""
    if not run.get("readings"):
        return run
    facts = [{**layer, "is_first": place == 0} for place, layer in enumerate(run["facts"])]
    alerts = Alerts(choose_rules("default"), facts)
    found = [
        (alert.step, alert.layer, alert.rule, alert.level)
        for reading in run["readings"]
        for alert in alerts.judge(_record(reading))
        if not alert.is_resolved
    ]
    return {**run, "alerts": found, "rules": NOW}


def _record(reading: dict[str, Any]) -> Record:
    """Make a record of what was kept of a reading: no matrices, and nothing of what was absent."""
    layers = {}
    for name, values in reading["values"].items():
        arrays = {
            metric: [math.nan if one is None else one for one in array]
            for metric, array in reading["arrays"].get(name, {}).items()
        }
        layers[name] = LayerRecord(values, arrays)
    return Record(reading["step"], layers)
