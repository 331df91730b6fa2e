"""What every trainer's shell is asked for, checked before training."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hdi_callback.errors import MisconfigurationError
from hdi_callback.monitoring.interventions import Intervention


def check_outlets(history: Any, on_alert: Any) -> None:
    """Check where readings and alerts are to go.

    Args:
        history: must be True, False or a path.
        on_alert: must be a function or `None`.

    Raises:
        MisconfigurationError: if it is not.
    """
    if not isinstance(history, bool | str | os.PathLike):
        raise MisconfigurationError(f"`history` must be True, False or a path, got {history!r}: write False for none.")
    if on_alert is not None and not callable(on_alert):
        raise MisconfigurationError(f"`on_alert` must be a function that takes an Alert, got {on_alert!r}.")


def layer_patterns(
    alerts: Any, thresholds: Mapping[str, Any] | None, interventions: Iterable[Intervention]
) -> dict[str, Sequence[str]]:
    """Collect the patterns of layer names that the arguments hold.

    Args:
        alerts: rules of the user's, or anything else.
        thresholds: limits by pattern.
        interventions: what may be done about alerts.

    Returns:
        The patterns, by where they were written.
    """
    rules = alerts if isinstance(alerts, list | tuple) else ()
    return {
        "`thresholds`": list(thresholds or ()),
        **{f"`layers` of the rule {rule.name!r}": list(rule.layers or ()) for rule in rules},
        **{f"`layers` of {item.name}": list(item.layers or ()) for item in interventions},
    }
