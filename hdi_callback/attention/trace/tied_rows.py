"""`TiedRows`: scores that are summed over the rows of an alignment, so that all rows have one map of weights.

Queries, keys and values of such a core hold, side by side, what the same features of a head are in every row of tokens
(MSA Transformer, Rao et al. 2021). Its features are read from the first row; the other rows have the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hdi_callback.attention.layer.heads import INPUT_ROLES, Role
from hdi_callback.attention.trace.core_view import CoreView
from hdi_callback.attention.trace.cores import Core
from hdi_callback.attention.trace.support import columns_of
from hdi_callback.attention.trace.traced_run import TracedRun


@dataclass(frozen=True, eq=False)
class TiedRows:
    """Columns of queries, keys or values for each row of tokens.

    Attributes:
        columns: ``(rows, width)`` of queries and keys, the same feature of a head in each column of this.
        values: ``(rows, value width)`` of values.
    """

    columns: Tensor
    values: Tensor

    def first_row(self, core: Core, product: int) -> Core:
        """Select the first row of tokens in queries, keys or values.

        Args:
            core: the core.
            product: number of the score product.

        Returns:
            The core, whose output is that of all rows.
        """
        left, right = (side[..., self.columns[0]] for side in core.scores[product].sides)
        scores = list(core.scores)
        scores[product] = replace(core.scores[product], sides=(left, right))
        return replace(core, scores=tuple(scores), values=core.values[..., self.values[0]])


def tied_rows(view: CoreView) -> TiedRows | None:
    """Find the rows of tokens over which scores are summed.

    All of this must hold, at every token: a column of queries, keys and values is one feature of one token; those
    of a row have every feature of the head, the same ones in the same order as every other row; a query meets keys
    of its own row; and rows of values are in the order of those of keys.

    Args:
        view: of the core.

    Returns:
        The columns of each row; `None` where there are no such rows.
    """
    if view.units.count > 1 or not _is_of_copies(view, "query") or not _is_of_copies(view, "key"):
        return None
    query, key, value = (_columns(view.trace.run, view.tensor(role)) for role in INPUT_ROLES)
    if query is None or key is None or value is None or query.shape != key.shape or query.shape != value.shape:
        return None
    are_paired = torch.equal(query.columns, key.columns) and len(value.columns) == len(key.columns)
    if not are_paired or not all(_are_of_the_same_rows(columns.rows, key.rows) for columns in (query, value)):
        return None
    return TiedRows(key.columns, value.columns)


def _is_of_copies(view: CoreView, role: Role) -> bool:
    """Return whether a vector is as wide as its features times the tokens that it is made of, which are several."""
    tensor = view.tensor(role)
    found = view.trace.run.support(tensor, view.at(view.first, role)[:1])
    if len(found.masks) != 1:
        return False
    (leaf,) = found.masks
    count = len(found.positions(leaf))
    return count > 1 and count * len(found.features(leaf)) == tensor.shape[-1]


@dataclass(frozen=True, eq=False)
class _Columns:
    shape: Sequence[int]  # of the tokens that a map takes
    columns: Tensor  # (rows, width)
    rows: Tensor  # of each token, -1 where nothing depends on it


def _columns(run: TracedRun, tensor: Tensor) -> _Columns | None:
    """Read which column of a tensor each feature of each token is in."""
    codes = columns_of(tensor, run.tensors)
    if len(codes) != 1:
        return None
    ((leaf, code),) = codes.items()
    code = code[:, (code != -1).any(0)]
    is_live = (code != -1).any(1)
    if not is_live.any() or bool((code[is_live] < 0).any()):
        return None
    patterns, numbers = torch.unique(code[is_live], dim=0, return_inverse=True)  # (rows, features of all heads)
    rows = torch.full((len(code),), -1)
    rows[is_live] = numbers
    own, places = torch.unique(patterns[0], return_inverse=True)
    columns = torch.stack([patterns[:, (places == place).nonzero()[0, 0]] for place in range(len(own))], 1)
    are_alike = torch.equal(columns[:, places], patterns)  # each feature is in one column of each row
    is_whole = torch.equal(columns.flatten().sort().values, torch.arange(tensor.shape[-1]))
    if len(patterns) < 2 or not are_alike or not is_whole:
        return None
    return _Columns(tuple(run.leaves[leaf].output.shape[:-1]), columns, rows)


def _are_of_the_same_rows(one: Tensor, other: Tensor) -> bool:
    both = (one >= 0) & (other >= 0)
    return torch.equal(one[both], other[both]) and set(one[both].tolist()) == set(one[one >= 0].tolist())
