"""`FallingRank`: heads whose key weights lose directions."""

from __future__ import annotations

from typing import ClassVar

from hdi_callback.arguments import number
from hdi_callback.monitoring.alerts import Alert, Finding, Rule, Series
from hdi_callback.monitoring.rules.healthy_runs import healthy_peak
from hdi_callback.monitoring.rules.named import was_named
from hdi_callback.monitoring.rules.small_start import has_lost_directions
from hdi_callback.monitoring.rules.words import NO_REMEDY, named_heads


class FallingRank(Rule):
    """A head loses directions: its numerical rank has fallen, or its spectrum has become very uneven.

    The unevenness is the spectral flatness of the head (geometric over arithmetic mean of its squared singular values).
    It falls when directions are lost, and only mildly when others grow, as they do in healthy training. Where fresh key
    weights are small, growth lowers it as far, so that of those heads directions must have shrunk as well.

    Args:
        flatness: the flatness that is a warning, if it is at most a tenth of that at the first reading.
    """

    name = "falling rank"
    needs = ("hdi_min_flatness", "hdi_min_rank")
    fall: ClassVar[float] = 0.1

    def __init__(self, flatness: float = 0.05) -> None:
        self.flatness = number("flatness of FallingRank", flatness, above=0, below=1, example=0.05)

    def judge(self, series: Series, active: Alert | None) -> Finding | None:
        """Find the heads that have lost directions since the first reading."""
        now, first = series.latest.arrays, series.first.arrays
        heads = []
        for head, (after, before) in enumerate(zip(now.get("flatness", ()), first.get("flatness", ()))):
            has_lost_rank = 0 < now["rank"][head] < first["rank"][head]
            margin = 2 if was_named(active, head) else 1
            is_uneven = 0 < after <= margin * min(self.flatness, self.fall * before)
            if has_lost_rank or (is_uneven and has_lost_directions(series, head, margin * self.fall)):
                heads.append(head)
        if not heads:
            return None
        worst = min(heads, key=lambda head: now["flatness"][head])
        verb = "has" if len(heads) == 1 else "have"
        return Finding(
            f"{named_heads(heads)} {verb} lost directions (head {worst}: spectral flatness "
            f"{now['flatness'][worst]:.1g}, {first['flatness'][worst]:.1g} at step {series.first.step}; effective rank "
            f"{now['effective_rank'][worst]:.1f}, {first['effective_rank'][worst]:.1f} then)",
            "warning",
            now["flatness"][worst],
            self.flatness,
            "hdi_min_flatness",
            tuple(heads),
            None,
            healthy_peak(self.name, self.fall),
            NO_REMEDY,
        )
