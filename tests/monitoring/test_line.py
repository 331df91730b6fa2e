"""The line through a curve of alignments, against SciPy, and what rules and pages make of lines and of alerts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats

from hdi_callback.monitoring.alerts import Alert, Finding
from hdi_callback.monitoring.rules import AlignmentTrend
from hdi_callback.monitoring.rules.line import fit_line, stretch
from hdi_callback.monitoring.rules.replay import active_alerts
from tests.monitoring.test_rules import curve, judge

STEPS = [0, 7, 10, 25, 31, 40, 58, 60, 75]
SHAPES = {
    "apart": [0.1, 0.5, 0.05, 0.6, 0.1, 0.7, 0.2, 0.75, 0.3],  # what is left alternates
    "waves": [0.1, 0.2, 0.3, 0.28, 0.25, 0.3, 0.42, 0.5, 0.55],  # and goes in runs
    "bent": [0.1, 0.1, 0.12, 0.15, 0.2, 0.3, 0.5, 0.8, 0.97],
}


def test_the_stretched_scale_makes_an_exponential_approach_to_one_a_line_and_is_finite_at_one():
    assert [stretch(1 - math.exp(-0.5 * t)) for t in range(6)] == pytest.approx([0.5 * t for t in range(6)])
    assert stretch(0.0) == 0.0
    assert 20 < stretch(1.0) < 21
    assert stretch(1.0 + 1e-6) == stretch(1.0)  # by rounding


@pytest.mark.parametrize("readings", [6, 9])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_line_agrees_with_scipy_and_its_error_grows_with_autocorrelation(shape, readings):
    x, y = np.array(STEPS[-readings:]), -np.log1p(-np.array(SHAPES[shape][-readings:]))
    truth = scipy.stats.linregress(x, y)
    rest = y - truth.intercept - truth.slope * x
    correlation = float(np.clip((rest[:-1] * rest[1:]).sum() / (rest**2).sum(), 0, 0.99))
    line = fit_line(STEPS, SHAPES[shape], readings)
    assert line.slope == pytest.approx(truth.slope)
    assert line.error == pytest.approx(truth.stderr * math.sqrt((1 + correlation) / (1 - correlation)))
    assert (correlation > 0) == (shape != "apart")
    half = readings // 2
    assert line.early == pytest.approx(scipy.stats.linregress(x[:half], y[:half]).slope)
    assert line.late == pytest.approx(scipy.stats.linregress(x[half:], y[half:]).slope)


def test_a_line_needs_readings_at_different_steps():
    values = SHAPES["waves"]
    assert fit_line(STEPS, values, 10) is None
    assert fit_line(STEPS, values, 9) is not None
    assert fit_line([5] * 9, values, 9) is None
    assert fit_line([0, 0, *STEPS[2:]], values, 9) is not None, "a run that went on from step 0"


def test_a_curve_that_is_straight_has_no_error():
    line = fit_line(STEPS, [1 - math.exp(-0.01 * step) for step in STEPS], 9)
    assert line.slope == pytest.approx(0.01)
    assert line.error == pytest.approx(0.0, abs=1e-9)
    flat = fit_line(STEPS, [0.0] * 9, 9)
    assert (flat.slope, flat.error) == (0.0, 0.0)


def test_no_trend_is_reported_after_readings_without_any_spread():
    assert judge(AlignmentTrend(), curve([0.3] * 30 + [0.6] * 10)) == []


@pytest.mark.parametrize("readings", [1, 2, 21])
def test_no_trend_is_reported_before_the_spread_of_twenty_changes_is_known(readings):
    assert judge(AlignmentTrend(), curve([0.1 + 0.03 * place + 0.001 * (place % 2) for place in range(readings)])) == []


def alert(step: int, layer: str, level: str, rule: str = "worst pair", is_resolved: bool = False) -> Alert:
    return Alert(step, layer, rule, level, "...", Finding("...", level), is_resolved)


def test_active_alerts_are_the_unresolved_ones_most_serious_first():
    reported = [
        alert(10, "a", "warning"),
        alert(10, "b", "critical"),
        alert(20, "a", "critical"),
        alert(20, "c", "warning"),
        alert(30, "b", "critical", is_resolved=True),
        alert(30, "d", "notice"),
        alert(40, "c", "warning", rule="mean alignment"),
    ]
    assert [(one.step, one.layer, one.rule) for one in active_alerts(reported)] == [
        (20, "a", "worst pair"), (20, "c", "worst pair"), (40, "c", "mean alignment")
    ]  # fmt: skip
    assert [one.layer for one in active_alerts(reported, "notice")] == ["a", "c", "c", "d"]
    assert [one.layer for one in active_alerts(reported, "critical")] == ["a"]


def test_an_alert_that_eased_below_the_requested_level_is_not_active():
    reported = [alert(10, "a", "critical"), alert(20, "a", "warning")]
    assert active_alerts(reported, "critical") == []
    assert [one.step for one in active_alerts(reported)] == [20]
