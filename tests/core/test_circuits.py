"""The cosines of circuits against the plain products, and what may change without changing them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hdi_callback.core import circuit_similarity, head_diversity
from hdi_callback.core.circuits import circuit_norms
from hdi_callback.core.whitening import whiten_layers
from tests.core.search import SEARCH
from tests.core.test_subspaces import gaussian, log_spectrum, with_spectrum

# groups, heads in a group, width, input of the queries, input of the keys, seed
SHAPES = st.tuples(
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(1, 12),
    st.integers(1, 12),
    st.integers(0, 10**6),
)


def plain_cosines(query: torch.Tensor, key: torch.Tensor, group: list[int]) -> np.ndarray:
    """Cosines of the products W_Q^T W_K written out."""
    plain = torch.stack([query[h].double().mT @ key[g].double() for h, g in enumerate(group)]).flatten(1)
    plain = plain / plain.norm(dim=1, keepdim=True)
    return (plain @ plain.mT).numpy()


def mean(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Mean cosine of two different heads."""
    cosine = circuit_similarity(query, key).cosine
    return cosine[~torch.eye(len(cosine), dtype=torch.bool)].mean()


def side_by_side(H: int, G: int) -> list[int]:
    return [head // (H // G) for head in range(H)]


@given(SHAPES)
@SEARCH
def test_cosines_agree_with_plain_products_for_any_grouping_and_widths(shape):
    G, m, k, d, d_keys, seed = shape
    query, key = gaussian(G * m, k, d, seed=seed), gaussian(G, k, d_keys, seed=seed + 1)
    expected = plain_cosines(query, key, side_by_side(G * m, G))
    similarity = circuit_similarity(query, key)
    assert np.abs(similarity.cosine.numpy() - expected).max() < 1e-9
    plain = torch.stack([query[h].mT @ key[g] for h, g in enumerate(side_by_side(G * m, G))])
    assert torch.allclose(similarity.norm, torch.linalg.matrix_norm(plain))
    assert torch.allclose(circuit_norms(query[None], whiten_layers(key[None]))[0], torch.linalg.matrix_norm(plain))


@given(SHAPES, st.floats(0, 3))
@SEARCH
def test_cosines_are_invariant_under_changes_that_preserve_attention_scores(shape, log_condition):
    G, m, k, d, d_keys, seed = shape
    query, key = gaussian(G * m, k, d, seed=seed), gaussian(G, k, d_keys, seed=seed + 1)
    A = with_spectrum(log_spectrum(10**log_condition, k), G, k, seed=seed + 2)
    changed = torch.linalg.inv(A).mT.repeat_interleave(m, 0) @ query
    before, after = circuit_similarity(query, key), circuit_similarity(changed, A @ key)
    assert torch.allclose(before.cosine, after.cosine, atol=1e-9)
    assert torch.allclose(before.norm, after.norm)


@pytest.mark.parametrize("condition", [1e2, 1e4])
def test_cosines_are_precise_in_float32_if_queries_and_keys_share_their_scale_unevenly(condition):
    query, key = gaussian(6, 16, 96), gaussian(6, 16, 96, seed=1)
    A = with_spectrum(log_spectrum(condition, 16), 6, 16, seed=2)
    query, key = (torch.linalg.inv(A).mT @ query).float(), (A @ key).float()
    expected = plain_cosines(query, key, list(range(6)))
    assert np.abs(circuit_similarity(query, key).cosine.double().numpy() - expected).max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_of_full_size_is_read_to_1e_6(dtype):
    query, key = gaussian(12, 64, 768).to(dtype), gaussian(4, 64, 768, seed=1).to(dtype)
    query[7] = query[6]
    expected = plain_cosines(query, key, side_by_side(12, 4))
    similarity = circuit_similarity(query, key)
    assert np.abs(similarity.cosine.double().numpy() - expected).max() < 1e-6
    assert similarity.worst_pair.tolist() == [6, 7]


@given(SHAPES, st.floats(0, 4))
@SEARCH
def test_in_float32_every_layer_of_a_batch_is_exact_however_uneven_its_scale(shape, log_condition):
    G, m, k, d, d_keys, seed = shape
    query, key = gaussian(3, G * m, k, d, seed=seed), gaussian(3, G, k, d_keys, seed=seed + 1)
    A = with_spectrum(log_spectrum(10**log_condition, k), G, k, seed=seed + 2)
    query[1] = torch.linalg.inv(A).mT.repeat_interleave(m, 0) @ query[1]  # the others are as they come
    key[1] = A @ key[1]
    query, key = query.float(), key.float()
    similarity = circuit_similarity(query, key)
    for row in range(3):
        expected = plain_cosines(query[row], key[row], side_by_side(G * m, G))
        assert np.abs(similarity.cosine[row].double().numpy() - expected).max() < 2e-6
    plain = torch.stack([query[0, h].double().mT @ key[0, g].double() for h, g in enumerate(side_by_side(G * m, G))])
    assert torch.allclose(similarity.norm[0].double(), torch.linalg.matrix_norm(plain), rtol=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30, 0.0])
