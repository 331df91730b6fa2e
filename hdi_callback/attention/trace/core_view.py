"""`CoreView`: one attention core, cut into parts of one head each, with the query, keys and values of each part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hdi_callback.attention.layer.heads import INPUT_ROLES, Role
from hdi_callback.attention.trace.cores import Core
from hdi_callback.attention.trace.head_rows import Rows, Units
from hdi_callback.attention.trace.support import Support
from hdi_callback.attention.trace.traced_cores import TracedCores


@dataclass(frozen=True, eq=False)
class QueryKeys:
    """A query and the keys that a score product multiplies it with.

    Attributes:
        product: number of the product.
        side: that of the product on which the keys are.
        at_query: position of the query, counted over all ``N``.
        at_keys: positions of the keys, so counted.
    """

    product: int
    side: int
    at_query: Tensor
    at_keys: Tensor


@dataclass(eq=False)
class CoreView:
    """One core of a traced run, with queries and keys on the sides of one of its score products.

    Attributes:
        trace: the run.
        number: of the core.
        core: what is read of it; the first of several copies where all of it is made of such.
        units: its parts, each of which is of one head.
        query_keys: number of a part -> the query and the keys of one token.
        tokens: places of the keys that are read, where others are of another stream.
    """

    trace: TracedCores
    number: int
    core: Core
    units: Units
    query_keys: dict[int, QueryKeys]
    tokens: Tensor | None = None

    @property
    def first(self) -> int:
        """Number of the first part."""
        return next(iter(self.query_keys))

    @property
    def product(self) -> int:
        """Number of the score product."""
        return self.query_keys[self.first].product

    def tensor(self, role: Role, core: Core | None = None) -> Tensor:
        """Return the queries, keys or values that attention multiplies, ``(N, positions, width)``.

        Args:
            role: queries, keys or values.
            core: the same core of another run; this one by default.

        Returns:
            The tensor.
        """
        core = self.core if core is None else core
        if role == "value":
            return core.values
        side = self.query_keys[self.first].side
        return core.scores[self.product].sides[side if role == "key" else 1 - side]

    def at(self, unit: int, role: Role) -> Tensor:
        """Return the positions of a part in its queries, keys or values, counted over all ``N``."""
        if role == "query":
            return self.query_keys[unit].at_query
        count = self.tensor(role).shape[1]
        of_unit = torch.arange(count) + unit // self.units.count * count
        found = self.query_keys[unit].at_keys if role == "key" else of_unit
        return found if self.tokens is None else found[torch.isin(found % count, self.tokens)]

    def keep_tokens(self, places: Iterable[int]) -> None:
        """Skip keys and values of other tokens from here on."""
        self.tokens = torch.tensor([*places])

    @cached_property
    def supports(self) -> dict[int, dict[Role, Support]]:
        """For each part the supports of its query, keys and values."""
        found: dict[int, dict[Role, Support]] = {unit: {} for unit in self.query_keys}
        for role in INPUT_ROLES:
            parts = [self.at(unit, role) for unit in self.query_keys]
            supports = Support.of_each(self.tensor(role), parts, self.trace.run.tensors)
            for unit, support in zip(self.query_keys, supports):
                found[unit][role] = support
        return found


def own_columns(columns: Mapping[tuple[str, int], int], rows: Iterable[Rows], width: int) -> list[int]:
    """Return the columns of queries or keys on which the features of heads act, all if one of them shows none.

    Args:
        columns: of each feature, see `TracedRun.columns`.
        rows: of the heads.
        width: how many columns there are.

    Returns:
        The columns, ascending.
    """
    own = {columns.get((row.parameter, feature), -2) for row in rows for feature in row.features}
    return list(range(width)) if -2 in own else sorted(own)
