"""Weights and outputs that are not finite are found at every reading, also where finite sums spare the test."""

from __future__ import annotations

import math

import pytest
import torch

from hdi_callback import HeadDiversityMonitor
from hdi_callback.core.contribution import ContributionSums
from hdi_callback.monitoring.metrics import RULE_METRICS
from hdi_callback.monitoring.monitor.contributions import not_finite
from tests.models import HEADS, LAYERS, LENGTH, Classifier

D_K = 8


def read(monitor: HeadDiversityMonitor, model: Classifier, step: int, layer: str = LAYERS[0]):
    monitor.arm()
    model(torch.randint(16, (3, LENGTH), generator=torch.Generator().manual_seed(step))).sum().backward()
    return monitor.measure(step).record().layers[layer]


@pytest.mark.parametrize(
    ("role", "value", "at"),
    [("query", math.nan, 1), ("key", math.inf, 2), ("value", -math.inf, 2), ("output", math.nan, 0)],
)
def test_a_non_finite_weight_is_counted_at_the_first_reading_and_at_later_ones(role, value, at):
    torch.manual_seed(0)
    model = Classifier()
    attention = model.blocks[0].attn
    maps = {"query": attention.q_proj, "key": attention.k_proj, "value": attention.v_proj, "output": attention.out_proj}
    with HeadDiversityMonitor(model, rule_metrics=RULE_METRICS) as monitor:
        for step in range(4):
            with torch.no_grad():
                if step == at:
                    # Head 2 of four: its rows, or its columns of the output.
                    place = (1, 2 * D_K) if role == "output" else (2 * D_K, 1)
                    maps[role].weight[place] = value
                elif step == at + 1:
                    maps[role].weight.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
                model.head.weight += 0.01
            found = read(monitor, model, step)
            expected = [0.0] * HEADS
            expected[2] = float(step == at)
            assert found.arrays["weights_not_finite"] == expected, step


def test_weights_too_large_for_their_squares_are_finite():
    torch.manual_seed(0)
    model = Classifier()
    with HeadDiversityMonitor(model, rule_metrics=RULE_METRICS) as monitor:
        for step in range(3):
            with torch.no_grad():
                model.blocks[1].attn.q_proj.weight.fill_(1e30 * (step + 1))
            assert read(monitor, model, step, LAYERS[1]).values["weights_not_finite"] == 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("is_padded", [False, True])
def test_non_finite_outputs_are_counted_per_head_except_in_padding(value, is_padded):
    outputs = torch.randn(7, 3, 4, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(3, 4, 12, generator=torch.Generator().manual_seed(1))
    weights = torch.tensor([1.0, 1, 1, 1, 1, 1, 0])
    outputs[6 if is_padded else 2, 1, 3] = value
    clean = torch.where(weights[:, None, None] == 0, 0, outputs)
    sums = ContributionSums.of(clean, weight)
    expected = torch.tensor([False, not is_padded, False])
    assert torch.equal(not_finite(outputs, weights, sums), expected)
    assert torch.equal(not_finite(outputs, weights), expected)
