"""`HeadProduct` and `HeadPieces`: the weight of heads in several linear maps, in a row or side by side."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from hdi_callback.attention.layer.head_slice import HeadSlice, owner_of
from hdi_callback.attention.layer.weight_reading import read_tensor
from hdi_callback.errors import UnsupportedAttentionError


@dataclass(frozen=True)
class HeadProduct:
    r"""The heads' part of two linear maps, one after the other.

    .. math:: W_h = A_h \operatorname{diag}(g) B_h

    with :math:`A_h` a head's rows of the second map, :math:`B_h` rows of the first, and :math:`g` the gain of a norm in
    between. In latent attention all heads share :math:`B`; in knocking-heads attention they share :math:`A`. The norm's
    factor for each token leaves subspaces as they are.

    Attributes:
        module: the attention that both belong to.
        outer: heads of the second map, or a single one if all heads share it.
        inner: the part of the first map that the second one takes: a single head if all heads share it.
        gain: dotted path of the norm's gain, ``""`` if there is none.
        gain_offset: added to the gain, 1 where a norm keeps its gain less one.
    """

    module: nn.Module
    outer: HeadSlice
    inner: HeadSlice
    gain: str = ""
    gain_offset: float = 0.0

    @property
    def parameter(self) -> str:
        """Empty, as there is no single parameter: it depends on all that `module` holds."""
        return ""

    @property
    def heads(self) -> int:
        """Number of heads."""
        return max(self.outer.heads, self.inner.heads)

    def moved_to(self, module: nn.Module) -> HeadProduct:
        """The same slice of another module.

        Args:
            module: a module with the same parameters.

        Returns:
            The product of the same parts.
        """
        return replace(self, module=module, outer=self.outer.moved_to(module), inner=self.inner.moved_to(module))

    @property
    def by_token(self) -> HeadSlice:
        """The last of the maps that is called on whole tokens; one that all heads share is called on each head."""
        return self.outer if self.inner.heads == 1 else self.inner

    @property
    def width(self) -> int:
        """Features per head."""
        return self.outer.width

    @property
    def in_features(self) -> int:
        """Features that the first map takes."""
        return self.inner.in_features

    def rows(self) -> Tensor:
        """Multiply both maps.

        Returns:
            ``(heads, width, in_features)``, computed anew.

        Raises:
            UnsupportedAttentionError: if a weight or the gain is not there any more.
        """
        outer, inner = self.outer.rows(), self.inner.rows()
        # Neither autocast nor TF32 may round what is measured.
        with torch.autocast(inner.device.type, enabled=False):
            if self.gain:
                gain = read_tensor(*owner_of(self.module, self.gain))
                if gain is None:
                    raise UnsupportedAttentionError(f"There is no gain `{self.gain}` any more.")
                outer = outer * (gain + self.gain_offset)
            product: Tensor = outer @ inner.to(outer.dtype)
            return product

    def columns(self) -> Tensor:
        """Refuse: no output projection is read as a product.

        Raises:
            UnsupportedAttentionError: always.
        """
        raise UnsupportedAttentionError("An output projection that is a product of two maps cannot be read.")

    def contradiction(self, is_output: bool) -> str | None:
        """Return how the shapes of the parameters contradict these slices.

        Args:
            is_output: the heads are blocks of input features.

        Returns:
            A predicate of "its weight", `None` if there is no contradiction.
        """
        if is_output:
            return "is a product of two maps"
        found = self.outer.contradiction(False) or self.inner.contradiction(False)
        fits = self.inner.width == self.outer.in_features and 1 in (self.inner.heads, self.outer.heads)
        if found is None and not fits:
            return f"takes {self.outer.in_features} features of {self.inner.heads} x {self.inner.width}"
        return found


@dataclass(frozen=True)
class HeadPieces:
    """The heads' part of several linear maps, as of a map for each head.

    Attributes:
        module: the module that they belong to.
        pieces: some heads each, all of one width, in the order of heads.
    """

    module: nn.Module
    pieces: tuple[HeadSlice, ...]

    @property
    def parameter(self) -> str:
        """Empty, as there is no single parameter: it depends on all that `module` holds."""
        return ""

    @property
    def heads(self) -> int:
        """Number of heads."""
        return sum(piece.heads for piece in self.pieces)

    @property
    def width(self) -> int:
        """Features per head."""
        return self.pieces[0].width

    @property
    def in_features(self) -> int:
        """Features that each of the maps takes."""
        return self.pieces[0].in_features

    @property
    def by_token(self) -> HeadSlice:
        """The first of the maps."""
        return self.pieces[0]

    def moved_to(self, module: nn.Module) -> HeadPieces:
        """The same slice of another module.

        Args:
            module: a module with the same parameters.

        Returns:
            The same pieces.
        """
        return replace(self, module=module, pieces=tuple(piece.moved_to(module) for piece in self.pieces))

    def rows(self) -> Tensor:
        """Read the rows of all heads.

        Returns:
            ``(heads, width, in_features)``, a copy.
        """
        return torch.cat([piece.rows() for piece in self.pieces])

    def columns(self) -> Tensor:
        """Read the columns of all heads.

        Returns:
            ``(heads, width, out_features)``, a copy.
        """
        return torch.cat([piece.columns() for piece in self.pieces])

    def bias(self) -> Tensor | None:
        """Read the bias of each head.

        Returns:
            ``(heads, width)``; `None` if a piece has none.
        """
        found = [bias for piece in self.pieces if (bias := piece.bias()) is not None]
        return torch.cat(found) if len(found) == len(self.pieces) else None

    def contradiction(self, is_output: bool) -> str | None:
        """Return how the shapes of the parameters contradict these slices.

        Args:
            is_output: the heads are blocks of input features.

        Returns:
            A predicate of "its weight", `None` if there is no contradiction.
        """
        if len({(piece.width, piece.in_features) for piece in self.pieces}) != 1:
            return "is made of maps of different sizes"
        return next((why for piece in self.pieces if (why := piece.contradiction(is_output)) is not None), None)


def single_maps(parts: Iterable[HeadSlice | HeadProduct | HeadPieces]) -> Iterator[HeadSlice]:
    """Return the maps that the weights of heads are made of, one by one.

    Args:
        parts: of one linear map or several each.

    Yields:
        The part of each map.
    """
    for part in parts:
        if isinstance(part, HeadProduct):
            yield from (part.outer, part.inner)
        elif isinstance(part, HeadPieces):
            yield from part.pieces
        else:
            yield part
