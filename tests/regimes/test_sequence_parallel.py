"""Readings of a model whose ranks hold other tokens of the same sequences, against those of one process with all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.nn import functional as F

from hdi_callback.attention import find_attention
from tests.models import LENGTH, Attention
from tests.regimes.test_ddp import METRICS, ROWS, classifier, monitor_of


class GatheredKeys(Attention):
    """Each rank has the queries of its own tokens, and gathers the keys and values of all (context parallelism)."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = _heads(self, x)
        if torch.distributed.is_initialized():
            k, v = (torch.cat(all_gather(part.contiguous()), dim=2) for part in (k, v))
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def _heads(attention: Attention, x: Tensor) -> tuple[Tensor, ...]:
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    return tuple(project(x).unflatten(-1, (attention.num_heads, -1)).transpose(1, 2) for project in projections)


def model_of(make: Callable[[], Attention]) -> nn.Module:
    model = classifier()
    for block in model.blocks:
        attention = make()
        attention.load_state_dict(block.attn.state_dict())
        block.attn = attention
    model.forward = model_forward.__get__(model)
    return model


def model_forward(model: nn.Module, tokens: Tensor) -> Tensor:
    return model.head(model.blocks(model.embed(tokens)))  # a mean over tokens would be of one rank's


def sequences() -> Tensor:
    return torch.randint(16, (3, LENGTH), generator=torch.Generator().manual_seed(3))


# No rank has whole sequences, on which importance is defined, nor the positions of keys ahead of its queries.
ALL = [name for name in (*METRICS, *ROWS) if "importance" not in name and name != "attention_ahead"]


def read(rank: int, make: Callable[[], Attention]) -> dict[str, Any]:
    share = sequences().chunk(dist.get_world_size(), 1)[rank]
    model = model_of(make)
    with monitor_of(model, metrics=ALL) as monitor:
        for step in (0, 1):
            monitor.arm()
            model(share).square().sum().backward()
            record = monitor.measure(step).record()
        return {"tags": record.scalars(ALL), "absent": record.absent, "refused": [str(one) for one in monitor.refused],
                "heads": [layer.num_heads for layer in find_attention(model)]}  # fmt: skip


def read_alone() -> dict[str, float]:
    model = model_of(GatheredKeys)
    with monitor_of(model, metrics=ALL) as monitor:
        monitor.arm()
        model(sequences()).square().sum().backward()
        return monitor.measure(0).record().scalars(ALL)


def test_two_shares_of_the_tokens_give_one_reading_of_all_tokens(two_ranks):
    whole = read_alone()
    assert len(whole) > 3 * len(ROWS)
    for one in two_ranks(read, GatheredKeys):
        assert {key.partition("/")[0] for key in one.answer["absent"]} == {"attention_ahead"}
        assert one.answer["tags"] == pytest.approx(whole, rel=1e-4, abs=1e-5)
