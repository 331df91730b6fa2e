"""Readings in, alerts out: rules, their limits, and the engine that applies them.

A rule judges the readings of one layer and returns a finding, or nothing. `Alerts` keeps the findings that last, and
merges those of one event to one alert, which is reported when it begins, when it gets worse, and when it ends.
"""

from hdi_callback.rules.alike import MeanAlignment, MergedScores, WorstPair
from hdi_callback.rules.attention import (
    FlatAttention,
    LaterTokens,
    LogitGrowth,
    OneKey,
    SharpFromStart,
    SuddenFlattening,
    SuddenSharpening,
    TokensAlike,
)
from hdi_callback.rules.choice import RULES, default_rules
from hdi_callback.rules.engine import Alerts
from hdi_callback.rules.explain import RuleExplanation, explain, explain_rule
from hdi_callback.rules.limits import LIMITS, check_thresholds
from hdi_callback.rules.rule import Finding, Rule
from hdi_callback.rules.series import Row, Series
from hdi_callback.rules.weights import FrozenHeads, NotFinite, RoundedAway, VanishingWeights, WeightJump

__all__ = [
    "LIMITS",
    "RULES",
    "Alerts",
    "Finding",
    "FlatAttention",
    "FrozenHeads",
    "LaterTokens",
    "LogitGrowth",
    "MeanAlignment",
    "MergedScores",
    "NotFinite",
    "OneKey",
    "RoundedAway",
    "Row",
    "Rule",
    "RuleExplanation",
    "Series",
    "SharpFromStart",
    "SuddenFlattening",
    "SuddenSharpening",
    "TokensAlike",
    "VanishingWeights",
    "WeightJump",
    "WorstPair",
    "check_thresholds",
    "default_rules",
    "explain",
    "explain_rule",
]
