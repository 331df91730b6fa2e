"""Attention rows against a plain oracle and closed forms, and sums that add up."""

from __future__ import annotations

import math
from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hdi_callback.core import AttentionSums, NormSums, logit_bound, noise_covariance, ov_circuits
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


def plain(rows: Tensor, visible: Tensor, logits: Tensor, min_keys: int = 2, first: int | None = None) -> dict:
    """One query and one head at a time."""
    B, H, q, n = rows.shape
    visible = visible.expand(rows.shape).numpy()
    rows, logits = rows.double().numpy(), logits.double().numpy()
    logit = np.full(H, -np.inf)
    entropy, samples, share = [], [], []
    product, centred, columns, queries = np.zeros((H, H)), np.zeros((H, H)), np.zeros((H, n)), 0
    for b in range(B):
        for i in range(q):
            for h in range(H):
                logit[h] = max([logit[h], *logits[b, h, i][visible[b, h, i]]])
            keys = [j for j in range(n) if visible[b, 0, i, j] and j != first]
            if len(keys) < max(min_keys, 2):
                continue
            a = rows[b, :, i][:, keys]
            if first is not None:
                a = a / a.sum(-1, keepdims=True)
            queries += 1
            with np.errstate(divide="ignore", invalid="ignore"):
                entropy.append(-np.where(a > 0, a * np.log(a), 0).sum(-1) / math.log(len(keys)))
            ess = a.sum(-1) ** 2 / (a**2).sum(-1)
            samples.append(ess)
            share.append(ess / len(keys))
            product += a @ a.T
            c = a - a.sum(-1, keepdims=True) / len(keys)
            centred += c @ c.T
            columns[:, keys] += a
    with np.errstate(divide="ignore", invalid="ignore"):
        size, size_centred = np.sqrt(np.diag(product)), np.sqrt(np.diag(centred))
        return {
            "queries": queries,
            "entropy": np.sum(entropy, 0) / queries if queries else np.full(H, np.nan),
            "samples": np.sum(samples, 0) / queries if queries else np.full(H, np.nan),
            "sample_share": np.sum(share, 0) / queries if queries else np.full(H, np.nan),
            "sink": columns.max(-1) / queries if queries else np.full(H, np.nan),
            "product": product / queries if queries else np.full((H, H), np.nan),
            "overlap": product / np.outer(size, size),
            "alike": centred / np.outer(size_centred, size_centred),
            "logit": np.where(np.isinf(logit), np.nan, logit),
        }


def assert_equal(rows, expected: dict, tolerance: float = 1e-9) -> None:
    for name, values in expected.items():
        found = getattr(rows, name).double().numpy()
        assert np.allclose(found, values, atol=tolerance, rtol=tolerance, equal_nan=True), name


@given(SHAPES, st.integers(0, 4), st.sampled_from([None, 0, 2]))
@SEARCH
def test_attention_sums_agree_with_a_loop_over_queries_and_heads(shape, min_keys, first):
    rows, visible, logits = attention(*shape)
    sums = AttentionSums.of(rows, visible, logits=logits, min_keys=min_keys, first=first)
    assert_equal(sums.rows(), plain(rows, visible, logits, min_keys, first))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_single_and_half_precision_agree_with_double_precision_on_the_rounded_rows(dtype):
    rows, visible, logits = attention(2, 4, 16, 200)
    rows, logits = rows.to(dtype), logits.to(dtype)
    assert_equal(AttentionSums.of(rows, visible, logits=logits).rows(), plain(rows, visible, logits), 1e-5)


@given(SHAPES, st.integers(1, 5), st.sampled_from([None, 0]))
@SEARCH
def test_chunks_of_queries_and_sequences_add_up_to_one_pass(shape, cut, first):
    rows, visible, logits = attention(*shape)
    whole = AttentionSums.of(rows, visible, logits=logits, first=first)
    parts = [
        AttentionSums.of(rows[b : b + 1, :, part], visible[b : b + 1, :, part], logits=logits[b : b + 1, :, part],
                         first=first)
        for b in range(shape[0])
        for part in (slice(None, cut), slice(cut, None))
    ]  # fmt: skip
    merged = parts[-1]
    for part in parts[:-1]:
        merged = merged + part
    for item in fields(AttentionSums):
        assert torch.allclose(getattr(merged, item.name), getattr(whole, item.name), rtol=1e-12, atol=1e-12)
    assert_equal(merged.rows(), plain(rows, visible, logits, first=first))


