"""Resumption: what a run takes from a checkpoint."""

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
from hdi_callback.monitoring.session.state import sound_state
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
    """Take from a saved state what is sound, and nothing if it is of another model.

    It is of another if one of its layers is not there, or has other heads. Layers that have come in addition are no
    difference: their readings begin with the resumption. States of earlier versions tell no layers, and are taken as
    they are.

    Args:
        state: what a checkpoint held, whatever it is.
        layers: those that are watched now.
        step: optimizer steps taken when it is resumed.
        is_strict: refuse a state of another model.
        warn_once: turns it into a warning otherwise.
        is_alone: no other ranks hold layers. Else the layers of others are no difference if the state was written by
            ranks that held different ones.

    Returns:
        The state, or `None`.

    Raises:
        MisconfigurationError: if it is of another model and `is_strict` is set.
    """
    sound = sound_state(state, step=step, warn_once=warn_once)
    now = {layer.name: sizes_of(layer) for layer in layers}
    kept: Mapping[str, list[int]] = {} if sound is None else sound.get("layers", {})
    missing = [name for name, sizes in kept.items() if list(sizes) != now.get(name)]
    if not is_alone and sound is not None and sound.get("spans_ranks") and (not now or now.keys() & kept.keys()):
        missing = [name for name in missing if name in now]
    if not missing:
        return sound
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    listed = ", ".join(f"`{name}`" for name in missing[:3]) + more
    message = f"The checkpoint was written with attention layers that are not there, or have other heads: {listed}."
    if is_strict:
        raise MisconfigurationError(f"{message} Write strict=False to begin a new history.")
    warn_once.warn("another model", f"{message} History, alerts and interventions start anew.")
    return None


def sizes_of(layer: AttentionLayer) -> list[int]:
    """Give the sizes by which a checkpoint knows a layer again.

    Args:
        layer: an attention layer.

    Returns:
        Heads, key heads, and the widths of a head's keys and values.
    """
    return [layer.num_heads, layer.num_key_heads, layer.head_dim, layer.value_dim]


def last_step_in(history: History | None, step: int) -> int | None:
    """Find the last reading that a history holds.

    Args:
        history: the history of the run.
        step: optimizer steps taken so far.

    Returns:
        Its step, at most `step`; `None` if there is none.
    """
    if history is None or not history.path.is_file():
        return None
    return max((record.step for record in read_records(history.path) if record.step <= step), default=None)


def judge_again(alerts: Alerts, history: History, last: int) -> None:
    """Find the active alerts from the history, where the checkpoint does not tell.

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
    """Give interventions their states back; one for which that fails half way stays as it was.

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
    """End what lasts for an alert that is not active, as nothing else would end it.

    Args:
        interventions: those of the run.
        active: layer and rule of every active alert.
    """
    for intervention in interventions:
        if isinstance(intervention, WhileActive):
            intervention.keep(active)


def state_of(intervention: Intervention, warn_once: WarnOnce) -> dict[str, Any]:
    """Give the state of an intervention as plain data.

    Args:
        intervention: any.
        warn_once: warns once of each kind of failure.

    Returns:
        Its state; if that cannot be kept, no more than how often it has acted.
    """
    try:
        state: dict[str, Any] = plain_state(intervention.state_dict())
    except Exception as error:
        warn_once.error(f"keeping the state of the intervention {intervention.name}", error)
        return {"count": intervention.count}
    return state


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | list | dict | set | tuple)
