"""Checks of `metrics`, and of rules against the metrics that are measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hdi_callback.arguments import did_you_mean, words
from hdi_callback.errors import MisconfigurationError
from hdi_callback.monitoring.metrics import DEFAULT_METRICS, METRICS

_DEFAULT = "default"


def _known() -> str:
    """The metrics as a sentence; those of keys represent the same of queries, values and outputs."""
    roles = ("hdi_query", "hdi_value", "hdi_output")
    own = [name for name in METRICS if not name.startswith(roles)]
    others = ", ".join(f"{role}..." for role in roles)
    default = ", ".join(DEFAULT_METRICS)
    return f"Known metrics: {', '.join(own)}; those of `hdi` also as {others}; `{_DEFAULT}` for {default}."


def choose_metrics(names: Iterable[str] | None) -> tuple[str, ...]:
    """Check the names of metrics and return them without repeats.

    Args:
        names: names from `METRICS`; ``"default"`` among them means the default ones, and so does `None`.

    Returns:
        The names, in their order.

    Raises:
        MisconfigurationError: if a name is not in `METRICS`; the message lists what exists.

    Example:
        >>> choose_metrics(["hdi", "hdi_query", "hdi"])
        ('hdi', 'hdi_query')
        >>> choose_metrics(["default", "attention_sink"]) == (*choose_metrics(None), "attention_sink")
        True
    """
    is_default = names is None or (isinstance(names, str) and names == _DEFAULT)
    written = [_DEFAULT] if is_default else words("metrics", names, what="names of metrics")
    expanded = [DEFAULT_METRICS if name == _DEFAULT else (name,) for name in written or ()]
    chosen = tuple(dict.fromkeys(name for names in expanded for name in names))
    unknown = [name for name in chosen if name not in METRICS]
    if unknown or not chosen:
        raise MisconfigurationError(
            f"`metrics` must name at least one of the known metrics, got {list(chosen)}; unknown: {unknown}."
            f"{did_you_mean(unknown[0], METRICS) if unknown else ''} {_known()}"
        )
    return chosen


def has_default(names: Any) -> bool:
    """Return whether the default metrics are asked for, alone or among others.

    Args:
        names: what a user wrote.

    Returns:
        True if they are.
    """
    chosen = [names] if isinstance(names, str) else names
    return chosen is None or (
        isinstance(chosen, list | tuple) and any(isinstance(name, str) and name == _DEFAULT for name in chosen)
    )


def check_needs(rule: str, needs: Sequence[str], metrics: Sequence[str]) -> None:
    """Refuse a rule that would never judge, as metrics that it needs are not measured.

    Args:
        rule: its name.
        needs: the metrics that it needs.
        metrics: the metrics that are logged; their sources are measured as a whole, and so are the keys.

    Raises:
        MisconfigurationError: if a metric in `needs` is unknown, or its source is not measured.
    """
    for name in needs:
        if name not in METRICS:
            raise MisconfigurationError(
                f"The rule {rule!r} needs {name!r}, which is not a metric.{did_you_mean(name, METRICS)} {_known()}"
            )
        sources = {"key", *(METRICS[metric].source for metric in metrics)}
        is_error = name.endswith("_error") and not any(metric.endswith("_error") for metric in metrics)
        if METRICS[name].source not in sources or is_error:
            raise MisconfigurationError(
                f"The rule {rule!r} needs {name!r}, which is not measured with metrics={list(metrics)}: add it there."
            )
