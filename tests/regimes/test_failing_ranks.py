"""A function of the package raises on one of two ranks: nobody waits for it, and the training's own calls meet."""

from __future__ import annotations

import time
from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hdi_callback import watch_heads
from hdi_callback.interventions import ScaleLearningRate
from hdi_callback.monitoring.alerts import Alerts
from hdi_callback.monitoring.layers import HeadVerifier
from hdi_callback.monitoring.monitor.inputs import LayerInputs
from hdi_callback.monitoring.monitor.outputs import HeadOutputs
from hdi_callback.monitoring.monitor.rows import AttentionReadings
from tests.monitoring.test_watch_interventions import Always
from tests.regimes.test_ddp import METRICS, SHARES, batch, classifier, monitor_of

PLACES = {
    "before the ranks meet": (HeadVerifier, "verify"),
    "before the first sum": (HeadOutputs, "shares"),
    "between two sums": (HeadOutputs, "sums"),
    "before the rows add up": (AttentionReadings, "measure_over"),
    "between the layers": (LayerInputs, "_add_up"),
}
ROWS = ["attention_entropy", "token_cosine"]


@contextmanager
def raising(owner: type, name: str, calls: set[int]):
    """Let a few calls of a method raise."""
    real, count = getattr(owner, name), [0]

    def method(self, *args, **kwargs):
        count[0] += 1
        if count[0] - 1 in calls:
            raise RuntimeError("a bug")
        return real(self, *args, **kwargs)

    with mock.patch.object(owner, name, method):
        yield


def read_while_one_rank_fails(rank: int, place: str) -> dict:
    model, records, sums = DistributedDataParallel(classifier()), [], []
    begun = time.monotonic()
    with ExitStack() as stack:
        monitor = stack.enter_context(monitor_of(model, metrics=[*METRICS, *ROWS]))
        if rank == 1:
            stack.enter_context(raising(*PLACES[place], calls={1 if place != "between the layers" else 4}))
        for step in range(3):
            monitor.arm()
            model(batch()[SHARES[rank]]).sum().backward()
            records.append(monitor.measure(step).record())
            own = torch.full((3,), 1.0 + rank)
            dist.all_reduce(own)  # the training's own
            sums.append(own.tolist())
    tags = [record.scalars([*METRICS, *ROWS]) for record in records]
    return {"tags": tags, "sums": sums, "seconds": time.monotonic() - begun}


@pytest.mark.parametrize("place", PLACES)
def test_a_rank_that_fails_in_a_reading_blocks_no_other_and_takes_part_in_the_next(two_ranks, place):
    first, second = two_ranks(read_while_one_rank_fails, place)
    for rank in (first, second):
        assert rank.answer["sums"] == [[3.0] * 3] * 3, "the training's own calls meet their like"
        assert rank.answer["seconds"] < 30
        before, _, after = rank.answer["tags"]
        assert after == pytest.approx(before, abs=1e-6), "the ranks measure together again"
    assert len(first.warnings) == 1, "the rank that did not fail says why it was alone"
    assert sum("a bug" in line for line in second.warnings) == 1
    assert {tag for tag in first.answer["tags"][1] if tag.startswith("hdi/")} >= {"hdi/mean", "hdi/blocks.0.attn"}


def train_where_one_rank_cannot_judge(rank: int, fails: bool) -> dict:
    model = DistributedDataParallel(classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    begun = time.monotonic()
    with ExitStack() as stack:
        if fails and rank == 1:
            stack.enter_context(mock.patch.object(Alerts, "active", property(lambda self: 1 / 0)))
        acting = ScaleLearningRate(0.5)
        chosen = {"interventions": [acting], "alerts": [Always()]}
        heads = stack.enter_context(
            watch_heads(model, optimizer, every_n_steps=1, history=False, verbose=False, **chosen)
        )
        for _ in range(3):
            with heads.step():
                model(batch()[SHARES[rank]]).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    return {"acted": acting.count, "seconds": time.monotonic() - begun}


def test_no_rank_intervenes_if_one_cannot_take_part(two_ranks):
    acting, failing = (two_ranks(train_where_one_rank_cannot_judge, fails) for fails in (False, True))
    assert acting[0].answer["acted"] == acting[1].answer["acted"] > 0
    for rank in failing:
        assert rank.answer["acted"] == 0
        assert rank.answer["seconds"] < 30
        assert sum("agreeing on interventions failed" in line for line in rank.warnings) == 1
