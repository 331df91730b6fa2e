"""Heads compared from one product of their weights: as exact as whitened ones, up to a limit that is kept."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hdi_callback.core import head_diversity
from hdi_callback.core.circuits import qk_circuits, qk_circuits_from_products
from hdi_callback.core.diversity import blocks_and_products
from hdi_callback.core.well_conditioned import lenses_of_products
from tests.core.test_subspaces import gaussian, log_spectrum, scipy_overlap, with_spectrum


def lenses(weight: Tensor, rank_tol: float = 1e-6):
    return lenses_of_products(weight, rank_tol=rank_tol, memory_budget=2**26)


def near_twins(condition: float) -> Tensor:
    """Six heads that read nearly the same directions, each in coordinates of its own."""
    frame = torch.linalg.qr(gaussian(64, 16)).Q
    heads = [torch.linalg.qr(frame + 1e-3 * gaussian(64, 16, seed=seed)).Q.T for seed in range(6)]
    mixed = torch.linalg.qr(gaussian(6, 16, 16, seed=9)).Q @ torch.diag(log_spectrum(condition, 16))
    return mixed @ torch.stack(heads)


@pytest.mark.parametrize("condition", [1.0, 3.0, 6.0])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
def test_one_product_in_single_precision_agrees_with_scipy(condition, scale):
    for weight in (with_spectrum(log_spectrum(condition, 16), 6, 64), near_twins(condition)):
        weight = (scale * weight).float().double()  # to round a weight is to change what it spans
        assert lenses(weight.float()) is not None
        found, exact = head_diversity(weight.float()), head_diversity(weight)
        assert found.overlap.dtype == torch.float32
        assert found.overlap.double().numpy() == pytest.approx(scipy_overlap(weight), abs=1e-6)
        for name in ("energy_overlap", "flatness", "index", "energy_index", "worst", "energy_worst"):
            assert torch.allclose(getattr(found, name).double(), getattr(exact, name), atol=1e-6), name
        for name in ("effective_rank", "head_norm"):
            assert torch.allclose(getattr(found, name).double(), getattr(exact, name), rtol=1e-6), name
        assert torch.equal(found.rank.double(), exact.rank)


@pytest.mark.parametrize("condition", [20.0, 300.0])
def test_uneven_heads_are_whitened_before_they_are_multiplied(condition):
    weight = with_spectrum(log_spectrum(condition, 16), 6, 64).float().double()
    assert lenses(weight.float()) is None
    assert head_diversity(weight.float()).overlap.double().numpy() == pytest.approx(scipy_overlap(weight), abs=1e-6)


def test_heads_that_one_product_cannot_resolve_are_whitened():
    weight = gaussian(4, 8, 32).float()
    dead, short, lost = weight.clone(), weight.clone(), weight.clone()
    dead[1], short[1, 0], lost[1, 0, 0] = 0, short[1, 1], torch.nan
    others = {"dead": dead, "short of a direction": short, "no number": lost, "too small": 1e-9 * weight,
              "too large": 1e9 * weight, "wider than their input": gaussian(2, 8, 5).float()}  # fmt: skip
    assert lenses(weight) is not None
    for name, one in others.items():
        assert lenses(one) is None, name
    # Directions below a third of the largest do not count: the rank is cut, which one product does not do.
    assert lenses(with_spectrum(log_spectrum(10.0, 8), 4, 32).float(), rank_tol=0.3) is None
    assert float(head_diversity(short).rank[1]) == 7
    assert bool(head_diversity(dead).dead[1])
    assert head_diversity(lost).index.isnan()


def test_a_head_below_the_rank_tolerance_times_the_largest_is_dead_and_one_product_does_not_compare_it():
    weight = gaussian(4, 8, 32).float()
    weight /= weight.norm(dim=(1, 2), keepdim=True)
    for size, is_dead in [(0.9e-5, True), (1.1e-5, False)]:
        one = weight * torch.tensor([1, 1, size, 1])[:, None, None]
        assert (lenses(one, rank_tol=1e-5) is None) == is_dead
        assert head_diversity(one, rank_tol=1e-5).dead.tolist() == [False, False, is_dead, False]


@pytest.mark.parametrize("condition", [3.0, 1e3])
def test_circuits_from_reused_products_agree_with_the_weights(condition):
    key, query = with_spectrum(log_spectrum(condition, 16), 6, 64), gaussian(6, 16, 64, seed=5)
    found, products = blocks_and_products(key.float()[None])
    assert torch.equal(found.diversity().overlap[0], head_diversity(key.float()).overlap)
    circuits = qk_circuits_from_products(query.float()[None], key.float()[None], products).similarity()
    exact = qk_circuits(query, key)
    assert torch.allclose(circuits.cosine[0].double(), exact.cosine, atol=1e-6)
    assert torch.allclose(circuits.norm[0].double(), exact.norm, rtol=1e-6)


def test_chunks_change_nothing():
    weight = gaussian(12, 8, 64).float()
    whole, parts = lenses(weight), lenses_of_products(weight, rank_tol=1e-6, memory_budget=1)
    assert torch.allclose(whole.shared, parts.shared, atol=1e-6)
    assert torch.allclose(whole.energy, parts.energy, atol=1e-6)


def test_reused_products_report_their_size_in_bytes():
    _, products = blocks_and_products(gaussian(1, 6, 16, 64).float())
    chunks = list(products.parts)
    assert chunks
    assert products.nbytes == 4 * sum((part.stop - part.start) * 16 * (6 - part.start) * 16 for part, _ in chunks)
