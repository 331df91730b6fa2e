"""The rules of a run: the default ones, or those of the user."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

from hdi_callback.arguments import did_you_mean, shown
from hdi_callback.errors import MisconfigurationError
from hdi_callback.monitoring.alerts import Rule, check_rule
from hdi_callback.monitoring.rules.dead_heads import DeadHeads
from hdi_callback.monitoring.rules.falling_rank import FallingRank
from hdi_callback.monitoring.rules.forecast import AlignmentForecast
from hdi_callback.monitoring.rules.jumps import InputsLoseRank, SuddenShrink, WeightJump
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
from hdi_callback.monitoring.rules.thresholds import TRIED, Thresholds, check_thresholds
from hdi_callback.monitoring.rules.tied_heads import TiedHeads
from hdi_callback.monitoring.rules.trend import AlignmentTrend
from hdi_callback.monitoring.rules.vanishing import VanishingWeights
from hdi_callback.monitoring.rules.worst_pair import WorstPair


def default_rules(thresholds: Thresholds = TRIED) -> list[Rule]:
    """The default rules; each judges readings that have the metrics it needs.

    Args:
        thresholds: their limits.

    Returns:
        The rules.

    Raises:
        MisconfigurationError: if `thresholds` is no `Thresholds`.

    Example:
        >>> [rule.name for rule in default_rules(Thresholds(trend=None, forecast=None, jump=None, tied=None))][:5]
        ['mean alignment', 'worst pair', 'falling rank', 'weights not finite', 'merged scores']
    """
    if not isinstance(thresholds, Thresholds):
        raise MisconfigurationError(
            f"`thresholds` must be Thresholds, got {shown(thresholds)}: write Thresholds(pair=0.9)."
        )
    limits = thresholds
    rules: list[Rule] = []
    if (limits.mean, limits.energy_mean, limits.critical) != (None, None, None):
        rules.append(MeanAlignment(limits.mean, limits.energy_mean, limits.critical))
    if (limits.pair, limits.energy_pair) != (None, None):
        rules.append(WorstPair(limits.pair, limits.energy_pair))
    if limits.forecast is not None:
        rules.append(AlignmentForecast(limits.forecast))
    if limits.trend is not None:
        rules.append(AlignmentTrend(limits.trend))
    if limits.jump is not None:
        rules.append(SharedDirection(limits.jump))
    if limits.dead is not None:
        rules.append(DeadHeads(limits.dead))
    if limits.rank is not None:
        rules.append(FallingRank(limits.rank))
    rules.append(NonFinite())
    if limits.tied is not None:
        rules.append(TiedHeads(limits.tied))
    on_levels: list[tuple[float | None, Callable[[float], Rule]]] = [
        (limits.scores, MergedScores),
        (limits.messages, MergedMessages),
        (limits.alike, AttendAlike),
        (limits.entropy, EntropyCollapse),
        (limits.logit, LogitGrowth),
        (limits.sink, AttentionSink),
        (limits.tokens, TokensAlike),
        (limits.contribution, NoContribution),
        (limits.start, SharpFromStart),
        (limits.flat, FlatAttention),
        (limits.later, LaterTokens),
        (limits.vanishing, VanishingWeights),
        (limits.weight_jump, WeightJump),
        (limits.unchanged, RoundedAway),
        (limits.inputs, InputsLoseRank),
        (limits.shrink, SuddenShrink),
        (limits.narrow, NarrowingHeads),
        (limits.sharpen, SuddenSharpening),
        (limits.flatten, SuddenFlattening),
    ]
    rules += [make(limit) for limit, make in on_levels if limit is not None]
    rules += [FrozenHeads(), UntrainedWeights(), OneKey(), FewerKeys()]
    for rule in rules:
        rule.is_optional = True
    return rules


@dataclass(frozen=True)
class _RulesByLayer:
    """The default rules with the limits of a layer; a function that can be pickled."""

    limits: Mapping[str, Mapping[str, float | None]]

    def __call__(self, layer: str) -> list[Rule]:
        chosen = TRIED
        for pattern, limits in self.limits.items():
            if fnmatchcase(layer, pattern):
                chosen = replace(chosen, **limits)
        return default_rules(chosen)


def choose_rules(
    rules: Literal["default"] | Sequence[Rule], thresholds: Mapping[str, Mapping[str, float | None]] | None = None
) -> Sequence[Rule] | Callable[[str], Sequence[Rule]]:
    """Check the arguments `alerts` and `thresholds`.

    Args:
        rules: rules, or ``"default"``.
        thresholds: pattern of layer names -> limits (see `Thresholds`); of several patterns that match, later ones
            override earlier ones.

    Returns:
        The argument `rules` of `Alerts`.

    Raises:
        MisconfigurationError: if an item is no rule, two rules have one name, a limit is unknown or cannot be reached,
            or limits are set for rules of your own.

    Example:
        >>> rules_for = choose_rules("default", {"decoder.0.*": {"mean": 0.8}})
        >>> [rule.limits[1] for rule in rules_for("decoder.0.attn") if rule.name == "mean alignment"]
        [('warning', 'subspace', 0.8)]
    """
    if isinstance(rules, str) and rules == "default":
        return _RulesByLayer(check_thresholds(thresholds) or {})
    if thresholds:
        raise MisconfigurationError(
            "`thresholds` are those of the default rules; rules of your own have their limits in their own arguments."
        )
    if not isinstance(rules, list | tuple):
        raise MisconfigurationError(
            f'`alerts` must be "default", None or a list of rules, got {shown(rules)}.'
            + did_you_mean(rules, ["default"])
        )
    for rule in rules:
        check_rule(rule)
    names = [rule.name for rule in rules]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise MisconfigurationError(
            f"Two rules have the name {min(twice)!r}, so their alerts would be mixed up: give one another name."
        )
    return list(rules)
