"""`CoreParts`: the parts of a core, and the queries and keys that each of them meets."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from hdi_callback.attention.trace.core_view import CoreView
from hdi_callback.attention.trace.head_rows import NoHeadsError, UndecidedError, Units, module_of
from hdi_callback.attention.trace.support import Support, columns_of, random_weights, weights_at

_MOST_QUERIES = 16  # that are asked which map gives them


class CoreParts(CoreView):
    """The parts of a core: its matrices of weights, or some rows of each.

    Attributes:
        is_last_first: of the queries that see most keys the last is looked at, and not the first.
        row: the query that is looked at, whatever it sees; any by default.
    """

    is_last_first = False
    row: int | None = None

    def find_units(self, n: int) -> Units:
        """Return whether rows of one matrix of weights are of several heads, which share its keys."""
        count = self.core.weights.shape[1]
        last = self._where_in_row(n, count - 1)
        row = int((self.core.weights[n] > 1e-12).sum(-1).gt(1).to(torch.uint8).argmax())  # under a causal mask not 0
        first = self._where_in_row(n, row)
        if count < 4 or len(first) != 1 or len(last) != 1 or first[0][:2] != last[0][:2]:
            return Units()
        number, keys, *_ = first[0]
        side = self.side(number, 1 - keys)
        expected = [[n * count + row], [n * count + count - 1]]
        if side.shape[:2] != self.core.weights.shape[:2] or [one[0][2].tolist() for one in (first, last)] != expected:
            return Units()
        of_rows: list[set[tuple[str, int]]] = [set() for _ in range(count)]
        for leaf, codes in columns_of(side[n].mT, self.trace.tensors).items():
            start, parameter = self.trace.leaves[leaf].start, self.trace.parameter_of(leaf)
            positions, features = (codes >= 0).nonzero(as_tuple=True)
            for row, feature in zip(codes[positions, features].tolist(), features.tolist()):
                of_rows[row].add((parameter, start + feature))
        kinds: dict[frozenset[tuple[str, int]], list[int]] = {}
        for row, of_row in enumerate(of_rows):
            kinds.setdefault(frozenset(of_row), []).append(row)
        parts = list(kinds.values())
        maps = {frozenset(name for name, _ in of_row) for of_row in kinds}
        are_apart = sum(map(len, kinds)) == len(frozenset[tuple[str, int]]().union(*kinds))
        if len(parts) < 2 or len(maps) != 1 or not all(kinds) or not are_apart or len({len(one) for one in parts}) != 1:
            return Units()
        return Units(tuple(torch.tensor(one) for one in parts))

    def where(self, unit: int) -> list[tuple[int, int, Tensor, Tensor]] | None:
        """For one part of the core: which elements of each score product it is made of.

        Returns:
            For each product: its number, on which side the keys are, positions of the query and of the keys.
        """
        n, part = divmod(unit, self.units.count)
        own = self.units.rows[part] if self.units.rows else torch.arange(self.core.weights.shape[1])
        live = (self.core.weights[n][own] > 1e-12).sum(-1)
        most = own[(live == live.max()).nonzero().flatten()].tolist()
        # The first of the queries that see most keys; where it sees padding alone, others.
        rows = [most[0], most[-1], most[len(most) // 2]]
        rows = rows[::-1] if self.is_last_first else rows
        rows = list(dict.fromkeys(rows if self.row is None else [self.row]))
        for row in rows:
            where = self._where_in_row(n, row)
            if where:
                return where
        logits = self._logits()
        found = (self._where_in_row(n, row, logits) for row in rows if logits is not None)
        return next((where for where in found if where), None)

    def _logits(self) -> Tensor | None:
        """Give what the softmax takes, one matrix for each of the weights: a mask of heads may silence those of one."""
        if len(self.core.logits) != 1 or not self.core.logits[0].requires_grad:
            return None
        (logits,) = self.core.logits
        return (
            logits
            if logits.dim() > 1 and logits.reshape(-1, *logits.shape[-2:]).shape == self.core.weights.shape
            else None
        )

    def is_of_a_map(self, where: list[tuple[int, int, Tensor, Tensor]], product: int) -> bool:
        """Return whether a map gives the query of a part of the core.

        Args:
            where: see `where`.
            product: number of the score product.

        Returns:
            False of a query that is learned, or an input as it is, as that of a class token may be.
        """
        return any(
            number != product or bool(self.support(self.side(number, 1 - keys), at_query))
            for number, keys, at_query, _ in where
        )

    def row_of_others(self, maps: Collection[str]) -> int | None:
        """Find a query that other maps give.

        Args:
            maps: those that give a query which is known, by their parameters.

        Returns:
            Its row in the weights, the last there is; `None` if the same maps give all.
        """
        count = self.core.weights.shape[1]
        rows: set[int] = set(torch.linspace(0, count - 1, min(count, _MOST_QUERIES)).long().tolist())
        for row in sorted(rows, reverse=True):
            for number, keys, at_query, _ in self._where_in_row(0, row):
                found = self.support(self.side(number, 1 - keys), at_query)
                if found and not {self.trace.parameter_of(leaf) for leaf in found.masks} & set(maps):
                    return row
        return None

    def _where_in_row(self, n: int, row: int, logits: Tensor | None = None) -> list[tuple[int, int, Tensor, Tensor]]:
        weights = self.core.weights
        gradient = torch.zeros(weights.shape)
        gradient[n, row] = random_weights(weights.shape[-1:])
        made = weights if logits is None else logits
        where = []
        for number, product in enumerate(self.core.scores):
            acts = product.acting_on(made, gradient.view(made.shape))
            if not len(acts[0]) or not len(acts[1]) or max(map(len, acts)) < 2:
                continue
            keys = 1 if len(acts[1]) >= len(acts[0]) else 0
            if min(map(len, acts)) > 1 and (len(acts[0]) == weights.shape[2]) != (len(acts[1]) == weights.shape[2]):
                keys = int(len(acts[1]) == weights.shape[2])  # a softmax over queries, which may be more than keys
            where.append((number, keys, acts[1 - keys], acts[keys]))
        return where

    def product_of_tokens(self, rows: list[tuple[int, Any]]) -> int:
        """Choose the product whose keys are of tokens; those of positions are not, nor what is learned."""
        n, where = rows[0][0] // self.units.count, rows[0][1]
        candidates = []
        for number, keys, _, at in where:
            found = self.support(self.side(number, keys), at)
            made = [leaf for leaf in found.masks if self.trace.is_of_inputs(leaf)]
            if made:
                candidates.append((number, keys))
        if not candidates:
            self._refuse_made_weights(where)
            raise UndecidedError("no linear map of single tokens gives its keys: filters over several may give them")
        if len(candidates) > 1:
            kept = [one for one in candidates if self._is_of_columns(n, *one)]
            candidates = kept or candidates
        if len(candidates) > 1 and not self._are_alike(where, candidates):
            raise NoHeadsError(f"its scores are sums of several terms: {self._terms([one for one, _ in candidates])}")
        return int(candidates[0][0])

    def _are_alike(self, where: list[Any], candidates: list[tuple[int, int]]) -> bool:
        """Tell products of the same features of queries and of keys, as of blocks of tokens that are put together."""
        numbers = {number for number, _ in candidates}
        found = set()
        for number, keys, at_query, at_keys in where:
            if number in numbers:
                sides = ((1 - keys, at_query), (keys, at_keys))
                supports = [self.support(self.side(number, side), at) for side, at in sides]
                found.add(tuple(self._features(one) for one in supports))
        return len(found) == 1 and all(found.pop())

    def _features(self, support: Support) -> frozenset[tuple[str, int]]:
        leaves = self.trace.leaves
        return frozenset(
            (self.trace.parameter_of(leaf), leaves[leaf].start + one)
            for leaf in support.masks
            for one in support.features(leaf)
        )

    def _terms(self, products: list[int]) -> str:
        """Name what each of several products that scores are made of is made of."""
        terms = []
        for number in products:
            sides = (self.side(number, side) for side in (0, 1))
            found = [Support.of(one, random_weights(one.shape), self.trace.tensors) for one in sides]
            names = dict.fromkeys(module_of(self.trace.parameter_of(leaf)) for one in found for leaf in one.masks)
            is_product = all(found)
            terms.append(f"{'a product' if is_product else 'what is made'} of `{'` and `'.join(names)}`")
        return ", ".join(sorted(set(terms)))

    def _refuse_made_weights(self, where: list[Any]) -> None:
        """Refuse keys of tokens whose weights a map makes of something else, as a hypernetwork does."""
        inputs = [one for name, one in self.trace.run.others.items() if name.startswith("input")]
        _, cores = self.trace.without_maps
        for number, keys, _, at in where:
            side = self.side(number, keys)
            names = sorted({module_of(self.trace.parameter_of(leaf)) for leaf in self.support(side, at).masks})
            if not names or len(cores) != len(self.trace.cores) or number >= len(cores[self.number].scores):
                continue
            product = cores[self.number].scores[number]
            # What is added to tokens would leave them; of a weight without numbers nothing comes.
            is_nothing = not (product.right if keys else product.left).any()
            if is_nothing and Support.of(side, weights_at(side, at), inputs):
                raise UndecidedError(f"the weights that give its keys are themselves made by `{'` and `'.join(names)}`")

    def _is_of_columns(self, n: int, number: int, keys: int) -> bool:
        """Return whether two queries meet the same key in one column; keys of relative positions differ."""
        for logits in self.core.logits:
            flat = logits.reshape(-1, *logits.shape[-2:])
            if flat.shape[-2] < 2 or flat.shape[0] != self.core.weights.shape[0]:
                continue
            shape = logits.shape
            for column in range(flat.shape[-1]):
                met = []
                for row in (flat.shape[-2] - 1, flat.shape[-2] - 2):
                    gradient = torch.zeros(flat.shape)
                    gradient[n, row, column] = 1.0
                    acts = self.core.scores[number].acting_on(logits, gradient.reshape(shape))
                    met.append(set(acts[keys].tolist()))
                if met[0] and met[1]:
                    return bool(met[0] & met[1])
        return True
