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
    """What a rule has found in the latest reading of a layer.

    Attributes:
        clause: ``{heads}`` in it becomes the heads with their layer, ``{layer}`` the layer:
            ``"{heads} are nearly one head"``.
        evidence: the number that shows it and how it came about, as a further clause: ``"alignment rose from ..."``.
        heads: the heads concerned; empty for the whole layer.
        groups: groups of these heads that are alike; empty if there are none.
        value: the number that was judged.
        threshold: its limit.
        metric: the metric of the number.
        level: the level, where it is not that of the rule.
        since: first step at which it was so, if that was before this reading.
        of_keys: True if `heads` are key heads.
        action: what to do, where it is not what the rule says.
        code: arguments that help, where they are not those of the rule: ``"interventions=[QKClip(limit=31)]"``.
    """

    clause: str
    evidence: str = ""
    heads: tuple[int, ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()
    value: float | None = None
    threshold: float | None = None
    metric: str | None = None
    level: Level | None = None
    since: int | None = None
    of_keys: bool = False
    action: str | None = None
    code: str | None = None


class Rule(ABC):
    """Judge the readings of a layer.

    A rule of your own is a small class; pass ``alerts=[MyRule()]``, or ``alerts=[*default_rules(), MyRule()]``.

    Attributes:
        name: a few words.
        needs: metrics that a reading must have to be judged.
        reads: further metrics that it looks at where they are measured.
        limits: names of its limits in `LIMITS`, which `thresholds` sets; it is off where all of them are.
        level: how serious its alerts are.
        is_cause: whether its alerts are always events of their own.
        condition: when it raises an alert, in words.
        meaning: what the alert means: the docstring of its class.
        action: what to do about it, in prose.
        code: arguments of the callback that help.

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

    name: ClassVar[str]
    needs: ClassVar[Sequence[str]] = ()
    reads: ClassVar[Sequence[str]] = ()
    limits: ClassVar[Sequence[str]] = ()
    level: ClassVar[Level] = "warning"
    is_cause: ClassVar[bool] = False
    condition: ClassVar[str] = ""
    meaning: ClassVar[str] = ""
    action: ClassVar[str] = ""
    code: ClassVar[str] = ""

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
