"""The records that all rooms share: a reading as numbers, its alerts, and the actions on them."""

from __future__ import annotations

import zlib
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any, Literal

import torch
from torch import Tensor

Level = Literal["notice", "warning", "critical"]
LEVELS: tuple[Level, ...] = ("notice", "warning", "critical")
Status = Literal["new", "worse", "resolved"]


@dataclass(frozen=True, repr=False)
class LayerRecord:
    """The numbers of one layer at one step; what could not be measured is missing, and has its reason in `absent`."""

    values: dict[str, float] = field(default_factory=dict)  #: metric -> number
    heads: dict[str, list[Any]] = field(default_factory=dict)  #: name -> a number of each head, or the heads of a pair
    #: Name -> ``(H, H)`` over pairs of heads, and ``"attention_pattern"`` -> ``(H, 32, 32)``, on the CPU.
    matrices: dict[str, Tensor] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)  #: metric, or the source of several -> why it was not measured

    def __repr__(self) -> str:
        return f"<LayerRecord: {len(self.values)} values, {len(self.absent)} absent>"


@dataclass(frozen=True)
class Alert:
    """One event, as a sentence and as data."""

    step: int  #: optimizer steps taken before the reading that showed it
    rule: str  #: name of the rule that states the cause
    level: Level
    where: dict[str, tuple[int, ...]]  #: layer -> the heads concerned; an empty tuple for the whole layer
    message: str  #: what happened, where, when, as measured
    action: str = ""  #: what to do about it, in prose
    value: float | None = None  #: the number that was judged, of the first layer
    threshold: float | None = None  #: its limit
    metric: str | None = None  #: the metric of the number
    since: int | None = None  #: first step of an unbroken series of readings with this finding
    also: tuple[str, ...] = ()  #: names of other rules that report the same event
    unit: str = "heads"  #: what the heads are, ``"heads"``, or ``"key heads"`` under grouped keys
    status: Status = "new"
    code: str = ""  #: arguments of the callback that help; empty if none do
    ended: int | None = None  #: of an alert of `RunHistory.alerts` the step at which it was over

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers concerned."""
        return tuple(self.where)

    @property
    def remedy(self) -> str:
        """The action and, below it, the code."""
        return f"{self.action}:\n{self.code}" if self.code else self.action

    @property
    def is_over(self) -> bool:
        """Whether this is the end of an earlier alert."""
        return self.status == "resolved"

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Alert:
        """Make an alert from the result of `dataclasses.asdict`, also after JSON."""
        where = {layer: tuple(heads) for layer, heads in data["where"].items()}
        return Alert(**{**data, "where": where, "also": tuple(data.get("also", ()))})


@dataclass(frozen=True)
class Action:
    """What an intervention did about an alert."""

    step: int  #: optimizer steps taken when it acted
    name: str  #: the intervention
    layers: tuple[str, ...]  #: the layers concerned
    message: str  #: what was done, or why nothing was
    is_refusal: bool = False  #: True if nothing was done, for the reason in `message`


@dataclass(frozen=True, repr=False)
class Record:
    """One reading: its numbers, then its alerts and actions."""

    step: int  #: optimizer steps taken before this reading
    layers: dict[str, LayerRecord]  #: layer -> its numbers, in model order
    time: float = 0.0  #: seconds since the Unix epoch
    loss: float | None = None  #: training loss of the step after the reading, if it is known
    #: Names of parameters, and of states and settings of the optimizer, that something else than its step wrote since
    #: the reading before, if that had never been so.
    written: tuple[str, ...] = ()
    alerts: tuple[Alert, ...] = ()  #: alerts that began, got worse or ended at this reading
    actions: tuple[Action, ...] = ()  #: what interventions did
    active: tuple[Alert, ...] = ()  #: alerts that are active after this reading
    absent: dict[str, str] = field(default_factory=dict)  #: what could not be measured as a whole -> why
    is_last: bool = False  #: True for the last reading of a run
    cost: float | None = None  #: share of the training's time that readings have taken so far, if it is known

    def __repr__(self) -> str:
        active = [f"{sum(alert.level == level for alert in self.active)} {level}" for level in reversed(LEVELS)]
        levels = ", ".join(count for count in active if not count.startswith("0 "))
        alerts = f"active alerts: {levels}" if levels else "no active alert"
        return f"<Record at step {self.step}: {len(self.layers)} layers, {alerts}>"

    def values(self, metric: str) -> dict[str, float]:
        """Return layer -> value of a metric, for the layers that have it."""
        return {name: layer.values[metric] for name, layer in self.layers.items() if metric in layer.values}


def state_to_text(state: Any) -> str:
    """Return a state for a resumed run as text, which every checkpoint can hold."""
    torch.save(state, data := BytesIO())
    return b64encode(zlib.compress(data.getvalue())).decode()


def state_from_text(text: str, *classes: Any) -> Any:
    """Return the state of a text; of some classes, and no others, it may have instances."""
    with torch.serialization.safe_globals([*classes]):
        return torch.load(BytesIO(zlib.decompress(b64decode(text))), weights_only=True)
