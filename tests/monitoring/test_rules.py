"""What each rule finds and does not find, on curves and weights whose answer is known."""

from __future__ import annotations

import math
import random

import pytest
import scipy.stats
import torch
from torch import nn

from hdi_callback.errors import MisconfigurationError
from hdi_callback.monitoring.alerts import Alerts
from hdi_callback.monitoring.monitor import HeadDiversityMonitor
from hdi_callback.monitoring.readings import NOT_FINITE, LayerRecord, Record
from hdi_callback.monitoring.rules import (
    AlignmentForecast,
    AlignmentTrend,
    DeadHeads,
    FallingRank,
    MeanAlignment,
    NonFinite,
    SharedDirection,
    Thresholds,
    TiedHeads,
    WorstPair,
    choose_rules,
    default_rules,
)

LENSES = ("hdi_alignment", "hdi_energy_alignment")


def record(step: int, arrays: dict | None = None, absent: str = "", layer: str = "attn", **values: float) -> Record:
    missing = {f"hdi/{layer}": absent} if absent else {}
    return Record(step, {layer: LayerRecord(values, arrays or {})}, missing)


def judge(rule, records, facts=()):
    alerts = Alerts([rule], facts)
    return [alert for item in records for alert in alerts.judge(item)]


def curve(values, other: float = 0.0, every: int = 10, lens: int = 0) -> list[Record]:
    return [
        record(every * (place + 1), hdi_worst_alignment=0.0, **{LENSES[lens]: value, LENSES[1 - lens]: other})
        for place, value in enumerate(values)
    ]


# --- the mean


def test_the_mean_alignment_warns_at_its_limit_turns_critical_and_is_over_below_the_hysteresis():
    values = [0.2, 0.49, 0.52, 0.45, 0.41, 0.6, 0.91, 0.85, 0.5, 0.41, 0.39, 0.2]
    alerts = judge(MeanAlignment(), curve(values))
    assert [(alert.step, alert.level, alert.is_resolved) for alert in alerts] == [
        (30, "warning", False),
        (70, "critical", False),
        (110, "critical", True),
    ]


@pytest.mark.parametrize("lens", [0, 1])
def test_either_lens_is_enough_and_is_named(lens):
    value, limit = (0.6, 0.5) if lens == 0 else (0.96, 0.95)
    (alert,) = judge(MeanAlignment(), curve([0.1, value], lens=lens))
    assert alert.finding.metric == LENSES[lens]
    assert ("weighed by energy" in alert.message) == (lens == 1)
    assert (alert.level, alert.finding.value, alert.finding.threshold) == ("warning", value, limit)


def test_a_critical_alert_that_eases_does_not_warn_again_and_one_that_worsens_twice_is_told_once():
    alerts = judge(MeanAlignment(), curve([0.95, 0.7, 0.95, 0.7]))
    assert [(alert.level, alert.is_resolved) for alert in alerts] == [("critical", False)]


def test_the_message_says_when_where_what_since_when_how_sure_and_what_to_try():
    rows = [record(step, hdi_alignment=a, hdi_energy_alignment=0, hdi_effective_heads=h)
            for step, a, h in ((100, 0.2, 5.0), (200, 0.43, 2.5), (300, 0.55, 2.0))]  # fmt: skip
    (alert,) = judge(MeanAlignment(), rows)
    assert alert.message.startswith(
        "step 300, attn: all heads are closing up (mean alignment 0.55, 0.20 200 steps ago, 2.0 effective heads are "
        "left)"
    )
    assert "since step 200" in alert.message
    assert "docs/alerts.md" in alert.message
    assert "try DiversityPenalty" in alert.message
    assert alert.finding.since == 200


# --- the worst pair


def pair(step: int, value: float, heads=(2, 5), energy: float = 0.0, mean: float = 0.1) -> Record:
    arrays = {"worst_alignment_pair": list(heads), "energy_worst_alignment_pair": list(heads)}
    return record(step, arrays, hdi_worst_alignment=value, hdi_energy_worst_alignment=energy,
                  hdi_alignment=mean, hdi_energy_alignment=mean)  # fmt: skip


def test_a_pair_that_becomes_one_is_named_with_its_past():
    (alert,) = judge(WorstPair(), [pair(1100, 0.61), pair(1150, 0.75), pair(1200, 0.93)])
    assert alert.finding.heads == (2, 5)
    assert alert.message.startswith(
        "step 1200, attn: heads 2 and 5 are nearly one head (alignment 0.93, 0.61 100 steps ago); since step 1150"
    )


