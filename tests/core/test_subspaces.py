"""Overlaps and angles against SciPy's, over every kind of head that a rank or a scale can spoil."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import Tensor

from hdi_callback.core import head_diversity, principal_cosines
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
@pytest.mark.parametrize("case", CASES)
def test_overlaps_and_ranks_agree_with_scipy(case, dtype):
    # The reference sees what we see: the weight as it is after rounding to its type.
    weight = CASES[case].to(dtype)
    found = head_diversity(weight, rank_tol=RANK_TOL)
    expected = scipy_overlap(weight.double())
    tolerance = 1e-9 if dtype == torch.float64 else 1e-5
    assert np.abs(found.subspace.overlap.double().numpy() - expected).max() < tolerance
    assert found.rank.tolist() == [basis.shape[1] for basis in scipy_bases(weight.double())]
    assert found.dead.tolist() == [basis.shape[1] == 0 for basis in scipy_bases(weight.double())]


@pytest.mark.parametrize("case", CASES)
def test_energy_overlaps_agree_with_the_plain_quotient(case):
    weight = CASES[case]
    found = head_diversity(weight.float()).energy.overlap.double().numpy()
    gram = np.einsum("hid,gjd->hgij", weight.float().double().numpy(), weight.float().double().numpy())
    size = np.sqrt((gram**2).sum((2, 3)))
    own = np.sqrt(np.diagonal(size))
    live = ~head_diversity(weight.float()).dead.numpy()
    expected = np.divide(size**2, np.outer(own**2, own**2), out=np.zeros_like(size), where=np.outer(live, live))
    expected = size**2 / np.maximum(np.outer(np.diagonal(size), np.diagonal(size)), 1e-300) * np.outer(live, live)
    assert np.abs(found - expected).max() < 1e-5


def test_principal_cosines_agree_with_scipy():
    for weight in CASES.values():
        cosines, bases = principal_cosines(weight, rank_tol=RANK_TOL), scipy_bases(weight)
        assert cosines.shape == (len(bases), len(bases), min(weight.shape[1:]))
        assert (cosines[..., 1:] <= cosines[..., :-1] + 1e-12).all()
        for h, left in enumerate(bases):
            for g, right in enumerate(bases):
                expected = np.zeros(min(weight.shape[1:]))
                if left.shape[1] and right.shape[1]:
                    angles = np.sort(scipy.linalg.subspace_angles(left, right))
                    expected[: len(angles)] = np.cos(angles)
                assert np.abs(cosines[h, g].numpy() - expected).max() < 1e-9


def test_a_known_angle_gives_its_cosine():
    angle = 0.3
    weight = torch.tensor([[[1.0, 0, 0]], [[np.cos(angle), np.sin(angle), 0]]], dtype=torch.float64)
    assert principal_cosines(weight)[0, 1, 0] == pytest.approx(np.cos(angle))
    assert head_diversity(weight).subspace.overlap[0, 1] == pytest.approx(np.cos(angle) ** 2)


@pytest.mark.parametrize("scale", [1e-30, 1e-18, 1.0, 1e18, 1e30])
def test_the_scale_of_a_layer_changes_nothing(scale):
    weight = CASES["random"].float()
    plain, scaled = head_diversity(weight), head_diversity(weight * scale)
    assert torch.equal(plain.rank, scaled.rank)
    assert torch.allclose(plain.subspace.overlap, scaled.subspace.overlap, atol=1e-6)
    assert torch.allclose(plain.energy.overlap, scaled.energy.overlap, atol=1e-6)


def test_a_head_is_dead_against_the_largest_head_of_its_layer():
    weight = CASES["random"].clone()
    largest = torch.linalg.matrix_norm(weight).max()
    weight[1] *= 0.5e-6 * largest / torch.linalg.matrix_norm(weight[1])
    weight[3] *= 2e-6 * largest / torch.linalg.matrix_norm(weight[3])
    found = head_diversity(weight)
    assert found.dead.tolist() == [False, True, False, False, False, False]
    assert found.rank.tolist() == [16, 0, 16, 16, 16, 16]
    assert not found.subspace.overlap[1].any()


def test_a_batch_is_its_layers_one_by_one():
    weight = gaussian(2, 3, 6, 16, 96)
    together = head_diversity(weight)
    for place in np.ndindex(2, 3):
        alone = head_diversity(weight[place])
        assert torch.allclose(together.subspace.overlap[place], alone.subspace.overlap, atol=1e-12)
        assert torch.allclose(together.energy.overlap[place], alone.energy.overlap, atol=1e-12)


@pytest.mark.parametrize("rank_tol", [0, 1, -1e-6, float("nan")])
@pytest.mark.parametrize("read", [principal_cosines, head_diversity])
def test_a_rank_tolerance_that_leaves_no_rank_is_refused(read, rank_tol):
    with pytest.raises(MisconfigurationError, match="Write rank_tol=1e-6"):
        read(CASES["random"], rank_tol=rank_tol)


@pytest.mark.parametrize("shape", [(4, 8), (0, 8, 16), (4, 0, 16), (4, 8, 0)])
def test_a_shape_that_is_no_head_weight_is_refused_with_the_remedy(shape):
    with pytest.raises(ShapeError, match=r"unflatten\(0, \(num_heads, -1\)\)"):
        head_diversity(torch.zeros(shape))


def test_a_subspace_inside_a_wider_one_is_not_counted_as_identical():
    weight = torch.zeros(2, 6, 24, dtype=torch.float64)
    weight[0] = gaussian(6, 24)
    weight[1] = gaussian(6, 2) @ weight[0, :2]
    found = head_diversity(weight)
    assert found.rank.tolist() == [6, 2]
    assert float(found.subspace.overlap[0, 1]) == pytest.approx(np.sqrt(2 / 6), abs=1e-9)


@pytest.mark.parametrize("width", [4, 16, 64])
def test_a_direction_a_decade_from_the_rank_cut_is_decided(width):
    sigma = torch.ones(width, dtype=torch.float64)
    for factor, rank in ((0.1, width - 1), (10, width)):
        sigma[-1] = factor * RANK_TOL
        assert head_diversity(with_spectrum(sigma, 3, 4 * width)).rank.tolist() == [rank] * 3


def sized_cases() -> dict[str, tuple[Tensor, float]]:
    """Twelve heads of width 64 in 768, with the documented errors of their mean overlap in float32."""
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
        "random": (random, 3e-10),
        "condition 1e2": (with_spectrum(log_spectrum(1e2, 64), 12, 768), 1e-9),
        "condition 1e4": (with_spectrum(log_spectrum(1e4, 64), 12, 768), 4e-8),
        "shared space, condition 1e4": (shared, 3e-7),
        "nearly aligned": (random[:1] + 1e-3 * gaussian(12, 64, 768, seed=3), 6e-8),
        "rank 40 and noise": (low_rank + 1e-9 * gaussian(12, 64, 768, seed=4), 1e-9),
        "exactly deficient": (low_rank, 1e-10),
        "duplicate": (duplicate, 8e-10),
        "zero head": (zero, 5e-10),
        "outlier column": (outlier, 3e-9),
    }


SIZED = sized_cases()


@pytest.mark.parametrize("case", SIZED)
def test_a_layer_of_full_size_is_read_to_ten_times_the_documented_error(case):
    weight, error = SIZED[case]
    rounded = weight.float()
    bases = [basis for basis in scipy_bases(rounded.double()) if basis.size]
    expected = np.mean(
        [
            np.linalg.norm(left.T @ right) ** 2 / np.sqrt(left.shape[1] * right.shape[1])
            for h, left in enumerate(bases)
            for right in bases[h + 1 :]
        ]
    )
    assert abs(1 - float(head_diversity(rounded).subspace.index) - expected) < 10 * error + 1.2e-7
