"""The rules that raise alerts, one file each.

They judge *alignment*: overlap against chance, 0 for independent random heads and 1 for identical ones, so that one
limit serves layers of all sizes. Healthy training aligns heads too; therefore limits on the level raise alarms, and
changes alone only a notice. The limits were chosen on some runs and tested on others: docs/alerts.md.
"""

from hdi_callback.monitoring.rules.choice import choose_rules, default_rules
from hdi_callback.monitoring.rules.dead_heads import DeadHeads
from hdi_callback.monitoring.rules.falling_rank import FallingRank
from hdi_callback.monitoring.rules.forecast import AlignmentForecast
from hdi_callback.monitoring.rules.jumps import InputsLoseRank, SuddenShrink, WeightJump
from hdi_callback.monitoring.rules.lenses import HYSTERESIS
from hdi_callback.monitoring.rules.levels import (
    AttentionSink,
    EntropyCollapse,
    FlatAttention,
    LogitGrowth,
    SharpFromStart,
    TokensAlike,
)
from hdi_callback.monitoring.rules.masks import FewerKeys, LaterTokens, OneKey
from hdi_callback.monitoring.rules.mean_alignment import MeanAlignment
from hdi_callback.monitoring.rules.narrowing_heads import NarrowingHeads
from hdi_callback.monitoring.rules.non_finite import NonFinite
from hdi_callback.monitoring.rules.shared_direction import SharedDirection
from hdi_callback.monitoring.rules.silent_heads import FrozenHeads, NoContribution, RoundedAway, UntrainedWeights
from hdi_callback.monitoring.rules.similar_heads import AttendAlike, MergedMessages, MergedScores
from hdi_callback.monitoring.rules.sudden_attention import SuddenFlattening, SuddenSharpening
from hdi_callback.monitoring.rules.thresholds import Thresholds, check_thresholds
from hdi_callback.monitoring.rules.tied_heads import TiedHeads
from hdi_callback.monitoring.rules.trend import AlignmentTrend
from hdi_callback.monitoring.rules.vanishing import VanishingWeights
from hdi_callback.monitoring.rules.worst_pair import WorstPair

__all__ = [
    "HYSTERESIS",
    "AlignmentForecast",
    "AlignmentTrend",
    "AttendAlike",
    "AttentionSink",
    "DeadHeads",
    "EntropyCollapse",
    "FallingRank",
    "FewerKeys",
    "FlatAttention",
    "FrozenHeads",
    "InputsLoseRank",
    "LaterTokens",
    "LogitGrowth",
    "MeanAlignment",
    "MergedMessages",
    "MergedScores",
    "NarrowingHeads",
    "NoContribution",
    "NonFinite",
    "OneKey",
    "RoundedAway",
    "SharedDirection",
    "SharpFromStart",
    "SuddenFlattening",
    "SuddenSharpening",
    "SuddenShrink",
    "Thresholds",
    "TiedHeads",
    "TokensAlike",
    "UntrainedWeights",
    "VanishingWeights",
    "WeightJump",
    "WorstPair",
    "check_thresholds",
    "choose_rules",
    "default_rules",
]
