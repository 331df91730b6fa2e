"""Alerts in, actions out: what a callback does about an alert. None acts unless the user passes it."""

from hdi_callback.interventions.intervention import Intervention, SaveCheckpoint, StopTraining, Training
from hdi_callback.interventions.qk_clip import QKClip
from hdi_callback.interventions.revive_heads import ReviveHeads

__all__ = ["Intervention", "QKClip", "ReviveHeads", "SaveCheckpoint", "StopTraining", "Training"]
