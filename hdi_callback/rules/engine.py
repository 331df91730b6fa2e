"""`Alerts`: applies rules to every reading, and reports each event when it begins, gets worse and ends."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from hdi_callback.guard import describe, warn
from hdi_callback.record import LEVELS, Alert, Record, state_from_text, state_to_text
from hdi_callback.rules.attention_rules import ChangeWithLoss
from hdi_callback.rules.choice import check_rules, default_rules
from hdi_callback.rules.events import Event, Events, Key, Report, Sighting
from hdi_callback.rules.limits import Thresholds, check_thresholds, limits_of
from hdi_callback.rules.losses import SMOOTHED, Cause, Losses, Rise, Said
from hdi_callback.rules.rule import Finding, Rule, heads_in_words
from hdi_callback.rules.series import Row, Series, has_been_trained

_AFTER_CHANGE = "find what changed there: a checkpoint that is loaded, a callback, or code around or in the forward"
_RISE = (
    "look at the data, the labels, the embedding, the learning rate and the code before and after attention; where the "
    "loss was to rise, as the task became harder, nothing is wrong"
)


class Alerts:
    """Apply rules to every reading of a run: arguments are as in `Settings`, and descriptions of the layers."""

    def __init__(
        self,
        rules: Literal["default"] | Sequence[Rule] | None = "default",
        thresholds: Thresholds | None = None,
        layers: Iterable[Mapping[str, Any]] = (),
        pretrained: bool | Literal["auto"] = "auto",
    ) -> None:
        self._rules = default_rules() if rules == "default" else check_rules(() if rules is None else rules)
        self._thresholds = check_thresholds(thresholds)
        self._pretrained = pretrained
        self._facts: dict[str, Mapping[str, Any]] = {str(facts["name"]): facts for facts in layers}
        self._failed: set[str] = set()
        self._series: dict[str, Series] = {}
        self._findings: dict[Key, tuple[Finding, int]] = {}  # those that last, and since which step
        self._events = Events()
        self._losses = Losses()
        self._rise: tuple[Alert, int] | None = None  # of the loss, and at how many readings it lasted
        self._warned = -1  # step of the last warning of anything else

    @property
    def active(self) -> tuple[Alert, ...]:
        """The alerts that are active, in the order in which they began."""
        return (*self._events.active, *((self._rise[0],) if self._rise else ()))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the rules."""
        return tuple(rule.name for rule in self._rules)

    def judge(self, record: Record) -> tuple[Alert, ...]:
        """Return the alerts that begin, get worse or end at a reading; readings come in the order of steps.

        What a rule has found lasts until it is judged again: a reading without its metric ends nothing.
        """
        report = Report(record.step)
        rise = self._losses.judge(record)
        self._losses.note(record.loss)
        rows = {name: Row.from_record(record.step, layer, record.loss) for name, layer in record.layers.items()}
        pretrained = self._pretrained_layers({name: row for name, row in rows.items() if name not in self._series})
        for name, row in rows.items():
            if name not in self._series:
                self._series[name] = Series(name, self._facts.get(name, {}), row, is_pretrained=name in pretrained)
                self._series[name].limits = limits_of(name, self._thresholds)
            series = self._series[name]
            series.is_loss_good = self._losses.is_good
            series.bad_losses = self._losses.bad_in_a_row
            series.append(row)
            for rank, rule in enumerate(self._rules):
                if rule.name not in self._failed and rule.is_on(series.limits) and rule.is_measured(row):
                    try:
                        self._ask(rule, rank, series, report)
                    except Exception as error:
                        self._switch_off(rule.name, report)
                        warn(f"The rule {rule.name!r} failed ({describe(error)}) and is off. Training goes on.")
        if any(each.level for each in report.new) or any(each.level != "notice" for each in record.alerts):
            self._warned = record.step
        if any(each.level and each.rule.name == ChangeWithLoss.name for each in report.new):
            rise = self._losses.explain() or rise
        of_loss = self._judge_loss(record, rise)
        if self._is_cause_told():  # of what each layer has changed as well
            report.new = [sighting for sighting in report.new if sighting.rule.name != ChangeWithLoss.name]
        return (*of_loss, *self._events.update(report))

    def _is_cause_told(self) -> bool:
        """Return whether the loss is high after a change that was told with it."""
        return self._rise is not None and self._rise[0].level != "notice" and self._rise[0].action == _AFTER_CHANGE

    def _judge_loss(self, record: Record, rise: Said | None) -> tuple[Alert, ...]:
        """Return the alert of a change, or of a loss that rose and is not good again yet; it is of no layer alone."""
        name, (level, text, written, since) = ChangeWithLoss.name, rise or Said("notice", "")
        rule = next((rule for rule in self._rules if rule.name == name), None)
        where: dict[str, tuple[int, ...]] = {
            layer: () for layer in record.layers if rule is not None and rule.is_on(self._series[layer].limits)
        }
        is_explained = any(rule == name for _, rule in self._findings) or any(
            series.was_written for series in self._series.values()
        )
        is_known = is_explained or self._rise is not None
        is_told = self._is_cause_told() if level != "notice" else written is None and is_known
        if since is not None:  # that the loss stays high says nothing new to whom has been warned
            is_told = self._warned >= since or (self._rise is not None and self._rise[0].level != "notice")
        if text and written is None and not is_explained:
            text = f"{text}, and no layer changed with it"
        if text and where and not is_told:
            names = written or ()
            within = {layer: where[layer] for layer in where if any(each.startswith(f"{layer}.") for each in names)}
            alert = Alert(record.step, name, level, within or where, text, _RISE if written is None else _AFTER_CHANGE)
            self._rise = self._rise if written and level == "notice" else (alert, 0)
            return (alert,)
        if self._rise is None:
            return ()
        alert, count = self._rise
        self._rise = None if self._losses.is_good and count >= SMOOTHED else (alert, count + 1)
        message = f"the loss falls again, or is at its best, after step {alert.step}"
        return () if self._rise else (replace(alert, step=record.step, message=message, action="", status="resolved"),)

    def expect_change(self, layer: str, heads: Sequence[int], step: int, by: str = "") -> None:
        """Note that an intervention has written the weights of heads, so that their change raises no alert."""
        if layer in self._series:
            series = self._series[layer]
            series.writes.update(dict.fromkeys(heads, step))
            series.writer = f"{by or 'an intervention'} wrote {heads_in_words((heads,), layer)} at step {step}"

    def state_dict(self) -> str:
        """Return the state for a resumed run, as text."""
        return state_to_text((self._series, self._findings, self._events, self._losses, self._rise, self._warned))

    def load_state_dict(self, state: str) -> None:
        """Restore the result of `state_dict`."""
        classes = (Alert, Cause, Event, Events, Finding, Losses, Rise, Row, Series)
        restored = state_from_text(state, *classes)
        self._series, self._findings, self._events, self._losses, self._rise, self._warned = restored
        for name, series in self._series.items():
            series.facts, series.limits = self._facts.get(name, {}), limits_of(name, self._thresholds)

    def _pretrained_layers(self, rows: Mapping[str, Row]) -> set[str]:
        """Return which layers appear with pretrained weights; all, if most of the model is pretrained."""
        if self._pretrained != "auto":
            return {*rows} if self._pretrained else set()
        trained = {name for name, row in rows.items() if has_been_trained(row, self._facts.get(name, {}))}
        earlier = [series.is_pretrained for series in self._series.values()]
        return {*rows} if len(trained) + sum(earlier) > (len(rows) + len(earlier)) / 2 else trained

    def _ask(self, rule: Rule, rank: int, series: Series, report: Report) -> None:
        """Apply a rule to the latest reading of a layer."""
        key = series.layer, rule.name
        before, since = self._findings.get(key, (None, report.step))
        finding = rule.judge(series, before)
        if finding is None:
            if before is not None:
                del self._findings[key]
                report.over[key] = series.writer if series.was_written else ""
            return
        finding = _plain(finding, rule, series)
        if before is None and finding.since is not None:
            since = finding.since
        sentence = rule.sentence(finding, series.layer, series.facts)
        self._findings[key] = finding, since
        sighting = Sighting(series.layer, rule, rank, finding, sentence, since, series.facts)
        if before is None:
            report.new.append(sighting)
        elif _is_worse(finding, before, series.facts):
            report.worse.append(sighting)

    def _switch_off(self, rule: str, report: Report) -> None:
        """Judge by a rule no more; what it had found is over."""
        self._failed.add(rule)
        report.new = [sighting for sighting in report.new if sighting.rule.name != rule]
        report.worse = [sighting for sighting in report.worse if sighting.rule.name != rule]
        for key in [key for key in self._findings if key[1] == rule]:
            del self._findings[key]
            report.over[key] = f"the rule {rule!r} failed"


