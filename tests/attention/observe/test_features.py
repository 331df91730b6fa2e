"""Which map gave what attention received: found from one feature in most cases, and never ruled out wrongly."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from hdi_callback import HeadDiversityMonitor
from hdi_callback.attention.observe.compare import found_rows, judge, proposals
from hdi_callback.attention.observe.compare.features import find_features, find_rotated, may_hold, tolerance
from hdi_callback.attention.observe.map_log import MapLog

P, H, WIDTH = 12, 3, 8


def turned(x: Tensor, apart: int) -> Tensor:
    """Turn the pairs of a head by angles of their own at every token."""
    angles = torch.rand(P, 1, WIDTH // 2) * 6.28
    first = list(range(WIDTH // 2)) if apart > 1 else list(range(0, WIDTH, 2))
    second = [one + apart for one in first]
    result = x.clone()
    result[..., first] = x[..., first] * angles.cos() - x[..., second] * angles.sin()
    result[..., second] = x[..., first] * angles.sin() + x[..., second] * angles.cos()
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("how", ["as they are", "scaled", "turned halves", "turned neighbours", "with a large mean"])
@pytest.mark.parametrize("seed", range(3))
def test_the_filter_never_rules_out_the_linear_map_that_gave_the_heads(how, dtype, seed):
    torch.manual_seed(seed)
    made = torch.randn(P, 40) + 100 * (how == "with a large mean")
    heads = made[:, torch.randperm(40 - WIDTH * H)[0] :][:, : H * WIDTH].view(P, H, WIDTH)
    factor = {"scaled": 0.125}.get(how, 1.0)
    apart = {"turned halves": WIDTH // 2, "turned neighbours": 1}.get(how)
    actual = (heads if apart is None else turned(heads, apart)) * factor
    actual, made = actual.to(dtype), made.to(dtype)
    others = [torch.randn(P, 24).to(dtype), torch.randn(P, 7).to(dtype)]
    answers = may_hold(actual, [others[0], made, others[1]])
    assert answers[1]
    tol = tolerance(actual, made)
    found = find_features(actual.flatten(1), made, tol).view(H, WIDTH)
    found = torch.where(found < 0, find_rotated(actual, made, tol), found)
    if dtype != torch.bfloat16:
        assert bool((found >= 0).all()), "and the whole comparison finds them"
        assert answers == [False, True, False], "most others are ruled out"


class Attention(nn.Module):
    def __init__(self, is_odd: bool) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(16, 16) for _ in range(4))
        self.num_heads, self.is_odd = 4, is_odd

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (map_(x).unflatten(-1, (4, 4)).transpose(1, 2) for map_ in (self.q_proj, self.k_proj, self.v_proj))
        if self.is_odd:
            q, k = q.tanh(), k + v
        return self.out_proj(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, is_odd: bool) -> None:
        super().__init__()
        self.before, self.attention, self.after = nn.LayerNorm(16), Attention(is_odd), nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        return x + self.down(self.up(self.after(x)).relu())


def comparisons_of_the_first_reading(layers: int, is_odd: bool) -> Counter[str]:
    """Count how often heads are compared with what a map gave."""
    torch.manual_seed(0)
    model, counts = nn.Sequential(*(Block(is_odd) for _ in range(layers))), Counter[str]()

    def counted(name: str, function):
        def call(*args, **kwargs):
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    patches = [
        mock.patch.object(room, name, counted(name, getattr(room, name)))
        for room, name in (
            (judge, "match_heads"), (judge, "find_features"), (found_rows, "find_features"),
            (found_rows, "find_rotated"), (found_rows, "may_hold"),
            (judge, "_are_equal"), (proposals, "find_rows"),
        )
    ]  # fmt: skip
    with HeadDiversityMonitor(model) as monitor:
        for patch in patches:
            patch.start()
        try:
            monitor.arm()
            model(torch.randn(2, 9, 16)).sum().backward()
            monitor.measure(0)
        finally:
            mock.patch.stopall()
    return counts


@pytest.mark.some_slow(quick=1)
@pytest.mark.filterwarnings("ignore::hdi_callback.errors.HDIWarning")
@pytest.mark.parametrize("is_odd", [False, True], ids=["layers that are watched", "layers that nothing explains"])
def test_comparisons_in_the_first_reading_grow_linearly_with_the_number_of_layers(is_odd):
    """Not with every map of the model, which made 32 layers take a minute and a half."""
    few, many = (comparisons_of_the_first_reading(layers, is_odd) for layers in (3, 9))
    assert few.total() > 0
    assert {name: many[name] <= 3 * few[name] for name in many} == dict.fromkeys(many, True), (few, many)


@pytest.mark.parametrize("is_head_first", [True, False])
def test_a_norm_over_heads_is_matched_with_heads_or_tokens_as_the_first_dimension(is_head_first):
    stack: Any = SimpleNamespace(owner="", innermost=None)
    log = MapLog(stack, {}, keeps_samples=True, claimed=frozenset())
    weight, x = torch.randn(12, 12), torch.randn(2, 5, 12)
    log.map_ran(weight, x, x @ weight)
    heads = (x @ weight).unflatten(-1, (3, 4))
    before = heads.transpose(1, 2) if is_head_first else heads
    log.norm_ran(None, before, 2 * before)
    expected = heads.flatten(0, 1)
    assert any(
        one.features.shape == expected.shape
        and torch.equal(one.features, expected)
        and torch.equal(other.features, 2 * expected)
        for one, other in log.calls[-1].ways
    )
