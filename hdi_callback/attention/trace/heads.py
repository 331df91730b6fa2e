r"""Heads of the attention cores of a traced run.

For each row of the weights of a core, the supports of its queries, keys and values in the outputs of linear maps are
the features of its head:

.. math:: J = \operatorname{supp} \partial q / \partial(\text{outputs of maps})

Rows of equal support are one head. What does not fit is refused with what was observed: features that heads share, sums
of two maps, an activation in between, values that are no averages.

`CoreReading.heads` goes step by step: the parts of a core and what they meet (`parts`), supports (`support`), the rows
of each role (`role_rows`), checks (`checks`), the order of features (`ordering`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from hdi_callback.attention.layer.heads import INPUT_ROLES, Role
from hdi_callback.attention.trace.checks import HeadChecks
from hdi_callback.attention.trace.core_view import CoreView
from hdi_callback.attention.trace.cores import Learned, made_of
from hdi_callback.attention.trace.head_rows import (
    NOT_FOLLOWED,
    SINGLE_KEYS,
    HeadRows,
    NoHeadsError,
    NoRowsError,
    Rows,
    UndecidedError,
    module_of,
)
from hdi_callback.attention.trace.ordering import FeatureOrder
from hdi_callback.attention.trace.parts import CoreParts
from hdi_callback.attention.trace.role_rows import RoleRows
from hdi_callback.attention.trace.support import Support, derivatives, random_weights, weights_at
from hdi_callback.attention.trace.tied_rows import TiedRowsReading
from hdi_callback.attention.trace.unread import NO_PRODUCTS, is_map_of_scores, is_over_tokens, made_of_leaves
from hdi_callback.attention.trace.weighed_tokens import weighs_tokens

_NO_MAP = "no linear map of single tokens gives its {role}s: they are learned, or filters over several give them"
_TIED = "one map for all rows, of scores summed over them"
_STREAM = "one of two streams that attend together"
_MOST_ROWS = 512  # of the weights of a core: batch x heads x windows


class CoreReading(CoreView):
    """The heads of one core."""

    def streams(self) -> list[HeadRows]:
        """Read the rows of every head; of two streams of tokens that attend together, with maps of their own, each.

        Returns:
            The rows; where the queries of one stream alone are read, what the other gives is left out and named.

        Raises:
            NoHeadsError: as `heads` does.
        """
        first = self.heads()
        if first.row is None:
            return [first]
        maps = {one.parameter for one in first.rows.get("query", ())}
        row = CoreParts(self.trace, self.number).row_of_others(maps)
        if row is None:
            return [first]
        try:
            second = CoreReading(self.trace, self.number).heads(of_row=row)
        except NoHeadsError:
            return [first]
        both = [first, second]
        if any(one.row is None or one.rows.keys() != {"query", "key", "value"} for one in both):
            return [first]
        used = [{(role, row.parameter) for role, of in one.rows.items() for row in of} for one in both]
        if not used[0].isdisjoint(used[1]) or any(one.left_out != one.stream for one in both):
            return [first]
        for one in both:
            one.left_out = ""
            one.remarks.append(_STREAM)
        return both

    def heads(self, *, of_row: int | None = None) -> HeadRows:
        """Read the rows of every head.

        Args:
            of_row: the token that is looked at, of those that ask; one that sees most keys by default.

        Returns:
            The rows.

        Raises:
            NoHeadsError: if they cannot be read; without a reason where this is no attention over tokens at all.
            UndecidedError: if the run does not show them well enough.
        """
        core = self.core
        if not core.scores:
            self._refuse_other_scores()
        if core.softmaxes > 1 and len(core.scores) > 1 and not self._are_side_by_side():
            raise NoHeadsError("the weights of a head are made of several softmaxes")
        if any(side.is_complex() for product in core.scores for side in product.factors):
            raise NoHeadsError("its scores are products of complex numbers")
        self._refuse_sums_of_single_tokens()
        self._refuse_weights_for_values()
        values = Support.of(core.values, random_weights(core.values.shape), self.trace.tensors)
        if not values:
            return self._of_no_map()
        N = core.weights.shape[0]
        chosen = range(N) if N <= _MOST_ROWS else sorted(set(torch.linspace(0, N - 1, _MOST_ROWS).long().tolist()))
        parts = CoreParts(self.trace, self.number)
        parts.row = of_row
        self.units = parts.units = parts.find_units(chosen[0])
        units = [n * self.units.count + part for n in chosen for part in range(self.units.count)]
        rows = [(unit, where) for unit in units if (where := parts.where(unit)) is not None]
        if not rows:
            if core.weights.shape[-1] < 2:
                raise UndecidedError(SINGLE_KEYS)
            raise UndecidedError("what its scores are made of shows no queries and keys of tokens")
        product = parts.product_of_tokens(rows)
        if parts.is_of_a_map(rows[0][1], product):
            return self._grouped(rows, product)
        # The query of a class token may be its input as it is, where a map gives those of the others.
        parts.is_last_first = True
        others = [(unit, where) for unit in units if (where := parts.where(unit)) is not None]
        if not others or not parts.is_of_a_map(others[0][1], product):
            return self._grouped(rows, product)
        heads = self._grouped(others, product)
        said = (heads.left_out, "queries of other tokens, which no map gives")
        heads.left_out = " and ".join(filter(None, said))
        return heads

    def _grouped(self, rows: list[tuple[int, Any]], product: int) -> HeadRows:
        """Group the parts of the core into heads by the rows that they are made of."""
        mine = next(one for _, where in rows for one in where if one[0] == product)
        tied = TiedRowsReading(self.trace, self.number, self.units).read(*mine)
        if tied is not None:
            self.core = tied.first_row(self.core, product)
        core = self.core
        checks, role_rows, order = (
            HeadChecks(self.trace, self.number, self.units, core),
            RoleRows(self.trace, self.number, self.units, core),
            FeatureOrder(self.trace, self.number, self.units, core),
        )
        flat_values = torch.arange(core.values.shape[0] * core.values.shape[1]).view(core.values.shape[:2])
        places: dict[int, tuple[int, Tensor, Tensor]] = {}
        for n, where in rows:
            mine = next((one for one in where if one[0] == product), None)
            if mine is None:
                continue
            places[n] = mine[1:]
        supports = self._supports(product, places, flat_values)
        first = next(iter(supports))
        place, at_values = places[first], flat_values[first // self.units.count]
        checks.require_tokens(first, product, place, at_values)
        stream = role_rows.second_stream(supports, first, self.side(product, place[0]), place[2])
        left_out = [checks.added_inputs(at_values), stream]
        members, of_heads = self._rows_of_heads(supports, role_rows)
        checks.refuse_mixed(members, supports)
        remarks = checks.spread_keys(product, place)
        if tied is not None:
            remarks.append(_TIED)
        has_shared = role_rows.leave_out_shared(of_heads, product, place[0])
        if has_shared:
            remarks.append("without the part that all heads share")
        if any(len(one) > 1 for one in of_heads["key"]) and self._are_parts(of_heads["key"], product, place[0]):
            raise NoHeadsError(f"its keys have parts side by side of several maps: {_names(of_heads['key'])}")
        left_out.append(role_rows.leave_out_added(of_heads))
        left_out += [
            f"how `{name}` mixes the weights of all heads after the softmax"
            for node, name in self.trace.run.mixed.items()
            if node in core.nodes
        ]
        heads, unread_values = _of_one_map_each(of_heads, core.values.shape[-1])
        if unread_values:
            left_out[0] = unread_values
        # A softmax over queries makes a weight of all of them: whether one is of several tokens, it alone says.
        of_query = self.support(self.side(product, 1 - place[0]), place[1][:1])
        if "query" in heads and any(len(of_query.positions(leaf)) > 1 for leaf in of_query.masks):
            # Of several tokens: a filter or a mean keeps features where they are, a largest one of each does not.
            if checks.are_mixtures(self.side(product, 1 - place[0]), place[1][:1], [of_query]):
                remarks.append("queries of several tokens")
            else:
                del heads["query"]
        checks.require_widths(heads, product, place[0], has_shared=has_shared)
        normed = checks.require_linear(heads, members, product, places, has_shared=has_shared)
        order.order(heads, members, product, places)
        order.centre(heads, members, product, places)
        if not stream or "query" not in heads:
            left_out.append(self._queries_left_out(heads, product, 1 - place[0], int(place[1][0]), of_query))
        row = int(place[1][0]) % self.side(product, 1 - place[0]).shape[1]
        said = " and ".join(filter(None, left_out))
        values = None if tied is None else tied.values
        where = row if stream else None
        return HeadRows(heads, members, normed, remarks, said, self.units, where, values, stream)

    def _are_parts(self, found: list[list[Rows]], product: int, keys: int) -> bool:
        """Tell keys whose features are some of one map and some of another from sums of both."""
        columns = self.columns(self.side(product, keys))
        by_map: dict[str, set[int]] = {}
        for one in (one for rows in found for one in rows):
            for feature in one.features:
                by_map.setdefault(one.parameter, set()).update(columns.get((one.parameter, feature), {-2}))
        return -2 not in set().union(*by_map.values()) and sum(map(len, by_map.values())) == len(
            set().union(*by_map.values())
        )

    def _queries_left_out(
        self, heads: dict[Role, list[Rows]], product: int, side: int, at: int, of_query: Support
    ) -> str:
        """Say which queries the rows of heads do not give: all that maps give, or those of tokens with another map."""
        queries = self.side(product, side)
        count = queries.shape[1]
        whole = self.support(queries, torch.arange(at // count * count, at // count * count + count))
        if "query" not in heads:
            return "the weights of its queries" if whole else ""
        own = {self.trace.parameter_of(leaf) for leaf in of_query.masks}
        names = sorted({module_of(self.trace.parameter_of(leaf)) for leaf in whole.masks} - set(map(module_of, own)))
        return f"queries of other tokens, which `{'` and `'.join(names)}` give" if names else ""

    def _rows_of_heads(
        self, supports: dict[int, dict[Role, Support]], role_rows: RoleRows
    ) -> tuple[list[list[int]], dict[Role, list[list[Rows]]]]:
        """Read the rows of each part; parts of equal rows are one head.

        Returns:
            For each head its parts, and for each role the rows of each head, one entry for each map.
        """
        shared_source = role_rows.shared_source(next(iter(supports.values())))
        raw: dict[int, dict[Role, list[Rows]]] = {}
        by_rows: dict[Any, list[int]] = {}
        for n, of_roles in supports.items():
            raw[n] = {role: role_rows.rows(role, of_roles[role], shared_source) for role in INPUT_ROLES[1:]}
            try:
                raw[n]["query"] = role_rows.rows("query", of_roles["query"], shared_source)
            except NoRowsError:  # the keys are known all the same
                raw[n]["query"] = []
            key = tuple((one.parameter, one.features, one.inner) for role in INPUT_ROLES for one in raw[n][role])
            alone = () if raw[n]["query"] else _features(of_roles["query"])
            by_rows.setdefault((key, alone), []).append(n)
        members = self._joined_by_sequence(list(by_rows.values()), raw, supports)
        return members, {role: [raw[of_head[0]][role] for of_head in members] for role in INPUT_ROLES}

    def _joined_by_sequence(
        self,
        members: list[list[int]],
        raw: dict[int, dict[Role, list[Rows]]],
        supports: dict[int, dict[Role, Support]],
    ) -> list[list[int]]:
        """Join what is one head of several sequences, in each of which other rows give its queries, as of experts.

        A head is met in every sequence: of parts with the same keys, each is met where the others are.

        Returns:
            The parts of each head.
        """
        by_keys: dict[Any, list[list[int]]] = {}
        for of_head in members:
            by_keys.setdefault(tuple(raw[of_head[0]]["key"]), []).append(of_head)
        if len(by_keys) == len(members) or len(supports) >= _MOST_ROWS:  # of more, some are looked at
            return members
        sequences = _sequences({n: of_roles["key"] for n, of_roles in supports.items()})
        if all(len({frozenset(map(sequences.get, one)) for one in alike}) == 1 for alike in by_keys.values()):
            return members
        for of_roles in raw.values():
            of_roles["query"] = []
        joined: dict[Any, list[int]] = {}
        counts: Counter[Any] = Counter()
        for n in sorted(supports):
            key = (*raw[n]["key"], *raw[n]["value"])
            joined.setdefault((key, counts[key, sequences[n]]), []).append(n)
            counts[key, sequences[n]] += 1
        return list(joined.values())

    def _supports(
        self, product: int, places: dict[int, tuple[int, Tensor, Tensor]], flat_values: Tensor
    ) -> dict[int, dict[Role, Support]]:
        """For each part of the core, the supports of its queries, keys and values."""
        parts: dict[Role, dict[int, tuple[int, Tensor]]] = {
            "query": {n: (1 - keys, at_query) for n, (keys, at_query, _) in places.items()},
            "key": {n: (keys, at_keys) for n, (keys, _, at_keys) in places.items()},
        }
        found: dict[int, dict[Role, Support]] = {n: {} for n in places}
        for role, of_parts in parts.items():
            for side in (0, 1):
                chosen = {n: at for n, (of_part, at) in of_parts.items() if of_part == side}
                supports = Support.of_each(self.side(product, side), list(chosen.values()), self.trace.tensors)
                for n, support in zip(chosen, supports):
                    found[n][role] = support
        values = [flat_values[n // self.units.count] for n in places]
        for n, support in zip(places, Support.of_each(self.core.values, values, self.trace.tensors)):
            found[n]["value"] = support
        return found

    def _are_side_by_side(self) -> bool:
        """Tell softmaxes of which each weighs tokens of its own, as learned prompts beside the others."""
        weights = self.core.weights
        edges = [torch.autograd.graph.GradientEdge(node, 0) for node in self.core.nodes]
        for number in range(weights.shape[-1]):
            gradient = torch.zeros(weights.shape)
            gradient[..., number] = random_weights(weights.shape[:-1])
            if sum(bool(one.any()) for one in derivatives(weights, gradient, edges).values()) > 1:
                return False
        return True

    def _refuse_other_scores(self) -> None:
        """Say what the weights are made of, if not of products; nothing of a router, which weighs experts."""
        for logits in self.core.logits:
            for leaf in made_of_leaves(self.trace.run, logits):
                if is_map_of_scores(leaf, logits, self.trace.cores):
                    name = module_of(leaf.parameter)
                    raise NoHeadsError(f"its heads mix: `{name}` maps the scores of all of them before the softmax")
            if is_over_tokens(self.trace.run, logits):
                raise UndecidedError(NO_PRODUCTS)
        if any(weighs_tokens(self.trace.run, node) for node in self.core.nodes):
            raise UndecidedError(NO_PRODUCTS)
        raise NoHeadsError

    def _refuse_sums_of_single_tokens(self) -> None:
        """Refuse scores that add what learned vectors make of the query to what they make of the key (graphs: GAT)."""
        core = self.core
        if len(core.scores) < 2 or len(core.logits) != 1 or not core.logits[0].requires_grad:
            return
        if any(self._is_of_maps(product.left) and self._is_of_maps(product.right) for product in core.scores):
            return
        (logits,) = core.logits
        gradient = torch.zeros(logits.shape).flatten()
        gradient[int(logits.detach().argmax())] = 1.0
        acting = [one.acting_on(logits, gradient.view(logits.shape)) for one in core.scores]
        if sum(any(len(side) for side in sides) for sides in acting) > 1:
            raise NoHeadsError("its scores are sums of what single tokens give, and no products of queries and keys")

    def _refuse_weights_for_values(self) -> None:
        """Refuse weights that are multiplied with others before values are averaged, as with landmarks (Nystrom)."""
        values = self.core.values.grad_fn
        learned = Learned(self.trace.run)
        for node in () if values is None else made_of(values, learned)[0]:
            logits = self.trace.run.scores.get(node)
            if logits is not None and logits.requires_grad and made_of(logits.grad_fn, learned)[1]:
                raise NoHeadsError("the weights of a head are made of several softmaxes")

    def _is_of_maps(self, tensor: Tensor) -> bool:
        return bool(Support.of(tensor, random_weights(tensor.shape), self.trace.tensors))

    def _of_no_map(self) -> HeadRows:
        others = self.trace.run.others
        made = Support.of(self.core.values, random_weights(self.core.values.shape), list(others.values()))
        names = [list(others)[leaf] for leaf in made.masks]
        if any(name.startswith("input") for name in names):
            matrix = self.matrix_behind_values()
            if matrix is not None and self._has_one_for_each_token(others[f"parameter {matrix}"]):
                raise NoHeadsError(f"each of its tokens has a matrix of its own in `{module_of(matrix)}`")
            sides = [side for product in self.core.scores for side in (product.left, product.right)]
            if all(Support.of(one, random_weights(one.shape), self.trace.tensors) for one in sides):
                raise UndecidedError("its values are its inputs, and no projection of tokens")
            if matrix is not None and self.trace.run.convolved:
                raise UndecidedError(_NO_MAP.format(role="value"))
            if matrix is not None:
                raise UndecidedError(NOT_FOLLOWED.format(role="value", name=module_of(matrix)))
            raise NoHeadsError("")  # a part of attention whose projections lie around it
        raise NoHeadsError(_NO_MAP.format(role="value"))

    def _has_one_for_each_token(self, stack: Tensor) -> bool:
        """Tell values of a stack of matrices that are chosen by the place of a token, as for each codebook."""
        if stack.dim() != 3 or self.core.values.shape[1] < 2:
            return False
        places = torch.tensor([[0], [self.core.values.shape[1] - 1]])
        found = [Support.of(self.core.values, weights_at(self.core.values, at), [stack]) for at in places]
        used = [{row // stack.shape[1] for row in one.positions(0)} for one in found]
        return all(len(one) == 1 for one in used) and used[0] != used[1]


def _of_one_map_each(of_heads: dict[Role, list[list[Rows]]], width: int) -> tuple[dict[Role, list[Rows]], str]:
    """Refuse keys and values of no map, and keys of several; queries of such are left out, and values of several.

    Returns:
        The rows of each role, and what is left out of the values, in words.

    Raises:
        NoHeadsError: if keys or values are refused.
    """
    heads: dict[Role, list[Rows]] = {}
    unread = ""
    for role, found in of_heads.items():
        if all(not one for one in found):
            if role != "query":
                raise NoHeadsError(_NO_MAP.format(role=role))
        elif all(len(one) == 1 for one in found):
            heads[role] = [one[0] for one in found]
        elif role == "value" and _are_apart(found, width):
            names = "` and `".join(sorted({module_of(one.parameter) for rows in found for one in rows}))
            unread = f"the weights of its values, which `{names}` give together"
        elif role != "query":
            raise NoHeadsError(_sums(role, found))
    return heads, unread


def _are_apart(of_heads: list[list[Rows]], width: int) -> bool:
    """Return whether a map has features for each head alone, as many as attention takes of its values.

    What another one adds to them, or weighs them with, makes them no rows of a map; keys and queries are theirs.
    """
    for parameter in {one.parameter for one in of_heads[0]}:
        found = {one.features for rows in of_heads for one in rows if one.parameter == parameter}
        if all(len(one) == width for one in found) and sum(map(len, found)) == len(set().union(*found)):
            return all(any(one.parameter == parameter for one in rows) for rows in of_heads)
    return False


def _features(support: Support) -> tuple[Any, ...]:
    return tuple((leaf, support.features(leaf)) for leaf in support.masks)


def _sequences(keys: dict[int, Support]) -> dict[int, int]:
    """Number the sequences that parts of a core attend to: those whose keys have tokens in common are of one."""
    tokens = {n: {(leaf, at) for leaf in one.masks for at in one.positions(leaf)} for n, one in keys.items()}
    found: list[set[tuple[int, int]]] = []
    for own in tokens.values():
        apart = [one for one in found if one.isdisjoint(own)]
        found = [*apart, own.union(*(one for one in found if not one.isdisjoint(own)))]
    return {n: next((i for i, one in enumerate(found) if not one.isdisjoint(own)), -1) for n, own in tokens.items()}


def _sums(role: str, found: Iterable[Sequence[Rows]]) -> str:
    return f"its {role}s are sums of what {_names(found)} give"


def _names(found: Iterable[Sequence[Rows]]) -> str:
    return f"`{'` and `'.join(sorted({module_of(one.parameter) for rows in found for one in rows}))}`"
