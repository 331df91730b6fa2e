"""Tokens spread over the ranks of one dimension of a mesh, grouped keys among them, against one process with all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from hdi_callback.attention import find_attention
from tests.models import HEADS, LENGTH, WIDTH, Block
from tests.regimes.test_ddp import METRICS, monitor_of

KEY_HEADS = 2
READ = [name for name in METRICS if "importance" not in name]
"""Without what is of whole sequences, which no rank has."""


class Grouped(nn.Module):
    """Two query heads for each key head; of all tokens where there is no group of ranks."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = HEADS, KEY_HEADS, WIDTH // HEADS
        self.group = group
        self.ranks = 1 if group is None else dist.get_world_size(group)
        self.q_proj, self.out_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k_proj, self.v_proj = (nn.Linear(WIDTH, KEY_HEADS * self.head_dim) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.q_proj, self.k_proj, self.v_proj))
        return self.out_proj(self.attend(q, k, v).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)


class _AllToAll(torch.autograd.Function):
    """As in DeepSpeed, within a group: which dim is cut and which is joined are arguments."""

    @staticmethod
    def forward(ctx: Any, group: Any, part: Tensor, scatter: int, gather: int) -> Tensor:
        ctx.given = group, scatter, gather
        sent = [one.contiguous() for one in part.chunk(dist.get_world_size(group), scatter)]
        got = torch.empty(len(sent), *sent[0].shape)
        dist.all_to_all_single(got, torch.stack(sent), group=group)
        return torch.cat(list(got), gather).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        group, scatter, gather = ctx.given
        return None, _AllToAll.apply(group, gradient, gather, scatter), None, None


class Swapped(Grouped):
    """Ulysses: key heads are swapped as they are, as many on each rank."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = [_AllToAll.apply(self.group, part, 2, 1) for part in (q, k, v)]
        return _AllToAll.apply(self.group, super().attend(*parts), 1, 2)


class SwappedCopies(Swapped):
    """Ulysses on more ranks than there are key heads: each is copied first."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        copies = self.num_heads // self.num_kv_heads
        return super().attend(q, k.repeat_interleave(copies, 2), v.repeat_interleave(copies, 2))


class _PassedOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Any, part: Tensor, way: int) -> Tensor:
        ctx.given = group, way
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        taken = torch.empty_like(part, memory_format=torch.contiguous_format)
        to, of = (dist.get_global_rank(group, (rank + one) % size) for one in (way, -way))
        calls = [
            dist.P2POp(dist.isend, part.contiguous(), to, group=group),
            dist.P2POp(dist.irecv, taken, of, group=group),
        ]
        for work in dist.batch_isend_irecv(calls):
            work.wait()
        return taken

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        group, way = ctx.given
        return None, _PassedOn.apply(group, gradient, -way), None


class Ring(Grouped):
    """Key heads go round as they are, and are met by their query heads on each rank."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        copies = q.shape[2] // k.shape[2]
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        out = known = None
        for turn in range(self.ranks):
            keys, values = (part.repeat_interleave(copies, 1) for part in (k, v))
            scores = q @ keys.mT / q.shape[-1] ** 0.5
            lse = scores.logsumexp(-1, keepdim=True)
            one = (scores - lse).exp() @ values
            if out is None:
                out, known = one, lse
            else:
                out = out - torch.sigmoid(lse - known) * (out - one)
                known = known - F.logsigmoid(known - lse)
            if turn + 1 < self.ranks:
                k, v = (_PassedOn.apply(self.group, part, 1) for part in (k, v))
        return out.transpose(1, 2)


def model_of(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    blocks = []
    for _ in range(3):
        block, attention = Block(), Grouped()
        block.attn = make()
        block.attn.load_state_dict(attention.state_dict())
        blocks.append(block)
    return nn.Sequential(nn.Embedding(16, WIDTH), *blocks)


def sequences() -> Tensor:
    return torch.randint(16, (4, LENGTH), generator=torch.Generator().manual_seed(3))


def measured(model: nn.Module, whole: nn.Module, share: Tensor) -> dict[str, Any]:
    with monitor_of(model, metrics=READ) as monitor:
        for step in (0, 1):
            monitor.arm()
            model(share).square().sum().backward()
            record = monitor.measure(step).record()
        return {"tags": record.scalars(READ), "absent": record.absent, "refused": [str(one) for one in monitor.refused],
                "heads": [(layer.num_heads, layer.num_key_heads) for layer in find_attention(whole)]}  # fmt: skip


def read(rank: int, make: type[Grouped]) -> dict[str, Any]:
    model = model_of(lambda: make(dist.group.WORLD))
    return measured(model, model, sequences().chunk(dist.get_world_size(), 1)[rank])


def read_in_a_mesh(rank: int, make: type[Grouped], kind: str) -> dict[str, Any]:
    """Two copies, each of which spreads its sequences over two ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    model = whole = model_of(lambda: make(mesh["sequence"].get_group()))
    if kind == "ddp":  # gradients are those of all ranks, whatever their tokens
        model = nn.parallel.DistributedDataParallel(model)
    else:
        data = mesh["data"] if kind == "fsdp2" else mesh["data", "sequence"]._flatten()
        for block in model[1:]:
            fully_shard(block, mesh=data)
        fully_shard(model, mesh=data)
    rows = sequences().chunk(2)[mesh.get_local_rank("data")]
    return measured(model, whole, rows.chunk(2, 1)[mesh.get_local_rank("sequence")])


def read_beside_tensor_parallelism(rank: int, make: type[Grouped]) -> dict[str, Any]:
    """Heads over one dimension of the mesh, tokens over the other."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tensor", "sequence"))
    model = model_of(lambda: make(mesh["sequence"].get_group()))
    plan = {name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")} | {"out_proj": RowwiseParallel()}
    for block in model[1:]:
        parallelize_module(block.attn, mesh["tensor"], plan)
        block.attn.num_heads, block.attn.num_kv_heads = HEADS // 2, KEY_HEADS // 2
    return measured(model, model, sequences().chunk(2, 1)[mesh.get_local_rank("sequence")])


def read_alone() -> dict[str, float]:
    model = model_of(Grouped)
    return measured(model, model, sequences())["tags"]


def assert_reads_as_one_process(told: list[Any]) -> None:
    expected = read_alone()
    assert len(expected) > 20
    for one in told:
        assert one.answer["refused"] == []
        assert one.answer["heads"] == [(HEADS, KEY_HEADS)] * 3
        assert one.answer["tags"] == pytest.approx(expected, rel=1e-4, abs=1e-5)
        assert one.answer["absent"] == {}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Swapped, SwappedCopies, Ring])
def test_grouped_keys_over_two_shares_of_the_tokens_read_as_in_one_process(two_ranks, kind):
    assert_reads_as_one_process(two_ranks(read, kind))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [SwappedCopies, Ring])
def test_grouped_keys_over_four_shares_of_the_tokens_read_as_in_one_process(four_ranks, kind):
    assert_reads_as_one_process(four_ranks(read, kind))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "fsdp2 over both"])
@pytest.mark.parametrize("attention", [Swapped, SwappedCopies, Ring])
def test_copies_whose_tokens_are_spread_over_ranks_read_as_one_process(four_ranks, attention, kind):
    assert_reads_as_one_process(four_ranks(read_in_a_mesh, attention, kind))


@pytest.mark.slow
@pytest.mark.parametrize("attention", [SwappedCopies, Ring])
def test_heads_and_tokens_that_are_both_spread_over_ranks_read_as_one_process(four_ranks, attention):
    assert_reads_as_one_process(four_ranks(read_beside_tensor_parallelism, attention))
