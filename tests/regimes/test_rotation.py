"""Two ranks that measure together have the same layers in turn, and read what one process does."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn

from hdi_callback import HeadDiversityMonitor
from hdi_callback.monitoring.metrics import RULE_METRICS
from tests.models import LENGTH, Classifier

IN_TURN = ("circuit_qk_worst", "circuit_ov_norm", "attention_logit", "token_cosine")


def read(rank: int | None) -> list[dict[str, float]]:
    torch.manual_seed(0)
    model: nn.Module = Classifier(blocks=3)
    tokens = torch.randint(16, (4, LENGTH), generator=torch.Generator().manual_seed(3))
    if rank is not None:
        tokens = tokens[2 * rank : 2 * rank + 2]
    found = []
    small_is_wide = mock.patch("hdi_callback.monitoring.monitor.rotation._WIDE", 100)
    with small_is_wide, HeadDiversityMonitor(model, rule_metrics=RULE_METRICS, rotate_layers=True) as monitor:
        for step in range(5):
            monitor.arm()
            model(tokens).sum().backward()
            record = monitor.measure(step).record()
            found.append(record.scalars([*monitor.metrics, *IN_TURN]))
    return found


def test_rotation_over_ranks_measures_the_layers_that_one_process_measures(two_ranks):
    alone = read(None)
    for metric, last in (("attention_logit", [[], [2], [1], [0]]), ("circuit_qk_worst", [[], [], [], []])):
        of_turn = [sorted(tag for tag in tags if tag.startswith(f"{metric}/blocks")) for tags in alone]
        assert [[int(tag.split(".")[1]) for tag in tags] for tags in of_turn] == [[0, 1, 2], *last]
    for rank in two_ranks(read):
        assert rank.warnings == []
        for ours, theirs in zip(rank.answer, alone):
            assert set(ours) == set(theirs)
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)
