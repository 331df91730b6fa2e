"""The interventions on alerts, and the base classes for your own."""

from hdi_callback.deprecation import renamed
from hdi_callback.monitoring.interventions import (
    Action,
    Call,
    DiversityPenalty,
    Intervention,
    QKClip,
    ReviveHeads,
    SaveCheckpoint,
    ScaleLearningRate,
    StopTraining,
    Training,
    WhileActive,
)

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
]

_ROOM = "hdi_callback.monitoring.interventions"
__getattr__ = renamed(
    __name__,
    {
        "WhileItStands": f"{_ROOM}:WhileActive",
        "check_interventions": f"{_ROOM}:check_interventions",
        "plain_state": f"{_ROOM}:plain_state",
    },
)


def __dir__() -> list[str]:
    return __all__
