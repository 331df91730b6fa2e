"""What each rule finds and does not find, on curves and weights whose answer is known."""

from __future__ import annotations

import copy
import math
import random
from dataclasses import replace

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
    AttendAlike,
    AttentionSink,
    DeadHeads,
    EntropyCollapse,
    FallingRank,
    FewerKeys,
    FlatAttention,
    LaterTokens,
    MeanAlignment,
    MergedMessages,
    MergedScores,
    NarrowingHeads,
    NoContribution,
    NonFinite,
    RoundedAway,
    SharedDirection,
    SharpFromStart,
    SuddenShrink,
    Thresholds,
    TiedHeads,
    TokensAlike,
    VanishingWeights,
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


def test_the_mean_alignment_warns_turns_critical_and_is_resolved_below_its_hysteresis():
    values = [0.2, 0.49, 0.52, 0.45, 0.41, 0.6, 0.91, 0.85, 0.5, 0.41, 0.39, 0.2]
    alerts = judge(MeanAlignment(), curve(values))
    assert [(alert.step, alert.level, alert.is_resolved) for alert in alerts] == [
        (30, "warning", False),
        (70, "critical", False),
        (110, "critical", True),
    ]


@pytest.mark.parametrize("lens", [0, 1])
def test_the_mean_alignment_alert_names_the_lens_that_exceeded_its_limit(lens):
    value, limit = (0.6, 0.5) if lens == 0 else (0.96, 0.95)
    (alert,) = judge(MeanAlignment(), curve([0.1, value], lens=lens))
    assert alert.finding.metric == LENSES[lens]
    assert ("weighed by energy" in alert.message) == (lens == 1)
    assert (alert.level, alert.finding.value, alert.finding.threshold) == ("warning", value, limit)


def test_a_critical_alert_that_eases_does_not_warn_again_and_one_that_worsens_twice_is_reported_once():
    alerts = judge(MeanAlignment(), curve([0.95, 0.7, 0.95, 0.7]))
    assert [(alert.level, alert.is_resolved) for alert in alerts] == [("critical", False)]


def test_the_message_states_step_layer_finding_start_certainty_and_remedy():
    rows = [record(step, hdi_alignment=a, hdi_energy_alignment=0, hdi_effective_heads=h)
            for step, a, h in ((100, 0.2, 5.0), (200, 0.43, 2.5), (300, 0.55, 2.0))]  # fmt: skip
    (alert,) = judge(MeanAlignment(), rows)
    assert alert.message.startswith(
        "step 300, attn: all heads are converging (mean alignment 0.55, 0.20 200 steps ago, 2.0 effective heads are "
        "left)"
    )
    assert "since step 200" in alert.message
    assert "the limit is 0.50, and 1442 healthy runs of small models came to 0.39 at most" in alert.message
    assert 'try ReviveHeads(max_output_error=1) or DiversityPenalty(measure="circuit"), after' in alert.message
    assert alert.finding.since == 200


# --- the worst pair


def pair(step: int, value: float, heads=(2, 5), energy: float = 0.0, mean: float = 0.1) -> Record:
    arrays = {"worst_alignment_pair": list(heads), "energy_worst_alignment_pair": list(heads)}
    return record(step, arrays, hdi_worst_alignment=value, hdi_energy_worst_alignment=energy,
                  hdi_alignment=mean, hdi_energy_alignment=mean)  # fmt: skip


def test_a_merging_pair_is_named_with_its_past():
    (alert,) = judge(WorstPair(), [pair(1100, 0.61), pair(1150, 0.75), pair(1200, 0.93)])
    assert alert.finding.heads == (2, 5)
    assert alert.message.startswith(
        "step 1200, attn: heads 2 and 5 are nearly one head (alignment 0.93, 0.61 100 steps ago); since step 1150"
    )


def test_the_message_does_not_attribute_the_past_of_another_pair_to_this_one():
    (alert,) = judge(WorstPair(), [pair(1100, 0.61, (0, 1)), pair(1200, 0.93)])
    assert "100 steps ago no pair was above 0.61" in alert.message
    assert alert.finding.since == 1200


