"""`OutputSums`: what ranks add up of the head outputs of one layer."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields
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
        contribution: of the contributions; `None` if they are not asked for.
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
        """Give what adds up, in a fixed order."""
        parts = [self.covariance, self.contribution]
        found = [getattr(part, item.name) for part in parts if part is not None for item in fields(part)]
        found += [] if self.importance is None else self.importance.tensors()
        return [tensor for tensor in (*found, self.not_finite, self.followed) if tensor is not None]

    def added_up(self, added: Iterator[Tensor]) -> OutputSums:
        """Take the same tensors over all ranks."""

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
        counts = [None if count is None else next(added) for count in (self.not_finite, self.followed)]
        return OutputSums(covariance, contribution, counts[0], importance, counts[1])

    @staticmethod
    def zeros(
        layer: AttentionLayer, sources: Collection[str], device: torch.device, *, with_scatter: bool
    ) -> OutputSums:
        """Make the sums over no tokens.

        Args:
            layer: which.
            sources: what is measured.
            device: where they add up.
            with_scatter: whether the overlap of outputs is measured.

        Returns:
            Zeros of the shapes that every rank adds up.
        """
        H = layer.num_heads

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, device=device)

        covariance = contribution = count = None
        if COVARIANCE in sources:
            scatter = zeros(*2 * (layer.num_heads, layer.value_dim)) if with_scatter else None
            covariance = HeadSums(zeros(), zeros(H, H), scatter)
        if CONTRIBUTION in sources:
            contribution, count = ContributionSums(zeros(), zeros(H), zeros()), zeros(H)
        importance = followed = None
        if IMPORTANCE in sources:
            G = layer.num_key_heads
            importance = Importances(ImportanceSums(zeros(H), zeros(H, H)), ImportanceSums(zeros(G), zeros(G, G)))
            followed = zeros()
        return OutputSums(covariance, contribution, count, importance, followed)
