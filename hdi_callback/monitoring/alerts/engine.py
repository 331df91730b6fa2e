"""`Alerts`: applies rules to every reading, and reports each finding when it begins, gets worse and is resolved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

from hdi_callback.attention import ROLES
from hdi_callback.attention.names import matches
from hdi_callback.deprecation import renamed_argument
from hdi_callback.monitoring.alerts.alert import Alert, Finding, alert_of, is_at_least, loss_of, resolution_of
from hdi_callback.monitoring.alerts.rule import Rule, check_finding
from hdi_callback.monitoring.alerts.series import Row, Series
from hdi_callback.monitoring.metrics import METRICS
from hdi_callback.monitoring.origin import has_been_trained
from hdi_callback.monitoring.readings import Record
from hdi_callback.monitoring.warn_once import WarnOnce

_MOVEMENT = "head_movement"
_PATIENCE = 5
"""Readings in a row that lack what an active alert is judged by, for a known reason, after which it ends: forwards of a
single reading may lack a layer."""
_UNEXPLAINED = 8
"""Readings without a reason that count as one with a reason: wide layers are measured once in so many."""
_Answer = TypeVar("_Answer")


class Alerts:
    """Apply rules to every reading, and report each finding once.

    Args:
        rules: the rules, or a function that gives the rules for a layer by its name.
        layers: `AttentionLayer.facts` of each layer.
        warn_once: warns once of exceptions of each rule; without it they are raised.
        pretrained: whether the weights had been trained before this run; ``"auto"`` to infer it from them.
        loaded: deprecated, an earlier name of `pretrained`.
    """

    def __init__(
        self,
        rules: Sequence[Rule] | Callable[[str], Sequence[Rule]],
        layers: Iterable[Mapping[str, Any]] = (),
        warn_once: WarnOnce | None = None,
        *,
        pretrained: bool | Literal["auto"] = "auto",
        loaded: bool | Literal["auto"] | None = None,
    ) -> None:
        self._pretrained = renamed_argument("loaded", "pretrained", loaded, pretrained)
        self._facts: dict[str, Mapping[str, Any]] = {}
        self.learn(layers)
        self._rules_of: dict[str, list[Rule]] = {}
        self._rules = rules
        self._warn_once = warn_once
        self._series: dict[str, Series] = {}
        self._active: dict[tuple[str, str], Alert] = {}
        self._unjudged: dict[tuple[str, str], int] = {}  # see `_end_after_patience`
        self._is_model_pretrained = False

    def learn(self, layers: Iterable[Mapping[str, Any]]) -> None:
        """Add facts about layers.

        Args:
            layers: `AttentionLayer.facts` of each.
        """
        self._facts.update({str(facts["name"]): facts for facts in layers})

    @property
    def active(self) -> list[Alert]:
        """The active alerts, in the order in which they began."""
        return list(self._active.values())

    def judge(self, record: Record) -> list[Alert]:
        """Judge one reading.

        Args:
            record: its numbers; readings come in the order of steps.

        Returns:
            Alerts that begin, get worse or are resolved at this reading.
        """
        reported: list[Alert] = []
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
            trains = None if record.frozen is None else name not in record.frozen
            series.append(row, do_others_move=does_move, trains=trains)
            for rule in self._rules_for(name):
                alert = self._ask(rule, series, record)
                if alert is None:
                    continue
                if alert.is_resolved:
                    del self._active[name, rule.name]
                else:
                    self._active[name, rule.name] = alert
                reported.append(alert)
            reported += self._end_what_is_not_judged(name, record.step)
        for alert in [alert for alert in self._active.values() if alert.layer not in record.layers]:
            ended = self._end_after_patience(alert, record.step, "not measured", "the layer is not watched any more")
            if ended is not None:
                del self._active[alert.layer, alert.rule]
                reported.append(ended)
        self._unjudged = {key: count for key, count in self._unjudged.items() if key in self._active}
        return reported

    def rewrite(self, layer: str, heads: Iterable[int]) -> None:
        """Note that an intervention has written the weights of heads.

        Args:
            layer: name of their layer.
            heads: their numbers.
        """
        if layer in self._series:
            self._series[layer].rewritten.update(heads)

    def state_dict(self) -> dict[str, Any]:
        """State for a resumed run.

        Returns:
            Plain data.
        """
        return {
            "active": [alert.to_dict() for alert in self._active.values()],
            "rewritten": {name: sorted(series.rewritten) for name, series in self._series.items() if series.rewritten},
            "unjudged": [[layer, rule, count] for (layer, rule), count in self._unjudged.items()],
            "loaded": self._is_model_pretrained,
            "series": {
                name: [_row_to_dict(row) for row in (series.first, *series.rows)]
                for name, series in self._series.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint; alerts of layers that are not watched any more end at the next reading.

        Args:
            state: the result of `state_dict`.
        """
        is_known = self._facts.__contains__ if self._facts else lambda name: True
        self._is_model_pretrained = state.get("loaded", False)
        alerts = [Alert.from_dict(item) for item in state["active"]]
        self._active = {(alert.layer, alert.rule): alert for alert in alerts}
        self._unjudged = {(layer, rule): count for layer, rule, count in state.get("unjudged", ())}
        self._unjudged |= {key: _PATIENCE * _UNEXPLAINED for key in self._active if not is_known(key[0])}
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
        """Count layers that appear fresh as pretrained if most of the model is: the test misses single layers."""
        if self._pretrained == "auto" and not self._series and record.layers:
            trained = [
                has_been_trained(layer.arrays, self._facts.get(name, {})) for name, layer in record.layers.items()
            ]
            self._is_model_pretrained = sum(trained) > len(trained) / 2

    def _begin(self, name: str, siblings: int, first: Row) -> Series:
        facts = self._facts.get(name, {})
        is_pretrained = self._pretrained
        if is_pretrained == "auto":
            is_pretrained = self._is_model_pretrained or has_been_trained(first.arrays, facts)
        # Each rank of a pipeline has its own first layer.
        is_first = bool(facts.get("is_first")) and name == next(iter(self._facts))
        return Series(name, facts, siblings, first, is_pretrained=is_pretrained, is_first=is_first)

    def _rules_for(self, name: str) -> list[Rule]:
        if name not in self._rules_of:
            rules = self._rules(name) if callable(self._rules) else self._rules
            chosen = [(rule, self._contain(rule, partial(_is_for, rule, name))) for rule in rules]
            self._rules_of[name] = [rule for rule, is_for in chosen if is_for]
        return self._rules_of[name]

    def _end_what_is_not_judged(self, name: str, step: int) -> list[Alert]:
        """End active alerts of rules that no longer judge a layer, as after a resumption with other rules."""
        judging = {rule.name for rule in self._rules_for(name)}
        left = [alert for (layer, rule), alert in self._active.items() if layer == name and rule not in judging]
        for alert in left:
            del self._active[alert.layer, alert.rule]
        return [loss_of(alert, step=step, ending="not judged", why="its rule is not used any more") for alert in left]

    def _ask(self, rule: Rule, series: Series, record: Record) -> Alert | None:
        """Apply a rule to the latest reading; a failure or a wrong result affects this rule alone."""
        active = self._active.get((series.layer, rule.name))
        is_measured = self._contain(rule, partial(rule.is_measured, series, active))
        if is_measured is False:
            why = _why_not_measured(rule, series.layer, record)
            return None if active is None else self._end_after_patience(active, record.step, "not measured", why)
        judged = self._contain(rule, lambda: (self._judge_by(rule, series, active),)) if is_measured else None
        if judged is not None:
            self._unjudged.pop((series.layer, rule.name), None)
            return judged[0]
        why = "its rule has failed"
        return None if active is None else self._end_after_patience(active, record.step, "not judged", why)

    def _end_after_patience(self, alert: Alert, step: int, ending: str, why: str) -> Alert | None:
        """End an alert that nothing has judged at a number of readings in a row: it would stay for ever."""
        key = alert.layer, alert.rule
        count = self._unjudged[key] = self._unjudged.get(key, 0) + (_UNEXPLAINED if why else 1)
        return loss_of(alert, step=step, ending=ending, why=why) if count >= _PATIENCE * _UNEXPLAINED else None

    def _contain(self, rule: Rule, ask: Callable[[], _Answer]) -> _Answer | None:
        try:
            return ask()
        except Exception as error:
            if self._warn_once is None:
                raise
            self._warn_once.error(f"the alert rule {getattr(rule, 'name', rule)!r}", error)
            return None

    def _judge_by(self, rule: Rule, series: Series, active: Alert | None) -> Alert | None:
        """The alert of a rule, if there is something to report."""
        finding = rule.judge(series, active)
        if finding is None:
            return None if active is None else resolution_of(active, step=series.latest.step)
        finding = check_finding(finding, series)
        if active is not None and is_at_least(active.level, finding.level) and not _names_others(finding, active):
            return None
        if finding.since is None:
            finding = replace(finding, since=series.latest.step)
        return alert_of(finding, step=series.latest.step, layer=series.layer, rule=rule.name)


