"""Rules over the readings of a run -> `Alert`.

A rule sees the readings of one layer and says what it finds, or nothing. The engine here remembers which findings are
standing, so that each is told once when it begins, once more if it gets worse, and once when it is over. Everything a
rule needs is in the readings that it is given, so that a run can be judged while it goes on, after a resumption, or
from its history file (`replay`).
"""

from __future__ import annotations

import difflib
import math
import numbers
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, ClassVar, Literal, TypeVar, get_args

from torch import Tensor

from hdi_callback.arguments import one_of, shown, words
from hdi_callback.attention.names import printable
from hdi_callback.errors import MisconfigurationError
from hdi_callback.monitoring.notebook import alert_line
from hdi_callback.monitoring.origin import has_been_trained
from hdi_callback.monitoring.readings import Record
from hdi_callback.monitoring.warn_once import WarnOnce

Level = Literal["notice", "warning", "critical"]
LEVELS: tuple[Level, ...] = get_args(Level)

_READINGS_KEPT = 64
_MOVEMENT = "head_movement"
_Answer = TypeVar("_Answer")


def is_at_least(level: Level, least: Level) -> bool:
    """Tell whether a level is as serious as another, or more.

    Args:
        level: the level in question.
        least: what it is held against.

    Returns:
        True if it is.

    Example:
        >>> is_at_least("critical", "warning"), is_at_least("notice", "warning")
        (True, False)
    """
    return LEVELS.index(level) >= LEVELS.index(least)


