"""Explanations of rules and curves: what each means and what to do, from the documentation."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from hdi_callback.arguments import did_you_mean, shown
from hdi_callback.errors import MisconfigurationError
from hdi_callback.monitoring.alerts.rule import letters_of
from hdi_callback.monitoring.metrics import METRICS
from hdi_callback.monitoring.rules.choice import default_rules
from hdi_callback.monitoring.rules.thresholds import TRIED, Thresholds

FILE = Path(__file__).with_name("explanations.json")
"""Written by docs/explanations.py from the tables of the documentation."""

_NO_LIMITS = Thresholds(**{item.name: None for item in fields(Thresholds)})
_ADMISSIBLE = 0.5  # an argument of each rule


@dataclass(frozen=True)
class RuleExplanation:
    """Explanation of a rule.

    Attributes:
        name: its name, as alerts have it.
        messages: how its alerts begin.
        meaning: what its alert means.
        action: what to do.
        raised: level and condition of each of its alerts.
        resolved: when an alert ends; empty if no page says so.
        metrics: the curves that it judges.
        limits: name of each limit in `Thresholds` -> its default, `None` where it is off by default.
    """

    name: str
    messages: tuple[str, ...]
    meaning: str
    action: str
    raised: tuple[tuple[str, str], ...]
    resolved: str
    metrics: tuple[str, ...]
    limits: dict[str, float | None]

    def to_dict(self) -> dict[str, Any]:
        """The explanation as plain data.

        Returns:
            Its fields, with the kind ``"rule"``.
        """
        raised = [{"level": level, "when": when} for level, when in self.raised]
        return {"kind": "rule", **asdict(self), "raised": raised}


@dataclass(frozen=True)
class CurveExplanation:
    """Explanation of a curve.

    Attributes:
        name: of the metric.
        summary: what it is.
        source: what it is read from.
        hints: such as ``"range"``, ``"normal"`` and ``"bad"`` -> what the documentation says.
        rules: names of the rules that judge it.
    """

    name: str
    summary: str
    source: str
    hints: dict[str, str]
    rules: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The explanation as plain data.

        Returns:
            Its fields, with the kind ``"curve"``.
        """
        return {"kind": "curve", **asdict(self)}


@cache
def rule_explanations() -> dict[str, RuleExplanation]:
    """Explanations of all rules, including those that are off by default.

    Returns:
        Name -> explanation, in the order of the documentation.

    Example:
        >>> rule_explanations()["worst pair"].limits
        {'pair': 0.8, 'energy_pair': None}
    """
    needs, limits = _needs(), _limits()
    return {
        name: RuleExplanation(
            name,
            tuple(said["messages"]),
            said["meaning"],
            said["action"],
            tuple((part["level"], part["when"]) for part in said["raised"]),
            said.get("resolved", ""),
            needs.get(name, ()),
            limits.get(name, {}),
        )
        for name, said in _texts()["rules"].items()
    }


def explain(name: str) -> RuleExplanation | CurveExplanation:
    """Explain a rule or a curve.

    Args:
        name: a rule (``"worst pair"``, ``"worst-pair"``, ``"WorstPair"``), one of its limits (``"pair"``), or a metric
            or tag (``"hdi"``, ``"hdi/blocks.0.attn"``).

    Returns:
        The explanation.

    Raises:
        MisconfigurationError: if nothing has this name; the message suggests a close one.

    Example:
        >>> explain("worst-pair").messages
        ('heads 3 and 9 are nearly one head',)
        >>> explain("hdi_chance").summary
        "HDI of independent random heads of these ranks, from the heads' key weights."
    """
    known = rule_explanations()
    metric = name.partition("/")[0].lower()
    if metric in METRICS:
        return _explain_curve(metric)
    names = {letters_of(kind): rule for rule, kind in _classes().items()}
    names |= {letters_of(limit): rule for rule, one in known.items() for limit in one.limits}
    names |= {letters_of(rule): rule for rule in known}
    if letters_of(name) in names:
        return known[names[letters_of(name)]]
    close = did_you_mean(name.replace(" ", "-"), [*(rule.replace(" ", "-") for rule in known), *METRICS])
    raise MisconfigurationError(f"No rule or curve has the name {shown(name)}; `hdi explain` lists the rules.{close}")


def _explain_curve(metric: str) -> CurveExplanation:
    one = METRICS[metric]
    judged_by = tuple(rule for rule, needed in _needs().items() if metric in needed)
    return CurveExplanation(metric, one.summary, one.source, dict(_texts()["curves"].get(metric, {})), judged_by)


@cache
def _texts() -> dict[str, dict[str, Any]]:
    texts: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return texts


def _with_all_rules() -> Thresholds:
    """Limits with which no rule is off."""
    return replace(TRIED, **{limit: _ADMISSIBLE for limit, value in asdict(TRIED).items() if value is None})


def _needs() -> dict[str, tuple[str, ...]]:
    return {rule.name: tuple(rule.needs) for rule in default_rules(_with_all_rules())}


def _classes() -> dict[str, str]:
    return {rule.name: type(rule).__name__ for rule in default_rules(_with_all_rules())}


@cache
def _limits() -> dict[str, dict[str, float | None]]:
    """Rule -> its limits: those without which it is not among the rules."""
    always = {rule.name for rule in default_rules(_NO_LIMITS)}
    limits: dict[str, dict[str, float | None]] = {}
    for limit, value in asdict(TRIED).items():
        for rule in default_rules(replace(_NO_LIMITS, **{limit: _ADMISSIBLE if value is None else value})):
            if rule.name not in always:
                limits.setdefault(rule.name, {})[limit] = value
    return limits
