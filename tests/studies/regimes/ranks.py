"""The same training on two ranks: data parallel, sharded, tensor parallel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.processes import on_ranks
from tests.studies.regimes.trainings import Regime, train


def shard(model: nn.Module, how: str) -> nn.Module:
    """Spread a model over the ranks of the process group."""
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if how == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for block in model.get_submodule("blocks").children():
            fully_shard(block)
        return fully_shard(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")} | {"o_proj": RowwiseParallel()}
    for block in model.get_submodule("blocks").children():
        parallelize_module(block.attn, init_device_mesh("cpu", (dist.get_world_size(),)), plan)  # type: ignore[arg-type]
    return model


def on_two_ranks(regimes: list[Regime], folder: Path) -> list[list[tuple[Any, Any]]]:
    """Train under each regime without a monitor and with one; return what each rank found."""
    on_ranks(2, folder, _train, regimes, folder)
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(2)]


def _train(rank: int, regimes: list[Regime], folder: Path) -> None:
    train(regimes[0], folder / "first", is_watched=False)  # what is imported meanwhile draws random numbers
    found = []
    for regime in regimes:
        pair = [train(regime, folder / f"{regime.parallel}-{place}", is_watched=place == 1) for place in range(2)]
        found.append(tuple(pair))
    torch.save(found, folder / f"rank-{rank}.pt")
