"""`Faults`: the name and the methods that `WarnOnce` had in version 0.1."""

from __future__ import annotations

import warnings
from typing import Any

from hdi_callback.monitoring.warn_once import WarnOnce


class _Faults(WarnOnce):
    """`WarnOnce` with the method names of version 0.1."""

    contained = WarnOnce.guard
    tell = WarnOnce.error
    say = WarnOnce.warn


def __getattr__(name: str) -> Any:
    if name != "Faults":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        "`Faults` is deprecated: write `from hdi_callback.monitoring.warn_once import WarnOnce`, with `guard`, `error` "
        "and `warn` for `contained`, `tell` and `say`.",
        DeprecationWarning,
        stacklevel=2,
    )
    return _Faults
