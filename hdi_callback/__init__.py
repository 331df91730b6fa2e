"""Watch the diversity of attention heads while a transformer trains.

Add one line to a Lightning trainer::

    from hdi_callback import HDICallback
    trainer = L.Trainer(callbacks=[HDICallback(every_n_steps=50)])
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from hdi_callback.integrations.ignite import HDIHandler
    from hdi_callback.integrations.lightning import HDICallback
    from hdi_callback.integrations.loop import HeadSession, watch_heads
    from hdi_callback.integrations.transformers import HDITrainerCallback
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

_NAMES = {
    "hdi_callback.attention": (
        "AttentionLayer",
        "HeadPieces",
        "HeadProduct",
        "HeadSlice",
        "Refusal",
        "find_attention",
        "register_layout",
    ),
    "hdi_callback.audits": ("Audit", "Comparison", "audit", "compare"),
    "hdi_callback.core": ("allocate_heads", "head_covariance", "head_diversity", "principal_cosines"),
    "hdi_callback.dashboards.report": ("Report", "report"),
    "hdi_callback.integrations.ignite": ("HDIHandler",),
    "hdi_callback.integrations.lightning": ("HDICallback",),
    "hdi_callback.integrations.loop": ("HeadSession", "watch_heads"),
    "hdi_callback.integrations.transformers": ("HDITrainerCallback",),
    "hdi_callback.monitoring.alerts": ("Alert", "Finding", "Rule"),
    "hdi_callback.monitoring.history": ("load_history", "read_history"),
    "hdi_callback.monitoring.monitor": ("HeadDiversityMonitor",),
    "hdi_callback.monitoring.readings": ("LayerRecord", "Reading", "Record"),
    "hdi_callback.monitoring.rules.replay": ("read_alerts", "replay"),
    "hdi_callback.monitoring.session.host": ("Host",),
    "hdi_callback.monitoring.session.position": ("Position",),
    "hdi_callback.monitoring.session.session": ("Session",),
    "hdi_callback.monitoring.session.settings": ("Settings",),
    "hdi_callback.monitoring.session.sink": ("Result", "Sink"),
}
"""Module -> its public names, loaded on first use: all of them together would make `import hdi_callback` slow, and some
import a trainer, or check whether one has been imported."""

_MODULES = {name: module for module, names in _NAMES.items() for name in names}
_ROOMS = ("attention", "audits", "core", "dashboards", "errors", "integrations", "interventions", "monitoring", "rules")


def __getattr__(name: str) -> Any:
    import importlib

    if name in _ROOMS:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return found


def __dir__() -> list[str]:
    return __all__
