"""`RoleRows`: the rows of queries, keys and values in the maps that give them, and in what feeds those."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hdi_callback.attention.layer.heads import Role
from hdi_callback.attention.trace.core_view import CoreView
from hdi_callback.attention.trace.head_rows import NoHeadsError, NoRowsError, Rows, module_of
from hdi_callback.attention.trace.support import Support, agreed, columns_of, derivatives, random_weights, weights_at

_KEPT: tuple[Role, Role] = ("key", "value")


class RoleRows(CoreView):
    """The rows of each role of one head, and what of a core is left out of them."""

    def shared_source(self, supports: dict[Role, Support]) -> frozenset[int]:
        """Maps that feed query, key and value alike: they make the tokens, and are no part of heads."""
        sources = []
        for support in supports.values():
            for leaf in support.masks:
                fed = self.trace.fed(leaf)
                sources.append({other: fed.features(other) for other in fed.masks})
        same = bool(sources) and all(one == sources[0] for one in sources)
        return frozenset(sources[0]) if same else frozenset()

    def rows(self, role: Role, support: Support, shared_source: frozenset[int]) -> list[Rows]:
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
        if self._adds_by_token(leaf):  # positions, say: what it takes are tokens, and no rows of another map alone
            return ()
        name = module_of(trace.parameter_of(leaf))
        reason = f"its projection `{name}` takes the output of another one"
        taken = trace.leaves[leaf].taken
        flat = taken.reshape(-1, taken.shape[-1])
        position = support.positions(leaf)[0]
        token = flat[position]
        if len(sources) > 1:
            alone = Support.of(token, random_weights(token.shape), trace.tensors)
            sources = list(alone.masks)
        if len(sources) != 1:
            raise NoRowsError(reason)
        (source,) = sources
        codes = columns_of(token[None], [trace.tensors[source]])
        if 0 not in codes or (codes[0] == -2).any() or int((codes[0] >= 0).any(1).sum()) != 1:
            raise NoRowsError(reason)
        read = agreed(codes[0])
        features = [
            int((read == column).nonzero()[0]) if (read == column).sum() == 1 else -1 for column in range(len(token))
        ]
        if min(features) < 0 or (
            trace.fed(source).masks and not trace.takes_input(source) and trace.fed(source).masks.keys() != {source}
        ):
            raise NoRowsError(reason)
        gains = derivatives(token, torch.ones(token.shape), [trace.tensors[source]])[0]
        gain = gains[(codes[0] >= 0).any(1)][0][features]
        start = trace.leaves[source].start
        inner = Rows(trace.parameter_of(source), tuple(start + feature for feature in features))
        return inner, tuple((gain / gain.abs().max()).tolist())

    def _adds_by_token(self, leaf: int) -> bool:
        """Return whether a map takes something that differs by token where other maps answer nothing."""
        run, _ = self.trace.without_maps
        if len(run.leaves) != len(self.trace.leaves) or run.leaves[leaf].taken.dim() < 3:
            return False
        taken = torch.nan_to_num(run.leaves[leaf].taken.detach())
        first = taken[..., :1, :]
        return bool((taken - first).abs().max() > 1e-4 * taken.abs().max())

    def _is_in_front(self, sources: Sequence[int]) -> bool:
        """Return whether a map in front of all projections is of this attention, and does not make its tokens."""
        is_own = not self.core.path or self.trace.parameter_of(sources[0]).startswith(f"{self.core.path}.")
        return len(sources) == 1 and is_own and not self._takes_attention(sources[0])

    def _takes_attention(self, leaf: int) -> bool:
        """Recognise a map that takes what an attention core gives, with no map in between."""
        taken = self.trace.leaves[leaf].taken
        return taken.requires_grad and any(
            bool(found[0].any())
            for core in self.trace.cores
            if (found := derivatives(taken, random_weights(taken.shape), [core.output]))
        )

    def leave_out_shared(self, of_heads: dict[Role, list[list[Rows]]], product: int, keys: int) -> bool:
        """Leave out a part of keys that all heads share beside their own, and what of queries meets it.

        That is the rotary part of latent attention, whose columns are apart from those of the heads' own keys.

        Returns:
            True if there is one.
        """
        found = of_heads["key"]
        shared = set(found[0]).intersection(*map(set, found[1:])) if len(found) > 1 else set()
        if not shared or any(set(one) == shared for one in found):
            return False
        columns = self.columns(self.side(product, keys))
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
        columns = self.columns(self.side(product, 1 - keys))
        for rows in of_heads["query"]:
            for place, one in enumerate(rows):
                kept = tuple(
                    feature for feature in one.features if columns.get((one.parameter, feature), {-2}) <= own - {-2}
                )
                rows[place] = replace(one, features=kept)
            rows[:] = [one for one in rows if one.features]
        return True

    def leave_out_added(self, of_heads: dict[Role, list[list[Rows]]]) -> str:
        """Leave out what another map adds to the keys or values of tokens, such as what their positions give.

        Of several maps, that of the tokens takes what the one map of the other role takes, and no other of them does.

        Returns:
            What is left out, in words.
        """
        pairs: tuple[tuple[Role, Role], ...] = (("key", "value"), ("value", "key"))
        for role, other in pairs:
            names = dict.fromkeys(one.parameter for rows in of_heads[role] for one in rows)
            of_tokens = {one.parameter for rows in of_heads[other] for one in rows}
            if len(of_tokens) != 1 or not any(len(rows) > 1 for rows in of_heads[role]):
                continue
            kept = [name for name in names if self._take_the_same(name, next(iter(of_tokens)))]
            if len(kept) == 1 and all(any(one.parameter == kept[0] for one in rows) for rows in of_heads[role]):
                of_heads[role] = [[one for one in rows if one.parameter == kept[0]] for rows in of_heads[role]]
                added = "` and `".join(module_of(name) for name in names if name != kept[0])
                return f"what `{added}` adds to its {role}s"
        return ""

    def _take_the_same(self, one: str, other: str) -> bool:
        taken: list[list[Tensor]] = [
            [leaf.taken for place, leaf in enumerate(self.trace.leaves) if self.trace.parameter_of(place) == name]
            for name in (one, other)
        ]
        return any(a.shape == b.shape and torch.equal(a, b) for a in taken[0] for b in taken[1])

    def second_stream(self, supports: dict[int, dict[Role, Support]], first: int, keys: Tensor, at: Tensor) -> str:
        """Recognise keys and values that come from one map for some tokens and from another for others.

        Each stream has its own maps, and no token is of both. Kept is that of the tokens that the first query is of.

        Args:
            supports: of each part of the core; what a second stream gives is taken out of them.
            first: number of the part whose tokens are looked at.
            keys: ``(N, positions, width)``.
            at: positions of the keys of that part, counted over all N.

        Returns:
            What is left out; empty if there is one stream.
        """
        values = self.core.values
        at_values = first // self.units.count * values.shape[1] + at % keys.shape[1]
        if keys.shape[1] != values.shape[1] or int(at_values.max()) >= values.shape[0] * values.shape[1]:
            return ""
        names = {role: {self.trace.parameter_of(leaf) for leaf in supports[first][role].masks} for role in _KEPT}
        if all(len(one) < 2 for one in names.values()):
            return ""
        streams: dict[tuple[str, str], None] = {}
        for of_key, of_value in zip(at, at_values):
            maps = (self.support(keys, of_key[None]).masks, self.support(values, of_value[None]).masks)
            if not maps[0] or not maps[1]:
                continue
            if any(len({self.trace.parameter_of(leaf) for leaf in one}) > 1 for one in maps):
                return ""  # sums
            streams[tuple(self.trace.parameter_of(next(iter(one))) for one in maps)] = None  # type: ignore[index]
        if len(streams) != 2:
            return ""
        kept = self._stream_of_query(list(streams), supports[first])
        for of_roles in supports.values():
            for role, name in zip(_KEPT, kept):
                leaves = [leaf for leaf in of_roles[role].masks if self.trace.parameter_of(leaf) == name]
                of_roles[role] = of_roles[role].only(leaves)
        dropped = sorted({name for one in streams for name in one} - set(kept))
        named = " and ".join(f"`{module_of(name)}`" for name in dropped)
        return f"keys and values of a second stream, which {named} give"

    def _stream_of_query(self, streams: list[tuple[str, str]], supports: dict[Role, Support]) -> tuple[str, str]:
        """Choose the stream of the tokens that ask: by its map, by what that is given, by the places of its tokens."""
        query, keys = supports["query"], supports["key"]
        own = {self.trace.parameter_of(leaf) for leaf in query.masks}
        of_query = {self._source(leaf) for leaf in query.masks}
        leaves = {one: [leaf for leaf in keys.masks if self.trace.parameter_of(leaf) == one[0]] for one in streams}
        alike = [one for one in streams if one[0] in own]
        alike = alike or [one for one in streams if any(self._source(leaf) in of_query for leaf in leaves[one])]
        if len(alike) > 1:  # parts of one input
            places = {place for leaf in query.masks for place in self._places(leaf, query.positions(leaf))}
            alike = [one for one in alike if places <= {at for leaf in leaves[one] for at in self._places(leaf)}]
            if len(alike) != 1:
                raise NoHeadsError("its keys are of two streams of tokens, and whose queries are whose is not shown")
        return alike[0] if alike else streams[0]

    def _places(self, leaf: int, positions: Sequence[int] = ()) -> set[tuple[int, int]]:
        """Places in the inputs that a map is given, at some or all of its positions."""
        taken = self.trace.leaves[leaf].taken
        inputs = [one for name, one in self.trace.run.others.items() if name.startswith("input")]
        weights = weights_at(taken, torch.tensor(positions)) if positions else random_weights(taken.shape)
        found = Support.of(taken, weights, inputs)
        return {(number, place) for number in found.masks for place in found.positions(number)}

    def _source(self, leaf: int) -> tuple[frozenset[int], frozenset[int]]:
        """What a map is given: other maps, and inputs."""
        return frozenset(self.trace.fed(leaf).masks), frozenset(self.trace.inputs_of(leaf).masks)
