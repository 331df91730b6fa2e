"""Interventions: actions of a callback on an alert. None is active unless the user passes it."""

from hdi_callback.monitoring.interventions.action import Action
from hdi_callback.monitoring.interventions.asked_for import check_interventions
from hdi_callback.monitoring.interventions.diversity_penalty import DiversityPenalty
from hdi_callback.monitoring.interventions.intervention import Intervention
from hdi_callback.monitoring.interventions.plain_state import plain_state
from hdi_callback.monitoring.interventions.qk_clip import QKClip
from hdi_callback.monitoring.interventions.revive_heads import ReviveHeads
from hdi_callback.monitoring.interventions.run import Call, SaveCheckpoint, ScaleLearningRate, StopTraining
from hdi_callback.monitoring.interventions.training import Training
from hdi_callback.monitoring.interventions.while_active import WhileActive

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
