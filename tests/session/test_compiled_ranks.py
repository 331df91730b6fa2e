"""Compiled data parallelism on two ranks: heads are found and read, and training stays as it is."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from hdi_callback import load_history, watch_heads
from tests.attention.models import Model, batches
from tests.processes import on_ranks

pytestmark = pytest.mark.ranks


class Parts(Model):
    """Its last block runs from the third step on, and on the second rank alone."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for block in self.blocks[: 2 if self.calls > 2 and dist.get_rank() else 1]:
            x = block(x)
        return self.head(x)


def train(how: str, path: Path | None) -> list[float]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any = Parts() if how == "a part on one rank" else Model()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.track_running_stats = False
            module.running_mean = module.running_var = module.num_batches_tracked = None
    if how == "blocks":
        for block in model.blocks:
            block.compile(backend="aot_eager")
    model = DistributedDataParallel(model, find_unused_parameters=how == "a part on one rank")
    if how == "around":
        model = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    heads = None if path is None else watch_heads(model, optimizer, every_n_steps=1, history=str(path))
    losses = []
    for x, y in batches(4):
        x = x + dist.get_rank()
        with nullcontext() if heads is None else heads.step():
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    if heads is not None:
        heads.finish()
    return [*losses, *(float(weight.detach().double().sum()) for weight in model.parameters())]


def work(rank: int, how: str, folder: Path) -> None:
    alone = train(how, None)
    assert train(how, folder / "history.jsonl") == alone


@pytest.mark.parametrize("how", ["around", "blocks"])
def test_a_compiled_wrapper_is_read_on_two_ranks_and_training_stays_as_it_is(how: str, tmp_path: Path) -> None:
    on_ranks(2, tmp_path, work, how, tmp_path)
    *during, _ = load_history(tmp_path / "history.jsonl").records
    assert [record.step for record in during] == [0, 1, 2, 3]
    for record in during:
        assert list(record.layers) == ["blocks.0.attention", "blocks.1.attention"]
        for layer in record.layers.values():
            assert {"hdi", "head_covariance", "attention_entropy"} <= layer.values.keys(), layer.absent


def test_a_part_that_runs_later_on_one_rank_alone_stops_nobody(tmp_path: Path) -> None:
    on_ranks(2, tmp_path, work, "a part on one rank", tmp_path)
    records = load_history(tmp_path / "history.jsonl").records
    assert all("hdi" in record.layers["blocks.0.attention"].values for record in records)
