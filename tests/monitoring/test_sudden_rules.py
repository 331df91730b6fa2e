"""Attention that sharpens or flattens within a few readings, and heads that narrow: on curves and on models."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from hdi_callback.errors import MisconfigurationError
from hdi_callback.monitoring.alerts import Alerts
from hdi_callback.monitoring.monitor import HeadDiversityMonitor
from hdi_callback.monitoring.readings import LayerRecord, Record
from hdi_callback.monitoring.rules import (
    AttentionSink,
    DeadHeads,
    FallingRank,
    NarrowingHeads,
    SharpFromStart,
    SuddenFlattening,
    SuddenSharpening,
    Thresholds,
    default_rules,
)


def judged(rule, entropies, logits=None, *, rewritten_at=None, pretrained=False):
    alerts = Alerts([rule], [{"name": "attn", "num_heads": 2}], pretrained=pretrained)
    news = []
    for place, entropy in enumerate(entropies):
        if place == rewritten_at:
            alerts.rewrite("attn", [0])
        values = {"attention_entropy": entropy} | ({} if logits is None else {"attention_logit": logits[place]})
        news += alerts.judge(Record(10 * place, {"attn": LayerRecord(values)}))
    return news


CALM = [0.9, 0.91, 0.9, 0.89, 0.9, 0.88, 0.9, 0.89]


def test_attention_that_sharpens_within_eight_readings_is_reported_once_and_resolved_halfway_back():
    falls = [0.8, 0.6, 0.45, 0.35, 0.28, 0.24, 0.21, 0.21]
    (alert,) = judged(SuddenSharpening(), [*CALM, *falls], [4.0] * 8 + [9.0] * 8)
    assert alert.step == 140, "the first reading at a quarter of the least before"
    assert alert.finding.since == 60
    assert "0.21" in alert.message
    assert "0.90 at step 60" in alert.message
    assert "largest score 9" in alert.message
    back = judged(SuddenSharpening(), [*CALM, *falls, 0.3, 0.5])
    assert [(one.step, one.is_resolved) for one in back] == [(140, False), (170, True)]


def test_attention_that_sharpens_slowly_or_early_or_as_fast_as_before_is_not_reported():
    assert judged(SuddenSharpening(), [0.9 * 0.88**place for place in range(40)]) == [], "as training does"
    assert judged(SuddenSharpening(), [0.9] * 5 + [0.1] * 8) == [], "too early to know the run"
    assert judged(SuddenSharpening(), [0.99, 0.9, 0.6, 0.5, 0.45, 0.44, 0.44, 0.44, 0.1, 0.1]) == [], "as far before"
    assert judged(SuddenSharpening(), [*CALM, *[0.1] * 8], rewritten_at=8) == [], "an intervention wrote the heads"


FLAT = [0.985, 0.984, 0.985, 0.984]


def test_attention_that_flattens_suddenly_for_good_is_reported_and_resolved_halfway_back():
    (alert,) = judged(SuddenFlattening(), [*CALM, *FLAT])
    assert (alert.step, alert.finding.since) == (110, 80)
    assert "0.9840, 0.8900 at step 70" in alert.message
    back = judged(SuddenFlattening(), [*CALM, *FLAT, 0.97, 0.93])
    assert [(one.step, one.is_resolved) for one in back] == [(110, False), (130, True)]


def test_attention_that_flattens_slowly_or_for_one_batch_or_by_little_is_not_reported():
    assert judged(SuddenFlattening(), [*CALM, 0.985, 0.985, 0.9, 0.985, 0.985]) == [], "one batch was different"
    slow = [1 - 0.1 * 0.85**place for place in range(40)]
    assert judged(SuddenFlattening(), slow) == [], "it goes on for many readings"
    assert judged(SuddenFlattening(), [0.99990] * 8 + [0.99999] * 4) == [], "uniform before, for practical purposes"
    assert judged(SuddenFlattening(), [*CALM, *FLAT], rewritten_at=8) == [], "an intervention wrote the heads"


def test_large_scores_before_anything_was_learned_are_reported_though_attention_is_flat():
    (alert,) = judged(SharpFromStart(), [0.62, 0.62], [15.4, 15.0])
    assert (alert.step, alert.finding.metric, alert.finding.value) == (0, "attention_logit", 15.4)
    assert "the limit is 12.0" in alert.message
    assert judged(SharpFromStart(), [0.62], [15.4], pretrained=True) == [], "pretrained weights may be as sharp"
    assert judged(SharpFromStart(), [0.9, 0.9], [8.2, 30.0]) == [], "asked at step 0 alone"
    over = judged(SharpFromStart(), [0.62, 0.7, 0.8], [15.4, 10.0, 9.0])
    assert [(one.step, one.is_resolved) for one in over] == [(0, False), (20, True)]


class MultiQuery(nn.Module):
    def __init__(self, width=32, heads=4):
        super().__init__()
        self.num_heads, self.num_key_value_heads = heads, 1
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(width, width // heads, bias=False) for _ in range(2))
        self.out_proj = nn.Linear(width, width, bias=False)

    def forward(self, x):
        q, k, v = (one(x).unflatten(-1, (-1, 8)).transpose(1, 2) for one in (self.q_proj, self.k_proj, self.v_proj))
        heads = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.out_proj(heads.transpose(1, 2).flatten(2))


def narrowed(change, readings, *, begin=None, rule=None):
    """The alerts of a multi-query layer whose key weights are changed before each reading from the third on."""
    torch.manual_seed(0)
    model = nn.Sequential(MultiQuery())
    if begin is not None:
        model[0].k_proj.weight.data.mul_(begin)
    with HeadDiversityMonitor(model, metrics=["hdi"]) as monitor, torch.no_grad():
        alerts = Alerts([rule or NarrowingHeads()], [layer.facts() for layer in monitor.layers], pretrained=False)
        news = []
        for place in range(readings):
            if place > 2:
                change(model[0].k_proj.weight, place)
            news += alerts.judge(monitor.measure(10 * place).record())
    return news


def lose_directions(weight, place):
    left, spectrum, right = torch.linalg.svd(weight, full_matrices=False)
    spectrum[3:] *= 0.7
    weight.copy_(left @ torch.diag(spectrum) @ right)


def test_a_single_key_head_that_loses_directions_is_reported():
    news = narrowed(lose_directions, 12)
    (alert,) = news
    assert alert.rule == "narrowing heads"
    assert alert.finding.heads == (0,)
    assert "of the flatness before" in alert.message
    assert 40 <= alert.step <= 90, "within a few readings of the change at step 30"


def test_heads_that_narrow_slowly_or_begin_at_zero_are_not_reported():
    def slowly(weight, place):
        left, spectrum, right = torch.linalg.svd(weight, full_matrices=False)
        spectrum[3:] *= 0.97
        weight.copy_(left @ torch.diag(spectrum) @ right)

    assert narrowed(slowly, 40) == []
    assert narrowed(lambda weight, place: weight.add_(0.1 * torch.randn(8, 1) @ torch.randn(1, 32)), 8, begin=0.0) == []


@pytest.mark.parametrize(
    ("rule", "argument", "wrong"),
    [(SuddenSharpening, "fall", 1), (SuddenFlattening, "factor", 0.5), (NarrowingHeads, "share", 1.5)],
)
def test_limits_that_cannot_work_are_refused(rule, argument, wrong):
    with pytest.raises(MisconfigurationError, match=rule.__name__):
        rule(**{argument: wrong})


def test_rules_that_detected_nothing_first_or_alone_are_off_by_default():
    names = [rule.name for rule in default_rules()]
    assert {"dead heads", "attention sink"}.isdisjoint(names)
    chosen = {rule.name: rule for rule in default_rules(Thresholds(dead=0.02, sink=0.8))}
    assert isinstance(chosen["dead heads"], DeadHeads)
    assert chosen["dead heads"].share == 0.02
    assert isinstance(chosen["attention sink"], AttentionSink)
    assert chosen["attention sink"].limit == 0.8
    assert math.isclose(Thresholds().narrow, 0.4)


def grow_one_direction(weight, place):
    weight.add_(0.5 * weight.norm() * torch.ones(8, 1) @ torch.ones(1, 32) / 16)


@pytest.mark.parametrize("rule", [NarrowingHeads(), FallingRank()])
@pytest.mark.parametrize(
    ("change", "size", "is_raised"),
    [
        (grow_one_direction, 1.0, True),
        (grow_one_direction, 0.2, False),  # GPT-2's initialisation at this width: nothing was lost
        (lose_directions, 0.2, True),
        (lose_directions, 1.0, True),
    ],
)
def test_heads_that_begin_small_are_named_if_directions_are_lost_and_not_if_one_grows(rule, change, size, is_raised):
    begin = size * 3**0.5  # `nn.Linear` draws its weights with a variance of a third of one over the width
    assert bool(narrowed(change, 14, begin=begin, rule=rule)) == is_raised