def _plain(finding: Any, rule: Rule, series: Series) -> Finding:
    """Return a finding with plain numbers, and with those of its metric and rule, where it has none of its own."""
    if not isinstance(finding, Finding):
        raise TypeError(f"`judge` must return a Finding or None, got a {type(finding).__name__}")
    metric = rule.needs[0] if finding.metric is None and rule.needs else finding.metric or None
    level = finding.level or rule.level
    if level not in LEVELS:
        raise ValueError(f"level must be one of {LEVELS}, got {level!r}")
    of_metric = series.latest.values.get(metric or "")
    limit = series.limits.get(rule.limits[0]) if rule.limits else None
    value, threshold = (
        float(number) if number is not None and math.isfinite(number) else None
        for number in (
            of_metric if finding.value is None else finding.value,
            limit if finding.threshold is None else finding.threshold,
        )
    )
    code = "" if finding.action else rule.code  # which belongs to the action of the rule
    return replace(
        finding,
        metric=metric,
        level=level,
        value=value,
        threshold=threshold,
        heads=tuple(map(int, finding.heads or sorted({head for group in finding.groups for head in group}))),
        action=finding.action or rule.action,
        code=code if finding.code is None else finding.code,
    )


def _is_worse(finding: Finding, before: Finding, facts: Mapping[str, Any]) -> bool:
    """Return whether a finding is more serious than it was, or names all heads, or twice as many."""
    count, heads = facts.get("num_key_heads" if finding.of_keys else "num_heads"), finding.heads
    is_wider = bool(before.heads) and not {*heads} <= {*before.heads}
    levels = [LEVELS.index(each.level or "warning") for each in (before, finding)]
    return levels[1] > levels[0] or (is_wider and (len(heads) == count or len(heads) >= 2 * len(before.heads)))
