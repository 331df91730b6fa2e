"""The argument `interventions`, checked once."""

from __future__ import annotations

from typing import Any

from hdi_callback.arguments import shown
from hdi_callback.errors import MisconfigurationError
from hdi_callback.monitoring.interventions.intervention import Intervention


def check_interventions(interventions: Any, alerts: Any) -> tuple[Intervention, ...]:
    """Check the interventions that the user passed.

    Args:
        interventions: interventions, or `None` for none.
        alerts: the argument `alerts`, `None` for no rules.

    Returns:
        The interventions.

    Raises:
        MisconfigurationError: if an item is no intervention, or there are no alerts to answer.
    """
    if interventions is None:
        return ()
    if isinstance(interventions, Intervention):
        made = type(interventions).__name__
        raise MisconfigurationError(f"`interventions` must be a list, got one {made}: write [{made}(...)].")
    if not isinstance(interventions, list | tuple):
        raise MisconfigurationError(
            f"`interventions` must be a list, got {shown(interventions)}: write [StopTraining()]."
        )
    for item in interventions:
        if isinstance(item, type) and issubclass(item, Intervention):
            raise MisconfigurationError(
                f"`interventions` must hold interventions, got the class {item.__name__}: write {item.__name__}()."
            )
        if not isinstance(item, Intervention):
            raise MisconfigurationError(
                f"`interventions` must hold interventions such as StopTraining(), got {shown(item)}."
            )
        if not hasattr(item, "dry_run"):
            raise MisconfigurationError(
                f"{type(item).__name__} is not initialised as an intervention: call super().__init__() in its __init__."
            )
    if len({id(item) for item in interventions}) < len(interventions):
        raise MisconfigurationError("`interventions` holds one intervention twice: make a second one, or leave it out.")
    if alerts is None and any(item.answers_alerts for item in interventions):
        raise MisconfigurationError('Interventions answer alerts, and alerts=None raises none: write alerts="default".')
    return tuple(interventions)