def test_the_past_of_another_pair_is_not_passed_off_as_that_of_this_one():
    (alert,) = judge(WorstPair(), [pair(1100, 0.61, (0, 1)), pair(1200, 0.93)])
    assert "no pair above 0.61 100 steps ago" in alert.message
    assert alert.finding.since == 1200


def test_a_pair_is_not_named_where_all_heads_are_one_and_the_mean_says_so():
    assert judge(WorstPair(), [pair(100, 0.99, mean=0.55)]) == []
    assert len(judge(WorstPair(), [pair(100, 0.99, mean=0.3)])) == 1


def test_a_pair_is_over_below_the_hysteresis():
    alerts = judge(WorstPair(), [pair(100, 0.82), pair(200, 0.72), pair(300, 0.69)])
    assert [(alert.step, alert.is_resolved) for alert in alerts] == [(100, False), (300, True)]


# --- the forecast


def rising(readings: int, rate: float, noise: float = 0.0, seed: int = 0) -> list[float]:
    draw = random.Random(seed)
    return [1 - math.exp(-(0.05 + rate * place + draw.gauss(0, noise))) for place in range(readings)]


def test_a_steady_rise_is_forecast_before_it_arrives():
    values = rising(40, 0.02)
    (alert,) = judge(AlignmentForecast(), curve(values))
    fired = alert.step // 10 - 1
    assert values[fired] < 0.5, "well before the limits of the mean"
    # y = 0.05 + 0.02 t reaches -log(0.1) at t = 112.6, which is step 1136
    assert "all heads are moving together" in alert.message
    assert "reach 0.90 near step 1136" in alert.message
    assert alert.finding.since == alert.step - 190


def test_two_heads_that_move_together_are_named():
    values = rising(40, 0.02)
    alerts = judge(AlignmentForecast(), [pair(10 * place, value) for place, value in enumerate(values, 1)])
    assert [alert.finding.heads for alert in alerts] == [(2, 5)]
    assert "heads 2 and 5 are moving together" in alerts[0].message


def test_a_rise_in_the_energy_lens_is_not_forecast():
    assert judge(AlignmentForecast(), curve(rising(40, 0.02), lens=1)) == []


def test_nothing_is_forecast_where_the_mean_has_been_told_already():
    assert judge(AlignmentForecast(), curve([0.55 + 0.3 * value for value in rising(40, 0.02)])) == []


@pytest.mark.parametrize(
    "values",
    [
        rising(60, 0.0, noise=0.01),
        rising(60, 0.001),
        [0.4 * (1 - math.exp(-place / 8)) for place in range(60)],  # a rise that slows down
        [0.05] * 30 + [0.2] * 30,
    ],
    ids=["noise", "too slow", "levelling off", "a step"],
)
def test_what_does_not_lead_to_collapse_is_not_forecast(values):
    assert judge(AlignmentForecast(), curve(values)) == []


def test_nothing_is_forecast_from_fewer_than_twenty_two_readings():
    assert judge(AlignmentForecast(), curve(rising(21, 0.03))) == []
    assert len(judge(AlignmentForecast(), curve(rising(22, 0.03)))) == 1


def test_a_forecast_is_over_when_the_rise_is_and_not_when_it_has_come_true():
    arrived = judge(AlignmentForecast(), curve([*rising(120, 0.02), *[0.95] * 30]))
    assert [alert.is_resolved for alert in arrived] == [False]
    turned = judge(AlignmentForecast(), curve([*rising(40, 0.02), *[0.3] * 30]))
    assert [alert.is_resolved for alert in turned] == [False, True]


# --- a shared direction


def energy(values) -> list[Record]:
    return [record(10 * place, hdi_energy_alignment=value) for place, value in enumerate(values)]


def test_a_late_sudden_rise_of_the_energy_alignment_is_told_and_over_when_it_falls():
    values = [0.1] * 40 + [0.1 + 0.0501 * place for place in range(16)] + [0.65, 0.65]
    alerts = judge(SharedDirection(), energy(values))
    assert [(alert.step, alert.is_resolved) for alert in alerts] == [(540, False), (560, True)]
    told = "one direction is taking over all heads (mean alignment 0.80 weighed by energy, at most 0.10 until step 390)"
    assert told in alerts[0].message


