"""Contractions with a parameter, as `torch.einsum` writes them, in a traced run."""

from __future__ import annotations

import math
import string
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hdi_callback.attention.trace.stacks import by_each_matrix
from hdi_callback.attention.trace.torch_arguments import torch_arguments

if TYPE_CHECKING:
    from hdi_callback.attention.trace.graph_cut import GraphCut
    from hdi_callback.attention.trace.weight_views import ParameterPart


def einsum(cut: GraphCut, func: Any, args: Any, kwargs: Any) -> Any:
    """Answer in place of a contraction of a tensor with a parameter."""
    formula, *operands = args
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = list(operands[0])
    if not isinstance(formula, str) or "->" not in formula or not all(isinstance(one, Tensor) for one in operands):
        return NotImplemented
    with torch._C.DisableTorchFunction():
        parts = [cut.views.part_of(one) for one in operands]
    if len([part for part in parts if part is not None]) != 1:
        return NotImplemented
    which = next(place for place, part in enumerate(parts) if part is not None)
    joined, _, out = _lettered(formula.replace(" ", ""), operands).partition("->")
    terms = joined.split(",")
    if "." in joined + out or len(terms) != len(operands):
        return NotImplemented
    if len(operands) == 3:
        return _of_three(cut, func, terms, operands, which, out)
    if len(operands) != 2:
        return NotImplemented
    part: Any = parts[which]
    return _Contraction(cut, part, operands[1 - which], operands[which], terms[1 - which], terms[which], out)()


def _lettered(formula: str, operands: list[Tensor]) -> str:
    """Write letters for the dims that an ellipsis stands for, the same in all terms."""
    joined, _, out = formula.partition("->")
    terms = joined.split(",")
    if len(terms) != len(operands) or "..." not in joined:
        return formula
    free = [letter for letter in string.ascii_letters if letter not in formula]
    most = 0
    for place, (term, operand) in enumerate(zip(terms, operands)):
        if "..." in term:
            count = operand.dim() - len(term) + 3
            most = max(most, count)
            terms[place] = term.replace("...", "".join(free[:count][::-1]))  # those of the end are shared
    return f"{','.join(terms)}->{out.replace('...', ''.join(free[:most][::-1]))}"


def tensordot(cut: GraphCut, func: Any, args: Any, kwargs: Any) -> Any:
    """Answer in place of a contraction of some dims of a tensor with some of a parameter."""
    x, other, dims = torch_arguments(args, kwargs, "a", "b", "dims")
    if not isinstance(x, Tensor) or not isinstance(other, Tensor):
        return NotImplemented
    if type(dims) is int:  # the last of the one, the first of the other
        dims = list(range(x.dim() - dims, x.dim())), list(range(dims))
    are_pairs = (
        isinstance(dims, (tuple, list)) and len(dims) == 2 and all(isinstance(one, (tuple, list)) for one in dims)
    )
    if not are_pairs or not dims[0]:
        return NotImplemented
    letters = "abcdefghijklmnop"
    taken, made = list(letters[: x.dim()]), list(letters[x.dim() : x.dim() + other.dim()])
    for one, two in zip(*dims):
        made[two] = taken[one]
    out = [one for one in taken if one not in made] + [one for one in made if one not in taken]
    return einsum(cut, torch.einsum, (f"{''.join(taken)},{''.join(made)}->{''.join(out)}", x, other), {})


def _of_three(cut: GraphCut, func: Any, terms: list[str], operands: list[Tensor], which: int, out: str) -> Any:
    """Contract two tensors first, then their product with a parameter, as for values, weights and output maps."""
    (one, left), (other, right) = [(terms[place], operands[place]) for place in range(3) if place != which]
    kept = [i for i in dict.fromkeys(one + other) if i in terms[which] or i in out]
    summed = [i for i in terms[which] if i in kept and i not in out]  # what a map takes comes last
    if set(kept) == set(one + other):  # what is made of two tensors and a matrix at once
        return NotImplemented
    first = "".join(sorted(kept, key=lambda i: summed.index(i) if i in summed else -1))
    product = torch.einsum(f"{one},{other}->{first}", left, right)
    second = (f"{first},{terms[which]}->{out}", product, operands[which])
    answer = einsum(cut, func, second, {})
    # Of what is noted of the product on the way there the answer is made in any case.
    return func(*second) if answer is NotImplemented else answer