def test_sequences_of_different_length_add_up():
    first, second = attention(1, 3, 4, 5), attention(1, 3, 6, 9, seed=1)
    merged = AttentionSums.of(first[0], first[1]) + AttentionSums.of(second[0], second[1])
    assert merged.columns.shape == (3, 9)
    longer, shorter = (AttentionSums.of(rows, visible) for rows, visible, _ in (second, first))
    assert torch.allclose(merged.columns[:, :5], longer.columns[:, :5] + shorter.columns)
    assert torch.equal(merged.columns[:, 5:], longer.columns[:, 5:])
    assert_equal(
        (longer + shorter).rows(), {"queries": merged.queries.numpy(), "overlap": merged.rows().overlap.numpy()}
    )
    with pytest.raises(ShapeError, match="9 keys already, more than 5"):
        merged.padded(5)


def test_the_sums_of_chosen_heads_are_those_of_their_rows_alone_in_that_order():
    rows, visible, logits = attention(2, 4, 5, 6)
    found = AttentionSums.of(rows, visible, logits=logits).of_heads([3, 0, 2])
    assert_equal(found.rows(), plain(rows[:, [3, 0, 2]], visible, logits[:, [3, 0, 2]]))


def test_uniform_rows_average_over_everything_and_are_not_alike():
    n = torch.arange(1, 41)
    causal = torch.ones(40, 40, dtype=torch.bool).tril()
    rows = (causal / n[:, None]).expand(3, 40, 40)
    read = AttentionSums.of(rows, causal).rows()
    assert read.entropy.tolist() == pytest.approx([1] * 3)
    assert read.samples.tolist() == pytest.approx([float(n[1:].float().mean())] * 3)
    assert read.sample_share.tolist() == pytest.approx([1] * 3)
    assert read.sink.tolist() == pytest.approx([float((1 / n[1:]).mean())] * 3)
    assert read.sink_position.tolist() == [0, 0, 0]
    assert float(read.overlap_mean) == pytest.approx(1)
    assert read.alike_mean.isnan()
    assert read.alike_worst_pair.tolist() == [-1, -1]
    assert read.queries == 39


@pytest.mark.parametrize(
    ("sequences", "queries", "keys"),
    [(2, 1214, 1214), (1, 64, 16384), pytest.param(60000, 8, 3, marks=pytest.mark.slow)],
)
def test_overlaps_stay_precise_for_long_and_for_many_rows(sequences, queries, keys):
    generator = torch.Generator().manual_seed(0)
    rows = (0.1 * torch.randn(sequences, 3, queries, keys, generator=generator)).softmax(-1)
    got, wide = AttentionSums.of(rows).rows(), AttentionSums.of(rows.double()).rows()
    torch.testing.assert_close(got.overlap.double(), wide.overlap, rtol=0, atol=1e-6)
    torch.testing.assert_close(got.product.double(), wide.product, rtol=1e-6, atol=0)


def test_float32_rounding_of_flat_heads_is_not_reported_as_similarity():
    scores = 1e-9 * gaussian(4, 16, 1000).float()
    assert AttentionSums.of(torch.softmax(scores, -1)).rows().alike_mean.isnan()
    rows = AttentionSums.of(torch.softmax(1e6 * scores, -1)).rows()
    assert abs(float(rows.alike_mean)) < 0.05
    assert float(rows.overlap_mean) > 0.99


def test_one_hot_rows_sample_one_token():
    rows = torch.zeros(2, 5, 8)
    rows[0, :, 3] = 1
    rows[1, torch.arange(5), torch.arange(5)] = 1
    read = AttentionSums.of(rows).rows()
    assert read.entropy.tolist() == [0, 0]
    assert read.samples.tolist() == [1, 1]
    assert read.sample_share.tolist() == [0.125, 0.125]
    assert read.sink.tolist() == pytest.approx([1, 0.2])
    assert read.sink_position[0] == 3
    assert float(read.overlap[0, 1]) == pytest.approx(0.2)  # they meet in one query of five


def test_equal_heads_have_likeness_one_and_opposite_heads_minus_one():
    lean = 0.1 * torch.tensor([[1.0, 1, -1, -1], [-1, 1, -1, 1]])
    rows = torch.stack([0.25 + lean, 0.25 + lean, 0.25 - lean])
    read = AttentionSums.of(rows).rows()
    assert read.alike.tolist() == [
        pytest.approx([1, 1, -1]), pytest.approx([1, 1, -1]), pytest.approx([-1, -1, 1])
    ]  # fmt: skip
    assert read.alike_worst_pair.tolist() == [0, 1]
    assert float(read.overlap[0, 2]) == pytest.approx((0.25 - 0.04) / (0.25 + 0.04))


