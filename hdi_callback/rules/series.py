"""`Series`: the readings of one layer so far, which rules judge, and whether they began with fresh weights."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hdi_callback.record import LayerRecord

KEPT = 64  # number of readings that are kept, besides the first
APART = 5  # fewest steps between readings that are kept, so that a window of readings is one of steps as well
STILL = {"query": "query_movement", "key": "key_movement", "value": "value_movement", "output": "output_movement",
         "parameter": "parameter_still"}  # fmt: skip
"""What may stand still -> where a reading has it: movement, or for further parameters whether they stood still."""

PAIRS = ("overlap", "pair_alignment", "energy_pair_alignment", "circuit_ov")  # matrices that the first reading keeps
LOSS = "loss"  # the training loss among the values of a reading
DEVIATIONS = 6.0  # standard deviations from which on the spectrum of a layer is none of an initialisation
SMALL = 0.4  # size of key weights, relative to variance one over the input width, that is small: GPT-2 has 0.55
RECENT = 10  # number of readings back from which messages say where a curve comes from


@dataclass(frozen=True)
class Row:
    """One reading of one layer: `LayerRecord` without its reasons, and with its step."""

    step: int
    values: Mapping[str, float]
    heads: Mapping[str, list[Any]] = field(default_factory=dict)
    matrices: Mapping[str, Tensor] = field(default_factory=dict, compare=False)
    before: int | None = None  # step of the reading before

    @classmethod
    def from_record(cls, step: int, layer: LayerRecord, loss: float | None = None) -> Row:
        """Take what rules read from a record; a value that is not finite counts as missing."""
        values = {**layer.values, LOSS: math.nan if loss is None else loss}
        values = {name: value for name, value in values.items() if math.isfinite(value)}
        return cls(step, values, layer.heads, layer.matrices)

    def per_head(self, name: str) -> list[float]:
        """Return one number for each head, NaN where it is not known; ``[]`` if it was not measured."""
        return [math.nan if value is None else float(value) for value in self.heads.get(name, ())]


class Series:
    """The readings of one layer so far: the first, and the latest 64 of those five steps apart.

    `facts` are those of `AttentionLayer.description`: ``num_heads``, ``num_key_heads``, ``head_dim``, ``normed`` ...
    """

    def __init__(self, layer: str, facts: Mapping[str, Any], first: Row, *, is_pretrained: bool = False) -> None:
        self.layer, self.facts, self.is_pretrained = layer, facts, is_pretrained
        self.limits: Mapping[str, float] = {}  # name -> limit of a rule in this layer, infinity where it is off
        self.first = replace(first, matrices={name: first.matrices[name] for name in PAIRS if name in first.matrices})
        self.starts: dict[str, tuple[int, float]] = {}  # metric -> step and value of the first reading that has it
        self.previous = self.first  # the reading before the latest, which a message may name, however close they are
        self.rows: list[Row] = []  # the latest; only the last has numbers of single heads, and matrices
        # Role or "parameter", and its place -> since which step it has not moved though it is to, in how many readings.
        self.still: dict[tuple[str, int], tuple[int, int]] = {}
        self.writes: dict[int, int] = {}  # head -> step at which an intervention has written its weights
        self.writer = ""  # which intervention wrote which heads at which step last, in words
        self.is_loss_good = False  # whether the training loss is at its best or falling, see `Losses`
        self.bad_losses = 0  # at how many losses in a row it was not

    def append(self, row: Row) -> None:
        """Add a reading; of the one before only its values and its closest pairs are kept."""
        if self.rows:
            last = self.rows[-1]
            self._note_still(last, row)
            pairs = {name: heads for name, heads in last.heads.items() if name.endswith("_pair")}
            self.rows[-1] = self.previous = replace(last, heads=pairs, matrices={})
            if len(self.rows) > 1 and last.step - self.rows[-2].step < APART:
                self.rows.pop()
            row = replace(row, before=last.step)
        self.starts = {name: (row.step, value) for name, value in row.values.items()} | self.starts
        self.rows = [*self.rows[1 - KEPT :], row]

    def _note_still(self, last: Row, row: Row) -> None:
        """Note what has not moved between two readings though it was to train at both."""
        for kind, name in STILL.items():
            before = last.per_head(name)
            for place, value in enumerate(row.per_head(name)):
                key, was_to_train = (kind, place), not before[place:] or not math.isnan(before[place])
                if value == (kind == "parameter"):
                    since, count = self.still.get(key, (last.step if was_to_train else row.step, 0))
                    self.still[key] = since, count + 1
                else:
                    self.still.pop(key, None)

    @property
    def latest(self) -> Row:
        """The reading to judge."""
        return self.rows[-1]

    @property
    def trains(self) -> bool:
        """Whether some parameter of the layer required a gradient at the latest reading."""
        return bool(self.latest.values.get("trains", self.facts.get("trains", True)))

    @property
    def was_written(self) -> bool:
        """Whether an intervention has written weights of the layer during the readings that are kept."""
        return any(step >= self.rows[0].step for step in self.writes.values())

    @property
    def began_small(self) -> bool:
        """Whether the key weights of all heads were fresh and small at the first reading."""
        sizes, width = self.first.per_head("head_norm"), self.facts.get("head_dim")
        return not self.is_pretrained and bool(sizes and width) and max(sizes) < SMALL * math.sqrt(width or 0)

    def value(self, metric: str) -> float:
        """Return a metric at the latest reading; one of a rule's `needs` is always there."""
        return self.latest.values[metric]

    def curve(self, metric: str) -> tuple[list[int], list[float]]:
        """Return steps and values over the readings that have a metric, the latest last."""
        rows = [row for row in self.rows if metric in row.values]
        return [row.step for row in rows], [row.values[metric] for row in rows]

    def change(self, metric: str, digits: int = 2, before: str = "") -> str:
        """Return how a metric came to its latest value: ``"rose from 0.31 to 0.52 between steps 350 and 450"``.

        `before` is put in front of the earlier value, such as ``"at most "``.
        """
        rows = {row.step: row for row in (*self.rows[:-1], self.previous, self.latest) if metric in row.values}
        steps, curve = [*rows], [row.values[metric] for row in rows.values()]
        start = max(0, len(curve) - 1 - RECENT)
        now, was = curve[-1], curve[start]
        if f"{now:.{digits}f}" == f"{was:.{digits}f}":
            return f"is {now:.{digits}f}"
        near = 0.1 * abs(now - was)
        # Where it begins to change, and where it has changed.
        begin = next(at for at in range(start, len(curve)) if abs(curve[at + 1] - was) > near)
        end = next(at for at in range(len(curve) - 1, start, -1) if abs(curve[at - 1] - now) > near)
        verb = "rose" if now > was else "fell"
        if abs(curve[end] - curve[end - 1]) >= abs(now - was) / 2:
            begin, verb = end - 1, "jumped" if now > was else "dropped"
        values = f"from {before}{curve[begin]:.{digits}f} to {curve[end]:.{digits}f}"
        return f"{verb} {values} between steps {steps[begin]} and {steps[end]}"

    def __getstate__(self) -> dict[str, Any]:
        """Return the readings, without matrices but of the first, and nothing that a resumed run has itself."""
        return {**vars(self), "facts": {}, "limits": {}, "rows": [replace(row, matrices={}) for row in self.rows]}


