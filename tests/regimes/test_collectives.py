"""Modules that talk to other ranks in their forward: no rank waits for another because of what this package runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hdi_callback import HeadDiversityMonitor, find_attention
from hdi_callback.attention.isolation import isolated
from tests.models import HEADS, WIDTH, Attention
from tests.regimes.test_sequence_parallel import GatheredKeys, model_of, sequences
from tests.regimes.test_swapped_heads import Swapping

# --- the answers


def _own(*shape: int) -> Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)


def _all_reduce(op: Any) -> Tensor:
    dist.all_reduce(tensor := _own(3), op)
    return tensor


def _all_gather() -> Tensor:
    dist.all_gather(parts := [torch.zeros(3) for _ in range(2)], _own(3))
    return torch.cat(parts)


def _all_gather_into_tensor() -> Tensor:
    dist.all_gather_into_tensor(whole := torch.zeros(4, 3), _own(2, 3))
    return whole


def _reduce_scatter() -> Tensor:
    dist.reduce_scatter(share := torch.zeros(2), list(_own(4).chunk(2)))
    return share


def _reduce_scatter_tensor() -> Tensor:
    dist.reduce_scatter_tensor(share := torch.zeros(2), _own(4))
    return share


def _all_to_all_single() -> Tensor:
    dist.all_to_all_single(swapped := torch.zeros(4, 2), _own(4, 2))
    return swapped


def _all_to_all() -> Tensor:
    dist.all_to_all(parts := [torch.zeros(2) for _ in range(2)], list(_own(4).chunk(2)))
    return torch.cat(parts)


def _gather() -> Tensor:
    parts = [torch.zeros(3) for _ in range(2)] if dist.get_rank() == 0 else None
    dist.gather(_own(3), parts)
    return torch.cat(parts or [_own(3), _own(3)])


def _scatter() -> Tensor:
    dist.scatter(share := torch.zeros(2), list(_own(4).chunk(2)) if dist.get_rank() == 0 else None)
    return share


def _broadcast() -> Tensor:
    dist.broadcast(tensor := _own(3), 0)
    return tensor


def _around() -> Tensor:
    """Both send to the other what they have, and receive in the other order."""
    other, taken = 1 - dist.get_rank(), torch.zeros(3)
    calls = [dist.P2POp(dist.isend, _own(3), other), dist.P2POp(dist.irecv, taken, other)]
    for work in dist.batch_isend_irecv(calls if other else calls[::-1]):
        work.wait()
    return taken


def _objects() -> Tensor:
    dist.all_gather_object(things := [None, None], {"of": "both"})
    dist.barrier()
    return torch.tensor([float(thing == {"of": "both"}) for thing in things])


def _functional(call: str) -> Tensor:
    from torch.distributed import _functional_collectives as collectives

    group = dist.group.WORLD
    calls: dict[str, Callable[[], Tensor]] = {
        "all_reduce": lambda: collectives.all_reduce(_own(3), "sum", group),
        "average": lambda: collectives.all_reduce(_own(3), "avg", group),
        "all_gather": lambda: collectives.all_gather_tensor(_own(2, 3), 1, group),
        "reduce_scatter": lambda: collectives.reduce_scatter_tensor(_own(4), "sum", 0, group),
        "all_to_all": lambda: collectives.all_to_all_single(_own(4, 2), None, None, group),
    }
    return calls[call]() + 0


def _gradient() -> Tensor:
    """What the other rank's backward would send is missing: that of this rank's own share is left."""
    from torch.distributed.nn.functional import all_gather

    x = _own(3).requires_grad_()
    (torch.cat(all_gather(x)) * _own(6)).sum().backward()
    assert x.grad is not None
    return x.grad


def _distributed_tensor() -> Tensor:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (2,))
    return DTensor.from_local(_own(2, 4), mesh, [Shard(0)], run_check=False).full_tensor()


CALLS: dict[str, Callable[[], Tensor]] = {
    "all_reduce": lambda: _all_reduce(dist.ReduceOp.SUM),
    "all_reduce, largest": lambda: _all_reduce(dist.ReduceOp.MAX),
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "all_to_all_single": _all_to_all_single,
    "all_to_all": _all_to_all,
    "gather": _gather,
    "broadcast": _broadcast,
    "send and receive": _around,
    "objects": _objects,
    "functional all_reduce": lambda: _functional("all_reduce"),
    "functional all_gather": lambda: _functional("all_gather"),
    "functional reduce_scatter": lambda: _functional("reduce_scatter"),
    "functional all_to_all": lambda: _functional("all_to_all"),
    "DTensor": _distributed_tensor,
}
"""Calls that both ranks make with the same tensors."""


def answers(rank: int) -> dict[str, tuple[Any, Any]]:
    """What the ranks answer each other, and what one of them is answered while its code is run apart."""
    reported: dict[str, tuple[Any, Any]] = {}
    for name, call in CALLS.items():
        try:
            sent: Any = call().tolist()
        except Exception as error:  # gloo lacks some
            sent = f"{type(error).__name__}: {error}"
        try:
            with isolated():
                answered: Any = call().tolist()
        except Exception as error:
            answered = f"{type(error).__name__}: {error}"
        reported[name] = sent, answered
    with isolated():
        reported["gradient"] = _own(6).chunk(2)[rank].tolist(), _gradient().tolist()
    return reported


@pytest.mark.slow
def test_isolated_collectives_answer_as_if_all_ranks_had_the_same_tensors(two_ranks):
    for one in two_ranks(answers):
        lacking = {name for name, (sent, _) in one.answer.items() if isinstance(sent, str)}
        assert lacking <= {"reduce_scatter", "all_to_all", "functional reduce_scatter"}, one.answer  # of gloo
        for name, (sent, answered) in one.answer.items():
            if name not in lacking:
                assert answered == sent, name


# --- modules


class RingAttention(Attention):
    """Keys and values go round the ranks, and the parts of the softmax are put together as they come."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        top = torch.full(q.shape[:-1], -torch.inf)
        total, mass = torch.zeros_like(q), torch.zeros(q.shape[:-1])
        for turn in range(ranks):
            scores = q @ k.mT / q.shape[-1] ** 0.5
            higher = torch.maximum(top, scores.amax(-1))
            weights, kept = (scores - higher[..., None]).exp(), (top - higher).exp()
            total, mass, top = total * kept[..., None] + weights @ v, mass * kept + weights.sum(-1), higher
            if turn < ranks - 1:
                k, v = _passed_on(k), _passed_on(v)
        return self.out_proj((total / mass[..., None]).transpose(1, 2).flatten(2))


