"""What may be done about an alert. None of it happens unless it was asked for."""

from hdi_callback.monitoring.interventions.heads import DiversityPenalty, ReviveHeads
from hdi_callback.monitoring.interventions.intervention import (
    Action,
    Intervention,
    Training,
    WhileActive,
    check_interventions,
    plain_state,
)
from hdi_callback.monitoring.interventions.qk_clip import QKClip
from hdi_callback.monitoring.interventions.run import Call, SaveCheckpoint, ScaleLearningRate, StopTraining

__all__ = [
    "Action",
    "Call",
    "DiversityPenalty",
    "Intervention",
    "QKClip",
    "ReviveHeads",
    "SaveCheckpoint",
    "ScaleLearningRate",
    "StopTraining",
    "Training",
    "WhileActive",
    "check_interventions",
    "plain_state",
]
