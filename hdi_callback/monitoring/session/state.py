"""The saved state of a run, checked: valid fields are kept, others are reported."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hdi_callback.attention.names import printable
from hdi_callback.monitoring.history.schema import is_alert, is_number, is_text_map, is_whole
from hdi_callback.monitoring.warn_once import WarnOnce, describe

FORMAT = 3
_LONGEST_PATH = 4096
_MOST_WORDS = 60


def read_state(path: Path, warn_once: WarnOnce) -> dict[str, Any] | None:
    """Read a state from a JSON file.

    Args:
        path: the file.
        warn_once: warns once of each kind of failure.

    Returns:
        The content of the file; `None` if that is no dictionary.
    """
    try:
        state = json.loads(path.read_bytes().decode("utf-8"))
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        warn_once.warn("state", f"`{path}` cannot be read ({describe(error)}): the state in it is lost.")
        return None
    if not isinstance(state, dict):
        warn_once.warn("state", f"`{path}` holds not a dictionary but {_shown(state)}: the state in it is lost.")
        return None
    return state


def valid_state(state: Any, *, step: int | None = None, warn_once: WarnOnce) -> dict[str, Any] | None:
    """The valid fields of a saved state; warns once about the rest.

    Args:
        state: the state in a checkpoint, valid or not.
        step: optimizer steps taken when it is resumed; a reading beyond it is an error.
        warn_once: warns once.

    Returns:
        A state in which every field that is there has its type: ``last_step``, ``step``, ``history``, ``run``,
        ``tensorboard``, ``layers``, ``alerts`` and ``interventions``. ``last_step`` is missing if it was not valid;
        ``alerts`` too, and ``alerts_in_part`` holds the valid ones. `None` if it is no state at all.
    """
    if state is None:
        return None
    if not isinstance(state, Mapping):
        warn_once.warn(
            "state", f"The saved state of head diversity is not a dictionary but {_shown(state)}. It starts anew."
        )
        return None
    odd: list[str] = []
    valid: dict[str, Any] = {}
    for name, check in _FIELDS.items():
        if name in state:
            before = len(odd)
            value = check(name, state[name], odd)
            if len(odd) == before or name in ("layers", "interventions"):
                valid[name] = value
            elif name == "alerts" and value is not None:
                valid["alerts_in_part"] = value
    counted = [name for name in ("last_step", "step") if valid.get(name) is not None]
    beyond = [name for name in counted if step is not None and valid[name] > step]
    odd += [f"`{name}` is {valid.pop(name)}, but the run resumes at step {step}" for name in beyond]
    version = state.get("format", FORMAT)
    if not is_whole(version) or version > FORMAT:
        odd.append(f"`format` is {_shown(version)}, and this version of hdi-callback writes {FORMAT}")
    if odd:
        more = f"; and {len(odd) - 3} more" if len(odd) > 3 else ""
        warn_once.warn(
            "state",
            f"The saved state of head diversity is not valid: {'; '.join(odd[:3])}{more}. Valid fields are restored, "
            "the rest starts anew.",
        )
    return valid


def is_state(state: Any) -> bool:
    """Return whether a value is the state of a session, valid or not."""
    return isinstance(state, Mapping) and not {"step", "last_step"}.isdisjoint(state)


def contents_of(state: Any) -> object:
    """Description for a message of a value that is no state: its keys, or its type."""
    return sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__


def steps_counted_in(state: Any, *, otherwise: int, warn_once: WarnOnce) -> int:
    """Number of optimizer steps of a run when its state was saved.

    Args:
        state: the state in a checkpoint.
        otherwise: the result if it does not say.
        warn_once: warns once of invalid fields.

    Returns:
        The count; without one the last reading is the best guess of how far the run has come.
    """
    valid = valid_state(state, warn_once=warn_once) or {}
    counted = [valid.get(name) for name in ("step", "last_step")]
    return next((count for count in counted if count is not None), otherwise)


_Check = Callable[[str, Any, list[str]], Any]


def _step(name: str, value: Any, odd: list[str]) -> int | None:
    if value is None or is_whole(value):
        step: int | None = value
        return step
    odd.append(f"`{name}` must be a step, got {_shown(value)}")
    return None


def _path(name: str, value: Any, odd: list[str]) -> str | None:
    if value is None or (isinstance(value, str) and 0 < len(value) <= _LONGEST_PATH and "\0" not in value):
        return value
    odd.append(f"`{name}` must be a path, got {_shown(value)}")
    return None


def _id(name: str, value: Any, odd: list[str]) -> str | None:
    if value is None or (isinstance(value, str) and 0 < len(value) <= 64 and value.isalnum()):
        return value
    odd.append(f"`{name}` must be the id of a run, got {_shown(value)}")
    return None


def _flag(name: str, value: Any, odd: list[str]) -> bool:
    if not isinstance(value, bool):
        odd.append(f"`{name}` is {_shown(value)}, which is neither true nor false")
    return value is True


def _layers(name: str, value: Any, odd: list[str]) -> dict[str, list[int]]:
    if value is None:
        return {}
    if not is_text_map(value):
        odd.append(f"`{name}` must hold the sizes of layers, got {_shown(value)}")
        return {}
    valid = {
        layer: list(sizes)
        for layer, sizes in value.items()
        if isinstance(sizes, list | tuple) and len(sizes) == 4 and all(map(is_whole, sizes))
    }
    odd.extend(f"the sizes of {_shown(layer)} are {_shown(value[layer])}" for layer in value if layer not in valid)
    return valid


def _alerts(name: str, value: Any, odd: list[str]) -> dict[str, Any] | None:
    if value is None:
        return None
    if not is_text_map(value):
        odd.append(f"`{name}` must hold alerts and readings, got {_shown(value)}")
        return None
    active, series = value.get("active"), value.get("series")
    if not isinstance(active, list | tuple) or not all(map(is_alert, active)):
        odd.append(f"the active alerts are {_shown(active)}")
        active = list(filter(is_alert, active)) if isinstance(active, list | tuple) else []
    if not is_text_map(series):
        odd.append(f"the readings of layers are {_shown(series)}")
        series = {}
    valid = {layer: rows for layer, rows in series.items() if _is_series(rows)}
    odd.extend(f"the readings of {_shown(layer)} are {_shown(series[layer])}" for layer in series if layer not in valid)
    loaded, rewritten = value.get("loaded", False), value.get("rewritten", {})
    if type(loaded) is not bool:
        odd.append(f"whether the weights were trained before is {_shown(loaded)}")
        loaded = False
    if not is_text_map(rewritten) or not all(_is_heads(heads) for heads in rewritten.values()):
        odd.append(f"the heads that were rewritten are {_shown(rewritten)}")
        rewritten = {}
    unjudged = value.get("unjudged", [])
    if not isinstance(unjudged, list | tuple) or not all(map(_is_count_of_alert, unjudged)):
        odd.append(f"the readings that did not judge alerts are {_shown(unjudged)}")
        unjudged = []
    return {"active": active, "series": valid, "loaded": loaded, "rewritten": rewritten, "unjudged": unjudged}


def _is_count_of_alert(value: Any) -> bool:
    if not isinstance(value, list | tuple) or len(value) != 3:
        return False
    layer, rule, count = value
    return isinstance(layer, str) and isinstance(rule, str) and is_whole(count)


def _is_heads(heads: Any) -> bool:
    return isinstance(heads, list | tuple) and all(map(is_whole, heads))


def _is_series(rows: Any) -> bool:
    if not isinstance(rows, list | tuple) or not rows or not all(map(_is_row, rows)):
        return False
    steps = [row["step"] for row in rows]
    return steps == sorted(steps)


def _is_row(row: Any) -> bool:
    return (
        is_text_map(row)
        and set(row) <= {"step", "values", "arrays", "absent"}
        and is_whole(row.get("step"))
        and is_text_map(row.get("values"))
        and all(map(is_number, row["values"].values()))
        and is_text_map(row.get("arrays", {}))
        and all(isinstance(array, list | tuple) for array in row.get("arrays", {}).values())
        and isinstance(row.get("absent", ""), str)
    )


def _interventions(name: str, value: Any, odd: list[str]) -> list[tuple[str, Any]]:
    if value is None:
        return []
    if not isinstance(value, list | tuple):
        odd.append(f"`{name}` must be a list, got {_shown(value)}")
        return []
    valid: list[tuple[str, Any]] = []
    for entry in value:
        if isinstance(entry, list | tuple) and len(entry) == 2 and isinstance(entry[0], str):
            is_valid = _is_intervention(entry[1])
            valid.append((entry[0], entry[1] if is_valid else None))  # keeps its place: order identifies it
            if is_valid:
                continue
        odd.append(f"an intervention is {_shown(entry)}")
    return valid


def _is_intervention(state: Any) -> bool:
    """Return whether the fields that every intervention has are valid; further ones may hold anything."""
    if not isinstance(state, Mapping):
        return state is not None
    standing = state.get("standing", {})
    return (
        is_whole(state.get("count", 0))
        and is_text_map(standing)
        and all(isinstance(rules, list | tuple) for rules in standing.values())
        and all(isinstance(rule, str) for rules in standing.values() for rule in rules)
    )


_FIELDS: dict[str, _Check] = {
    "last_step": _step,
    "step": _step,
    "history": _path,
    "run": _id,
    "tensorboard": _path,
    "layers": _layers,
    "spans_ranks": _flag,
    "alerts": _alerts,
    "interventions": _interventions,
}


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:
        text = f"a {type(value).__name__}"
    return printable(text if len(text) <= _MOST_WORDS else f"{text[:_MOST_WORDS]}...")
