"""Attention rows against a plain oracle and closed forms, and sums that add up."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hdi_callback.core import RowMetrics, RowSums, attention_rows, row_metrics
from hdi_callback.errors import ShapeError
from tests.core.search import SEARCH
from tests.core.test_subspaces import gaussian

# sequences, heads, queries, keys, seed
SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 5), st.integers(1, 9), st.integers(0, 10**6))


def attention(B: int, H: int, q: int, n: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, what each query sees (one query of each sequence sees nothing), and scores."""
    logits = 2 * gaussian(B, H, q, n, seed=seed)
    visible = torch.rand(B, 1, q, n, generator=torch.Generator().manual_seed(seed)) < 0.7
    visible[:, :, 0] = False
    rows = torch.softmax(logits.masked_fill(~visible, -torch.inf), -1).nan_to_num()
    return rows, visible, logits


def plain(rows: Tensor, visible: Tensor, logits: Tensor) -> dict:
    """One query and one head at a time."""
    B, H, q, n = rows.shape
    visible = visible.expand(rows.shape).numpy()
    rows, logits = rows.double().numpy(), logits.double().numpy()
    logit = np.full(H, -np.inf)
    entropy: list[np.ndarray] = []
    sink: list[np.ndarray] = []
    for b in range(B):
        for i in range(q):
            for h in range(H):
                scores = logits[b, h, i][visible[b, h, i]]
                logit[h] = max([logit[h], *(scores - scores.mean() if len(scores) else [])])
            keys = [j for j in range(n) if visible[b, 0, i, j]]
            if len(keys) < 2:
                continue
            a = rows[b, :, i][:, keys]
            sink.append(a[:, 0])
            with np.errstate(divide="ignore", invalid="ignore"):
                entropy.append(-np.where(a > 0, a * np.log(a), 0).sum(-1) / math.log(len(keys)))
    return {
        "entropy": np.mean(entropy, 0) if entropy else np.full(H, np.nan),
        "sink": np.mean(sink, 0) if sink else np.full(H, np.nan),
        "logit": np.where(np.isinf(logit), np.nan, logit),
    }


def assert_equal(rows: RowMetrics, expected: dict, tolerance: float = 1e-9) -> None:
    for name, values in expected.items():
        found = getattr(rows, name).double().numpy()
        assert np.allclose(found, values, atol=tolerance, rtol=tolerance, equal_nan=True), name


def read(rows: Tensor, visible: Tensor | None = None, **more: Tensor) -> RowMetrics:
    return row_metrics(attention_rows(rows, visible, **more))


@given(SHAPES)
@SEARCH
def test_rows_agree_with_a_loop_over_queries_and_heads(shape):
    rows, visible, logits = attention(*shape)
    assert_equal(read(rows, visible, logits=logits), plain(rows, visible, logits))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_single_and_half_precision_agree_with_double_precision_on_the_rounded_rows(dtype):
    rows, visible, logits = attention(2, 4, 16, 200)
    rows, logits = rows.to(dtype), logits.to(dtype)
    assert_equal(read(rows, visible, logits=logits), plain(rows, visible, logits), 1e-5)


@given(SHAPES, st.integers(1, 5))
@SEARCH
def test_chunks_of_queries_and_sequences_add_up_to_one_pass(shape, cut):
    rows, visible, logits = attention(*shape)
    whole = attention_rows(rows, visible, logits=logits)
    parts = [
        attention_rows(rows[b : b + 1, :, part], visible[b : b + 1, :, part], logits=logits[b : b + 1, :, part])
        for b in range(shape[0])
        for part in (slice(None, cut), slice(cut, None))
    ]
    merged = parts[-1]
    for part in parts[:-1]:
        merged = merged + part
    for one, other in zip(merged, whole):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12, equal_nan=True)
    assert_equal(row_metrics(merged), plain(rows, visible, logits))


