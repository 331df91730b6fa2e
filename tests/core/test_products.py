"""Large products on a CPU are as exact by the library that is the faster one there as by the other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hdi_callback.core import head_covariance, head_diversity, ov_circuits, products, qk_circuits, token_spread
from hdi_callback.core.products import laid_out, row_products
from tests.core.test_subspaces import gaussian as in_float64

HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return in_float64(*shape, seed=seed).float()


@pytest.fixture(params=["MKL", "oneDNN"])
def library(request, monkeypatch):
    monkeypatch.setattr(products, "_mkl_is_the_slower", lambda: request.param == "oneDNN" and HAS_ONEDNN)
    monkeypatch.setattr(products, "_LARGE", 1)
    return request.param


@pytest.mark.parametrize("shape", [(7, 300, 65), (192, 768, 768), (130, 390, 520)])
def test_products_of_rows_are_those_of_float64_to_the_rounding_of_float32(shape, library):
    m, n, d = shape
    left, right = gaussian(m, d), gaussian(n, d, seed=1)
    exact = left.double().numpy() @ right.double().numpy().T
    error = np.abs(row_products(left, right).double().numpy() - exact)
    size = np.outer(np.linalg.norm(left.numpy(), axis=1), np.linalg.norm(right.numpy(), axis=1))
    assert (error <= 2e-6 * size).all()


def test_non_contiguous_rows_are_multiplied_directly_or_copied_first(library):
    columns = gaussian(520, 300)
    exact = columns.double().mT @ columns.double()
    for rows in (columns.mT, laid_out(columns.mT)):
        assert torch.allclose(row_products(rows, rows).double(), exact, atol=1e-3)
    assert laid_out(columns.mT).is_contiguous() == (library == "oneDNN" and HAS_ONEDNN)


def test_a_product_that_autograd_records_has_its_gradient(library):
    left, right = gaussian(30, 40).requires_grad_(), gaussian(20, 40, seed=1)
    row_products(left, right).sum().backward()
    assert torch.allclose(left.grad, right.sum(0).expand(30, 40), atol=1e-5)


def test_a_product_is_mapped_over_a_batch_by_torch_func(library):
    left, right = gaussian(3, 30, 40), gaussian(20, 40, seed=1)
    mapped = torch.func.vmap(lambda one: row_products(one, right))(left)
    assert torch.allclose(mapped, left @ right.mT, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_products_of_other_types_are_those_of_torch(dtype, library):
    rows = gaussian(30, 40).to(dtype)
    product = row_products(rows, rows)
    assert product.dtype == dtype
    assert torch.equal(product, rows @ rows.mT)


def test_measurements_do_not_depend_on_the_matrix_library(monkeypatch):
    key, output = gaussian(6, 32, 256), gaussian(192, 256, seed=1).view(256, 192).T.view(6, 32, 256)
    uneven = key * torch.logspace(0, 3, 32)[:, None]
    tokens = 5 + gaussian(600, 6, 32, seed=2)
    weights = (gaussian(600, seed=3) > -1).float()

    def measured() -> dict[str, torch.Tensor]:
        pair, shares = head_diversity(key), head_diversity(uneven)
        means, counted = head_covariance(tokens, output), head_covariance(tokens, output, weights=weights)
        return {
            "overlap": pair.overlap,
            "energy overlap": pair.energy_overlap,
            "overlap of uneven heads": shares.overlap,
            "output overlap": means.output_overlap,
            "correlation": means.correlation,
            "correlation of tokens that count": counted.correlation,
            "QK": qk_circuits(key, uneven).cosine,
            "OV": ov_circuits(key, output).cosine,
            "rank of tokens": token_spread(tokens.flatten(1)).rank,
        }

    monkeypatch.setattr(products, "_LARGE", 1)
    found = {}
    for is_onednn in (False, HAS_ONEDNN):
        monkeypatch.setattr(products, "_mkl_is_the_slower", lambda is_onednn=is_onednn: is_onednn)
        found[is_onednn] = measured()
    for name, value in found[False].items():
        assert torch.allclose(value, found[HAS_ONEDNN][name], atol=1e-6), name


@pytest.mark.parametrize(
    ("maker", "capability", "is_slower"),
    [
        ("vendor_id\t: AuthenticAMD", "AVX512_VNNI", True),
        ("vendor_id\t: AuthenticAMD", "AVX2", False),
        ("vendor_id\t: GenuineIntel", "AVX512_VNNI", False),
    ],
)
def test_mkl_counts_as_slower_only_on_amd_with_avx_512(maker, capability, is_slower, monkeypatch):
    monkeypatch.setattr(products, "_maker_of_cpu", lambda: maker)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    has_both = torch.backends.mkl.is_available() and HAS_ONEDNN
    assert products._mkl_is_the_slower.__wrapped__() == (is_slower and has_both)


def test_reduced_float32_precision_or_a_disabled_library_leaves_products_to_torch(monkeypatch):
    monkeypatch.setattr(products, "_mkl_is_the_slower", lambda: HAS_ONEDNN)
    monkeypatch.setattr(products, "_LARGE", 1)
    rows = gaussian(300, 200).mT
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert laid_out(rows) is rows
    finally:
        torch.set_float32_matmul_precision(before)
    torch._C._set_mkldnn_enabled(False)
    try:
        assert laid_out(rows) is rows
    finally:
        torch._C._set_mkldnn_enabled(True)
    assert laid_out(rows).is_contiguous() == HAS_ONEDNN
