r"""Whether a softmax weighs tokens that are summed, however the code writes it.

The factor of a weight is the derivative of the sum with respect to it:

.. math:: y = \sum_j w_j v_j, \qquad v_j = \partial y / \partial w_j

A sum is over tokens if two of the `v_j` are each made of positions of one tensor that the other is not made of. Those
of a router are made of the same token by different experts, those of a codebook of parameters alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from hdi_callback.attention.trace.graph_walk import nodes_between
from hdi_callback.attention.trace.support import Support, element, weights_at
from hdi_callback.attention.trace.traced_run import TracedRun

# Nodes that add up: by a sum, a product, an index, or one term after the other.
_SUMS = ("Sum", "Mean", "Bmm", "Mm", "Mv", "Dot", "Baddbmm", "Addmm", "Addmv", "IndexAdd", "ScatterAdd", "Add")
_MOST_SUMS, _MOST_ELEMENTS, _MOST_COLUMNS = 8, 6, 4  # of each that are read


def weighs_tokens(run: TracedRun, node: Any) -> bool:
    """Return whether values of several tokens are added up with the weights of a softmax.

    Args:
        run: the run.
        node: that of the softmax.

    Returns:
        True if so.
    """
    sources = _Sources(run)
    axis = getattr(node, "_saved_dim", -1)
    axis -= 2**64 if axis >= 2**63 else 0  # a negative number, read as one without a sign
    for total in _downstream_sums(run, node):
        shape = tuple(total._input_metadata[0].shape)
        for place in _places(torch.Size(shape).numel()):
            chosen = element((torch.Size(shape).numel(),), place).view(shape)
            ends = GradientEdge(total, 0), GradientEdge(node, 0)
            (made,) = torch.autograd.grad(*ends, chosen, create_graph=True, retain_graph=True, allow_unused=True)
            if made is None or not made.requires_grad:
                continue
            values = made.movedim(axis, -1).reshape(-1, made.shape[axis])
            row = int(values.detach().abs().sum(-1).argmax())
            columns = values[row].detach().nonzero().flatten().tolist()
            if len(columns) < 2:
                continue
            some = columns[:: max(1, (len(columns) - 1) // (_MOST_COLUMNS - 1))][:_MOST_COLUMNS]
            positions = [sources.of(values[row, column]) for column in some]
            if any(sources.are_other_tokens(one, other) for one, other in itertools.combinations(positions, 2)):
                return True
    return False


def _downstream_sums(run: TracedRun, node: Any) -> list[Any]:
    """The sums in the graph that depend on a softmax, in the order in which they ran."""
    found = [
        other for other in nodes_between(run.ends, node) if other.name().rstrip("01").removesuffix("Backward") in _SUMS
    ]
    return sorted(found, key=lambda one: one._sequence_nr())[:_MOST_SUMS]


def _places(count: int) -> list[int]:
    return sorted({(count - 1) * place // (_MOST_ELEMENTS - 1) for place in range(_MOST_ELEMENTS)}) if count else []


_Positions = dict[int, frozenset[int]]  # of each source that something is made of


class _Sources:
    """Tensors with a token at each position: outputs of maps, recurrent parts and convolutions, and inputs."""

    def __init__(self, run: TracedRun) -> None:
        self.run = run
        self.tensors = [*run.tensors, *run.inputs, *(tensor for tensor, _ in run.mixed_tokens)]
        self.axes = [-1] * len(run.leaves) + [_feature_axis(run, tensor) for tensor in run.inputs]
        self.axes += [axis for _, axis in run.mixed_tokens]

    def of(self, output: Tensor, positions: Iterable[int] | None = None) -> _Positions:
        """Return the positions of each source that something is made of."""
        found = Support.of(output, self.tensors, None if positions is None else sorted(positions), self.axes)
        return {number: frozenset(found.positions(number)) for number in found.masks}

    def are_other_tokens(self, one: _Positions, other: _Positions) -> bool:
        """Return whether two values are made of different positions of one source, that hold different tokens."""
        return one.keys() == other.keys() and any(  # else they are what two experts or two branches gave
            _are_apart(own, other[number]) and not self._are_the_same(number, own, other[number])
            for number, own in one.items()
        )

    def _are_the_same(self, number: int, one: frozenset[int], other: frozenset[int]) -> bool:
        """Return whether the input of a map at some positions is of the same token as at others.

        Experts take copies of it, or each some of its features. What attention mixed is made of the same tokens as
        well, but of several of them.
        """
        if number >= len(self.run.leaves):
            return False
        map_input = self.run.leaves[number].input
        rows = map_input.detach().reshape(-1, map_input.shape[-1])
        first, second = (rows[sorted(positions)] for positions in (one, other))
        if first.shape == second.shape and torch.equal(first, second):
            return True
        mine, theirs = (self.of(map_input, positions) for positions in (one, other))
        apart = [at for at in mine.keys() & theirs.keys() if _are_apart(mine[at], theirs[at])]
        if apart:
            return all(self._are_the_same(at, mine[at], theirs[at]) for at in apart)
        return all(len(positions) == 1 for made in (mine, theirs) for positions in made.values())


def _are_apart(one: frozenset[int], other: frozenset[int]) -> bool:
    """Each has positions that the other lacks; the positions of a layer include those of the layers before it."""
    return bool(one - other) and bool(other - one)


def _feature_axis(run: TracedRun, tensor: Tensor) -> int:
    """Feature axis of an input: the one along which an element of a map's input depends on several of its elements."""
    for leaf in run.leaves:
        if not leaf.input.requires_grad or not leaf.input.numel():
            continue
        first = weights_at(leaf.input, [0])
        (found,) = torch.autograd.grad(leaf.input, tensor, first, retain_graph=True, allow_unused=True)
        places = torch.zeros(0, tensor.dim()) if found is None else found.nonzero()
        varied = [axis for axis in range(tensor.dim()) if len(set(places[:, axis].tolist())) > 1]
        if len(varied) == 1:
            return varied[0] - tensor.dim()
    return 1 - tensor.dim() if tensor.dim() > 3 else -1
