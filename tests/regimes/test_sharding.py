"""Readings of models whose weights are spread over ranks, against those of the same model in one process."""

from __future__ import annotations

import gc
import os
import sys
import weakref
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from hdi_callback import HeadDiversityMonitor
from hdi_callback.attention import find_attention
from hdi_callback.attention.layer.sharding import _tensor_parallel_degree, with_global_shapes
from hdi_callback.monitoring.monitor.weights import WeightReader
from tests.benchmarks.memory import peak
from tests.models import HEADS, WIDTH, Attention, Classifier
from tests.regimes.test_ddp import METRICS, SHARES, batch, classifier, monitor_of, reading_alone
from tests.skips import NEEDS_PEAK

WIDTHS = WIDTH // HEADS


class Fused(nn.Module):
    """Attention with one projection for all, known by a trial forward alone."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def fused_classifier() -> Classifier:
    model = classifier()
    torch.manual_seed(4)
    for block in model.blocks:
        block.attn = Fused()
    return model


MAKERS = {"separate": classifier, "fused": fused_classifier}


# --- what the ranks do


def fsdp2(model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp1(model: nn.Module, *, by_block: bool, keeps_parameters: bool) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    options = {"use_orig_params": keeps_parameters, "device_id": torch.device("cpu")}
    if by_block:
        model.blocks = nn.Sequential(*(FullyShardedDataParallel(block, **options) for block in model.blocks))
    return FullyShardedDataParallel(model, **options)


SHARDERS = {
    "fsdp2": fsdp2,
    "fsdp1 by block": lambda model: fsdp1(model, by_block=True, keeps_parameters=True),
    "fsdp1 flat by block": lambda model: fsdp1(model, by_block=True, keeps_parameters=False),
    "fsdp1 whole": lambda model: fsdp1(model, by_block=False, keeps_parameters=True),
}


def read_sharded(rank: int, sharder: str, maker: str, is_early: bool) -> dict:
    model = MAKERS[maker]()
    if is_early and sharder == "fsdp2":  # which shards in place
        monitor = monitor_of(model)
        wrapped = SHARDERS[sharder](model)
    else:
        wrapped = SHARDERS[sharder](model)
        monitor = monitor_of(wrapped)
    before = [parameter.numel() for parameter in wrapped.parameters()]
    with monitor:
        weights_at_first = monitor.measure(0).record().scalars(["hdi"])
        for step in (1, 2):
            monitor.arm()
            wrapped(batch()[SHARES[rank]]).sum().backward()
            record = monitor.measure(step).record()
        largest = _largest_at_once(monitor)
    return {
        "tags": record.scalars(METRICS),
        "at first": weights_at_first,
        "absent": record.absent,
        "is untouched": [parameter.numel() for parameter in wrapped.parameters()] == before,
        "facts": [fact["width"] for fact in monitor.facts],
        "largest at once": largest,
    }


def _largest_at_once(monitor: HeadDiversityMonitor) -> int:
    """How many layers' whole weights are alive at the same time while the first rank reads all of them."""
    alive, most, original = [], 0, WeightReader.weight

    def weight(self, layer, role, ranks):
        nonlocal most
        found = original(self, layer, role, ranks)
        alive.append((layer.name, weakref.ref(found)))
        most = max(most, len({name for name, ref in alive if ref() is not None}))  # circuits take two roles of a layer
        return found

    with mock.patch.object(WeightReader, "weight", weight), mock.patch.object(monitor._reader, "_budget", 1):
        monitor.measure(9)
    return most


