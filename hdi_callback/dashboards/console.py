"""The console: the layers that are watched, then alerts and actions, and the verdict at the end."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hdi_callback.dashboards.layer_table import layers_text
from hdi_callback.dashboards.verdict import verdict
from hdi_callback.record import Alert, Record


class Console:
    """Prints a run.

    Args:
        say: prints text.
        every_n_steps: optimizer steps between readings.
        refused: name -> reason, of attention that is not watched.
        interventions: names of those that were enabled.
        history: path of the history; empty if there is none.
        past: records before a resumption, for the verdict.
    """

    name = "printing"

    def __init__(
        self,
        say: Callable[[str], None] = print,
        *,
        every_n_steps: int,
        refused: Mapping[str, str] | None = None,
        interventions: Sequence[str] = (),
        history: str = "",
        past: Sequence[Record] = (),
    ) -> None:
        self._say, self._every = say, every_n_steps
        self._refused, self._interventions, self._history = refused or {}, interventions, history
        self._layers: Sequence[Mapping[str, Any]] = ()
        # Only the last one keeps its layers, and the one before the final one.
        self._records = [*(replace(record, layers={}) for record in past[:-1]), *past[-1:]]

    def open(self, layers: Sequence[Mapping[str, Any]]) -> None:
        """Print the table of layers."""
        self._layers = layers
        count = "1 attention layer" if len(layers) == 1 else f"{len(layers)} attention layers"
        steps = "at every optimizer step" if self._every == 1 else f"every {self._every} optimizer steps"
        self._print(f"hdi_callback watches {count}, {steps}\n{layers_text(layers, self._refused)}")
        if self._interventions:
            self._print(f"hdi_callback intervenes: {', '.join(self._interventions)}")

    def write(self, record: Record) -> None:
        """Print new alerts and actions."""
        if self._records and not record.is_last:  # which has no forward: the one before says what was read
            self._records[-1] = replace(self._records[-1], layers={})
        self._records.append(record)
        for alert in record.alerts:
            if alert.level != "notice":
                self._print(alert_text(alert))
        for action in record.actions:
            self._print(f"hdi_callback, step {action.step}, {action.name}: {action.message}")

    def close(self) -> None:
        """Print the verdict."""
        found = verdict(self._records, self._layers)
        where = f" History: {self._history}" if self._history else ""
        self._print(f"hdi_callback: {found.text}{where}")

    def _print(self, text: str) -> None:
        try:
            self._say(text)
        except UnicodeEncodeError:  # in a container whose streams are ASCII
            self._say(text.encode("ascii", "backslashreplace").decode("ascii"))


def alert_text(alert: Alert) -> str:
    """Return an alert as a person reads it: what happened, and what to do about it.

    Example:
        >>> print(alert_text(Alert(450, "frozen heads", "warning", {"attn": (3,)}, "attn: head 3 has not moved.",
        ...                        "Look at requires_grad.")))
        hdi_callback warning, step 450: attn: head 3 has not moved.
          Look at requires_grad.
    """
    level = alert.status if alert.is_over else alert.level
    head = f"hdi_callback {level}, step {alert.step}: {alert.message}"
    if alert.is_over or not alert.action:
        return head
    return f"{head}\n{textwrap.indent(alert.action, '  ')}"
