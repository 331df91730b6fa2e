"""The rules that raise alerts, and what rules of one's own are made of."""

from hdi_callback.deprecation import renamed
from hdi_callback.monitoring.alerts import Alert, Alerts, Finding, Row, Rule, Series
from hdi_callback.monitoring.rules import (
    AlignmentForecast,
    AlignmentTrend,
    AttendAlike,
    AttentionSink,
    DeadHeads,
    EntropyCollapse,
    FallingRank,
    FewerKeys,
    FlatAttention,
    FrozenHeads,
    InputsLoseRank,
    LaterTokens,
    LogitGrowth,
    MeanAlignment,
    MergedMessages,
    MergedScores,
    NoContribution,
    NonFinite,
    OneKey,
    RoundedAway,
    SharedDirection,
    SharpFromStart,
    Thresholds,
    TiedHeads,
    TokensAlike,
    UntrainedWeights,
    VanishingWeights,
    WeightJump,
    WorstPair,
    default_rules,
)

__all__ = [
    "Alert",
    "Alerts",
    "AlignmentForecast",
    "AlignmentTrend",
    "AttendAlike",
    "AttentionSink",
    "DeadHeads",
    "EntropyCollapse",
    "FallingRank",
    "FewerKeys",
    "Finding",
    "FlatAttention",
    "FrozenHeads",
    "InputsLoseRank",
    "LaterTokens",
    "LogitGrowth",
    "MeanAlignment",
    "MergedMessages",
    "MergedScores",
    "NoContribution",
    "NonFinite",
    "OneKey",
    "RoundedAway",
    "Row",
    "Rule",
    "Series",
    "SharedDirection",
    "SharpFromStart",
    "Thresholds",
    "TiedHeads",
    "TokensAlike",
    "UntrainedWeights",
    "VanishingWeights",
    "WeightJump",
    "WorstPair",
    "default_rules",
]

__getattr__ = renamed(
    __name__,
    {
        "HYSTERESIS": "hdi_callback.monitoring.rules:HYSTERESIS",
        "check_thresholds": "hdi_callback.monitoring.rules:check_thresholds",
        "choose_rules": "hdi_callback.monitoring.rules:choose_rules",
    },
)


def __dir__() -> list[str]:
    return __all__
