"""From the rows of heads to attention layers.

Where the outputs of heads are in what takes them gives their order, and the output projection. What is mixed on the way
there is refused: heads that are added up, normed together or subtracted are none.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hdi_callback.attention import projections
from hdi_callback.attention.heads import AttentionLayer, HeadPieces, HeadProduct, HeadSlice, HeadWeight, Role
from hdi_callback.attention.isolation import isolated
from hdi_callback.attention.trace.cores import Core, cores_of, nodes_between, unread_exponentials, unread_softmaxes
from hdi_callback.attention.trace.draw import Draw
from hdi_callback.attention.trace.head_rows import HeadRows, NoHeadsError, Rows, UndecidedError, module_of
from hdi_callback.attention.trace.heads import CoreReading
from hdi_callback.attention.trace.maps import objection_to
from hdi_callback.attention.trace.run import Traceable
from hdi_callback.attention.trace.support import (
    Support,
    agreed,
    columns_of,
    derivatives,
    random_weights,
    weights_at,
)
from hdi_callback.attention.trace.traced_cores import TracedCores
from hdi_callback.attention.trace.traced_run import Leaf, TracedRun

# Nodes that leave each feature proportional to what it was.
_LINEAR = (
    "Add", "Addmm", "Alias", "AsStrided", "Avg", "Baddbmm", "Bmm", "Cat", "Chunk", "Clone", "Col2Im", "ConstantPad",
    "Contiguous", "Convolution", "Copy", "Detach", "Div", "Expand", "Flip", "Gather", "Im2Col", "Index", "MaskedFill",
    "Mean", "Mm", "Mul", "Narrow", "Neg", "Pad", "Permute", "Repeat", "Reshape", "Roll", "Scatter", "Select", "Slice",
    "Split", "Squeeze", "Stack", "Sub", "Sum", "T", "ToCopy", "Transpose", "Unbind", "Unfold", "UnsafeView",
    "Unsqueeze", "Upsample", "View", "Where",
)  # fmt: skip


@dataclass(frozen=True)
class Found:
    """What one or more cores of a run establish.

    Attributes:
        layer: the heads; `None` if they cannot be read.
        path: dotted path of the module within the one that was run.
        reason: why they cannot be read.
        cores: numbers of the cores.
        maps: what queries, keys and values come from.
        is_undecided: another run may read them; of a layer, that it may be others where an argument is passed that was
            left out, and with which the module could not be run.
    """

    path: str
    layer: AttentionLayer | None = None
    reason: str = ""
    cores: tuple[int, ...] = ()
    maps: frozenset[str] = frozenset()
    is_undecided: bool = False


def layers_in(
    traceable: Traceable,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    name: str = "",
    *,
    is_known: Callable[[str], bool] = lambda path: False,
) -> tuple[TracedRun, list[Found]]:
    """Run a copy of a module, and read the heads of every attention core that it computes.

    Args:
        traceable: the copy.
        args: by position.
        kwargs: by name.
        name: dotted path of the module in the model.
        is_known: says whether cores that are computed in a module, by its path within this one, are known.

    Returns:
        The run, and for each core a layer or the reason why there is none; several cores may be one layer.
    """
    with isolated(traceable.module), torch.enable_grad():
        run = traceable.run(args, kwargs, Draw())
        cores = cores_of(run)
        trace = TracedCores(traceable, args, kwargs, run, cores)
        groups: list[tuple[tuple[int, ...], HeadRows | NoHeadsError]] = []
        for number, core in enumerate(cores):
            if is_known(core.path):
                continue
            try:
                groups.append(((number,), CoreReading(trace, number).heads()))
            except NoHeadsError as error:
                groups.append(((number,), error))
        found = []
        for numbers, heads in _joined(groups, trace):
            try:
                if isinstance(heads, NoHeadsError):
                    raise heads
                found.append(_layer(trace, name, numbers, heads))
            except NoHeadsError as error:  # noqa: PERF203
                if str(error):
                    path = cores[numbers[0]].path
                    reason = str(error).replace(f"`{path}.", "`") if path else str(error)
                    is_undecided = isinstance(error, UndecidedError)
                    found.append(Found(path, None, reason, numbers, _maps_of(trace, numbers[0]), is_undecided))
        reported = {one.path for one in found}
        unread = [*unread_softmaxes(run, cores), *(() if found else unread_exponentials(run, cores))]
        for node, reason in unread:
            path = run.path_of(node)
            if path not in reported and not is_known(path):
                reported.add(path)
                reason = reason.replace(f"`{path}.", "`") if path else reason
                found.append(Found(path, None, reason, is_undecided=True))
    return run, _named_apart(found, name)


def _joined(
    groups: list[tuple[tuple[int, ...], HeadRows | NoHeadsError]], trace: TracedCores
) -> list[tuple[tuple[int, ...], HeadRows | NoHeadsError]]:
    """Join cores of a single head each whose outputs one map takes side by side: together they are one layer."""
    by_receiver: dict[Any, list[int]] = {}
    for place, (numbers, heads) in enumerate(groups):
        if isinstance(heads, HeadRows) and len(heads.members) == 1 and heads.units.count == 1:
            receiver = _receiver(trace, trace.cores[numbers[0]])
            by_receiver.setdefault(None if receiver is None else receiver, []).append(place)
    joined = list(groups)
    for receiver, places in by_receiver.items():
        if receiver is None or len(places) < 2:
            continue
        parts: list[HeadRows] = [groups[place][1] for place in places]  # type: ignore[misc]
        roles = [role for role in parts[0].rows if all(role in part.rows for part in parts)]
        whole = HeadRows(
            {role: [part.rows[role][0] for part in parts] for role in roles},
            [part.members[0] for part in parts],
            set().union(*(part.normed for part in parts)),
        )
        numbers = tuple(groups[place][0][0] for place in places)
        joined[places[0]] = (numbers, whole)
        for place in places[1:]:
            joined[place] = ((), whole)
    return [(numbers, heads) for numbers, heads in joined if numbers]


def _receiver(trace: TracedCores, core: Core, row: int | None = None) -> int | None:
    """The first linear map that takes what a core gives, or what a row of its weights gives, by its number."""
    return next((number for number, leaf in enumerate(trace.leaves) if _depends(leaf.taken, core, row)), None)


def _layer(trace: TracedCores, name: str, numbers: tuple[int, ...], heads: HeadRows) -> Found:
    cores = [trace.cores[number] for number in numbers]
    for of_role in heads.rows.values():
        for parameter in {one.parameter for one in of_role} | {one.inner.parameter for one in of_role if one.inner}:
            leaf = next(leaf for leaf in trace.leaves if leaf.parameter == parameter)
            why = None if leaf.module is None else objection_to(leaf.module)
            if why is not None:
                raise NoHeadsError(f"its projection `{module_of(parameter)}` is {why}")
    output = _outputs(trace, cores, heads)
    H, rows = len(heads.members), heads.rows
    path = _owner(trace, cores, rows)
    key_rows, value_rows = _distinct("key", rows["key"]), _distinct("value", rows["value"])
    if len(key_rows) != len(value_rows):
        raise NoHeadsError(f"it has {len(key_rows)} key heads and {len(value_rows)} value heads")
    if H % len(key_rows):
        raise NoHeadsError(f"its {H} heads cannot share {len(key_rows)} key heads evenly")
    module = trace.run.module.get_submodule(path)
    _refuse_shared(rows, key_rows, value_rows)
    slices: dict[Role, HeadWeight] = {}
    if "query" in rows:
        slices["query"] = _weight(trace, path, rows["query"])
    slices["key"], slices["value"] = _weight(trace, path, key_rows), _weight(trace, path, value_rows)
    projection = None
    if output is not None and output.features is not None:
        leaf = trace.leaves[output.receiver]
        slices["output"] = _output_weight(trace, path, leaf, output.features)
        projection = leaf.module if output.is_side_by_side else None
    kind = _kind(slices, heads)
    full = ".".join(one for one in (name, path) if one)
    layer = AttentionLayer(
        full, module, H, len(key_rows), len(key_rows[0].features), len(value_rows[0].features), kind, slices,
        projection, frozenset(heads.normed), heads.left_out, "trace",
    )  # fmt: skip
    return Found(path, layer, "", numbers, _maps_of(trace, numbers[0]))


def _maps_of(trace: TracedCores, number: int) -> frozenset[str]:
    core = trace.cores[number]
    sides = [core.values, *(side for product in core.scores for side in (product.left, product.right))]
    found = [Support.of(one, random_weights(one.shape), trace.tensors) for one in sides]
    return frozenset(trace.parameter_of(leaf) for one in found for leaf in one.masks)


def _distinct(role: str, rows: list[Rows]) -> list[Rows]:
    """Key heads in their order, each the same for a group of heads side by side."""
    kept = [one for place, one in enumerate(rows) if place == 0 or rows[place - 1] != one]
    times, left = divmod(len(rows), len(kept))
    if left or [one for one in kept for _ in range(times)] != rows or len(set(kept)) != len(kept):
        raise NoHeadsError("its heads do not share keys and values in groups side by side")
    return kept


def _refuse_shared(rows: dict[Role, list[Rows]], keys: list[Rows], values: list[Rows]) -> None:
    for role, found in (("query", rows.get("query", [])), ("key", keys), ("value", values)):
        own = [
            (one.parameter, feature, one.inner and (one.inner.parameter, one.inner.features))
            for one in found
            for feature in one.features
        ]
        if len(set(own)) < len(own):
            raise NoHeadsError(f"its {role} heads share features of `{module_of(found[0].parameter)}`")
        if len({len(one.features) for one in found}) > 1:
            raise NoHeadsError(f"its {role} heads differ in width")


@dataclass(frozen=True)
class _Outputs:
    """Where the outputs of heads are in what a map takes, or in what comes back."""

    receiver: int
    features: Tensor | None  # (heads, width); None if they are not those of a matrix
    is_side_by_side: bool


def _outputs(trace: TracedCores, cores: list[Core], heads: HeadRows) -> _Outputs | None:
    receiver, ends = _ends(trace, cores, heads.row)
    if not ends:
        return None
    mixed: NoHeadsError | None = None
    for end in ends:
        try:
            return _outputs_in(trace, cores, heads, receiver, end)
        except NoHeadsError as error:  # noqa: PERF203
            mixed = mixed or error
    raise mixed or NoHeadsError


def _ends(trace: TracedCores, cores: list[Core], row: int | None) -> tuple[int | None, list[Tensor]]:
    """What takes the outputs of heads, features last: a linear map, else a convolution, else whoever called."""
    receiver = _receiver(trace, cores[0], row)
    if receiver is None and row is not None and _receiver(trace, cores[0]) is not None:
        return None, []  # the map that is there takes the outputs of another stream
    if receiver is not None:
        return receiver, [trace.leaves[receiver].taken]
    for one in trace.run.convolved:
        if _depends(one, cores[0]):
            return None, [one.movedim(1, -1)]
    for one in trace.run.outputs:
        if _depends(one, cores[0]):
            others = [one.movedim(1, -1), one.flatten(-2)] if one.dim() > 2 else []
            apart = [one.transpose(-3, -2).flatten(-2)] if one.dim() > 3 else []  # heads in a dim of their own
            return None, [one, *others, *apart]
    return None, []


def _depends(tensor: Tensor, core: Core, row: int | None = None) -> bool:
    if not tensor.requires_grad:
        return False
    found = derivatives(tensor, random_weights(tensor.shape), [core.output])
    if not found or row is None:
        return bool(found) and bool(found[0].any())
    matrices = found[0].view(core.weights.shape[0], -1, found[0].shape[-1])
    return bool((matrices.mT if core.is_turned else matrices)[:, row].any())


def _outputs_in(trace: TracedCores, cores: list[Core], heads: HeadRows, receiver: int | None, end: Tensor) -> _Outputs:
    codes = columns_of(end, [core.output for core in cores])
    placed = []
    for number, of_head in enumerate(heads.members):
        at = number if len(cores) > 1 else 0
        code = codes.get(at)
        if code is None:
            raise NoHeadsError("not every head reaches what comes of it")
        matrices = code.view(cores[at].weights.shape[0], -1, code.shape[-1])
        matrices = matrices.mT if cores[at].is_turned else matrices
        placed.append(agreed(torch.cat([heads.units.of(matrices, unit) for unit in of_head])))
    features = torch.stack(placed)
    if (features < 0).any():
        raise NoHeadsError("what attention gives is mixed or normed before it reaches the output projection")
    if len(set(features.flatten().tolist())) < features.numel():
        raise NoHeadsError("what several heads give is added up before it reaches the output projection")
    is_linear = all(_is_linear(node) for core in cores for node in nodes_between([end], core.node))
    is_linear &= not any(_depends(one, cores[0]) and _acts(one, end) for one in trace.run.normed)
    is_side_by_side = torch.equal(features.flatten(), torch.arange(end.shape[-1]))
    if is_linear and receiver is not None and _is_added_to(end, features, trace.cores):
        return _Outputs(receiver, None, False)  # what the map takes is no output of heads
    if receiver is None:
        if not is_side_by_side and features.numel() == end.shape[-1] and not trace.run.convolved:
            raise NoHeadsError("the outputs of its heads do not lie side by side in what it returns")
        return _Outputs(-1, None, False)
    return _Outputs(receiver, features if is_linear else None, is_side_by_side and is_linear)


def _is_added_to(end: Tensor, features: Tensor, cores: list[Core]) -> bool:
    """Tell whether something else is added to what attention gives: the sum is more than its derivatives by cores say.

    Args:
        end: made of what cores give, by linear functions.
        features: of it that are outputs of heads; others may stand beside them.
        cores: all of a run.

    Returns:
        True if so, at one of a few places.
    """
    edges = [core.output for core in cores]
    flat = end.reshape(-1, end.shape[-1])
    for place in sorted({0, len(flat) // 2, len(flat) - 1}):
        weights = torch.zeros_like(end)
        columns = features.flatten()
        weights[..., columns] = weights_at(end, torch.tensor([place]))[..., columns]
        acting = derivatives(end, weights, edges)
        if not any(one.any() for one in acting.values()):
            continue  # a token that is put beside what attention gives
        whole = float((weights * end).sum())
        parts = [float((one.flatten() * cores[number].given.flatten()).sum()) for number, one in acting.items()]
        if abs(whole - sum(parts)) > 1e-3 * max(abs(whole), *map(abs, parts)):
            return True
    return False


def _acts(tensor: Tensor, on: Tensor) -> bool:
    found = derivatives(on, random_weights(on.shape), [tensor])
    return bool(found) and bool(found[0].any())


def _is_linear(node: Any) -> bool:
    return any(node.name().startswith(kind) for kind in _LINEAR)


def _owner(trace: TracedCores, cores: list[Core], rows: dict[Role, list[Rows]]) -> str:
    """The innermost module around the computation that holds its keys and values."""
    held = [one.parameter for role in ("key", "value") for one in rows[role]]
    paths = [core.path for core in cores]
    path = _common(paths)
    while path and not (all(name.startswith(f"{path}.") for name in held) and _computes(trace, path)):
        path = path.rpartition(".")[0]
    return path


def _computes(trace: TracedCores, path: str) -> bool:
    return not isinstance(trace.run.module.get_submodule(path), (nn.ModuleList, nn.ModuleDict))


def _common(paths: list[str]) -> str:
    parts = [path.split(".") if path else [] for path in paths]
    shared = itertools.takewhile(lambda one: len(set(one)) == 1, zip(*parts))
    return ".".join(one[0] for one in shared)


def _weight(trace: TracedCores, path: str, rows: list[Rows]) -> HeadWeight:
    if any(one.inner is not None for one in rows):
        return _product(trace, path, rows)
    if len({one.parameter for one in rows}) == 1:
        return _slice(trace, path, rows)
    pieces = tuple(_slice(trace, path, [one]) for one in rows)
    return HeadPieces(pieces[0].module, pieces)


def _slice(trace: TracedCores, path: str, rows: list[Rows]) -> HeadSlice:
    parameter = rows[0].parameter
    leaf = next(leaf for leaf in trace.leaves if leaf.parameter == parameter)
    index = torch.tensor([one.features for one in rows])
    is_transposed = leaf.module is not None and projections.is_transposed(leaf.module)
    axes = leaf.axes
    module, name = _from(trace, path, parameter)
    return HeadSlice.of_features(
        module, name, index, transposed=is_transposed or axes == (1,), axes=() if axes == (1,) else axes,
        centring=rows[0].centring,
    )  # fmt: skip


def _from(trace: TracedCores, path: str, parameter: str) -> tuple[nn.Module, str]:
    if path and parameter.startswith(f"{path}."):
        return trace.run.module.get_submodule(path), parameter[len(path) + 1 :]
    return trace.run.module, parameter


def _product(trace: TracedCores, path: str, rows: list[Rows]) -> HeadProduct:
    if any(one.inner is None for one in rows):
        raise NoHeadsError("some of its heads are made by one projection and others by two")
    outer = list(dict.fromkeys((one.parameter, one.features) for one in rows))
    inner = list(dict.fromkeys(one.inner for one in rows if one.inner is not None))
    if 1 not in (len(outer), len(inner)):
        raise NoHeadsError("its heads are made by two projections that are both cut into heads")
    module, _ = _from(trace, path, rows[0].parameter)
    gain, offset = _gain(trace, path, rows[0])
    return HeadProduct(
        module,
        _slice(trace, path, [Rows(*one) for one in outer]),
        _slice(trace, path, inner),
        gain,
        offset,
    )


def _gain(trace: TracedCores, path: str, row: Rows) -> tuple[str, float]:
    """Find the parameter that holds the gain between two maps."""
    gain = torch.tensor(row.gain)
    if (gain - gain[0]).abs().max() < 1e-4:
        return "", 0.0
    for name, parameter in trace.traceable.parameters.items():
        for offset in (0.0, 1.0):
            if parameter.shape == gain.shape:
                ratio = gain / (parameter.detach() + offset)
                if (ratio - ratio[0]).abs().max() < 1e-4 * ratio[0].abs():
                    return _from(trace, path, name)[1], offset
    raise UndecidedError("between two projections lies something that is no gain")


def _output_weight(trace: TracedCores, path: str, leaf: Leaf, features: Tensor) -> HeadSlice:
    module, name = _from(trace, path, leaf.parameter)
    if leaf.axes:
        owner: Any = trace.run.module.get_parameter(leaf.parameter)
        if leaf.axes == (1,) and owner.dim() == 2:
            return HeadSlice.of_features(module, name, features, transposed=True)
        others = tuple(axis for axis in range(owner.dim()) if axis not in leaf.axes)
        return HeadSlice.of_features(module, name, features, axes=others)
    is_transposed = leaf.module is not None and projections.is_transposed(leaf.module)
    return HeadSlice.of_features(module, name, features, transposed=is_transposed)


def _kind(slices: Mapping[Role, HeadWeight], heads: HeadRows) -> str:
    roles = [part for role, part in slices.items() if role != "output"]
    if any(isinstance(part, HeadProduct) for part in roles):
        words = ["latent"]
    elif any(isinstance(part, HeadPieces) for part in roles):
        words = ["a map for each head"]
    else:
        words = ["separate" if len({part.parameter for part in roles}) == len(roles) else "fused"]
        plain = [part for part in roles if isinstance(part, HeadSlice)]
        if any(part.stride is not None or part.block is not None or part.order is not None for part in plain):
            words.append("interleaved")
    return ", ".join([*words, *heads.remarks])


def _named_apart(found: list[Found], name: str) -> list[Found]:
    """One layer for a module that ran twice, and names of their own for several layers of one module."""
    kept: list[Found] = []
    for one in found:
        layer = one.layer
        twin = next(
            (place for place, other in enumerate(kept) if other.path == one.path and _are_one(other, one)), None
        )
        if twin is None:
            kept.append(one)
        elif layer is None:  # what holds in one of its calls and not in another is not established
            kept[twin] = one
    layers = [one for one in kept if one.layer is not None]
    shared = {
        id(layer.output_projection)
        for one, other in itertools.permutations(layers, 2)
        if (layer := one.layer) is not None
        and other.layer is not None
        and layer.output_projection is other.layer.output_projection
    }
    named = []
    for one in kept:
        layer = one.layer
        if layer is not None and id(layer.output_projection) in shared:
            layer = replace(layer, output_projection=None)  # its input is a sum of what they give
        if layer is not None and sum(other.path == one.path for other in layers) > 1:
            layer = replace(layer, name=".".join(part for part in (layer.name, _key_map(layer)) if part))
        named.append(replace(one, layer=layer))
    return [_refused(one) if any(_conflict(one, other) for other in named) else one for one in named]


def _refused(one: Found) -> Found:
    return replace(one, layer=None, reason="several of its softmaxes have heads of the same maps, and none of its own")


def _conflict(one: Found, other: Found) -> bool:
    """Recognise two layers of one name, the same maps and other rows of them, as where two softmaxes are subtracted."""
    if one.layer is None or other.layer is None or one.layer.name != other.layer.name:
        return False
    shared = one.layer.slices.keys() & other.layer.slices.keys()
    return any(one.layer.slices[role] != other.layer.slices[role] for role in shared)


def _are_one(one: Found, other: Found) -> bool:
    if one.layer is None or other.layer is None:
        return one.maps == other.maps
    return one.maps == other.maps and all(
        role in other.layer.slices and part == other.layer.slices[role] for role, part in one.layer.slices.items()
    )


def _key_map(layer: AttentionLayer) -> str:
    return module_of(layer.slices["key"].by_token.parameter)
