"""Watch the diversity of attention heads while a transformer trains.

Add one line to a Lightning trainer::

    from hdi_callback import HDICallback
    trainer = L.Trainer(callbacks=[HDICallback(every_n_steps=50)])
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Loaded on first use: some names import a trainer, and most of them torch, for which `hdi --help` does not wait.
# `__init__.pyi` has the same for type checkers and editors.
_MODULES = {
    "attention": "AttentionLayer HeadWeight find_attention survey",
    "audits": "Audit audit",
    "checks": "Card Check Diagnosis check",
    "core": "HeadCovariance HeadDiversity head_covariance head_diversity principal_cosines",
    "dashboards.report": "write_report",
    "errors": "HDIError HDIWarning MisconfigurationError MonitoringWarning NothingToWatchError ShapeError "
    "UnsupportedAttentionError UnsupportedAttentionWarning",
    "history": "RunHistory load_history",
    "integrations.lightning": "HDICallback",
    "integrations.loop": "HeadSession watch_heads",
    "integrations.transformers": "HDITrainerCallback",
    "interventions": "Intervention QKClip ReviveHeads SaveCheckpoint StopTraining",
    "monitor": "METRICS HeadDiversityMonitor Reading",
    "record": "Action Alert LayerRecord Record",
    "rules": "Finding Rule",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    public = globals()[name] = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    return public


def __dir__() -> list[str]:
    return __all__
