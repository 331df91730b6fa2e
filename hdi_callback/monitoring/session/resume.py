"""Resumption: what a run restores from a checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from hdi_callback.attention import AttentionLayer
from hdi_callback.errors import MisconfigurationError
from hdi_callback.monitoring.alerts import Alerts
from hdi_callback.monitoring.history import History, read_records
from hdi_callback.monitoring.interventions import Intervention, plain_state
from hdi_callback.monitoring.interventions.while_active import WhileActive
from hdi_callback.monitoring.session.state import valid_state
from hdi_callback.monitoring.warn_once import WarnOnce


def state_of_this_model(
    state: Any,
    layers: Sequence[AttentionLayer],
    *,
    step: int | None = None,
    is_strict: bool,
    warn_once: WarnOnce,
    is_alone: bool = True,
) -> dict[str, Any] | None:
    """The valid part of a saved state; `None` if it is of another model.

    It is of another model if one of its layers is missing here, or has other heads. Additional layers are allowed:
    their readings begin with the resumption. States of earlier versions hold no layers, and are not compared.

    Args:
        state: the state in a checkpoint, valid or not.
        layers: the layers that are watched now.
        step: optimizer steps taken when it is resumed.
        is_strict: raise an error for a state of another model.
        warn_once: turns it into a warning otherwise.
        is_alone: no other ranks hold layers. Otherwise missing layers are allowed if the state was written by ranks
            with different layers.

    Returns:
        The state, or `None`.

    Raises:
        MisconfigurationError: if it is of another model and `is_strict` is set.
    """
    valid = valid_state(state, step=step, warn_once=warn_once)
    now = {layer.name: sizes_of(layer) for layer in layers}
    kept: Mapping[str, list[int]] = {} if valid is None else valid.get("layers", {})
    missing = [name for name, sizes in kept.items() if list(sizes) != now.get(name)]
    if not is_alone and valid is not None and valid.get("spans_ranks") and (not now or now.keys() & kept.keys()):
        missing = [name for name in missing if name in now]
    if not missing:
        return valid
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    listed = ", ".join(f"`{name}`" for name in missing[:3]) + more
    message = f"The checkpoint was written with attention layers that this model lacks, or with other heads: {listed}."
    if is_strict:
        raise MisconfigurationError(f"{message} Write strict=False to begin a new history.")
    warn_once.warn("another model", f"{message} History, alerts and interventions start anew.")
    return None


def sizes_of(layer: AttentionLayer) -> list[int]:
    """Sizes by which a checkpoint recognises a layer.

    Args:
        layer: an attention layer.

    Returns:
        Heads, key heads, and the widths of a head's keys and values.
    """
    return [layer.num_heads, layer.num_key_heads, layer.head_dim, layer.value_dim]


def last_step_in(history: History | None, step: int) -> int | None:
    """Step of the last reading in a history.

    Args:
        history: the history of the run.
        step: optimizer steps taken so far.

    Returns:
        The step, at most `step`; `None` if there is no reading.
    """
    if history is None or not history.path.is_file():
        return None
    return max((record.step for record in read_records(history.path) if record.step <= step), default=None)


def judge_again(alerts: Alerts, history: History, last: int) -> None:
    """Restore active alerts from the history, if the checkpoint does not hold them.

    Args:
        alerts: the rules.
        history: the readings of the run.
        last: the step of the last reading that counts.
    """
    records = [one for one in read_records(history.path) if one.step <= last] if history.path.is_file() else []
    if records:
        alerts.load_state_dict({"active": [], "series": {}})
    for record in records:
        alerts.judge(record)


def restore_interventions(interventions: Sequence[Intervention], kept: Any, warn_once: WarnOnce) -> None:
    """Restore the states of interventions; one that fails half way stays as it was.

    Args:
        interventions: those of the run.
        kept: pairs of a name and a state; several of one kind differ by their order.
        warn_once: warns once of each kind of failure.
    """
    left = list(kept)
    for intervention in interventions:
        place = next((place for place, (name, _) in enumerate(left) if name == intervention.name), None)
        state = None if place is None else left.pop(place)[1]
        if state is None:
            continue
        with warn_once.guard(f"resuming the intervention {intervention.name}"):
            before = {name: copy.copy(value) for name, value in vars(intervention).items() if _is_plain(value)}
            try:
                intervention.load_state_dict(state)
            except Exception:
                vars(intervention).update(before)
                raise


def end_what_is_resolved(interventions: Sequence[Intervention], active: Collection[tuple[str, str]]) -> None:
    """End interventions for alerts that are not active any more, which nothing else would end.

    Args:
        interventions: those of the run.
        active: layer and rule of every active alert.
    """
    for intervention in interventions:
        if isinstance(intervention, WhileActive):
            intervention.keep(active)


def state_of(intervention: Intervention, warn_once: WarnOnce) -> dict[str, Any]:
    """State of an intervention as plain data.

    Args:
        intervention: any.
        warn_once: warns once of each kind of failure.

    Returns:
        The state; if it is not plain data, only the count of actions.
    """
    try:
        state: dict[str, Any] = plain_state(intervention.state_dict())
    except Exception as error:
        warn_once.error(f"keeping the state of the intervention {intervention.name}", error)
        return {"count": intervention.count}
    return state


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | list | dict | set | tuple)