class _PassedOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:
        return _exchanged(part, +1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _exchanged(gradient, -1)


_passed_on = _PassedOn.apply


def _exchanged(part: Tensor, way: int) -> Tensor:
    rank, size = dist.get_rank(), dist.get_world_size()
    taken = torch.empty_like(part, memory_format=torch.contiguous_format)
    calls = [
        dist.P2POp(dist.isend, part.contiguous(), (rank + way) % size),
        dist.P2POp(dist.irecv, taken, (rank - way) % size),
    ]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    return taken


def ring_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(16, WIDTH), RingAttention(), RingAttention())


def train_in_a_ring(rank: int, is_watched: bool) -> dict[str, Any]:
    model = ring_model()
    share = sequences().chunk(dist.get_world_size(), 1)[rank] if dist.is_initialized() else sequences()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reported: dict[str, Any] = {"losses": []}
    with HeadDiversityMonitor(model if is_watched else nn.Linear(2, 2), metrics=["hdi", "head_correlation"]) as monitor:
        for step in range(3):
            monitor.arm()
            loss = model(share).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            reported["losses"].append(float(loss.detach()))
            record = monitor.measure(step).record()
        reported |= {"tags": record.scalars(["hdi"]), "heads": [layer.num_heads for layer in monitor.layers],
                 "refused": [str(one) for one in monitor.refused]}  # fmt: skip
    return reported


def find_on_one_rank(rank: int, kind: str) -> list[int] | None:
    makes = {
        "gathered keys": lambda: model_of(GatheredKeys),
        "swapped heads": lambda: model_of(Swapping),
        "ring": ring_model,
        "averaged weights": lambda: averaged_model(rank - 0.5),
    }
    model = makes[kind]()
    found = [layer.num_heads for layer in find_attention(model)] if rank == 0 else None
    dist.barrier()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gathered keys", "swapped heads", "ring", "averaged weights"])
def test_finding_heads_on_one_rank_waits_for_no_other(two_ranks, kind):
    first, second = two_ranks(find_on_one_rank, kind)
    assert first.answer == [HEADS] * {"gathered keys": 3, "swapped heads": 3}.get(kind, 2)
    assert second.answer is None


