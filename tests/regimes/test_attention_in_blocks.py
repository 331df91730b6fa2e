"""Attention in blocks, whose parts of a softmax are put together: in one process, and round the ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hdi_callback.attention import survey
from hdi_callback.monitoring.metrics import ROWS as ATTENTION_ROWS
from tests.models import HEADS, Attention
from tests.regimes.test_collectives import RingAttention, _exchanged
from tests.regimes.test_ddp import CATALOGUE, monitor_of
from tests.regimes.test_sequence_parallel import ALL, model_of, read, read_alone, sequences


class InBlocks(Attention):
    """Online softmax: a running maximum, the sum so far and its mass; keys of one block after the other."""

    block = 3

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads_of(x)
        return self.out_proj(
            self.attend(q, list(zip(k.split(self.block, 2), v.split(self.block, 2)))).transpose(1, 2).flatten(2)
        )

    def heads_of(self, x: Tensor) -> list[Tensor]:
        maps = (self.q_proj, self.k_proj, self.v_proj)
        return [project(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for project in maps]

    def attend(self, q: Tensor, parts: list[tuple[Tensor, Tensor]]) -> Tensor:
        top = torch.full((*q.shape[:-1], 1), -torch.inf)
        total, mass = torch.zeros_like(q), torch.zeros((*q.shape[:-1], 1))
        for k, v in parts:
            scores = q @ k.mT / q.shape[-1] ** 0.5
            higher = torch.maximum(top, scores.amax(-1, keepdim=True))
            weights, kept = (scores - higher).exp(), (top - higher).exp()
            total, mass, top = total * kept + weights @ v, mass * kept + weights.sum(-1, keepdim=True), higher
        return total / mass


class OfQueriesToo(InBlocks):
    """Queries in blocks as well, and sums that are written over, as in torch ports of flash attention."""

    def attend(self, q: Tensor, parts: list[tuple[Tensor, Tensor]]) -> Tensor:
        out = torch.zeros_like(q)
        for start in range(0, q.shape[2], 4):
            block = q[:, :, start : start + 4] / q.shape[-1] ** 0.5
            top = torch.full(block.shape[:-1], -torch.inf)
            total, mass = torch.zeros_like(block), torch.zeros(block.shape[:-1])
            for k, v in parts:
                scores = torch.einsum("bhid,bhjd->bhij", block, k)
                higher = torch.maximum(top, scores.max(dim=-1).values)
                weights = torch.exp(scores - higher[..., None])
                kept = torch.exp(top - higher)
                mass = kept * mass + weights.sum(dim=-1)
                total = total * kept[..., None] + torch.einsum("bhij,bhjd->bhid", weights, v)
                top = higher
            out[:, :, start : start + 4] = total / mass[..., None]
        return out


class ByLogSumExp(InBlocks):
    """Each block has a softmax of its own; the parts are weighed by their sums of exponentials."""

    def attend(self, q: Tensor, parts: list[tuple[Tensor, Tensor]]) -> Tensor:
        out, known = None, None
        for k, v in parts:
            scores = q @ k.mT / q.shape[-1] ** 0.5
            lse = scores.logsumexp(-1, keepdim=True)
            one = (scores - lse).exp() @ v
            if out is None:
                out, known = one, lse
            else:  # as ring-flash-attention does
                out = out - torch.sigmoid(lse - known) * (out - one)
                known = known - torch.nn.functional.logsigmoid(known - lse)
        return out


class BySoftmax(InBlocks):
    def attend(self, q: Tensor, parts: list[tuple[Tensor, Tensor]]) -> Tensor:
        scores = [q @ k.mT / q.shape[-1] ** 0.5 for k, _ in parts]
        sizes = torch.stack([one.logsumexp(-1) for one in scores]).softmax(0)
        return sum(size[..., None] * (one.softmax(-1) @ v) for size, one, (_, v) in zip(sizes, scores, parts))


class _Flash(torch.autograd.Function):
    """Forward and backward of one's own."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, block: int) -> Tensor:
        out, mass = torch.zeros_like(q), torch.zeros(q.shape[:-1])
        top = torch.full(q.shape[:-1], -torch.inf)
        for keys, values in zip(k.split(block, 2), v.split(block, 2)):
            scores = q @ keys.mT / q.shape[-1] ** 0.5
            higher = torch.maximum(top, scores.amax(-1))
            weights, kept = torch.exp(scores - higher[..., None]), torch.exp(top - higher)
            out.mul_(kept[..., None]).add_(weights @ values)
            mass.mul_(kept).add_(weights.sum(-1))
            top = higher
        out.div_(mass[..., None])
        ctx.save_for_backward(q, k, v, out, top + mass.log())
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        weights = (q @ k.mT / q.shape[-1] ** 0.5 - lse[..., None]).exp()
        inner = weights * (gradient @ v.mT - (gradient * out).sum(-1, keepdim=True)) / q.shape[-1] ** 0.5
        return inner @ k, inner.mT @ q, weights.mT @ gradient, None


class InAFunction(InBlocks):
    def forward(self, x: Tensor) -> Tensor:
        return self.out_proj(_Flash.apply(*self.heads_of(x), self.block).transpose(1, 2).flatten(2))


# --- round the ranks


