"""`judge_again`: the readings of a run under other limits, without training again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

from hdi_callback.errors import MisconfigurationError
from hdi_callback.history import RunHistory
from hdi_callback.rules import Alerts


def judge_again(run: RunHistory, thresholds: Mapping[str, Mapping[str, float | None]]) -> RunHistory:
    """Judge the readings of a run by the default rules with other limits."""
    alerts = Alerts("default", thresholds, run.layers)
    check_patterns(thresholds, [facts["name"] for facts in run.layers])
    records = []
    for record in run.records:
        new_alerts = alerts.judge(replace(record, alerts=(), active=()))
        records.append(replace(record, alerts=new_alerts, active=alerts.active))
    return replace(run, records=tuple(records))


def check_patterns(patterns: Iterable[str], layers: Iterable[str]) -> None:
    """Raise an error if a pattern matches no layer."""
    names = list(layers)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise MisconfigurationError(
                f"No layer matches the pattern {pattern!r}: the layers are {', '.join(names) or 'none'}."
            )