def test_the_worst_pair_is_silent_if_the_mean_alignment_reports_all_heads():
    assert judge(WorstPair(), [pair(100, 0.99, mean=0.55)]) == []
    assert len(judge(WorstPair(), [pair(100, 0.99, mean=0.3)])) == 1


def merged(model: nn.ModuleDict, step: int, *groups: tuple[int, ...], noise: float = 0.03) -> Record:
    """Measure heads of which some follow the first of their group."""
    for first, *others in groups:
        keys(model)[others] = keys(model)[[first]] + noise * torch.randn(len(others), *keys(model).shape[1:])
    return measured(model, step)


def facts_of(model: nn.Module) -> list[dict]:
    return [layer.facts() for layer in HeadDiversityMonitor(model, metrics=["hdi"]).layers]


def test_all_merged_heads_and_all_their_groups_are_named():
    model = attention(heads=8, width=64)
    facts = facts_of(model)
    (alert,) = judge(WorstPair(), [merged(model, 10, (1, 4, 6)), merged(model, 20, (1, 4, 6))], facts)
    assert alert.finding.heads == (1, 4, 6)
    assert "heads 1, 4 and 6 are nearly one head (closest" in alert.message
    model = attention(heads=8, width=64)
    (alert,) = judge(WorstPair(), [merged(model, 10, (0, 5), (2, 7))], facts)
    assert alert.finding.groups == ((0, 5), (2, 7))
    assert "heads 0 and 5 are nearly one head, and so are heads 2 and 7" in alert.message


def test_a_second_pair_is_reported_while_the_alert_of_the_first_is_active_and_so_is_a_third_head():
    model = attention(heads=8, width=64)
    records = [merged(model, 10, (0, 5)), measured(model, 20), merged(model, 30, (2, 7)), measured(model, 40),
               merged(model, 50, (0, 5, 3))]  # fmt: skip
    alerts = judge(WorstPair(), records, facts_of(model))
    assert [(alert.step, alert.finding.groups, alert.is_resolved) for alert in alerts] == [
        (10, ((0, 5),), False),
        (30, ((0, 5), (2, 7)), False),
        (50, ((0, 3, 5), (2, 7)), False),
    ]


def test_a_head_that_hovers_at_the_limit_is_reported_once():
    model = attention(heads=8, width=64)
    noises = [0.03, 0.047, 0.04, 0.048, 0.039, 0.047]
    records = []
    base = keys(model)[0].clone()
    draw = torch.randn_like(base)
    for step, noise in enumerate(noises, 1):
        keys(model)[5] = base + noise * draw
        records.append(measured(model, step))
    values = [item.layers["attn"].values["hdi_worst_alignment"] for item in records]
    assert min(values) < 0.8 < max(values)
    assert min(values) > 0.7
    assert len(judge(WorstPair(), records, facts_of(model))) == 1


def test_a_history_without_matrices_names_all_merged_heads_as_well():
    model = attention(heads=8, width=64)
    item = merged(model, 10, (1, 4, 6))
    bare = Record(10, {"attn": LayerRecord(item.layers["attn"].values, item.layers["attn"].arrays)})
    (alert,) = judge(WorstPair(), [bare], facts_of(model))
    assert alert.finding.heads == (1, 4, 6)


def test_heads_that_stay_apart_are_not_named_among_merged_heads():
    model = attention(heads=8, width=64)
    (alert,) = judge(MeanAlignment(), [merged(model, 10, (0, 1, 2, 4, 5, 7), noise=0.01)], facts_of(model))
    assert alert.finding.heads == (0, 1, 2, 4, 5, 7)
    assert "heads 0, 1, 2, 4, 5 and 7 are nearly one head (mean alignment" in alert.message


def test_an_alert_without_a_proven_remedy_says_so():
    (alert,) = judge(MeanAlignment(), curve([0.1, 0.96], lens=1))
    assert "try" not in alert.message
    assert "no remedy has been shown to help" in alert.message
    assert "which healthy runs reach" not in alert.message


