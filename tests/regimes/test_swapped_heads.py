"""Heads that are swapped for tokens while they attend (Ulysses), against one process with all tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from hdi_callback import AttentionLayer, HeadSlice, register_layout
from hdi_callback.monitoring.metrics import ROWS as ATTENTION_ROWS
from tests.models import HEADS, WIDTH, Attention
from tests.regimes.test_ddp import CATALOGUE, ROWS, monitor_of
from tests.regimes.test_sequence_parallel import ALL, model_of, read, read_alone, sequences

# --- all-to-all calls, each differentiable


def _of_torch(sent: Tensor) -> Tensor:
    from torch.distributed.nn.functional import all_to_all_single

    return all_to_all_single(torch.empty_like(sent), sent)


def _of_lists(sent: Tensor) -> Tensor:
    from torch.distributed.nn.functional import all_to_all

    parts = [part.contiguous() for part in sent.chunk(dist.get_world_size())]
    return torch.cat(all_to_all([torch.empty_like(part) for part in parts], parts))


def _functional(sent: Tensor) -> Tensor:
    from torch.distributed import _functional_collectives as collectives

    return collectives.all_to_all_single_autograd(sent, None, None, dist.group.WORLD) + 0


class _OwnFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Any, sent: Tensor) -> Tensor:
        ctx.group = group
        dist.all_to_all_single(got := torch.empty_like(sent), sent.contiguous(), group=group)
        return got

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, _OwnFunction.apply(ctx.group, gradient)


def _of_own(sent: Tensor) -> Tensor:
    return _OwnFunction.apply(None, sent)


SWAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "torch's own": _of_torch,
    "lists": _of_lists,
    "functional": _functional,
    "a function of its own": _of_own,
}


class Swapping(Attention):
    """Each rank attends with its share of the heads over all tokens, and swaps back."""

    swap: Callable[[Tensor], Tensor] = staticmethod(_of_torch)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            self.spread(project(x).unflatten(-1, (self.num_heads, -1)))
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (q, k, v))).transpose(1, 2)
        return self.out_proj(self.gather(out).flatten(2))

    def spread(self, part: Tensor) -> Tensor:
        """From ``(B, T / ranks, H, width)`` to ``(B, T, H / ranks, width)``."""
        ranks = dist.get_world_size()
        B, T, H, width = part.shape
        sent = part.view(B, T, ranks, H // ranks, width).permute(2, 1, 0, 3, 4).contiguous()
        return self.swap(sent).view(ranks * T, B, H // ranks, width).transpose(0, 1)

    def gather(self, part: Tensor) -> Tensor:
        ranks = dist.get_world_size()
        B, T, H, width = part.shape
        sent = part.view(B, ranks, T // ranks, H, width).permute(1, 3, 2, 0, 4).contiguous()
        return self.swap(sent).view(ranks * H, T // ranks, B, width).permute(2, 1, 0, 3)


class _SeqAllToAll(torch.autograd.Function):
    """As in DeepSpeed: which dim is cut and which is joined are arguments."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, scatter: int, gather: int) -> Tensor:
        ctx.dims = scatter, gather
        sent = [one.contiguous() for one in torch.tensor_split(part, dist.get_world_size(), scatter)]
        got = torch.empty(len(sent), *sent[0].shape)
        dist.all_to_all_single(got, torch.stack(sent))
        return torch.cat(list(got), gather).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _SeqAllToAll.apply(gradient, *ctx.dims[::-1]), None, None


class AsInDeepSpeed(Swapping):
    def spread(self, part: Tensor) -> Tensor:
        return _SeqAllToAll.apply(part, 2, 1)

    def gather(self, part: Tensor) -> Tensor:
        return _SeqAllToAll.apply(part, 1, 2)


class AtOnce(Swapping):
    """Queries, keys and values travel in one call."""

    def forward(self, x: Tensor) -> Tensor:
        parts = [project(x).unflatten(-1, (self.num_heads, -1)) for project in (self.q_proj, self.k_proj, self.v_proj)]
        q, k, v = (one.transpose(1, 2) for one in self.spread(torch.cat(parts, -1)).chunk(3, -1))
        out = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v
        return self.out_proj(self.gather(out.transpose(1, 2)).flatten(2))


