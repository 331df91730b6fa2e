"""The loss of a run, from the files of loggers beside its history."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_MOST_POINTS = 600
_MOST_CURVES = 2
_BEST_FIRST = ("train_loss", "train/loss", "loss", "train_loss_step", "val_loss", "eval_loss", "eval/loss")


@dataclass(frozen=True)
class LossCurve:
    """A loss over the steps of a run.

    Attributes:
        name: its name in the logger.
        steps: the logger's steps.
        values: the loss at each of them.
    """

    name: str
    steps: list[int]
    values: list[float]


def find_losses(history: Path) -> list[LossCurve]:
    """The loss of a run, from files beside its history: of CSV and TensorBoard loggers, and of transformers.

    Args:
        history: the history file.

    Returns:
        At most two curves, that of training first; none if no logger has one.
    """
    folder = history.parent.parent if history.parent.name == "hdi" else history.parent
    for read in (_from_csv, _from_trainer_state, _from_tensorboard):
        try:
            found = {name: points for name, points in read(folder).items() if "loss" in name.lower() and points}
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            ImportError,
        ):  # a file of another program
            continue
        if found:
            known = [name for name in _BEST_FIRST if name in found]
            names = known + [name for name in found if name not in known]
            return [_curve(name, found[name]) for name in names[:_MOST_CURVES]]
    return []


def _curve(name: str, points: Iterable[tuple[int, float]]) -> LossCurve:
    ordered = sorted(dict(points).items())
    kept = ordered[:: max(1, math.ceil(len(ordered) / _MOST_POINTS))]
    if kept[-1] != ordered[-1]:
        kept.append(ordered[-1])
    return LossCurve(name, [step for step, _ in kept], [value for _, value in kept])


def _from_csv(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    with (folder / "metrics.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            for name, text in row.items():
                if name and text and row.get("step") and "loss" in name.lower():
                    value = float(text)
                    if math.isfinite(value):
                        found.setdefault(name, []).append((int(float(row["step"])), value))
    return found


def _from_trainer_state(folder: Path) -> dict[str, list[tuple[int, float]]]:
    states = [folder / "trainer_state.json", *folder.glob("checkpoint-*/trainer_state.json")]
    newest = max((file for file in states if file.is_file()), key=lambda file: file.stat().st_mtime, default=None)
    found: dict[str, list[tuple[int, float]]] = {}
    for entry in [] if newest is None else json.loads(newest.read_text(encoding="utf-8"))["log_history"]:
        for name in ("loss", "eval_loss"):
            value = entry.get(name)
            if isinstance(value, int | float) and math.isfinite(value):
                found.setdefault(name, []).append((int(entry["step"]), float(value)))
    return found


def _from_tensorboard(folder: Path) -> dict[str, list[tuple[int, float]]]:
    places = [folder, *(path for path in (folder / "runs").glob("*") if path.is_dir())]
    found: dict[str, list[tuple[int, float]]] = {}
    for place in places:
        if not any(place.glob("events.out.tfevents.*")):
            continue
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(place), size_guidance={"scalars": 2000})
        events.Reload()
        for name in events.Tags()["scalars"]:
            if "loss" in name.lower():
                points = [(event.step, event.value) for event in events.Scalars(name) if math.isfinite(event.value)]
                found.setdefault(name, []).extend(points)
    return found
