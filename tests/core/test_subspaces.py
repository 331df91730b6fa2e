"""Overlaps and angles against SciPy's, over every kind of head that a rank or a scale can spoil."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import Tensor

from hdi_callback.core import head_diversity, head_overlap, orthonormal_bases, principal_cosines, whitening
from hdi_callback.core.subspaces import block_norms
from hdi_callback.errors import MisconfigurationError, ShapeError

RANK_TOL = 1e-6


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def with_spectrum(sigma: Tensor, H: int, d: int, seed: int = 0) -> Tensor:
    """Heads with these singular values and random directions on both sides."""
    k = len(sigma)
    left = torch.linalg.qr(gaussian(H, k, k, seed=seed)).Q
    right = torch.linalg.qr(gaussian(H, d, k, seed=seed + 1)).Q
    return left @ torch.diag(sigma) @ right.mT


def log_spectrum(condition: float, k: int) -> Tensor:
    return torch.logspace(0, -np.log10(condition), k, dtype=torch.float64)


def cases() -> dict[str, Tensor]:
    random = gaussian(6, 16, 96)
    shared = gaussian(1, 16, 96, seed=3)
    low_rank = with_spectrum(torch.cat([torch.ones(10), torch.zeros(6)]).double(), 6, 96)
    duplicated = gaussian(6, 16, 96, seed=4)
    duplicated[4] = gaussian(16, 16, seed=5) @ duplicated[1]
    zero = gaussian(6, 16, 96, seed=6)
    zero[2] = 0
    unequal = gaussian(4, 12, 64, seed=7)
    for head, rank in enumerate((12, 9, 5, 1)):
        unequal[head] = gaussian(12, rank, seed=8 + head) @ gaussian(rank, 64, seed=20 + head)
    outlier = gaussian(6, 16, 96, seed=9)
    outlier[..., 5] *= 300
    return {
        "random": random,
        "condition 1e2": with_spectrum(log_spectrum(1e2, 16), 6, 96),
        "condition 1e4": with_spectrum(log_spectrum(1e4, 16), 6, 96),
        "nearly aligned": shared + 1e-3 * gaussian(6, 16, 96, seed=11),
        "rank deficient": low_rank,
        "rank deficient and noise": low_rank + 1e-9 * gaussian(6, 16, 96, seed=12),
        "duplicated": duplicated,
        "zero": zero,
        "wildly scaled": random * torch.tensor([1e-2, 1, 1e2, 3, 30, 0.1], dtype=torch.float64)[:, None, None] * 1e15,
        # The first three are alive, the rest are dead beside them.
        "from 1e18 to 1e-18": random
        * torch.tensor([1e18, 1e14, 4e12, 1e11, 1, 1e-18], dtype=torch.float64)[:, None, None],
        "more heads than room": gaussian(12, 16, 48, seed=13),
        "wider than the input": gaussian(3, 20, 12, seed=14),
        "one head": gaussian(1, 16, 96, seed=15),
        "heads of width one": gaussian(6, 1, 24, seed=16),
        "unequal ranks": unequal,
        "outlier column": outlier,
    }


CASES = cases()
TOLERANCE = {"whiten": 1e-5, "svd": 1e-5, "exact": 1e-9}  # of one overlap, for weights below float64


def scipy_bases(weight: Tensor) -> list[np.ndarray]:
    """Row spaces by SciPy's SVD in float64 with the same rank cut; a dead head has none."""
    largest = float(torch.linalg.matrix_norm(weight).max())
    bases = []
    for head in weight.numpy():
        _, sigma, rows = scipy.linalg.svd(head, full_matrices=False)
        alive = np.linalg.norm(head) >= RANK_TOL * largest and largest > 0
        bases.append(rows[(sigma > RANK_TOL * sigma[0]) & alive].T)
    return bases


