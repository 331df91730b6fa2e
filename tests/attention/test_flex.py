"""FlexAttention is read like any other attention, and its first use leaves the process whole."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hdi_callback import check
from hdi_callback.errors import HDIError
from hdi_callback.monitor import HeadDiversityMonitor, contract
from hdi_callback.testing import assert_heads

flex = pytest.importorskip("torch.nn.attention.flex_attention")

W, H, LENGTH = 32, 4, 16


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def window(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q >= k) & (q - k < 4)


def documents(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q // 5 == k // 5) & (q >= k)


def slope(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score - (q - k) * 0.25 * (h + 1)


class Attention(nn.Module):
    def __init__(self, mask: Callable[..., Any] | None = causal, change: Any = None, run: Any = None) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(W, 3 * W), nn.Linear(W, W)
        self.mask, self.change, self.run = mask, change, run or flex.flex_attention

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)
        length = x.shape[1]
        blocks = None
        if self.mask is not None:
            blocks = flex.create_block_mask(self.mask, None, None, length, length, device="cpu")
        return self.out(self.run(q, k, v, score_mod=self.change, block_mask=blocks).transpose(1, 2).flatten(2))


def dense(layer: Attention, x: Tensor) -> Tensor:
    """Weights of the same attention, written out: ``(batch, H, queries, keys)``."""
    q, k, _ = layer.qkv(x).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    length = x.shape[1]
    heads, rows, columns = (torch.arange(size) for size in (H, length, length))
    if layer.change is not None:
        scores = layer.change(scores, None, heads[:, None, None], rows[:, None], columns)
    if layer.mask is not None:
        scores = scores.masked_fill(~layer.mask(None, None, rows[:, None], columns), -torch.inf)
    return scores.softmax(-1)


@pytest.mark.parametrize("change", [None, slope])
@pytest.mark.parametrize("mask", [None, causal, window, documents])
@torch.no_grad()
def test_rows_and_outputs_are_those_of_the_same_attention_written_out(mask, change):
    torch.manual_seed(0)
    layer, x = Attention(mask, change), torch.randn(2, LENGTH, W)
    seen = []
    layer.out.register_forward_pre_hook(lambda module, args: seen.append(args[0].clone()))
    with HeadDiversityMonitor(layer, metrics=["attention_entropy", "head_covariance"]) as monitor:
        monitor.arm(training_only=False)
        layer(x)
        captured = monitor._capture.take()["the model"]
        monitor.disarm()
        monitor.arm(training_only=False)
        layer(x)
        values = monitor.measure(step=0).record().layers["the model"].values
    weights = dense(layer, x)
    entropy = -(weights * weights.clamp_min(1e-30).log()).sum(-1)
    visible = (weights > 0).sum(-1).double()
    share = entropy / visible.log().clamp_min(1e-12)  # of rows that see more than one key
    expected = share.masked_select(visible.expand_as(share) > 1).mean()
    assert torch.allclose(captured.outputs.flatten(1), seen[-1].flatten(0, 1), atol=1e-5)
    assert values["attention_entropy"] == pytest.approx(float(expected), abs=1e-3)


@torch.no_grad()
def test_the_mask_of_blocks_is_a_fact_and_a_change_of_scores_is_named():
    x = torch.randn(2, LENGTH, W)
    right = Attention(causal)
    assert_heads(right, lambda: right(x), causal=True)
    bare = Attention(None)
    with pytest.raises((AssertionError, HDIError), match="causal"):
        assert_heads(bare, lambda: bare(x), causal=True)
    named = Attention(causal, slope)
    assert "score_mod `slope`" in str(check(named, lambda: named(x)))


def test_its_first_use_in_a_process_leaves_the_process_whole():
    code = (
        "import torch; from tests.attention.test_flex import Attention, W\n"
        "from hdi_callback import check\n"
        "layer, x = Attention(), torch.randn(2, 16, W)\n"
        "assert len(check(layer, lambda: layer(x)).cards) == 1\n"
        "with torch.no_grad(): layer(x)\n"
        "import torch._dynamo as d; assert d.utils.counters['stats']['unique_graphs'] == 1, d.utils.counters\n"
        "print('whole')"
    )
    fresh = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert fresh.stdout.strip() == "whole", fresh.stderr


@torch.no_grad()
def test_a_compiled_flex_attention_in_an_eager_model_is_read_and_stays_compiled():
    graphs = []
    for is_watched in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(0)
        layer = Attention(run=torch.compile(flex.flex_attention, backend="aot_eager"))
        monitor = HeadDiversityMonitor(layer) if is_watched else None
        outputs = []
        for step in range(3):
            if monitor is not None:
                monitor.arm(training_only=False)
            outputs.append(layer(torch.ones(2, LENGTH, W) * step))
            if monitor is not None:
                record = monitor.measure(step).record().layers["the model"]
                assert "attention_entropy" in record.values
                assert "attention rows" not in record.absent
        graphs.append((torch._dynamo.utils.counters["stats"]["unique_graphs"], outputs))
    assert graphs[0][0] == graphs[1][0] == 1
    assert all(map(torch.equal, graphs[0][1], graphs[1][1]))


@torch.no_grad()
def test_many_queries_are_computed_some_at_a_time(monkeypatch):
    layer, x = Attention(window, slope), torch.randn(2, LENGTH, W)
    kept = []
    for at_once in (2**26, 3 * 2 * H * LENGTH):
        monkeypatch.setattr("hdi_callback.attention.flex._SCORES_AT_ONCE", at_once)
        with HeadDiversityMonitor(layer, metrics=["head_covariance"]) as monitor:
            monitor.arm(training_only=False)
            layer(x)
            kept.append(monitor._capture.take()["the model"].outputs)
    assert torch.allclose(*kept, atol=1e-6)


@pytest.mark.parametrize(
    ("after", "tells"),
    [
        ({"mask": causal}, "each head sees all tokens before, and 4 tokens till then"),
        ({"mask": None}, "each head now sees later tokens"),
        ({"change": slope}, "the bias of token 0 for token 15 is 15, and 0 before"),
        ({}, ""),
    ],
)
@torch.no_grad()
def test_a_mask_or_a_bias_of_flex_attention_that_changes_is_told(after, tells, monkeypatch):
    """Without gradients, as FlexAttention has no backward on a CPU."""
    monkeypatch.setattr(contract, "EVERY", 3)
    layer, messages = Attention(window), []
    with HeadDiversityMonitor(layer) as monitor:
        for step in range(12):
            for name, value in after.items() if step > 6 else ():
                setattr(layer, name, value)
            monitor.arm(training_only=False)
            layer(torch.randn(2, 16, W))
            messages += [alert.message for alert in monitor.measure(step).record().alerts]
    assert len(messages) == bool(tells)
    assert all(tells in message for message in messages)
