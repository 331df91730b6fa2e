"""Watch the diversity of attention heads while a transformer trains.

Add one line to a Lightning trainer::

    from hdi_callback import HDICallback
    trainer = L.Trainer(callbacks=[HDICallback(every_n_steps=50)])
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hdi_callback import core, errors, interventions, rules
from hdi_callback.attention import (
    AttentionLayer,
    HeadPieces,
    HeadProduct,
    HeadSlice,
    Refusal,
    find_attention,
    register_layout,
)
from hdi_callback.audits import Audit, Comparison, audit, compare
from hdi_callback.core import allocate_heads, head_covariance, head_diversity, principal_cosines
from hdi_callback.dashboards.report import Report, report
from hdi_callback.monitoring.alerts import Alert, Finding, Rule
from hdi_callback.monitoring.history import load_history, read_history
from hdi_callback.monitoring.monitor import HeadDiversityMonitor
from hdi_callback.monitoring.readings import LayerRecord, Reading, Record
from hdi_callback.monitoring.rules.replay import read_alerts, replay
from hdi_callback.monitoring.session.host import Host
from hdi_callback.monitoring.session.position import Position
from hdi_callback.monitoring.session.session import Session
from hdi_callback.monitoring.session.settings import Settings
from hdi_callback.monitoring.session.sink import Result, Sink

if TYPE_CHECKING:
    from hdi_callback.integrations.ignite import HDIHandler
    from hdi_callback.integrations.lightning import HDICallback
    from hdi_callback.integrations.loop import HeadSession, watch_heads
    from hdi_callback.integrations.transformers import HDITrainerCallback

__version__ = "0.1.0"

__all__ = [
    "Alert",
    "AttentionLayer",
    "Audit",
    "Comparison",
    "Finding",
    "HDICallback",
    "HDIHandler",
    "HDITrainerCallback",
    "HeadDiversityMonitor",
    "HeadPieces",
    "HeadProduct",
    "HeadSession",
    "HeadSlice",
    "Host",
    "LayerRecord",
    "Position",
    "Reading",
    "Record",
    "Refusal",
    "Report",
    "Result",
    "Rule",
    "Session",
    "Settings",
    "Sink",
    "allocate_heads",
    "audit",
    "compare",
    "core",
    "errors",
    "find_attention",
    "head_covariance",
    "head_diversity",
    "interventions",
    "load_history",
    "principal_cosines",
    "read_alerts",
    "read_history",
    "register_layout",
    "replay",
    "report",
    "rules",
    "watch_heads",
]

_LAZY = {  # these import a trainer, or look whether one has been imported
    "HDICallback": "hdi_callback.integrations.lightning",
    "HDIHandler": "hdi_callback.integrations.ignite",
    "HDITrainerCallback": "hdi_callback.integrations.transformers",
    "HeadSession": "hdi_callback.integrations.loop",
    "watch_heads": "hdi_callback.integrations.loop",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