class _Contraction:
    """One tensor and one parameter: ``x[ix] weight[iw] -> [out]``."""

    def __init__(
        self, cut: GraphCut, part: ParameterPart, x: Tensor, weight: Tensor, ix: str, iw: str, out: str
    ) -> None:
        self.cut, self.part, self.x, self.weight, self.ix, self.iw, self.out = cut, part, x, weight, ix, iw, out
        self.name = part.parameter
        self.summed = [i for i in ix if i in iw and i not in out]
        self.new = [i for i in iw if i not in ix]
        self.shared = [i for i in iw if i in ix and i in out]
        self.positions = [i for i in ix if i not in self.summed]

    def __call__(self) -> Any:
        if self.x.dim() != len(self.ix) or len(set(self.iw)) < len(self.iw):
            return NotImplemented
        if self.shared:
            return self._by_each_matrix()
        return self._mixed() if self._is_mixing() else self._mapped()

    def _by_each_matrix(self) -> Any:
        """Parts of tokens with a matrix each, ``(H, d, width)`` in this order."""
        if not len(self.shared) == len(self.summed) == len(self.new) == 1 or len(self.out) != len(self.ix):
            return NotImplemented
        if not self.part.is_whole:
            return NotImplemented
        order = [i for i in self.positions if i not in self.shared]
        if not order or self.iw.index(self.shared[0]) != 0 or self.iw.index(self.new[0]) != 2:
            return NotImplemented
        moved = self.x.permute([self.ix.index(i) for i in (*order[:-1], *self.shared, *order[-1:], *self.summed)])
        parts = by_each_matrix(self.cut, self.name, moved, self.weight)
        return (
            parts
            if parts is NotImplemented
            else self._arranged(parts, [*order[:-1], *self.shared, *order[-1:], *self.new])
        )

    def _is_mixing(self) -> bool:
        """Recognise a square matrix between heads, by which weights of attention are mixed."""
        is_square = len(self.summed) == len(self.new) == 1 and len(set(self.weight.shape)) == 1
        if not is_square or set(self.out) != {*self.positions, *self.new}:
            return False
        return self.cut.mixing.is_at(self.name, self.x, self.ix.index(self.summed[0]))

    def _mixed(self) -> Tensor:
        return self._arranged(self.x, [self.new[0] if i in self.summed else i for i in self.ix])

    def _mapped(self) -> Any:
        """A map takes as many features as its input gives last; learned queries are met by keys in the same way."""
        is_map = self.new and set(self.out) == {*self.new, *self.positions} and 1 <= len(self.summed) <= 2
        if not is_map or self.ix[-1] not in self.summed or [i for i in self.iw if i in self.summed] != self.summed:
            return NotImplemented
        taken = self.x.permute([self.ix.index(i) for i in self.positions + self.summed]).flatten(len(self.positions))
        axes = tuple(self.iw.index(i) for i in self.new)
        sizes = [self.weight.shape[axis] for axis in axes]
        owned, start = axes, 0
        if not self.part.is_whole:  # as the queries of one parameter of all roles
            if self.part.has_first and 0 not in axes:
                return NotImplemented
            owned = axes if self.part.has_first else (0, *(axis + 1 for axis in axes))
            start = self.part.first * math.prod(self.part.shape[axis] for axis in owned if axis)
        answer = self.cut.answer(self.name, taken, math.prod(sizes), axes=owned, start=start)
        return self._arranged(answer.view(*answer.shape[:-1], *sizes), self.positions + self.new)

    def _arranged(self, tensor: Tensor, dims: list[str]) -> Tensor:
        return tensor.permute([dims.index(i) for i in self.out])
