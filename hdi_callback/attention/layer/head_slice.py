"""`HeadSlice`: where the weight of heads lies in the parameter of one linear map."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import reduce
from typing import Literal

import torch
from torch import Tensor, nn

from hdi_callback.arguments import shown, whole_number
from hdi_callback.attention.layer import projections
from hdi_callback.errors import MisconfigurationError

Centring = Literal["", "head", "layer"]
NO_MATRIX = "is not a matrix"


def owner_of(module: nn.Module, parameter: str) -> tuple[nn.Module, str]:
    """Follow a dotted path to the module that holds a parameter.

    Args:
        module: where the path starts.
        parameter: the path.

    Returns:
        The module, and the name of the parameter in it.
    """
    path, _, name = parameter.rpartition(".")
    return reduce(getattr, path.split(".") if path else [], module), name


@dataclass(frozen=True)
class HeadSlice:
    """The heads' part of one linear map, or of a convolution of kernel size one: for each head `width` of its features.

    Feature i of head h is feature ``start + (h // block) * block_stride + (h % block) * stride + i * step`` of the map.
    By default the heads lie one after the other.

    Attributes:
        module: the module that `parameter` starts from.
        parameter: dotted path of the parameter, resolved anew at every reading, so that parametrizations, adapters and
            replaced modules count.
        heads: number of heads.
        width: features per head.
        start: first feature of the first head.
        transposed: the parameter is stored ``(in_features, out_features)``, as in GPT-2's ``Conv1D``.
        stride: features from one head to the next, `width` by default; where query, key and value of a head lie
            together it is three times that.
        step: features from one feature of a head to its next.
        block: heads that lie together, all of them by default.
        block_stride: features from one such block to the next.
        centring: what is subtracted from each row, as a LayerNorm behind the map does from what the rows give: the mean
            of the rows of its ``"head"``, or of all heads in the ``"layer"``.
        order: the features of each head, where they lie in no regular order; it takes the place of strides.
        axes: dims of a parameter that number the features of heads, where it is no matrix: ``(0, 2)`` of an
            ``(H, d, d_k)`` that ``einsum("btd,hdk->bhtk", x, weight)`` multiplies with. The other dims number those of
            the other side.

    Raises:
        MisconfigurationError: if an argument cannot be one.

    Example:
        >>> linear = nn.Linear(16, 24)  # query, key and value of head 0, then those of head 1
        >>> keys = HeadSlice(linear, "weight", heads=2, width=4, start=4, stride=12)
        >>> keys.index().tolist()
        [[4, 5, 6, 7], [16, 17, 18, 19]]
    """

    module: nn.Module
    parameter: str
    heads: int
    width: int
    start: int = 0
    transposed: bool = False
    stride: int | None = None
    step: int = 1
    block: int | None = None
    block_stride: int = 0
    centring: Centring = ""
    order: tuple[tuple[int, ...], ...] | None = None
    axes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.module, nn.Module):
            raise MisconfigurationError(f"`module` of a HeadSlice must be a module, got {shown(self.module)}.")
        if not isinstance(self.parameter, str) or not self.parameter:
            raise MisconfigurationError(
                f'`parameter` of a HeadSlice must be the path of one, got {shown(self.parameter)}: write "weight".'
            )
        for name, least in (("heads", 1), ("width", 1), ("start", 0)):
            whole_number(f"{name} of HeadSlice", getattr(self, name), least=least, example=max(least, 8 * least))

    @classmethod
    def of_features(
        cls,
        module: nn.Module,
        parameter: str,
        index: Tensor,
        *,
        transposed: bool = False,
        axes: tuple[int, ...] = (),
        centring: Centring = "",
    ) -> HeadSlice:
        """Describe the features of heads by their strides, or one by one where they lie in no regular order.

        Args:
            module: the module that the parameter starts from.
            parameter: dotted path of the parameter.
            index: the features of each head, ``(heads, width)``.
            transposed: see `HeadSlice`.
            axes: see `HeadSlice`.
            centring: see `HeadSlice`.

        Returns:
            The slice whose `index` is that index; its weight is a live view where the order is regular.

        Example:
            >>> keys = HeadSlice.of_features(nn.Linear(8, 8), "weight", torch.tensor([[2, 3], [0, 1]]))
            >>> keys.order
            ((2, 3), (0, 1))
        """
        heads, width = index.shape
        start, step = int(index[0, 0]), int(index[0, 1] - index[0, 0]) if width > 1 else 1
        first = index[:, 0].tolist()
        for block in (block for block in range(heads, 0, -1) if heads % block == 0):
            stride = first[1] - first[0] if block > 1 else width * step
            found = cls(
                module,
                parameter,
                heads,
                width,
                start,
                transposed,
                None if stride == width * step else stride,
                step,
                None if block == heads else block,
                first[block] - first[0] if block < heads else 0,
                centring,
                axes=axes,
            )
            # No tensor has a negative stride.
            is_forward = step > 0 and stride > 0 and (block == heads or found.block_stride > 0)
            if is_forward and torch.equal(found.index(), index):
                return found
        order = tuple(tuple(features) for features in index.tolist())
        return cls(module, parameter, heads, width, transposed=transposed, centring=centring, order=order, axes=axes)

    @property
    def features(self) -> tuple[int, int]:
        """Features that the linear map takes, and that it gives."""
        owner, name = self._owner()
        if self.axes:
            shape = self._shape() or torch.Size()
            of_heads = math.prod(shape[axis] for axis in self.axes)
            return shape.numel() // of_heads, of_heads
        if name == "weight" and projections.is_pointwise(owner):
            return projections.features(owner)
        rows, columns = (int(size) for size in self._shape() or ())
        return (rows, columns) if self.transposed else (columns, rows)

    @property
    def in_features(self) -> int:
        """Features that the heads' weight takes."""
        return self.features[0]

    @property
    def owner(self) -> nn.Module:
        """The module that the parameter belongs to."""
        return self._owner()[0]

    def matrix(self) -> Tensor:
        """Read the whole matrix of the linear map, as it is used: with LoRA, base and update together.

        Returns:
            ``(out_features, in_features)``, a view of the parameter where it is one; of a convolution with groups a
            copy, with zeros beside its blocks.
        """
        weight = projections.effective_weight(*self._owner())
        return weight.mT if self.transposed else weight

    def rows(self) -> Tensor:
        """Read heads that are blocks of output features, as those of a query, key or value projection are.

        Returns:
            ``(heads, width, in_features)``, a view of the matrix where its strides allow one and nothing is subtracted.
        """
        rows = self._heads_of(self._by_features() if self.axes else self.matrix())
        if not self.centring:
            return rows
        return rows - rows.mean(1 if self.centring == "head" else (0, 1), keepdim=True)

    def columns(self) -> Tensor:
        """Read heads that are blocks of input features, as those of an output projection are.

        Returns:
            ``(heads, width, out_features)``, a view of the matrix where its strides allow one.
        """
        return self._heads_of(self._by_features() if self.axes else self.matrix().mT)

    def bias(self) -> Tensor | None:
        """Read the bias of each head.

        Returns:
            ``(heads, width)``, a view of the bias where its strides allow one; `None` if there is none.
        """
        owner, name = self._owner()
        bias = None if self.axes else projections.effective_bias(owner, name)
        return None if bias is None else self._heads_of(bias[:, None])[..., 0]

    def index(self) -> Tensor:
        """Number the features of each head within the linear map.

        Returns:
            ``(heads, width)``, whole numbers.
        """
        if self.order is not None:
            return torch.tensor(self.order, device="cpu")
        head, block = torch.arange(self.heads, device="cpu"), self._block
        first = self.start + head // block * self.block_stride + head % block * self._stride
        return first[:, None] + torch.arange(self.width, device="cpu") * self.step

    @property
    def by_token(self) -> HeadSlice:
        """The map that is called on whole tokens."""
        return self

    def moved_to(self, module: nn.Module) -> HeadSlice:
        """Describe the same part of another module.

        Args:
            module: a module with the same parameters.

        Returns:
            The same features of the parameter under the same path.
        """
        return replace(self, module=module)

    def contradiction(self, is_output: bool) -> str | None:
        """Return how the shape of the parameter contradicts this slice.

        Args:
            is_output: the heads are blocks of input features.

        Returns:
            A predicate of "its weight", `None` if there is no contradiction.
        """
        owner, name = self._owner()
        # That of a convolution of images is (out, in, 1, 1).
        dims = 1 - projections.feature_dim(owner) if name == "weight" else 2
        shape = self._shape()
        if shape is None or (len(shape) != dims and not self.axes):
            return NO_MATRIX
        index, count = self.index(), self.features[0 if is_output and not self.axes else 1]
        if int(index.min()) < 0 or int(index.max()) >= count:
            return f"has {count} features, fewer than {self.heads} heads of {self.width}"
        if len(set(index.flatten().tolist())) != index.numel():
            return "has heads that share features"
        return None

    @property
    def _block(self) -> int:
        return self.heads if self.block is None else self.block

    @property
    def _stride(self) -> int:
        return self.width * self.step if self.stride is None else self.stride

    def _owner(self) -> tuple[nn.Module, str]:
        return owner_of(self.module, self.parameter)

    def _shape(self) -> torch.Size | None:
        owner, name = self._owner()
        return projections.stored_shape(owner, name)

    def _by_features(self) -> Tensor:
        """The parameter as ``(features of heads, other features)``, a view where its strides allow one."""
        owner, name = self._owner()
        weight = projections.effective_weight(owner, name)
        ahead = weight.movedim(self.axes, tuple(range(len(self.axes))))
        if len(self.axes) > 1 and tuple(ahead.shape[:2]) == (self.heads, self.width) and self.order is None:
            return ahead.flatten(2) if ahead.dim() > 3 else ahead  # heads apart already
        return ahead.flatten(0, len(self.axes) - 1).flatten(1)

    def _heads_of(self, matrix: Tensor) -> Tensor:
        if matrix.dim() == 3:
            return matrix
        columns = matrix.shape[1]
        if self.order is not None:
            return matrix[self.index().to(matrix.device)]
        if self.step == 1 and self._stride == self.width and self._block == self.heads:
            return matrix[self.start : self.start + self.heads * self.width].view(self.heads, self.width, columns)
        by_feature, by_column = matrix.stride()
        start = matrix.storage_offset() + self.start * by_feature
        strides = (self.block_stride, self._stride, self.step)
        sizes = (self.heads // self._block, self._block, self.width, columns)
        apart = matrix.as_strided(sizes, (*(by_feature * stride for stride in strides), by_column), start)
        return apart.flatten(0, 1)  # a copy if there are several blocks of several heads