def test_the_message_compares_the_limit_with_healthy_runs():
    (alert,) = judge(MeanAlignment(subspace=0.3), curve([0.1, 0.35]))
    assert "the limit is 0.30, which healthy runs reach: of 1442 healthy runs of small models one came to 0.39" in (
        alert.message
    )


def test_the_message_says_one_direction_only_if_it_is_one():
    model = attention()
    fresh, direction = measured(model, 0), torch.randn(32)
    keys(model).mul_(0.02)
    several = torch.linalg.qr(torch.randn(32, 6)).Q.T
    keys(model)[:, :6] += several
    (many,) = judge(MeanAlignment(None, 0.9, None), [fresh, measured(model, 10)], facts_of(model))
    assert "the same few directions (about 6) have taken over all heads" in many.message
    keys(model)[:] = 0.02 * torch.randn(4, 8, 32) + torch.randn(4, 8, 1) * direction
    (one,) = judge(MeanAlignment(None, 0.9, None), [fresh, measured(model, 10)], facts_of(model))
    assert "one direction has taken over all heads" in one.message


def test_the_worst_pair_is_resolved_below_its_hysteresis():
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
    assert "all heads are becoming alike" in alert.message
    assert "reach 0.90 near step 1136" in alert.message
    assert alert.finding.since == alert.step - 190


def test_a_forecast_for_one_pair_names_its_heads():
    values = rising(40, 0.02)
    alerts = judge(AlignmentForecast(), [pair(10 * place, value) for place, value in enumerate(values, 1)])
    assert [alert.finding.heads for alert in alerts] == [(2, 5)]
    assert "heads 2 and 5 are becoming alike" in alerts[0].message


def test_a_rise_in_the_energy_lens_is_not_forecast():
    assert judge(AlignmentForecast(), curve(rising(40, 0.02), lens=1)) == []


def test_no_forecast_is_made_once_the_mean_alignment_was_reported():
    assert judge(AlignmentForecast(), curve([0.55 + 0.3 * value for value in rising(40, 0.02)])) == []


@pytest.mark.parametrize(("end", "is_forecast"), [(10.0, True), (5.5, True), (4.5, False), (1.0, False)])
def test_no_collapse_is_forecast_if_the_head_norm_halves_within_the_fitted_readings(end, is_forecast):
    values = rising(22, 0.03)
    norms = [10.0] * 3 + [10 + (end - 10) * place / 18 for place in range(19)]
    records = [
        replace(
            one,
            layers={
                name: replace(row, values={**row.values, "hdi_head_norm": norm}) for name, row in one.layers.items()
            },
        )
        for one, norm in zip(curve(values), norms)
    ]
    assert len(judge(AlignmentForecast(), records)) == is_forecast


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
def test_curves_that_do_not_lead_to_collapse_are_not_forecast(values):
    assert judge(AlignmentForecast(), curve(values)) == []


def test_no_forecast_is_made_from_fewer_than_22_readings():
    assert judge(AlignmentForecast(), curve(rising(21, 0.03))) == []
    assert len(judge(AlignmentForecast(), curve(rising(22, 0.03)))) == 1


def test_a_forecast_is_resolved_if_the_rise_ends_and_not_if_it_comes_true():
    arrived = judge(AlignmentForecast(), curve([*rising(120, 0.02), *[0.95] * 30]))
    assert [alert.is_resolved for alert in arrived] == [False]
    turned = judge(AlignmentForecast(), curve([*rising(40, 0.02), *[0.3] * 30]))
    assert [alert.is_resolved for alert in turned] == [False, True]


# --- a shared direction


def energy(values) -> list[Record]:
    return [record(10 * place, hdi_energy_alignment=value) for place, value in enumerate(values)]


