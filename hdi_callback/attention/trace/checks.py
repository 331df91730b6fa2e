"""Refusals of heads whose supports alone look right: mixed heads, activations, differing widths, no tokens.

Each check takes a `CoreView`, and raises `NoHeadsError` with what it found.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from hdi_callback.attention.layer.heads import INPUT_ROLES, Role
from hdi_callback.attention.trace.core_view import CoreView, own_columns
from hdi_callback.attention.trace.graph_walk import is_fake_quantised
from hdi_callback.attention.trace.head_rows import (
    NOT_FOLLOWED,
    VALUES_ARE_INPUTS,
    NoHeadsError,
    Rows,
    UndecidedError,
    module_of,
    named,
)
from hdi_callback.attention.trace.role_rows import takes_attention
from hdi_callback.attention.trace.support import Support

_ONE_TOKEN = "one of its softmaxes runs over copies of a single token, as with several rounds of hashing"
_BLOCKS = "one of its softmaxes weighs blocks of {count} tokens, not single tokens"
_FEATURES = "each of its {role}s is of a feature and not of a token, as in attention over channels"
_PLACES = "each of its {role}s holds a few features of several tokens, as after a reshape without a transpose"
_MIXED = "a {role} head depends on {count} outputs of `{name}`, more than its width: heads share or mix features"
_SAMPLES = ", and its attention mixes the samples of a batch"
_BENT = 1e-3  # the third singular value of two vectors and their sum, relative to the first


def require_tokens(view: CoreView) -> None:
    """Refuse keys and values whose positions are features and not tokens."""
    run = view.trace.run
    for role in INPUT_ROLES[1:]:
        tensor, at = view.tensor(role), view.at(view.first, role)
        if role == "value":
            weights = view.core.weights[view.first // view.units.count]
            at = at[weights.amax(0) > 0]
        chosen = at[torch.linspace(0, len(at) - 1, min(4, len(at))).long()]
        alone = [one for i in sorted(set(chosen.tolist())) if (one := run.support(tensor, [i]))]
        if role == "value" and len(alone) < len(set(chosen.tolist())) and _come_from_other_cores(view, alone):
            raise UndecidedError(VALUES_ARE_INPUTS)
        found = {frozenset(run.features(support)) for support in alone}
        are_of_one_map = len({frozenset(run.maps(support)) for support in alone}) == 1
        if len(found) > 1 and are_of_one_map and sum(map(len, found)) == len(frozenset().union(*found)):
            # The tokens of every head.
            if all(len(support.positions(leaf)) == 1 for support in alone for leaf in support.masks):
                raise NoHeadsError("its heads mix: the weights of one head depend on the scores of several")
            places = {
                frozenset((leaf, at) for leaf in support.masks for at in support.positions(leaf)) for support in alone
            }
            reason = (_FEATURES if len(places) == 1 else _PLACES).format(role=role)
            raise NoHeadsError(reason + (_SAMPLES if _mixes_samples(view) else ""))
        # A token may occur twice, as where tokens are sorted into buckets.
        if len(alone) > 1 and all(support.is_equal(other) for support, other in itertools.pairwise(alone)):
            if _are_equal_rows(tensor, chosen):
                is_one_token = all(len(alone[0].positions(leaf)) == 1 for leaf in alone[0].masks)
                if is_one_token and len(view.trace.cores) > 1:
                    raise NoHeadsError(_ONE_TOKEN)
                raise NoHeadsError(f"its {role}s are the same for all tokens")
            if not are_mixtures(view, tensor, chosen, alone[0]):
                raise NoHeadsError(f"each of its {role}s mixes the features of all tokens")


def _come_from_other_cores(view: CoreView, values: list[Support]) -> bool:
    """Return whether the averaged values are outputs of other cores, as where a layer weights earlier layers."""
    leaves = {leaf for value in values for leaf in value.masks}
    at_keys = view.at(view.first, "key")
    keys = view.trace.run.support(view.tensor("key"), at_keys).masks.keys()
    return bool(leaves) and leaves == set(keys) and all(takes_attention(view.trace, leaf) for leaf in leaves)


def _mixes_samples(view: CoreView) -> bool:
    """Return whether one head attends over several samples, as where a reshape takes channels for the batch.

    Of images alone: what has fewer dims may have its tokens first.
    """
    run, samples = view.trace.run, set()
    for support in view.supports[view.first].values():
        for leaf in support.masks:
            made = Support.of(run.leaves[leaf].input, run.inputs, support.positions(leaf))
            for number in made.masks:
                shape = run.inputs[number].shape
                if len(shape) >= 4:
                    samples |= {at // shape[1:-1].numel() for at in made.positions(number)}
    return len(samples) > 1


def are_mixtures(view: CoreView, tensor: Tensor, chosen: Tensor, alone: Support) -> bool:
    """Recognise weighted sums over tokens, each with weights of its own, in which every feature keeps its column.

    Args:
        view: of the core.
        tensor: queries, keys or values, ``(N, positions, width)``.
        chosen: some of the positions, counted over all N.
        alone: what the first of them depends on.

    Returns:
        True if so.
    """
    columns = view.trace.run.columns(tensor.reshape(-1, tensor.shape[-1])[chosen])
    found = [columns.get(feature, -2) for feature in view.trace.run.features(alone)]
    return min(found) >= 0 and len(set(found)) == len(found)


def added_inputs(view: CoreView) -> str:
    """Recognise an input that is added to values without a projection, such as the values of an earlier layer."""
    run, cores = view.trace.without_maps
    if len(cores) != len(view.trace.cores):
        return ""
    at_values = view.at(view.first, "value").tolist()
    for at in (at_values[0], at_values[-1]):
        made = view.trace.run.support(view.core.values, [at])
        if made and Support.of(cores[view.number].values, run.inputs, [at]):
            return f"the input that is added to the values from {named(sorted(view.trace.run.maps(made)))}"
    return ""


def learned_tokens(view: CoreView) -> str:
    """Recognise keys that no map gives and no input: learned tokens beside those of the projections, as a prefix.

    Args:
        view: of the core.

    Returns:
        What is left out, in words; empty where every key is of a token, or padding.
    """
    _, cores = view.trace.without_maps
    if len(cores) != len(view.trace.cores) or view.product >= len(cores[view.number].scores):
        return ""
    keys, without = view.tensor("key"), view.tensor("key", cores[view.number])
    if keys.shape != without.shape:
        return ""
    at = view.at(view.first, "key")
    rows, others = (torch.nan_to_num(tensor.detach()).reshape(-1, keys.shape[-1])[at] for tensor in (keys, without))
    at = at[(rows == others).all(-1) & rows.any(-1)]
    if not len(at) or len(at) == len(rows) or Support.of(keys, view.trace.run.inputs, at):
        return ""
    return (
        "learned keys that no projection gives"
        if Support.of(keys, list(view.trace.run.parameters.values()), at)
        else ""
    )


def refuse_mixed(view: CoreView, members: list[list[int]]) -> None:
    """Refuse heads of equal rows at the same tokens: they mix, or their heads are made by something else."""
    weights = view.core.weights.detach()
    for of_head in members:
        for one, other in itertools.islice(itertools.pairwise(of_head), 8):
            mine, others = view.supports[one], view.supports[other]
            are_of_the_same = all(mine[role].is_equal(others[role]) for role in INPUT_ROLES)
            if are_of_the_same and not torch.allclose(view.units.of(weights, one), view.units.of(weights, other)):
                raise NoHeadsError("its heads mix: several heads depend on the same features of the same tokens")


def keys_of_several_tokens(view: CoreView) -> list[str]:
    """Remark where a key is made of several tokens, as by a convolution."""
    at_keys = view.at(view.first, "key")
    # The first token has none before it, and the last none behind.
    ends = (view.trace.run.support(view.tensor("key"), at) for at in (at_keys[:1], at_keys[-1:]))
    return ["keys of several tokens"] if any(end.is_of_several_positions for end in ends) else []


def require_widths(view: CoreView, heads: dict[Role, list[Rows]], *, has_shared: bool) -> None:
    """Refuse heads that have more or fewer features than attention takes of them."""
    for role in list(heads):
        expected = view.tensor(role).shape[-1]
        if has_shared and role != "value":
            expected = len(heads["key"][0].features)
        widths = {len(rows.features) for rows in heads[role]}
        if widths == {expected}:
            continue
        if role == "query":
            del heads["query"]
            continue
        if len(widths) > 1 and max(widths) <= expected:
            raise NoHeadsError(f"its {role} heads differ in width")
        name = module_of(heads[role][0].parameter)
        count = max(widths)  # where an activation cuts off what some of them depend on, others depend on more
        if count > expected:
            raise NoHeadsError(_MIXED.format(role=role, count=count, name=name))
        matrix = view.trace.source_matrix(view.core.values) if role == "value" else None
        if matrix is not None:  # by weights that a map gives, say, as of several experts
            raise NoHeadsError(NOT_FOLLOWED.format(role=role, name=module_of(matrix)))
        of_one = view.trace.run.support(view.tensor(role), view.at(view.first, role)[:1])
        tokens = max((len(of_one.positions(leaf)) for leaf in of_one.masks), default=1)
        if tokens > 1 and tokens * count == expected:
            raise NoHeadsError(_BLOCKS.format(count=tokens))
        raise NoHeadsError(f"a {role} of {expected} features depends on only {count} outputs of `{name}`")


def require_linear(view: CoreView, heads: dict[Role, list[Rows]], *, has_shared: bool) -> set[Role]:
    """Refuse an activation between a map and attention; return the roles that a norm scales."""
    runs = view.trace.again
    if any(len(cores) != len(view.trace.cores) for cores in runs):
        raise UndecidedError("which attention it computes depends on the outputs of its projections")
    normed: set[Role] = set()
    for role in list(heads):
        tensors = [view.tensor(role, cores[view.number]) for cores in runs]
        tensors = [tensor.reshape(-1, tensor.shape[-1])[view.at(view.first, role)] for tensor in tensors]
        if has_shared and role != "value":  # the part that all heads share may have a norm of its own
            tensor = view.tensor(role)
            own = own_columns(view.trace.run.columns(tensor), heads[role], tensor.shape[-1])
            tensors = [tensor[..., own] for tensor in tensors]
        none, one, other, both = (torch.nan_to_num(tensor.detach()) for tensor in tensors)
        one, other, both = one - none, other - none, both - none
        scale = float(both.abs().max()) or 1.0
        if (one + other - both).abs().max() < 1e-4 * scale:
            continue
        sizes = torch.linalg.svdvals(torch.stack([one, other, both], -2))  # (positions, 3)
        if sizes.shape[-1] < 3 or not (sizes[..., 2] > _BENT * sizes[..., 0]).any():
            normed.add(role)
        elif role == "query":
            del heads["query"]
        elif _are_chosen_by_values(view):
            raise NoHeadsError("which tokens it attends to depends on the outputs of its projections")
        else:
            several = _maps_with_others(view, role, heads[role])
            if several:
                raise NoHeadsError(f"its {role}s are computed from the outputs of {several}, and not as their sum")
            what = "a fake quantisation" if is_fake_quantised(view.tensor(role)) else "an activation"
            raise NoHeadsError(f"its {role} projection is followed by {what}")
    return normed


def _maps_with_others(view: CoreView, role: Role, rows: list[Rows]) -> str:
    """Name the maps of a role of several, as where a condition scales what a map gives; none where there is one."""
    own, tensor = {row.parameter for row in rows}, view.tensor(role)
    maps = set(view.trace.run.maps(view.trace.run.support(tensor, view.at(view.first, role))))
    return named(sorted(maps | own)) if maps - own else ""


def _are_chosen_by_values(view: CoreView) -> bool:
    """Return whether a value is of another token in another run, as where tokens are sorted by the outputs of maps."""
    at_values = view.at(view.first, "value").tolist()
    found = []
    for run, cores in view.trace.with_draws:
        alone = [run.support(cores[view.number].values, [at]) for at in (at_values[0], at_values[len(at_values) // 2])]
        found.append([{(leaf, support.positions(leaf)) for leaf in support.masks} for support in alone])
    return any(one != found[0] for one in found[1:])


def _are_equal_rows(tensor: Tensor, chosen: Tensor) -> bool:
    rows = tensor.detach().reshape(-1, tensor.shape[-1])[chosen]
    return torch.allclose(rows, rows[:1].expand_as(rows), rtol=1e-4, atol=1e-6 * float(rows.abs().max()))
