"""The rules on trainings with faults, and on healthy ones, against what the rules said when they were tuned.

`faults.json.gz` holds 94 small trainings: 65 with one fault each, of 48 kinds, and 29 healthy ones. Their readings and
alerts were recorded by the package of commit 1cb7c1a.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from hdi_callback.record import Alert, LayerRecord, Record
from hdi_callback.rules import Alerts
from hdi_callback.rules.series import STILL

FILE = Path(__file__).parent / "faults.json.gz"
MERGED = {"tied heads": "copied heads", "frozen heads": "frozen weights"}
"""Rules that are a sentence of another rule now."""
PART_OF = {"copied heads": "worst pair"}
GONE = {
    "merged scores", "logit growth", "one key", "sudden flattening", "sudden sharpening", "tokens alike", "weight jump",
}  # fmt: skip
SINCE = {"change with the loss"}
"""Rules that are younger."""
OTHERWISE = {"frozen weights", "worst pair", "copied heads"} | SINCE
"""Rules of which the findings are told by others now, or last longer: they find the same layers, not the same steps."""


@cache
def stored() -> list[dict[str, Any]]:
    return json.loads(gzip.decompress(FILE.read_bytes()))


def matrix(below_diagonal: list[float]) -> torch.Tensor:
    H = next(heads for heads in range(2, 99) if heads * (heads - 1) // 2 == len(below_diagonal))
    found = torch.eye(H, dtype=torch.float64)
    found[tuple(torch.tril_indices(H, H, -1))] = torch.tensor(below_diagonal, dtype=torch.float64)
    return torch.maximum(found, found.T)


def records(run: dict[str, Any]) -> Iterator[Record]:
    names = [one["name"] for one in run["facts"]]
    for step, loss, layers in run["records"]:
        read = {
            names[int(place)]: LayerRecord(values, heads, {name: matrix(one) for name, one in matrices.items()})
            for place, (values, heads, matrices) in layers.items()
        }
        # The movement of roles is not stored: that of their heads stands for it, but where no layer moves, as it is
        # not stored either whether they were to train.
        moves = any(any(one.heads.get("head_movement", ())) for one in read.values())
        for one in read.values():
            if moves and "head_movement" in one.heads:
                one.values["parameters_still"] = 0.0
                one.heads.update({name: one.heads["head_movement"] for name in STILL.values() if "movement" in name})
        yield Record(step, read, loss=loss)


def judge(run: dict[str, Any]) -> tuple[list[Alert], dict[tuple[int, str, str], tuple[int, ...]], set[Any]]:
    """Give the alerts, the heads of each finding at each reading, and the findings that began."""
    engine, alerts, findings, began = Alerts(layers=run["facts"]), [], {}, set()
    for record in records(run):
        before = set(engine._findings)
        alerts += engine.judge(record)
        for (layer, rule), (finding, _) in engine._findings.items():
            findings[record.step, layer, rule] = finding.heads
            if (layer, rule) not in before:
                began.add((record.step, layer, rule))
    return alerts, findings, began


def told(run: dict[str, Any]) -> list[tuple[tuple[int, str, str], tuple[int, ...]]]:
    """What the rules said when they were tuned."""
    names = [one["name"] for one in run["facts"]]
    return [
        ((step, names[place], MERGED.get(rule, rule)), tuple(heads))
        for step, place, rule, _, heads in run["alerts"]
        if rule not in GONE
    ]


def test_each_rule_finds_what_it_found_when_it_was_tuned_in_step_layer_and_heads():
    compared = 0
    for run in stored():
        _, findings, began = judge(run)
        expected = told(run)
        name = f"{run['kind']} on {run['base']}"
        same = {key: heads for key, heads in expected if key[2] not in OTHERWISE}
        assert {key: findings.get(key) for key in same} == same, name
        assert {key for key in began if key[2] not in OTHERWISE} <= same.keys(), name
        others = {(layer, PART_OF.get(rule, rule)) for _, layer, rule in began if rule in OTHERWISE - SINCE}
        assert others <= {(layer, PART_OF.get(rule, rule)) for (_, layer, rule), _ in expected}, name
        compared += len(expected)
    assert compared == 50


def test_no_healthy_run_raises_an_alarm():
    healthy = [run for run in stored() if run["is_healthy"]]
    assert len(healthy) == 29
    assert [run["base"] for run in healthy if any(alert.level != "notice" for alert in judge(run)[0])] == []


def test_what_was_reported_is_reported_or_a_notice_while_the_loss_stays_good():
    faulty = [run for run in stored() if not run["is_healthy"]]
    was = {place for place, run in enumerate(faulty) if any(level != "notice" for *_, level, _ in run["alerts"])}
    given = {place: judge(run)[0] for place, run in enumerate(faulty)}
    now = {place for place, alerts in given.items() if any(alert.level != "notice" for alert in alerts)}
    assert (len(was), len(was & now)) == (45, 32)
    silent = [faulty[place] for place in was - now if not given[place]]
    assert {rule for run in silent for *_, rule, _, _ in run["alerts"]} <= GONE
    assert {alert.rule for place in was - now for alert in given[place]} <= SINCE


def test_one_event_is_one_alert():
    alerts = findings = 0
    for run in stored():
        given, _, _ = judge(run)
        reported = [alert for alert in given if not alert.is_over and alert.rule not in SINCE]
        alerts += len(reported)
        findings += len(told(run))
        for alert in reported:
            same = [
                other
                for other in reported
                if other is not alert
                and other.status == alert.status == "new"
                and other.step == alert.step
                and other.where.keys() & alert.where.keys()
            ]
            apart = [
                {*alert.where[name]} & {*other.where[name]}
                for other in same
                for name in alert.where
                if name in other.where
            ]
            assert not any(apart), run["kind"]
    assert alerts < 0.8 * findings


def test_copied_heads_give_one_alert_that_says_what_to_look_at():
    (run,) = [run for run in stored() if run["kind"] == "two heads copied" and run["seed"] < 1000]
    (alert,) = judge(run)[0]
    assert alert.message == (
        "heads 0 and 1 of blocks.0.attention are nearly one head: alignment jumped from at most 0.05 to 1.00 between "
        "steps 40 and 45 (also: worst pair)"
    )
    assert (alert.rule, alert.level) == ("copied heads", "warning")
    assert alert.action.startswith("look at which parameters they share, at what wrote these weights since then")


@pytest.mark.parametrize("cut", [3, 9, 12])
def test_a_resumed_run_raises_what_an_unbroken_one_raises(cut):
    for run in [run for run in stored() if run["alerts"]][::4]:
        whole = judge(run)[0]
        first = Alerts(layers=run["facts"])
        begun = [alert for record in list(records(run))[:cut] for alert in first.judge(record)]
        second = Alerts(layers=run["facts"])
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert second.active == first.active
        begun += [alert for record in list(records(run))[cut:] for alert in second.judge(record)]
        assert begun == whole, run["kind"]


def test_the_messages_in_the_readme_are_those_of_recorded_trainings():
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^\| [^|]+ \| \*(.+)\* \|$", readme, flags=re.M)
    messages = {alert.message for run in stored() for alert in judge(run)[0]}
    assert len(quoted) == 7
    assert [quote for quote in quoted if not any(quote in message for message in messages)] == []
