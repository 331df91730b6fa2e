"""The experiment on low diversity holds what it says it holds, and its tasks ask what they say they ask."""

from __future__ import annotations

import pytest
import torch

from hdi_callback import find_attention
from hdi_callback.core import head_diversity
from tests.experiments import low_diversity
from tests.experiments.collapse.models import Model, Shape
from tests.experiments.low_diversity import Confinement, Copies, Job, plan, train


@pytest.mark.slow
@pytest.mark.parametrize("dimension", [16, 32])
def test_heads_in_a_shared_subspace_have_the_hdi_of_its_dimension_and_others_that_of_chance(dimension):
    shared, private = [], []
    for seed in range(20):
        torch.manual_seed(seed)
        (layer,) = find_attention(Model(Shape("digits", 1, 4, 4, 64)))
        for is_shared, found in ((True, shared), (False, private)):
            draw = torch.Generator().manual_seed(seed)
            Confinement(layer, "key", dimension, is_shared, draw)()
            found.append(float(head_diversity(layer.weight("key").detach()).index))
            ranks = torch.linalg.matrix_rank(layer.weight("key").detach().flatten(0, 1))
            assert ranks == dimension if is_shared else ranks > dimension
            torch.manual_seed(seed)
            (layer,) = find_attention(Model(Shape("digits", 1, 4, 4, 64)))
    assert sum(shared) / 20 == pytest.approx(1 - 16 / dimension, abs=0.02)
    assert sum(private) / 20 == pytest.approx(1 - 16 / 64, abs=0.02)


def test_heads_stay_confined_through_training():
    result = train(Job("sorting", "shared", "keys", 16, 0), steps=5)
    assert result["hdi"] < 1e-6
    assert train(Job("sorting", "private", "keys", 16, 0), steps=5)["hdi"] > 0.6


def test_copies_stay_copies_through_training():
    assert train(Job("sorting", "copies", "keys", 64, 0), steps=5)["hdi"] < 1e-6
    torch.manual_seed(0)
    layers = find_attention(Model(Shape("text", 1, 4, 4, 64)))
    for role in ("query", "key"):
        Copies(layers[0], role)()
        weight = layers[0].weight(role)
        assert torch.equal(weight, weight[:1].expand_as(weight))


def test_the_arms_of_a_seed_differ_in_their_confinement_alone():
    free = train(Job("digits", "free", "keys", 64, 3), steps=4)
    assert free == train(Job("digits", "free", "keys", 64, 3), steps=4)
    whole = train(Job("digits", "shared", "keys", 64, 3), steps=4)
    assert whole["validation_loss"] == pytest.approx(free["validation_loss"], abs=1e-3), (
        "all 64 dimensions confine none"
    )


def test_the_tasks_have_the_right_answers():
    x, y = low_diversity.recall(3, torch.Generator().manual_seed(0))
    for row, answers in zip(x.tolist(), y.tolist()):
        facts = {key: value - 16 for key, value in zip(row[0:16:2], row[1:16:2])}
        assert len(facts) == 8
        for place in range(17, 40, 2):
            assert answers[place] == max(facts[row[place - 1]], facts[row[place]])
        assert all(answer == -100 for place, answer in enumerate(answers) if place < 17 or place % 2 == 0)
    x, y = low_diversity.offsets(2, torch.Generator().manual_seed(0))
    for row, answers in zip(x.tolist(), y.tolist()):
        assert answers[14:] == [row[t - 2] + row[t - 5] + row[t - 9] + row[t - 14] for t in range(14, 40)]
    x, y = low_diversity.sorting(2, torch.Generator().manual_seed(0))
    for row, answers in zip(x.tolist(), y.tolist()):
        assert answers[12:] == sorted(row[:12])
        assert row[13:] == answers[12:-1], "nothing is given away ahead of its turn"


def test_the_report_pairs_runs_by_seed():
    results = [
        {
            **job.__dict__,
            "hdi": 0.1,
            "validation_loss": 1 + job.seed + {"free": 0, "shared": 0.5, "private": 0.2, "copies": 0.7}[job.arm],
        }
        for job in plan((11, 12, 13))
    ]
    lines = low_diversity.report(results, (11, 12, 13))
    rows = [line for line in lines if line.startswith("| sorting | keys | 16")]
    assert rows == [
        "| sorting | keys | 16 | 0.10 | 0.10 | 13.000 | +0.200 (+0.200 to +0.200) ** | +0.300 (+0.300 to +0.300) ** |"
    ]
    assert "| sorting | 13.000 | +0.700 (+0.700 to +0.700) ** | +0.700 (+0.700 to +0.700) ** |" in lines