def test_ring_attention_trains_as_without_a_monitor(two_ranks):
    watched, plain = two_ranks(train_in_a_ring, True), two_ranks(train_in_a_ring, False)
    for one, other in zip(watched, plain):
        assert one.answer["losses"] == other.answer["losses"]
        assert one.answer["heads"] or one.answer["refused"]


# --- weights that are computed from those of all ranks


class MeanOverRanks(nn.Module):
    """Gives the mean of a weight over the ranks, which need not hold the same."""

    def forward(self, weight: Tensor) -> Tensor:
        if dist.is_initialized():
            dist.all_reduce(mean := weight.detach().clone())
            mean /= dist.get_world_size()
            return weight + (mean - weight).detach()
        return weight


def averaged_model(shift: float, *, is_averaged: bool = True) -> nn.Module:
    """Keys of the first layer and values of the second are averaged over ranks, of which each holds other values."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, WIDTH), Attention(), Attention())
    with torch.no_grad():
        model[2].v_proj.weight += shift * torch.randn(WIDTH, WIDTH)
    for layer in (model[1].k_proj, model[2].v_proj) if is_averaged else ():
        nn.utils.parametrize.register_parametrization(layer, "weight", MeanOverRanks())
    return model


def read_averaged(rank: int, who: str) -> dict[str, Any]:
    model, tokens, record = averaged_model(rank - 0.5), sequences(), None
    group: Any = "auto" if who == "all" else None
    monitor = None
    if who == "all" or rank == 0:
        monitor = HeadDiversityMonitor(model, metrics=["hdi", "hdi_value", "head_correlation"], process_group=group)
    for step in range(2):
        if monitor is not None:
            monitor.arm()
        model(tokens).square().sum().backward()
        if monitor is not None:
            record = monitor.measure(step).record()
    dist.barrier()
    if monitor is None or record is None:
        return {}
    monitor.close()
    return {"tags": record.scalars(["hdi", "hdi_value"]), "absent": record.absent}


def test_a_weight_computed_over_ranks_is_read_if_all_ranks_read_it(two_ranks):
    with HeadDiversityMonitor(averaged_model(0.0, is_averaged=False), metrics=["hdi", "hdi_value"]) as monitor:
        plain = monitor.measure(0).record().scalars(["hdi", "hdi_value"])
    for one in two_ranks(read_averaged, "all"):
        assert one.answer == {"tags": pytest.approx(plain, abs=1e-5), "absent": {}}


def test_a_rank_that_reads_alone_waits_for_no_other_and_leaves_out_weights_computed_over_ranks(two_ranks):
    first, second = two_ranks(read_averaged, "one")
    assert second.answer == {}
    assert first.answer["tags"].keys() == {"hdi/2", "hdi/mean", "hdi/min", "hdi_value/1"}
    why = "weight cannot be read (computing it calls c10d::allreduce_, in which the other ranks do not take part)"
    assert first.answer["absent"] == {"1": f"its key {why}", "2": f"its value {why}"}
    assert len(first.warnings) == 2


class TorchAttention(nn.Module):
    def __init__(self, averaged: str) -> None:
        super().__init__()
        self.embed, self.attn = nn.Embedding(16, WIDTH), nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        owner = self.attn.out_proj if averaged == "weight" else self.attn
        nn.utils.parametrize.register_parametrization(owner, averaged, MeanOverRanks())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.attn(x, x, x, need_weights=False)[0]


def arm_on_one_rank(rank: int, averaged: str) -> dict[str, Any]:
    """Head outputs of torch's attention are computed again in its forward, and their slopes in its backward."""
    torch.manual_seed(0)
    model, record = TorchAttention(averaged), None
    metrics = ["hdi_value", "head_correlation", "head_importance_min"]
    with HeadDiversityMonitor(model, metrics=metrics, process_group=None) as monitor:
        if rank == 0:
            monitor.arm()
        model(sequences()).square().sum().backward()
        if rank == 0:
            record = monitor.measure(0).record()
    dist.barrier()
    return {} if record is None else {"tags": record.scalars(metrics), "absent": record.absent}


@pytest.mark.parametrize("averaged", ["in_proj_weight", "weight"])
def test_outputs_of_torch_attention_are_recomputed_without_other_ranks(two_ranks, averaged):
    first, second = two_ranks(arm_on_one_rank, averaged)
    assert second.answer == {}
    reasons = list(first.answer["absent"].values())
    assert reasons
    assert all("c10d::allreduce_, in which the other ranks" in reason for reason in reasons)
    assert not {"head_correlation/attn", "head_importance_min/attn"} & set(first.answer["tags"])
