"""How heads were read is shown operation by operation."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from hdi_callback.attention import survey
from hdi_callback.checks import check
from hdi_callback.checks.explained import explained
from tests.attention.by_hand_refused import REFUSED


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.packed, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.packed(x).chunk(3, -1))
        weights = F.softmax(q @ k.mT / 2, dim=-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_the_operations_that_made_scores_and_heads_are_listed_in_their_order_with_the_rows_that_they_are_of() -> None:
    model, x = nn.Sequential(Block()), torch.randn(2, 5, 16)
    listing = explained(model, lambda: model(x), "0")
    with Operations() as ran:
        model(x)
    listed = re.findall(r"^ *\d+ +(\w+) ", listing, flags=re.M)
    arithmetic = [name for name in ran.names if name in {"addmm", "bmm", "div", "_softmax"}]
    assert arithmetic == ["addmm", "bmm", "div", "_softmax", "bmm", "addmm"]
    assert [name for name in listed if name in arithmetic] == arithmetic
    (projected,) = re.findall(r"addmm .*`0.packed.weight`", listing)
    assert "(10, 48)" in projected
    (card,) = check(model, lambda: model(x)).cards
    assert listing.endswith(f"\n\n{card}")
    assert "rows 0-15, 16-31, 32-47 of packed" in listing


def test_a_module_without_attention_is_answered_with_those_that_have_some() -> None:
    model, x = nn.Sequential(Block(), nn.ReLU(), Block()), torch.randn(2, 5, 16)
    assert explained(model, lambda: model(x), "1") == "No attention ran in `1`; it ran in: `0`, `2`."


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_each_reason_for_a_refusal_stands_below_the_operations_that_led_to_it(name: str) -> None:
    model, _, inputs = REFUSED[name][0]()
    refused = survey(model, lambda: model(*inputs)).refused
    assert refused
    for refusal in refused:
        assert f"refused: {refusal.reason}" in explained(model, lambda: model(*inputs), refusal.name)
