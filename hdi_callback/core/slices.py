r"""Products of float32 matrices as exact as in float64, from low-precision products that devices do fast.

Consumer GPUs do float64 at 1/64 of the rate of float32, and tensor cores round their inputs. So each row is cut into
slices of eight bits: whole numbers that bfloat16, TF32 and float32 hold exactly. Their products, and sums of 1024 of
these, stay within the 24 bits of float32. After Ozaki, Ogita, Oishi and Rump 2012.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SLICES = 3  # 24 bits below the largest entry of a row
_TERMS = 1024  # products of two slices are at most 2^14, so that their sum is at most 2^24
# Volta, Ampere, Hopper and Blackwell of data centres; Pascal's P100.
_FAST_FLOAT64 = {(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)}


def has_fast_float64(device: torch.device) -> bool:
    """Return whether float64 products cost a small multiple of float32 products.

    Args:
        device: where the product is to be formed.

    Returns:
        False for NVIDIA GPUs that are not made for data centres; True for CPUs and where it is not known.
    """
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return True
    return torch.cuda.get_device_capability(device) in _FAST_FLOAT64


def sliced_gram(rows: Tensor) -> Tensor:
    """Multiply rows with themselves, without float64 products.

    Args:
        rows: ``(..., k, d)``, float32 or narrower.

    Returns:
        ``(..., k, k)``, in float64: the exact Gram matrix of rows that were rounded to 2^-24 of their largest entry's
        power of two.
    """
    slices, exponent = _cut(rows, dim=-1)
    k, d = rows.shape[-2:]
    gram = torch.zeros(*rows.shape[:-1], k, dtype=torch.float64, device=rows.device)
    for start in range(0, d, _TERMS):
        parts = [piece[..., start : start + _TERMS] for piece in slices]
        for i, left in enumerate(parts):
            for j, right in enumerate(parts[i:], i):
                product = (left @ right.mT).double() * 2.0 ** -(14 + 8 * (i + j))
                gram += product if i == j else product + product.mT
    scale = torch.ldexp(torch.ones_like(gram[..., :1]), exponent)
    return gram * scale * scale.mT


def sliced_product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply a small matrix with the rows of a head, in float32 that TF32 cannot spoil.

    Args:
        left: ``(..., k, m)``, at most 1024 columns in one product; more are added up.
        right: ``(..., m, d)``.

    Returns:
        ``(..., k, d)``, in float32; each term to 2^-22 of the largest entries of its row of `left` and its column of
        `right`.
    """
    left_slices, left_exponent = _cut(left, dim=-1)
    right_slices, right_exponent = _cut(right, dim=-2)
    product = torch.zeros(*left.shape[:-1], right.shape[-1], dtype=torch.float32, device=left.device)
    # From the smallest to the largest; smaller ones still are below rounding.
    for total in reversed(range(_SLICES + 1)):
        for i in range(max(0, total - _SLICES + 1), min(total, _SLICES - 1) + 1):
            for start in range(0, left.shape[-1], _TERMS):
                a = left_slices[i][..., start : start + _TERMS]
                b = right_slices[total - i][..., start : start + _TERMS, :]
                product += (a @ b) * 2.0 ** -(14 + 8 * total)
    return torch.ldexp(torch.ldexp(product, left_exponent), right_exponent)


def _cut(matrix: Tensor, dim: int) -> tuple[list[Tensor], Tensor]:
    """Cut into whole numbers of at most 2^7 in size: matrix = 2^exponent (s_0 2^-7 + s_1 2^-15 + s_2 2^-23)."""
    _, exponent = torch.frexp(matrix.abs().amax(dim, keepdim=True))
    rest = torch.ldexp(matrix, 7 - exponent)
    slices = []
    for _ in range(_SLICES):
        piece = rest.round()
        slices.append(piece.float())
        rest = (rest - piece) * 256
    return slices, exponent
