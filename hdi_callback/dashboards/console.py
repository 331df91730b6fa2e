"""The console: the layers that are watched, then alerts and actions, and the verdict at the end."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hdi_callback.dashboards.layer_table import layers_text
from hdi_callback.dashboards.verdict import verdict
from hdi_callback.record import Record

_READINGS, _DEAR, _CHEAP = 10, 0.01, 0.005  # after which a share of the training's time is told; above; as it should be


class Console:
    """Prints a run, first its layers; `refused` are attentions that are not watched, with reasons, `past` records."""

    name = "printing"
    is_thread_safe = False

    def __init__(
        self,
        say: Callable[[str], None],
        layers: Sequence[Mapping[str, Any]],
        every_n_steps: int,
        refused: Mapping[str, str] | None = None,
        history: str = "",
        past: Sequence[Record] = (),
    ) -> None:
        self._say, self._layers, self._every, self._history = say, layers, every_n_steps, history
        # Only the last one keeps its layers, and the one before the final one.
        self._records = [*(replace(record, layers={}) for record in past[:-1]), *past[-1:]]
        self._num_past, self._has_told_cost = len(past), False
        count = "1 attention layer" if len(layers) == 1 else f"{len(layers)} attention layers"
        steps = "at every optimizer step" if every_n_steps == 1 else f"every {every_n_steps} optimizer steps"
        self._say(f"hdi_callback watches {count}, {steps}\n{layers_text(layers, refused)}")

    def write(self, record: Record) -> None:
        """Print new alerts and actions."""
        if self._records and not record.is_last:  # which has no forward: the one before says what was read
            self._records[-1] = replace(self._records[-1], layers={})
        self._records.append(record)
        for alert in record.alerts:
            if alert.level != "notice":
                level = alert.status if alert.is_over else alert.level
                text = f"hdi_callback {level}, step {alert.step} (hdi explain {alert.rule}): {alert.message}"
                self._say(text if alert.is_over else f"{text}\n{textwrap.indent(alert.remedy, '  ')}".rstrip())
        for action in record.actions:
            self._say(f"hdi_callback, step {action.step}, {action.name}: {action.message}")
        share, readings = record.cost or 0.0, len(self._records) - self._num_past
        if readings >= _READINGS and share > _DEAR and not self._has_told_cost:
            self._has_told_cost = True
            every = int(float(f"{self._every * share / _CHEAP:.2g}"))
            self._say(
                f"hdi_callback notice, step {record.step}: readings take {share:.1%} of the training's time. "
                f"every_n_steps={every} would make it {_CHEAP:.1%}."
            )

    def close(self) -> None:
        """Print the verdict."""
        judgement = verdict(self._records, self._layers)
        share = self._records[-1].cost if len(self._records) > self._num_past else None
        cost = "" if share is None else f" Readings took {share:.2%} of the training's time."
        where = f" History: {self._history}" if self._history else ""
        self._say(f"hdi_callback: {judgement.text}{cost}{where}")
