"""`CoreParts`: the parts of a core, and the query and the keys that the scores of each are computed from."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hdi_callback.attention.trace.core_view import QueryKeys
from hdi_callback.attention.trace.cores import Core
from hdi_callback.attention.trace.graph_walk import is_rounded
from hdi_callback.attention.trace.head_rows import ROUNDED, NoHeadsError, UndecidedError, Units, named
from hdi_callback.attention.trace.support import Support, agreed, columns_of, element, random_weights
from hdi_callback.attention.trace.traced_cores import TracedCores

_MOST_QUERIES = 16  # that are traced back to their map
_NO_MAP = "its keys come from no linear map of single tokens: a filter over tokens may give them"
_NO_PARAMETER = "its keys are its inputs, or computed from them without a projection that can be read"
_LIVE = 1e-12  # a weight above this is of a token that is not masked


@dataclass(eq=False)
class CoreParts:
    """The parts of a core: its matrices of weights, or some rows of each.

    Attributes:
        trace: the run.
        number: of the core.
        row: the query that is read, whatever its mask; one that attends to most keys by default.
        is_last_first: the last of those is read, not the first.
        units: the parts.
    """

    trace: TracedCores
    number: int
    row: int | None = None
    is_last_first: bool = False
    units: Units = field(default_factory=Units)

    @property
    def core(self) -> Core:
        """The core."""
        return self.trace.cores[self.number]

    def find_units(self, n: int) -> Units:
        """Group the rows of one matrix of weights by head, where several heads share its keys."""
        run, count = self.trace.run, self.core.weights.shape[1]
        row = int((self.core.weights[n] > _LIVE).sum(-1).gt(1).to(torch.uint8).argmax())  # under a causal mask not 0
        of_rows_at_ends = [self._query_keys_of_row(n, one) for one in (row, count - 1)]
        if count < 4 or any(len(one) != 1 for one in of_rows_at_ends):
            return Units()
        first, last = (one[0] for one in of_rows_at_ends)
        queries = self.core.scores[first.product].sides[1 - first.side]
        is_own = [one.at_query.tolist() for one in (first, last)] == [[n * count + row], [n * count + count - 1]]
        are_alike = (first.product, first.side) == (last.product, last.side)
        if not is_own or not are_alike or queries.shape[:2].numel() != self.core.weights.shape[:2].numel():
            return Units()
        queries = queries.reshape(*self.core.weights.shape[:2], -1)  # an einsum may put heads and tokens in one
        of_rows: list[set[tuple[str, int]]] = [set() for _ in range(count)]
        for number, codes in columns_of(queries[n].mT, run.tensors).items():
            leaf = run.leaves[number]
            positions, features = (codes >= 0).nonzero(as_tuple=True)
            for row, feature in zip(codes[positions, features].tolist(), features.tolist()):
                of_rows[row].add((leaf.parameter, leaf.start + feature))
        kinds: dict[frozenset[tuple[str, int]], list[int]] = {}
        for row, of_row in enumerate(of_rows):
            kinds.setdefault(frozenset(of_row), []).append(row)
        parts = list(kinds.values())
        maps = {frozenset(name for name, _ in of_row) for of_row in kinds}
        are_apart = sum(map(len, kinds)) == len(frozenset[tuple[str, int]]().union(*kinds))
        if (
            len(parts) < 2
            or len(maps) != 1
            or not all(kinds)
            or not are_apart
            or len({len(part) for part in parts}) != 1
        ):
            return Units()
        rows_of = self._rows_of_queries(n, first)
        return Units(tuple(rows_of[part] for part in parts)) if bool((rows_of >= 0).all()) else Units()

    def _rows_of_queries(self, n: int, pair: QueryKeys) -> Tensor:
        """Number the row of weights that each query computes: heads and tokens may be transposed."""
        is_right = not pair.side
        factor = self.core.scores[pair.product].factors[is_right]
        codes = columns_of(self.core.weights[n].mT, [factor]).get(0, torch.full((factor.numel(), 1), -1))
        matrices = codes.view(-1, *factor.shape[-2:])
        own = matrices.chunk(self.core.weights.shape[0])[n] if factor.dim() > 2 else matrices[:1]
        rows = torch.cat([agreed(matrix if is_right else matrix.mT) for matrix in own])
        unknown = rows == -1  # a query with a single key shows nothing: it is right if all others are
        is_same = bool((unknown | (rows == torch.arange(len(rows)))).all())
        return torch.arange(len(rows)) if is_same else rows

    def query_keys_of(self, unit: int) -> list[QueryKeys]:
        """Find the query and the keys of one part of the core in each score product.

        Args:
            unit: number of the part.

        Returns:
            One pair for each product; none where no query of the part meets several keys.
        """
        n, part = divmod(unit, self.units.count)
        own = self.units.rows[part] if self.units.rows else torch.arange(self.core.weights.shape[1])
        counts = (self.core.weights[n][own] > _LIVE).sum(-1)
        most = own[(counts == counts.max()).nonzero().flatten()].tolist()
        # The first of the queries that attend to most keys; where its keys are all padding, others.
        rows = [most[0], most[-1], most[len(most) // 2]]
        rows = rows[::-1] if self.is_last_first else rows
        rows = list(dict.fromkeys(rows if self.row is None else [self.row]))
        for row in rows:
            if pairs := self._query_keys_of_row(n, row):
                return pairs
        logits = self._logits()
        found = (self._query_keys_of_row(n, row, logits) for row in rows if logits is not None)
        return next((pairs for pairs in found if pairs), [])

    def _logits(self) -> Tensor | None:
        """Return the softmax input in the shape of the weights, for heads whose weights a mask silences or `None`."""
        if len(self.core.logits) != 1 or not self.core.logits[0].requires_grad or self.core.logits[0].dim() < 2:
            return None
        (logits,) = self.core.logits
        return logits if logits.reshape(-1, *logits.shape[-2:]).shape == self.core.weights.shape else None

    def _query_keys_of_row(self, n: int, row: int, made: Tensor | None = None) -> list[QueryKeys]:
        """Find the queries and keys that a row of the weights, or of the input of the softmax, is computed from."""
        weights = torch.zeros(self.core.weights.shape)
        count = weights.shape[-1]
        weights[n, row] = random_weights((count,))
        made = self.core.weights if made is None else made
        pairs = []
        for number, product in enumerate(self.core.scores):
            acting = product.acting_on(made, weights.view(made.shape))
            counts = [len(found) for found in acting]
            if min(counts) < 1 or max(counts) < 2:
                continue
            side = int(counts[1] >= counts[0])
            if min(counts) > 1 and (counts[0] == count) != (counts[1] == count):
                side = int(counts[1] == count)  # a softmax over queries, which may be more than keys
            pairs.append(QueryKeys(number, side, acting[1 - side], acting[side]))
        return pairs

    def of_query(self, pair: QueryKeys) -> Support:
        """Find the support of a query."""
        queries = self.core.scores[pair.product].sides[1 - pair.side]
        return self.trace.run.support(queries, pair.at_query)

    def of_keys(self, pair: QueryKeys) -> Support:
        """Find the support of keys."""
        return self.trace.run.support(self.core.scores[pair.product].sides[pair.side], pair.at_keys)

    def is_of_a_map(self, pairs: list[QueryKeys], product: int) -> bool:
        """Return whether the query of a part of the core is the output of a map.

        Args:
            pairs: of the part.
            product: number of the score product.

        Returns:
            False of a query that is learned, or an input as it is, as that of a class token may be.
        """
        return any(pair.product != product or bool(self.of_query(pair)) for pair in pairs)

    def row_of_others(self, maps: Collection[str]) -> int | None:
        """Find a query that is the output of other maps.

        Args:
            maps: parameters of the maps of a query that is known.

        Returns:
            Its row in the weights, the last there is; `None` if the same maps give all.
        """
        count = self.core.weights.shape[1]
        rows: set[int] = set(torch.linspace(0, count - 1, min(count, _MOST_QUERIES)).long().tolist())
        for row in sorted(rows, reverse=True):
            for pair in self._query_keys_of_row(0, row):
                found = self.trace.run.maps(self.of_query(pair))
                if found and set(found).isdisjoint(maps):
                    return row
        return None

    def product_of_tokens(self, unit: int, pairs: list[QueryKeys]) -> int:
        """Choose the product whose keys are of tokens, neither of positions nor learned.

        Args:
            unit: number of a part of the core.
            pairs: of that part.

        Returns:
            The number of the product.

        Raises:
            NoHeadsError: if scores are sums of several.
            UndecidedError: if there is none.
        """
        candidates = [pair for pair in pairs if any(map(self.trace.is_of_inputs, self.of_keys(pair).masks))]
        if not candidates:
            self._refuse_made_weights(pairs)
            if any(is_rounded(self.core.scores[pair.product].sides[pair.side]) for pair in pairs):
                raise NoHeadsError(ROUNDED.format(role="key"))
            sides = [self.core.scores[pair.product].sides[pair.side] for pair in pairs]
            why = next(filter(None, (self.trace.source_convolution("key", side) for side in sides)), "")
            parameters = list(self.trace.run.parameters.values())
            if not why and any(
                Support.of(side, self.trace.run.inputs) and not Support.of(side, parameters) for side in sides
            ):
                why = _NO_PARAMETER
            why = why or _NO_MAP
            raise UndecidedError(why)
        if len(candidates) > 1:
            n = unit // self.units.count
            candidates = [candidate for candidate in candidates if self._is_of_columns(n, candidate)] or candidates
        if len(candidates) > 1 and not self._are_alike(candidates):
            raise NoHeadsError(f"its scores are sums of several terms: {self._terms(candidates)}")
        return candidates[0].product

    def _are_alike(self, candidates: list[QueryKeys]) -> bool:
        """Return whether products have the same features of queries and keys, as blocks of tokens put together have."""
        features = self.trace.run.features
        found = [(features(self.of_query(candidate)), features(self.of_keys(candidate))) for candidate in candidates]
        return all(found[0]) and all(one == found[0] for one in found)

    def _terms(self, candidates: list[QueryKeys]) -> str:
        """The maps behind each of several products that are summed into scores, in words."""
        run, terms = self.trace.run, set()
        for candidate in candidates:
            sides = [run.maps(run.support(side)) for side in self.core.scores[candidate.product].sides]
            terms.add(f"{'a product' if all(sides) else 'what is made'} of {named(itertools.chain(*sides))}")
        return ", ".join(sorted(terms))

    def _refuse_made_weights(self, pairs: list[QueryKeys]) -> None:
        """Refuse keys whose projection weights are themselves the output of a map, as in a hypernetwork."""
        _, cores = self.trace.without_maps
        for pair in pairs:
            maps = self.trace.run.maps(self.of_keys(pair))
            if not maps or len(cores) != len(self.trace.cores) or pair.product >= len(cores[self.number].scores):
                continue
            # If the maps output zero, keys that add them keep their tokens; keys whose weights they are become zero.
            is_nothing = not cores[self.number].scores[pair.product].sides[pair.side].any()
            keys = self.core.scores[pair.product].sides[pair.side]
            if is_nothing and Support.of(keys, self.trace.run.inputs, pair.at_keys):
                raise UndecidedError(f"the weights of its key projection are computed by {named(sorted(maps))}")

    def _is_of_columns(self, n: int, pair: QueryKeys) -> bool:
        """Return whether two queries meet the same key in one column; keys of relative positions differ."""
        product = self.core.scores[pair.product]
        for logits in self.core.logits:
            flat = logits.reshape(-1, *logits.shape[-2:])
            rows, columns = flat.shape[-2:]
            if rows < 2 or flat.shape[0] != self.core.weights.shape[0]:
                continue
            for column in range(columns):
                keys = [
                    set(product.acting_on(flat, element(flat.shape, n, row, column))[pair.side].tolist())
                    for row in (rows - 1, rows - 2)
                ]
                if all(keys):
                    return not keys[0].isdisjoint(keys[1])
        return True