@pytest.mark.parametrize(
    "values",
    [
        [min(0.9, 0.06 * place) for place in range(60)],
        [0.1] * 12 + [min(0.9, 0.1 + 0.06 * place) for place in range(48)],
        [0.1 + 0.01 * place for place in range(80)],
        [0.3] * 40 + [0.75] * 20,
        [0.1 + 0.25 * (place % 2) for place in range(40)] + [0.85] * 20,
    ],
    ids=["early", "early after a warm-up", "slow", "not far", "not quiet before"],
)
def test_what_healthy_training_does_in_the_energy_lens_is_left_alone(values):
    assert judge(SharedDirection(), energy(values)) == []


# --- the trend


def test_a_notice_tells_of_a_rise_and_noise_alone_is_silent():
    quiet = [value - 0.05 for value in rising(60, 0.0, noise=0.01, seed=3)]
    assert judge(AlignmentTrend(), curve(quiet)) == []
    draw = random.Random(1)
    risen = quiet[:30] + [quiet[30] + 0.012 * place + draw.gauss(0, 0.003) for place in range(30)]
    (alert,) = judge(AlignmentTrend(), curve(risen))
    assert alert.level == "notice"
    assert 280 <= alert.finding.since <= 360


def test_trends_in_noise_are_no_more_frequent_than_the_rule_says():
    notices = 0
    for seed in range(200):
        draw, y, values = random.Random(seed), 0.3, []
        for _ in range(64):
            y += draw.gauss(0, 0.02)  # a random walk: increments without a drift
            values.append(1 - math.exp(-y))
        notices += bool(judge(AlignmentTrend(), curve(values)))
    assert notices <= 200 * 0.05 + 3 * math.sqrt(200 * 0.05)


# --- within a head


def measured(model: nn.Module, step: int = 10) -> Record:
    with HeadDiversityMonitor(model, metrics=["hdi"]) as monitor:
        return monitor.measure(step).record()


def attention(seed: int = 0, heads: int = 4, width: int = 32) -> nn.ModuleDict:
    torch.manual_seed(seed)
    return nn.ModuleDict({"attn": nn.MultiheadAttention(width, heads)})


def keys(model: nn.ModuleDict) -> torch.Tensor:
    attn = model["attn"]
    return attn.in_proj_weight.data[attn.embed_dim : 2 * attn.embed_dim].view(attn.num_heads, attn.head_dim, -1)


def test_dead_heads_are_named_and_over_when_they_live_again():
    model = attention()
    alive = measured(model, 10)
    keys(model)[[1, 3]] *= 1e-9
    alerts = judge(DeadHeads(), [alive, measured(model, 20), measured(model, 30), alive])
    assert [(alert.step, alert.finding.heads, alert.is_resolved) for alert in alerts][:1] == [(20, (1, 3), False)]
    assert "heads 1 and 3 are dead" in alerts[0].message
    assert [alert.is_resolved for alert in alerts] == [False, True]


def test_a_layer_that_begins_at_zero_is_given_one_reading_to_leave_it():
    model = attention()
    keys(model).zero_()
    assert judge(DeadHeads(), [measured(model, 0)]) == []
    assert len(judge(DeadHeads(), [measured(model, 0), measured(model, 10)])) == 1


def test_a_head_that_loses_its_directions_is_named():
    model = attention(width=64)
    before = measured(model, 0)
    left, spectrum, right = torch.linalg.svd(keys(model)[2], full_matrices=False)
    keys(model)[2] = left @ torch.diag(spectrum * 0.5 ** torch.arange(16)) @ right
    (alert,) = judge(FallingRank(), [before, measured(model, 50)])
    assert alert.finding.heads == (2,)
    squares = (spectrum * 0.5 ** torch.arange(16)).double().square().numpy()
    assert alert.finding.value == pytest.approx(scipy.stats.gmean(squares) / squares.mean(), rel=1e-2)
    assert "head 2 has lost directions" in alert.message
    assert "at step 0" in alert.message


def test_a_single_direction_that_is_lost_for_good_is_noticed():
    model = attention(width=64)
    before = measured(model, 0)
    keys(model)[2, 5] = keys(model)[2, 4]
    (alert,) = judge(FallingRank(), [before, measured(model, 50)])
    assert alert.finding.heads == (2,)


def test_one_direction_that_grows_is_no_loss_of_the_others():
    model = attention(width=64)
    before = measured(model, 0)
    left, spectrum, right = torch.linalg.svd(keys(model)[2], full_matrices=False)
    spectrum[0] *= 8
    keys(model)[2] = left @ torch.diag(spectrum) @ right
    assert judge(FallingRank(), [before, measured(model, 50)]) == []


