"""Comparison of a claim with a traced run, and of two modules with each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from hdi_callback.attention.layer.heads import AttentionLayer
from hdi_callback.attention.trace.layers import Found
from hdi_callback.attention.trace.traced_run import TracedRun


def compute_the_same(one: TracedRun, other: TracedRun) -> bool:
    """Return whether two modules compute the same when their linear maps have the same random outputs.

    Maps of the same path have the same output in all runs, and parameters of the same name are drawn the same. So two
    modules that give the same, and give the same to each of their maps, cut their features into heads in the same way.

    Args:
        one: a run.
        other: a run of another module, with the same inputs.

    Returns:
        True if so.
    """
    if [leaf.parameter for leaf in one.leaves] != [leaf.parameter for leaf in other.leaves]:
        return False
    if (one.error is None) != (other.error is None):
        return False
    pairs = [(a.input, b.input) for a, b in zip(one.leaves, other.leaves)]
    if len(one.outputs) != len(other.outputs):
        return False
    pairs += list(zip(one.outputs, other.outputs))
    return all(_are_equal(a.detach(), b.detach()) for a, b in pairs)


def _are_equal(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return torch.equal(one, other) or torch.allclose(one, other, rtol=1e-5, atol=1e-6, equal_nan=True)


def carried_over(found: Sequence[Found], one: nn.Module, other: nn.Module, name: str, new_name: str) -> list[Found]:
    """The layers and reasons of a module, carried over to another module that computes the same.

    Args:
        found: what was found in a module.
        one: that module.
        other: the module that computes the same.
        name: dotted path of the one.
        new_name: dotted path of the other.

    Returns:
        The same layers of the other module, and the same reasons.
    """
    parts = {id(part): other.get_submodule(path) for path, part in one.named_modules()}
    moved = []
    for item in found:
        layer = item.layer
        if layer is not None:
            slices = {role: part.moved_to(parts[id(part.module)]) for role, part in layer.slices.items()}
            projection = layer.output_projection
            layer = replace(
                layer,
                name=".".join(part for part in (new_name, layer.name[len(name) :].lstrip(".")) if part),
                module=parts[id(layer.module)],
                slices=slices,
                output_projection=None if projection is None else parts[id(projection)],
            )
        moved.append(replace(item, layer=layer))
    return moved


def contradiction_of(claim: AttentionLayer, found: Sequence[Found], name: str) -> str | None:
    """Compare the heads that a layer claims with those of a run of its module.

    Args:
        claim: the layer.
        found: what was read of the run.
        name: dotted path of the module that was run.

    Returns:
        What was observed instead, as a clause; `None` if it agrees, or if nothing was observed of it.
    """
    layers = [result.layer for result in found if result.layer is not None and result.layer.module is claim.module]
    if not layers:
        return next((result.reason for result in found if result.layer is None and not result.path), None)
    shown = [_difference(claim, layer) for layer in layers]
    return None if None in shown else shown[0]


def agreed_part(claim: AttentionLayer, found: Sequence[Found]) -> AttentionLayer | None:
    """Return what is left of a claim whose heads a run of its module shows as they are, with more left out.

    Args:
        claim: the layer.
        found: what was read of the run.

    Returns:
        The claim with the roles that both have, and with what the run leaves out; `None` if they differ otherwise.
    """
    for result in found:
        shown = result.layer
        if shown is None or shown.module is not claim.module or not shown.left_out or claim.left_out:
            continue
        if _difference(replace(claim, left_out=shown.left_out), shown) is None:
            slices = {role: part for role, part in claim.slices.items() if role in shown.slices}
            projection = claim.output_projection if "output" in slices else None
            return replace(claim, slices=slices, output_projection=projection, left_out=shown.left_out)
    return None


def _difference(claim: AttentionLayer, shown: AttentionLayer) -> str | None:
    counts = (claim.num_heads, claim.num_key_heads, claim.head_dim, claim.value_dim)
    others = (shown.num_heads, shown.num_key_heads, shown.head_dim, shown.value_dim)
    if counts != others:
        return (
            f"it computes {others[0]} heads and {others[1]} key heads, with {others[2]} features in a key and "
            f"{others[3]} in a value; the layer claims {counts[0]} and {counts[1]}, with {counts[2]} and {counts[3]}"
        )
    if shown.left_out and not claim.left_out:
        return f"the layer does not account for {shown.left_out}"
    for role in claim.slices.keys() & shown.slices.keys():
        mine, theirs = claim.weight(role).detach(), shown.weight(role).detach()
        if not _same_heads(mine, theirs):
            return f"its {role} heads are not the rows that the layer claims"
    return None


def _same_heads(mine: Tensor, theirs: Tensor) -> bool:
    """Return whether both hold the same rows, in whatever order within a head."""
    if mine.shape != theirs.shape:
        return False
    if mine.is_meta:
        return True
    # A weight that is not finite is no evidence: both read the same parameter.
    mine, theirs = torch.nan_to_num(mine), torch.nan_to_num(theirs)
    return all(
        torch.equal(*(head.flatten(1)[head.flatten(1).sum(1).argsort()] for head in pair)) for pair in zip(mine, theirs)
    )
