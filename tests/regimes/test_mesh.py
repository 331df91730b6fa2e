"""Readings in a two-dimensional mesh of data and tensor parallelism, against those of one process with all data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.models import HEADS, WIDTH
from tests.regimes.test_ddp import METRICS, batch, classifier, monitor_of

# Gradients of a sum over tensor-parallel parts are no rank's own, and the importance of heads is made of them.
READ = [name for name in METRICS if "importance" not in name]


def mesh_of_four() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))


def split_over(mesh: Any, model: nn.Module) -> nn.Module:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")} | {"out_proj": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block.attn, mesh["tensor"], plan)
        block.attn.num_heads, block.attn.head_dim = HEADS // 2, WIDTH // HEADS
    return model


def read_in_a_mesh(rank: int, kind: str) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of_four()
    model = split_over(mesh, classifier())
    if kind == "fsdp2":
        for block in model.blocks:
            fully_shard(block, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
    else:
        model = nn.parallel.DistributedDataParallel(model, device_mesh=mesh["data"])
    share = batch()[: 2 * 3].chunk(2)[mesh.get_local_rank("data")]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    tags = []
    with monitor_of(model, metrics=READ) as monitor:
        for step in range(2):
            monitor.arm()
            model(share).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            record = monitor.measure(step).record()
            tags.append(record.scalars(READ))
    return {"tags": tags, "absent": record.absent, "refused": [str(one) for one in monitor.refused]}


def read_alone() -> dict[str, float]:
    model = classifier()
    with monitor_of(model, metrics=READ) as monitor:
        monitor.arm()
        model(batch()[: 2 * 3]).sum().backward()
        return monitor.measure(0).record().scalars(READ)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
def test_copies_of_a_tensor_parallel_model_read_as_one_process_on_all_ranks(four_ranks, kind):
    """DDP keeps a rank's part of a weight as a tensor of its own between forwards, and as an attribute during them."""
    whole = read_alone()
    for one in four_ranks(read_in_a_mesh, kind):
        assert one.warnings == []
        assert one.answer["absent"] == {}
        assert one.answer["refused"] == []
        assert one.answer["tags"] == [pytest.approx(whole, rel=1e-4, abs=1e-5)] * 2
