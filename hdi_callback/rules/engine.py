"""`Alerts`: applies rules to every reading, and reports each event when it begins, gets worse and ends."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from hdi_callback.errors import MisconfigurationError
from hdi_callback.guard import describe, warn
from hdi_callback.monitor.metrics import METRICS
from hdi_callback.record import LEVELS, Alert, LayerRecord, Record
from hdi_callback.rules.choice import RULES, check_rules, default_rules
from hdi_callback.rules.events import Events, Key, Report, Sighting
from hdi_callback.rules.initialisation import has_been_trained
from hdi_callback.rules.limits import Thresholds, check_thresholds, limits_of
from hdi_callback.rules.losses import Losses
from hdi_callback.rules.rule import Finding, Rule, paste
from hdi_callback.rules.series import STILL, Row, Series
from hdi_callback.rules.words import heads_in_words

PATIENCE = 5
"""Readings in a row at which an active finding cannot be judged, after which it ends as "not measured"."""


@dataclass
class Open:
    """A finding that lasts: the latest one, since which step, and at how many readings it was not judged."""

    finding: Finding
    since: int
    missed: int = 0


class Alerts:
    """Apply rules to every reading of a run.

    One event is one alert: findings of several rules on the same heads at one reading are one, stated by the rule that
    comes closest to the cause, and so are findings of one rule on several layers. What follows within a few readings
    joins it, but for what is a cause itself, which is always an event of its own.

    Args:
        rules: ``"default"``, a list of rules, or `None` for none.
        thresholds: limits of the default rules by pattern of layer names:
            ``{"decoder.*": {"mean": 0.7, "pair": None}}``.
        layers: `AttentionLayer.facts` of each layer.
        pretrained: whether the weights were trained before this run; ``"auto"`` to tell it from them.
        door: what the code of alerts passes arguments to, one of `DOORS`.

    Raises:
        MisconfigurationError: if an argument cannot work.
    """

    def __init__(
        self,
        rules: Literal["default"] | Sequence[Rule] | None = "default",
        thresholds: Thresholds | None = None,
        layers: Iterable[Mapping[str, Any]] = (),
        pretrained: bool | Literal["auto"] = "auto",
        door: str = "HDICallback",
    ) -> None:
        self._own = None if rules == "default" else check_rules(() if rules is None else rules)
        self._thresholds = check_thresholds(thresholds)
        if self._thresholds and self._own is not None:
            raise MisconfigurationError(
                "`thresholds` are limits of the default rules; give those of a rule of your own to its class, as in "
                "WorstPair(pair=0.9)."
            )
        self._pretrained, self._door = pretrained, door
        self._facts: dict[str, Mapping[str, Any]] = {str(facts["name"]): facts for facts in layers}
        self._rules: dict[str, list[Rule]] = {}
        self._failed: set[str] = set()
        self._series: dict[str, Series] = {}
        self._open: dict[Key, Open] = {}
        self._events = Events()
        self._losses = Losses()

    @property
    def active(self) -> tuple[Alert, ...]:
        """The alerts that are active, in the order in which they began."""
        return self._events.active

    @property
    def findings(self) -> dict[Key, Finding]:
        """What the rules find in each layer now, before it is merged to alerts: (layer, rule) -> finding."""
        return {key: held.finding for key, held in self._open.items()}

    def judge(self, record: Record) -> tuple[Alert, ...]:
        """Return the alerts that begin, get worse or end at a reading; readings come in the order of steps."""
        report = Report(record.step)
        self._losses.note(record.loss)
        others_move = any(map(_moves, record.layers.values()))
        pretrained = self._pretrained_layers(record)
        for name, layer in record.layers.items():
            row = Row.from_record(record.step, layer)
            if name not in self._series:
                self._series[name] = Series(name, self._facts.get(name, {}), row, is_pretrained=name in pretrained)
            series = self._series[name]
            series.others_move, series.has_loss_risen = others_move, self._losses.has_risen
            series.append(row)
            for rank, rule in enumerate(self._rules_of(name)):
                self._ask(rule, rank, series, report, layer)
        for key in [key for key in self._open if key not in report.judged]:
            self._miss(key, report, "it is not watched any more" if key[0] not in record.layers else "its rule is gone")
        return self._events.update(report)

    def expect_change(self, layer: str, heads: Sequence[int], step: int, by: str = "") -> None:
        """Note that an intervention has written the weights of heads, so that their change raises no alert."""
        if layer in self._series:
            series = self._series[layer]
            series.written.update(dict.fromkeys(heads, step))
            series.written_by = f"{by or 'an intervention'} wrote {heads_in_words((heads,), layer)} at step {step}"

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a resumed run, as plain data."""
        return {
            "series": {name: series.state_dict() for name, series in self._series.items()},
            "open": [[*key, asdict(held.finding), held.since, held.missed] for key, held in self._open.items()],
            "events": self._events.state_dict(),
            "losses": self._losses.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self._series = {
            name: Series.from_state(name, self._facts.get(name, {}), past) for name, past in state["series"].items()
        }
        self._open = {
            (layer, rule): Open(Finding.from_dict(finding), since, missed)
            for layer, rule, finding, since, missed in state["open"]
        }
        self._events.load_state_dict(state["events"])
        self._losses.load_state_dict(state["losses"])

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the rules."""
        return tuple(rule.name for rule in (RULES if self._own is None else self._own))

    def _rules_of(self, layer: str) -> list[Rule]:
        if layer not in self._rules:
            own = self._own
            self._rules[layer] = default_rules(limits_of(layer, self._thresholds)) if own is None else list(own)
        return self._rules[layer]

    def _pretrained_layers(self, record: Record) -> set[str]:
        """Layers that appear at this reading with pretrained weights; all, if most of the model is pretrained."""
        if self._pretrained != "auto":
            return set(record.layers) if self._pretrained else set()
        new = {
            name: Row.from_record(record.step, layer)
            for name, layer in record.layers.items()
            if name not in self._series
        }
        trained = {name for name, row in new.items() if has_been_trained(row, self._facts.get(name, {}))}
        earlier = [series.is_pretrained for series in self._series.values()]
        return set(new) if len(trained) + sum(earlier) > (len(new) + len(earlier)) / 2 else trained

    def _ask(self, rule: Rule, rank: int, series: Series, report: Report, layer: LayerRecord) -> None:
        """Apply a rule to the latest reading of a layer; one that fails is switched off, with a warning."""
        key = series.layer, rule.name
        before = self._open.get(key)
        if rule.name in self._failed:
            return
        report.judged.add(key)
        try:
            if not rule.is_measured(series.latest):
                missing = next((metric for metric in rule.needs if metric not in series.latest.values), "")
                source = METRICS[missing].source if missing in METRICS else ""
                self._miss(key, report, layer.absent.get(missing) or layer.absent.get(source, ""))
                return
            finding = rule.judge(series, None if before is None else before.finding)
            checked = None if finding is None else _plain(finding, rule, is_loss_good=self._losses.is_good)
            sentence = "" if checked is None else rule.sentence(checked, series.layer, series.facts)
        except Exception as error:
            self._failed.add(rule.name)
            warn(f"The rule {rule.name!r} failed ({describe(error)}) and is switched off. Training goes on.")
            return
        if checked is None:
            if before is not None:
                del self._open[key]
                report.ended[key] = ""
                report.written[key] = series.written_by if series.was_written else ""
            return
        since = report.step if checked.since is None else checked.since
        if before is not None:
            since = before.since
        self._open[key] = Open(checked, since)
        action, code = checked.action or rule.action, self._code(checked, rule)
        told = Sighting(*key, rank, checked, sentence, action, code, since, series.facts, rule.is_cause)
        if before is None:
            report.begun.append(told)
        elif _is_worse(checked, before.finding, series.facts):
            report.risen.append(told)

    def _code(self, finding: Finding, rule: Rule) -> str:
        """Return the lines to paste: those of the finding; else of the rule, unless another action is to be taken."""
        of_rule = rule.code if finding.action is None else ""
        return paste(of_rule if finding.code is None else finding.code, self._door)

    def _miss(self, key: Key, report: Report, why: str) -> None:
        """Count a reading at which an active finding cannot be judged; end it after too many."""
        if key not in self._open:
            return
        self._open[key].missed += 1
        if self._open[key].missed >= PATIENCE:
            del self._open[key]
            report.ended[key] = why or "its metric is not measured any more"


def _moves(layer: LayerRecord) -> bool:
    """Whether something of a layer, or outside all layers, has moved since the reading before."""
    moves = [move for name in STILL.values() if name != "parameter_still" for move in layer.heads.get(name, ())]
    still = layer.heads.get("parameter_still", ())
    return any((move or 0) > 0 for move in moves) or 0 in still or layer.values.get("others_move", 0) > 0


def _plain(finding: Any, rule: Rule, *, is_loss_good: bool) -> Finding:
    """Return a checked finding with plain numbers, as a notice where the loss says that nothing is wrong."""
    if not isinstance(finding, Finding):
        raise TypeError(f"`judge` must return a Finding or None, got a {type(finding).__name__}")
    level = rule.level if finding.level is None else finding.level
    if level not in LEVELS:
        raise ValueError(f"level must be one of {LEVELS}, got {level!r}")
    level = "notice" if rule.heeds_loss and is_loss_good else level
    value, threshold = (
        float(number) if number is not None and math.isfinite(number) else None
        for number in (finding.value, finding.threshold)
    )
    heads = tuple(int(head) for head in finding.heads)
    groups = tuple(tuple(int(head) for head in group) for group in finding.groups)
    return replace(finding, level=level, value=value, threshold=threshold, heads=heads, groups=groups)


def _is_worse(finding: Finding, before: Finding, facts: Mapping[str, Any]) -> bool:
    """Whether a finding is more serious than it was, or names all heads, or twice as many."""
    if LEVELS.index(finding.level or "warning") > LEVELS.index(before.level or "warning"):
        return True
    if not before.heads or set(finding.heads) <= set(before.heads) != set():
        return False
    count = facts.get("num_key_heads" if finding.of_keys else "num_heads")
    return len(finding.heads) in {0, count} or len(finding.heads) >= 2 * len(before.heads)