def test_a_late_sudden_rise_of_the_energy_alignment_is_reported_and_resolved_when_it_falls():
    values = [0.1] * 40 + [0.1 + 0.0501 * place for place in range(16)] + [0.65, 0.65]
    alerts = judge(SharedDirection(), energy(values))
    assert [(alert.step, alert.is_resolved) for alert in alerts] == [(540, False), (560, True)]
    reported = "have taken over all heads (mean alignment 0.80 weighed by energy, at most 0.10 until step 390)"
    assert reported in alerts[0].message


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
def test_energy_alignment_of_healthy_training_is_not_reported(values):
    assert judge(SharedDirection(), energy(values)) == []


# --- the trend


def test_a_notice_reports_a_rise_and_noise_alone_is_silent():
    quiet = [value - 0.05 for value in rising(60, 0.0, noise=0.01, seed=3)]
    assert judge(AlignmentTrend(), curve(quiet)) == []
    draw = random.Random(1)
    risen = quiet[:30] + [quiet[30] + 0.012 * place + draw.gauss(0, 0.003) for place in range(30)]
    (alert,) = judge(AlignmentTrend(), curve(risen))
    assert alert.level == "notice"
    assert 280 <= alert.finding.since <= 360


def test_trends_in_noise_are_reported_at_most_at_the_stated_rate():
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


