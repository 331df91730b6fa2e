"""`Rule`: judges the readings of a layer; checks of a user's rule and of its findings."""

from __future__ import annotations

import difflib
import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from hdi_callback.arguments import one_of, shown, words
from hdi_callback.errors import MisconfigurationError
from hdi_callback.monitoring.alerts.alert import LEVELS, Alert, Finding
from hdi_callback.monitoring.alerts.series import Series


class Rule(ABC):
    """Judges the readings of a layer, and returns a `Finding` or `None`; a rule of your own is a small class.

    Attributes:
        name: its finding in a few words; each layer and rule has at most one active alert.
        needs: metrics that a reading must have to be judged; a reading without them neither begins nor ends an alert;
            after five in a row without them, for a known reason, an alert ends as "not measured".
        layers: patterns of the layer names that it judges; all by default.
        is_optional: True if a callback may drop it where its `needs` are not measured, as it does with the default
            rules; with other rules it raises an error before training.

    Example:
        >>> class FewEffectiveHeads(Rule):
        ...     name = "few effective heads"
        ...     needs = ("hdi_effective_heads",)
        ...
        ...     def judge(self, series, active):
        ...         heads = series.value("hdi_effective_heads")
        ...         if heads < (2.5 if active else 2):  # two limits, so that it does not flicker
        ...             return Finding(f"{heads:.1f} effective heads are left", value=heads, threshold=2)
    """

    name: ClassVar[str]
    needs: Sequence[str] = ()
    layers: Sequence[str] | None = None
    is_optional: bool = False

    def is_measured(self, series: Series, active: Alert | None) -> bool:
        """Return whether the latest reading of a layer has what this rule judges.

        Args:
            series: its readings so far.
            active: the active alert of this rule for this layer, if there is one.

        Returns:
            True, by default, if it has all metrics of `needs`.
        """
        return all(metric in series.latest.values for metric in self.needs)

    @abstractmethod
    def judge(self, series: Series, active: Alert | None) -> Finding | None:
        """Judge the latest reading of a layer.

        Args:
            series: its readings so far.
            active: the active alert of this rule for this layer, if there is one.

        Returns:
            The finding; `None` if there is nothing, or nothing any more, to report.
        """


def check_rule(rule: Any) -> Rule:
    """Check a user's rule before training.

    Args:
        rule: an instance of a rule.

    Returns:
        It.

    Raises:
        MisconfigurationError: if it is no rule, or its name, `needs` or `layers` cannot work.
    """
    if isinstance(rule, type) and issubclass(rule, Rule):
        raise MisconfigurationError(
            f"`alerts` must hold rules, got the class {rule.__name__}: write {rule.__name__}()."
        )
    if not isinstance(rule, Rule):
        package = f"{__name__.partition('.')[0]}."  # classes of the user are no rules of the package
        own = [
            one for one in _kinds_of(Rule)
            if one.__module__.startswith(package) and not one.__name__.startswith("_")
        ]  # fmt: skip
        known = {letters_of(one.__name__): one.__name__ for one in own}
        known |= {letters_of(one.name): one.__name__ for one in own if isinstance(one.__dict__.get("name"), str)}
        close = difflib.get_close_matches(letters_of(rule), list(known), 1) if isinstance(rule, str) else []
        remedy = f" Did you mean {known[close[0]]}() of hdi_callback.rules?" if close else ""
        raise MisconfigurationError(f"`alerts` must hold rules (instances of Rule), got {shown(rule)}.{remedy}")
    kind = type(rule).__name__
    name = getattr(rule, "name", None)
    if not isinstance(name, str) or not name or not name.isprintable():
        raise MisconfigurationError(
            f"The rule {kind} must have a name, a string of one line, got {shown(name)}: write name = "
            f'"few effective heads" in its class.'
        )
    if words(f"needs of the rule {name!r}", rule.needs, what="names of metrics") is None:
        raise MisconfigurationError(f"`needs` of the rule {name!r} must be a list of metrics, got None: write ().")
    words(f"layers of the rule {name!r}", rule.layers, what="patterns of layer names", may_be_empty=False)
    return rule


def _kinds_of(kind: Any) -> list[Any]:
    """All subclasses of a class, however deep."""
    return [subclass for child in kind.__subclasses__() for subclass in (child, *_kinds_of(child))]


def letters_of(name: str) -> str:
    """A name in lower case, letters and digits only, to compare with user input.

    Args:
        name: name of a rule, its class or a limit.

    Returns:
        The same for ``"tied heads"`` and ``TiedHeads``.
    """
    return "".join(letter for letter in name.lower() if letter.isalnum())


def check_finding(finding: Any, series: Series) -> Finding:
    """Check a rule's finding, and convert its numbers to plain types.

    Args:
        finding: the result of `Rule.judge`.
        series: the readings that it judged.

    Returns:
        The finding; a value or threshold that is not finite is left out.

    Raises:
        MisconfigurationError: if it is no finding, or a field of it cannot work; says which.
    """
    if not isinstance(finding, Finding):
        raise MisconfigurationError(f"`judge` must return a Finding or None, got {shown(finding)}.")
    one_of("level of a Finding", finding.level, LEVELS)
    for name in ("what", "certainty", "remedy"):
        if not isinstance(getattr(finding, name), str):
            raise MisconfigurationError(f"`{name}` of a Finding must be a string, got {shown(getattr(finding, name))}.")
    if finding.metric is not None and not isinstance(finding.metric, str):
        raise MisconfigurationError(f"`metric` of a Finding must be a string or None, got {shown(finding.metric)}.")
    if finding.since is not None and (not _is_whole(finding.since) or finding.since > series.latest.step):
        raise MisconfigurationError(
            f"`since` of a Finding must be a step, at most that of the reading ({series.latest.step}), got "
            f"{shown(finding.since)}."
        )
    most = series.facts.get("num_heads", math.inf)
    _check_heads("heads", finding.heads, most)
    if not isinstance(finding.groups, tuple | list):
        raise MisconfigurationError(f"`groups` of a Finding must hold groups of heads, got {shown(finding.groups)}.")
    for group in finding.groups:
        _check_heads("groups", group, most)
    return replace(
        finding,
        value=_plain_number("value", finding.value),
        threshold=_plain_number("threshold", finding.threshold),
        heads=tuple(int(head) for head in finding.heads),
        groups=tuple(tuple(int(head) for head in group) for group in finding.groups),
        since=None if finding.since is None else int(finding.since),
    )


def _check_heads(name: str, heads: Any, most: float) -> None:
    if not isinstance(heads, tuple | list) or not all(_is_whole(head) and 0 <= head < most for head in heads):
        raise MisconfigurationError(
            f"`{name}` of a Finding must hold numbers of heads, from 0 to {most - 1} in this layer, got {shown(heads)}."
        )


def _is_whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _plain_number(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise MisconfigurationError(
            f"`{name}` of a Finding must be a number or None, got {shown(value)}: write float(...) around it."
        )
    plain = int(value) if isinstance(value, numbers.Integral) else float(value)
    return plain if math.isfinite(plain) else None
