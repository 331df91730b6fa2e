"""The checkpoint folders of a transformers trainer, and the state of a session in them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hdi_callback.monitoring.session.state import read_state
from hdi_callback.monitoring.warn_once import WarnOnce

STATE = "hdi_state.json"
KEY = "hdi_callback"  # key in the trainer's own state; with the name of a class the trainer would create an instance


def restored_from(args: Any, state: Any, warn_once: WarnOnce) -> Any:
    """The saved state of the run: its identity from the trainer's own file, the rest from ours.

    Args:
        args: the trainer's arguments.
        state: the trainer's state.
        warn_once: warns once of each kind of failure.

    Returns:
        The state; `None` for a training from the start.
    """
    if state.global_step == 0:
        return None
    held = (state.stateful_callbacks or {}).get(KEY)
    identity = held.get("attributes") if isinstance(held, Mapping) else None
    run = identity.get("run") if isinstance(identity, Mapping) else None
    named = getattr(args, "resume_from_checkpoint", None)
    places = [Path(named) / STATE] if isinstance(named, str) else []
    places.append(checkpoint_of(args, state) / STATE)
    # A checkpoint may have been renamed, and another run may have left one of this step.
    renamed = sorted(Path(args.output_dir).glob(f"*/{STATE}")) if run is not None else []
    for place in dict.fromkeys([*places, *renamed]):
        found = read_state(place, warn_once) if place.is_file() else None
        if found is None or (run is not None and found.get("run") != run):
            continue
        if place in places or (identity is not None and found.get("last_step") == identity.get("last_step")):
            return found
    if identity is None:
        warn_once.warn("no state", f"The checkpoint at step {state.global_step} holds no {STATE}; alerts start anew.")
    return identity


def checkpoint_of(args: Any, state: Any) -> Path:
    """The folder of the trainer's checkpoint of this step.

    Args:
        args: of the trainer.
        state: of the trainer.

    Returns:
        The folder.
    """
    name = f"checkpoint-{state.global_step}"
    usual = Path(args.output_dir) / name
    if not getattr(state, "is_hyper_param_search", False):
        return usual
    # Each trial of a search has its own folder, which callbacks do not know: take the newest.
    places = [place for place in Path(args.output_dir).glob(f"*/{name}") if place.is_dir()]
    return max(places, key=lambda place: place.stat().st_mtime_ns, default=usual)