class WideHeads(nn.Module):
    """Heads as wide as the model."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width * heads, bias=False) for _ in range(3))
        self.out_proj = nn.Linear(width * heads, width, bias=False)

    def forward(self, x):
        q, k, v = (
            p(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out_proj(mixed.transpose(1, 2).flatten(2))


def keys(model: nn.ModuleDict) -> torch.Tensor:
    attn = model["attn"]
    return attn.in_proj_weight.data[attn.embed_dim : 2 * attn.embed_dim].view(attn.num_heads, attn.head_dim, -1)


def test_dead_heads_are_named_and_resolved_when_they_recover():
    model = attention()
    alive = measured(model, 10)
    keys(model)[[1, 3]] *= 1e-9
    alerts = judge(DeadHeads(), [alive, measured(model, 20), measured(model, 30), alive])
    assert [(alert.step, alert.finding.heads, alert.is_resolved) for alert in alerts][:1] == [(20, (1, 3), False)]
    assert "heads 1 and 3 are dead" in alerts[0].message
    assert [alert.is_resolved for alert in alerts] == [False, True]


def test_keys_initialised_at_zero_are_reported_only_if_they_stay_there_while_others_move():
    model = attention()
    keys(model).zero_()
    resting = [measured(model, step) for step in range(20)]
    assert judge(DeadHeads(), resting) == [], "a warm-up from rate 0 has moved nothing yet"
    assert len(judge(DeadHeads(), [*resting, measured(model, 20)])) == 1
    moving = [resting[0]]
    for step in range(1, 7):
        keys(model)[[0, 1, 3]] += 0.01 * torch.randn(3, 8, 32)
        moving.append(measured(model, step))
    assert judge(DeadHeads(), moving[:5]) == []
    (alert,) = judge(DeadHeads(), moving)
    assert alert.finding.heads == (2,)


def test_keys_that_leave_zero_are_not_reported():
    model = attention()
    keys(model).zero_()
    records = [measured(model, step) for step in range(3)]
    for step in range(3, 30):
        keys(model).add_(0.01 * torch.randn(4, 8, 32))
        records.append(measured(model, step))
    assert judge(DeadHeads(), records) == []


def test_a_head_at_a_hundredth_of_its_norm_is_dead_for_practical_purposes_and_one_at_a_twentieth_is_not():
    model = attention()
    before = measured(model, 0)
    keys(model)[2] *= 0.05
    assert judge(DeadHeads(), [before, measured(model, 10)]) == []
    keys(model)[2] *= 0.15
    (alert,) = judge(DeadHeads(), [before, measured(model, 10)])
    assert alert.finding.heads == (2,)
    assert "at most 0.7 % of what it was, or of the heads beside" in alert.message or "0.8 %" in alert.message


@pytest.mark.parametrize(("shrinks", "reported"), [(1.0, 1), (0.99, 1), (0.9, 0)])
def test_vanishing_keys_are_not_forecast_to_become_alike(shrinks, reported):
    rising_curve = rising(40, 0.02)
    records = [
        record(10 * place, hdi_alignment=value, hdi_worst_alignment=0.0, hdi_head_norm=shrinks**place)
        for place, value in enumerate(rising_curve, 1)
    ]
    assert len(judge(AlignmentForecast(), records)) == reported


def test_keys_of_all_heads_that_vanish_are_reported_as_dead():
    model = attention()
    records = [measured(model, 0)]
    for step in (10, 20):
        keys(model).mul_(0.09)
        records.append(measured(model, step))
    (alert,) = judge(DeadHeads(), records)
    assert (alert.step, alert.finding.heads) == (20, (0, 1, 2, 3))


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


def test_a_single_direction_that_is_lost_for_good_is_reported():
    model = attention(width=64)
    before = measured(model, 0)
    keys(model)[2, 5] = keys(model)[2, 4]
    (alert,) = judge(FallingRank(), [before, measured(model, 50)])
    assert alert.finding.heads == (2,)


def test_growth_of_one_direction_is_not_reported_as_loss_of_the_others():
    model = attention(width=64)
    before = measured(model, 0)
    left, spectrum, right = torch.linalg.svd(keys(model)[2], full_matrices=False)
    spectrum[0] *= 8
    keys(model)[2] = left @ torch.diag(spectrum) @ right
    assert judge(FallingRank(), [before, measured(model, 50)]) == []


def test_a_head_that_only_changes_its_scale_keeps_its_rank():
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
    assert "they did not at step 10" in alert.message
    assert measured(model).absent["hdi/attn"] == NOT_FINITE


# --- step 0


FACTS = [{"name": "attn", "width": 32, "head_dim": 8, "num_heads": 4, "num_key_heads": 4}]


def test_heads_initialised_too_close_are_reported_at_step_zero_and_resolved_when_they_separate():
    model = attention()
    keys(model)[3] = 2 * keys(model)[1] + 0.02 * torch.randn(8, 32)
    alerts = judge(TiedHeads(), [measured(model, 0), measured(attention(), 10)], FACTS)
    assert alerts[0].finding.heads == (1, 3)
    assert "heads 1 and 3 are nearly one head where this run begins (overlap 0.9" in alerts[0].message
    assert "with a probability of at most" in alerts[0].message
    assert [alert.is_resolved for alert in alerts] == [False, True]


@pytest.mark.parametrize("step", [0, 70])
def test_equal_heads_are_reported_as_tied_or_a_bug_at_any_step(step):
    model = attention()
    fresh = measured(model, 0)
    keys(model)[3] = 2 * keys(model)[1]
    records = [measured(model, 0)] if step == 0 else [fresh, measured(model, step)]
    facts = [layer.facts() for layer in HeadDiversityMonitor(model, metrics=["hdi"]).layers]
    alerts = Alerts(default_rules(), facts)
    (alert,) = [alert for item in records for alert in alerts.judge(item)]
    assert (alert.step, alert.rule, alert.finding.groups) == (step, "tied heads", ((1, 3),))
    assert "heads 1 and 3 are equal in their key weights" in alert.message
    assert "tied, were copied, or this is a bug" in alert.message
    assert "warm-up" not in alert.message
    assert "DiversityPenalty" not in alert.message


def test_equal_heads_as_wide_as_the_model_are_reported():
    model = attention(heads=1, width=32)
    wide = nn.ModuleDict({"attn": WideHeads(32, 4)})
    assert judge(TiedHeads(), [measured(wide, 0)]) == []
    wide["attn"].k_proj.weight.data[32:64] = wide["attn"].k_proj.weight.data[:32]
    (alert,) = judge(TiedHeads(), [measured(wide, 0)])
    assert alert.finding.groups == ((0, 1),)
    assert judge(TiedHeads(), [measured(model, 0)]) == []


def test_tied_heads_as_wide_as_the_model_are_resolved_once_they_differ():
    torch.manual_seed(0)
    apart = nn.ModuleDict({"attn": WideHeads(32, 4)})
    tied = copy.deepcopy(apart)
    tied["attn"].k_proj.weight.data[32:64] = tied["attn"].k_proj.weight.data[:32]
    alerts = judge(TiedHeads(), [measured(tied, 0), measured(apart, 10)])
    assert [(alert.step, alert.is_resolved) for alert in alerts] == [(0, False), (10, True)]


def test_all_equal_heads_of_a_layer_are_named():
    model = attention()
    keys(model)[:] = keys(model)[:1].clone()
    (alert,) = judge(TiedHeads(), [measured(model, 0)], FACTS)
    assert "heads 0, 1, 2 and 3 are equal" in alert.message
    assert alert.finding.heads == (0, 1, 2, 3)


def test_no_pair_of_two_hundred_fresh_layers_is_reported_as_tied():
    assert [seed for seed in range(200) if judge(TiedHeads(), [measured(attention(seed), 0)], FACTS)] == []


def test_tied_heads_are_reported_once_and_as_aligned_after_they_differ():
    model = attention()
    keys(model)[:] = keys(model)[:1].clone()
    facts = [layer.facts() for layer in HeadDiversityMonitor(model, metrics=["hdi"]).layers]
    alerts = Alerts(default_rules(), facts)
    assert [alert.rule for alert in alerts.judge(measured(model, 0))] == ["tied heads"]
    assert alerts.judge(measured(model, 10)) == []
    keys(model).add_(0.02 * torch.randn(4, 8, 32))
    assert [(alert.rule, alert.level) for alert in alerts.judge(measured(model, 20))] == [
        ("mean alignment", "critical")
    ]
    assert judge(TiedHeads(), [measured(model, 10)], facts) == [], "the question of chance is for step 0"


# --- weights that were loaded


def test_close_heads_of_a_pretrained_model_are_reported_only_if_others_join_them():
    model = attention()
    keys(model)[1] = keys(model)[0] + 0.02 * torch.randn(8, 32)
    keys(model)[3] *= 1e-4
    keys(model)[2] *= 0.2
    first, later = measured(model, 0), measured(model, 10)
    keys(model)[2] = keys(model)[0] + 0.02 * torch.randn(8, 32)
    joined = measured(model, 20)

    def reported(loaded):
        alerts = Alerts(default_rules(), FACTS, pretrained=loaded)
        return [(alert.step, alert.rule, alert.finding.heads) for item in (first, later, joined)
                for alert in alerts.judge(item)]  # fmt: skip

    assert reported(True) == [(20, "worst pair", (0, 1, 2))]
    assert reported(False)[:2] == [(0, "tied heads", (0, 1)), (10, "worst pair", (0, 1))]


def test_a_pretrained_aligned_model_raises_no_alert_while_it_stays_so():
    model = attention()
    keys(model)[1:] = keys(model)[:1] + 0.02 * torch.randn(3, 8, 32)
    alerts = Alerts(default_rules(), FACTS, pretrained=True)
    assert [alert for step in (0, 10, 20) for alert in alerts.judge(measured(model, step))] == []


# --- a healthy model is left in peace


def test_a_fresh_model_raises_no_alert_by_any_rule():
    for seed in range(50):
        model = attention(seed)
        facts = [layer.facts() for layer in HeadDiversityMonitor(model, metrics=["hdi"]).layers]
        alerts = Alerts(default_rules(), facts)
        assert [alert for step in (0, 10, 20) for alert in alerts.judge(measured(model, step))] == []


# --- which rules are asked


def test_limits_apply_by_layer_pattern_and_later_patterns_win():
    rules_for = choose_rules("default", {"*": {"mean": 0.6, "pair": None}, "decoder.*": {"mean": None}})
    mean = {name: rules_for(name)[0].limits for name in ("encoder.0", "decoder.0")}
    assert ("warning", "subspace", 0.6) in mean["encoder.0"]
    assert [limit for limit in mean["decoder.0"] if limit[:2] == ("warning", "subspace")] == []
    assert all(rule.name != "worst pair" for name in mean for rule in rules_for(name))
    assert Thresholds().pair is not None, "where it is not switched off it is asked"


def test_every_limit_can_be_switched_off():
    off = Thresholds(**dict.fromkeys(Thresholds.__dataclass_fields__, None))
    without_a_limit = ["weights not finite", "frozen heads", "untrained weights", "one key", "fewer keys"]
    assert [rule.name for rule in default_rules(off)] == without_a_limit


RULE_OF_A_LIMIT = {
    "mean": "mean alignment", "energy_mean": "mean alignment", "critical": "mean alignment", "pair": "worst pair",
    "energy_pair": "worst pair", "forecast": "forecast", "trend": "trend", "jump": "shared direction",
    "dead": "dead heads", "rank": "falling rank", "tied": "tied heads", "scores": "merged scores",
    "messages": "merged messages", "alike": "attend alike", "entropy": "entropy collapse", "logit": "logit growth",
    "sink": "attention sink", "tokens": "tokens alike", "contribution": "no contribution",
    "start": "sharp from the start", "flat": "flat attention", "later": "later tokens",
    "vanishing": "vanishing weights", "weight_jump": "weight jump", "unchanged": "rounded away",
    "inputs": "inputs lose rank", "shrink": "sudden shrink", "narrow": "narrowing heads",
    "sharpen": "sudden sharpening", "flatten": "sudden flattening",
}  # fmt: skip


@pytest.mark.parametrize("limit", Thresholds.__dataclass_fields__)
def test_setting_a_limit_switches_on_only_its_own_rule(limit):
    off = Thresholds(**dict.fromkeys(Thresholds.__dataclass_fields__, None))
    without = [rule.name for rule in default_rules(off)]
    with_it = [
        rule.name
        for rule in default_rules(replace(off, **{limit: 3.0 if limit in ("inputs", "sharpen", "flatten") else 0.5}))
    ]
    assert [name for name in with_it if name not in without] == [RULE_OF_A_LIMIT[limit]]
    assert len(with_it) == len(without) + 1


@pytest.mark.parametrize(
    ("rules", "thresholds", "message"),
    [
        ("all", None, '"default", None or a list'),
        ([MeanAlignment], None, "must hold rules"),
        ([MeanAlignment(), MeanAlignment(0.4)], None, "Two rules have the name 'mean alignment'"),
        ([MeanAlignment()], {"*": {"mean": 0.4}}, "in their own arguments"),
        ("default", {"*": {"average": 0.4}}, "none of mean, energy_mean"),
        ("default", {"*": {"mean": 4}}, "between 0 and 1, got 4"),
        ("default", {"*": {"logit": -4}}, "must be a positive number, got -4"),
    ],
)
def test_invalid_rules_and_thresholds_are_refused_with_the_remedy(rules, thresholds, message):
    with pytest.raises(MisconfigurationError, match=message):
        choose_rules(rules, thresholds)


BETWEEN_0_AND_1 = {
    AlignmentForecast: ("limit", "rise"), AlignmentTrend: ("false_alarms",), AttendAlike: ("limit",),
    AttentionSink: ("limit",), DeadHeads: ("share",), EntropyCollapse: ("limit",), FallingRank: ("flatness",),
    FewerKeys: ("share",), FlatAttention: ("limit",), LaterTokens: ("share",), MergedMessages: ("limit",),
    MergedScores: ("limit",), NarrowingHeads: ("share",), NoContribution: ("share",), RoundedAway: ("share",),
    SharedDirection: ("limit",), SharpFromStart: ("limit",), SuddenShrink: ("share",), TiedHeads: ("probability",),
    TokensAlike: ("limit",), VanishingWeights: ("share",),
}  # fmt: skip


@pytest.mark.parametrize(("rule", "name"), [(rule, name) for rule, names in BETWEEN_0_AND_1.items() for name in names])
def test_a_share_of_zero_or_one_is_refused(rule, name):
    for refused in (0, 1):
        with pytest.raises(MisconfigurationError, match=f"lie between 0 and 1, got {refused}"):
            rule(**{name: refused})
    for allowed in (1e-6, 1 - 1e-6):
        assert getattr(rule(**{name: allowed}), name) == allowed
