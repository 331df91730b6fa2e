"""Watch the diversity of attention heads while a transformer trains.

Add one line to a Lightning trainer::

    from hdi_callback import HDICallback
    trainer = L.Trainer(callbacks=[HDICallback(every_n_steps=50)])
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Loaded on first use: some names import a trainer, and most of them torch, for which `hdi --help` does not wait.
_MODULES = {
    "attention": "AttentionLayer HeadWeight find_attention register_layout survey",
    "audits": "Audit Comparison audit compare",
    "checks": "Card Check Diagnosis check",
    "core": "HeadCovariance HeadDiversity head_covariance head_diversity principal_cosines",
    "dashboards.report": "write_report",
    "errors": "HDIError HDIWarning MisconfigurationError MonitoringWarning NothingToWatchError ShapeError "
    "UnsupportedAttentionError UnsupportedAttentionWarning",
    "history": "RunHistory load_history",
    "integrations.lightning": "HDICallback",
    "integrations.loop": "HeadSession watch_heads",
    "integrations.transformers": "HDITrainerCallback",
    "interventions": "Call Intervention QKClip ReviveHeads SaveCheckpoint StopTraining",
    "monitor": "METRICS HeadDiversityMonitor Reading",
    "record": "Action Alert LayerRecord Record Sink",
    "rules": "Finding Rule",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = sorted(_MODULE_OF)

if TYPE_CHECKING:  # the same once more, for type checkers and editors
    # isort: off
    from hdi_callback.attention import (
        AttentionLayer as AttentionLayer,
        HeadWeight as HeadWeight,
        find_attention as find_attention,
        register_layout as register_layout,
        survey as survey,
    )
    from hdi_callback.audits import Comparison as Comparison, compare as compare
    from hdi_callback.audits.audit import Audit as Audit, audit as audit
    from hdi_callback.checks import (
        Card as Card,
        Check as Check,
        Diagnosis as Diagnosis,
        check as check,
    )
    from hdi_callback.core import (
        HeadCovariance as HeadCovariance,
        HeadDiversity as HeadDiversity,
        head_covariance as head_covariance,
        head_diversity as head_diversity,
        principal_cosines as principal_cosines,
    )
    from hdi_callback.dashboards.report import write_report as write_report
    from hdi_callback.errors import (
        HDIError as HDIError,
        HDIWarning as HDIWarning,
        MisconfigurationError as MisconfigurationError,
        MonitoringWarning as MonitoringWarning,
        NothingToWatchError as NothingToWatchError,
        ShapeError as ShapeError,
        UnsupportedAttentionError as UnsupportedAttentionError,
        UnsupportedAttentionWarning as UnsupportedAttentionWarning,
    )
    from hdi_callback.history import RunHistory as RunHistory, load_history as load_history
    from hdi_callback.integrations.lightning import HDICallback as HDICallback
    from hdi_callback.integrations.loop import HeadSession as HeadSession, watch_heads as watch_heads
    from hdi_callback.integrations.transformers import HDITrainerCallback as HDITrainerCallback
    from hdi_callback.interventions import (
        Call as Call,
        Intervention as Intervention,
        QKClip as QKClip,
        ReviveHeads as ReviveHeads,
        SaveCheckpoint as SaveCheckpoint,
        StopTraining as StopTraining,
    )
    from hdi_callback.monitor import (
        METRICS as METRICS,
        HeadDiversityMonitor as HeadDiversityMonitor,
        Reading as Reading,
    )
    from hdi_callback.record import (
        Action as Action,
        Alert as Alert,
        LayerRecord as LayerRecord,
        Record as Record,
        Sink as Sink,
    )
    from hdi_callback.rules import Finding as Finding, Rule as Rule
    # isort: on


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    public = globals()[name] = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    return public


def __dir__() -> list[str]:
    return __all__
