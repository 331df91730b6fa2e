"""Ways of training over ranks that no other file has, each against one process that has all the tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from hdi_callback import HeadDiversityMonitor
from tests.models import HEADS, LENGTH, WIDTH, Block, Classifier
from tests.regimes.test_ddp import CATALOGUE, METRICS, OF_INPUTS, SHARES, batch, classifier, monitor_of

# Of attention rows a sample of queries is read, which is another one where there are more forwards or ranks.
ALL = [*METRICS, *(name for name, metric in CATALOGUE.items() if metric.source in OF_INPUTS)]


def read(model: nn.Module, passes: Callable[[], Any], metrics: list[str] = ALL) -> dict[str, Any]:
    """Read what a step showed."""
    with monitor_of(model, metrics=metrics) as monitor:
        for step in range(2):
            monitor.arm()
            passes()
            record = monitor.measure(step).record()
        return {
            "tags": record.scalars(metrics), "absent": record.absent, "refused": [str(one) for one in monitor.refused],
        }  # fmt: skip


def train(model: nn.Module, *parts: Tensor) -> None:
    for part in parts:
        model(part).sum().backward()


# --- gradient accumulation, static graphs, activation checkpointing


def read_accumulated(rank: int) -> dict[str, Any]:
    model = DistributedDataParallel(classifier())
    first, second = batch()[SHARES[rank]].tensor_split(2)

    def passes() -> None:
        with model.no_sync():
            train(model, first)
        train(model, second)

    return read(model, passes)


def read_static_graph(rank: int) -> dict[str, Any]:
    model = DistributedDataParallel(classifier(), static_graph=True)
    return read(model, lambda: train(model, batch()[SHARES[rank]]))


class Recomputed(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        recomputed: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return recomputed


def recomputed_classifier() -> Classifier:
    model = classifier()
    model.blocks = nn.Sequential(*(Recomputed(block) for block in model.blocks))
    return model


def read_recomputed(rank: int, metrics: list[str] | None = None) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = recomputed_classifier(), init_device_mesh("cpu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return read(model, lambda: train(model, batch()[SHARES[rank]]), SPREAD if metrics is None else metrics)


# --- grouped queries over more ranks than there are key heads


class OneKeyHead(nn.Module):
    """Four query heads, spread over ranks, with one key head that every rank holds."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.head_dim = HEADS, 1, WIDTH // HEADS
        self.q_proj, self.o_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH // HEADS) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        k, v = (part.expand(-1, q.shape[1], -1, -1) for part in (k, v))
        out: Tensor = self.o_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out


def grouped_classifier() -> Classifier:
    model = classifier()
    torch.manual_seed(5)
    for block in model.blocks:
        block.attn = OneKeyHead()
    return model


