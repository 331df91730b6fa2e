"""`NonFinite`: weights or outputs that are NaN or infinite."""

from __future__ import annotations

from hdi_callback.monitoring.alerts import Alert, Finding, Row, Rule, Series
from hdi_callback.monitoring.readings import NOT_FINITE
from hdi_callback.monitoring.rules.words import named_heads

_COUNTS = {"weights_not_finite": "weights", "outputs_not_finite": "outputs"}


class NonFinite(Rule):
    """Weights of a layer, or outputs of its heads, are NaN or infinite.

    Key weights are always judged; other weights if ``weights_not_finite`` is measured, outputs if
    ``outputs_not_finite`` is.
    """

    name = "weights not finite"

    def judge(self, series: Series, active: Alert | None) -> Finding | None:
        """Find NaN or infinity."""
        latest = series.latest
        found = []
        heads: set[int] = set()
        if latest.absent == NOT_FINITE:
            found.append("the key weights")
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
    return row.absent == NOT_FINITE or any(row.values.get(name, 0) > 0 for name in _COUNTS)
