"""`TracedRun`: the graph of one forward of a copy, cut at the output of every linear map."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from hdi_callback.attention.trace.products import UpstreamProducts
from hdi_callback.attention.trace.support import Support, agreed, columns_of


@dataclass(eq=False)
class Leaf:
    """One call of a linear map: its random output, and its input.

    Attributes:
        parameter: dotted path of its matrix in the module that was run.
        output: random features, ``(..., features)``.
        input: the input of the map, ``(..., in_features)``, one for each position.
        start: the feature of the matrix that the first of them is.
        axes: dims of the parameter that number the features, where it is no module's matrix.
        module: the map in the original, where it is a module.
        is_of_parts: a matrix for each head, of a part of its own of the features that come in.
        takes_part: the first columns of the matrix alone are used.
    """

    parameter: str
    output: Tensor
    input: Tensor
    start: int = 0
    axes: tuple[int, ...] = ()
    module: nn.Module | None = None
    is_of_parts: bool = False
    takes_part: bool = False


@dataclass(eq=False)
class TracedRun:
    """The graph of one forward of a copy, with its calls of linear maps.

    Attributes:
        module: the original.
        leaves: calls of linear maps, in their order.
        inputs: leaves in place of the arguments, and of vectors that tables return for ids.
        parameters: those of the copy that are no matrices of its maps, by their paths.
        stacked: products of outputs of maps with a matrix for each head, which are in the graph.
        scores: node of each softmax -> its input.
        mixed: node of a softmax -> the map that mixes its weights over heads, and was left out.
        spans: path of a module -> the sequence numbers of nodes that were made in one of its calls.
        outputs: tensors that the module returned.
        normed: inputs of norms.
        convolved: inputs of convolutions that mix positions, ``(batch, features, ...)``.
        mixed_tokens: outputs of those and of recurrent parts, and the dimension that numbers their features.
        centred: a LayerNorm, or code that subtracts a mean over features, was passed.
        ids: inputs of whole numbers: tokens that a table gives vectors for.
        error: the exception that ended the forward, if one did.
        ranks: how many ranks' runs are joined in this one.
    """

    module: nn.Module
    leaves: list[Leaf] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)
    parameters: Mapping[str, Tensor] = field(default_factory=dict)
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
        return [leaf.output for leaf in self.leaves]

    @property
    def ends(self) -> list[Tensor]:
        """All ends of the graph: outputs of the module, and inputs of linear maps."""
        return [*self.outputs, *(leaf.input for leaf in self.leaves if leaf.input.requires_grad)]

    @cached_property
    def upstream_products(self) -> UpstreamProducts:
        """The products and softmaxes of the graph."""
        return UpstreamProducts(self.parameters.values())

    @property
    def drawn(self) -> dict[tuple[str, int], Tensor]:
        """The features of all leaves, by the map and the number of its call."""
        calls: Counter[str] = Counter()
        found = {}
        for leaf in self.leaves:
            found[leaf.parameter, calls[leaf.parameter]] = leaf.output.detach()
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

    # --- what a tensor is made of

    def support(self, tensor: Tensor, positions: Tensor | Sequence[int] | None = None) -> Support:
        """Find which features of maps a tensor depends on.

        Args:
            tensor: made in the run, ``(..., width)``.
            positions: counted over all dims but the last; all of them by default.

        Returns:
            Its support in the leaves.
        """
        return Support.of(tensor, self.tensors, positions)

    def features(self, support: Support) -> set[tuple[str, int]]:
        """Name the features of a support: the matrix of a map, and the number of its feature."""
        return {
            (self.leaves[leaf].parameter, self.leaves[leaf].start + feature)
            for leaf in support.masks
            for feature in support.features(leaf)
        }

    def maps(self, support: Support) -> list[str]:
        """Name the matrices of the maps of a support, each once, in the order in which they were called."""
        return list(dict.fromkeys(self.leaves[leaf].parameter for leaf in support.masks))

    def columns(self, tensor: Tensor) -> dict[tuple[str, int], int]:
        """Find the column of a tensor that each feature of maps acts on.

        Args:
            tensor: made in the run, ``(..., columns)``.

        Returns:
            For each feature that acts on the tensor its column, -2 where there are several.
        """
        found: dict[tuple[str, int], int] = {}
        for number, codes in columns_of(tensor, self.tensors).items():
            leaf, read = self.leaves[number], agreed(codes)
            acting = (read != -1).nonzero().flatten()
            for at, column in zip(acting.tolist(), read[acting].tolist()):
                feature = leaf.parameter, leaf.start + at
                found[feature] = column if found.get(feature, column) == column else -2
        return found