def scipy_overlap(weight: Tensor) -> np.ndarray:
    """Mean squared cosine of `scipy.linalg.subspace_angles`, rescaled where the ranks differ."""
    bases = scipy_bases(weight)
    H = len(bases)
    overlap = np.zeros((H, H))
    for h in range(H):
        for g in range(H):
            r_h, r_g = bases[h].shape[1], bases[g].shape[1]
            if r_h and r_g:
                cosines = np.cos(scipy.linalg.subspace_angles(bases[h], bases[g]))
                overlap[h, g] = (cosines**2).sum() / np.sqrt(r_h * r_g)
    return overlap


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("method", TOLERANCE)
@pytest.mark.parametrize("case", CASES)
def test_overlaps_and_ranks_agree_with_scipy(case, method, dtype):
    # The reference sees what the method sees: the weight as it is after rounding to its type.
    weight = CASES[case].to(dtype)
    bases = orthonormal_bases(weight, rank_tol=RANK_TOL, method=method)
    measured = head_overlap(bases.rows, bases.rank).double().numpy()
    tolerance = TOLERANCE["exact"] if dtype == torch.float64 else TOLERANCE[method]
    assert np.abs(measured - scipy_overlap(weight.double())).max() < tolerance
    assert bases.rank.tolist() == [basis.shape[1] for basis in scipy_bases(weight.double())]
    assert bases.dead.tolist() == [basis.shape[1] == 0 for basis in scipy_bases(weight.double())]


@pytest.mark.parametrize("case", CASES)
def test_principal_cosines_agree_with_scipy(case):
    weight = CASES[case]
    cosines, bases = principal_cosines(weight, rank_tol=RANK_TOL), scipy_bases(weight)
    assert cosines.shape == (len(bases), len(bases), weight.shape[1])
    assert (cosines[..., 1:] <= cosines[..., :-1] + 1e-12).all()
    for h, left in enumerate(bases):
        for g, right in enumerate(bases):
            expected = np.zeros(weight.shape[1])
            if left.shape[1] and right.shape[1]:
                angles = np.sort(scipy.linalg.subspace_angles(left, right))
                expected[: len(angles)] = np.cos(angles)
            assert np.abs(cosines[h, g].numpy() - expected).max() < 1e-9


def test_a_known_angle_gives_its_cosine():
    angle = 0.3
    weight = torch.tensor([[[1.0, 0, 0]], [[np.cos(angle), np.sin(angle), 0]]], dtype=torch.float64)
    assert principal_cosines(weight)[0, 1, 0] == pytest.approx(np.cos(angle))
    bases = orthonormal_bases(weight)
    assert head_overlap(bases.rows)[0, 1] == pytest.approx(np.cos(angle) ** 2)


@pytest.mark.parametrize("method", TOLERANCE)
def test_bases_are_projectors_on_the_row_spaces(method):
    weight = CASES["unequal ranks"]
    rows = orthonormal_bases(weight, method=method).rows
    for head, basis in zip(rows, scipy_bases(weight)):
        assert torch.allclose(head.mT @ head, torch.tensor(basis @ basis.T), atol=1e-9)


@pytest.mark.parametrize("scale", [1e-30, 1e-18, 1.0, 1e18, 1e30])
@pytest.mark.parametrize("method", TOLERANCE)
def test_the_scale_of_a_layer_changes_nothing(scale, method):
    weight = CASES["random"].float()
    plain, scaled = (orthonormal_bases(w, method=method) for w in (weight, weight * scale))
    assert torch.equal(plain.rank, scaled.rank)
    assert torch.allclose(head_overlap(plain.rows), head_overlap(scaled.rows), atol=1e-6)


@pytest.mark.parametrize("scale", [1e-250, 1e250])
@pytest.mark.parametrize("method", TOLERANCE)
def test_squares_beyond_the_range_of_float64_change_nothing(scale, method):
    weight = CASES["zero"]
    plain, scaled = (orthonormal_bases(w, method=method) for w in (weight, weight * scale))
    assert torch.equal(plain.dead, scaled.dead)
    assert torch.allclose(head_overlap(plain.rows), head_overlap(scaled.rows), atol=1e-12)


