"""Products of two activations, brought to one order of dimensions however they are written."""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import Any

from torch import Tensor

PRODUCTS = frozenset({"matmul", "__matmul__", "__rmatmul__", "bmm", "mm", "einsum", "baddbmm", "addmm"})


@dataclass(frozen=True, eq=False)
class Product:
    """``left @ right`` over one contracted dimension, or over two of them, the rows of an alignment and features.

    Attributes:
        left: ``(*lead, rows, contracted)``, a view; detached, and a copy, where two dimensions are contracted.
        right: ``(*lead, columns, contracted)``, as left; dimensions that it does not have are of size one.
        row_axis: dimension of the rows in the result, negative.
        column_axis: dimension of the columns in the result, negative.
        left_axis: dimension of the left tensor, as it was passed, that is contracted, negative.
        right_axis: that of the right tensor.
        tied: size of the first of two contracted dimensions, which are flattened into one; 1 where there is one.
    """

    left: Tensor
    right: Tensor
    row_axis: int
    column_axis: int
    left_axis: int = -1
    right_axis: int = -2
    tied: int = 1

    @property
    def swapped(self) -> Product:
        """The same product with left and right, and rows and columns, exchanged."""
        axes = self.column_axis, self.row_axis, self.right_axis, self.left_axis
        return Product(self.right, self.left, *axes, self.tied)

    def canonical(self, result: Tensor) -> Tensor:
        """View a tensor with the dimensions of the result as ``(*lead, rows, columns)``."""
        return result.movedim((self.row_axis, self.column_axis), (-2, -1))


def operands(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Name the two tensors that a function multiplies.

    Args:
        name: of the function.
        args: by position.
        kwargs: by name.

    Returns:
        Left and right; None if they are not two.
    """
    values = list(args)
    if name == "einsum":
        values = list(args[1]) if len(args) == 2 and isinstance(args[1], (tuple, list)) else list(args[1:])
        pair = values if len(values) == 2 else []
    elif name in ("baddbmm", "addmm"):
        names = ("input", "batch1", "batch2") if name == "baddbmm" else ("input", "mat1", "mat2")
        values += [kwargs.get(one) for one in names[len(values) :]]
        pair = values[1:3]
    elif name == "__rmatmul__":
        pair = [args[1], args[0]]
    else:
        second = next((kwargs[one] for one in ("other", "mat2", "tensor2") if one in kwargs), None)
        pair = [args[0] if args else kwargs.get("input"), args[1] if len(args) > 1 else second]
    fits = len(pair) == 2 and all(isinstance(one, Tensor) for one in pair)
    return (pair[0], pair[1]) if fits else None


def product_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> Product | None:
    """Bring a product to one order of dimensions.

    Args:
        name: of the function.
        args: by position.
        kwargs: by name.
        result: what it gave.

    Returns:
        The product; None if it is none of two matrices over one dimension.
    """
    pair = operands(name, args, kwargs)
    if pair is None:
        return None
    left, right = pair
    if name != "einsum":
        if left.dim() < 2 or right.dim() < 2:
            return None
        return Product(left, right.mT, -2, -1)
    return _of_einsum(args[0], left, right, result) if isinstance(args[0], str) else None


def _of_einsum(equation: str, left: Tensor, right: Tensor, result: Tensor) -> Product | None:
    letters = _letters(equation, left, right)
    if letters is None:
        return None
    a, b, out = letters
    contracted = [one for one in a if one in b and one not in out]
    columns = [one for one in b if one not in a and one in out]
    rows = [one for one in out if one in a and one not in b]
    is_plain = all(len(set(part)) == len(part) for part in (a, b, out)) and set(out) <= set(a) | set(b)
    if len(contracted) != 1 or not columns or not rows or not is_plain or set(a) - set(out) != set(contracted):
        return None
    # Several dimensions on one side are heads of grouped queries and a position; the position comes last.
    row, column = rows[-1], columns[-1]
    lead = [one for one in out if one not in (row, column)]
    return Product(
        _ordered(left, a, [*lead, row, contracted[0]]),
        _ordered(right, b, [*lead, column, contracted[0]]),
        out.index(row) - len(out),
        out.index(column) - len(out),
        a.index(contracted[0]) - len(a),
        b.index(contracted[0]) - len(b),
    )


def tied_product_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Product | None:
    """Read a product that is summed over two dimensions, rows and features, as the scores of an alignment are.

    Args:
        name: of the function.
        args: by position.
        kwargs: by name.

    Returns:
        The product, the two dimensions side by side in the order in which the left tensor has them; None if it is none
        of two tensors with a dimension of queries and one of keys.
    """
    pair = operands(name, args, kwargs) if name == "einsum" else None
    letters = _letters(args[0], *pair) if pair is not None and isinstance(args[0], str) else None
    if pair is None or letters is None:
        return None
    a, b, out = letters
    contracted = [one for one in a if one in b and one not in out]
    row, column = ([one for one in out if one in have and one not in other] for have, other in ((a, b), (b, a)))
    is_plain = all(len(set(part)) == len(part) for part in (a, b, out)) and set(out) == set(a + b) - set(contracted)
    if len(contracted) != 2 or len(row) != 1 or len(column) != 1 or not is_plain:
        return None
    lead = [one for one in out if one not in (*row, *column)]
    left, right = (
        _ordered(one.detach(), has, [*lead, *of, *contracted]).flatten(-2)
        for one, has, of in zip(pair, (a, b), (row, column))
    )
    axes = (out.index(row[0]) - len(out), out.index(column[0]) - len(out))
    features = contracted[-1]
    rest = (a.index(features) - len(a), b.index(features) - len(b))
    return Product(left, right, *axes, *rest, pair[0].shape[a.index(contracted[0])])


def _ordered(tensor: Tensor, letters: str, order: list[str]) -> Tensor:
    have = [letters.index(one) for one in order if one in letters]
    moved = tensor.permute(have)
    for place, one in enumerate(order):
        if one not in letters:
            moved = moved.unsqueeze(place)
    return moved


def _letters(equation: str, left: Tensor, right: Tensor) -> tuple[str, str, str] | None:
    equation = equation.replace(" ", "")
    if "->" not in equation or equation.count(",") != 1:
        return None
    inputs, out = equation.split("->")
    a, b = inputs.split(",")
    if "..." in equation:
        free = [one for one in string.ascii_letters if one not in equation]
        counts = {len(part.replace("...", "")): t.dim() for part, t in ((a, left), (b, right)) if "..." in part}
        sizes = {dims - named for named, dims in counts.items()}
        if len(sizes) != 1:
            return None
        dots = "".join(free[: sizes.pop()])
        a, b, out = (part.replace("...", dots) for part in (a, b, out))
    return (a, b, out) if len(a) == left.dim() and len(b) == right.dim() else None