def has_been_trained(row: Row, facts: Mapping[str, Any]) -> bool:
    """Return whether the spectrum of the median key head is too uneven for an initialisation.

    Entries that are drawn independently give a head a spectral flatness of known law, whatever their scale: it is a
    power of Mauchly's statistic of sphericity, exact for Gaussian entries and nearly so for uniform ones. Training
    makes few directions strong; of a few dozen steps it may go unnoticed. False if it is not known.
    """
    d, k = facts.get("width"), facts.get("head_dim")
    ranks = row.heads.get("rank", ())
    flatness = [value for value, rank in zip(row.per_head("flatness"), ranks) if rank == k and value > 0]
    if d is None or k is None or not 2 <= k <= d or len(flatness) < max(1, len(ranks) / 2):
        return False
    mean, deviation = _law_of_flatness(k, d)
    return bool((mean - statistics.median(map(math.log, flatness))) / deviation > DEVIATIONS)


@cache
def _law_of_flatness(k: int, d: int) -> tuple[float, float]:
    """Mean and standard deviation of the logarithm of the flatness of k independent Gaussian rows in d dimensions."""
    halves = torch.arange(d, d - k, -1, dtype=torch.float64, device="cpu") / 2
    whole = torch.tensor(k * d / 2, dtype=torch.float64, device="cpu")
    mean = torch.digamma(halves).mean() - torch.digamma(whole) + math.log(k)
    variance = torch.polygamma(1, halves).mean() / k - torch.polygamma(1, whole)
    return float(mean), math.sqrt(float(variance))