@dataclass(frozen=True)
class Finding:
    """What a rule says of a layer at one reading.

    Attributes:
        what: what happened, as the middle of a sentence: ``heads 2 and 5 are nearly one head (alignment 0.93)``.
        level: ``"notice"``, ``"warning"`` or ``"critical"``.
        value: the number that was judged.
        threshold: the number that it was held against.
        metric: the metric that the number is of, if it is one.
        heads: the heads concerned; empty if it is the whole layer.
        groups: those of them that belong together, as heads that are nearly one; empty where they do not.
        since: first step at which it was so, if that was before this reading.
        certainty: how sure this is, as a part of a sentence.
        remedy: what to try, as a part of a sentence; one that begins with "no " says that there is none.
        is_from_start: True if the limit was reached at step 0 and at every reading since, as by weights that were
            loaded so.
    """

    what: str
    level: Level = "warning"
    value: float | None = None
    threshold: float | None = None
    metric: str | None = None
    heads: tuple[int, ...] = ()
    since: int | None = None
    certainty: str = ""
    remedy: str = ""
    is_from_start: bool = False
    groups: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Alert:
    """Something that happened to the heads of a layer, as a sentence and as data.

    Attributes:
        step: optimizer steps taken before the reading that showed it.
        layer: name of the layer.
        rule: name of the rule.
        level: ``"notice"``, ``"warning"`` or ``"critical"``.
        message: one sentence: when, where, what, since when, how sure, and what to try.
        finding: the same as data.
        is_resolved: True if this tells the end of an earlier alert.
    """

    step: int
    layer: str
    rule: str
    level: Level
    message: str
    finding: Finding
    is_resolved: bool = False

    def _repr_html_(self) -> str:
        return alert_line(self)

    def to_dict(self) -> dict[str, Any]:
        """Give the alert as plain data, as the history keeps it.

        Returns:
            What `from_dict` takes.
        """
        return asdict(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Alert:
        """Make an alert from plain data.

        Args:
            data: what `to_dict` gave.

        Returns:
            The alert.
        """
        names = Alert.__dataclass_fields__
        known = {name: value for name, value in data.items() if name in names}
        finding = {name: value for name, value in data["finding"].items() if name in Finding.__dataclass_fields__}
        finding["heads"] = tuple(finding.get("heads", ()))
        finding["groups"] = tuple(tuple(group) for group in finding.get("groups", ()))
        return Alert(**{**known, "finding": Finding(**finding)})


@dataclass(frozen=True)
class Row:
    """One reading of one layer, as a rule sees it.

    Attributes:
        step: optimizer steps taken before the reading.
        values: metric name -> number; what could not be measured is not there.
        arrays: see `LayerRecord`; readings before the latest keep the pairs alone, the first of a run all of them.
        matrices: see `LayerRecord`; of the latest reading alone, and empty where a history does not hold them.
        absent: why the index could not be measured, or an empty string.
    """

    step: int
    values: Mapping[str, float]
    arrays: Mapping[str, list[Any]] = field(default_factory=dict)
    absent: str = ""
    matrices: Mapping[str, Tensor] = field(default_factory=dict, compare=False)

    def per_head(self, name: str) -> list[float]:
        """Give an array with one number for each head.

        Args:
            name: of the array.

        Returns:
            The numbers, NaN where one is not finite; empty if it was not measured.
        """
        return [math.nan if value is None else float(value) for value in self.arrays.get(name, ())]


class Series:
    """The readings of one layer so far: the first, and the latest 64.

    Attributes:
        layer: name of the layer.
        facts: what is known of the layer: ``num_heads``, ``num_key_heads``, ``head_dim``, ``width``, ...
        siblings: number of layers that are watched.
        first: the first reading of the run.
        rows: the latest readings, in order.
        is_loaded: whether the weights had been trained before this run: as it was said, or told from them.
        do_others_move: whether at the latest reading the weights of some layer had moved since the one before.
        rewritten: heads whose weights an intervention has written: what they were before tells nothing of them.
    """

    def __init__(
        self, layer: str, facts: Mapping[str, Any], siblings: int, first: Row, *, is_loaded: bool = False
    ) -> None:
        self.layer, self.facts, self.siblings, self.is_loaded = layer, facts, siblings, is_loaded
        self.first = replace(first, matrices={})
        self.do_others_move = False
        self.rewritten: set[int] = set()
        self.rows: deque[Row] = deque(maxlen=_READINGS_KEPT)

    def append(self, row: Row) -> None:
        """Add a reading.

        Args:
            row: the reading.
        """
        if self.rows:
            last = self.rows[-1]
            pairs = {name: array for name, array in last.arrays.items() if name.endswith("_pair")}
            self.rows[-1] = replace(last, arrays=pairs, matrices={})
        self.rows.append(row)

    @property
    def latest(self) -> Row:
        """The reading to judge."""
        return self.rows[-1]

    def value(self, metric: str) -> float:
        """Give a metric at the latest reading.

        Args:
            metric: its name.

        Returns:
            The number.

        Raises:
            KeyError: if it was not measured; a rule that names it in `needs` is not asked then.
        """
        return self.latest.values[metric]

    def curve(self, metric: str) -> tuple[list[int], list[float]]:
        """Give a metric over the readings that have it.

        Args:
            metric: its name.

        Returns:
            Steps and numbers, in order, the latest last.
        """
        rows = [row for row in self.rows if metric in row.values]
        return [row.step for row in rows], [row.values[metric] for row in rows]

    def holds_from_start(self, is_so: Callable[[Row], bool]) -> bool:
        """Tell whether something is so in all readings, and the first of them is that of step 0.

        Args:
            is_so: asked of one reading.

        Returns:
            True if the run has never been otherwise, as far back as readings are kept.
        """
        return self.first.step == 0 and is_so(self.first) and all(is_so(row) for row in self.rows)

    def since(self, is_so: Callable[[Row], bool], metric: str | None = None) -> int:
        """Find since when something has been so without a break, as far back as readings are kept.

        Args:
            is_so: asked of one reading after the other, from the latest back.
            metric: readings that lack it break nothing, as the first movement after a resumption; by default all count.

        Returns:
            The step of the first reading of the streak; of the latest if it is not so there.
        """
        step = self.latest.step
        for row in reversed(self.rows):
            if metric is not None and metric not in row.values:
                continue
            if not is_so(row):
                break
            step = row.step
        return step


class Rule(ABC):
    """Says what it finds in the readings of a layer; a rule of your own is a small class.

    Attributes:
        name: what it looks for, in a few words; there is one alert for each layer and rule until it is over.
        needs: metrics without which it is not asked, and then neither begins nor ends an alert.
        layers: patterns of layer names that it is for; all by default.
        is_optional: whether a callback passes it over where what it needs is not measured, as it does with what
            `default_rules` makes; it refuses others before training.

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

    @abstractmethod
    def judge(self, series: Series, active: Alert | None) -> Finding | None:
        """Judge the latest reading of a layer.

        Args:
            series: its readings so far.
            active: the alert of this rule that stands for this layer, if there is one.

        Returns:
            What is found; `None` if there is nothing (or no longer anything) to tell.
        """


class Alerts:
    """Ask rules about every reading, and tell each finding once.

    Args:
        rules: the rules, or a function that gives the rules for a layer by its name.
        layers: what is known of each layer, as `AttentionLayer.facts` gives it.
        warn_once: contains the exceptions of rules; without it they are raised.
        loaded: whether the weights had been trained before this run: said, or ``"auto"`` to tell it from them.
    """

    def __init__(
        self,
        rules: Sequence[Rule] | Callable[[str], Sequence[Rule]],
        layers: Iterable[Mapping[str, Any]] = (),
        warn_once: WarnOnce | None = None,
        *,
        loaded: bool | Literal["auto"] = "auto",
    ) -> None:
        self._loaded = loaded
        self._facts: dict[str, Mapping[str, Any]] = {}
        self.learn(layers)
        self._rules_of: dict[str, list[Rule]] = {}
        self._rules = rules
        self._warn_once = warn_once
        self._series: dict[str, Series] = {}
        self._active: dict[tuple[str, str], Alert] = {}
        self._is_model_loaded = False

    def learn(self, layers: Iterable[Mapping[str, Any]]) -> None:
        """Take in what is known of layers.

        Args:
            layers: as `AttentionLayer.facts` gives it.
        """
        self._facts.update({str(facts["name"]): facts for facts in layers})

    @property
    def active(self) -> list[Alert]:
        """The alerts that stand, in the order in which they began."""
        return list(self._active.values())

    def judge(self, record: Record) -> list[Alert]:
        """Judge one reading.

        Args:
            record: its numbers; readings come in the order of steps.

        Returns:
            What is new: alerts that begin, get worse or are over.
        """
        news: list[Alert] = []
        self._learn_origins(record)
        does_move = any(
            move for row in record.layers.values() for move in row.arrays.get(_MOVEMENT, ()) if move and move > 0
        )
        for name, layer in record.layers.items():
            absent = record.absent.get(f"hdi/{name}", "")
            row = Row(record.step, layer.values, layer.arrays, absent, layer.matrices)
            series = self._series.get(name)
            if series is None:
                series = self._series[name] = self._begin(name, len(record.layers), row)
            series.append(row)
            series.do_others_move = does_move
            for rule in self._rules_for(name):
                alert = self._ask(rule, series)
                if alert is None:
                    continue
                if alert.is_resolved:
                    del self._active[name, rule.name]
                else:
                    self._active[name, rule.name] = alert
                news.append(alert)
        return news

    def rewrite(self, layer: str, heads: Iterable[int]) -> None:
        """Take note that an intervention has written the weights of heads.

        Args:
            layer: name of their layer.
            heads: their numbers.
        """
        if layer in self._series:
            self._series[layer].rewritten.update(heads)

    def state_dict(self) -> dict[str, Any]:
        """Give what a resumed run needs.

        Returns:
            Plain data.
        """
        return {
            "active": [alert.to_dict() for alert in self._active.values()],
            "rewritten": {name: sorted(series.rewritten) for name, series in self._series.items() if series.rewritten},
            "loaded": self._is_model_loaded,
            "series": {
                name: [_row_to_dict(row) for row in (series.first, *series.rows)]
                for name, series in self._series.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where a checkpoint left off; layers that are no longer watched are dropped.

        Args:
            state: what `state_dict` gave.
        """
        is_known = self._facts.__contains__ if self._facts else lambda name: True
        self._is_model_loaded = state.get("loaded", False)
        alerts = [Alert.from_dict(item) for item in state["active"]]
        self._active = {(alert.layer, alert.rule): alert for alert in alerts if is_known(alert.layer)}
        self._series = {}
        for name, rows in state["series"].items():
            if not is_known(name):
                continue
            first, *others = (Row(**row) for row in rows)
            series = self._begin(name, len(state["series"]), first)
            series.rows.extend(others)
            self._series[name] = series
        for name, heads in state.get("rewritten", {}).items():
            self.rewrite(name, heads)

    def _learn_origins(self, record: Record) -> None:
        """Take layers that look fresh for loaded where most of the model was loaded: single ones go unnoticed."""
        if self._loaded == "auto" and not self._series and record.layers:
            trained = [
                has_been_trained(layer.arrays, self._facts.get(name, {})) for name, layer in record.layers.items()
            ]
            self._is_model_loaded = sum(trained) > len(trained) / 2

    def _begin(self, name: str, siblings: int, first: Row) -> Series:
        facts = self._facts.get(name, {})
        is_loaded = self._loaded
        if is_loaded == "auto":
            is_loaded = self._is_model_loaded or has_been_trained(first.arrays, facts)
        return Series(name, facts, siblings, first, is_loaded=is_loaded)

    def _rules_for(self, name: str) -> list[Rule]:
        if name not in self._rules_of:
            rules = self._rules(name) if callable(self._rules) else self._rules
            chosen = [(rule, self._contain(rule, partial(_is_for, rule, name))) for rule in rules]
            self._rules_of[name] = [rule for rule, is_for in chosen if is_for]
        return self._rules_of[name]

    def _ask(self, rule: Rule, series: Series) -> Alert | None:
        """Ask a rule about the latest reading; whatever is wrong with its answer concerns this rule alone."""
        return self._contain(rule, partial(self._judge_by, rule, series))

    def _contain(self, rule: Rule, ask: Callable[[], _Answer]) -> _Answer | None:
        try:
            return ask()
        except Exception as error:
            if self._warn_once is None:
                raise
            self._warn_once.error(f"the alert rule {getattr(rule, 'name', rule)!r}", error)
            return None

    def _judge_by(self, rule: Rule, series: Series) -> Alert | None:
        """Give an alert if there is something to tell."""
        if not all(metric in series.latest.values for metric in rule.needs):
            return None
        active = self._active.get((series.layer, rule.name))
        finding = rule.judge(series, active)
        if finding is None:
            return None if active is None else _resolved(active, series.latest.step)
        finding = check_finding(finding, series)
        if active is not None and is_at_least(active.level, finding.level) and not _names_others(finding, active):
            return None
        if finding.since is None:
            finding = replace(finding, since=series.latest.step)
        step = series.latest.step
        return Alert(step, series.layer, rule.name, finding.level, _sentence(step, series.layer, finding), finding)


def heads_written(line: Mapping[str, Any]) -> list[int]:
    """Tell whose weights an intervention has written.

    Args:
        line: the action as plain data, as the history keeps it.

    Returns:
        Numbers of heads; none if it only would have done so, or refused.
    """
    heads = (line.get("facts") or {}).get("heads", ())
    if line.get("is_dry_run") or line.get("is_refusal") or not isinstance(heads, (list, tuple)):
        return []
    return [head for head in heads if type(head) is int]


def _names_others(finding: Finding, active: Alert) -> bool:
    """Tell whether a finding names heads, and others than those of the alert that stands."""
    before = active.finding
    return bool(finding.heads) and (set(finding.heads), set(finding.groups)) != (set(before.heads), set(before.groups))


def _is_for(rule: Rule, name: str) -> bool:
    return rule.layers is None or any(fnmatchcase(name, pattern) for pattern in rule.layers)


def _kinds_of(kind: Any) -> list[Any]:
    """Give every class below one, however deep."""
    return [one for child in kind.__subclasses__() for one in (child, *_kinds_of(child))]


def check_rule(rule: Any) -> Rule:
    """Check a rule of a user's before it is asked.

    Args:
        rule: what is to be a rule.

    Returns:
        It.

    Raises:
        MisconfigurationError: if it is none, or its name, `needs` or `layers` cannot work.
    """
    if isinstance(rule, type) and issubclass(rule, Rule):
        raise MisconfigurationError(
            f"`alerts` must hold rules, got the class {rule.__name__}: write {rule.__name__}()."
        )
    if not isinstance(rule, Rule):
        package = f"{__name__.partition('.')[0]}."  # the user's own are no rules of the package
        own = [
            one for one in _kinds_of(Rule)
            if one.__module__.startswith(package) and not one.__name__.startswith("_")
        ]  # fmt: skip
        known = {_plain(one.__name__): one.__name__ for one in own}
        known |= {_plain(one.name): one.__name__ for one in own if isinstance(one.__dict__.get("name"), str)}
        close = difflib.get_close_matches(_plain(rule), list(known), 1) if isinstance(rule, str) else []
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


def check_finding(finding: Any, series: Series) -> Finding:
    """Check what a rule has found, and bring its numbers into the types of plain data.

    Args:
        finding: what `Rule.judge` gave.
        series: the readings that it judged.

    Returns:
        The finding; a value or threshold that is not finite is left out.

    Raises:
        MisconfigurationError: if it is no finding, or a part of it cannot work; says which.
    """
    if not isinstance(finding, Finding):
        raise MisconfigurationError(f"`judge` must give a Finding or None, got {shown(finding)}.")
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


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


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


def _sentence(step: int, layer: str, finding: Finding) -> str:
    parts = [finding.what]
    if finding.since is not None and finding.since < step:
        parts.append(f"since step {finding.since}")
    if finding.certainty:
        parts.append(finding.certainty)
    if finding.remedy:
        parts.append(finding.remedy if finding.remedy.startswith("no ") else f"try {finding.remedy}")
    return printable(f"step {step}, {layer}: {'; '.join(parts)}")


def _resolved(alert: Alert, step: int) -> Alert:
    message = f"step {step}, {alert.layer}: {alert.rule}: resolved ({alert.level} of step {alert.step})"
    return replace(alert, step=step, message=message, is_resolved=True)


def _row_to_dict(row: Row) -> dict[str, Any]:
    return {"step": row.step, "values": dict(row.values), "arrays": dict(row.arrays), "absent": row.absent}
