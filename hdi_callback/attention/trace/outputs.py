"""Places of the outputs of heads in the map that takes them: their order, and the output projection.

Outputs that are mixed before that map are refused, but for heads that are added up or subtracted as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hdi_callback.attention.trace.cores import Core
from hdi_callback.attention.trace.graph_walk import nodes_between
from hdi_callback.attention.trace.head_rows import HeadRows, NoHeadsError, module_of
from hdi_callback.attention.trace.own_inputs import inputs_of_rows
from hdi_callback.attention.trace.support import agreed, columns_of, depends_on, derivatives, random_weights, weights_at
from hdi_callback.attention.trace.traced_cores import TracedCores
from hdi_callback.attention.trace.traced_run import Leaf

SEVERAL_SUMMED = "the outputs of its heads, several of which are added up"
_SEVERAL = "the outputs of its heads, which go to several output projections"

# Nodes that leave each feature proportional to what it was.
_LINEAR = (
    "Add", "Addmm", "Alias", "AsStrided", "Avg", "Baddbmm", "Bmm", "Cat", "Chunk", "Clone", "Col2Im", "ConstantPad",
    "Contiguous", "Convolution", "Copy", "Detach", "Div", "Expand", "Flip", "Gather", "Im2Col", "Index", "MaskedFill",
    "Mean", "Mm", "Mul", "Narrow", "Neg", "Pad", "Permute", "Repeat", "Reshape", "Roll", "Scatter", "Select", "Slice",
    "Split", "Squeeze", "Stack", "Sub", "Sum", "T", "ToCopy", "Transpose", "Unbind", "Unfold", "UnsafeView",
    "Unsqueeze", "Upsample", "View", "Where",
)  # fmt: skip


@dataclass(frozen=True)
class HeadOutputs:
    """Places of the outputs of heads in the input of a map, or in the outputs of the module.

    Attributes:
        receiver: the call of a linear map that takes them; `None` if none does.
        features: ``(heads, width)``, features of its input; `None` if they are not those of a matrix.
        is_side_by_side: whether they are all of its input, head by head.
        left_out: why they are not read, in words, where the layer has to state it.
    """

    receiver: Leaf | None
    features: Tensor | None = None
    is_side_by_side: bool = False
    left_out: str = ""


def outputs_of(trace: TracedCores, cores: list[Core], heads: HeadRows) -> HeadOutputs | None:
    """Find the outputs of heads in the input of the map that takes them.

    Args:
        trace: of one run.
        cores: those of the heads: one for all, or one for each.
        heads: their rows.

    Returns:
        Where they are; `None` if nothing that comes of the run depends on them.

    Raises:
        NoHeadsError: if they are mixed, normed or added up before it.
    """
    if heads.outputs_left_out:
        return HeadOutputs(None, left_out=heads.outputs_left_out)
    receiver, ends = _ends(trace, cores, heads.row)
    refusals = []
    for end in ends:
        try:
            return _outputs_in(trace, cores, heads, receiver, end)
        except NoHeadsError as error:  # noqa: PERF203
            refusals.append(error)
    if refusals:
        raise refusals[0]
    return None


def _ends(trace: TracedCores, cores: list[Core], row: int | None) -> tuple[Leaf | None, list[Tensor]]:
    """The tensor that takes the outputs of heads, features last: the input of a map or convolution, else an output."""
    receiver = receiver_of(trace, cores[0], row)
    if receiver is None and row is not None and receiver_of(trace, cores[0]) is not None:
        return None, []  # the map that is there takes the outputs of another stream
    if receiver is not None:
        return trace.leaves[receiver], [trace.leaves[receiver].input]
    edge = cores[0].output
    for stack in trace.run.stacked:
        if depends_on(stack.input, edge):
            return stack, [stack.input]
    for one in trace.run.convolved:
        if depends_on(one, edge):
            return None, [one.movedim(1, -1)]
    for one in trace.run.outputs:
        if depends_on(one, edge):
            others = [one.movedim(1, -1), one.flatten(-2)] if one.dim() > 2 else []
            apart = [one.transpose(-3, -2).flatten(-2)] if one.dim() > 3 else []  # heads in a dim of their own
            return None, [one, *others, *apart]
    return None, []


def _outputs_in(
    trace: TracedCores, cores: list[Core], heads: HeadRows, receiver: Leaf | None, end: Tensor
) -> HeadOutputs:
    features, is_repeated = _features_of_heads(cores, heads, end)
    if (features < 0).any():
        return _refuse_mixed(trace, cores, heads, receiver, end, is_repeated=is_repeated)
    if len(set(features.flatten().tolist())) < features.numel():
        if receiver is None:  # heads may lie in a dim of their own
            raise NoHeadsError("the outputs of several heads are summed before they are returned")
        is_sent = _is_one_of_several(trace, receiver, cores[0])
        sent = f"the outputs of its heads, which go to {_one_of(receiver)}"
        return HeadOutputs(receiver, left_out=sent if is_sent else SEVERAL_SUMMED)
    is_linear = all(_is_linear(node) for core in cores for node in nodes_between([end], core.node))
    is_linear &= not any(depends_on(normed, cores[0].output) and depends_on(end, normed) for normed in trace.run.normed)
    is_side_by_side = torch.equal(features.flatten(), torch.arange(end.shape[-1]))
    if receiver is None:
        if not is_side_by_side and features.numel() == end.shape[-1] and not trace.run.convolved:
            raise NoHeadsError("the outputs of its heads do not lie side by side in what it returns")
        return HeadOutputs(None)
    if not is_linear or _is_added_to(end, features, trace.cores):  # the input of the map is no output of heads
        return HeadOutputs(receiver)
    return HeadOutputs(receiver, features, is_side_by_side)


def _features_of_heads(cores: list[Core], heads: HeadRows, end: Tensor) -> tuple[Tensor, bool]:
    """The features of a tensor that are the outputs of each head.

    Returns:
        ``(heads, width)``, -2 where there are several; and whether parts of one head are in features of their own each.

    Raises:
        NoHeadsError: if one head is in none, in others for each row of tokens, or in more than another.
    """
    codes = columns_of(end, [core.output for core in cores])
    placed, is_repeated = [], False
    for number, of_head in enumerate(heads.members):
        at = number if len(cores) > 1 else 0
        if at not in codes:
            raise NoHeadsError("some of its heads do not reach the output that the others reach")
        parts = [heads.units.of(cores[at].by_row(codes[at]), unit) for unit in of_head]
        columns = agreed(torch.cat(parts))
        if heads.tied is not None:
            of_rows = columns[heads.tied]  # (rows, value width)
            if not torch.equal(of_rows, of_rows[:1].expand_as(of_rows)):
                raise NoHeadsError("its head outputs go to other features of the output projection in every row")
            columns = of_rows[0]
        placed.append(columns)
        each = {tuple(agreed(part).tolist()) for part in parts}
        is_repeated |= len(each) > 1 and all(min(one) >= 0 for one in each)
    if len({columns.shape for columns in placed}) > 1:
        raise NoHeadsError("the outputs of its heads differ in width")
    return torch.stack(placed), is_repeated


def _refuse_mixed(
    trace: TracedCores, cores: list[Core], heads: HeadRows, receiver: Leaf | None, end: Tensor, *, is_repeated: bool
) -> HeadOutputs:
    """Refuse outputs mixed before the map; those that are changed within each head alone are left out."""
    key, inputs = heads.rows["key"][0], {tensor.shape[-1] for tensor in trace.run.inputs if tensor.dim()}
    if is_repeated and all(row.shape[-1] not in inputs for row in inputs_of_rows(trace, key)):  # parts of tokens
        name = module_of(key.parameter)
        raise NoHeadsError(f"the same rows of `{name}` make the keys of several of its heads, each of other features")
    others = {core.node for core in trace.cores} - {core.node for core in cores}
    is_last = all(others.isdisjoint(nodes_between([end], core.node)) for core in cores)
    if receiver is not None and heads.tied is None and is_last and _are_apart(end, cores, heads):
        takes_all = end.shape[-1] >= len(heads.members) * cores[0].values.shape[-1]
        of_others = (leaf.input for leaf in trace.leaves if leaf.parameter != receiver.parameter)
        are_several = not takes_all and any(depends_on(one, core.output) for one in of_others for core in cores)
        return HeadOutputs(receiver, left_out=_SEVERAL if are_several else "")
    if receiver is not None and _is_one_of_several(trace, receiver, cores[0]):
        raise NoHeadsError(f"the output of attention goes to {_one_of(receiver)}")
    if receiver is None:
        raise NoHeadsError("the outputs of its heads are mixed or normalised, and no output projection was found")
    raise NoHeadsError("the outputs of its heads are mixed or normalised before they reach the output projection")


def _is_one_of_several(trace: TracedCores, receiver: Leaf, core: Core) -> bool:
    """Return whether a map of the outputs is one of a stack of matrices, as those of experts, that all take them."""
    alike = (
        leaf for leaf in trace.leaves if leaf.parameter == receiver.parameter and depends_on(leaf.input, core.output)
    )
    return len({one.start for one in alike}) > 1


def _one_of(receiver: Leaf) -> str:
    return f"one of several matrices of `{module_of(receiver.parameter)}`"


def _are_apart(end: Tensor, cores: list[Core], heads: HeadRows) -> bool:
    """Return whether each of several heads has features of a tensor to itself, whatever is done within a head.

    Such as a rotation of its outputs, or what they have in common with a value being taken from them. Features may
    be in groups, each of which has a matrix of its own.

    Args:
        end: made of what cores give.
        cores: those of the heads: one for all, or one for each.
        heads: their rows.

    Returns:
        False of a single head: nothing shows that it is one.
    """
    if len(heads.members) < 2:
        return False
    unknown = torch.zeros_like(end, requires_grad=True)
    found = torch.autograd.grad(end, [core.output for core in cores], unknown, create_graph=True, allow_unused=True)
    owners = torch.zeros(end.shape[-2:] if end.dim() > 3 else end.shape[-1:], dtype=torch.long)
    for number, of_head in enumerate(heads.members):
        at = number if len(cores) > 1 else 0
        derivative = found[at]
        if derivative is None or not derivative.requires_grad:
            return False
        chosen = torch.zeros(derivative.shape)
        for unit in of_head:
            matrix = cores[at].by_row(chosen)[unit // heads.units.count]
            rows = heads.units.rows[unit % heads.units.count] if heads.units.rows else slice(None)
            matrix[rows] = random_weights(matrix[rows].shape)
        # A second derivative, by the weights of the combination: the effect of the outputs of this head.
        (moved,) = torch.autograd.grad(derivative, [unknown], chosen, retain_graph=True)
        size = torch.nan_to_num(moved).abs().reshape(-1, *owners.shape).amax(0)
        owners += size > 1e-7 * size.max()
    return int(owners.max()) == 1


def _is_added_to(end: Tensor, features: Tensor, cores: list[Core]) -> bool:
    """Return whether another term is added to the outputs of heads, which their derivatives do not explain.

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
        weights[..., columns] = weights_at(end, [place])[..., columns]
        acting = derivatives(end, weights, edges)
        if not any(derivative.any() for derivative in acting.values()):
            continue  # a token that is put beside what attention gives
        whole = float((weights * end).sum())
        parts = [
            float((derivative.flatten() * cores[number].sums.flatten()).sum()) for number, derivative in acting.items()
        ]
        if abs(whole - sum(parts)) > 1e-3 * max(abs(whole), *map(abs, parts)):
            return True
    return False


def _is_linear(node: Any) -> bool:
    name: str = node.name().rpartition("::")[2]  # of `torch::autograd::CopyBackwards`, say
    return name.startswith(_LINEAR)


def receiver_of(trace: TracedCores, core: Core, row: int | None = None) -> int | None:
    """The first linear map that takes the output of a core, or of a row of its weights, by its number."""
    for number, leaf in enumerate(trace.leaves):
        found = derivatives(leaf.input, weights_at(leaf.input), [core.output]).get(0)
        if found is not None and (found if row is None else core.by_row(found)[:, row]).any():
            return number
    return None
