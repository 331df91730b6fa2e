"""Layers from observation alone: attention that no claim explains, described by the features of its inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from hdi_callback.attention.layer.head_slice import NO_MATRIX
from hdi_callback.attention.layer.heads import (
    INPUT_ROLES,
    AttentionLayer,
    HeadSlice,
    HeadWeight,
    RefusedError,
    Role,
    check_layer,
)
from hdi_callback.attention.observe.compare.cores import ObservedCore, no_softmax
from hdi_callback.attention.observe.compare.found_rows import FoundRows, find_columns, find_rows
from hdi_callback.attention.observe.compare.samples import MapCall


def propose(core: ObservedCore, maps: Sequence[MapCall], model: nn.Module) -> AttentionLayer | str:
    """Describe an attention by the features of linear maps that it takes.

    Queries and keys may be rotated by position; heads after norms, sums or two maps in a row are not found.

    Args:
        core: the attention.
        maps: all maps of the forward.
        model: the model, whose modules and parameters are named in them.

    Returns:
        The layer, its heads side by side as the attention has them; or why there is none.
    """
    if core.kind != "softmax":
        return no_softmax(core.kind)
    if core.mixed:
        return f"its scores or weights are mixed by `{core.mixed}`"
    if core.tied > 1:  # that rows of all roles are in one order a traced run alone makes sure
        return "its scores are summed over rows of tokens"
    if core.heads == 1:
        return "it has a single head"
    if core.unread and not core.samples:
        return core.unread
    found: dict[Role, FoundRows] = {}
    for role in INPUT_ROLES:
        rows = find_rows(core, maps, role, of_all_tokens=True)
        if rows is None:
            if role == "key":
                return "its keys are not the output of a single linear map for all tokens"
            continue
        before = None if rows.call is None else _map_in_front(core, rows.call, maps)
        if before is not None:
            return f"its {role} heads come from `{before.name}` and `{rows.map}` in a row"
        found[role] = rows
    columns = find_columns(core, maps)
    if columns is not None:
        found["output"] = columns
    module = model.get_submodule(core.module)
    slices: dict[Role, HeadWeight] = {}
    for role, one in found.items():
        part = slice_of(model, core.module, one) if one.map else None  # the model itself has no name
        if part is None or part.contradiction(role == "output") == NO_MATRIX:
            where = f"`{one.map}`" if one.map else "the model itself"
            return f"its {role} heads come from {where}, which multiplies with a matrix that is not a parameter"
        if role == "output" and one.call is not None and part.features[1] != one.call.outputs.shape[1]:
            columns = None  # a part of a parameter, which holds other maps beside
            continue
        slices[role] = part
    key = slices["key"]
    width = slices["value"].width if "value" in slices else key.width
    receiver = None if columns is None else _called(model, columns.map)
    layer = AttentionLayer(
        core.module,
        module,
        core.heads,
        key.heads,
        key.width,
        width,
        f"observed ({', '.join(f'{role}: {one.how}' for role, one in found.items())})",
        slices,
        receiver,
    )
    try:
        return check_layer(layer)
    except RefusedError as error:
        return error.reason


def _map_in_front(core: ObservedCore, call: MapCall, maps: Sequence[MapCall]) -> MapCall | None:
    """Find a map of the same module whose result the map took, as it is or through a norm."""
    if not call.inputs.numel():
        return None
    inputs = call.inputs.cpu()
    inside = [earlier for earlier in maps if earlier.order < call.order and earlier.owner.startswith(core.module)]
    for one in inside:
        results = [one.outputs] if one.kind == "linear" else [after.features.flatten(1) for _, after in one.ways]
        is_first = one.kind == "norm" and not any(
            other.kind == "linear" and other.order < one.order for other in inside
        )
        if not is_first and any(made.shape == inputs.shape and torch.equal(made.cpu(), inputs) for made in results):
            return one
    return None


def _called(model: nn.Module, parameter: str) -> nn.Module | None:
    """Find the module that multiplies with a parameter when it is called."""
    path, _, name = parameter.rpartition(".")
    module = model.get_submodule(path)
    return module if name == "weight" else None


def slice_of(model: nn.Module, name: str, found: FoundRows) -> HeadSlice:
    """Describe rows of a parameter.

    Args:
        model: the model.
        name: dotted path of the attention's module.
        found: the rows.

    Returns:
        The slice, of the attention's module where the parameter is in it, else of the model.
    """
    rows = found.rows if found.how == "as they are" else found.rows.sort(-1).values
    is_inside = bool(name) and found.map.startswith(f"{name}.")
    module, parameter = (model.get_submodule(name), found.map[len(name) + 1 :]) if is_inside else (model, found.map)
    return HeadSlice.of_features(module, parameter, rows, transposed=found.is_transposed)
