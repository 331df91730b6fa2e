"""Products of two activations, brought to one order of dimensions however they are written."""

from __future__ import annotations

import string
from dataclasses import dataclass

from torch import Tensor

from hdi_callback.attention.observe.scores.call import Call

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


def operands(call: Call) -> tuple[Tensor, Tensor] | None:
    """Name the two tensors that a function multiplies.

    Args:
        call: of one of `PRODUCTS`.

    Returns:
        Left and right; None if they are not two.
    """
    if call.name == "einsum":
        values = call.args[1:]
        pair = list(values[0]) if len(values) == 1 and isinstance(values[0], (tuple, list)) else list(values)
    elif call.name in ("baddbmm", "addmm"):
        names = ("batch1", "batch2") if call.name == "baddbmm" else ("mat1", "mat2")
        pair = [call.argument(place, name) for place, name in enumerate(names, 1)]
    elif call.name == "__rmatmul__":
        pair = [call.args[1], call.args[0]]
    else:
        second = next((name for name in ("other", "mat2", "tensor2") if name in call.kwargs), "")
        pair = [call.argument(0, "input"), call.argument(1, second)]
    fits = len(pair) == 2 and all(isinstance(operand, Tensor) for operand in pair)
    return (pair[0], pair[1]) if fits else None


def product_of(call: Call, left: Tensor, right: Tensor) -> Product | None:
    """Bring a product to one order of dimensions.

    Args:
        call: of one of `PRODUCTS`.
        left: the first of its `operands`.
        right: the second.

    Returns:
        The product; None if it is none of two matrices.
    """
    if call.name == "einsum":
        return _of_einsum(call.args[0], left, right) if isinstance(call.args[0], str) else None
    return Product(left, right.mT, -2, -1) if left.dim() > 1 and right.dim() > 1 else None


def _of_einsum(equation: str, left: Tensor, right: Tensor) -> Product | None:
    letters = _letters(equation, left, right)
    if letters is None:
        return None
    a, b, out = letters
    contracted = [letter for letter in a if letter in b and letter not in out]
    rows, columns = (
        [letter for letter in out if letter in a and letter not in b],
        [letter for letter in b if letter in out and letter not in a],
    )
    is_plain = all(len(set(part)) == len(part) for part in letters) and set(out) == set(a + b) - set(contracted)
    if not rows or not columns or not is_plain or len(contracted) not in (1, 2):
        return None
    if len(contracted) == 2 and len(rows) + len(columns) > 2:
        return None
    # Several dimensions on one side are heads of grouped queries and a position; the position comes last.
    row, column, features = rows[-1], columns[-1], contracted[-1]
    lead = [letter for letter in out if letter not in (row, column)]
    one, other = _ordered(left, a, [*lead, row, *contracted]), _ordered(right, b, [*lead, column, *contracted])
    tied = 1
    if len(contracted) == 2:  # side by side, in the order in which the left tensor has them
        one, other, tied = one.detach().flatten(-2), other.detach().flatten(-2), left.shape[a.index(contracted[0])]
    axes = out.index(row) - len(out), out.index(column) - len(out)
    return Product(one, other, *axes, a.index(features) - len(a), b.index(features) - len(b), tied)


def _ordered(tensor: Tensor, letters: str, order: list[str]) -> Tensor:
    have = [letters.index(letter) for letter in order if letter in letters]
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
        free = [letter for letter in string.ascii_letters if letter not in equation]
        counts = {len(part.replace("...", "")): t.dim() for part, t in ((a, left), (b, right)) if "..." in part}
        sizes = {dims - named for named, dims in counts.items()}
        if len(sizes) != 1:
            return None
        dots = "".join(free[: sizes.pop()])
        a, b, out = (part.replace("...", dots) for part in (a, b, out))
    return (a, b, out) if len(a) == left.dim() and len(b) == right.dim() else None
