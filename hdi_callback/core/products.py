r"""Products of the heads of a layer with each other, and `HeadProducts`, which hands them to another function.

torch multiplies float32 on CPUs with MKL, which does not use AVX-512 on AMD's; oneDNN, also a part of torch, does, in
less than half of the time. So oneDNN forms large products there, through the operator that torch's own compiler calls.
It adds in another order, with rounding of the same size.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter


@dataclass(frozen=True)
class HeadProducts:
    r"""The upper triangle of :math:`W W^\top` of one layer, in chunks of heads, in float32.

    Attributes:
        parts: pairs of a slice of heads and their products with all heads from the first of them on, ``(heads, k,
            others, k)``; the slices follow each other.
        norm: ``(H,)``, norm by which each head was divided before; ones if it was not.
    """

    parts: tuple[tuple[slice, Tensor], ...]
    norm: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes that the parts take."""
        return sum(part.numel() * part.element_size() for _, part in self.parts)

    def scales(self, part: slice) -> Tensor:
        """Factors that undo the division by norms in a chunk.

        Args:
            part: one of the slices.

        Returns:
            ``(heads, others)``.
        """
        return self.norm[part, None] * self.norm[None, part.start :]


def products_of(flat: Tensor, heads: int, parts: Iterator[slice]) -> Iterator[tuple[slice, Tensor]]:
    """Multiply the heads of one layer with each other, upper triangle only.

    Args:
        flat: ``(H k, d)``.
        heads: H.
        parts: slices of the heads, in order.

    Yields:
        Each slice, and its products with all heads from its first one on, ``(heads, k, others, k)``.
    """
    k = flat.shape[0] // heads
    flat = laid_out(flat)
    for part in parts:
        product = row_products(flat[part.start * k : part.stop * k], flat[part.start * k :])
        yield part, product.view(part.stop - part.start, k, heads - part.start, k)


_LARGE = 2**24
"""Number of multiplications from which on choosing the faster library pays."""

_COPIED = 2**24
"""Largest number of entries to copy for contiguous rows, which oneDNN needs and MKL does not."""


def row_products(left: Tensor, right: Tensor) -> Tensor:
    """Multiply every row of one matrix with every row of another.

    Args:
        left: ``(..., m, d)``.
        right: ``(..., n, d)``.

    Returns:
        ``left @ right.mT``, ``(..., m, n)``.
    """
    if _suit_onednn(left, right) and left.is_contiguous() and right.is_contiguous():
        d = left.shape[-1]
        product: Tensor = torch.ops.mkldnn._linear_pointwise(left.view(-1, d), right.view(-1, d), None, "none", [], "")
        return product.view(*left.shape[:-1], right.shape[-2])
    return left @ right.mT


def laid_out(rows: Tensor) -> Tensor:
    """Make rows contiguous where their `row_products` with each other is faster then.

    Args:
        rows: ``(..., n, d)``.

    Returns:
        The same rows; a copy if `gains_by_layout`.
    """
    return rows.contiguous() if gains_by_layout(rows) else rows


def gains_by_layout(rows: Tensor) -> bool:
    """Return whether a contiguous copy of rows pays for `row_products` of them with each other.

    Args:
        rows: ``(..., n, d)``.

    Returns:
        False if they are contiguous, too many to copy, or it makes no difference.
    """
    return not rows.is_contiguous() and rows.numel() <= _COPIED and _suit_onednn(rows, rows)


def _suit_onednn(left: Tensor, right: Tensor) -> bool:
    """Return whether oneDNN is to multiply one large matrix of float32 with another."""
    return (
        left.numel() * right.shape[-2] >= _LARGE
        and _mkl_is_the_slower()
        and _is_plain_matrix(left)
        and (right is left or _is_plain_matrix(right))
        and bool(torch.backends.mkldnn.enabled)
        and not torch.compiler.is_compiling()
        and _is_float32_kept()
    )


def _is_plain_matrix(rows: Tensor) -> bool:
    """Return whether this is one matrix of float32 on a CPU that autograd does not record."""
    return (
        type(rows) in (Tensor, Parameter)
        and rows.dtype == torch.float32
        and rows.is_cpu
        and (rows.dim() == 2 or rows.shape[:-2].numel() == 1)
        and not (rows.requires_grad and torch.is_grad_enabled())
        and not torch._C._functorch.is_functorch_wrapped_tensor(rows)
    )


def _is_float32_kept() -> bool:
    """Return whether no setting allows float32 to be rounded before it is multiplied."""
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # set for each backend by itself, which torch allows from 2.9 on
        return False


@functools.cache
def _mkl_is_the_slower() -> bool:
    """Return whether this is a CPU with AVX-512 that MKL does not use, and torch has both libraries."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):  # type: ignore[no-untyped-call]
        return False
    if "AVX512" not in torch.backends.cpu.get_cpu_capability() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    return "AuthenticAMD" in _maker_of_cpu()


def _maker_of_cpu() -> str:
    """Vendor of the CPU, such as "AuthenticAMD"; another text where it is not known."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            return next((line for line in file if line.startswith("vendor_id")), "")
    except OSError:  # no Linux
        return platform.processor()