class EveryOther(Swapping):
    """A rank has heads that are no neighbours."""

    def spread(self, part: Tensor) -> Tensor:
        return super().spread(part.unflatten(2, (-1, dist.get_world_size())).transpose(2, 3).flatten(2, 3))

    def gather(self, part: Tensor) -> Tensor:
        return super().gather(part).unflatten(2, (dist.get_world_size(), -1)).transpose(2, 3).flatten(2, 3)


def kinds() -> dict[str, type[Attention]]:
    found = {name: type("Swapping", (Swapping,), {"swap": staticmethod(swap)}) for name, swap in SWAPS.items()}
    return found | {"as in DeepSpeed": AsInDeepSpeed, "all at once": AtOnce, "every other head": EveryOther}


def read_kind(rank: int, kind: str) -> dict[str, Any]:
    return read(rank, kinds()[kind])


def expected() -> dict[str, float]:
    """What one process reads, without what is of rows of attention: a rank has those of its share of the heads."""
    of_rows = {name for name in ALL if CATALOGUE[name].source == ATTENTION_ROWS}
    assert of_rows & set(ROWS)
    return {tag: value for tag, value in read_alone().items() if tag.partition("/")[0] not in of_rows}


def assert_reads_as_one_process(reported: list[Any]) -> None:
    whole = expected()
    assert len(whole) > 20
    for one in reported:
        assert one.answer["refused"] == []
        assert one.answer["heads"] == [HEADS] * 3
        assert one.answer["tags"] == pytest.approx(whole, rel=1e-4, abs=1e-5)
        assert {key.partition("/")[0] for key in one.answer["absent"]} == {"attention rows"}
        (warning,) = one.warnings
        assert warning.startswith("attention rows/blocks.0.attn")


@pytest.mark.slow  # `test_tokens_in_meshes` reads one in every run
@pytest.mark.parametrize("kind", kinds())
def test_heads_that_are_swapped_for_tokens_read_as_in_one_process(two_ranks, kind):
    assert_reads_as_one_process(two_ranks(read_kind, kind))


# --- layouts of users


class Described(Swapping):
    """Heads of which a layout is known."""


class Misdescribed(Swapping):
    """Heads of which another layout is known than they have."""


def described(name: str, module: Any, *, heads: int = HEADS) -> AttentionLayer:
    roles = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "out_proj"}
    width = WIDTH // heads
    slices = {role: HeadSlice(module, f"{path}.weight", heads=heads, width=width) for role, path in roles.items()}
    return AttentionLayer(name, module, heads, heads, width, width, "described", slices, module.out_proj)


register_layout(Described, described)


def misdescribed(name: str, module: Any) -> AttentionLayer:
    """Half as many heads, or as many of other rows."""
    if name.startswith("blocks.0"):
        return described(name, module, heads=HEADS // 2)
    index = torch.arange(WIDTH).view(-1, HEADS).mT
    right = described(name, module)
    slices = right.slices | {
        role: HeadSlice.of_features(module, f"{role[0]}_proj.weight", index) for role in ("query", "key", "value")
    }
    return replace(right, slices=slices)


register_layout(Misdescribed, misdescribed)


def read_described(rank: int, is_right: bool) -> dict[str, Any]:
    share = sequences().chunk(dist.get_world_size(), 1)[rank]
    model = model_of(Described if is_right else Misdescribed)
    with monitor_of(model, metrics=["hdi"]) as monitor:
        monitor.arm()
        model(share).square().sum().backward()
        tags = monitor.measure(0).record().scalars(["hdi"])
        return {"tags": tags, "refused": [str(one) for one in monitor.refused]}


@pytest.mark.slow
def test_a_wrong_claim_about_swapped_heads_is_contradicted_and_a_right_one_is_not(two_ranks):
    whole = {tag: value for tag, value in read_alone().items() if tag.startswith("hdi/")}
    for one in two_ranks(read_described, True):
        assert one.answer == {"tags": pytest.approx(whole, abs=1e-5), "refused": []}
        assert one.warnings == []
    for one in two_ranks(read_described, False):
        assert one.answer["tags"] == {}
        assert len(one.answer["refused"]) == 3
        assert all("the first forward contradicts its heads" in refusal for refusal in one.answer["refused"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", kinds())
def test_heads_that_are_swapped_among_four_ranks_read_as_in_one_process(four_ranks, kind):
    assert_reads_as_one_process(four_ranks(read_kind, kind))
