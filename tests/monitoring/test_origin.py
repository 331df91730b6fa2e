"""Fresh weights are distinguished from trained ones."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.special
import torch
from torch import nn

from hdi_callback.core import head_diversity
from hdi_callback.monitoring import origin
from hdi_callback.monitoring.alerts import Alerts
from hdi_callback.monitoring.monitor import HeadDiversityMonitor
from hdi_callback.monitoring.rules import default_rules
from tests.experiments.collapse.models import Data, Model, Shape

INITIALISATIONS = {
    "xavier uniform": nn.init.xavier_uniform_,
    "linear": lambda weight: nn.init.kaiming_uniform_(weight, a=5**0.5),
    "normal": lambda weight: nn.init.normal_(weight, std=0.02),
    "truncated normal": lambda weight: nn.init.trunc_normal_(weight, std=0.02),
    "xavier normal": nn.init.xavier_normal_,
    "orthogonal": nn.init.orthogonal_,
}


def arrays(weight: torch.Tensor) -> dict[str, list[float]]:
    result = head_diversity(weight)
    return {"flatness": result.flatness.tolist(), "rank": result.rank.tolist()}


def test_digamma_and_trigamma_agree_with_scipy():
    x = np.concatenate([np.linspace(0.5, 30, 60), [100.0, 4096.0]])
    assert [origin._digamma(value) for value in x] == pytest.approx(scipy.special.digamma(x).tolist(), abs=1e-12)
    assert [origin._trigamma(value) for value in x] == pytest.approx(scipy.special.polygamma(1, x).tolist(), rel=1e-12)


@pytest.mark.parametrize(("k", "d"), [(4, 32), (16, 64), (16, 16)])
def test_the_distribution_of_the_flatness_is_that_of_gaussian_heads(k, d):
    draw = torch.Generator().manual_seed(0)
    flatness = head_diversity(torch.randn(4000, 1, k, d, generator=draw)).flatness.double().log().flatten()
    mean, deviation = origin._law(k, d)
    assert float(flatness.mean()) == pytest.approx(mean, abs=4 * deviation / 4000**0.5)
    assert float(flatness.std()) == pytest.approx(deviation, rel=0.06)


@pytest.mark.some_slow(quick=3)
@pytest.mark.parametrize("name", INITIALISATIONS)
def test_no_fresh_layer_is_classified_as_trained(name):
    torch.manual_seed(0)
    taken = 0
    for heads, k, d in [(4, 8, 32), (4, 16, 64), (8, 2, 16), (2, 16, 16), (4, 12, 48), (8, 64, 512)]:
        for _ in range(50 if d < 512 else 5):
            weight = torch.empty(heads * k, d)
            INITIALISATIONS[name](weight)
            facts = {"width": d, "head_dim": k}
            taken += origin.has_been_trained(arrays(weight.view(heads, k, d)), facts)
    assert taken == 0


def test_a_fresh_layer_with_copied_or_dead_heads_is_not_classified_as_trained():
    torch.manual_seed(0)
    weight = torch.randn(4, 8, 32)
    weight[1:] = weight[:1].clone()
    facts = {"width": 32, "head_dim": 8}
    assert not origin.has_been_trained(arrays(weight), facts)
    weight[1:] = 0
    assert not origin.has_been_trained(arrays(weight), facts)
    assert not origin.has_been_trained(arrays(torch.zeros(4, 8, 32)), facts)
    assert not origin.has_been_trained({}, {})


@pytest.mark.slow
def test_a_trained_model_is_recognised_by_its_weights_and_raises_no_alert_at_its_first_reading():
    torch.manual_seed(0)
    model, data = Model(Shape(layers=2, width=48)), Data("text", 0, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    with HeadDiversityMonitor(model, metrics=["hdi"]) as monitor:
        facts = [layer.facts() for layer in monitor.layers]
        fresh = monitor.measure(0).record()
        for _ in range(120):
            model.loss(*data.draw()).backward()
            optimizer.step()
            optimizer.zero_grad()
        trained = monitor.measure(120).record()
    for fact in facts:
        assert not origin.has_been_trained(fresh.layers[fact["name"]].arrays, fact)
        assert origin.has_been_trained(trained.layers[fact["name"]].arrays, fact)
    assert Alerts(default_rules(), facts).judge(trained) == []