@given(st.integers(2, 80), st.integers(1, 3), st.integers(0, 10**6))
@SEARCH
def test_a_pattern_is_the_mean_attention_between_parts_of_the_sequence(length, sequences, seed):
    rows, visible, logits = attention(sequences, 2, length, length, seed)
    positions = torch.arange(length)
    found = read(rows, visible, logits=logits, positions=positions).pattern
    part = [at if length <= 32 else at * 32 // length for at in range(length)]
    expected, queries = np.zeros((2, 32, 32)), np.zeros(32)
    for b in range(sequences):
        for i in range(length):
            keys = [j for j in range(length) if visible[b, 0, i, j]]
            if len(keys) > 1:
                queries[part[i]] += 1
                for j in keys:
                    expected[:, part[i], part[j]] += rows[b, :, i, j].double().numpy()
    with np.errstate(invalid="ignore", divide="ignore"):
        expected /= queries[:, None]
    assert np.allclose(found.double().numpy(), expected, atol=1e-6, equal_nan=True)


def test_uniform_rows_average_over_everything():
    n = torch.arange(1, 41)
    causal = torch.ones(40, 40, dtype=torch.bool).tril()
    found = read((causal / n[:, None]).expand(3, 40, 40), causal)
    assert found.entropy.tolist() == pytest.approx([1] * 3)


def test_one_hot_rows_have_no_entropy():
    rows = torch.zeros(2, 5, 8)
    rows[0, :, 3] = 1
    rows[1, torch.arange(5), torch.arange(5)] = 1
    assert read(rows).entropy.tolist() == [0, 0]


def test_a_sink_is_the_first_token_that_a_query_sees():
    rows = torch.zeros(1, 2, 4, 6)
    rows[0, 0, :, 2] = 1
    rows[0, 1, :, 3], rows[0, 1, :, 2] = 0.9, 0.1
    padded_left = torch.arange(6).expand(4, 6) >= 2
    assert read(rows, padded_left).sink.tolist() == pytest.approx([1, 0.1])
    assert read(rows).sink.tolist() == [0, 0]


def test_attention_to_later_keys_is_their_mean_weight():
    weights = torch.full((1, 4, 4), 0.25)
    assert float(read(weights, positions=torch.arange(4)).ahead) == pytest.approx((3 + 2 + 1 + 0) / 16)
    causal = torch.ones(4, 4, dtype=torch.bool).tril()
    assert float(read(weights * causal, causal, positions=torch.arange(4)).ahead) == 0
    assert read(weights).ahead.isnan().all()


def test_masked_scores_are_not_the_largest():
    logits = torch.tensor([[[1.0, 2.0, -torch.inf]]])
    assert float(read(logits.softmax(-1), logits=logits).logit) == 0.5
    finite = torch.tensor([[[1.0, 2.0, torch.finfo(torch.float32).min]]])
    assert float(read(finite.softmax(-1), logits=finite).logit) == 0.5


def test_without_a_counted_query_all_is_nan():
    found = row_metrics(attention_rows(torch.zeros(3, 0, 5), logits=torch.zeros(3, 0, 5)))
    assert found.entropy.isnan().all()
    assert found.logit.isnan().all()


def test_the_entropy_of_weights_below_zero_is_not_known_and_that_of_the_other_head_is():
    rows = torch.tensor([[[0.5, 0.5, 0.0]], [[1.5, -0.5, 0.0]]])
    entropy = read(rows).entropy
    assert float(entropy[0]) == pytest.approx(math.log(2) / math.log(3))
    assert not math.isfinite(float(entropy[1]))


def test_a_stack_of_layers_is_its_layers():
    sums = [attention_rows(*attention(2, 3, 4, 6, seed=seed)[:2]) for seed in range(3)]
    together = row_metrics(RowSums(*map(torch.stack, zip(*sums))))
    for place, one in enumerate(sums):
        for stacked, alone in zip(together, row_metrics(one)):
            assert torch.equal(stacked[place].nan_to_num(9), alone.nan_to_num(9))


def test_rows_of_several_layers_at_once_are_those_of_each():
    logits = gaussian(3, 2, 4, 5, 7)
    logits[1] = logits[1].masked_fill(torch.ones(5, 7).triu(2).bool(), -torch.inf)
    weights, positions = logits.softmax(-1), torch.tensor([0, 2, 3, 5, 6])
    together = attention_rows(weights, logits=logits, positions=positions, layers=True)
    for layer in range(3):
        alone = attention_rows(weights[layer], logits=logits[layer], positions=positions)
        for name, stacked, other in zip(RowSums._fields, together, alone):
            assert stacked[layer].shape == other.shape
            assert torch.allclose(stacked[layer], other, rtol=1e-12, atol=1e-12), name


def test_shapes_that_do_not_belong_together_are_refused():
    with pytest.raises(ShapeError, match="heads, queries, keys"):
        attention_rows(torch.zeros(3, 4))
    with pytest.raises(ShapeError, match="logits the same"):
        attention_rows(torch.zeros(2, 3, 4), logits=torch.zeros(2, 3, 5))


def test_what_softmax_ignores_is_no_score():
    rows, visible, logits = attention(2, 4, 6, 9)
    shift = 40 * gaussian(2, 4, 6, 1, seed=9)  # of all keys of a query alike
    assert torch.allclose(
        read(rows, visible, logits=logits + shift).logit, read(rows, visible, logits=logits).logit, atol=1e-4
    )
