"""Two ranks measure what one process measures, and a rank that fails hangs nobody."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from hdi_callback.monitor import HeadDiversityMonitor, forward_source
from tests.monitor.models import Model
from tests.processes import on_ranks
from tests.versions import HAS_FSDP2_ON_CPU, Outcomes

METRICS = ["head_covariance", "attention_entropy", "circuit_qk_norm", "head_movement_min"]
pytestmark = pytest.mark.ranks
HOW = ["ddp", "uneven", "fsdp", "tp", "idle", "other layers", "failing"]  # the last leaves broken code behind
HOW = HOW if HAS_FSDP2_ON_CPU else [how for how in HOW if how != "fsdp"]


def data() -> torch.Tensor:
    return torch.randn(4, 6, 32, generator=torch.Generator().manual_seed(0))


def two_readings(model: torch.nn.Module, x: torch.Tensor, *, is_idle: bool = False) -> list[Any]:
    """Two readings with a fixed step between them; the last before any forward is armed."""
    records = []
    with HeadDiversityMonitor(model, metrics=[*METRICS]) as monitor:
        if is_idle:
            model(x)
        for step in range(2):
            monitor.arm()
            if not is_idle:
                model(x).square().mean().backward()
            records.append(monitor.measure(step).record())
            with torch.no_grad():
                for one in model.parameters():
                    one -= 0.1 * one.sign()
                    one.grad = None
        records.append(monitor.measure(2).record())
    return records


def plain(records: list[Any]) -> list[dict[str, Any]]:
    return [{name: (layer.values, layer.heads) for name, layer in record.layers.items()} for record in records]


def work(rank: int, folder: Path) -> None:
    torch.save({how: run(rank, how) for how in HOW}, folder / f"{rank}.pt")


def run(rank: int, how: str) -> Any:
    torch.manual_seed(0)
    model: Any = Model(2)
    x = data().chunk(2)[rank]
    if how == "ddp":
        return plain(two_readings(DistributedDataParallel(model), x))
    if how == "uneven":
        return plain(two_readings(model, data()[:3] if rank == 0 else data()[3:]))
    if how == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for layer in model.layers:
            fully_shard(layer)
        return plain(two_readings(fully_shard(model), x))
    if how == "tp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        plan = {name: ColwiseParallel() for name in ("query", "key", "value")} | {"mix": RowwiseParallel()}
        for layer in model.layers:
            parallelize_module(layer, init_device_mesh("cpu", (2,)), plan)
        return plain(two_readings(model, data()))
    if how == "idle":
        return plain(two_readings(model, data(), is_idle=rank == 1))
    if how == "other layers":
        model = Model(1 + rank)
        return plain(two_readings(model, x))
    if rank == 1:  # "failing": its own work raises

        def broken(*args: Any, **kwargs: Any) -> Any:
            raise FloatingPointError("of this rank alone")

        forward_source.contribution_sums = broken
    found = two_readings(model, x)
    return [(list(one.layers["layers.0"].values), one.layers["layers.0"].absent) for one in found]


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    on_ranks(2, folder, work, folder)
    ranks = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]
    return Outcomes({how: [rank[how] for rank in ranks] for how in HOW})


def expected() -> list[dict[str, Any]]:
    torch.manual_seed(0)
    return plain(two_readings(Model(2), data()))


def assert_same(found: list[Any], wanted: list[Any], without: tuple[str, ...] = ()) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.keys() == other.keys()
        for name in other:
            for own, own_wanted in zip(one[name], other[name]):
                kept = {key: value for key, value in own_wanted.items() if not key.startswith(without or ("-",))}
                assert kept.keys() <= own.keys()
                for key, value in kept.items():
                    assert own[key] == pytest.approx(value, rel=1e-4, abs=1e-5), (name, key)


@pytest.mark.parametrize("how", ["ddp", "fsdp", "uneven", "idle"])
def test_two_ranks_read_what_one_process_reads(how, on_two_ranks):
    for found in on_two_ranks[how]:
        assert_same(found, expected())


def test_heads_that_are_spread_over_ranks_are_read_whole(on_two_ranks):
    for found in on_two_ranks["tp"]:
        # Rows are of the heads that a rank computes: absent.
        assert_same(found, expected(), without=("attention_",))


def test_a_rank_whose_own_work_fails_leaves_nobody_waiting(on_two_ranks):
    healthy, broken = on_two_ranks["failing"]
    for values, absent in (*healthy[:2], *broken[:2]):
        assert "head_covariance" not in values
        assert "head outputs" in absent
        assert {"hdi", "circuit_qk_norm", "attention_entropy"} <= set(values)


def test_ranks_that_hold_other_layers_read_their_own(on_two_ranks):
    one, two = on_two_ranks["other layers"]
    assert [list(record) for record in one] == [["layers.0"]] * 3
    assert [list(record) for record in two] == [["layers.0", "layers.1"]] * 3
    assert all("head_covariance" in record["layers.0"][0] for record in one[:2])
