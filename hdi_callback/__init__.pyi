# ruff: isort: skip_file
from typing import Final

from hdi_callback.attention import (
    AttentionLayer as AttentionLayer,
    HeadWeight as HeadWeight,
    find_attention as find_attention,
    survey as survey,
)
from hdi_callback.audits.audit import Audit as Audit, audit as audit
from hdi_callback.checks import Card as Card, Check as Check, Diagnosis as Diagnosis, check as check
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
    Intervention as Intervention,
    QKClip as QKClip,
    ReviveHeads as ReviveHeads,
    SaveCheckpoint as SaveCheckpoint,
    StopTraining as StopTraining,
)
from hdi_callback.monitor import METRICS as METRICS, HeadDiversityMonitor as HeadDiversityMonitor, Reading as Reading
from hdi_callback.record import (
    Action as Action,
    Alert as Alert,
    LayerRecord as LayerRecord,
    Record as Record,
)
from hdi_callback.rules import Finding as Finding, Rule as Rule

__version__: Final[str]
__all__: Final[list[str]]