def test_a_layer_that_float32_cannot_square_affects_no_other(bad):
    query, key = gaussian(3, 4, 4, 12).float(), gaussian(3, 4, 4, 12, seed=1).float()
    clean = circuit_similarity(query, key)
    key[1] *= bad
    similarity = circuit_similarity(query, key)
    # Where one layer needs float64, all of its batch are computed in it.
    assert torch.allclose(similarity.cosine[[0, 2]], clean.cosine[[0, 2]], rtol=0, atol=1e-7)
    assert similarity.norm[[0, 2]].isfinite().all()
    if bad == 1e30:
        assert torch.allclose(similarity.cosine[1], clean.cosine[1], atol=1e-6)
    else:
        assert bool((similarity.cosine[1] == 0).all() if bad == 0 else similarity.cosine[1].isnan().all())


def test_temperature_changes_nothing_and_a_sign_turns_the_cosine():
    query, key = gaussian(3, 4, 12), gaussian(3, 4, 12, seed=1)
    before = circuit_similarity(query, key).cosine
    scaled = circuit_similarity(query * torch.tensor([0.01, 1, 50], dtype=torch.float64)[:, None, None], key).cosine
    assert torch.allclose(before, scaled, atol=1e-12)
    turned = circuit_similarity(query * torch.tensor([-1, 1, 1], dtype=torch.float64)[:, None, None], key).cosine
    assert torch.allclose(turned[0, 1:], -before[0, 1:], atol=1e-12)


def test_independent_heads_have_mean_cosine_zero():
    cosines = [mean(gaussian(4, 8, 64, seed=s), gaussian(4, 8, 64, seed=s + 100)) for s in range(40)]
    assert abs(float(torch.stack(cosines).mean())) < 4 * float(torch.stack(cosines).std()) / 40**0.5


def test_query_heads_that_merge_on_one_key_head_are_detected():
    query, key = gaussian(8, 16, 64), gaussian(1, 16, 64, seed=1)
    assert float(mean(query, key).abs()) < 0.1
    query[1:] = query[:1] * torch.linspace(0.5, 2, 7, dtype=torch.float64)[:, None, None]
    assert float(mean(query, key)) == pytest.approx(1)


def test_merged_heads_are_detected_if_key_subspaces_fill_the_space():
    query, key = gaussian(4, 16, 12), gaussian(4, 16, 12, seed=1)
    A = gaussian(16, 16, seed=2)
    query[3], key[3] = torch.linalg.inv(A).mT @ query[1], A @ key[1]
    assert head_diversity(key).subspace.index == pytest.approx(0, abs=1e-9)  # every key subspace is the whole space
    similarity = circuit_similarity(query, key)
    assert similarity.worst_pair.tolist() == [1, 3]
    assert float(similarity.worst) == pytest.approx(1)
    assert float(similarity.cosine[1, 3]) == pytest.approx(1)


def test_a_map_from_heads_to_key_heads_may_be_given():
    query, key = gaussian(6, 4, 12), gaussian(2, 4, 12, seed=1)
    tiled = torch.tensor([0, 1, 0, 1, 0, 1])
    expected = plain_cosines(query, key, tiled.tolist())
    assert np.abs(circuit_similarity(query, key, tiled.tolist()).cosine.numpy() - expected).max() < 1e-9


def test_a_dead_circuit_is_left_out():
    query, key = gaussian(4, 4, 12), gaussian(4, 4, 12, seed=1)
    query[1] = 0
    key[2] *= 1e-9
    similarity = circuit_similarity(query, key)
    assert similarity.cosine.diagonal().tolist() == [1, 0, 0, 1]
    assert not similarity.cosine[1].any()
    assert similarity.worst_pair.tolist() == [0, 3]


def test_a_circuit_whose_projections_never_meet_is_dead():
    query, key = gaussian(3, 4, 12), gaussian(3, 4, 12, seed=1)
    query[0, 2:], key[0, :2] = 0, 0  # queries in features where keys are zero
    assert circuit_similarity(query, key).cosine.diagonal().tolist() == [0, 1, 1]


@pytest.mark.parametrize("H", [1, 2])
def test_fewer_than_two_live_heads_have_no_worst_pair(H):
    query = gaussian(H, 4, 12)
    query[1:] = 0
    similarity = circuit_similarity(query, gaussian(H, 4, 12, seed=1))
    assert similarity.worst.isnan()
    assert similarity.worst_pair.tolist() == [-1, -1]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("side", ["query", "key"])
def test_a_non_finite_weight_affects_only_its_own_layer(bad, side):
    weights = {"query": gaussian(3, 4, 4, 12), "key": gaussian(3, 2, 4, 12, seed=1)}
    clean = circuit_similarity(*weights.values())
    weights[side][1, 0, 0, 0] = bad
    similarity = circuit_similarity(*weights.values())
    for values in (similarity.cosine, similarity.worst, similarity.norm):
        assert values[1].isnan().all()
    # Where one layer needs float64, all of its batch are computed in it.
    assert torch.allclose(similarity.cosine[[0, 2]], clean.cosine[[0, 2]], rtol=0, atol=1e-7)


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e30])
def test_the_scale_of_a_layer_changes_nothing(scale):
    query, key = gaussian(4, 4, 12).float(), gaussian(4, 4, 12, seed=1).float()
    assert torch.allclose(
        circuit_similarity(query, key).cosine, circuit_similarity(query * scale, key).cosine, atol=1e-6
    )
