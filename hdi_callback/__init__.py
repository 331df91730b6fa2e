"""Watch the diversity of attention heads while a transformer trains.

Add one line to a Lightning trainer::

    from hdi_callback import HDICallback
    trainer = L.Trainer(callbacks=[HDICallback(every_n_steps=50)])
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hdi_callback.attention import (
        AttentionLayer,
        HeadWeight,
        Refusal,
        Survey,
        find_attention,
        register_layout,
        survey,
    )
    from hdi_callback.audits import Audit, Comparison, audit, compare  # type: ignore[no-redef]
    from hdi_callback.checks import Card, Check, Diagnosis, check
    from hdi_callback.core import (
        HeadCovariance,
        HeadDiversity,
        Lens,
        head_covariance,
        head_diversity,
        principal_cosines,
    )
    from hdi_callback.dashboards import Console, Curves, TensorBoard, Wandb
    from hdi_callback.dashboards.report import write_report
    from hdi_callback.errors import (
        HDIError,
        HDIWarning,
        MisconfigurationError,
        MonitoringWarning,
        NothingToWatchError,
        ShapeError,
        UnsupportedAttentionError,
        UnsupportedAttentionWarning,
    )
    from hdi_callback.history import History, RunHistory, load_history
    from hdi_callback.integrations.ignite import HDIHandler
    from hdi_callback.integrations.lightning import HDICallback
    from hdi_callback.integrations.loop import HeadSession, watch_heads
    from hdi_callback.integrations.transformers import HDITrainerCallback
    from hdi_callback.interventions import (
        Call,
        DiversityPenalty,
        Intervention,
        QKClip,
        ReviveHeads,
        SaveCheckpoint,
        ScaleLearningRate,
        StopTraining,
    )
    from hdi_callback.monitor import METRICS, HeadDiversityMonitor, Metric, Reading
    from hdi_callback.record import Action, Alert, LayerRecord, Record, Sink
    from hdi_callback.rules import Alerts, Finding, Rule, Series, explain
    from hdi_callback.session import Session, Settings, Trainer, Training

__version__ = "0.1.0"

_NAMES = {
    "hdi_callback.attention": (
        "AttentionLayer",
        "HeadWeight",
        "Refusal",
        "Survey",
        "find_attention",
        "register_layout",
        "survey",
    ),
    "hdi_callback.audits": ("Audit", "Comparison", "audit", "compare"),
    "hdi_callback.checks": ("Card", "Check", "Diagnosis", "check"),
    "hdi_callback.core": (
        "HeadCovariance",
        "HeadDiversity",
        "Lens",
        "head_covariance",
        "head_diversity",
        "principal_cosines",
    ),
    "hdi_callback.dashboards": ("Console", "Curves", "TensorBoard", "Wandb"),
    "hdi_callback.dashboards.report": ("write_report",),
    "hdi_callback.errors": (
        "HDIError",
        "HDIWarning",
        "MisconfigurationError",
        "MonitoringWarning",
        "NothingToWatchError",
        "ShapeError",
        "UnsupportedAttentionError",
        "UnsupportedAttentionWarning",
    ),
    "hdi_callback.history": ("History", "RunHistory", "load_history"),
    "hdi_callback.integrations.ignite": ("HDIHandler",),
    "hdi_callback.integrations.lightning": ("HDICallback",),
    "hdi_callback.integrations.loop": ("HeadSession", "watch_heads"),
    "hdi_callback.integrations.transformers": ("HDITrainerCallback",),
    "hdi_callback.interventions": (
        "Call",
        "DiversityPenalty",
        "Intervention",
        "QKClip",
        "ReviveHeads",
        "SaveCheckpoint",
        "ScaleLearningRate",
        "StopTraining",
    ),
    "hdi_callback.monitor": ("METRICS", "HeadDiversityMonitor", "Metric", "Reading"),
    "hdi_callback.record": ("Action", "Alert", "LayerRecord", "Record", "Sink"),
    "hdi_callback.rules": ("Alerts", "Finding", "Rule", "Series", "explain"),
    "hdi_callback.session": ("Session", "Settings", "Trainer", "Training"),
}
"""Module -> its public names, loaded on first use: all of them together would make `import hdi_callback` slow, and some
import a trainer, or check whether one has been imported."""

_MODULES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "METRICS",
    "Action",
    "Alert",
    "Alerts",
    "AttentionLayer",
    "Audit",
    "Call",
    "Card",
    "Check",
    "Comparison",
    "Console",
    "Curves",
    "Diagnosis",
    "DiversityPenalty",
    "Finding",
    "HDICallback",
    "HDIError",
    "HDIHandler",
    "HDITrainerCallback",
    "HDIWarning",
    "HeadCovariance",
    "HeadDiversity",
    "HeadDiversityMonitor",
    "HeadSession",
    "HeadWeight",
    "History",
    "Intervention",
    "LayerRecord",
    "Lens",
    "Metric",
    "MisconfigurationError",
    "MonitoringWarning",
    "NothingToWatchError",
    "QKClip",
    "Reading",
    "Record",
    "Refusal",
    "ReviveHeads",
    "Rule",
    "RunHistory",
    "SaveCheckpoint",
    "ScaleLearningRate",
    "Series",
    "Session",
    "Settings",
    "ShapeError",
    "Sink",
    "StopTraining",
    "Survey",
    "TensorBoard",
    "Trainer",
    "Training",
    "UnsupportedAttentionError",
    "UnsupportedAttentionWarning",
    "Wandb",
    "audit",
    "check",
    "compare",
    "explain",
    "find_attention",
    "head_covariance",
    "head_diversity",
    "load_history",
    "principal_cosines",
    "register_layout",
    "survey",
    "watch_heads",
    "write_report",
]


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return found


def __dir__() -> list[str]:
    return __all__