def test_without_the_sink_the_metrics_show_the_rest_of_the_attention():
    rest = torch.softmax(gaussian(2, 6, 7), -1)
    rows = torch.cat([torch.full((2, 6, 1), 0.99), 0.01 * rest], -1)
    with_sink, without = AttentionSums.of(rows).rows(), AttentionSums.of(rows, first=0).rows()
    assert with_sink.sink.tolist() == pytest.approx([0.99] * 2)
    assert float(with_sink.overlap_mean) > 0.999
    alone = AttentionSums.of(rest).rows()
    for name in ("entropy", "samples", "sample_share", "sink", "overlap", "alike"):
        assert torch.allclose(getattr(without, name), getattr(alone, name), atol=1e-9)
    assert (without.sink_position > 0).all()


def test_a_query_with_all_weight_on_the_sink_is_left_out_of_the_metrics_without_the_sink():
    rows, visible = torch.softmax(gaussian(1, 2, 5, 6), -1), torch.ones(1, 1, 5, 6, dtype=torch.bool)
    rows[0, 1, 3] = torch.eye(6, dtype=rows.dtype)[0]
    others = [0, 1, 2, 4]
    found = AttentionSums.of(rows, visible, first=0).rows()
    expected = plain(rows[:, :, others], visible[:, :, others], rows[:, :, others], first=0)
    assert_equal(found, {name: value for name, value in expected.items() if name != "logit"})
    assert int(found.queries) == 4


def test_the_first_key_may_differ_from_sequence_to_sequence():
    rows, visible, _ = attention(2, 3, 4, 6)
    places = torch.tensor([1, 4])
    together = AttentionSums.of(rows, visible, first=places[:, None, None])
    apart = [AttentionSums.of(rows[b], visible[b], first=int(place)) for b, place in enumerate(places)]
    for item in fields(AttentionSums):
        assert torch.allclose(getattr(together, item.name), getattr(apart[0] + apart[1], item.name), equal_nan=True)


@pytest.mark.parametrize("shape", [(2, 3, 4, 1), (2, 3, 0, 5), (0, 3, 4, 5), (1, 3, 4, 0)])
def test_without_a_counted_query_all_metrics_are_nan(shape):
    rows = torch.ones(shape)
    read = AttentionSums.of(rows, logits=rows if rows.numel() == 0 else None).rows()
    assert read.queries == 0
    for name in ("entropy", "samples", "sample_share", "sink", "product", "overlap", "alike", "logit", "overlap_mean"):
        assert getattr(read, name).isnan().all(), name
    assert read.sink_position.tolist() == [-1] * 3


def test_a_query_counts_for_all_heads_or_for_none():
    rows, visible, _ = attention(1, 2, 5, 6)
    for_one = visible.repeat(1, 2, 1, 1)
    for_one[0, 1, 3] = False  # the second head sees nothing there
    without = visible.clone()
    without[:, :, 3] = False
    read, expected = (AttentionSums.of(rows, mask).rows() for mask in (for_one, without))
    for item in fields(type(read)):
        assert torch.equal(getattr(read, item.name).nan_to_num(), getattr(expected, item.name).nan_to_num()), item.name


def test_a_query_without_visible_keys_may_hold_nan():
    rows, visible, logits = attention(2, 3, 5, 6)
    clean = AttentionSums.of(rows, visible, logits=logits)
    hidden = ~visible.expand(rows.shape)
    spoiled = AttentionSums.of(
        rows.masked_fill(hidden, torch.nan), visible, logits=logits.masked_fill(hidden, torch.nan)
    )
    for item in fields(AttentionSums):
        assert torch.equal(getattr(clean, item.name), getattr(spoiled, item.name))


def test_a_head_that_is_not_finite_is_not_hidden_by_the_others():
    rows, visible, logits = attention(2, 3, 5, 6)
    rows[:, 1], logits[:, 1] = torch.nan, torch.nan
    read = AttentionSums.of(rows, visible, logits=logits).rows()
    for values in (read.entropy[1], read.overlap_mean, read.alike_mean, read.alike_worst, read.logit[1]):
        assert values.isnan()
    assert read.entropy[[0, 2]].isfinite().all()


def test_rows_with_a_learned_sink_are_not_normalised():
    rows = torch.full((2, 3, 4), 0.125)
    rows[1] = 0
    read = AttentionSums.of(rows).rows()
    assert float(read.entropy[0]) == pytest.approx(0.5 * math.log(8) / math.log(4))
    assert float(read.samples[0]) == pytest.approx(4)
    assert float(read.samples[1]) == 0
    assert read.overlap_mean.isnan()  # there is one head that attends at all


