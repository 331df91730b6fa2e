"""The experiment on ablation removes what it says it removes, and its statistics are those of SciPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from tests.experiments.ablation import HEADS, PAIRS, correlation, decoder, examine, interval, report

SMALL = {"steps": 8, "layers": 2, "heads": 4, "width": 16, "length": 16}


@pytest.fixture(scope="module")
def subject():
    return decoder(0, **SMALL)


@pytest.fixture(scope="module")
def found(subject):
    return examine(subject)


def test_a_head_is_removed_as_if_its_output_weights_were_zero(subject, found):
    with torch.no_grad():
        whole = float(subject.loss())
        for place, block in enumerate(subject.model.blocks):
            weight = block.attention.out_proj.weight
            kept = weight.clone()
            for heads, damage in [([2], found[place].damage[2]), ([0, 3], found[place].both[2])]:
                for head in heads:
                    weight[:, 4 * head : 4 * head + 4] = 0
                assert float(subject.loss()) - whole == pytest.approx(damage, abs=1e-6)
                weight.copy_(kept)
        assert found[0].pairs[2] == (0, 3)
        assert float(subject.loss()) == whole


def test_every_head_and_pair_score_is_finite_and_the_first_order_cost_follows_the_damage(found):
    for one in found:
        assert set(one.heads) == set(HEADS)
        assert set(one.said) == set(PAIRS)
        assert all(np.isfinite(values).all() for values in [*one.heads.values(), *one.said.values(), one.first_order])
        # A fresh model is linear enough for the first order to be the truth.
        assert one.heads["slope"] == pytest.approx(one.damage, abs=0.2 * np.abs(one.damage).max())


def test_rank_correlations_are_those_of_scipy():
    generator = np.random.default_rng(0)
    of, against = generator.integers(5, size=30).astype(float), generator.normal(size=30)
    assert correlation(of, against) == pytest.approx(spearmanr(of, against).statistic)
    assert np.isnan(correlation(np.ones(4), against[:4]))


def test_an_interval_holds_the_mean_and_is_as_wide_as_the_mean_is_uncertain():
    values = np.random.default_rng(1).normal(3, 2, size=400)
    mean, low, high = interval([*values, float("nan")])
    assert mean == pytest.approx(values.mean())
    assert high - low == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.1)


def test_the_report_has_a_row_for_everything_that_is_compared(found):
    lines = "\n".join(report({"a": found, "b": found}, "python -m tests.experiments.ablation"))
    assert all(meaning in lines for meaning in HEADS.values())
    assert all(f"| {name} |" in lines for name in PAIRS)
