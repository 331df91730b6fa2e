"""Every metric over two ranks, with weights held whole or in parts: what one process reads of the joined batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from hdi_callback.monitoring.metrics import METRICS
from tests.regimes.conftest import two_ranks  # noqa: F401
from tests.regimes.test_ddp import FEW, batch, classifier, monitor_of
from tests.regimes.test_sharding import fsdp2

NAMES = list(METRICS)
ROWS = [name for name, metric in METRICS.items() if metric.source == "attention rows"]
ALONE = {name for name in NAMES if name.endswith("_error")}  # which are of one process, and say so
WRAPPERS = {"DDP": DistributedDataParallel, "FSDP2": fsdp2}


def read_all(rank: int | None, wrapper: str = "") -> dict[str, Any]:
    """Train two steps, of which each is read: on the tokens of one rank, or on all of them for `None`."""
    model: Any = classifier() if rank is None else WRAPPERS[wrapper](classifier())
    tokens = batch()[: FEW[1].stop] if rank is None else batch()[FEW[rank]]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    records = []
    with monitor_of(model, metrics=NAMES) as monitor:
        for number in range(2):
            monitor.arm()
            loss = model(tokens).square().sum() / 10
            (loss if rank is None else 2 * loss).backward()  # gradients are averaged over ranks
            records.append(monitor.measure(number).record())
            optimizer.step()
            optimizer.zero_grad()
    return {
        "tags": [record.scalars(NAMES) for record in records],
        "absent": [record.absent for record in records],
        "heads": [{name: layer.arrays for name, layer in record.layers.items()} for record in records],
    }


@pytest.mark.some_slow(quick=0)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_every_metric_over_two_ranks_is_that_of_one_process_on_the_joined_batch(two_ranks, wrapper):  # noqa: F811
    alone, reported = read_all(None), two_ranks(read_all, wrapper)
    names = {tag.partition("/")[0] for tag in alone["tags"][1]}
    assert names == set(NAMES), "each is in the second reading of one process"
    for rank in reported:
        for mine, whole in zip(rank.answer["tags"], alone["tags"]):
            expected = {tag: value for tag, value in whole.items() if tag.partition("/")[0] not in ALONE}
            assert mine == pytest.approx(expected, rel=1e-3, abs=1e-4)
        assert [
            line for line in rank.warnings if "are not computed over several ranks; they are absent" not in line
        ] == []
        assert sum("Standard errors" in line for line in rank.warnings) == 1
    assert repr(reported[0].answer) == repr(reported[1].answer), (
        "every rank has the whole reading, and the same reasons"
    )


def read_parts_of_heads(rank: int) -> list[Any]:
    """Train with half of the heads of every layer on each rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = classifier()
    plan = {name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")} | {"out_proj": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block.attn, init_device_mesh("cpu", (2,)), plan)
        block.attn.num_heads //= 2
        block.attn.head_dim = 8
    with monitor_of(model, metrics=["hdi", *ROWS]) as monitor:
        records = []
        for step in range(2):
            monitor.arm()
            model(batch()).sum().backward()
            records.append(monitor.measure(step).record())
    return [(record.absent, {name: layer.values for name, layer in record.layers.items()}) for record in records]


@pytest.mark.slow
def test_attention_split_over_ranks_is_absent_with_the_reason_and_reported_once(two_ranks):  # noqa: F811
    for reported in two_ranks(read_parts_of_heads):
        assert [len(layers) for _, layers in reported.answer] == [len(classifier().blocks)] * 2, "two readings"
        for absent, layers in reported.answer:
            assert {key for key in absent if key.startswith("attention rows/")} == {
                f"attention rows/{name}" for name in layers
            }
            for values in layers.values():
                assert "hdi" in values
                assert set(ROWS).isdisjoint(values), "never 0"
        assert sum("attention rows" in line for line in reported.warnings) == 1
