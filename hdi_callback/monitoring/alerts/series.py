"""`Series`: the readings of one layer so far, as a rule reads them; a `Row` is one of them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

_READINGS_KEPT = 64


@dataclass(frozen=True)
class Row:
    """One reading of one layer, as a rule sees it.

    Attributes:
        step: optimizer steps taken before the reading.
        values: metric name -> number; what could not be measured is not there.
        arrays: see `LayerRecord`; readings before the latest keep the pairs alone, the first of a run all of them.
        matrices: see `LayerRecord`; of the latest reading alone, and empty where a history does not hold them.
        absent: why the index could not be measured, or an empty string.
    """

    step: int
    values: Mapping[str, float]
    arrays: Mapping[str, list[Any]] = field(default_factory=dict)
    absent: str = ""
    matrices: Mapping[str, Tensor] = field(default_factory=dict, compare=False)

    def per_head(self, name: str) -> list[float]:
        """Give an array with one number for each head.

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
        facts: what is known of the layer: ``num_heads``, ``num_key_heads``, ``head_dim``, ``width``, ...
        siblings: number of layers that are watched.
        first: the first reading of the run.
        rows: the latest readings, in order.
        is_loaded: whether the weights had been trained before this run, as `loaded` of `Alerts` says.
        is_first: whether it is known to be the first layer of the model, which is given data rather than what other
            layers make.
        trains: whether some parameter of the layer requires a gradient at the latest reading.
        do_others_move: whether at the latest reading the weights of some layer had moved since the one before.
        rewritten: heads whose weights an intervention has written: earlier readings say nothing about them.
    """

    def __init__(
        self,
        layer: str,
        facts: Mapping[str, Any],
        siblings: int,
        first: Row,
        *,
        is_loaded: bool = False,
        is_first: bool = False,
    ) -> None:
        self.layer, self.facts, self.siblings, self.is_loaded = layer, facts, siblings, is_loaded
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
        """Give a metric at the latest reading.

        Args:
            metric: its name.

        Returns:
            The number.

        Raises:
            KeyError: if it was not measured; a rule that names it in `needs` is not asked then.
        """
        return self.latest.values[metric]

    def curve(self, metric: str) -> tuple[list[int], list[float]]:
        """Give a metric over the readings that have it.

        Args:
            metric: its name.

        Returns:
            Steps and numbers, in order, the latest last.
        """
        rows = [row for row in self.rows if metric in row.values]
        return [row.step for row in rows], [row.values[metric] for row in rows]

    def holds_from_start(self, is_so: Callable[[Row], bool], metric: str | None = None) -> bool:
        """Return whether something is so in all readings, and the first of them is that of step 0.

        Args:
            is_so: asked of one reading.
            metric: readings that lack it are not asked, but for the first, which must have it; by default all are.

        Returns:
            True if the run has never been otherwise, as far back as readings are kept.
        """
        if self.first.step != 0 or (metric is not None and metric not in self.first.values):
            return False
        asked = [row for row in self.rows if metric is None or metric in row.values]
        return is_so(self.first) and all(is_so(row) for row in asked)

    def since(self, is_so: Callable[[Row], bool], metric: str | None = None) -> int:
        """Find since when something has been so without a break, as far back as readings are kept.

        Args:
            is_so: asked of one reading after the other, from the latest back.
            metric: readings that lack it break nothing, as the first movement after a resumption, or those at which
                other layers had their turn; by default all count.

        Returns:
            The step of the first reading of the streak; of the latest if it is not so there.
        """
        step = self.latest.step
        for row in reversed(self.rows):
            if metric is not None and metric not in row.values:
                continue
            if not is_so(row):
                break
            step = row.step
        return step
