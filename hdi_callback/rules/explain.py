"""Explanations of rules, from their classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hdi_callback.arguments import did_you_mean, shown
from hdi_callback.errors import MisconfigurationError
from hdi_callback.record import Level
from hdi_callback.rules.choice import RULES
from hdi_callback.rules.limits import LIMITS
from hdi_callback.rules.rule import Rule, paste


@dataclass(frozen=True)
class RuleExplanation:
    """What a rule judges, what its alert means, and what to do.

    Attributes:
        name: its name.
        level: how serious its alerts are at most, but for what `condition` says.
        condition: when it raises one.
        meaning: what that means.
        action: what to do.
        metrics: the metrics that it reads.
        limits: name in `thresholds` -> default and meaning.
        code: lines to paste under Lightning; empty if none help.
    """

    name: str
    level: Level
    condition: str
    meaning: str
    action: str
    metrics: tuple[str, ...]
    limits: dict[str, tuple[float, str]]
    code: str = ""


def explain_rule(rule: type[Rule]) -> RuleExplanation:
    """Explain a rule, also one of your own."""
    limits = {name: (LIMITS[name].value, LIMITS[name].meaning) for name in rule.limits}
    metrics = (*rule.needs, *rule.reads)
    return RuleExplanation(
        rule.name, rule.level, rule.condition, rule.meaning, rule.action, metrics, limits, paste(rule.code)
    )


def explain(name: str, rules: Sequence[type[Rule]] = RULES) -> RuleExplanation:
    """Explain a rule by its name.

    Args:
        name: ``"worst pair"``, ``"worst-pair"``, ``"WorstPair"``, or one of its limits (``"pair"``).
        rules: the rules to search.

    Returns:
        The explanation.

    Raises:
        MisconfigurationError: if nothing has this name; the message suggests a close one.

    Example:
        >>> explain("worst-pair").limits["pair"][0]
        0.8
    """
    known = {_letters(limit): rule for rule in rules for limit in rule.limits}
    known |= {_letters(one): rule for rule in rules for one in (rule.__name__, rule.name)}
    if _letters(name) not in known:
        close = did_you_mean(name, [rule.name for rule in rules])
        raise MisconfigurationError(f"No rule has the name {shown(name)}; `hdi explain` lists them.{close}")
    return explain_rule(known[_letters(name)])


def _letters(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
