"""The names of version 0.1 for what is in `session` now; they warn, and work as they did."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

from hdi_callback.deprecation import renamed

_find = renamed(
    __name__,
    {
        "Outcome": "hdi_callback.monitoring.session.sink:Result",
        "Follower": "hdi_callback.monitoring.session.sink:Sink",
        "OnAlert": "hdi_callback.monitoring.session.sink:OnAlert",
        "check_patterns": "hdi_callback.monitoring.session.patterns:check_patterns",
        "state_of_this_model": "hdi_callback.monitoring.session.resume:state_of_this_model",
    },
)


def __getattr__(name: str) -> Any:
    if name != "Watch":
        return _find(name)
    warnings.warn(
        "`Watch` is deprecated: write `from hdi_callback import Session`, which asks a `Host` for "
        "the arguments of `Watch`.",
        DeprecationWarning,
        stacklevel=2,
    )
    return importlib.import_module("hdi_callback.monitoring.session.earlier")._Watch
