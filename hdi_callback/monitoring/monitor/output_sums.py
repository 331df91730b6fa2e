"""`OutputSums`: what ranks add up of the head outputs of one layer."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from hdi_callback.attention import AttentionLayer
from hdi_callback.core.contribution import ContributionSums, ImportanceSums
from hdi_callback.core.covariance import HeadSums
from hdi_callback.monitoring.metrics import CONTRIBUTION, COVARIANCE, IMPORTANCE
from hdi_callback.monitoring.monitor.importance import Importances


@dataclass
class OutputSums:
    """Sums over the tokens of one layer that a rank holds.

    Attributes:
        covariance: of the covariance term; `None` if it is not asked for.
        contribution: of the contributions; `None` if they are not asked for. Beside a covariance it is of the mean
            token alone, and on one rank: what differs from it is in the covariance.
        not_finite: ``(H,)``, how many ranks saw an output that is not finite.
        importance: of their importance; `None` if it is not asked for.
        followed: how many ranks know it.
    """

    covariance: HeadSums | None
    contribution: ContributionSums | None
    not_finite: Tensor | None
    importance: Importances | None = None
    followed: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """Give what adds up, in a fixed order, but for the scatter, which adds up in a buffer of all layers."""
        covariance = None if self.covariance is None else replace(self.covariance, scatter=None)
        parts = [covariance, self.contribution]
        found = [getattr(part, item.name) for part in parts if part is not None for item in fields(part)]
        found += [] if self.importance is None else self.importance.tensors()
        return [tensor for tensor in (*found, self.not_finite, self.followed) if tensor is not None]

    def added_up(self, added: Iterator[Tensor]) -> OutputSums:
        """Take the same tensors over all ranks; the scatter is over all of them already."""

        def take(part: Any) -> Any:
            if part is None:
                return None
            values = {item.name: getattr(part, item.name) for item in fields(part)}
            return type(part)(**{name: None if value is None else next(added) for name, value in values.items()})

        scatter = None if self.covariance is None else self.covariance.scatter
        covariance = None if self.covariance is None else take(replace(self.covariance, scatter=None))
        contribution = take(self.contribution)
        covariance = None if covariance is None else replace(covariance, scatter=scatter)
        importance = None
        if self.importance is not None:
            heads, groups = take(self.importance.heads), take(self.importance.groups)
            importance = Importances(heads, groups)
        counts = [None if count is None else next(added) for count in (self.not_finite, self.followed)]
        return OutputSums(covariance, contribution, counts[0], importance, counts[1])

    def mean_and_products(self) -> list[Tensor]:
        """Give what is computed of output weights, in a fixed order."""
        assert self.covariance is not None
        of_mean = [] if self.contribution is None else [self.contribution.heads, self.contribution.output]
        return [self.covariance.products, *of_mean]

    def take_mean_and_products(self, added: Iterator[Tensor]) -> None:
        """Take the same over all ranks."""
        assert self.covariance is not None
        self.covariance = replace(self.covariance, products=next(added))
        if self.contribution is not None:
            self.contribution = replace(self.contribution, heads=next(added), output=next(added))

    def contributions(self) -> ContributionSums | None:
        """Add what tokens contribute beside their mean, once all is added up.

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
        layer: AttentionLayer, sources: Collection[str], device: torch.device, *, scatter: Tensor | None
    ) -> OutputSums:
        """Make the sums over no tokens.

        Args:
            layer: which.
            sources: what is measured.
            device: where they add up.
            scatter: room for the scatter, zeros; `None` if the overlap of outputs is not measured.

        Returns:
            Zeros of the shapes that every rank adds up.
        """
        H = layer.num_heads

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, device=device)

        covariance = contribution = count = None
        if COVARIANCE in sources:
            covariance = HeadSums(zeros(), zeros(H, H), scatter)
        if CONTRIBUTION in sources:
            contribution, count = ContributionSums(zeros(), zeros(H), zeros()), zeros(H)
        importance = followed = None
        if IMPORTANCE in sources:
            G = layer.num_key_heads
            importance = Importances(ImportanceSums(zeros(H), zeros(H, H)), ImportanceSums(zeros(G), zeros(G, G)))
            followed = zeros()
        return OutputSums(covariance, contribution, count, importance, followed)
