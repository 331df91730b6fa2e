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
    """The numbers of one layer at one step.

    Attributes:
        values: metric -> number; what could not be measured is missing here and has its reason in `absent`.
        heads: name -> a list with one entry per head, or the two heads of a pair.
        matrices: name -> ``(H, H)`` over pairs of heads, and ``"attention_pattern"`` -> ``(H, 32, 32)``, on the CPU.
        absent: metric, or the source of several -> why it was not measured.
    """

    values: dict[str, float] = field(default_factory=dict)
    heads: dict[str, list[Any]] = field(default_factory=dict)
    matrices: dict[str, Tensor] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<LayerRecord: {len(self.values)} values, {len(self.absent)} absent>"


@dataclass(frozen=True)
class Alert:
    """One event, as a sentence and as data.

    Attributes:
        step: optimizer steps taken before the reading that showed it.
        rule: name of the rule that states the cause.
        level: ``"notice"``, ``"warning"`` or ``"critical"``.
        where: layer -> the heads concerned; an empty tuple for the whole layer.
        message: what happened, where, when, as measured.
        action: what to do about it, in prose.
        value: the number that was judged, of the first layer.
        threshold: its limit.
        metric: the metric of the number.
        since: first step of an unbroken series of readings with this finding.
        also: names of other rules that report the same event.
        unit: what the heads are: ``"heads"``, or ``"key heads"`` under grouped keys.
        status: ``"new"``, ``"worse"`` or ``"resolved"``.
        code: arguments of the callback that help; empty if none do.
        ended: of an alert of `RunHistory.alerts` the step at which it was over.
    """

    step: int
    rule: str
    level: Level
    where: dict[str, tuple[int, ...]]
    message: str
    action: str = ""
    value: float | None = None
    threshold: float | None = None
    metric: str | None = None
    since: int | None = None
    also: tuple[str, ...] = ()
    unit: str = "heads"
    status: Status = "new"
    code: str = ""
    ended: int | None = None

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
    """What an intervention did about an alert.

    Attributes:
        step: optimizer steps taken when it acted.
        name: the intervention.
        layers: the layers concerned.
        message: what was done, or why nothing was.
        is_refusal: True if nothing was done, for the reason in `message`.
    """

    step: int
    name: str
    layers: tuple[str, ...]
    message: str
    is_refusal: bool = False


@dataclass(frozen=True, repr=False)
class Record:
    """One reading: its numbers, then its alerts and actions.

    Attributes:
        step: optimizer steps taken before this reading.
        layers: layer -> its numbers, in model order.
        time: seconds since the Unix epoch.
        loss: training loss of the step after the reading, if it is known.
        written: names of parameters, and of states and settings of the optimizer, that something else than its step
            wrote since the reading before, if that had never been so.
        alerts: alerts that began, got worse or ended at this reading.
        actions: what interventions did.
        active: alerts that are active after this reading.
        absent: what could not be measured as a whole -> why.
        is_last: True for the last reading of a run.
        cost: share of the training's time that readings have taken so far, if it is known.
    """

    step: int
    layers: dict[str, LayerRecord]
    time: float = 0.0
    loss: float | None = None
    written: tuple[str, ...] = ()
    alerts: tuple[Alert, ...] = ()
    actions: tuple[Action, ...] = ()
    active: tuple[Alert, ...] = ()
    absent: dict[str, str] = field(default_factory=dict)
    is_last: bool = False
    cost: float | None = None

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