def test_a_head_is_dead_against_the_largest_head_of_its_layer():
    weight = CASES["random"].clone()
    weight[1] *= 0.5e-6 * torch.linalg.matrix_norm(weight).max() / torch.linalg.matrix_norm(weight[1])
    weight[3] *= 2e-6 * torch.linalg.matrix_norm(weight).max() / torch.linalg.matrix_norm(weight[3])
    bases = orthonormal_bases(weight)
    assert bases.dead.tolist() == [False, True, False, False, False, False]
    assert bases.rank.tolist() == [16, 0, 16, 16, 16, 16]
    assert not head_overlap(bases.rows)[1].any()


def test_a_batch_is_its_layers_one_by_one():
    weight = gaussian(2, 3, 6, 16, 96)
    bases = orthonormal_bases(weight)
    for place in np.ndindex(2, 3):
        alone = orthonormal_bases(weight[place])
        assert torch.allclose(head_overlap(bases.rows)[place], head_overlap(alone.rows), atol=1e-12)


def test_block_norms_without_whitening_are_those_of_the_blocks():
    rows = gaussian(3, 4, 20)
    blocks = np.einsum("hid,gjd->hgij", rows.numpy(), rows.numpy())
    for norms in block_norms(rows):
        np.testing.assert_allclose(norms.numpy(), (blocks**2).sum((2, 3)), rtol=1e-12)


def test_the_chunks_of_the_product_change_nothing():
    bases = orthonormal_bases(CASES["more heads than room"])
    whole = head_overlap(bases.rows)
    assert np.abs(whole.numpy() - scipy_overlap(CASES["more heads than room"])).max() < 1e-9
    for heads in (0, 3, 5):
        budget = max(1, heads * 16 * 12 * 16 * 2 * 8)
        assert torch.allclose(head_overlap(bases.rows, memory_budget=budget), whole, atol=1e-13)


@pytest.mark.parametrize("read", [orthonormal_bases, head_diversity])
def test_an_unknown_method_is_refused_and_not_taken_for_the_default(read):
    with pytest.raises(MisconfigurationError, match=r"one of \('whiten', 'svd', 'exact'\), got 'qr'"):
        read(CASES["random"], method="qr")


@pytest.mark.parametrize("rank_tol", [0, 1, -1e-6, float("nan")])
@pytest.mark.parametrize("read", [orthonormal_bases, principal_cosines, head_diversity])
def test_a_rank_tolerance_that_leaves_no_rank_is_refused(read, rank_tol):
    with pytest.raises(MisconfigurationError, match="Write rank_tol=1e-6"):
        read(CASES["random"], rank_tol=rank_tol)


@pytest.mark.parametrize("shape", [(4, 8), (0, 8, 16), (4, 0, 16), (4, 8, 0)])
def test_a_shape_that_is_no_head_weight_is_refused_with_the_remedy(shape):
    with pytest.raises(ShapeError, match=r"unflatten\(0, \(num_heads, -1\)\)"):
        orthonormal_bases(torch.zeros(shape))


@pytest.mark.parametrize("method", TOLERANCE)
def test_a_subspace_inside_a_wider_one_is_not_counted_as_identical(method):
    weight = torch.zeros(2, 6, 24, dtype=torch.float64)
    weight[0] = gaussian(6, 24)
    weight[1] = gaussian(6, 2) @ weight[0, :2]
    bases = orthonormal_bases(weight, method=method)
    assert bases.rank.tolist() == [6, 2]
    assert float(head_overlap(bases.rows, bases.rank)[0, 1]) == pytest.approx(np.sqrt(2 / 6), abs=1e-9)


@pytest.mark.parametrize("width", [4, 16, 64])
@pytest.mark.parametrize("method", TOLERANCE)
def test_a_direction_a_decade_from_the_rank_cut_is_decided(method, width):
    sigma = torch.ones(width, dtype=torch.float64)
    for factor, rank in ((0.1, width - 1), (10, width)):
        sigma[-1] = factor * RANK_TOL
        bases = orthonormal_bases(with_spectrum(sigma, 3, 4 * width), rank_tol=RANK_TOL, method=method)
        assert bases.rank.tolist() == [rank] * 3
        assert torch.allclose(bases.rows.square().sum((-2, -1)), bases.rank, atol=2e-3)


