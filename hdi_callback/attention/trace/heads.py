r"""Heads of the attention cores of a traced run.

For each row of the weights of a core, the supports of its queries, keys and values in the outputs of linear maps are
the features of its head:

.. math:: J = \operatorname{supp} \partial q / \partial(\text{outputs of maps})

Rows of equal support are one head. What does not fit is refused with what was seen: features that heads share, sums of
two maps, an activation in between, values that are no averages.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hdi_callback.attention.heads import (
    Centring,
    Role,
)
from hdi_callback.attention.trace.cores import Core, cores_of, is_over_tokens, products_behind
from hdi_callback.attention.trace.draw import Draw
from hdi_callback.attention.trace.run import Traceable
from hdi_callback.attention.trace.support import Support, agreed, columns_of, derivatives, random_weights, weights_at
from hdi_callback.attention.trace.traced_run import TracedRun

_MOST_ROWS = 512  # of the weights of a core: batch x heads x windows
SINGLE_KEYS = "every query has a single key in what was run, which tells nothing of keys"
_BENT = 1e-3  # the third singular value of two vectors and their sum, relative to the first


class NoHeadsError(Exception):
    """An attention core whose heads cannot be read, and why: a clause about its module, such as "its heads mix"."""


class UndecidedError(NoHeadsError):
    """An attention core that a traced run does not show well enough: another way to look may read it."""


# --- what is read of one core


@dataclass(frozen=True)
class Rows:
    """Features of one head in one linear map, and those of another map that feeds it.

    Attributes:
        parameter: of the map.
        features: of the head, in order.
        inner: the rows that feed it; all of what the outer map takes.
        gain: for each of them the number that it is multiplied by; ones if there is nothing in between.
    """

    parameter: str
    features: tuple[int, ...]
    inner: Rows | None = None
    gain: tuple[float, ...] = ()
    centring: Centring = ""


@dataclass
class HeadRows:
    """Heads of a core in the order in which they were met, and what holds for all of them."""

    rows: dict[Role, list[Rows]]
    members: list[list[int]]  # parts of the core for each head: numbers of `units`
    normed: set[Role] = field(default_factory=set)
    remarks: list[str] = field(default_factory=list)
    left_out: str = ""
    units: Units = field(default_factory=lambda: Units())


@dataclass(frozen=True)
class Units:
    """Parts of a core, each of which is of one head: its matrices of weights, or some rows of each.

    Attributes:
        rows: rows of each matrix that belong together; all of them where there is one part.
    """

    rows: tuple[Tensor, ...] = ()

    @property
    def count(self) -> int:
        """How many parts a matrix has."""
        return max(1, len(self.rows))

    def of(self, tensor: Tensor, unit: int) -> Tensor:
        """Choose what of a tensor belongs to a part.

        Args:
            tensor: ``(N, rows, ...)``.
            unit: number of the part.

        Returns:
            ``(rows of the part, ...)``.
        """
        matrix = tensor[unit // self.count]
        return matrix[self.rows[unit % self.count]] if self.rows else matrix


class TracedCores:
    """One run, and others of the same copy that tell what is linear and what is centred."""

    def __init__(self, traceable: Traceable, args: Any, kwargs: Any, run: TracedRun, cores: list[Core]) -> None:
        self.traceable, self.args, self.kwargs, self.run, self.cores = traceable, args, kwargs, run, cores
        self.leaves = run.leaves
        self.tensors = run.tensors
        self._fed: dict[int, Support] = {}

    def fed(self, leaf: int) -> Support:
        """What a map is given that other maps, parameters or inputs make."""
        if leaf not in self._fed:
            taken = self.leaves[leaf].taken
            self._fed[leaf] = Support.of(taken, random_weights(taken.shape), self.tensors)
        return self._fed[leaf]

    def takes_input(self, leaf: int) -> bool:
        """Tell whether a map is given something of the inputs without another map in between."""
        taken = self.leaves[leaf].taken
        inputs = [one for name, one in self.run.others.items() if name.startswith("input")]
        return bool(Support.of(taken, random_weights(taken.shape), inputs))

    def is_of_inputs(self, leaf: int, depth: int = 8) -> bool:
        """Tell whether what a map gives depends on inputs at all; tables of positions do not."""
        return self.takes_input(leaf) or (
            depth > 0 and any(self.is_of_inputs(other, depth - 1) for other in self.fed(leaf).masks if other != leaf)
        )

    @cached_property
    def again(self) -> list[list[Core]]:
        """The cores when maps answer nothing, one draw, another, and their sum."""
        shares = ((1.0, 0.0), (0.0, 1.0), (1.0, 1.0))
        runs = [cores_of(self.traceable.run(self.args, self.kwargs, Draw(share))) for share in shares]
        return [self.without_maps[1], *runs]

    @cached_property
    def without_maps(self) -> tuple[TracedRun, list[Core]]:
        """The run in which maps answer nothing."""
        run = self.traceable.run(self.args, self.kwargs, Draw((0.0, 0.0)))
        return run, cores_of(run)

    @cached_property
    def with_means(self) -> tuple[TracedRun, list[Core]]:
        """The run in which the means that norms subtract are no constants."""
        run = self.traceable.run(self.args, self.kwargs, Draw(), keeps_means=True)
        return run, cores_of(run)

    def parameter_of(self, leaf: int) -> str:
        """Give the dotted path of the matrix of a map.

        Args:
            leaf: number of the call.

        Returns:
            The path in the module that was run.
        """
        return self.leaves[leaf].parameter


class CoreReading:
    """The heads of one core."""

    def __init__(self, trace: TracedCores, number: int) -> None:
        self.trace, self.number, self.core = trace, number, trace.cores[number]

    def heads(self) -> HeadRows:
        """Read the rows of every head.

        Returns:
            The rows.

        Raises:
            NoHeadsError: if they cannot be read; without a reason where this is no attention over tokens at all.
            UndecidedError: if the run does not show them well enough.
        """
        core = self.core
        if not core.scores:
            self._refuse_other_scores()
        if core.softmaxes > 1 and len(core.scores) > 1:
            raise NoHeadsError("the weights of a head are made of several softmaxes")
        values = Support.of(core.values, random_weights(core.values.shape), self.trace.tensors)
        if not values:
            return self._of_no_map()
        N = core.weights.shape[0]
        chosen = range(N) if N <= _MOST_ROWS else sorted(set(torch.linspace(0, N - 1, _MOST_ROWS).long().tolist()))
        self.units = self._units(chosen[0])
        units = [n * self.units.count + part for n in chosen for part in range(self.units.count)]
        self.where = [self._where(unit) for unit in units]
        rows = [(unit, where) for unit, where in zip(units, self.where) if where is not None]
        if not rows:
            if core.weights.shape[-1] < 2:
                raise UndecidedError(SINGLE_KEYS)
            raise UndecidedError("what its scores are made of shows no queries and keys of tokens")
        product = self._product_of_tokens(rows)
        return self._grouped(rows, product)

    def _refuse_other_scores(self) -> None:
        """Say what the weights are made of, if not of products; nothing of a router or learned pooling."""
        for logits in self.core.logits:
            support = Support.of(logits, random_weights(logits.shape), self.trace.tensors)
            for leaf in support.masks:
                if self._is_of_scores(leaf, logits):
                    name = module_of(self.trace.parameter_of(leaf))
                    raise NoHeadsError(f"its heads mix: `{name}` maps the scores of all of them before the softmax")
            if is_over_tokens(self.trace.run, logits):
                raise UndecidedError("its scores are no products of queries and keys")
        raise NoHeadsError

    def _is_of_scores(self, leaf: int, logits: Tensor) -> bool:
        """Tell a map that is given scores: for each pair of tokens one number from each head."""
        taken = self.trace.leaves[leaf].taken
        if taken.numel() // taken.shape[-1] * self.trace.leaves[leaf].tensor.shape[-1] != logits.numel():
            return False
        averages = {core.node for core in self.trace.cores}
        return any(product not in averages for product in products_behind(taken))

    def _of_no_map(self) -> HeadRows:
        others = self.trace.run.others
        made = Support.of(self.core.values, random_weights(self.core.values.shape), list(others.values()))
        names = [list(others)[leaf] for leaf in made.masks]
        if any(name.startswith("input") for name in names):
            sides = [side for product in self.core.scores for side in (product.left, product.right)]
            if all(Support.of(one, random_weights(one.shape), self.trace.tensors) for one in sides):
                raise NoHeadsError("its values are its inputs, and no projection of tokens")
            raise NoHeadsError("")  # a part of attention whose projections lie around it
        raise NoHeadsError("its values are learned, and no projection of tokens")

    # --- queries and keys

    def _units(self, n: int) -> Units:
        """Tell whether rows of one matrix of weights are of several heads, which share its keys."""
        count = self.core.weights.shape[1]
        last = self._where_in_row(n, count - 1)
        first = self._where_in_row(n, 0)
        if count < 4 or len(first) != 1 or len(last) != 1 or first[0][:2] != last[0][:2]:
            return Units()
        number, keys, *_ = first[0]
        side = self._side(number, 1 - keys)
        expected = [[n * count], [n * count + count - 1]]
        if side.shape[:2] != self.core.weights.shape[:2] or [one[0][2].tolist() for one in (first, last)] != expected:
            return Units()
        of_rows: list[set[tuple[str, int]]] = [set() for _ in range(count)]
        for leaf, codes in columns_of(side[n].mT, self.trace.tensors).items():
            start, parameter = self.trace.leaves[leaf].start, self.trace.parameter_of(leaf)
            for feature, code in enumerate(codes.T.tolist()):
                for row in {row for row in code if row >= 0}:
                    of_rows[row].add((parameter, start + feature))
        kinds: dict[frozenset[tuple[str, int]], list[int]] = {}
        for row, features in enumerate(of_rows):
            kinds.setdefault(frozenset(features), []).append(row)
        parts = list(kinds.values())
        maps = {frozenset(name for name, _ in features) for features in kinds}
        are_apart = sum(map(len, kinds)) == len(frozenset[tuple[str, int]]().union(*kinds))
        if len(parts) < 2 or len(maps) != 1 or not all(kinds) or not are_apart or len({len(one) for one in parts}) != 1:
            return Units()
        return Units(tuple(torch.tensor(one) for one in parts))

    def _where(self, unit: int) -> list[tuple[int, int, Tensor, Tensor]] | None:
        """For one part of the core: which elements of each score product it is made of.

        Returns:
            For each product: its number, on which side the keys are, positions of the query and of the keys.
        """
        n, part = divmod(unit, self.units.count)
        own = self.units.rows[part] if self.units.rows else torch.arange(self.core.weights.shape[1])
        live = (self.core.weights[n][own] > 1e-12).sum(-1)
        most = own[(live == live.max()).nonzero().flatten()].tolist()
        # The first of the queries that see most keys; where it sees padding alone, others.
        for row in dict.fromkeys((most[0], most[-1], most[len(most) // 2])):
            where = self._where_in_row(n, row)
            if where:
                return where
        return None

    def _where_in_row(self, n: int, row: int) -> list[tuple[int, int, Tensor, Tensor]]:
        weights = self.core.weights
        gradient = torch.zeros(weights.shape)
        gradient[n, row] = random_weights(weights.shape[-1:])
        where = []
        for number, product in enumerate(self.core.scores):
            acts = product.acting_on(weights, gradient)
            if not len(acts[0]) or not len(acts[1]) or max(map(len, acts)) < 2:
                continue
            keys = 1 if len(acts[1]) >= len(acts[0]) else 0
            where.append((number, keys, acts[1 - keys], acts[keys]))
        return where

    def _side(self, number: int, side: int) -> Tensor:
        product = self.core.scores[number]
        return product.right if side else product.left

    def _product_of_tokens(self, rows: list[tuple[int, Any]]) -> int:
        """Choose the product whose keys are of tokens; those of positions are not, nor what is learned."""
        n, where = rows[0][0] // self.units.count, rows[0][1]
        candidates = []
        for number, keys, _, at in where:
            found = self._support(self._side(number, keys), at)
            made = [leaf for leaf in found.masks if self.trace.is_of_inputs(leaf)]
            if made:
                candidates.append((number, keys))
        if not candidates:
            raise UndecidedError("its keys are made of no projection of tokens")
        if len(candidates) > 1:
            kept = [one for one in candidates if self._is_of_columns(n, *one)]
            candidates = kept or candidates
        if len(candidates) > 1:
            raise UndecidedError("its scores are sums of several products of queries and keys")
        return int(candidates[0][0])

    def _is_of_columns(self, n: int, number: int, keys: int) -> bool:
        """Tell whether two queries meet the same key in one column; keys of relative positions differ."""
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

    def _support(self, tensor: Tensor, positions: Tensor) -> Support:
        return Support.of(tensor, weights_at(tensor, positions), self.trace.tensors)

    # --- heads

    def _grouped(self, rows: list[tuple[int, Any]], product: int) -> HeadRows:
        core = self.core
        by_rows: dict[Any, list[int]] = {}
        flat_values = torch.arange(core.values.shape[0] * core.values.shape[1]).view(core.values.shape[:2])
        places: dict[int, tuple[int, Tensor, Tensor]] = {}
        for n, where in rows:
            mine = next((one for one in where if one[0] == product), None)
            if mine is None:
                continue
            _, keys, at_query, at_keys = mine
            if not self._are_of_one_head(self._side(product, keys), at_keys):
                raise NoHeadsError("its heads mix: the weights of one depend on the scores of several")
            places[n] = (keys, at_query, at_keys)
        supports = self._supports(product, places, flat_values)
        first = next(iter(supports))
        self._check_tokens(first, product, places[first], flat_values[first // self.units.count])
        self._refuse_added_inputs(flat_values[first // self.units.count])
        left_out = self._second_stream(supports, first)
        raw: dict[int, dict[Role, list[Rows]]] = {}
        roles: tuple[Role, ...] = ("query", "key", "value")
        shared_source = self._shared_source(supports[first])
        for n, of_roles in supports.items():
            raw[n] = {role: self._rows(role, of_roles[role], shared_source) for role in roles[1:]}
            try:
                raw[n]["query"] = self._rows("query", of_roles["query"], shared_source)
            except NoRowsError:  # the keys are known all the same
                raw[n]["query"] = []
            key = tuple((one.parameter, one.features, one.inner) for role in roles for one in raw[n][role])
            alone = () if raw[n]["query"] else _features(of_roles["query"])
            by_rows.setdefault((key, alone), []).append(n)
        members = list(by_rows.values())
        self._refuse_mixed(members, supports)
        heads: dict[Role, list[Rows]] = {}
        remarks = self._spread_keys(product, places[first])
        of_heads = {role: [raw[of_head[0]][role] for of_head in members] for role in roles}
        has_shared = self._leave_out_shared(of_heads, product, places[first][0])
        if has_shared:
            remarks.append("without the part that all heads share")
        for role in roles:
            found = of_heads[role]
            if all(not one for one in found):
                if role != "query":
                    raise NoHeadsError(f"its {role}s are learned, and no projection of tokens")
                continue
            if any(len(one) != 1 for one in found):
                if role == "query":
                    continue
                raise NoHeadsError(_sums(role, found))
            heads[role] = [one[0] for one in found]
        of_query = supports[first]["query"]
        if "query" in heads and any(len(of_query.positions(leaf)) > 1 for leaf in of_query.masks):
            del heads["query"]  # of several tokens
        self._check_widths(heads, product, places[first][0], has_shared=has_shared)
        normed = self._check_linear(heads, members, product, places, has_shared=has_shared)
        self._order(heads, members, product, places)
        self._centre(heads, members, product, places)
        if "query" not in heads and of_query:
            left_out = " and ".join(one for one in (left_out, "the weights of its queries") if one)
        return HeadRows(heads, members, normed, remarks, left_out, self.units)

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
                supports = Support.of_each(self._side(product, side), list(chosen.values()), self.trace.tensors)
                for n, support in zip(chosen, supports):
                    found[n][role] = support
        values = [flat_values[n // self.units.count] for n in places]
        for n, support in zip(places, Support.of_each(self.core.values, values, self.trace.tensors)):
            found[n]["value"] = support
        return found

    def _are_of_one_head(self, keys: Tensor, at_keys: Tensor) -> bool:
        """Tell whether keys of several matrices are of the same features: windows of one head overlap."""
        matrices = at_keys // keys.shape[1]
        if (matrices == matrices[0]).all():
            return True
        seen = {
            tuple((self.trace.parameter_of(leaf), found.features(leaf)) for leaf in found.masks)
            for number in set(matrices.tolist())
            if (found := self._support(keys, at_keys[matrices == number]))
        }
        return len(seen) < 2

    def _leave_out_shared(self, of_heads: dict[Role, list[list[Rows]]], product: int, keys: int) -> bool:
        """Leave out a part of keys that all heads share beside their own, and what of queries meets it.

        That is the rotary part of latent attention, whose columns are apart from those of the heads' own keys.

        Returns:
            True if there is one.
        """
        found = of_heads["key"]
        shared = set(found[0]).intersection(*map(set, found[1:])) if len(found) > 1 else set()
        if not shared or any(set(one) == shared for one in found):
            return False
        columns = self._columns(self._side(product, keys))
        of_shared = {
            at for one in shared for feature in one.features for at in columns.get((one.parameter, feature), ())
        }
        own = {
            at for rows in found for one in rows if one not in shared
            for feature in one.features for at in columns.get((one.parameter, feature), ())
        }  # fmt: skip
        if own & of_shared - {-2}:
            return False
        of_heads["key"] = [[one for one in rows if one not in shared] for rows in found]
        columns = self._columns(self._side(product, 1 - keys))
        for rows in of_heads["query"]:
            for place, one in enumerate(rows):
                kept = tuple(
                    feature for feature in one.features if columns.get((one.parameter, feature), {-2}) <= own - {-2}
                )
                rows[place] = replace(one, features=kept)
            rows[:] = [one for one in rows if one.features]
        return True

    def _columns(self, tensor: Tensor) -> dict[tuple[str, int], set[int]]:
        """Features of maps -> the columns of a tensor that they act on, -2 for several at once."""
        columns: dict[tuple[str, int], set[int]] = {}
        for leaf, code in columns_of(tensor, self.trace.tensors).items():
            start, parameter = self.trace.leaves[leaf].start, self.trace.parameter_of(leaf)
            for feature, column in enumerate(agreed(code).tolist()):
                if column != -1:
                    columns.setdefault((parameter, start + feature), set()).add(column)
        return columns

    def _own_columns(self, rows: list[Rows], product: int, side: int) -> list[int]:
        """Columns of queries or keys on which the features of heads act, all if that is not seen of one."""
        columns = self._columns(self._side(product, side))
        own = {at for one in rows for feature in one.features for at in columns.get((one.parameter, feature), {-2})}
        return list(range(self._side(product, side).shape[-1])) if -2 in own else sorted(own)

    def _check_tokens(self, n: int, product: int, place: tuple[int, Tensor, Tensor], at_values: Tensor) -> None:
        """Refuse what is averaged, or met, if its positions are features and no tokens."""
        keys, _, at_keys = place
        weights = self.core.weights[n // self.units.count]
        live = at_values[[bool(weights[:, i].max() > 0) for i in range(len(at_values))]]
        for what, tensor, at in (("keys", self._side(product, keys), at_keys), ("values", self.core.values, live)):
            chosen = at[torch.linspace(0, len(at) - 1, min(4, len(at))).long()]
            alone = [one for i in sorted(set(chosen.tolist())) if (one := self._support(tensor, torch.tensor([i])))]
            seen = {tuple((self.trace.parameter_of(leaf), one.features(leaf)) for leaf in one.masks) for one in alone}
            parameters = {tuple(name for name, _ in one) for one in seen}
            apart = len({feature for one in seen for name, of in one for feature in ((name, i) for i in of)}) == sum(
                len(of) for one in seen for _, of in one
            )
            if len(seen) > 1 and len(parameters) == 1 and apart:
                raise NoHeadsError(f"its {what} are those of features, not of tokens")
            for one, other in itertools.combinations(alone, 2):
                if one.masks.keys() == other.masks.keys() and all(
                    torch.equal(mask, other.masks[leaf]) for leaf, mask in one.masks.items()
                ):
                    raise NoHeadsError(f"its {what} are the same for all tokens, or mix them all")

    def _refuse_added_inputs(self, at_values: Tensor) -> None:
        """Refuse values to which an input is added that no map is given, such as those of an earlier layer."""
        run, cores = self.trace.without_maps
        if len(cores) != len(self.trace.cores):
            return
        inputs = [one for name, one in run.others.items() if name.startswith("input")]
        for at in at_values[:: max(1, len(at_values) - 1)]:  # of the first and the last token
            gradient = torch.zeros(self.core.values.shape)
            gradient.view(-1, gradient.shape[-1])[at] = 1.0
            made = self._support(self.core.values, at[None])
            if made and Support.of(cores[self.number].values, gradient, inputs):
                names = "` and `".join(sorted({module_of(self.trace.parameter_of(leaf)) for leaf in made.masks}))
                raise NoHeadsError(f"its values are sums of what `{names}` gives and of one of its inputs")

    def _second_stream(self, supports: dict[int, dict[Role, Support]], first: int) -> str:
        """Tell keys and values that come from one map for some tokens and from another for others."""
        # Each stream has its own maps, and no token is of both.
        key, value = supports[first]["key"], supports[first]["value"]
        names = [list(dict.fromkeys(self.trace.parameter_of(leaf) for leaf in one.masks)) for one in (key, value)]
        if len(names[0]) < 2 and len(names[1]) < 2:
            return ""
        return self._left_out_streams(supports, first)

    def _left_out_streams(self, supports: dict[int, dict[Role, Support]], first: int) -> str:
        core = self.core
        columns = []
        for i in range(core.values.shape[1]):
            at = torch.tensor([first // self.units.count * core.values.shape[1] + i])
            columns.append({self.trace.parameter_of(leaf) for leaf in self._support(core.values, at).masks})
        live = [one for one in columns if one]
        if any(len(one) != 1 for one in live):
            return ""  # sums
        streams = list(dict.fromkeys(next(iter(one)) for one in live))
        key_names = list(dict.fromkeys(self.trace.parameter_of(leaf) for leaf in supports[first]["key"].masks))
        if len(streams) != 2 or len(key_names) not in (1, 2):
            return ""
        # The stream that the first query belongs to is read.
        kept_value, other_value = streams
        order = {name: place for place, name in enumerate(leaf.parameter for leaf in self.trace.leaves)}
        kept_key, *other_key = sorted(key_names, key=lambda name: order[name])
        dropped = {other_value, *other_key} - {kept_value, kept_key}
        for of_roles in supports.values():
            for role in ("key", "value"):
                kept = [leaf for leaf in of_roles[role].masks if self.trace.parameter_of(leaf) not in dropped]
                of_roles[role] = of_roles[role].only(kept)
        named = " and ".join(f"`{module_of(name)}`" for name in sorted(dropped))
        return f"keys and values of a second stream, which {named} give"

    def _shared_source(self, supports: dict[Role, Support]) -> frozenset[int]:
        """Maps that feed query, key and value alike: they make the tokens, and are no part of heads."""
        sources = []
        for support in supports.values():
            for leaf in support.masks:
                fed = self.trace.fed(leaf)
                sources.append({other: fed.features(other) for other in fed.masks})
        same = bool(sources) and all(one == sources[0] for one in sources)
        return frozenset(sources[0]) if same else frozenset()

    def _rows(self, role: Role, support: Support, shared_source: frozenset[int]) -> list[Rows]:
        """The rows of one role of one head, one entry for each map."""
        trace = self.trace
        by_parameter: dict[str, list[int]] = {}
        for leaf in support.masks:
            by_parameter.setdefault(trace.parameter_of(leaf), []).append(leaf)
        found = []
        for parameter, leaves in by_parameter.items():
            features = sorted(
                {trace.leaves[leaf].start + feature for leaf in leaves for feature in support.features(leaf)}
            )
            inner = self._fed_by(role, leaves[0], support, shared_source)
            found.append(Rows(parameter, tuple(features), *inner))
        return found

    def _fed_by(self, role: Role, leaf: int, support: Support, shared: frozenset[int]) -> tuple[Any, ...]:
        """The rows of another map that feed a map at the positions of a head, and the gain in between."""
        trace = self.trace
        fed = trace.fed(leaf)
        sources = [other for other in fed.masks if other != leaf]
        if not sources or trace.takes_input(leaf):
            return ()
        if set(sources) == set(shared) and not self._is_in_front(sources):
            return ()
        if all(self._takes_attention(source) for source in sources):  # which makes tokens of what heads gave
            return ()
        name = module_of(trace.parameter_of(leaf))
        given = f"its projection `{name}` is given what another one makes"
        taken = trace.leaves[leaf].taken
        flat = taken.reshape(-1, taken.shape[-1])
        position = support.positions(leaf)[0]
        token = flat[position]
        if len(sources) > 1:
            alone = Support.of(token, random_weights(token.shape), trace.tensors)
            sources = list(alone.masks)
        if len(sources) != 1:
            raise NoRowsError(given)
        (source,) = sources
        codes = columns_of(token[None], [trace.tensors[source]])
        if 0 not in codes or (codes[0] == -2).any() or int((codes[0] >= 0).any(1).sum()) != 1:
            raise NoRowsError(given)
        read = agreed(codes[0])
        features = [
            int((read == column).nonzero()[0]) if (read == column).sum() == 1 else -1 for column in range(len(token))
        ]
        if min(features) < 0 or (
            trace.fed(source).masks and not trace.takes_input(source) and trace.fed(source).masks.keys() != {source}
        ):
            raise NoRowsError(given)
        gains = derivatives(token, torch.ones(token.shape), [trace.tensors[source]])[0]
        gain = gains[(codes[0] >= 0).any(1)][0][features]
        start = trace.leaves[source].start
        inner = Rows(trace.parameter_of(source), tuple(start + feature for feature in features))
        return inner, tuple((gain / gain.abs().max()).tolist())

    def _is_in_front(self, sources: Sequence[int]) -> bool:
        """Tell a map of this attention's own, in front of all projections, from one that makes tokens elsewhere."""
        is_own = not self.core.path or self.trace.parameter_of(sources[0]).startswith(f"{self.core.path}.")
        return len(sources) == 1 and is_own and not self._takes_attention(sources[0])

    def _takes_attention(self, leaf: int) -> bool:
        """Tell a map that is given what an attention core gives, with no map in between."""
        taken = self.trace.leaves[leaf].taken
        return taken.requires_grad and any(
            bool(found[0].any())
            for core in self.trace.cores
            if (found := derivatives(taken, random_weights(taken.shape), [core.output]))
        )

    def _refuse_mixed(self, members: list[list[int]], supports: dict[int, dict[Role, Support]]) -> None:
        """Refuse heads of equal rows at the same tokens: they mix, or their heads are made by something else."""
        for of_head in members:
            for one, other in itertools.islice(itertools.pairwise(of_head), 8):
                if all(
                    _are_equal(supports[one][role], supports[other][role]) for role in ("query", "key", "value")
                ) and not self._weigh_alike(one, other):
                    raise NoHeadsError("its heads mix: several of them depend on the same features of the same tokens")

    def _weigh_alike(self, one: int, other: int) -> bool:
        weights = self.core.weights.detach()
        return torch.allclose(self.units.of(weights, one), self.units.of(weights, other))

    def _spread_keys(self, product: int, place: tuple[int, Tensor, Tensor]) -> list[str]:
        keys, _, at_keys = place
        # The first token has none before it, and the last none behind.
        ends = (self._support(self._side(product, keys), one) for one in (at_keys[:1], at_keys[-1:]))
        is_spread = any(len(alone.positions(leaf)) > 1 for alone in ends for leaf in alone.masks)
        return ["keys of several tokens"] if is_spread else []

    def _check_widths(self, heads: dict[Role, list[Rows]], product: int, keys: int, *, has_shared: bool) -> None:
        """Refuse heads that have more or fewer features than what attention is given of them."""
        width = self._side(product, keys).shape[-1]
        if has_shared:
            width = len(heads["key"][0].features)
        for role in list(heads):
            expected = width if role != "value" else self.core.values.shape[-1]
            widths = {len(one.features) for one in heads[role]}
            if widths == {expected}:
                continue
            if role == "query":
                del heads["query"]
                continue
            if len(widths) > 1:
                raise NoHeadsError(f"its {role} heads differ in width")
            name = module_of(heads[role][0].parameter)
            count = widths.pop()
            if count < expected:
                raise NoHeadsError(f"a {role} of {expected} features is made of {count} features of `{name}`")
            raise NoHeadsError(f"its {role} heads share features, or mix: each depends on {count} of `{name}`")

    # --- linear, ordered, centred

    def _check_linear(
        self, heads: dict[Role, list[Rows]], members: list[list[int]], product: int, places: Any, *, has_shared: bool
    ) -> set[Role]:
        """Refuse an activation between a map and attention; tell roles that a norm scales."""
        runs = self.trace.again
        if any(len(cores) != len(self.trace.cores) for cores in runs):
            raise UndecidedError("what it computes depends on the values of its projections")
        normed: set[Role] = set()
        n = members[0][0]
        keys, at_query, at_keys = places[n]
        for role in list(heads):
            if role == "value":
                tensors = [cores[self.number].values[n // self.units.count] for cores in runs]
            else:
                side = keys if role == "key" else 1 - keys
                at = at_keys if role == "key" else at_query
                chosen = [cores[self.number].scores[product] for cores in runs]
                tensors = [
                    (one.right if side else one.left).reshape(-1, (one.right if side else one.left).shape[-1])[at]
                    for one in chosen
                ]
            if has_shared and role != "value":  # the part that all heads share may have a norm of its own
                tensors = [tensor[..., self._own_columns(heads[role], product, side)] for tensor in tensors]
            none, one, other, both = (torch.nan_to_num(tensor.detach()) for tensor in tensors)
            one, other, both = one - none, other - none, both - none
            scale = float(both.abs().max()) or 1.0
            if (one + other - both).abs().max() < 1e-4 * scale:
                continue
            sizes = torch.linalg.svdvals(torch.stack([one, other, both], -2))  # (positions, 3)
            if sizes.shape[-1] > 2 and (sizes[..., 2] > _BENT * sizes[..., 0]).any():
                between = f"between its {role} projection and attention lies an activation"
                if role != "query":
                    raise NoHeadsError(between)
                del heads["query"]
                continue
            normed.add(role)
        return normed

    def _order(self, heads: dict[Role, list[Rows]], members: list[list[int]], product: int, places: Any) -> None:
        """Order the features of heads as the columns of what attention is given; rotated ones stay ascending."""
        keys = places[members[0][0]][0]
        tensors = {"query": self._side(product, 1 - keys), "key": self._side(product, keys), "value": self.core.values}
        for role, rows in heads.items():
            columns = self._columns(tensors[role])
            ordered = []
            for one in rows:
                known = [columns.get((one.parameter, feature), {-2}) for feature in one.features]
                places_of = [next(iter(found)) if len(found) == 1 else -2 for found in known]
                if min(places_of) < 0 or len(set(places_of)) < len(places_of):
                    break
                order = sorted(range(len(places_of)), key=places_of.__getitem__)
                ordered.append(replace(one, features=tuple(one.features[i] for i in order)))
            if len(ordered) == len(rows):
                heads[role] = ordered
            elif role == "value":
                raise NoHeadsError("the features of its heads' outputs are no averages of those of one value map")

    def _centre(self, heads: dict[Role, list[Rows]], members: list[list[int]], product: int, places: Any) -> None:
        """See over which features a norm subtracts the mean: all of them together then change nothing."""
        if not self.trace.run.centred:
            return
        run, cores = self.trace.with_means
        core = cores[self.number]
        n = members[0][0]
        keys, at_query, at_keys = places[n]
        for role, rows in heads.items():
            one = core.scores[product]
            side = keys if role == "key" else 1 - keys
            tensor = core.values if role == "value" else (one.right if side else one.left)
            at = at_keys if role == "key" else at_query
            first_value = n // self.units.count * core.values.shape[1]
            at = torch.arange(core.values.shape[1]) + first_value if role == "value" else at
            gradient = weights_at(tensor, at)
            first = rows[0]
            if first.inner is not None:  # the map's answer cuts the graph
                tensor = next(leaf.taken for leaf in run.leaves if leaf.parameter == first.parameter)
                gradient = random_weights(tensor.shape)
            found = derivatives(tensor, gradient, run.tensors)
            target = first if first.inner is None else first.inner
            centring: Centring = ""
            for leaf, derivative in found.items():
                if run.leaves[leaf].parameter != target.parameter or not derivative.any():
                    continue
                live = derivative[derivative.abs().amax(1) > 0]
                start = run.leaves[leaf].start
                own = [feature - start for feature in target.features]
                every = sorted({feature - start for other in rows for feature in (other.inner or other).features})
                if _cancels(live[:, own]):
                    centring = "head"
                elif _cancels(live[:, every]) and len(every) > len(own):
                    centring = "layer"
            if centring:
                heads[role] = [_centred(row, centring) for row in rows]


class NoRowsError(UndecidedError):
    """A role whose rows no single weight gives."""


def _centred(row: Rows, centring: Centring) -> Rows:
    if row.inner is None:
        return Rows(row.parameter, row.features, None, (), centring)
    inner = Rows(row.inner.parameter, row.inner.features, None, (), "head")
    return Rows(row.parameter, row.features, inner, row.gain)


def _cancels(gradients: Tensor) -> bool:
    return bool((gradients.sum(-1).abs() < 1e-4 * gradients.abs().sum(-1)).all())


def _features(support: Support) -> tuple[Any, ...]:
    return tuple((leaf, support.features(leaf)) for leaf in support.masks)


def _are_equal(one: Support, other: Support) -> bool:
    return one.masks.keys() == other.masks.keys() and all(
        torch.equal(mask, other.masks[leaf]) for leaf, mask in one.masks.items()
    )


def _sums(role: str, found: Iterable[Sequence[Rows]]) -> str:
    names = sorted({module_of(one.parameter) for rows in found for one in rows})
    return f"its {role}s are sums of what `{'` and `'.join(names)}` give"


def module_of(parameter: str) -> str:
    """Give the path of a map by that of its matrix.

    Args:
        parameter: dotted path of the matrix.

    Returns:
        The path of the module, or of the bare parameter.
    """
    return parameter.removesuffix(".weight")
