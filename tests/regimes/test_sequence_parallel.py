"""Readings of a model whose ranks hold other tokens of the same sequences, against those of one process with all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather, all_to_all_single
from torch.nn import functional as F

from hdi_callback import AttentionLayer, HeadSlice, register_layout
from hdi_callback.attention import find_attention
from hdi_callback.monitoring.metrics import ROWS as ATTENTION_ROWS
from tests.models import HEADS, LENGTH, WIDTH, Attention
from tests.regimes.test_ddp import CATALOGUE, METRICS, ROWS, classifier, monitor_of


class GatheredKeys(Attention):
    """Each rank has the queries of its own tokens, and gathers the keys and values of all (context parallelism)."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = _heads(self, x)
        if torch.distributed.is_initialized():
            k, v = (torch.cat(all_gather(part.contiguous()), dim=2) for part in (k, v))
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class SwappedHeads(Attention):
    """Each rank attends with its share of the heads over all tokens, and swaps back (Ulysses)."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = _heads(self, x)
        if torch.distributed.is_initialized():
            q, k, v = (_tokens_for_heads(part) for part in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v)
        if torch.distributed.is_initialized():
            out = _heads_for_tokens(out)
        return self.out_proj(out.transpose(1, 2).flatten(2))


def _heads(attention: Attention, x: Tensor) -> tuple[Tensor, ...]:
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    return tuple(project(x).unflatten(-1, (attention.num_heads, -1)).transpose(1, 2) for project in projections)


def _tokens_for_heads(part: Tensor) -> Tensor:
    ranks = dist.get_world_size()
    B, H, T, width = part.shape
    sent = part.permute(1, 0, 2, 3).contiguous()  # (H, B, T, width), the heads of one rank after those of the other
    got = all_to_all_single(torch.empty_like(sent), sent)
    return got.view(ranks, H // ranks, B, T, width).permute(2, 1, 0, 3, 4).reshape(B, H // ranks, ranks * T, width)


def _heads_for_tokens(part: Tensor) -> Tensor:
    ranks = dist.get_world_size()
    B, H, T, width = part.shape
    sent = part.view(B, H, ranks, T // ranks, width).permute(2, 1, 0, 3, 4).contiguous()
    got = all_to_all_single(torch.empty_like(sent), sent)
    return got.view(ranks * H, B, T // ranks, width).transpose(0, 1)


class DescribedHeads(SwappedHeads):
    """The same, of which a layout is known."""


def describe(name: str, module: Any) -> AttentionLayer:
    roles = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "out_proj"}
    slices = {
        role: HeadSlice(module, f"{path}.weight", heads=HEADS, width=WIDTH // HEADS) for role, path in roles.items()
    }
    return AttentionLayer(
        name, module, HEADS, HEADS, WIDTH // HEADS, WIDTH // HEADS, "described", slices, module.out_proj
    )


register_layout(DescribedHeads, describe)

KINDS = {"gathered keys": GatheredKeys, "swapped heads": SwappedHeads, "described heads": DescribedHeads}


def model_of(kind: str) -> nn.Module:
    model = classifier()
    for block in model.blocks:
        attention = KINDS[kind]()
        attention.load_state_dict(block.attn.state_dict())
        block.attn = attention
    model.forward = model_forward.__get__(model)
    return model


def model_forward(model: nn.Module, tokens: Tensor) -> Tensor:
    return model.head(model.blocks(model.embed(tokens)))  # a mean over tokens would be of one rank's


def sequences() -> Tensor:
    return torch.randint(16, (3, LENGTH), generator=torch.Generator().manual_seed(3))


# No rank has whole sequences, of which the importance of heads is, nor tells which keys lie ahead of its queries.
ALL = [name for name in (*METRICS, *ROWS) if "importance" not in name and name != "attention_ahead"]


def read(rank: int, kind: str, check_heads: bool = True) -> dict[str, Any]:
    share = sequences().chunk(dist.get_world_size(), 1)[rank]
    model = model_of(kind)
    with monitor_of(model, metrics=ALL, check_heads=check_heads) as monitor:
        for step in (0, 1):
            monitor.arm()
            model(share).square().sum().backward()
            record = monitor.measure(step).record()
        return {"tags": record.scalars(ALL), "absent": record.absent, "refused": [str(one) for one in monitor.refused],
                "heads": [layer.num_heads for layer in find_attention(model)]}  # fmt: skip


def read_alone() -> dict[str, float]:
    model = model_of("gathered keys")
    with monitor_of(model, metrics=ALL) as monitor:
        monitor.arm()
        model(sequences()).square().sum().backward()
        return monitor.measure(0).record().scalars(ALL)


def test_two_shares_of_the_tokens_give_one_reading_of_all_tokens(two_ranks):
    whole = read_alone()
    assert len(whole) > 3 * len(ROWS)
    for one in two_ranks(read, "gathered keys"):
        assert {key.partition("/")[0] for key in one.answer["absent"]} == {"attention_ahead"}
        assert one.answer["tags"] == pytest.approx(whole, rel=1e-4, abs=1e-5)


def test_heads_that_are_spread_over_ranks_while_they_attend_are_refused_with_a_reason(two_ranks):
    for one in two_ranks(read, "swapped heads"):
        assert one.answer["tags"] == {}
        assert len(one.answer["refused"]) == 3
        assert "cannot be told apart" in one.warnings[0]


def test_heads_that_are_spread_while_they_attend_read_as_one_process_once_they_are_described(two_ranks):
    """What attends are other tokens and heads than those of the layer, so that nothing could confirm the layout."""
    whole, of_rows = read_alone(), {name for name in ALL if CATALOGUE[name].source == ATTENTION_ROWS}
    expected = {tag: value for tag, value in whole.items() if tag.partition("/")[0] not in of_rows}
    assert len(expected) > 20
    for one in two_ranks(read, "described heads", False):
        assert one.answer["refused"] == []
        assert one.answer["tags"] == pytest.approx(expected, rel=1e-4, abs=1e-5)
        assert {key.partition("/")[0] for key in one.answer["absent"]} == {"attention rows"}