class _RingFunction(torch.autograd.Function):
    """All of a ring in one function, as in ring-flash-attention: keys and values go round in its forward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return _round(q, k, v)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (one.detach().requires_grad_() for one in ctx.saved_tensors)
        parts = [[torch.empty_like(one) for _ in range(dist.get_world_size())] for one in (k, v)]
        for gathered, one in zip(parts, (k, v)):
            dist.all_gather(gathered, one.detach().contiguous())
        keys, values = (torch.cat(one, 2).requires_grad_() for one in parts)
        with torch.enable_grad():
            out = (q @ keys.mT / q.shape[-1] ** 0.5).softmax(-1) @ values
        of_q, *of_all = torch.autograd.grad(out, (q, keys, values), gradient)
        for one in of_all:
            dist.all_reduce(one)
        return of_q, *(one.chunk(dist.get_world_size(), 2)[dist.get_rank()] for one in of_all)


def _round(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = known = None
    for turn in range(dist.get_world_size()):
        scores = q @ k.mT / q.shape[-1] ** 0.5
        lse = scores.logsumexp(-1, keepdim=True)
        one = (scores - lse).exp() @ v
        if out is None:
            out, known = one, lse
        else:
            out = out - torch.sigmoid(lse - known) * (out - one)
            known = known - torch.nn.functional.logsigmoid(known - lse)
        if turn + 1 < dist.get_world_size():
            k, v = _exchanged(k, +1), _exchanged(v, +1)
    return out


class RingInAFunction(InBlocks):
    def forward(self, x: Tensor) -> Tensor:
        return self.out_proj(_RingFunction.apply(*self.heads_of(x)).transpose(1, 2).flatten(2))


class OneBlockAtATime(InBlocks):
    """Keys and values of all ranks are gathered, and attended to rank by rank."""

    def forward(self, x: Tensor) -> Tensor:
        from torch.distributed.nn.functional import all_gather

        q, k, v = self.heads_of(x)
        parts = list(zip(*(all_gather(one.contiguous()) for one in (k, v))))
        return self.out_proj(self.attend(q, parts).transpose(1, 2).flatten(2))


ALONE = [InBlocks, OfQueriesToo, ByLogSumExp, BySoftmax, InAFunction]
OVER_RANKS = [RingAttention, RingInAFunction, OneBlockAtATime]
OF_ROWS = {name for name in ALL if CATALOGUE[name].source == ATTENTION_ROWS}


def read_alone_in_blocks(kind: type[Attention]) -> tuple[dict[str, float], set[str], list[str]]:
    model = model_of(kind)
    with monitor_of(model, metrics=ALL) as monitor:
        for step in (0, 1):
            monitor.arm()
            model(sequences()).square().sum().backward()
            record = monitor.measure(step).record()
        absent = {key.partition("/")[0] for key in record.absent}
        return record.scalars(ALL), absent, [str(one) for one in monitor.refused]


def without_rows(tags: dict[str, float]) -> dict[str, float]:
    return {tag: value for tag, value in tags.items() if tag.partition("/")[0] not in OF_ROWS}


@pytest.mark.some_slow(quick=2)
@pytest.mark.parametrize("kind", ALONE, ids=lambda kind: kind.__name__)
@pytest.mark.filterwarnings("ignore::hdi_callback.errors.MonitoringWarning")
def test_attention_in_blocks_reads_as_attention_at_once(kind):
    tags, absent, refused = read_alone_in_blocks(kind)
    assert refused == []
    assert tags == pytest.approx(without_rows(read_alone()), rel=1e-4, abs=1e-5)
    assert absent == {"attention rows"}


class NeverDivided(InBlocks):
    """Weights that add up to anything."""

    def attend(self, q: Tensor, parts: list[tuple[Tensor, Tensor]]) -> Tensor:
        return sum((q @ k.mT / q.shape[-1] ** 0.5).exp() @ v for k, v in parts)


class DividedBlockByBlock(InBlocks):
    """What each block gives is divided by its own sum, so that the weights add up to the number of blocks."""

    def attend(self, q: Tensor, parts: list[tuple[Tensor, Tensor]]) -> Tensor:
        weights = [(q @ k.mT / q.shape[-1] ** 0.5).exp() for k, _ in parts]
        return sum(one @ v / one.sum(-1, keepdim=True) for one, (_, v) in zip(weights, parts))


@pytest.mark.parametrize("kind", [NeverDivided, DividedBlockByBlock], ids=lambda kind: kind.__name__)
def test_exponentials_that_do_not_add_up_to_one_are_refused(kind):
    found = survey(nn.Sequential(kind()))
    assert not found.layers
    (refusal,) = found.refused
    assert "exponentials that are not normalised" in refusal.reason


class _StraightThrough(torch.autograd.Function):
    """An exponential and its logarithm, of which the gradient is known to it alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach().exp().log()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class StraightThrough(InBlocks):
    def heads_of(self, x: Tensor) -> list[Tensor]:
        return [_StraightThrough.apply(one) for one in super().heads_of(x)]


def test_a_function_with_an_exponential_that_is_no_softmax_keeps_its_own_gradient():
    """Run plainly, what it gives would depend on nothing."""
    (layer,) = survey(nn.Sequential(StraightThrough())).layers
    assert layer.num_heads == HEADS


def assert_reads_as_one_process(answers: list[Any]) -> None:
    expected = without_rows(read_alone())
    assert len(expected) > 20
    for one in answers:
        assert one.answer["refused"] == []
        assert one.answer["heads"] == [HEADS] * 3
        assert one.answer["tags"] == pytest.approx(expected, rel=1e-4, abs=1e-5)
        assert {key.partition("/")[0] for key in one.answer["absent"]} == {"attention rows"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", OVER_RANKS, ids=lambda kind: kind.__name__)
def test_ring_attention_reads_as_in_one_process(two_ranks, kind):
    assert_reads_as_one_process(two_ranks(read, kind))


@pytest.mark.slow
@pytest.mark.parametrize("kind", OVER_RANKS, ids=lambda kind: kind.__name__)
def test_ring_attention_of_four_ranks_reads_as_in_one_process(four_ranks, kind):
    assert_reads_as_one_process(four_ranks(read, kind))
