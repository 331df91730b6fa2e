"""The two lenses of alignment: of subspaces, and weighed by energy."""

from __future__ import annotations

from typing import Literal

from hdi_callback.monitoring.alerts import Alert, Level, Row, Series

Lens = Literal["subspace", "energy"]

LENSES: tuple[Lens, ...] = ("subspace", "energy")

MEAN: dict[Lens, str] = {"subspace": "hdi_alignment", "energy": "hdi_energy_alignment"}

WORST: dict[Lens, str] = {"subspace": "hdi_worst_alignment", "energy": "hdi_energy_worst_alignment"}

WORST_PAIR: dict[Lens, str] = {"subspace": "worst_alignment_pair", "energy": "energy_worst_alignment_pair"}

HYSTERESIS = 0.1
"""Hysteresis: an alert on alignment is resolved this far below its limit."""

NEARLY_ONE = 0.8
"""Alignment of a pair in the subspace lens from which on messages call its heads nearly one."""

TOGETHER = 0.5  # a mean alignment that `MeanAlignment` reports


def pair_of(row: Row, lens: Lens) -> tuple[int, ...]:
    """The closest pair of heads.

    Args:
        row: a reading of a layer.
        lens: the lens of the alignment.

    Returns:
        The two heads; empty if they are not known.
    """
    return tuple(int(head) for head in row.arrays.get(WORST_PAIR[lens], ()))


def is_first_step(series: Series) -> bool:
    """Return whether this is the reading at step 0, which `TiedHeads` judges alone."""
    return series.latest.step == 0


def is_active_at(active: Alert | None, level: Level) -> bool:
    """Return whether an alert of this level or a more serious one is active."""
    return active is not None and (active.level == level or active.level == "critical")
