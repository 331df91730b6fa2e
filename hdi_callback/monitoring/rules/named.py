"""Which heads the active alert of a rule names."""

from __future__ import annotations

from hdi_callback.monitoring.alerts import Alert


def was_named(active: Alert | None, head: int) -> bool:
    """Return whether the active alert names a head.

    Such a head is kept until it is back beyond a second limit. Another one is added at the first limit only: with one
    limit for joining and leaving, a head that hovers there would make a new alert of every other reading.

    Args:
        active: the active alert of a rule for a layer, if there is one.
        head: number of the head.

    Returns:
        True if it does.
    """
    return active is not None and head in active.finding.heads
