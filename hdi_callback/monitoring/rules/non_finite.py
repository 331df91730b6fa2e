"""`NonFinite`: weights or outputs that are NaN or infinite."""

from __future__ import annotations

from hdi_callback.monitoring.alerts import Alert, Finding, Row, Rule, Series
from hdi_callback.monitoring.metrics import METRICS
from hdi_callback.monitoring.readings import NOT_FINITE
from hdi_callback.monitoring.rules.words import named_heads

_KEYS = "the key weights"
_COUNTS = {"weights_not_finite": "weights", "outputs_not_finite": "outputs"}


class NonFinite(Rule):
    """Weights of a layer, or outputs of its heads, are NaN or infinite.

    Key weights are always judged; other weights if ``weights_not_finite`` is measured, outputs if
    ``outputs_not_finite`` is.
    """

    name = "weights not finite"

    def is_measured(self, series: Series, active: Alert | None) -> bool:
        """Return whether what was not finite when the alert was active last is measured still."""
        latest = _parts(series.latest)
        broken = [parts for row in series.rows if (parts := {name for name, is_bad in _parts(row).items() if is_bad})]
        return active is None or any(latest.values()) or not broken or broken[-1] <= latest.keys()

    def judge(self, series: Series, active: Alert | None) -> Finding | None:
        """Find NaN or infinity."""
        latest = series.latest
        found = []
        heads: set[int] = set()
        if latest.absent == NOT_FINITE:
            found.append(_KEYS)
        for metric, what in _COUNTS.items():
            if latest.values.get(metric, 0) > 0:
                broken = [head for head, count in enumerate(latest.per_head(metric)) if count > 0]
                found.append(f"the {what} of {named_heads(broken)}" if broken else f"the {what} of some heads")
                heads.update(broken)
        if not found:
            return None
        last = [row.step for row in series.rows if not _is_broken(row)]
        before = f"; they did not at step {last[-1]}" if last else ""
        return Finding(
            f"{' and '.join(found)} hold NaN or infinity{before}",
            "critical",
            heads=tuple(sorted(heads)),
            remedy="a checkpoint from before, with gradient clipping or a lower learning rate",
        )


def _is_broken(row: Row) -> bool:
    return any(_parts(row).values())


def _parts(row: Row) -> dict[str, bool]:
    """What a reading measured -> whether it holds NaN or infinity."""
    parts = {name: row.values[name] > 0 for name in _COUNTS if name in row.values}
    if row.absent == NOT_FINITE:
        return {_KEYS: True, **parts}
    has_keys = any(name in METRICS and METRICS[name].source == "key" for name in row.values)
    return {_KEYS: False, **parts} if has_keys else parts
