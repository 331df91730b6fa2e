"""Records of each attention that ran."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hdi_callback.attention.observe.compare.samples import Arrangement, MapCall
from hdi_callback.attention.observe.scores.axes import Axes, DimensionRoles


@dataclass(eq=False)
class ReadRows:
    """Readings of the weights of an attention, before it is known that values are averaged with them.

    Attributes:
        axes: which dimensions are sequences and which are heads; None if that is not known.
        unread: why its rows were not read; empty if they were.
        rows: what the rows were reduced to; None if they were not read.
        norms: role -> what queries and keys were reduced to.
        bias: largest number that is added to a score; None if nothing is added that is known.
        is_bounded: scores are at most largest query norm x largest key norm x scale + bias.
        is_self: its maps took the same tokens for queries and keys.
        dims: roles of its leading dimensions; None if they are not known.
        head_order: for each head of the layer the number of the one that was read; empty if these are in one order.
        is_ambiguous: counts of tokens allow further roles, with as many heads.
    """

    axes: Axes | None = None
    unread: str = ""
    rows: Any = None
    norms: dict[str, Any] = field(default_factory=dict)
    bias: Tensor | None = None
    is_bounded: bool = True
    is_self: bool = False
    dims: DimensionRoles | None = None
    head_order: tuple[int, ...] = ()
    is_ambiguous: bool = False


@dataclass(frozen=True)
class Stretch:
    """Where consecutive tokens of a tensor are stored.

    Attributes:
        layout: of what they are a part: the storage, the strides, all sizes but that of the tokens.
        first: place of the first token.
        last: place behind the last one.
    """

    layout: tuple[Any, ...]
    first: int
    last: int

    @classmethod
    def of(cls, tensor: Tensor) -> Stretch | None:
        """Locate the tokens of ``(*lead, length, width)``.

        Args:
            tensor: queries, which have a storage.

        Returns:
            Their place; None if there are none.
        """
        if tensor.dim() < 2 or not tensor.numel():
            return None
        sizes = [size for dim, size in enumerate(tensor.shape) if dim != tensor.dim() - 2]
        strides = [stride if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.stride())]
        by, first = tensor.stride(-2), int(tensor.storage_offset())
        layout = (tensor.untyped_storage().data_ptr(), by, *sizes, *strides[:-2], strides[-1])
        return cls(layout, first, first + int(tensor.shape[-2]) * by)


@dataclass(eq=False, kw_only=True)
class ObservedCore(ReadRows):
    """One place in a model where values are averaged with weights that a forward computed.

    Attributes:
        module: dotted path of the innermost module in whose forward it ran.
        module_type: name of its class.
        kind: ``"softmax"``, or what gives the weights in its place: ``"additive"``, ``"sigmoid"``, ``"relu"``,
            ``"linear"``, ``"unknown"``.
        order: of the calls of the forward.
        place: path of its module and the number of this attention in it, the same in every forward.
        queries: length of a sequence of queries.
        keys: length of a sequence of keys, of those columns of the weights that have values.
        width: features of a query and key head.
        runs: how often it ran; all that is kept is of the first time.
        scale: factor of the scores; None if it is not one number.
        changed: names of functions that changed scores or weights in a way that is not followed.
        samples: a few tokens of queries, keys, values and outputs, for the comparison with claims.
        maps: calls of linear maps and norms before it, the latest last.
        parts: names of the modules around it, outermost first.
        is_recorded: autograd recorded the forward that was read.
        tied: rows of an alignment that have one map of weights, of scores summed over them; 1 where there are none.
        stretch: where its queries are stored; None if that is not known.
    """

    module: str
    module_type: str
    kind: str
    order: int
    place: tuple[Any, ...] = ()
    queries: int = 0
    keys: int = 0
    width: int = 0
    runs: int = 1
    scale: float | Tensor | None = None
    changed: tuple[str, ...] = ()
    samples: dict[str, list[Arrangement]] = field(default_factory=dict)
    maps: list[MapCall] = field(default_factory=list)
    parts: tuple[str, ...] = ()
    is_recorded: bool = False
    tied: int = 1
    stretch: Stretch | None = None

    def discard_rows(self, dims: DimensionRoles | None, reason: str) -> None:
        """Discard rows that were read by the wrong dimensions, or perhaps so.

        Args:
            dims: their roles; None if several are possible.
            reason: a clause.
        """
        self.rows, self.norms, self.dims, self.unread = None, {}, dims, reason

    def name_heads(self, order: tuple[int, ...]) -> None:
        """Note in which order the layer has the heads whose rows were read; it may be another in queries and keys.

        Args:
            order: see `head_order`.
        """
        self.norms, self.head_order = {}, order

    @property
    def mixed(self) -> str:
        """The function that mixed scores or weights of several heads, or subtracted those of another softmax."""
        mixing = ("einsum", "linear", "matmul", "bmm", "conv1d", "conv2d", "sub")
        return next((name for name in self.changed if name.strip("_") in mixing), "")

    @property
    def heads(self) -> int:
        """Number of heads; 0 if unknown."""
        return self.axes.heads if self.axes is not None else 0


def are_pieces(cores: Sequence[ObservedCore]) -> bool:
    """Tell whether attentions are of one tensor of queries, cut along its tokens, as packed pictures are.

    Args:
        cores: in the order in which they ran.

    Returns:
        True if the queries of each begin where those of the one before end.
    """
    stretches = [core.stretch for core in cores]
    return all(
        one is not None and other is not None and (one.layout, one.last) == (other.layout, other.first)
        for one, other in itertools.pairwise(stretches)
    )


def no_softmax(kind: str) -> str:
    """Return how weights differ from a softmax of products of queries and keys.

    Args:
        kind: of an `ObservedCore`.

    Returns:
        A clause.
    """
    if kind == "additive":
        return "its scores are not products of queries and keys"
    return f"its weights are not a softmax ({kind})"