@pytest.mark.parametrize("rank_tol", [1e-12, 1e-9, 1e-8, 1e-7])
@pytest.mark.parametrize("method", TOLERANCE)
def test_a_rank_tolerance_finer_than_a_gram_matrix_resolves_counts_no_rounding(method, rank_tol):
    weight = gaussian(4, 32, 20) @ gaussian(4, 20, 256, seed=1)
    bases = orthonormal_bases(weight, rank_tol=rank_tol, method=method)
    assert bases.rank.tolist() == [20] * 4
    assert np.abs(head_overlap(bases.rows, bases.rank).numpy() - scipy_overlap(weight)).max() < 1e-9


def sized_cases() -> dict[str, tuple[Tensor, float, float]]:
    """Twelve heads of width 64 in 768, with the documented errors of their mean overlap in float32 and in float64."""
    random = gaussian(12, 64, 768)
    low_rank = with_spectrum(torch.cat([torch.ones(40), torch.zeros(24)]).double(), 12, 768)
    shared = log_spectrum(1e4, 64)[:, None] * torch.linalg.qr(gaussian(12, 64, 64, seed=2)).Q @ random[:1]
    duplicate = random.clone()
    duplicate[7] = gaussian(64, 64, seed=1) @ random[2]
    zero = random.clone()
    zero[3] = 0
    outlier = random.clone()
    outlier[..., 5] *= 300
    return {
        "random": (random, 3e-10, 1e-16),
        "condition 1e2": (with_spectrum(log_spectrum(1e2, 64), 12, 768), 1e-9, 2e-14),
        "condition 1e4": (with_spectrum(log_spectrum(1e4, 64), 12, 768), 4e-8, 6e-11),
        "shared space, condition 1e4": (shared, 3e-7, 8e-10),
        "nearly aligned": (random[:1] + 1e-3 * gaussian(12, 64, 768, seed=3), 6e-8, 4e-11),
        "rank 40 and noise": (low_rank + 1e-9 * gaussian(12, 64, 768, seed=4), 1e-9, 1e-16),
        "exactly deficient": (low_rank, 1e-10, 1e-16),
        "duplicate": (duplicate, 8e-10, 2e-16),
        "zero head": (zero, 5e-10, 2e-16),
        "outlier column": (outlier, 3e-9, 8e-14),
    }


SIZED = sized_cases()


@pytest.mark.slow
@pytest.mark.parametrize("case", SIZED)
def test_a_layer_of_full_size_is_read_to_ten_times_the_documented_error(case):
    weight, single, double = SIZED[case]
    rounded = weight.float()
    bases = [basis for basis in scipy_bases(rounded.double()) if basis.size]
    expected = np.mean(
        [
            np.linalg.norm(left.T @ right) ** 2 / np.sqrt(left.shape[1] * right.shape[1])
            for h, left in enumerate(bases)
            for right in bases[h + 1 :]
        ]
    )
    # What is left of 1e-16 is the rounding of the reference itself.
    for method, error in (("whiten", 10 * single), ("exact", 10 * double + 5e-14), ("svd", 1e-6)):
        diversity = head_diversity(rounded, method=method)
        live = diversity.overlap.double()[~diversity.dead][:, ~diversity.dead]
        assert abs(float(live[np.triu_indices(len(live), 1)].mean()) - expected) < error
        spacing = torch.finfo(diversity.index.dtype).eps
        assert abs(1 - float(diversity.index) - expected) < error + spacing


@pytest.mark.parametrize("condition", [1, 3, 10, 30, 100, 300])
def test_a_head_without_a_rank_cut_is_as_precise_as_with_one(condition, monkeypatch):
    weight = with_spectrum(log_spectrum(condition, 16), 6, 96).float()
    steps = []
    of = whitening.whitener_of
    monkeypatch.setattr(whitening, "whitener_of", lambda *args: steps.append(args[2]) or of(*args))
    found = head_overlap(orthonormal_bases(weight).rows)
    assert set(steps) == {1e-7}
    assert (found.double() - head_overlap(orthonormal_bases(weight, method="exact").rows)).abs().max() < 3e-7