def heads_written(line: Mapping[str, Any]) -> list[int]:
    """The heads whose weights an intervention has written.

    Args:
        line: the action as plain data, as the history keeps it.

    Returns:
        Numbers of heads; none for a dry run or a refusal.
    """
    heads = (line.get("facts") or {}).get("heads", ())
    if line.get("is_dry_run") or line.get("is_refusal") or not isinstance(heads, (list, tuple)):
        return []
    return [head for head in heads if type(head) is int]


def _names_others(finding: Finding, active: Alert) -> bool:
    """Return whether a finding names other heads than the active alert."""
    before = active.finding
    return bool(finding.heads) and (set(finding.heads), set(finding.groups)) != (set(before.heads), set(before.groups))


def _why_not_measured(rule: Rule, layer: str, record: Record) -> str:
    """The reason why a reading lacks what a rule judges; empty if it has none, as where other layers had their turn."""
    missing = [name for name in rule.needs if name not in record.layers[layer].values] or ["hdi"]
    sources = [METRICS[name].source for name in missing if name in METRICS]
    of_keys = [f"hdi/{layer}", layer] if "key" in sources else [layer] if {*sources} & {*ROLES} else []
    keys = [f"{name}/{layer}" for name in (*missing, *sources)] + of_keys
    return next((why for key in keys if (why := record.absent.get(key))), "")


def _is_for(rule: Rule, name: str) -> bool:
    return matches(name, rule.layers)


def _row_to_dict(row: Row) -> dict[str, Any]:
    return {"step": row.step, "values": dict(row.values), "arrays": dict(row.arrays), "absent": row.absent}
