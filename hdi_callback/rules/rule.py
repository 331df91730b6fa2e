"""`Rule` and `Finding`: what a rule judges, and what it says."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from hdi_callback.arguments import listed
from hdi_callback.checks import ranges
from hdi_callback.record import Level
from hdi_callback.rules.series import Row, Series

_MOST_LISTED = 8  # heads, of which each is named


@dataclass(frozen=True)
class Finding:
    """What a rule has found in the latest reading of a layer."""

    #: A sentence; ``{heads}`` in it becomes the heads with their layer, ``{layer}`` the layer.
    clause: str
    evidence: str = ""  #: the number that shows it and how it came about, as ``"alignment rose from ..."``
    heads: tuple[int, ...] = ()  #: the heads concerned; empty for those of `groups`, or the whole layer
    groups: tuple[tuple[int, ...], ...] = ()  #: groups of these heads that are alike; empty if there are none
    value: float | None = None  #: the number that was judged, where it is not that of `metric`
    threshold: float | None = None  #: its limit, where it is not the first of the rule's `limits`
    metric: str | None = None  #: the metric of the number, where it is not the first of the rule's `needs`
    level: Level | None = None  #: the level, where it is not that of the rule
    since: int | None = None  #: first step at which it was so, if that was before this reading
    of_keys: bool = False  #: True if `heads` are key heads
    action: str | None = None  #: what to do, where it is not what the rule says
    code: str | None = None  #: arguments that help, where they are not those of the rule


class Rule(ABC):
    """Judge the readings of a layer.

    A rule of your own is a small class; pass ``alerts=[MyRule()]``, or ``alerts=[*default_rules(), MyRule()]``.

    Example:
        >>> class FewEffectiveHeads(Rule):
        ...     name = "few effective heads"
        ...     needs = ("hdi_effective_heads",)
        ...
        ...     def judge(self, series, active):
        ...         heads = series.value("hdi_effective_heads")
        ...         if heads < (2.5 if active else 2):  # two limits, so that it does not flicker
        ...             return Finding("{layer} has few effective heads", f"{heads:.1f} are left", value=heads)
    """

    name: ClassVar[str]  #: a few words
    needs: ClassVar[Sequence[str]] = ()  #: metrics that a reading must have to be judged
    reads: ClassVar[Sequence[str]] = ()  #: further metrics that it looks at where they are measured
    limits: ClassVar[Sequence[str]] = ()  #: of `LIMITS`, which `thresholds` sets; it is off where all of them are
    level: ClassVar[Level] = "warning"  #: how serious its alerts are
    is_cause: ClassVar[bool] = False  #: whether its alerts are always events of their own
    condition: ClassVar[str] = ""  #: when it raises an alert, in words
    meaning: ClassVar[str] = ""  #: what the alert means, the docstring of its class
    action: ClassVar[str] = ""  #: what to do about it, in prose
    code: ClassVar[str] = ""  #: arguments of the callback that help

    def __init_subclass__(cls) -> None:
        cls.meaning = " ".join((cls.__doc__ or "").split())

    def is_on(self, limits: Mapping[str, float]) -> bool:
        """Return whether it judges under these limits."""
        return not self.limits or any(limits.get(name, 0.0) < math.inf for name in self.limits)

    def is_measured(self, row: Row) -> bool:
        """Return whether a reading has what this rule needs."""
        return all(metric in row.values for metric in self.needs)

    @abstractmethod
    def judge(self, series: Series, active: Finding | None) -> Finding | None:
        """Judge the latest reading of a layer.

        Args:
            series: its readings so far; the latest has the metrics of `needs`.
            active: what this rule found in it before, as long as that lasts: the place for a second limit, so that an
                alert does not flicker.

        Returns:
            The finding; `None` if there is nothing, or nothing any more.
        """

    def sentence(self, finding: Finding, layer: str, facts: Mapping[str, Any]) -> str:
        """Build the sentence of a finding: the cause, where, and when as measured."""
        kind = "key head" if finding.of_keys and facts.get("num_key_heads") != facts.get("num_heads") else "head"
        count = facts.get("num_key_heads" if finding.of_keys else "num_heads")
        heads = heads_in_words(finding.groups or (finding.heads,), layer, kind, count)
        clause = finding.clause.replace("{heads}", heads).replace("{layer}", layer)
        return f"{clause}: {finding.evidence}" if finding.evidence else clause


def heads_in_words(groups: Sequence[Sequence[int]], layer: str, kind: str = "head", count: int | None = None) -> str:
    """Return heads of a layer in words, up to a verb in the plural; one empty group stands for all `count` of them.

    Example:
        >>> heads_in_words([(0, 1), (2, 3)], "blocks.0.attn", "key head", 8), heads_in_words([range(20)], "a")
        ('key heads 0 and 1 as well as 2 and 3 of blocks.0.attn', 'heads 0-19 of a')
    """
    if not any(groups) or (len(groups) == 1 and len(groups[0]) == count):
        many = {1: f"{kind} 0", 2: f"both {kind}s"}.get(count or 0, f"all {count} {kind}s" if count else f"all {kind}s")
        return f"{many} of {layer}"
    only_one = sum(map(len, groups)) == 1
    numbers = [listed(group if len(group) <= _MOST_LISTED else ranges(group)) for group in groups]
    return f"{kind}{'' if only_one else 's'} {' as well as '.join(numbers)} of {layer}"
