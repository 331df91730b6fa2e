"""First-order cost of losing heads, from the slopes that the backward of the armed step recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hdi_callback.core.contribution import ImportanceSums
from hdi_callback.monitoring.readings import Measurement


@dataclass(frozen=True)
class HeadImportance:
    """First-order cost of losing heads, over the mean of the layer's heads (`slope` is not divided).

    Attributes:
        importance: ``(H,)``, of each head; 1 is average.
        pairs: ``(G, G)``, of all heads of two key heads, and on the diagonal of those of one.
        worst_pair_one: of the less important of the two key heads whose keys overlap most.
        worst_pair_both: of both of them.
        slope: ``(H,)``, derivative, in a factor on the head, of the tensor that backward was called on.
    """

    importance: Tensor
    pairs: Tensor
    worst_pair_one: Tensor
    worst_pair_both: Tensor
    slope: Tensor


@dataclass(frozen=True)
class Importances:
    """Sums of head importance over a rank's sequences, of one layer.

    Attributes:
        heads: sums of the heads.
        groups: sums of the key heads, each with all of its query heads.
    """

    heads: ImportanceSums
    groups: ImportanceSums

    @classmethod
    def of(cls, slopes: Tensor, groups: int) -> Importances:
        """Add up sequences.

        Args:
            slopes: ``(sequences, H)``.
            groups: G, number of key heads; the heads of a group lie side by side.

        Returns:
            Their sums.
        """
        by_group = slopes.reshape(len(slopes), groups, -1).sum(-1)
        return cls(ImportanceSums.of_slopes(slopes), ImportanceSums.of_slopes(by_group))

    def tensors(self) -> list[Tensor]:
        """The tensors that add up over ranks, in a fixed order."""
        return [self.heads.slope, self.heads.pairs, self.groups.slope, self.groups.pairs]

    def averaged(self, ranks: Tensor) -> Importances:
        """The sums for the mean of the ranks' losses, which data-parallel training minimises.

        Args:
            ranks: number of ranks that were added up.

        Returns:
            The same sums with slopes divided by that number.
        """
        heads, groups = (replace(sums, slope=sums.slope / ranks) for sums in (self.heads, self.groups))
        return Importances(heads, groups)

    def importance(self, worst_pair: Tensor | None) -> HeadImportance:
        """Importance relative to the mean over heads.

        Args:
            worst_pair: ``(2,)``, two key heads, or -1; `None` if they are not known.

        Returns:
            The importance of heads and of pairs.
        """
        unit = self.heads.importance.mean()
        unit = torch.where(unit > 0, unit, torch.nan)
        pairs = self.groups.pairs / unit
        one = both = torch.full_like(unit, torch.nan)
        if worst_pair is not None:
            h, g = (index.clamp_min(0).long() for index in worst_pair.to(pairs.device))
            row = pairs.index_select(0, h[None])[0]
            single = pairs.diagonal()
            at = [values.index_select(0, index[None])[0] for values, index in ((row, g), (single, h), (single, g))]
            known = worst_pair.to(pairs.device)[0] >= 0
            both = torch.where(known, at[0], torch.nan)
            one = torch.where(known, torch.minimum(at[1], at[2]), torch.nan)
        return HeadImportance(self.heads.importance / unit, pairs, one, both, self.heads.slope)


def closest_pairs(measurements: Sequence[Measurement]) -> dict[str, Tensor]:
    """The two key heads of each layer whose keys overlap most.

    Args:
        measurements: the measurements of this reading.

    Returns:
        Layer name -> ``(2,)``, -1 where there is no pair.
    """
    return {
        name: measurement.values.worst_pair[row]
        for measurement in measurements
        if measurement.source == "key"
        for row, name in enumerate(measurement.layers)
    }