def read_grouped(rank: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, mesh = grouped_classifier(), init_device_mesh("cpu", (2,))
    for block in model.blocks:
        parallelize_module(block.attn, mesh, {"q_proj": ColwiseParallel(), "o_proj": RowwiseParallel()})
        block.attn.num_heads //= 2
    return read(model, lambda: train(model, batch()), SPREAD)


# Gradients of parts belong to no single rank, and a recomputed forward has released its head outputs.
SPREAD = [name for name in METRICS if "importance" not in name]


# --- a pipeline of uneven stages, whose ends share a matrix


class TiedStage(nn.Module):
    """All blocks, or those of one stage; the embedding and the head are one matrix, held by both ends."""

    def __init__(self, first: int = 0, last: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        embed, blocks = nn.Embedding(16, WIDTH), [Block() for _ in range(4)]
        self.embed = embed if first == 0 or last == 4 else None
        self.blocks = nn.ModuleDict({str(place): blocks[place] for place in range(first, last)})
        self.starts, self.ends = first == 0, last == 4

    def forward(self, x: Tensor) -> Tensor:
        if self.starts and self.embed is not None:
            x = self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        return x @ self.embed.weight.T if self.ends and self.embed is not None else x


def read_tied_pipeline(rank: int, cut: int) -> dict[str, Any]:
    from tests.regimes.test_pipeline import run, schedule_of

    model = TiedStage(0, cut) if rank == 0 else TiedStage(cut, 4)
    schedule = schedule_of(model, rank, 2)

    def passes() -> None:
        run(schedule, rank, 2, whole_batch())
        if model.embed is not None and model.embed.weight.grad is not None:
            dist.all_reduce(model.embed.weight.grad)

    return read(model, passes)


def whole_batch() -> Tensor:
    return torch.randint(16, (4, LENGTH), generator=torch.Generator().manual_seed(3))


def read_tied_alone() -> dict[str, Any]:
    model = TiedStage()
    return read(model, lambda: (model(whole_batch()).square().sum() / 4).backward())


# --- ranks that have fewer batches


def read_joined(rank: int) -> list[dict[str, float]]:
    """The first rank has three batches, the second two, within `join`."""
    model, found = DistributedDataParallel(classifier()), []
    with model.join(), HeadDiversityMonitor(model, metrics=JOINED, max_tokens=10_000) as monitor:
        for step in range(3 - rank):
            monitor.arm()
            train(model, batch()[SHARES[rank]])
            found.append(monitor.measure(step).record().scalars(JOINED))
    return found


JOINED = ["hdi", "head_correlation"]


# --- four ranks: shards of replicas


def read_hybrid(rank: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = classifier(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return read(model, lambda: train(model, batch().tensor_split(4)[rank]))


def read_alone(make: Callable[[], nn.Module] = classifier, metrics: list[str] = ALL) -> dict[str, Any]:
    model = make()
    return read(model, lambda: train(model, batch()), metrics)


WAYS: dict[str, tuple[Callable[[int], dict[str, Any]], Callable[[], dict[str, Any]]]] = {
    "accumulated": (read_accumulated, read_alone),
    "static graph": (read_static_graph, read_alone),
    "recomputed shards": (read_recomputed, lambda: read_alone(recomputed_classifier, SPREAD)),
    "one key head over two ranks": (read_grouped, lambda: read_alone(grouped_classifier, SPREAD)),
}


@pytest.mark.some_slow(quick=2)
@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_read_as_one_process(two_ranks, way):
    on_ranks, alone = WAYS[way]
    assert_same(two_ranks(on_ranks), alone())


@pytest.mark.filterwarnings("ignore:head importance")
def test_metrics_absent_on_every_rank_have_the_reason_of_one_process(two_ranks):
    metrics = [*SPREAD, "head_importance_min"]
    alone = read_alone(recomputed_classifier, metrics)
    assert len(alone["absent"]) == 3
    for one in two_ranks(read_recomputed, metrics):
        assert one.answer["absent"] == alone["absent"]
        assert len(one.warnings) == 1


@pytest.mark.slow
@pytest.mark.parametrize("cut", [1, 3])
def test_uneven_stages_with_tied_embeddings_read_as_one_process(two_ranks, cut):
    assert_same(two_ranks(read_tied_pipeline, cut), read_tied_alone())


@pytest.mark.slow
def test_shards_of_replicas_read_as_one_process(four_ranks):
    assert_same(four_ranks(read_hybrid), read_alone())


def test_a_rank_that_runs_out_of_batches_blocks_no_other(two_ranks):
    whole, rest = classifier(), classifier()
    first, second = two_ranks(read_joined)
    together = read(whole, lambda: train(whole, batch()), JOINED)["tags"]
    alone = read(rest, lambda: train(rest, batch()[SHARES[0]]), JOINED)["tags"]
    assert [len(one.answer) for one in (first, second)] == [3, 2]
    for tags in (*first.answer[:2], *second.answer):
        assert tags == pytest.approx(together, abs=1e-5)
    assert first.answer[2] == pytest.approx(alone, abs=1e-5)
    assert [len(one.warnings) for one in (first, second)] == [1, 0]
    assert "alone: rank 1 takes no further reading" in first.warnings[0]


def assert_same(reported: Any, alone: dict[str, Any]) -> None:
    assert len(alone["tags"]) > 10
    for one in reported:
        assert one.warnings == []
        assert one.answer["absent"] == alone["absent"]
        assert one.answer["refused"] == []
        assert one.answer["tags"] == pytest.approx(alone["tags"], rel=1e-4, abs=1e-5)
