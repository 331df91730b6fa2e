"""The Head Diversity Index: every identity and bound that is claimed of it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st

from hdi_callback.core import (
    head_diversity,
)
from tests.core.search import SEARCH
from tests.core.test_subspaces import CASES, gaussian, scipy_overlap

shapes = st.tuples(st.integers(2, 6), st.integers(1, 6), st.integers(1, 20), st.integers(0, 10**6))


def off_diagonal(matrix: torch.Tensor) -> torch.Tensor:
    return matrix[~torch.eye(matrix.shape[-1], dtype=torch.bool)]


def orthogonal_heads(H: int, k: int, d: int) -> torch.Tensor:
    return torch.linalg.qr(gaussian(d, H * k)).Q.mT.reshape(H, k, d)


# --- what the numbers are


@pytest.mark.parametrize("case", [name for name in CASES if name != "one head"])
def test_the_index_is_one_minus_the_mean_overlap_of_scipy(case):
    overlap = scipy_overlap(CASES[case])
    live = overlap.diagonal() > 0
    overlap = overlap[np.ix_(live, live)]
    H = len(overlap)
    expected = 1 - overlap[np.triu_indices(H, 1)].mean()
    diversity = head_diversity(CASES[case])
    assert float(diversity.subspace.index) == pytest.approx(expected, abs=1e-9)
    assert float(diversity.subspace.effective_heads) == pytest.approx(H / (1 + (H - 1) * (1 - expected)), abs=1e-7)


def test_orthogonal_heads_have_index_one_and_aligned_heads_zero():
    apart, alike = orthogonal_heads(4, 8, 32), gaussian(1, 8, 32).expand(4, 8, 32)
    assert float(head_diversity(apart).subspace.index) == pytest.approx(1)
    assert float(head_diversity(apart).subspace.effective_heads) == pytest.approx(4)
    assert float(head_diversity(alike).subspace.index) == pytest.approx(0, abs=1e-12)
    assert float(head_diversity(alike).subspace.effective_heads) == pytest.approx(1)


def test_alignment_is_one_for_identical_heads_zero_at_chance_and_negative_beyond():
    assert float(head_diversity(gaussian(1, 8, 32).expand(4, 8, 32)).subspace.alignment) == pytest.approx(1)
    assert float(head_diversity(orthogonal_heads(4, 8, 32)).subspace.alignment) == pytest.approx(
        -(8 / 32) / (1 - 8 / 32)
    )
    random = [float(head_diversity(gaussian(8, 8, 64, seed=seed)).subspace.alignment) for seed in range(30)]
    assert abs(np.mean(random)) < 4 * np.std(random) / math.sqrt(30)


def test_effective_heads_are_the_inverse_variance_factor_and_the_sum_of_the_overlaps():
    diversity = head_diversity(gaussian(6, 8, 40))
    factor = 1 / 6 + (1 - 1 / 6) * (1 - float(diversity.subspace.index))
    assert float(diversity.subspace.effective_heads) == pytest.approx(1 / factor)
    assert float(diversity.subspace.effective_heads) == pytest.approx(36 / float(diversity.subspace.overlap.sum()))


def test_the_worst_pair_is_found():
    weight = gaussian(6, 8, 64)
    weight[4] = gaussian(8, 8, seed=1) @ weight[1] + 0.05 * gaussian(8, 64, seed=2)
    diversity = head_diversity(weight)
    overlap = scipy_overlap(weight) - 2 * np.eye(6)
    assert diversity.subspace.worst_pair.tolist() == [1, 4]
    assert float(diversity.subspace.worst) == pytest.approx(overlap.max())


def test_the_worst_alignment_has_its_own_pair_if_wide_heads_overlap_more_by_chance():
    weight = torch.zeros(4, 14, 24, dtype=torch.float64)
    weight[:2] = gaussian(2, 14, 24)
    weight[2, 0, 0], weight[3, 0, 0], weight[3, 0, 1] = 1, 0.6, 0.8  # two lines with cosine 0.6
    diversity = head_diversity(weight)
    assert diversity.subspace.worst_pair.tolist() == [0, 1]
    assert diversity.subspace.worst_alignment_pair.tolist() == [2, 3]
    assert float(diversity.subspace.worst_alignment) == pytest.approx((0.36 - 1 / 24) / (1 - 1 / 24))


def test_the_worst_energy_alignment_has_its_own_pair_if_one_direction_carries_the_energy():
    weight = torch.zeros(4, 6, 24, dtype=torch.float64)
    weight[0, 0, 0], weight[1, 0, 0], weight[1, 0, 1] = 1, 0.8, 0.6  # two lines: chance 1/24
    # Two spaces of six equal directions, four of them shared: overlap 4/6, chance 6/24.
    weight[2], weight[3] = torch.eye(24, dtype=torch.float64)[6:12], torch.eye(24, dtype=torch.float64)[8:14]
    diversity = head_diversity(weight)
    assert diversity.energy.worst_pair.tolist() == [2, 3]
    assert float(diversity.energy.worst) == pytest.approx(4 / 6)
    assert diversity.energy.worst_alignment_pair.tolist() == [0, 1]
    assert float(diversity.energy.worst_alignment) == pytest.approx((0.64 - 1 / 24) / (1 - 1 / 24))


@pytest.mark.parametrize(("H", "change"), [(12, 0.014), (32, 0.002)])
def test_one_cloned_pair_hardly_moves_the_index_but_is_the_worst_pair(H, change):
    d = 24 * H
    weight = gaussian(H, 24, d)
    before = head_diversity(weight)
    weight[1] = gaussian(24, 24, seed=1) @ weight[0]
    after = head_diversity(weight)
    assert float(before.subspace.index - after.subspace.index) == pytest.approx(change, abs=6e-4)
    assert float(after.subspace.worst) == pytest.approx(1)
    assert float(after.subspace.worst_alignment) == pytest.approx(1)


# --- chance and ceiling


def test_random_heads_sit_at_chance_with_the_variance_that_is_claimed():
    H, k, d, draws = 4, 6, 24, 4000
    diversity = head_diversity(gaussian(draws, H, k, d))
    overlaps = diversity.subspace.overlap[:, 0, 1]
    variance = 2 * (d - k) ** 2 / (d**2 * (d - 1) * (d + 2))
    assert torch.allclose(diversity.chance, torch.tensor(1 - k / d, dtype=torch.float64))
    standard_error = math.sqrt(variance / (H * (H - 1) / 2) / draws)
    assert abs(float(diversity.subspace.index.mean()) - (1 - k / d)) < 4 * standard_error
    assert float(overlaps.var()) == pytest.approx(variance, rel=0.12)
    assert float(diversity.subspace.index.var()) == pytest.approx(variance / 6, rel=0.12)


def test_chance_under_unequal_ranks():
    weight = torch.zeros(3000, 2, 6, 24, dtype=torch.float64)
    weight[:, 0] = gaussian(3000, 6, 24)
    weight[:, 1, :2] = gaussian(3000, 2, 24, seed=1)
    diversity = head_diversity(weight)
    assert torch.allclose(diversity.chance, torch.tensor(1 - math.sqrt(12) / 24, dtype=torch.float64))
    assert float(diversity.subspace.index.mean()) == pytest.approx(1 - math.sqrt(12) / 24, abs=3e-3)


def test_energy_chance_is_that_of_random_rotations_of_the_same_spectra():
    sigma = torch.tensor([3.0, 1, 0.5, 0.1], dtype=torch.float64)
    rotations = torch.linalg.qr(gaussian(4000, 2, 24, 4)).Q.mT
    diversity = head_diversity(sigma[:, None] * rotations)
    alignment = diversity.energy.alignment
    assert abs(float(alignment.mean())) < 4 * float(alignment.std()) / math.sqrt(4000)
    participation = float(sigma.square().sum() ** 2 / sigma.pow(4).sum())
    assert float(diversity.energy.overlap[:, 0, 1].mean()) == pytest.approx(participation / 24, rel=0.05)


def test_the_ceiling_is_attained_by_evenly_spread_planes():
    angles = torch.arange(3, dtype=torch.float64) * math.pi / 3  # three lines in a plane, 60 degrees apart
    lines = torch.stack([angles.cos(), angles.sin()], -1)[:, None, :]
    diversity = head_diversity(lines)
    assert float(diversity.subspace.index) == pytest.approx(float(diversity.ceiling)) == pytest.approx(0.75)


# --- dead, few and broken heads


def test_a_dead_head_is_left_out_of_every_mean():
    weight = gaussian(5, 8, 64)
    dead = weight.clone()
    dead[2] = 0
    living, all_of_them = head_diversity(weight[[0, 1, 3, 4]]), head_diversity(dead)
    for field in ("index", "alignment", "effective_heads", "worst"):
        for lens in ("subspace", "energy"):
            one, other = (float(getattr(getattr(found, lens), field)) for found in (all_of_them, living))
            assert one == pytest.approx(other), field
    assert float(all_of_them.chance) == pytest.approx(float(living.chance))
    assert float(all_of_them.ceiling) == pytest.approx(float(living.ceiling))
    assert all_of_them.dead.tolist() == [False, False, True, False, False]
    assert not all_of_them.subspace.overlap[2].any()
    assert not all_of_them.energy.overlap[2].any()


@pytest.mark.parametrize(("weight", "live"), [(gaussian(1, 4, 8), 1), (torch.zeros(3, 4, 8), 0)])
def test_fewer_than_two_live_heads_have_no_index(weight, live):
    diversity = head_diversity(weight)
    assert math.isnan(float(diversity.subspace.index))
    assert math.isnan(float(diversity.subspace.worst))
    assert diversity.subspace.worst_pair.tolist() == [-1, -1]
    assert float(diversity.subspace.effective_heads) == live


def test_heads_as_wide_as_the_input_have_no_alignment():
    diversity = head_diversity(gaussian(3, 8, 8))
    assert float(diversity.subspace.index) == pytest.approx(0, abs=1e-12)
    assert float(diversity.chance) == pytest.approx(0, abs=1e-12)
    assert math.isnan(float(diversity.subspace.alignment))


# --- invariances and bounds, searched


@SEARCH
@given(shapes)
def test_no_counterexample_to_the_bounds(shape):
    H, k, d, seed = shape
    diversity = head_diversity(gaussian(H, k, d, seed=seed))
    assert -1e-9 <= float(diversity.subspace.index) <= float(diversity.ceiling) + 1e-9 <= 1 + 2e-9
    assert 1 - 1e-9 <= float(diversity.subspace.effective_heads) <= H + 1e-9
    for overlap in (diversity.subspace.overlap, diversity.energy.overlap):
        assert 0 <= float(overlap.min()) <= float(overlap.max()) <= 1
        assert torch.equal(overlap.diagonal(), torch.ones(H, dtype=torch.float64))
        assert torch.linalg.eigvalsh(overlap).min() > -1e-9, "positive semi-definite"
        assert torch.allclose(overlap, overlap.mT)


@SEARCH
@given(shapes)
def test_turning_the_basis_inside_a_head_changes_nothing(shape):
    H, k, d, seed = shape
    weight = gaussian(H, k, d, seed=seed)
    turn = torch.linalg.qr(gaussian(H, k, k, seed=seed + 1)).Q * torch.logspace(-1, 1, k, dtype=torch.float64)
    before, after = head_diversity(weight), head_diversity(turn @ weight)
    assert torch.allclose(before.subspace.overlap, after.subspace.overlap, atol=1e-8)


@SEARCH
@given(shapes)
def test_rotating_the_input_or_reordering_the_heads_changes_nothing(shape):
    H, k, d, seed = shape
    weight = gaussian(H, k, d, seed=seed)
    rotation = torch.linalg.qr(gaussian(d, d, seed=seed + 1)).Q
    order = torch.randperm(H, generator=torch.Generator().manual_seed(seed))
    before, after = head_diversity(weight), head_diversity((weight @ rotation)[order])
    for lens in ("subspace", "energy"):
        for field in ("index", "alignment", "worst"):
            one, other = (float(getattr(getattr(found, lens), field)) for found in (after, before))
            assert one == pytest.approx(other, abs=1e-8, nan_ok=True)
    assert torch.allclose(after.subspace.overlap, before.subspace.overlap[order][:, order], atol=1e-8)


@SEARCH
@given(st.integers(2, 4), st.integers(1, 4), st.integers(0, 10**6))
def test_expanding_grouped_key_heads_follows_the_formula(groups, repeat, seed):
    keys = gaussian(groups, 4, 24, seed=seed)
    distinct, expanded = head_diversity(keys), head_diversity(keys.repeat_interleave(repeat, 0))
    G, H = groups, groups * repeat
    assert float(expanded.subspace.index) == pytest.approx(
        float(distinct.subspace.index) * H * (G - 1) / (G * (H - 1)), abs=1e-10
    )
    assert float(expanded.subspace.effective_heads) == pytest.approx(float(distinct.subspace.effective_heads), abs=1e-9)


# --- the energy lens, and data in place of weights


def test_the_energy_lens_sees_a_shared_dominant_direction_that_subspaces_do_not():
    H, k, d = 8, 8, 64
    weight = 0.1 * gaussian(H, k, d)
    shared = gaussian(d, seed=1)
    shared /= shared.norm()
    weight[:, 0] += 10 * shared
    diversity = head_diversity(weight)
    assert float(off_diagonal(diversity.subspace.overlap).mean()) < 0.3
    assert float(off_diagonal(diversity.energy.overlap).mean()) > 0.95


def test_the_energy_overlap_is_linear_cka():
    weight = gaussian(4, 6, 30)
    measured = head_diversity(weight).energy.overlap
    gram = [head.numpy().T @ head.numpy() for head in weight]
    for h in range(4):
        for g in range(4):
            cka = np.vdot(gram[h], gram[g]) / np.linalg.norm(gram[h]) / np.linalg.norm(gram[g])
            assert float(measured[h, g]) == pytest.approx(cka, abs=1e-13)


def keys_and_covariance(tokens: int = 400, H: int = 4, k: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    keys = gaussian(tokens, H, k)
    keys[:, 1, :3] += 2 * keys[:, 0, :3]
    return keys, torch.cov(keys.flatten(1).T).reshape(H, k, H, k)


# --- further identities


def test_both_lenses_on_one_dominant_direction_agree_with_closed_forms():
    H, k, d, noise = 8, 16, 128, 1 / 68.6
    shared = gaussian(d, seed=1)
    shared /= shared.norm()
    weight = noise * gaussian(H, k, d)
    weight -= (weight @ shared)[..., None] * shared  # noise beside the direction, in d - 1 dimensions
    weight[:, 0] = shared
    diversity = head_diversity(weight)
    # One direction in common, the other k - 1 at chance in what is left.
    subspace = (1 + (k - 1) ** 2 / (d - 1)) / k
    assert subspace == pytest.approx(0.173, abs=1e-3)
    assert float(off_diagonal(diversity.subspace.overlap).mean()) == pytest.approx(subspace, abs=3e-3)
    # ||A_h A_g'||^2 = 1 + noise, over ||A_h A_h'||^2 = 1 + the fourth moment of a Wishart matrix.
    cross = 1 + noise**4 * (k - 1) ** 2 * (d - 1)
    own = 1 + noise**4 * (k - 1) * (d - 1) * ((d - 1) + (k - 1) + 1)
    assert cross / own == pytest.approx(0.989, abs=1e-3)
    assert float(off_diagonal(diversity.energy.overlap).mean()) == pytest.approx(cross / own, abs=1e-3)


@pytest.mark.parametrize(("left", "right"), [(6, 2), (5, 5), (1, 8)])
def test_the_variance_of_an_overlap_by_chance_under_unequal_ranks(left, right):
    d, draws = 20, 6000
    weight = torch.zeros(draws, 2, 8, d, dtype=torch.float64)
    weight[:, 0, :left] = gaussian(draws, left, d)
    weight[:, 1, :right] = gaussian(draws, right, d, seed=1)
    overlap = head_diversity(weight).subspace.overlap[:, 0, 1]
    variance = 2 * (d - left) * (d - right) / (d**2 * (d - 1) * (d + 2))
    assert abs(float(overlap.mean()) - math.sqrt(left * right) / d) < 4 * math.sqrt(variance / draws)
    assert float(overlap.var()) == pytest.approx(variance, rel=0.12)


@SEARCH
@given(
    st.lists(st.integers(0, 6), min_size=2, max_size=6),
    st.lists(st.integers(-4, 4), min_size=6, max_size=6),
    st.integers(1, 16),
    st.integers(0, 10**6),
)
def test_no_counterexample_to_the_bounds_under_unequal_ranks_scales_and_dead_heads(ranks, scales, d, seed):
    weight = torch.stack(
        [gaussian(6, r, seed=seed + h) @ gaussian(r, d, seed=seed + h + 9) for h, r in enumerate(ranks)]
    )
    weight *= torch.tensor(scales[: len(ranks)]).double().mul(0.5).exp()[:, None, None]
    diversity = head_diversity(weight)
    live = [h for h, rank in enumerate(ranks) if rank]
    assert diversity.rank.tolist() == [min(rank, d) for rank in ranks]
    assert diversity.dead.tolist() == [rank == 0 for rank in ranks]
    for overlap in (diversity.subspace.overlap, diversity.energy.overlap):
        assert 0 <= float(overlap.min()) <= float(overlap.max()) <= 1
        assert torch.linalg.eigvalsh(overlap).min() > -1e-7, "positive semi-definite"
    if len(live) > 1:
        assert -1e-7 <= float(diversity.subspace.index) <= float(diversity.ceiling) + 1e-7
        assert 1 - 1e-7 <= float(diversity.subspace.effective_heads) <= len(live) + 1e-7
        assert float(diversity.subspace.worst) >= 1 - float(diversity.subspace.index) - 1e-7
    else:
        assert math.isnan(float(diversity.subspace.index))
        assert float(diversity.subspace.effective_heads) == len(live)


def test_the_flatness_is_the_geometric_over_the_arithmetic_mean_of_the_squared_singular_values():
    weight = gaussian(4, 5, 16, seed=3)
    weight[1] *= torch.tensor([8.0, 1, 1, 1, 1])[:, None]
    weight[2] = 0
    spectrum = np.linalg.svd(weight.numpy(), compute_uv=False) ** 2
    expected = scipy.stats.gmean(spectrum[[0, 1, 3]], axis=-1) / spectrum[[0, 1, 3]].mean(-1)
    measured = head_diversity(weight).flatness
    assert measured[[0, 1, 3]].tolist() == pytest.approx(expected.tolist(), rel=1e-9)
    assert measured[2] == 0
    turned = torch.linalg.qr(gaussian(5, 5, seed=5)).Q @ weight[0] @ torch.linalg.qr(gaussian(16, 16, seed=6)).Q
    assert float(head_diversity(7 * turned[None]).flatness) == pytest.approx(float(measured[0]), rel=1e-9)


def test_the_flatness_of_a_deficient_head_is_all_but_zero():
    weight = gaussian(2, 5, 16, seed=3)
    weight[1, 4] = weight[1, 0]
    measured = head_diversity(weight).flatness
    assert measured[1] < 0.01 < 0.3 < measured[0]


# --- one product for both lenses, and bounded memory


def plain_energy(weight: torch.Tensor) -> np.ndarray:
    heads = weight.double().numpy()
    products = np.array([[np.linalg.norm(h @ g.T) ** 2 for g in heads] for h in heads])
    own = np.diag(products)
    with np.errstate(invalid="ignore"):
        return np.nan_to_num(products / np.sqrt(np.outer(own, own)))


def test_two_lenses_have_the_same_fields():
    weight = gaussian(5, 6, 48)
    weight[3, 0] = 40 * weight[1, 0]
    diversity = head_diversity(weight)
    assert torch.equal(diversity.energy.index, diversity.energy.index)
    assert torch.equal(diversity.energy.overlap, diversity.energy.overlap)
    assert torch.equal(diversity.energy.alignment, diversity.energy.alignment)
    assert torch.equal(diversity.subspace.worst_pair, diversity.subspace.worst_pair)
    expected = plain_energy(weight)
    pairs = np.triu_indices(5, 1)
    assert float(diversity.energy.index) == pytest.approx(1 - expected[pairs].mean())
    assert float(diversity.energy.effective_heads) == pytest.approx(25 / expected.sum())
    h, g = diversity.energy.worst_pair.tolist()
    assert expected[h, g] == pytest.approx(expected[pairs].max())


# --- keys as they come


def input_covariance(d: int, seed: int = 5) -> torch.Tensor:
    root = gaussian(d, d, seed=seed) * torch.logspace(0, -1.5, d, dtype=torch.float64)
    return root @ root.mT / d


def test_a_gain_changes_the_index_of_weights():
    weight, gain = gaussian(4, 8, 40), gaussian(40, seed=2).exp()
    assert abs(float(head_diversity(weight).subspace.index - head_diversity(weight * gain).subspace.index)) > 1e-3
