"""The cosines of circuits against the plain products, and what may change without changing them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hdi_callback.core import circuits, head_diversity, ov_circuits, qk_circuits
from hdi_callback.core.circuits import ov_circuits_and_products, qk_circuits_from_products
from hdi_callback.core.diversity import blocks_and_products
from hdi_callback.core.pairs import clusters
from hdi_callback.core.penalties import circuit_penalty
from hdi_callback.errors import MisconfigurationError, ShapeError
from tests.core.search import SEARCH
from tests.core.tensor_sizes import TensorSizes
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


def plain_cosines(own: Tensor, grouped: Tensor, group: list[int], own_metric=None, grouped_metric=None) -> np.ndarray:
    """Form every d x d product, in the metric of the two covariances, and compare them as vectors."""
    own, grouped = own.double(), grouped.double()
    if own_metric is not None:
        own = own @ torch.linalg.cholesky(own_metric)
    if grouped_metric is not None:
        grouped = grouped @ torch.linalg.cholesky(grouped_metric)
    products = torch.stack([(head.mT @ grouped[g]).flatten() for head, g in zip(own, group)]).numpy()
    norm = np.linalg.norm(products, axis=1)
    return products @ products.T / np.outer(norm, norm)


def covariance(d: int, seed: int) -> Tensor:
    root = gaussian(d, d, seed=seed)
    return root @ root.mT / d + 0.1 * torch.eye(d, dtype=torch.float64)


def side_by_side(H: int, G: int) -> list[int]:
    return [head // (H // G) for head in range(H)]


@given(SHAPES)
@SEARCH
def test_cosines_agree_with_plain_products_for_any_grouping_and_widths(shape):
    G, m, k, d, d_keys, seed = shape
    query, key = gaussian(G * m, k, d, seed=seed), gaussian(G, k, d_keys, seed=seed + 1)
    expected = plain_cosines(query, key, side_by_side(G * m, G))
    similarity = qk_circuits(query, key)
    assert np.abs(similarity.cosine.numpy() - expected).max() < 1e-9
    assert np.abs(ov_circuits(key, query).cosine.numpy() - expected).max() < 1e-9
    plain = torch.stack([query[h].mT @ key[g] for h, g in enumerate(side_by_side(G * m, G))])
    assert torch.allclose(similarity.norm, torch.linalg.matrix_norm(plain))


@given(SHAPES)
@SEARCH
def test_covariances_weight_both_sides_of_a_circuit_by_their_inputs(shape):
    G, m, k, d, d_keys, seed = shape
    query, key = gaussian(G * m, k, d, seed=seed), gaussian(G, k, d_keys, seed=seed + 1)
    of_queries, of_keys = covariance(d, seed + 2), covariance(d_keys, seed + 3)
    group = side_by_side(G * m, G)
    both = qk_circuits(query, key, query_covariance=of_queries, key_covariance=of_keys)
    assert np.abs(both.cosine.numpy() - plain_cosines(query, key, group, of_queries, of_keys)).max() < 1e-8
    products = torch.stack([query[h].mT @ key[g] for h, g in enumerate(group)])
    weighed = of_queries @ products @ of_keys
    assert torch.allclose(both.norm, (weighed * products).sum((-2, -1)).sqrt())
    values = ov_circuits(key, query, value_covariance=of_keys)
    assert np.abs(values.cosine.numpy() - plain_cosines(query, key, group, None, of_keys)).max() < 1e-8


def test_a_covariance_of_few_tokens_compares_the_scores_of_the_heads_on_them():
    tokens = gaussian(5, 24, seed=9)
    query, key, S = gaussian(4, 6, 24), gaussian(4, 6, 24, seed=1), tokens.mT @ tokens / 5
    scores = torch.stack([(tokens @ q.mT @ k @ tokens.mT).flatten() for q, k in zip(query, key)])
    expected = torch.nn.functional.cosine_similarity(scores[:, None], scores[None], dim=-1)
    similarity = qk_circuits(query, key, query_covariance=S, key_covariance=S)
    assert torch.allclose(similarity.cosine, expected, atol=1e-5)  # the rank cut at 1e-6 of the weakest direction


@given(SHAPES, st.floats(0, 3))
@SEARCH
def test_cosines_are_invariant_under_changes_that_preserve_attention_scores(shape, log_condition):
    G, m, k, d, d_keys, seed = shape
    query, key = gaussian(G * m, k, d, seed=seed), gaussian(G, k, d_keys, seed=seed + 1)
    A = with_spectrum(log_spectrum(10**log_condition, k), G, k, seed=seed + 2)
    changed = torch.linalg.inv(A).mT.repeat_interleave(m, 0) @ query
    before, after = qk_circuits(query, key), qk_circuits(changed, A @ key)
    assert torch.allclose(before.cosine, after.cosine, atol=1e-9)
    assert torch.allclose(before.norm, after.norm)


@pytest.mark.parametrize("condition", [1e2, 1e4])
def test_cosines_are_precise_in_float32_if_queries_and_keys_share_their_scale_unevenly(condition):
    query, key = gaussian(6, 16, 96), gaussian(6, 16, 96, seed=1)
    A = with_spectrum(log_spectrum(condition, 16), 6, 16, seed=2)
    query, key = (torch.linalg.inv(A).mT @ query).float(), (A @ key).float()
    expected = plain_cosines(query, key, list(range(6)))
    assert np.abs(qk_circuits(query, key).cosine.double().numpy() - expected).max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_of_full_size_is_read_to_1e_6(dtype):
    query, key = gaussian(12, 64, 768).to(dtype), gaussian(4, 64, 768, seed=1).to(dtype)
    query[7] = query[6]
    expected = plain_cosines(query, key, side_by_side(12, 4))
    similarity = qk_circuits(query, key)
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
    for similarity in (qk_circuits(query, key), ov_circuits(key, query)):
        for row in range(3):
            expected = plain_cosines(query[row], key[row], side_by_side(G * m, G))
            assert np.abs(similarity.cosine[row].double().numpy() - expected).max() < 2e-6
    plain = torch.stack([query[0, h].double().mT @ key[0, g].double() for h, g in enumerate(side_by_side(G * m, G))])
    assert torch.allclose(similarity.norm[0].double(), torch.linalg.matrix_norm(plain), rtol=1e-5)


def test_only_layers_with_cancellation_are_whitened(monkeypatch):
    whitened = []
    way = circuits._whitened
    monkeypatch.setattr(circuits, "_whitened", lambda own, *rest: whitened.append(own) or way(own, *rest))
    query, key = gaussian(3, 6, 16, 96), gaussian(3, 6, 16, 96, seed=1)
    A = with_spectrum(log_spectrum(1e3, 16), 6, 16, seed=2)
    query[1], key[1] = torch.linalg.inv(A).mT @ query[1], A @ key[1]
    qk_circuits(query.float(), key.float())
    assert [torch.equal(one, query[1:2].float()) for one in whitened] == [True]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30, 0.0])
def test_a_layer_that_float32_cannot_square_affects_no_other(bad):
    query, key = gaussian(3, 4, 4, 12).float(), gaussian(3, 4, 4, 12, seed=1).float()
    clean = qk_circuits(query, key)
    key[1] *= bad
    similarity = qk_circuits(query, key)
    assert torch.equal(similarity.cosine[[0, 2]], clean.cosine[[0, 2]])
    assert similarity.norm[[0, 2]].isfinite().all()
    if bad == 1e30:
        assert torch.allclose(similarity.cosine[1], clean.cosine[1], atol=1e-6)
    else:
        assert bool(similarity.dead[1].all() if bad == 0 else similarity.cosine[1].isnan().all())


def test_temperature_changes_nothing_and_a_sign_turns_the_cosine():
    query, key = gaussian(3, 4, 12), gaussian(3, 4, 12, seed=1)
    before = qk_circuits(query, key).cosine
    scaled = qk_circuits(query * torch.tensor([0.01, 1, 50], dtype=torch.float64)[:, None, None], key).cosine
    assert torch.allclose(before, scaled, atol=1e-12)
    turned = qk_circuits(query * torch.tensor([-1, 1, 1], dtype=torch.float64)[:, None, None], key).cosine
    assert torch.allclose(turned[0, 1:], -before[0, 1:], atol=1e-12)


def test_independent_heads_have_mean_cosine_zero():
    cosines = [qk_circuits(gaussian(4, 8, 64, seed=s), gaussian(4, 8, 64, seed=s + 100)).mean for s in range(40)]
    assert abs(float(torch.stack(cosines).mean())) < 4 * float(torch.stack(cosines).std()) / 40**0.5


def test_query_heads_that_merge_on_one_key_head_are_detected():
    query, key = gaussian(8, 16, 64), gaussian(1, 16, 64, seed=1)
    apart = qk_circuits(query, key)
    query[1:] = query[:1] * torch.linspace(0.5, 2, 7, dtype=torch.float64)[:, None, None]
    merged = qk_circuits(query, key)
    assert float(apart.mean.abs()) < 0.1
    assert float(merged.mean) == pytest.approx(1)
    assert merged.cluster.tolist() == [0] * 8
    assert float(merged.distinct) == 1


def test_merged_heads_are_detected_if_key_subspaces_fill_the_space():
    query, key = gaussian(4, 16, 12), gaussian(4, 16, 12, seed=1)
    A = gaussian(16, 16, seed=2)
    query[3], key[3] = torch.linalg.inv(A).mT @ query[1], A @ key[1]
    assert head_diversity(key).index == pytest.approx(0, abs=1e-9)  # every key subspace is the whole space
    similarity = qk_circuits(query, key)
    assert similarity.worst_pair.tolist() == [1, 3]
    assert float(similarity.worst) == pytest.approx(1)
    assert similarity.cluster.tolist() == [0, 1, 2, 1]
    assert similarity.nearest[1] == 3
    assert float(similarity.nearest_cosine[3]) == pytest.approx(1)


def test_clusters_follow_chains_of_similar_heads():
    plane = torch.tensor([0.0, 0.4, 0.8, 1.2, 3.0], dtype=torch.float64)
    query = torch.stack([plane.cos(), plane.sin()], -1)[:, None]  # lines in a plane, one key for all
    similarity = qk_circuits(query, torch.ones(1, 1, 1, dtype=torch.float64), limit=0.9)
    assert float(similarity.cosine[0, 3]) < 0.9
    assert similarity.cluster.tolist() == [0, 0, 0, 0, 4]
    assert float(similarity.distinct) == 2


def test_a_map_from_heads_to_key_heads_may_be_given():
    query, key = gaussian(6, 4, 12), gaussian(2, 4, 12, seed=1)
    tiled = torch.tensor([0, 1, 0, 1, 0, 1])
    expected = plain_cosines(query, key, tiled.tolist())
    assert np.abs(qk_circuits(query, key, key_head=tiled).cosine.numpy() - expected).max() < 1e-9
    assert np.abs(ov_circuits(key, query, key_head=tiled).cosine.numpy() - expected).max() < 1e-9


def test_a_dead_circuit_is_left_out():
    query, key = gaussian(4, 4, 12), gaussian(4, 4, 12, seed=1)
    query[1] = 0
    key[2] *= 1e-9
    similarity = qk_circuits(query, key)
    assert similarity.dead.tolist() == [False, True, True, False]
    assert similarity.worst_pair.tolist() == [0, 3]
    assert not similarity.cosine[1].any()
    assert float(similarity.mean) == pytest.approx(float(similarity.cosine[0, 3]))
    assert float(similarity.distinct) == 2


def test_a_circuit_whose_projections_never_meet_is_dead():
    query, key = gaussian(3, 4, 12), gaussian(3, 4, 12, seed=1)
    query[0, 2:], key[0, :2] = 0, 0  # queries in features where keys are zero
    assert qk_circuits(query, key).dead.tolist() == [True, False, False]


@pytest.mark.parametrize("H", [1, 2])
def test_fewer_than_two_live_heads_have_no_mean(H):
    query = gaussian(H, 4, 12)
    query[1:] = 0
    similarity = qk_circuits(query, gaussian(H, 4, 12, seed=1))
    assert similarity.mean.isnan()
    assert similarity.worst.isnan()
    assert similarity.worst_pair.tolist() == [-1, -1]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("side", ["query", "key"])
def test_a_non_finite_weight_affects_only_its_own_layer(bad, side):
    weights = {"query": gaussian(3, 4, 4, 12), "key": gaussian(3, 2, 4, 12, seed=1)}
    clean = qk_circuits(**weights)
    weights[side][1, 0, 0, 0] = bad
    similarity = qk_circuits(**weights)
    for values in (similarity.cosine, similarity.mean, similarity.worst, similarity.norm):
        assert values[1].isnan().all()
    assert torch.equal(similarity.cosine[[0, 2]], clean.cosine[[0, 2]])


def test_a_batch_is_its_layers_one_by_one_and_chunks_change_nothing():
    query, key = gaussian(2, 3, 6, 4, 12), gaussian(2, 3, 2, 4, 12, seed=1)
    whole = qk_circuits(query, key)
    for place in np.ndindex(2, 3):
        assert torch.allclose(whole.cosine[place], qk_circuits(query[place], key[place]).cosine, atol=1e-12)
    for budget in (1, 20_000, 60_000):
        assert torch.allclose(whole.cosine, qk_circuits(query, key, memory_budget=budget).cosine, atol=1e-12)


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e30])
def test_the_scale_of_a_layer_changes_nothing(scale):
    query, key = gaussian(4, 4, 12).float(), gaussian(4, 4, 12, seed=1).float()
    assert torch.allclose(qk_circuits(query, key).cosine, qk_circuits(query * scale, key).cosine, atol=1e-6)


def test_no_product_of_the_size_of_the_model_is_formed():
    query, key = torch.randn(4, 8, 512), torch.randn(4, 8, 512)
    with TensorSizes() as sizes:
        qk_circuits(query, key)
    assert sizes.largest <= query.numel()


@pytest.mark.parametrize(
    ("query", "key"),
    [((4, 8, 16), (3, 8, 16)), ((4, 8, 16), (4, 6, 16)), ((8, 16), (8, 16)), ((2, 4, 8, 16), (3, 4, 8, 16))],
)
def test_shapes_that_do_not_belong_together_are_refused(query, key):
    with pytest.raises(ShapeError, match="the groups dividing the heads"):
        qk_circuits(torch.zeros(query), torch.zeros(key))


def test_wrong_arguments_are_refused():
    weight = gaussian(4, 4, 12)
    with pytest.raises(MisconfigurationError, match=r"Write limit=0\.9"):
        qk_circuits(weight, weight, limit=1.5)
    with pytest.raises(MisconfigurationError, match="Write rank_tol=1e-6"):
        ov_circuits(weight, weight, rank_tol=0)
    with pytest.raises(ShapeError, match="one entry for each of the 4 heads"):
        qk_circuits(weight, weight, key_head=torch.tensor([0, 1]))


@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_the_circuit_penalty_is_the_mean_squared_cosine_of_the_products_written_out(key_heads):
    query, key = gaussian(4, 3, 10, seed=1), gaussian(key_heads, 3, 12, seed=2)
    products = (query.mT @ key.repeat_interleave(4 // key_heads, 0)).flatten(1).numpy()
    cosines = np.corrcoef(products) * 0  # of the products as they are, not about their means
    for h in range(4):
        for g in range(4):
            one, other = products[h], products[g]
            cosines[h, g] = one @ other / (np.linalg.norm(one) * np.linalg.norm(other))
    expected = (np.square(cosines).sum() - 4) / 12
    assert float(circuit_penalty(query, key)) == pytest.approx(expected, rel=1e-5)
    assert float(circuit_penalty(query * 1e-9, key * 1e7)) == pytest.approx(expected, rel=1e-4)


def test_the_circuit_penalty_of_two_heads_is_the_squared_cosine_of_their_one_pair():
    query, key = gaussian(2, 3, 10, seed=1), gaussian(2, 3, 12, seed=2)
    one, other = (query.mT @ key).flatten(1).numpy()
    cosine = one @ other / (np.linalg.norm(one) * np.linalg.norm(other))
    assert float(circuit_penalty(query, key)) == pytest.approx(cosine**2, rel=1e-5)


def test_an_isolated_head_is_its_own_cluster():
    matrix = torch.eye(5, dtype=torch.float64)
    matrix[1, 3] = matrix[3, 1] = matrix[3, 4] = matrix[4, 3] = 0.9
    pairs = ~torch.eye(5, dtype=torch.bool)
    assert clusters(matrix, pairs, 0.9).tolist() == [0, 1, 2, 1, 1]
    assert clusters(matrix, pairs, 0.91).tolist() == [0, 1, 2, 3, 4]
    assert clusters(matrix, pairs & False, 0.0).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("condition", [1, 1e2, 1e4])
def test_key_products_reused_from_the_index_give_the_same_cosines(condition, monkeypatch):
    query, key = gaussian(7, 16, 96).float(), with_spectrum(log_spectrum(condition, 16), 7, 96).float()
    key *= torch.logspace(-1, 1, 7)[:, None, None]
    blocks, products = blocks_and_products(key[None])
    assert torch.equal(blocks.diversity().energy_overlap[0], head_diversity(key).energy_overlap)
    formed = []
    of = circuits.products_of
    monkeypatch.setattr(circuits, "products_of", lambda flat, *rest: formed.append(flat) or of(flat, *rest))
    found = qk_circuits_from_products(query[None], key[None], products).similarity()
    assert found.cosine[0].numpy() == pytest.approx(plain_cosines(query, key, list(range(7))), abs=1e-6)
    norm = torch.linalg.matrix_norm(query.double().mT @ key.double()).numpy()
    assert found.norm[0].numpy() == pytest.approx(norm, rel=1e-5)
    assert len(formed) == 1
    assert torch.equal(formed[0], query.flatten(0, 1))


def test_key_products_of_grouped_heads_give_the_cosines_of_their_query_heads():
    query, key = gaussian(6, 4, 24).float(), gaussian(3, 4, 24).float()
    _, products = blocks_and_products(key[None])
    found = qk_circuits_from_products(query[None], key[None], products).similarity()
    assert found.cosine[0].numpy() == pytest.approx(plain_cosines(query, key, [0, 0, 1, 1, 2, 2]), abs=1e-6)


@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf")])
def test_a_head_without_numbers_leaves_no_products(bad):
    key = gaussian(4, 4, 24).float()
    key[1] *= bad
    assert blocks_and_products(key[None])[1] is None


def test_output_products_reused_from_circuits_are_the_plain_products():
    value, output = gaussian(5, 8, 40, seed=1).float(), gaussian(5, 8, 48, seed=2).float()
    inner, products = ov_circuits_and_products(value[None], output[None])
    assert inner.similarity().cosine[0].numpy() == pytest.approx(plain_cosines(output, value, list(range(5))), abs=1e-6)
    plain = torch.einsum("hid,gjd->higj", output.double(), output.double())
    assert [part.start for part, _ in products.parts] == [0, 2, 4]
    for part, product in products.parts:
        assert product.numpy() == pytest.approx(plain[part, :, part.start :].numpy(), abs=1e-4)
