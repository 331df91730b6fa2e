"""`TracedRun`: what one forward of a copy showed, its graph cut at the output of every linear map."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn


@dataclass(eq=False)
class Leaf:
    """What one call of a linear map gave.

    Attributes:
        parameter: dotted path of its matrix in the module that was run.
        tensor: random features, ``(..., features)``.
        taken: the input of the map, ``(..., in_features)``, one for each position.
        start: the feature of the matrix that the first of them is.
        axes: dims of the parameter that number the features, where it is no module's matrix.
        module: the map in the original, where it is a module.
        is_of_parts: a matrix for each head, of a part of its own of the features that come in.
    """

    parameter: str
    tensor: Tensor
    taken: Tensor
    start: int = 0
    axes: tuple[int, ...] = ()
    module: nn.Module | None = None
    is_of_parts: bool = False


@dataclass(eq=False)
class TracedRun:
    """What one forward of a copy showed.

    Attributes:
        module: the original.
        leaves: calls of linear maps, in their order.
        others: what else values may come from, parameters and inputs: name -> tensor.
        stacked: products of what maps gave with a matrix for each head, which are in the graph.
        scores: node of each softmax -> its input.
        mixed: node of a softmax -> the map that mixes its weights over heads, and was left out.
        spans: path of a module -> the sequence numbers of nodes that were made in one of its calls.
        outputs: tensors that came back.
        normed: inputs of norms.
        convolved: inputs of convolutions that mix positions, ``(batch, features, ...)``.
        mixed_tokens: what those and recurrent parts gave, and the dimension that numbers its features.
        centred: a LayerNorm, or code that subtracts a mean over features, was passed.
        ids: inputs of whole numbers: tokens that a table gives vectors for.
        error: the exception that ended the forward, if one did.
        ranks: how many ranks' runs are joined in this one.
    """

    module: nn.Module
    leaves: list[Leaf] = field(default_factory=list)
    others: dict[str, Tensor] = field(default_factory=dict)
    stacked: list[Leaf] = field(default_factory=list)
    scores: dict[Any, Tensor] = field(default_factory=dict)
    mixed: dict[Any, str] = field(default_factory=dict)
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    normed: list[Tensor] = field(default_factory=list)
    convolved: list[Tensor] = field(default_factory=list)
    mixed_tokens: list[tuple[Tensor, int]] = field(default_factory=list)
    centred: bool = False
    ids: list[Tensor] = field(default_factory=list)
    error: Exception | None = None
    ranks: int = 1

    @property
    def tensors(self) -> list[Tensor]:
        """The features of all leaves, in their order."""
        return [leaf.tensor for leaf in self.leaves]

    @property
    def answers(self) -> dict[tuple[str, int], Tensor]:
        """The features of all leaves, by the map and the number of its call."""
        calls: Counter[str] = Counter()
        found = {}
        for leaf in self.leaves:
            found[leaf.parameter, calls[leaf.parameter]] = leaf.tensor.detach()
            calls[leaf.parameter] += 1
        return found

    def path_of(self, node: Any) -> str:
        """Name the innermost module in whose forward a node was made.

        Args:
            node: of the graph.

        Returns:
            Its dotted path.
        """
        number = node._sequence_nr()
        around = [(end - start, -len(path), path) for path, start, end in self.spans if start < number < end]
        return min(around)[2] if around else ""
