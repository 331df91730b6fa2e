"""What hooks do while a compiled graph is traced: taps hand head outputs out, and observers do nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hdi_callback.attention import find_attention
from hdi_callback.attention.capture.tap import Tap
from hdi_callback.attention.observe.forward import ObservedForward
from hdi_callback.attention.observe.row_reader import Request
from hdi_callback.attention.observe.window import Window


@pytest.fixture
def attention() -> nn.MultiheadAttention:
    torch.manual_seed(0)
    return nn.MultiheadAttention(8, 2, batch_first=True)


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("is_self_attention", [True, False])
def test_head_outputs_are_recomputed_inside_a_graph_and_equal_arguments_stay_identical(
    monkeypatch, attention, by_name, is_self_attention
):
    (layer,) = find_attention(nn.Sequential(attention))
    tap = Tap(layer, 100, None)
    tap.is_armed = True
    x = torch.randn(3, 5, 8)
    tokens = (x, x, x) if is_self_attention else (x, x + 1, x + 2)
    args, kwargs = ((), dict(zip(("query", "key", "value"), tokens, strict=True))) if by_name else (tokens, {})
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert tap.take_recomputed(attention, args, kwargs) is None, "graphs of steps that are not read stay as they are"
    assert tap.is_empty(reads_all=True)
    tap.is_in_graph = True
    args, kwargs = tap.take_recomputed(attention, args, kwargs)
    passed = [*args, *kwargs.values()]
    assert all(torch.equal(one, other) for one, other in zip(passed, tokens, strict=True))
    assert len({id(one) for one in passed}) == (1 if is_self_attention else 3)
    assert [one is other for one, other in zip(passed, tokens, strict=True)] == [False, *[not is_self_attention] * 2]
    taken = tap.captured(reads_all=True).outputs.flatten(1)
    monkeypatch.undo()
    expected = attention(*tokens)[0].flatten(0, 1)
    torch.testing.assert_close(F.linear(taken, attention.out_proj.weight, attention.out_proj.bias), expected)


def test_torchs_attention_is_not_observed_while_a_graph_is_traced(monkeypatch, attention):
    window, x = Window(), torch.randn(3, 5, 8)
    window.open(ObservedForward(Request(), {}), {"attn": attention}, {})
    assert vars(attention)["forward"].observers == [], "what a graph would call"
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    attention(x, x, x)
    assert not window.has_run
    monkeypatch.undo()
    attention(x, x, x)
    assert window.has_run
    window.close()
    assert "forward" not in vars(attention)
