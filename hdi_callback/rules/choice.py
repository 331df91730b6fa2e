"""The rules of a run: the default ones with the limits of each layer, or those of the user."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hdi_callback.arguments import did_you_mean, shown
from hdi_callback.errors import MisconfigurationError
from hdi_callback.monitor.metrics import METRICS
from hdi_callback.rules.attention_rules import ChangeWithLoss, FlatAttention, LaterTokens, SharpFromStart
from hdi_callback.rules.rule import Rule
from hdi_callback.rules.similarity_rules import CopiedHeads, MeanAlignment, MergedValues, WorstPair
from hdi_callback.rules.weight_rules import FrozenWeights, NotFinite, RoundedAway, VanishingWeights

RULES: tuple[type[Rule], ...] = (
    NotFinite,
    LaterTokens,
    SharpFromStart,
    FrozenWeights,
    RoundedAway,
    CopiedHeads,
    WorstPair,
    MeanAlignment,
    VanishingWeights,
    MergedValues,
    FlatAttention,
    ChangeWithLoss,
)
"""The default rules, causes before what follows from them: of several that report one event the first states it."""


def default_rules() -> tuple[Rule, ...]:
    """Return a rule of each kind.

    Example:
        >>> [rule.name for rule in default_rules()][:3]
        ['weights not finite', 'later tokens', 'sharp from the start']
    """
    return tuple(kind() for kind in RULES)


def check_rules(rules: Any) -> tuple[Rule, ...]:
    """Check rules of the user's own, before training."""
    if not isinstance(rules, Sequence) or isinstance(rules, str):
        raise MisconfigurationError(
            f'`alerts` must be "default", a list of rules or None, got {shown(rules)}: write alerts=[MyRule()].'
            f"{did_you_mean(rules, ['default'])}"
        )
    names: set[str] = set()
    for rule in rules:
        if not isinstance(rule, Rule):
            hint = f": write {rule.__name__}()" if isinstance(rule, type) else ""
            raise MisconfigurationError(f"`alerts` holds {shown(rule)}, which is no rule{hint}.")
        for metric in (*rule.needs, *rule.reads):
            if metric not in METRICS:
                hint = did_you_mean(metric, METRICS)
                raise MisconfigurationError(f"The rule {rule.name!r} needs {metric!r}, which is no metric.{hint}")
        if rule.name in names:
            raise MisconfigurationError(f"Two rules have the name {rule.name!r}: give one of them another.")
        names.add(rule.name)
    return tuple(rules)
