"""From rows of maps to the slices of parameters by which weights are read."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hdi_callback.attention.layer import projections
from hdi_callback.attention.layer.heads import Centring, HeadPieces, HeadProduct, HeadSlice, HeadWeight, Role
from hdi_callback.attention.trace.head_rows import HeadRows, NoHeadsError, Rows, UndecidedError
from hdi_callback.attention.trace.maps import objection_to
from hdi_callback.attention.trace.traced_cores import TracedCores
from hdi_callback.attention.trace.traced_run import Leaf


def weight_of(trace: TracedCores, path: str, rows: list[Rows]) -> HeadWeight:
    """Describe how the weights of the heads of a role are read.

    Args:
        trace: of one run.
        path: of the module that has the heads.
        rows: of each head, in their order.

    Returns:
        A slice of one parameter, the product of two, or one slice for each head.

    Raises:
        NoHeadsError: if they are read in none of these ways.
    """
    if any(row.inner is not None for row in rows):
        return _product(trace, path, rows)
    if len({row.parameter for row in rows}) == 1:
        return _slice(trace, path, rows)
    pieces = tuple(_slice(trace, path, [row]) for row in rows)
    return HeadPieces(pieces[0].module, pieces)


def _slice(trace: TracedCores, path: str, rows: list[Rows]) -> HeadSlice:
    leaf = next(leaf for leaf in trace.leaves if leaf.parameter == rows[0].parameter)
    index = torch.tensor([row.features for row in rows])
    return _slice_of(trace, path, leaf, index, leaf.axes, leaf.axes == (1,), rows[0].centring)


def _slice_of(
    trace: TracedCores, path: str, leaf: Leaf, index: Tensor, axes: tuple[int, ...], turned: bool, centring: Centring
) -> HeadSlice:
    module, name = _from(trace, path, leaf.parameter)
    is_transposed = turned or (leaf.module is not None and projections.is_transposed(leaf.module))
    return HeadSlice.of_features(
        module, name, index, transposed=is_transposed, axes=() if turned else axes, centring=centring
    )


def _from(trace: TracedCores, path: str, parameter: str) -> tuple[nn.Module, str]:
    if path and parameter.startswith(f"{path}."):
        return trace.run.module.get_submodule(path), parameter[len(path) + 1 :]
    return trace.run.module, parameter


def _product(trace: TracedCores, path: str, rows: list[Rows]) -> HeadProduct:
    if any(row.inner is None for row in rows):
        raise NoHeadsError("some of its heads come from one projection and others from two in a row")
    outer = list(dict.fromkeys((row.parameter, row.features) for row in rows))
    inner = list(dict.fromkeys(row.inner for row in rows if row.inner is not None))
    if 1 not in (len(outer), len(inner)):
        raise NoHeadsError("its heads come from two projections in a row that are both split into heads")
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
    for name, parameter in trace.run.parameters.items():
        for offset in (0.0, 1.0):
            if parameter.shape == gain.shape:
                ratio = gain / (parameter.detach() + offset)
                if (ratio - ratio[0]).abs().max() < 1e-4 * ratio[0].abs():
                    return _from(trace, path, name)[1], offset
    why = "features are scaled between its two projections by none of its parameters, as by an activation"
    raise UndecidedError(why)


def is_whole(trace: TracedCores, leaf: Leaf) -> bool:
    """Return whether a call covers all features of its parameter; with a part of them it is no output projection.

    Args:
        trace: of one run.
        leaf: the call.

    Returns:
        True if so.
    """
    if leaf.module is not None:
        return objection_to(leaf.module) is not None or leaf.output.shape[-1] == projections.features(leaf.module)[1]
    shape = trace.run.module.get_parameter(leaf.parameter).shape
    return leaf.output.shape[-1] == math.prod(shape[axis] for axis in leaf.axes or (0,))


def output_weight(trace: TracedCores, path: str, leaf: Leaf, features: Tensor) -> HeadSlice:
    """Describe how the weights of the output projection are read.

    Args:
        trace: of one run.
        path: of the module that has the heads.
        leaf: the output projection.
        features: ``(heads, width)``, features of its input.

    Returns:
        The slice.
    """
    count = trace.run.module.get_parameter(leaf.parameter).dim() if leaf.axes else 0
    others = tuple(axis for axis in range(count) if axis not in leaf.axes)
    return _slice_of(trace, path, leaf, features, others, leaf.axes == (1,) and count == 2, "")


def kind_of(slices: Mapping[Role, HeadWeight], heads: HeadRows) -> str:
    """Name the layout of the weights of a layer in a few words.

    Args:
        slices: of each role.
        heads: the rows, with remarks.

    Returns:
        Words with commas between, the `kind` of an `AttentionLayer`.
    """
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
