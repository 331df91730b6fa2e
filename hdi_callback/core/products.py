r"""`HeadProducts`: products of the heads of a layer with each other, which one function leaves for another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class HeadProducts:
    r"""The upper triangle of :math:`W W^\top` of one layer, in chunks of heads, in float32.

    Attributes:
        parts: pairs of a slice of heads and their products with all heads from the first of them on, ``(heads, k,
            others, k)``; the slices follow each other.
        norm: ``(H,)``, what each head was divided by before; ones if by nothing.
    """

    parts: tuple[tuple[slice, Tensor], ...]
    norm: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes that the parts take."""
        return sum(part.numel() * part.element_size() for _, part in self.parts)

    def scales(self, part: slice) -> Tensor:
        """Give what the products of a chunk are to be multiplied with.

        Args:
            part: one of the slices.

        Returns:
            ``(heads, others)``.
        """
        return self.norm[part, None] * self.norm[None, part.start :]


def products_of(flat: Tensor, heads: int, parts: Iterator[slice]) -> Iterator[tuple[slice, Tensor]]:
    """Multiply the heads of one layer with each other, the upper triangle alone.

    Args:
        flat: ``(H k, d)``.
        heads: H.
        parts: slices of the heads, in order.

    Yields:
        Each slice, and its products with all heads from its first one on, ``(heads, k, others, k)``.
    """
    k = flat.shape[0] // heads
    for part in parts:
        product = flat[part.start * k : part.stop * k] @ flat[part.start * k :].T
        yield part, product.view(part.stop - part.start, k, heads - part.start, k)
