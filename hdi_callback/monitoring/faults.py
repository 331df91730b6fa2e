"""`Faults`: the name and the methods that `WarnOnce` had in version 0.1."""

from __future__ import annotations

from hdi_callback.monitoring import warn_once
from hdi_callback.monitoring.warn_once import attempt_each, describe

__all__ = ["Faults", "attempt_each", "describe"]


class Faults(warn_once.WarnOnce):
    """See `WarnOnce`."""

    contained = warn_once.WarnOnce.guard
    tell = warn_once.WarnOnce.error
    say = warn_once.WarnOnce.warn
