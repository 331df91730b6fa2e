"""`replay`: the rules applied to a run's history file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from hdi_callback.errors import MisconfigurationError
from hdi_callback.monitoring.alerts import LEVELS, Alert, Alerts, Level, Rule, heads_written, is_at_least
from hdi_callback.monitoring.history import read_lines, read_records
from hdi_callback.monitoring.rules import choose_rules


def replay(
    path: str | os.PathLike[str],
    rules: Sequence[Rule] | None = None,
    *,
    thresholds: Mapping[str, Mapping[str, float | None]] | None = None,
) -> list[Alert]:
    """Judge a run from its history file, so that thresholds can be tuned without training again.

    Args:
        path: a history file.
        rules: the rules to apply; by default those of `HDICallback`.
        thresholds: for the default rules: pattern of layer names -> limits, as `HDICallback` takes them.

    Returns:
        Every alert in the order in which it would have been raised.

    Raises:
        MisconfigurationError: if there is no such file, both rules and thresholds are set, or a threshold is
            unknown, or a pattern of them matches no layer.

    Example:
        >>> import tempfile, pathlib
        >>> from hdi_callback.monitoring.history import History
        >>> from hdi_callback.monitoring.readings import LayerRecord, Record
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "history.jsonl"
        >>> history = History(path)
        >>> for step, alignment in ((50, 0.2), (100, 0.95)):
        ...     values = {"hdi_alignment": alignment, "hdi_energy_alignment": alignment}
        ...     history.write(Record(step, {"attn": LayerRecord(values)}))
        >>> [(alert.step, alert.rule, alert.level) for alert in replay(path)]
        [(100, 'mean alignment', 'critical')]
    """
    if rules is not None and thresholds is not None:
        raise MisconfigurationError("`thresholds` are those of the default rules: give either rules or thresholds.")
    runs = [line for line in read_lines(path) if line["kind"] == "run"]
    alerts = Alerts(choose_rules("default" if rules is None else rules, thresholds), runs[-1]["layers"] if runs else ())
    acts = [line for line in read_lines(path) if line["kind"] == "intervention"]
    records, raised = read_records(path), list[Alert]()
    names = dict.fromkeys(name for record in records for name in record.layers)
    for pattern in (thresholds or {}) if names else ():
        if not any(fnmatchcase(name, pattern) for name in names):
            raise MisconfigurationError(f"`thresholds` for {pattern!r} match no layer; there are: {', '.join(names)}.")
    for record in records:
        raised += alerts.judge(record)
        for line in acts:
            if line["step"] == record.step:
                alerts.rewrite(line["layer"], heads_written(line))
    return raised


def read_alerts(path: str | os.PathLike[str]) -> list[Alert]:
    """Read the alerts that were raised during a run.

    Args:
        path: a history file.

    Returns:
        The alerts in their order.

    Raises:
        MisconfigurationError: if there is no such file, or it is of a newer format.
    """
    return [Alert.from_dict(line) for line in read_lines(path) if line["kind"] == "alert"]


def active_alerts(alerts: Iterable[Alert], least: Level = "warning") -> list[Alert]:
    """The alerts that are active after the last of them.

    Args:
        alerts: every alert of a run, in the order in which they were raised.
        least: the lowest level that counts.

    Returns:
        Those that are not resolved, each as it was raised last, the most serious first.

    Example:
        >>> from hdi_callback.monitoring.alerts import Finding
        >>> begun = Alert(50, "attn", "worst pair", "warning", "...", Finding("heads 0 and 1 are nearly one head"))
        >>> over = Alert(90, "attn", "worst pair", "warning", "...", begun.finding, is_resolved=True)
        >>> len(active_alerts([begun])), len(active_alerts([begun, over]))
        (1, 0)
    """
    active: dict[tuple[str, str], Alert] = {}
    for alert in alerts:
        active.pop((alert.layer, alert.rule), None)
        if not alert.is_resolved and is_at_least(alert.level, least):
            active[alert.layer, alert.rule] = alert
    return sorted(active.values(), key=lambda one: -LEVELS.index(one.level))
