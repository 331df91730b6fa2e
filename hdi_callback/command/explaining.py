"""Explanations of rules and curves, as text for a terminal."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable

import click

from hdi_callback.monitoring.rules.explanations import CurveExplanation, RuleExplanation

_LABEL = 16
_WIDEST, _NARROWEST = 100, 40


def print_explanation(explanation: RuleExplanation | CurveExplanation) -> None:
    """Print a rule or a curve.

    Args:
        explanation: the explanation.
    """
    click.echo(f"{explanation.name} ({'rule' if isinstance(explanation, RuleExplanation) else 'curve'})\n")
    _print_rows(_rule_rows(explanation) if isinstance(explanation, RuleExplanation) else _curve_rows(explanation))


def print_rules(rules: Iterable[RuleExplanation]) -> None:
    """Print a line for each rule.

    Args:
        rules: their explanations.
    """
    rules = list(rules)
    click.echo("The rules, and how their alerts begin:\n")
    _print_rows(
        [(rule.name, f'"{rule.messages[0]}"') for rule in rules], label=2 + max(len(rule.name) for rule in rules)
    )
    click.echo(
        "\nhdi explain RULE says what it means and what to do, hdi explain CURVE (such as hdi_alignment) what is bad."
    )


def _rule_rows(rule: RuleExplanation) -> list[tuple[str, str]]:
    rows = [("the alert says", f'"{message}"') for message in rule.messages]
    rows += [("it means", rule.meaning), ("what to do", rule.action)]
    rows += [(f"{level} when", when) for level, when in rule.raised]
    rows += [("resolved when", rule.resolved)] if rule.resolved else []
    rows += [("it judges", ", ".join(rule.metrics))] if rule.metrics else []
    if not rule.limits:
        return [*rows, ("limits", "none to set")]
    limits = [f"{name} {'off' if value is None else f'{value:g}'}" for name, value in rule.limits.items()]
    name = next(iter(rule.limits))
    rows += [
        ("limits", f"{', '.join(limits)} by default"),
        ("to try others", f"hdi replay RUN --threshold {name}=VALUE (off instead of VALUE switches it off)"),
        ("to set them", f'HDICallback(thresholds={{"*": {{"{name}": VALUE}}}}) (None switches it off)'),
    ]
    return rows


def _curve_rows(curve: CurveExplanation) -> list[tuple[str, str]]:
    rows = [
        ("what it is", curve.summary),
        ("read from", curve.source if " " in curve.source else f"{curve.source} weights"),
    ]
    rows += [(key.replace("_", " "), text) for key, text in curve.hints.items()]
    rows += [("judged by", ", ".join(curve.rules) or "no rule")]
    return [*rows, ("to log it", f'HDICallback(metrics=["default", "{curve.name}"])')]


def _print_rows(rows: Iterable[tuple[str, str]], label: int = _LABEL) -> None:
    """Print rows of a label and a wrapped text; equal labels are printed once."""
    width = min(max(shutil.get_terminal_size().columns, _NARROWEST), _WIDEST)
    last = ""
    for name, text in rows:
        lines = textwrap.wrap(text, width - label - 2, break_long_words=False, break_on_hyphens=False) or [""]
        for number, line in enumerate(lines):
            shown = name if number == 0 and name != last else ""
            click.echo(f"  {shown.ljust(label)}{line}".rstrip())
        last = name
