"""`CoreView`: one attention core, and what its queries, keys and values depend on."""

from __future__ import annotations

from torch import Tensor

from hdi_callback.attention.trace.cores import Core
from hdi_callback.attention.trace.head_rows import Rows, Units
from hdi_callback.attention.trace.support import Support, agreed, columns_of, random_weights, weights_at
from hdi_callback.attention.trace.traced_cores import TracedCores


class CoreView:
    """One core of a traced run.

    Args:
        trace: the run.
        number: of the core.
        units: its parts, each of which is of one head.
        core: what is read in its place, where all of it is several copies of one part.
    """

    def __init__(self, trace: TracedCores, number: int, units: Units | None = None, core: Core | None = None) -> None:
        self.trace, self.number, self.core = trace, number, trace.cores[number] if core is None else core
        self.units = Units() if units is None else units

    def side(self, number: int, side: int) -> Tensor:
        """Give one factor of a score product: ``left`` for 0, ``right`` for 1, ``(N, positions, width)``."""
        product = self.core.scores[number]
        return product.right if side else product.left

    def support(self, tensor: Tensor, positions: Tensor) -> Support:
        """Derive a tensor at some positions, counted over all dims but the last, by what maps gave."""
        return Support.of(tensor, weights_at(tensor, positions), self.trace.tensors)

    def matrix_behind_values(self) -> str | None:
        """Give the path of a matrix that values are made with, where that is no linear map."""
        values, others = self.core.values, self.trace.run.others
        made = Support.of(values, random_weights(values.shape), list(others.values()))
        found = [name for name in (list(others)[at] for at in made.masks) if name.startswith("parameter")]
        return next((name.removeprefix("parameter ") for name in found if _is_matrix(others[name])), None)

    def columns(self, tensor: Tensor) -> dict[tuple[str, int], set[int]]:
        """Features of maps -> the columns of a tensor that they act on, -2 for several at once."""
        columns: dict[tuple[str, int], set[int]] = {}
        for leaf, code in columns_of(tensor, self.trace.tensors).items():
            start, parameter = self.trace.leaves[leaf].start, self.trace.parameter_of(leaf)
            read = agreed(code)
            features = (read != -1).nonzero().flatten()
            for feature, column in zip(features.tolist(), read[features].tolist()):
                columns.setdefault((parameter, start + feature), set()).add(column)
        return columns

    def own_columns(self, rows: list[Rows], product: int, side: int) -> list[int]:
        """Columns of queries or keys on which the features of heads act, all if one of them shows none."""
        columns = self.columns(self.side(product, side))
        own = {at for one in rows for feature in one.features for at in columns.get((one.parameter, feature), {-2})}
        return list(range(self.side(product, side).shape[-1])) if -2 in own else sorted(own)


def _is_matrix(parameter: Tensor) -> bool:
    return sum(size > 1 for size in parameter.shape) > 1
