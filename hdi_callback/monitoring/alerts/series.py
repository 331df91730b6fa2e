"""`Series`: the readings of one layer so far, the input of rules; a `Row` is one reading."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from hdi_callback.deprecation import renamed_attribute

_READINGS_KEPT = 64


@dataclass(frozen=True)
class Row:
    """One reading of one layer.

    Attributes:
        step: optimizer steps taken before the reading.
        values: metric name -> number; quantities that could not be measured are missing.
        arrays: see `LayerRecord`; earlier readings keep only the pairs, except the first of a run.
        matrices: see `LayerRecord`; only for the latest reading, and empty if a history does not hold them.
        absent: why the index could not be measured, or an empty string.
    """

    step: int
    values: Mapping[str, float]
    arrays: Mapping[str, list[Any]] = field(default_factory=dict)
    absent: str = ""
    matrices: Mapping[str, Tensor] = field(default_factory=dict, compare=False)

    def per_head(self, name: str) -> list[float]:
        """An array with one number for each head.

        Args:
            name: of the array.

        Returns:
            The numbers, NaN where one is not finite; empty if it was not measured.
        """
        return [math.nan if value is None else float(value) for value in self.arrays.get(name, ())]


class Series:
    """The readings of one layer so far: the first, and the latest 64.

    Attributes:
        layer: name of the layer.
        facts: facts about the layer: ``num_heads``, ``num_key_heads``, ``head_dim``, ``width``, ...
        siblings: number of watched layers.
        first: the first reading of the run.
        rows: the latest readings, in order.
        is_pretrained: whether the weights had been trained before this run, as `pretrained` of `Alerts` says.
        is_first: whether it is known to be the first layer of the model, whose inputs are data.
        trains: whether some parameter of the layer required a gradient at the latest reading.
        do_others_move: whether at the latest reading the weights of some layer had moved since the one before.
        rewritten: heads whose weights an intervention has written; earlier readings do not apply to them.
    """

    is_loaded = renamed_attribute("is_loaded", "is_pretrained")

    def __init__(
        self,
        layer: str,
        facts: Mapping[str, Any],
        siblings: int,
        first: Row,
        *,
        is_pretrained: bool = False,
        is_first: bool = False,
    ) -> None:
        self.layer, self.facts, self.siblings, self.is_pretrained = layer, facts, siblings, is_pretrained
        self.is_first = is_first
        self.first = replace(first, matrices={})
        self.trains = bool(facts.get("trains", True))
        self.do_others_move = False
        self.rewritten: set[int] = set()
        self.rows: deque[Row] = deque(maxlen=_READINGS_KEPT)

    def append(self, row: Row, *, do_others_move: bool = False, trains: bool | None = None) -> None:
        """Add a reading.

        Args:
            row: the reading.
            do_others_move: whether the weights of some layer have moved since the one before.
            trains: whether some parameter of the layer requires a gradient; `None` if the reading does not say.
        """
        self.do_others_move = do_others_move
        self.trains = self.trains if trains is None else trains
        if self.rows:
            last = self.rows[-1]
            pairs = {name: array for name, array in last.arrays.items() if name.endswith("_pair")}
            self.rows[-1] = replace(last, arrays=pairs, matrices={})
        self.rows.append(row)

    @property
    def latest(self) -> Row:
        """The reading to judge."""
        return self.rows[-1]

    def value(self, metric: str) -> float:
        """A metric at the latest reading.

        Args:
            metric: its name.

        Returns:
            The number.

        Raises:
            KeyError: if it was not measured; a rule that names it in `needs` does not judge such readings.
        """
        return self.latest.values[metric]

    def curve(self, metric: str) -> tuple[list[int], list[float]]:
        """A metric over the readings that have it.

        Args:
            metric: its name.

        Returns:
            Steps and numbers, in order, the latest last.
        """
        rows = [row for row in self.rows if metric in row.values]
        return [row.step for row in rows], [row.values[metric] for row in rows]

    def holds_from_start(self, is_so: Callable[[Row], bool], metric: str | None = None) -> bool:
        """Return whether a condition holds at all readings that are kept, beginning with step 0.

        Args:
            is_so: the condition on one reading.
            metric: readings without it are skipped, except the first, which must have it; by default none are.

        Returns:
            True if it does.
        """
        if self.first.step != 0 or (metric is not None and metric not in self.first.values):
            return False
        measured = [row for row in self.rows if metric is None or metric in row.values]
        return is_so(self.first) and all(is_so(row) for row in measured)

    def since(self, is_so: Callable[[Row], bool], metric: str | None = None) -> int:
        """The step since which a condition holds without a break, as far back as readings are kept.

        Args:
            is_so: the condition on one reading.
            metric: readings without it are skipped, such as the first after a resumption for movement, or those at
                which other layers had their turn; by default none are.

        Returns:
            The first step of the streak; the latest step if the condition does not hold there.
        """
        step = self.latest.step
        for row in reversed(self.rows):
            if metric is not None and metric not in row.values:
                continue
            if not is_so(row):
                break
            step = row.step
        return step
