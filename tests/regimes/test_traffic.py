"""What readings send between ranks, against what `tests.benchmarks.plan` computes from the sizes of a model."""

from __future__ import annotations

from unittest import mock

import torch.distributed as dist

from hdi_callback import HeadDiversityMonitor
from hdi_callback.core.head_sums import HeadSums
from tests.benchmarks.plan import METRICS, Model, bytes_of_outputs, bytes_of_tokens, bytes_of_weights
from tests.models import HEADS, WIDTH
from tests.regimes.test_ddp import batch, classifier


def count_bytes(rank: int, metrics: list[str]) -> list[int]:
    """Of a reading without a forward, and of two with one."""
    model, sent, real = classifier(), [0], dist.all_reduce

    def counted(tensor, *args, **kwargs):
        sent[-1] += tensor.numel() * tensor.element_size()
        return real(tensor, *args, **kwargs)

    with mock.patch.object(dist, "all_reduce", counted), HeadDiversityMonitor(model, metrics=metrics) as monitor:
        for step in range(3):
            if step:
                monitor.arm()
                model(batch()).sum().backward()
            monitor.measure(step)
            sent.append(0)
    return sent[:3]


def read_within(rank: int, budget: int) -> dict:
    with HeadDiversityMonitor(classifier(), metrics=METRICS, memory_budget=budget) as monitor:
        model = monitor._model
        monitor.arm()
        model(batch()).sum().backward()
        record = monitor.measure(0).record()
    return {"tags": sorted(record.scalars(monitor.metrics)), "absent": record.absent}


def test_only_metrics_beyond_the_memory_budget_over_ranks_are_left_out_with_the_reason(two_ranks):
    needed = 3 * 4 * HeadSums.scatter_size(HEADS, WIDTH // HEADS)
    for reported, less in zip(two_ranks(read_within, needed), two_ranks(read_within, needed - 1)):
        assert reported.answer["absent"] == {}
        assert reported.warnings == []
        lost = {tag for tag in reported.answer["tags"] if tag.startswith("head_output_overlap/")}
        assert len(lost) == 4
        assert set(reported.answer["tags"]) - set(less.answer["tags"]) == lost
        assert set(less.answer["absent"]) == {f"head_output_overlap/blocks.{place}.attn" for place in range(3)}
        (warning,) = less.warnings
        assert f"memory_budget={needed - 1}" in warning


def test_the_bytes_of_a_reading_are_those_that_the_plan_computes(two_ranks):
    model = Model(layers=3, heads=HEADS, key_heads=HEADS, value_dim=WIDTH // HEADS, width=WIDTH)
    weights, outputs, tokens = bytes_of_weights(model), bytes_of_outputs(model), bytes_of_tokens(model)
    # Where no forward was to be captured, nothing but weights is added up.
    for reported in two_ranks(count_bytes, METRICS):
        assert reported.answer == [weights, weights + outputs, weights + outputs]
    for reported in two_ranks(count_bytes, [*METRICS, "token_cosine"]):
        assert reported.answer == [weights, *[weights + outputs + tokens] * 2]