def read_tensor_parallel(rank: int, is_early: bool, counts: str) -> dict:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = classifier()
    metrics = [name for name in METRICS if "importance" not in name]
    monitor = monitor_of(model, metrics=metrics) if is_early else None
    plan = {name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")} | {"out_proj": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block.attn, init_device_mesh("cpu", (2,)), plan)
        block.attn.num_heads //= 2  # as the forward counts the heads of its rank
        if counts == "with a width":
            block.attn.head_dim = WIDTHS
    with monitor or monitor_of(model, metrics=metrics) as monitor:
        monitor.arm()
        model(batch()).sum().backward()
        reading = monitor.measure(0)
        record = reading.record()
    return {
        "tags": record.scalars(metrics),
        "tokens": [found.values.tokens.tolist() for found in reading.measurements if found.source == "head outputs"],
        "heads": [layer.num_heads for layer in monitor.layers],
        "heads of the rank": [block.attn.num_heads for block in model.blocks],
        "absent": record.absent,
    }


def read_sharded_alone(rank: int) -> dict:
    with monitor_of(fsdp2(classifier()), process_group=None) as monitor:
        return monitor.measure(0).record().absent


def bytes_to_find(rank: int, width: int) -> dict[str, Any]:
    """What finding the heads of a sharded model takes at its peak, and what one whole weight would."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with torch.device("meta"):
        model = nn.Sequential(*(Attention(width, 32) for _ in range(2)))
    mesh = init_device_mesh("cpu", (2,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh).to_empty(device="cpu")
    find_attention(classifier())  # what is loaded when the first model is searched
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = peak("cpu")
    found = find_attention(model)
    at_peak = peak("cpu") - before
    model[0].q_proj.weight.to_local() + 1  # the ruler: a copy of the half that this rank holds
    return {
        "heads": [layer.num_heads for layer in found], "peak": at_peak, "with a copy": peak("cpu") - before,
        "half a weight": width**2 * 4 // 2,
    }  # fmt: skip


# --- what must come of it


@pytest.mark.some_slow(quick=4)
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("sharder", SHARDERS)
def test_sharded_weights_read_as_whole_ones(two_ranks, sharder, maker):
    model = MAKERS[maker]()
    with monitor_of(model) as monitor:
        monitor.arm()
        model(batch()).sum().backward()
        whole = monitor.measure(0).record().scalars(METRICS)
    for reported in two_ranks(read_sharded, sharder, maker, False):
        assert reported.warnings == []
        assert reported.answer["absent"] == {}
        assert reported.answer["tags"] == pytest.approx(whole, abs=1e-6)
        assert reported.answer["at first"] == pytest.approx(
            {tag: value for tag, value in whole.items() if tag.startswith("hdi/")}, abs=1e-6
        )
        assert reported.answer["facts"] == [WIDTH] * 3
        assert reported.answer["is untouched"]
        assert reported.answer["largest at once"] == 1, "the weights are gathered layer by layer"


def test_a_monitor_from_before_the_sharding_reads_the_same(two_ranks):
    for reported in two_ranks(read_sharded, "fsdp2", "separate", True):
        assert reported.warnings == []
        assert reported.answer["tags"] == pytest.approx(reading_alone(), abs=1e-6)


@pytest.mark.some_slow(quick=1)
@pytest.mark.parametrize("is_early", [True, False])
def test_heads_that_are_spread_over_ranks_are_read_together(two_ranks, is_early):
    for reported in two_ranks(read_tensor_parallel, is_early, "with a width"):
        assert reported.warnings == []
        assert reported.answer["heads"] == [HEADS] * 3
        assert reported.answer["tokens"] == [[batch().numel()] * 3], "the ranks of a layer have the same tokens"
        assert reported.answer["heads of the rank"] == [HEADS // 2] * 3
        whole = {tag: value for tag, value in reading_alone().items() if "importance" not in tag}
        assert reported.answer["tags"] == pytest.approx(whole, abs=1e-6)


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason=NEEDS_PEAK)
@pytest.mark.slow
def test_finding_heads_of_sharded_weights_copies_no_shard(two_ranks):
    for one in two_ranks(bytes_to_find, 8192):
        assert one.answer["heads"] == [32, 32]
        assert one.answer["peak"] < one.answer["half a weight"] <= one.answer["with a copy"], one.answer


def test_a_tensor_parallel_layer_without_a_head_width_is_refused(two_ranks):
    """Half the heads, each twice as wide, would fit all shapes."""
    for reported in two_ranks(read_tensor_parallel, False, "without a width"):
        assert reported.answer["heads"] == []
        assert sum("head_dim" in line for line in reported.warnings) == 3


def test_a_rank_that_reads_alone_does_not_wait_for_shards_of_other_ranks(two_ranks):
    for reported in two_ranks(read_sharded_alone):
        assert [f"blocks.{place}.attn" in reported.answer for place in range(3)] == [True] * 3
        assert "take no readings with this one" in reported.answer["blocks.0.attn"]


# --- DeepSpeed, which is not installed here: a stand-in that keeps parameters as ZeRO-3 does


class Zero3:
    """Partitions parameters as ZeRO-3 shows them: empty, with an id and their whole shape."""

    def __init__(self, model: nn.Module) -> None:
        self.whole: dict[int, torch.Tensor] = {}
        self.gathered: list[int] = []
        for number, parameter in enumerate(model.parameters()):
            self.whole[number] = parameter.data
            parameter.ds_id, parameter.ds_shape = number, parameter.shape
            parameter.data = torch.empty(0)
        self.zero = SimpleNamespace(GatheredParameters=self._gather)

    @contextmanager
    def _gather(self, parameters):
        self.gathered.append(len(parameters))
        for parameter in parameters:
            parameter.data = self.whole[parameter.ds_id].clone()
        yield
        for parameter in parameters:
            parameter.data.zero_()  # its memory goes to somebody else
            parameter.data = torch.empty(0)


@pytest.mark.parametrize("maker", MAKERS)
def test_weights_of_zero_3_are_gathered_through_deepspeed(monkeypatch, maker):
    with monitor_of(MAKERS[maker]()) as monitor:
        whole = monitor.measure(0).record().scalars(["hdi", "hdi_query"])
    model = MAKERS[maker]()
    engine = Zero3(model)
    monkeypatch.setitem(sys.modules, "deepspeed", engine)
    with monitor_of(model, metrics=["hdi", "hdi_query"]) as monitor:
        assert monitor.measure(0).record().scalars(["hdi", "hdi_query"]) == pytest.approx(whole, abs=1e-7)
    assert engine.gathered == [1] * 6, "one parameter at a time"
    assert all(parameter.numel() == 0 for parameter in model.parameters())


def test_finding_layers_under_zero_3_gathers_no_weights(monkeypatch):
    model = classifier()
    engine = Zero3(model)
    monkeypatch.setitem(sys.modules, "deepspeed", engine)
    before = list(model.parameters())
    with with_global_shapes(model):
        layers = find_attention(model)
        stand_in = model.blocks[0].attn.k_proj.weight
        assert stand_in.shape == (WIDTH, WIDTH)
        assert stand_in.untyped_storage().nbytes() == 4, "one number for all of them"
    assert len(layers) == 3
    assert engine.gathered == []
    assert all(now is then for now, then in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize(
    ("splits", "is_managed", "degree"),
    [
        (["rows"], False, 2),
        (["columns"], False, 1),
        (["rows"], True, 1),
        (["rows again", "rows"], True, 2),
        (["columns", "rows"], True, 2),
        (["rows", "columns"], True, 1),
        (["copies", "rows again", "rows"], True, 2),
        (["copies", "rows", "copies"], True, 1),
    ],
)
def test_rows_sharded_by_fsdp_are_distinguished_from_tensor_parallel_rows(splits, is_managed, degree):
    """In a mesh of both, FSDP's dims come first; `_StridedShard` splits rows that are split already."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    kinds = {
        "rows": Shard(0),
        "columns": Shard(1),
        "rows again": _StridedShard(0, split_factor=2),
        "copies": Replicate(),
    }
    mesh = SimpleNamespace(size=lambda dim: 2)
    parts = SimpleNamespace(placements=[kinds[split] for split in splits], device_mesh=mesh)
    assert _tensor_parallel_degree(parts, is_managed=is_managed) == degree
