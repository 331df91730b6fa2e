"""`OutputSums`: sums of one layer's head outputs that add up over ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from hdi_callback.attention import AttentionLayer
from hdi_callback.core.contribution import ContributionSums, ImportanceSums
from hdi_callback.core.head_sums import HeadSums
from hdi_callback.core.products import HeadProducts
from hdi_callback.monitoring.metrics import CONTRIBUTION, COVARIANCE, IMPORTANCE
from hdi_callback.monitoring.monitor.importance import Importances


@dataclass
class OutputSums:
    """Sums over a rank's tokens of one layer.

    Attributes:
        covariance: sums of the covariance term, without a scatter; `None` if it is not asked for.
        contribution: sums of the contributions; `None` if they are not asked for. With a covariance they are those of
            the mean token alone, on one rank: the rest is in the covariance.
        not_finite: ``(H,)``, number of ranks with an output that is not finite.
        importance: sums of head importance; `None` if it is not asked for.
        followed: number of ranks that have measured it.
        squares: ``(H, H)``, squared norms of the blocks of the scatter over all ranks, on one of them; `None` if the
            overlap of outputs is not measured.
    """

    covariance: HeadSums | None
    contribution: ContributionSums | None
    not_finite: Tensor | None
    importance: Importances | None = None
    followed: Tensor | None = None
    squares: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """The tensors that add up over ranks, in a fixed order."""
        parts = [self.covariance, self.contribution]
        found = [getattr(part, item.name) for part in parts if part is not None for item in fields(part)]
        found += [] if self.importance is None else self.importance.tensors()
        found += [self.not_finite, self.followed, self.squares]
        return [tensor for tensor in found if tensor is not None]

    def added_up(self, added: Iterator[Tensor]) -> OutputSums:
        """Replace the tensors by their sums over all ranks."""

        def take(part: Any) -> Any:
            if part is None:
                return None
            values = {item.name: getattr(part, item.name) for item in fields(part)}
            return type(part)(**{name: None if value is None else next(added) for name, value in values.items()})

        covariance, contribution = take(self.covariance), take(self.contribution)
        importance = None
        if self.importance is not None:
            heads, groups = take(self.importance.heads), take(self.importance.groups)
            importance = Importances(heads, groups)
        last = [None if one is None else next(added) for one in (self.not_finite, self.followed, self.squares)]
        return OutputSums(covariance, contribution, last[0], importance, *last[1:])

    def mix(self, scatter: Tensor, mean: Tensor, weight: Tensor, products: HeadProducts | None) -> None:
        """Compute covariance and overlap from the scatter over all ranks, on one of them.

        Args:
            scatter: see `HeadSums`.
            mean: of the head outputs over all ranks, ``(H, d_v)``.
            weight: of the output projection, ``(H, d_v, d)``.
            products: as `HeadSums.mixed` takes them.
        """
        assert self.covariance is not None
        whole = replace(self.covariance, scatter=scatter).mixed(weight, products)
        self.covariance, self.squares = replace(whole, scatter=None), whole.squares()
        self.add_mean(mean, weight)

    def add_mean(self, mean: Tensor, weight: Tensor) -> None:
        """Add the contribution of the mean token; arguments as for `mix`."""
        if self.contribution is not None and self.covariance is not None:
            wide = torch.promote_types(weight.dtype, torch.float32)
            heads = (mean.to(weight.device, wide)[:, None, :] @ weight.to(wide))[:, 0].to(mean.device, torch.float64)
            squares = heads.square().sum(-1), heads.sum(0).square().sum()
            self.contribution = ContributionSums(torch.zeros_like(squares[1]), *squares)

    def lose(self) -> None:
        """Mark the results of `mix` as unknown."""
        assert self.covariance is not None
        assert self.squares is not None
        self.covariance = replace(self.covariance, products=self.covariance.products + torch.nan)
        self.squares = self.squares + torch.nan
        if self.contribution is not None:
            lost = self.contribution.heads + torch.nan
            self.contribution = replace(self.contribution, heads=lost, output=self.contribution.output + torch.nan)

    def contributions(self) -> ContributionSums | None:
        """Contributions of all tokens, once ranks are added up: those of the mean and of the deviations from it.

        Returns:
            Sums over all tokens; `None` if they are not asked for.
        """
        if self.contribution is None or self.covariance is None:
            return self.contribution
        count, products = self.covariance.count, self.covariance.products
        heads = products.diagonal() + count * self.contribution.heads
        output = products.sum() + count * self.contribution.output
        return ContributionSums(count, heads.clamp_min(0), output.clamp_min(0))

    @staticmethod
    def zeros(
        layer: AttentionLayer, sources: Collection[str], device: torch.device, *, with_overlap: bool
    ) -> OutputSums:
        """Sums over no tokens.

        Args:
            layer: the layer.
            sources: what is measured.
            device: the device of the sums.
            with_overlap: measure the overlap of outputs.

        Returns:
            Zeros of the shapes that every rank adds up.
        """
        H = layer.num_heads

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, device=device)

        covariance = contribution = count = None
        if COVARIANCE in sources:
            covariance = HeadSums(zeros(), zeros(H, H))
        if CONTRIBUTION in sources:
            contribution, count = ContributionSums(zeros(), zeros(H), zeros()), zeros(H)
        importance = followed = None
        if IMPORTANCE in sources:
            G = layer.num_key_heads
            importance = Importances(ImportanceSums(zeros(H), zeros(H, H)), ImportanceSums(zeros(G), zeros(G, G)))
            followed = zeros()
        squares = zeros(H, H) if with_overlap else None
        return OutputSums(covariance, contribution, count, importance, followed, squares)