def test_a_head_whose_scale_alone_changes_keeps_its_rank():
    model = attention()
    before = measured(model, 0)
    keys(model)[2] *= 1e-3
    assert judge(FallingRank(), [before, measured(model, 50)]) == []


def test_weights_that_are_not_finite_are_critical_at_once():
    model = attention()
    before = measured(model, 10)
    keys(model)[0, 0, 0] = math.nan
    (alert,) = judge(NonFinite(), [before, measured(model, 20)])
    assert alert.level == "critical"
    assert "they were at step 10" in alert.message
    assert measured(model).absent["hdi/attn"] == NOT_FINITE


# --- step 0


FACTS = [{"name": "attn", "width": 32}]


def test_copied_heads_are_found_at_step_zero_and_over_when_they_come_apart():
    model = attention()
    keys(model)[3] = 2 * keys(model)[1]
    tied = measured(model, 0)
    apart = measured(attention(), 10)
    alerts = judge(TiedHeads(), [tied, apart], FACTS)
    assert alerts[0].finding.heads == (1, 3)
    assert "heads 1 and 3 are nearly one head where this run begins (overlap 1.00)" in alerts[0].message
    assert [alert.is_resolved for alert in alerts] == [False, True]


def test_a_layer_of_copies_is_told_as_such():
    model = attention()
    keys(model)[:] = keys(model)[:1].clone()
    (alert,) = judge(TiedHeads(), [measured(model, 0)], FACTS)
    assert "all heads are nearly one head where this run begins" in alert.message
    assert alert.finding.heads == ()


def test_two_hundred_fresh_layers_are_not_called_tied():
    assert [seed for seed in range(200) if judge(TiedHeads(), [measured(attention(seed), 0)], FACTS)] == []


def test_tied_heads_are_asked_for_at_step_zero_alone_and_the_other_limits_after_it():
    model = attention()
    keys(model)[:] = keys(model)[:1].clone()
    facts = [layer.facts() for layer in HeadDiversityMonitor(model, metrics=["hdi"]).layers]
    alerts = Alerts(default_rules(), facts)
    assert [alert.rule for alert in alerts.judge(measured(model, 0))] == ["tied heads"]
    assert [alert.rule for alert in alerts.judge(measured(model, 10))] == ["mean alignment"]
    assert judge(TiedHeads(), [measured(model, 10)], facts) == []


# --- a healthy model is left in peace


def test_a_fresh_model_raises_no_alert_by_any_rule():
    for seed in range(50):
        model = attention(seed)
        facts = [layer.facts() for layer in HeadDiversityMonitor(model, metrics=["hdi"]).layers]
        alerts = Alerts(default_rules(), facts)
        assert [alert for step in (0, 10, 20) for alert in alerts.judge(measured(model, step))] == []


# --- which rules are asked


def test_limits_go_by_layer_and_later_patterns_win():
    rules_for = choose_rules("default", {"*": {"mean": 0.6, "pair": None}, "decoder.*": {"mean": None}})
    mean = {name: rules_for(name)[0].limits for name in ("encoder.0", "decoder.0")}
    assert ("warning", "subspace", 0.6) in mean["encoder.0"]
    assert [limit for limit in mean["decoder.0"] if limit[:2] == ("warning", "subspace")] == []
    assert all(rule.name != "worst pair" for name in mean for rule in rules_for(name))
    assert Thresholds().pair is not None, "where it is not switched off it is asked"


def test_every_limit_can_be_switched_off():
    off = Thresholds(**dict.fromkeys(Thresholds.__dataclass_fields__, None))
    assert [rule.name for rule in default_rules(off)] == ["dead heads", "weights not finite"]


@pytest.mark.parametrize(
    ("rules", "thresholds", "message"),
    [
        ("all", None, '"default", None or a list'),
        ([MeanAlignment], None, "must hold rules"),
        ([MeanAlignment(), MeanAlignment(0.4)], None, "Two rules have the name 'mean alignment'"),
        ([MeanAlignment()], {"*": {"mean": 0.4}}, "in their own arguments"),
        ("default", {"*": {"average": 0.4}}, "none of mean, energy_mean"),
        ("default", {"*": {"mean": 4}}, "between 0 and 1, got 4"),
    ],
)
def test_what_cannot_be_asked_is_refused_with_what_to_write(rules, thresholds, message):
    with pytest.raises(MisconfigurationError, match=message):
        choose_rules(rules, thresholds)