def test_the_covariance_of_the_noise_is_the_overlap_times_the_circuits_by_monte_carlo():
    H, q, n, d = 3, 4, 6, 5
    rows = torch.softmax(gaussian(H, q, n), -1)
    value, output = gaussian(H, 2, d, seed=1), gaussian(H, 2, d, seed=2)
    value[1] = value[0] + 0.3 * value[1]
    output[1] = output[0] + 0.3 * output[1]
    expected = noise_covariance(AttentionSums.of(rows).rows().product, ov_circuits(value, output), noise=0.49)
    draws = 40_000
    noise = 0.7 * gaussian(draws, n, d, seed=3)
    contributions = torch.einsum("hqn,rnd,hvd,hve->rhqe", rows, noise, value, output)
    samples = torch.einsum("rhqe,rgqe->rhg", contributions, contributions) / q
    error = samples.std(0) / draws**0.5
    assert ((samples.mean(0) - expected).abs() < 4 * error).all()
    assert float(expected[0, 1]) > 10 * float(error[0, 1])


def test_norms_are_those_of_numpy_and_add_up():
    features = gaussian(2, 3, 7, 4) + 1
    valid = torch.rand(2, 1, 7, generator=torch.Generator().manual_seed(0)) < 0.6
    whole = NormSums.of(features, valid)
    merged = NormSums.of(features[:1], valid[:1]) + NormSums.of(features[1:], valid[1:])
    for item in fields(NormSums):
        assert torch.allclose(getattr(whole, item.name), getattr(merged, item.name), rtol=1e-12)
    for head in range(3):
        norms = np.linalg.norm(features[:, head].numpy(), axis=-1)[valid[:, 0].numpy()]
        assert float(whole.mean[head]) == pytest.approx(norms.mean())
        assert float(whole.spread[head]) == pytest.approx(norms.std() / norms.mean())
        assert float(whole.largest[head]) == pytest.approx(norms.max())


def test_a_spread_far_below_the_mean_is_resolved_in_float32_features():
    norms = 1000 * (1 + 1e-4 * gaussian(200)).float()
    spread = NormSums.of(norms[None, :, None]).spread
    assert float(spread) == pytest.approx(np.std(norms.double().numpy()) / np.mean(norms.double().numpy()), rel=1e-6)


@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 10**6), st.floats(-2, 2))
@SEARCH
def test_the_bound_holds_for_all_queries_and_is_attained_by_parallel_ones(G, m, seed, scale):
    query, key = gaussian(2, G * m, 5, 4, seed=seed), gaussian(2, G, 6, 4, seed=seed + 1)
    bias = gaussian(G * m, seed=seed + 2)
    bound = logit_bound(NormSums.of(query), NormSums.of(key), scale, bias=bias)
    scores = scale * query @ key.repeat_interleave(m, 1).mT + bias[:, None, None]
    assert (scores.amax((0, 2, 3)) <= bound + 1e-12).all()
    parallel = logit_bound(NormSums.of(key), NormSums.of(key), 1.0)
    assert torch.allclose(parallel, (key @ key.mT).amax((0, 2, 3)))


def test_the_logit_bound_maps_key_heads_and_is_nan_without_keys():
    query, key = NormSums.of(torch.ones(4, 3, 1)), NormSums.of(torch.tensor([[[1.0]], [[5.0]]]))
    assert logit_bound(query, key, 1.0).tolist() == [1, 1, 5, 5]
    assert logit_bound(query, key, 1.0, key_head=torch.tensor([0, 1, 0, 1])).tolist() == [1, 5, 1, 5]
    assert logit_bound(query, NormSums.of(torch.ones(2, 0, 1)), 1.0).isnan().all()
    with pytest.raises(ShapeError, match="give `key_head`"):
        logit_bound(NormSums.of(torch.ones(3, 3, 1)), key, 1.0)


def test_shapes_that_do_not_belong_together_are_refused():
    rows = torch.ones(2, 3, 4)
    with pytest.raises(ShapeError, match="heads, queries, keys"):
        AttentionSums.of(rows[0])
    with pytest.raises(ShapeError, match="Logits have the shape"):
        AttentionSums.of(rows, logits=rows[:1])
    with pytest.raises(ShapeError, match="must broadcast"):
        AttentionSums.of(rows, torch.ones(2, 3, 5, dtype=torch.bool))
    with pytest.raises(ShapeError, match="heads, tokens, width"):
        NormSums.of(rows[0])
