"""`HeadChecks`: what refuses heads whose supports alone would pass: mixed, bent, of other widths, not of tokens."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from hdi_callback.attention.layer.heads import INPUT_ROLES, Role
from hdi_callback.attention.trace.core_view import CoreView
from hdi_callback.attention.trace.head_rows import NOT_FOLLOWED, NoHeadsError, Rows, UndecidedError, module_of
from hdi_callback.attention.trace.support import Support, weights_at

_BENT = 1e-3  # the third singular value of two vectors and their sum, relative to the first


class HeadChecks(CoreView):
    """Checks of the heads of one core; each raises `NoHeadsError` with what it found."""

    def require_tokens(self, n: int, product: int, place: tuple[int, Tensor, Tensor], at_values: Tensor) -> None:
        """Refuse what is averaged, or met, if its positions are features and no tokens."""
        keys, _, at_keys = place
        weights = self.core.weights[n // self.units.count]
        live = at_values[[bool(weights[:, i].max() > 0) for i in range(len(at_values))]]
        for what, tensor, at in (("keys", self.side(product, keys), at_keys), ("values", self.core.values, live)):
            chosen = at[torch.linspace(0, len(at) - 1, min(4, len(at))).long()]
            alone = [one for i in sorted(set(chosen.tolist())) if (one := self.support(tensor, torch.tensor([i])))]
            found = {tuple((self.trace.parameter_of(leaf), one.features(leaf)) for leaf in one.masks) for one in alone}
            parameters = {tuple(name for name, _ in one) for one in found}
            apart = len({feature for one in found for name, of in one for feature in ((name, i) for i in of)}) == sum(
                len(of) for one in found for _, of in one
            )
            if len(found) > 1 and len(parameters) == 1 and apart:
                if all(len(one.positions(leaf)) == 1 for one in alone for leaf in one.masks):  # tokens of every head
                    raise NoHeadsError("its heads mix: the weights of one depend on the scores of several")
                raise NoHeadsError(f"its {what} are those of features, not of tokens")
            # A token may be met twice, as where tokens are sorted into buckets.
            if len(alone) > 1 and all(_are_equal(one, other) for one, other in itertools.pairwise(alone)):
                if _are_one(tensor, chosen):
                    raise NoHeadsError(f"its {what} are the same for all tokens")
                if not self.are_mixtures(tensor, chosen, alone):
                    raise NoHeadsError(f"its {what} mix all tokens, and features with them")

    def are_mixtures(self, tensor: Tensor, chosen: Tensor, alone: list[Support]) -> bool:
        """Recognise sums over tokens, each with weights of its own, that keep every feature in a column of its own.

        Args:
            tensor: queries, keys or values, ``(N, positions, width)``.
            chosen: some of the positions, counted over all N.
            alone: what the first of them depends on.

        Returns:
            True if so.
        """
        columns = self.columns(tensor.reshape(-1, tensor.shape[-1])[chosen])
        own = {
            (self.trace.parameter_of(leaf), self.trace.leaves[leaf].start + feature)
            for leaf in alone[0].masks
            for feature in alone[0].features(leaf)
        }
        found = [columns.get(one, {-2}) for one in own]
        return all(len(one) == 1 and min(one) >= 0 for one in found) and len(set(map(min, found))) == len(found)

    def added_inputs(self, at_values: Tensor) -> str:
        """Recognise values to which an input is added that no map takes, such as those of an earlier layer."""
        run, cores = self.trace.without_maps
        if len(cores) != len(self.trace.cores):
            return ""
        inputs = [one for name, one in run.others.items() if name.startswith("input")]
        for at in at_values[:: max(1, len(at_values) - 1)]:  # of the first and the last token
            values = cores[self.number].values
            gradient = torch.zeros(values.shape)
            gradient.view(-1, gradient.shape[-1])[at] = 1.0
            made = self.support(self.core.values, at[None])
            if made and Support.of(values, gradient, inputs):
                names = "` and `".join(sorted({module_of(self.trace.parameter_of(leaf)) for leaf in made.masks}))
                return f"what one of its inputs adds to the values that `{names}` gives"
        return ""

    def refuse_mixed(self, members: list[list[int]], supports: dict[int, dict[Role, Support]]) -> None:
        """Refuse heads of equal rows at the same tokens: they mix, or their heads are made by something else."""
        for of_head in members:
            for one, other in itertools.islice(itertools.pairwise(of_head), 8):
                if all(
                    _are_equal(supports[one][role], supports[other][role]) for role in INPUT_ROLES
                ) and not self._weigh_alike(one, other):
                    raise NoHeadsError("its heads mix: several of them depend on the same features of the same tokens")

    def _weigh_alike(self, one: int, other: int) -> bool:
        weights = self.core.weights.detach()
        return torch.allclose(self.units.of(weights, one), self.units.of(weights, other))

    def spread_keys(self, product: int, place: tuple[int, Tensor, Tensor]) -> list[str]:
        """Remark where a key is made of several tokens, as by a convolution."""
        keys, _, at_keys = place
        # The first token has none before it, and the last none behind.
        ends = (self.support(self.side(product, keys), one) for one in (at_keys[:1], at_keys[-1:]))
        is_spread = any(len(alone.positions(leaf)) > 1 for alone in ends for leaf in alone.masks)
        return ["keys of several tokens"] if is_spread else []

    def require_widths(self, heads: dict[Role, list[Rows]], product: int, keys: int, *, has_shared: bool) -> None:
        """Refuse heads that have more or fewer features than attention takes of them."""
        width = self.side(product, keys).shape[-1]
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
            if len(widths) > 1 and max(widths) <= expected:
                raise NoHeadsError(f"its {role} heads differ in width")
            name = module_of(heads[role][0].parameter)
            count = max(widths)  # where an activation cuts off what some of them depend on, others depend on more
            matrix = self.matrix_behind_values() if role == "value" and count < expected else None
            if matrix is not None:  # by weights that a map gives, say, as of several experts
                raise NoHeadsError(NOT_FOLLOWED.format(role=role, name=module_of(matrix)))
            if count < expected:
                raise NoHeadsError(f"a {role} of {expected} features is made of {count} features of `{name}`")
            raise NoHeadsError(f"its {role} heads share features, or mix: each depends on {count} of `{name}`")

    def _is_chosen_by_values(self, n: int) -> bool:
        """Return whether a value is of another token in another run, as where tokens are sorted by what maps give."""
        found = []
        for run, cores in self.trace.with_draws:
            values = cores[self.number].values
            at = torch.tensor([n * values.shape[1] + place for place in (0, values.shape[1] // 2)])
            alone = (Support.of(values, weights_at(values, one[None]), run.tensors) for one in at)
            found.append([{(leaf, one.positions(leaf)) for leaf in one.masks} for one in alone])
        return any(one != found[0] for one in found[1:])

    def require_linear(
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
                tensors = [tensor[..., self.own_columns(heads[role], product, side)] for tensor in tensors]
            none, one, other, both = (torch.nan_to_num(tensor.detach()) for tensor in tensors)
            one, other, both = one - none, other - none, both - none
            scale = float(both.abs().max()) or 1.0
            if (one + other - both).abs().max() < 1e-4 * scale:
                continue
            sizes = torch.linalg.svdvals(torch.stack([one, other, both], -2))  # (positions, 3)
            if sizes.shape[-1] > 2 and (sizes[..., 2] > _BENT * sizes[..., 0]).any():
                between = f"between its {role} projection and attention lies an activation"
                if role != "query":
                    if self._is_chosen_by_values(n // self.units.count):
                        raise NoHeadsError("which tokens it attends to depends on the values of its projections")
                    raise NoHeadsError(between)
                del heads["query"]
                continue
            normed.add(role)
        return normed


def _are_one(tensor: Tensor, chosen: Tensor) -> bool:
    rows = tensor.detach().reshape(-1, tensor.shape[-1])[chosen]
    return torch.allclose(rows, rows[:1].expand_as(rows), rtol=1e-4, atol=1e-6 * float(rows.abs().max()))


def _are_equal(one: Support, other: Support) -> bool:
    return one.masks.keys() == other.masks.keys() and all(
        torch.equal(mask, other.masks[leaf]) for leaf, mask in one.masks.items()
    )
