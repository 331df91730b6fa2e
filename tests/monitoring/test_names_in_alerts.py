"""An alert is not raised again because a head, or a pair of heads, hovers at a limit."""

from __future__ import annotations

import pytest
import torch

from hdi_callback.monitoring.alerts import Alerts
from hdi_callback.monitoring.readings import LayerRecord, Record
from hdi_callback.monitoring.rules import (
    DeadHeads,
    FallingRank,
    LogitGrowth,
    MergedScores,
    NarrowingHeads,
    NoContribution,
    VanishingWeights,
    WorstPair,
)

HEADS, WIDTH = 4, 64


def news_of(rule, readings):
    """The alerts of a layer of fresh heads of width 16, from arrays with one number a head, or values, or matrices."""
    facts = {"name": "attn", "num_heads": HEADS, "num_key_heads": HEADS, "head_dim": 16, "width": WIDTH}
    alerts = Alerts([rule], [facts], pretrained=False)
    return [
        (alert.step, alert.finding.groups or alert.finding.heads, alert.is_resolved)
        for step, (values, arrays, matrices) in enumerate(readings)
        for alert in alerts.judge(Record(step, {"attn": LayerRecord(values, arrays, matrices)}))
    ]


def of_heads(names, low, high, *, first=(1.0,) * HEADS, extreme=0.001, **others):
    """Head 0 goes to an extreme and stays; head 1 hovers between two numbers, and stays beyond the first in the end."""
    rows = [first, *[(extreme, one, *first[2:]) for one in (high, low, high, low, high)]]
    return [
        ({metric: min(row) for metric in names.values()}, {array: list(row) for array in names} | others, {})
        for row in rows
    ]


SHAPE = {"effective_rank": [8.0] * HEADS, "rank": [16] * HEADS, "head_norm": [4.0] * HEADS}
FLATNESS = {"flatness": "hdi_min_flatness", "ranks": "hdi_min_rank"}
HOVERING = {
    "vanishing weights": (VanishingWeights(), of_heads({"circuit_qk_norm": "circuit_qk_norm"}, 0.19, 0.21)),
    "dead heads": (DeadHeads(), of_heads({"head_norm": "hdi_dead_heads"}, 0.019, 0.021)),
    "no contribution": (
        NoContribution(), of_heads({"head_contribution": "head_contribution_min"}, 0.0019, 0.0021, extreme=1e-5)
    ),
    "falling rank": (FallingRank(), of_heads(FLATNESS, 0.09, 0.11, **SHAPE)),
    "narrowing heads": (NarrowingHeads(), of_heads(FLATNESS, 0.62, 0.65, **SHAPE)),
    "logit growth": (
        LogitGrowth(),
        [
            ({"attention_logit": max(row)}, {"attention_logit": list(row)}, {})
            for row in [(5.0, 5.0), *[(90.0, one) for one in (29.0, 31.0, 29.0, 31.0, 29.0)]]
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOVERING)
def test_a_head_that_hovers_at_the_hysteresis_limit_does_not_join_an_alert(name):
    rule, readings = HOVERING[name]
    assert news_of(rule, readings) == [(1, (0,), False)]


def test_a_head_in_an_alert_stays_until_it_is_beyond_the_hysteresis():
    joins = [(1.0, 1.0), (0.05, 0.5), (0.05, 0.09), (0.05, 0.11), (0.05, 0.09), (0.05, 0.19), (0.05, 0.21)]
    readings = [({"circuit_qk_norm": min(row)}, {"circuit_qk_norm": list(row)}, {}) for row in joins]
    assert news_of(VanishingWeights(), readings) == [(1, (0,), False), (2, (0, 1), False), (6, (0,), False)]


def links(inner: float, between: float) -> torch.Tensor:
    """Heads 0 and 1 are alike, and so are heads 2 and 3; `between` is how alike heads 1 and 2 are."""
    matrix = torch.eye(HEADS)
    for one, other, value in ((0, 1, inner), (2, 3, inner), (1, 2, between)):
        matrix[one, other] = matrix[other, one] = value
    return matrix


HOVER = [0.0, 0.0, 0.0, 0.7, 0.86, 0.7, 0.86, 0.7]


def test_two_groups_are_not_merged_by_a_pair_that_hovers_below_the_limit():
    fresh, later = links(0.0, 0.0), [links(0.95, between) for between in HOVER]
    scores = [({"circuit_qk_worst": float(m[0, 1])}, {}, {"circuit_qk": m}) for m in [fresh, *later]]
    assert news_of(MergedScores(), scores) == [(1, ((0, 1), (2, 3)), False)]
    chance = 16 / WIDTH
    aligned = [
        (
            {"hdi_worst_alignment": float(m[0, 1]), "hdi_energy_worst_alignment": 0.0, "hdi_alignment": 0.2},
            {"rank": [16] * HEADS, "worst_alignment_pair": [0, 1]},
            {"overlap": chance + (1 - chance) * (m - 0.1)},
        )
        for m in [fresh, *later]
    ]
    assert news_of(WorstPair(), aligned) == [(1, ((0, 1), (2, 3)), False)]


def test_a_pair_above_the_limit_merges_two_groups_until_it_is_beyond_the_hysteresis():
    between = [0.0, 0.91, 0.85, 0.91, 0.85, 0.7]
    scores = [({"circuit_qk_worst": 0.95}, {}, {"circuit_qk": links(0.95, value)}) for value in between]
    assert news_of(MergedScores(), scores) == [
        (0, ((0, 1), (2, 3)), False), (1, ((0, 1, 2, 3),), False), (5, ((0, 1), (2, 3)), False)
    ]  # fmt: skip


def test_a_head_whose_scores_hover_at_the_limit_is_reported_once():
    rows = [(5.0, 5.0), (90.0, 55.0), (90.0, 45.0), (90.0, 55.0), (90.0, 45.0)]
    readings = [({"attention_logit": max(row)}, {"attention_logit": list(row)}, {}) for row in rows]
    assert news_of(LogitGrowth(), readings) == [(1, (0, 1), False)]
