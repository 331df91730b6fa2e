"""Products of a tensor with a parameter in a traced run: ``x[ix] weight[iw] -> [out]``, as `torch.einsum` writes them.

Dims of the weight that are summed are what a map takes, new ones are its features. Dims that both have, and that stay,
number matrices: each part of a token has its own.
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hdi_callback.attention.trace.support import derivatives, weights_at
from hdi_callback.attention.trace.traced_run import Leaf
from hdi_callback.attention.trace.weight_views import WeightView

if TYPE_CHECKING:
    from hdi_callback.attention.trace.graph_cut import GraphCut


def contracted(cut: GraphCut, x: Tensor, weight: Tensor, ix: str, iw: str, out: str) -> Any:
    """Random features in place of a product of a tensor with a parameter.

    Args:
        cut: of the run.
        x: the tensor.
        weight: a parameter, or a view of one.
        ix: a letter for each dim of `x`.
        iw: for each dim of `weight`.
        out: for each dim of the product.

    Returns:
        The product; `NotImplemented` where no map is multiplied with.
    """
    with torch._C.DisableTorchFunction():
        view = cut.views.view_of(weight)
    if view is None or x.dim() != len(ix) or len({*iw}) < len(iw):
        return NotImplemented
    return _Contraction(cut, view, x, weight, ix, iw, out).output()


@dataclass(frozen=True, eq=False)
class _Contraction:
    """One tensor and one view of a parameter: ``x[ix] weight[iw] -> [out]``."""

    cut: GraphCut
    view: WeightView
    x: Tensor
    weight: Tensor
    ix: str
    iw: str
    out: str

    def output(self) -> Any:
        """Answer in its place."""
        summed = [i for i in self.ix if i in self.iw and i not in self.out]
        new = [i for i in self.iw if i not in self.ix]
        shared = [i for i in self.iw if i in self.ix and i in self.out]
        if shared:
            return self._by_each_matrix(shared, summed, new)
        positions = [i for i in self.ix if i not in summed]
        if not new or not summed or {*self.out} != {*new, *positions}:
            return NotImplemented
        is_square = len(summed) == len(new) == 1 and len({*self.weight.shape}) == 1
        # A matrix between heads mixes weights of attention.
        if is_square and self.cut.mixing.is_at(self.view.parameter, self.x, self.ix.index(summed[0])):
            return self._arranged(self.x, [new[0] if i in summed else i for i in self.ix])
        return self._mapped(positions, summed, new)

    def _mapped(self, positions: list[str], summed: list[str], new: list[str]) -> Any:
        """Map the last features of the input; learned queries multiply keys in the same way."""
        if self.ix[-1] not in summed or [i for i in self.iw if i in summed] != summed or len(summed) > 2:
            return NotImplemented
        features = self.view.features([self.iw.index(i) for i in new])
        if features is None:
            return NotImplemented
        axes, start, order = features
        takes_part = not self.view.takes_all([self.iw.index(i) for i in new])
        new = [self.iw[at] for at in order]
        sizes = [self.weight.shape[at] for at in order]
        map_input = self.x.permute([self.ix.index(i) for i in positions + summed]).flatten(len(positions))
        count = torch.Size(sizes).numel()
        stub = self.view.stub if not axes else None
        result = self.cut.draw_output(
            self.view.parameter, map_input, count, module=stub, axes=axes, start=start, takes_part=takes_part
        )
        return self._arranged(result.view(*result.shape[:-1], *sizes), positions + new)

    def _by_each_matrix(self, shared: list[str], summed: list[str], new: list[str]) -> Any:
        """Parts of tokens with a matrix each, ``(H, d, width)`` in this order."""
        heads, width = self.weight.shape[0], self.weight.shape[-1]
        is_stack = self.view.is_whole and heads > 1 and [*self.iw] == [*shared, *summed, *new] and len(self.iw) == 3
        tokens = [i for i in self.ix if i not in (*shared, *summed)]
        if not is_stack or not tokens or len(self.out) != len(self.ix):
            return NotImplemented
        map_input = self.x.permute([self.ix.index(i) for i in (*tokens, *shared, *summed)]).flatten(-2)
        name, run = self.view.parameter, self.cut.run
        with torch._C.DisableTorchFunction():
            is_of_maps = bool(derivatives(map_input, weights_at(map_input), run.tensors))
        if is_of_maps:
            # If no map follows, this is the output projection, and its outputs for each head are summed later.
            run.stacked.append(Leaf(name, torch.empty(width), map_input, axes=(2,)))
            return NotImplemented
        result = self.cut.draw_output(name, map_input, heads * width, axes=(0, 2), is_of_parts=True)
        return self._arranged(result.view(*result.shape[:-1], heads, width), [*tokens, *shared, *new])

    def _arranged(self, tensor: Tensor, dims: list[str]) -> Tensor:
        return tensor.permute([dims.index(i) for i in self.out]).contiguous()  # in the order of the product


def einsum(cut: GraphCut, func: Any, args: Any, kwargs: Any) -> Any:
    """Random features in place of an einsum of a tensor with a parameter."""
    formula, *operands = args
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = list(operands[0])
    if (
        not isinstance(formula, str)
        or "->" not in formula
        or not all(isinstance(operand, Tensor) for operand in operands)
    ):
        return NotImplemented
    with torch._C.DisableTorchFunction():
        weights = [place for place, operand in enumerate(operands) if cut.views.is_of_parameter(operand)]
    joined, _, out = _lettered(formula.replace(" ", ""), operands).partition("->")
    terms = joined.split(",")
    if len(operands) == len(terms) == 2 and not weights and "." not in joined + out:
        return _of_single_features(terms[0], terms[1], out, operands)
    if len(weights) != 1 or "." in joined + out or len(terms) != len(operands):
        return NotImplemented
    (which,) = weights
    if len(operands) == 3:
        return _of_three(cut, func, terms, operands, which, out)
    if len(operands) != 2:
        return NotImplemented
    return contracted(cut, operands[1 - which], operands[which], terms[1 - which], terms[which], out)


def _of_single_features(one: str, other: str, out: str, operands: list[Tensor]) -> Any:
    """Multiply matrices where torch multiplies elements, as where heads have one feature each."""
    sizes = dict(zip(one + other, (*operands[0].shape, *operands[1].shape)))
    summed = [i for i in one if i in other and i not in out]
    batch = [i for i in one if i in other and i in out]
    own = [[i for i in term if i not in (*batch, *summed)] for term in (one, other)]
    is_plain = all(len({*term}) == len(term) == operand.dim() for term, operand in zip((one, other), operands))
    if not is_plain or not summed or any(sizes[i] > 1 for i in summed) or {*out} != {*batch, *own[0], *own[1]}:
        return NotImplemented
    if any(operands[place].shape[term.index(i)] != sizes[i] for place, term in enumerate((one, other)) for i in term):
        return NotImplemented  # a dim of one element is repeated
    left, right = (
        operand.permute([term.index(i) for i in (*batch, *alone, *summed)]).reshape(*(sizes[i] for i in batch), -1, 1)
        for operand, term, alone in zip(operands, (one, other), own)
    )
    dims = [*batch, *own[0], *own[1]]
    return (left @ right.mT).reshape([sizes[i] for i in dims]).permute([dims.index(i) for i in out])


def _lettered(formula: str, operands: list[Tensor]) -> str:
    """Replace an ellipsis by letters for its dims, the same in all terms."""
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


def _of_three(cut: GraphCut, func: Any, terms: list[str], operands: list[Tensor], which: int, out: str) -> Any:
    """Contract two tensors first, then their product with a parameter, as for values, weights and output maps."""
    (one, left), (other, right) = [(terms[place], operands[place]) for place in range(3) if place != which]
    kept = [i for i in dict.fromkeys(one + other) if i in terms[which] or i in out]
    summed = [i for i in terms[which] if i in kept and i not in out]  # the input features of a map come last
    if set(kept) == set(one + other):  # what is made of two tensors and a matrix at once
        return NotImplemented
    first = "".join(sorted(kept, key=lambda i: summed.index(i) if i in summed else -1))
    product = torch.einsum(f"{one},{other}->{first}", left, right)
    result = contracted(cut, product, operands[which], first, terms[which], out)
    # The run has recorded `product`: the result is computed from it in any case.
    return func(f"{first},{terms[which]}->{out}", product, operands[which]) if result is NotImplemented else result
