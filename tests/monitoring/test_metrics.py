from __future__ import annotations

import pytest
import torch

from hdi_callback.attention import ROLES
from hdi_callback.core import head_covariance, head_diversity, ov_circuits, qk_circuits
from hdi_callback.core.tokens import token_spread
from hdi_callback.errors import MisconfigurationError
from hdi_callback.monitoring.chosen_metrics import choose_metrics
from hdi_callback.monitoring.metrics import (
    CONTRIBUTION,
    COVARIANCE,
    DEFAULT_METRICS,
    FINITENESS,
    IMPORTANCE,
    KEYS,
    METRICS,
    MOVEMENT,
    OV,
    QK,
    ROWS,
    TOKENS,
    UPDATES,
    UPDATES_OV,
    UPDATES_QK,
)
from hdi_callback.monitoring.monitor.contributions import HeadContribution
from hdi_callback.monitoring.monitor.importance import HeadImportance
from hdi_callback.monitoring.monitor.join import join
from hdi_callback.monitoring.monitor.movement import HeadMovement, LastWeights
from hdi_callback.monitoring.monitor.rows import RowSums
from hdi_callback.monitoring.monitor.sources import WeightFiniteness
from hdi_callback.monitoring.monitor.update_lens import UpdateLens

EXAMPLES = {
    QK: lambda weight: qk_circuits(weight, weight),
    OV: lambda weight: ov_circuits(weight, weight),
    FINITENESS: lambda weight: WeightFiniteness(torch.zeros(3, 4)),
    MOVEMENT: lambda weight: HeadMovement(torch.ones(3, 4), torch.zeros(3, 4)),
    ROWS: lambda weight: join(ROWS, [(name, RowSums.none(4, weight.device).averages()) for name in "abc"]).values,
    KEYS: head_diversity,
    TOKENS: token_spread,
    UPDATES: lambda weight: UpdateLens(LastWeights(), rank_tol=1e-6).keys("abc", {"key": weight}),
    UPDATES_QK: lambda weight: qk_circuits(weight, weight),
    UPDATES_OV: lambda weight: ov_circuits(weight, weight),
    CONTRIBUTION: lambda weight: HeadContribution(torch.ones(3, 4), torch.zeros(3, 4), torch.ones(3)),
    IMPORTANCE: lambda weight: HeadImportance(
        torch.ones(3, 4), torch.ones(3, 4, 4), torch.ones(3), torch.ones(3), torch.ones(3, 4)
    ),
}


@pytest.mark.parametrize("metric", METRICS.values(), ids=lambda metric: metric.name)
def test_every_metric_gives_one_number_per_layer(metric):
    generator = torch.Generator().manual_seed(0)
    if metric.source == COVARIANCE:
        outputs, weight = torch.randn(40, 4, 8, generator=generator), torch.randn(4, 8, 32, generator=generator)
        values = head_covariance(outputs, weight, lengths=[10] * 4)
        assert metric.read(values).shape == ()
    elif metric.source in ROLES:
        values = head_diversity(torch.randn(3, 4, 8, 32, generator=generator))
        assert metric.read(values).shape == (3,)
    else:
        weight = torch.randn(3, 4, 8, 32, generator=generator)
        values = EXAMPLES[metric.source](weight[:, 0] if metric.source == TOKENS else weight)
        assert metric.read(values).shape == (3,)
    if metric.source in (ROWS, UPDATES):  # of no queries, and with nothing to compare with
        assert not torch.isfinite(metric.read(values).double()).any()
    else:
        assert torch.isfinite(metric.read(values).double()).all()
    assert metric.summary.endswith(".")


def test_the_mean_output_overlap_leaves_the_diagonal_out():
    outputs = torch.randn(50, 3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    values = head_covariance(outputs, torch.eye(4, dtype=torch.float64).expand(3, 4, 4))
    pairs = [float(values.output_overlap[h, g]) for h in range(3) for g in range(3) if h != g]
    assert float(METRICS["head_output_overlap"].read(values)) == pytest.approx(sum(pairs) / 6)


def test_few_curves_by_default():
    assert choose_metrics(None) == DEFAULT_METRICS
    assert len(DEFAULT_METRICS) <= 8
    assert set(DEFAULT_METRICS) <= set(METRICS)
    assert choose_metrics("default") == choose_metrics(["default"]) == DEFAULT_METRICS
    assert choose_metrics(["attention_sink", "default", "hdi"]) == ("attention_sink", *DEFAULT_METRICS)


def test_a_single_metric_name_is_refused_with_the_remedy():
    with pytest.raises(MisconfigurationError, match=r"write \['hdi'\]"):
        choose_metrics("hdi")


def test_an_unknown_metric_is_refused_with_those_that_exist():
    with pytest.raises(MisconfigurationError, match=r"unknown: \['nothing'\].*hdi_worst_pair"):
        choose_metrics(["hdi", "nothing"])
