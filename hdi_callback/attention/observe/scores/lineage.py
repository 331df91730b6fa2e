"""Attention that a model writes out itself: a product, operations on it, a softmax, and a product with values.

Tensors are followed by identity from the product of two activations through torch functions. Nothing is kept alive by
that except the two factors for as long as their product lives.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from hdi_callback.attention.observe.scores.call import Call, TensorNotes, from_the_end
from hdi_callback.attention.observe.scores.masks import HIDDEN, MaskTerm
from hdi_callback.attention.observe.scores.products import Product

Stage = Literal["scores", "weights", "statistic"]

# Functions that leave every number as it is, up to its place and its type.
_SAME = frozenset((
    "to", "type", "type_as", "float", "half", "bfloat16", "double", "contiguous", "clone", "detach",
    "requires_grad_", "view", "reshape", "view_as", "unflatten", "flatten", "squeeze", "unsqueeze", "expand",
    "expand_as", "__getitem__", "narrow", "chunk", "split", "unbind", "select", "nan_to_num", "nan_to_num_",
    "checkpoint_name", "alias",
))  # fmt: skip
_RESHAPED = frozenset(["view", "reshape", "unflatten", "flatten"])
_MOVED = frozenset(["transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis", "mT", "t"])
_DROPPED = frozenset(["dropout", "native_dropout", "feature_dropout", "alpha_dropout", "dropout2d"])
_REDUCED = frozenset(["max", "amax", "logsumexp", "mean", "sum"])
_MIXING = frozenset((
    "mul", "multiply", "rmul", "add", "radd", "sub", "subtract", "div", "truediv", "sum", "mean", "max", "amax",
    "topk", "matmul", "linear", "einsum", "bmm", "cat", "concat", "stack", "argmax", "norm", "where", "gather",
    "index_select", "log", "sigmoid",
))  # fmt: skip
# Functions that keep a bound of the scores, |tanh x| <= |x|, or limits them by the least number of a type.
_BOUNDED = frozenset(["tanh", "clamp", "clip", "clamp_min", "max", "maximum"])
_GATES = re.compile("^relu$|^exp$|sigmoid|sparsemax|entmax")


@dataclass(eq=False)
class Scores:
    """A product of two activations, and the operations on it.

    Attributes:
        query: ``(*lead, queries, width)``; None where the scores are no product.
        key: ``(*lead, keys, width)``.
        row_axis: dimension of the queries in the tensor that is followed, negative.
        key_axis: dimension of the keys.
        scale: what the product was multiplied with; None if it is not one number.
        terms: what hid keys.
        biases: what was added, and what that was multiplied with.
        before: columns in front of the first key.
        after: columns behind the last key.
        shift: what was subtracted from all scores of a query.
        kind: what turned scores into weights; empty until then.
        unknown: names of functions that changed scores in a way that is not followed.
        lost: names of functions after which it is not known which dimension is which.
        altered: names of functions that changed the weights after the softmax, dropout apart.
        taken: what was read at the softmax.
        tied: rows over which scores are summed, side by side in queries and keys; 1 where there are none.
        opened: shape before queries and keys were split into rows and columns of a picture, until they have it again.
    """

    query: Tensor | None
    key: Tensor | None
    row_axis: int = -2
    key_axis: int = -1
    scale: float | Tensor | None = 1.0
    terms: list[MaskTerm] = field(default_factory=list)
    biases: list[tuple[Tensor | float, float]] = field(default_factory=list)
    before: int = 0
    after: int = 0
    shift: Tensor | None = None
    kind: str = ""
    unknown: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    altered: list[str] = field(default_factory=list)
    taken: Any = None
    tied: int = 1
    opened: torch.Size | None = None

    def branched(self) -> Scores:
        """Copy the record, for a tensor that is made from this one."""
        lists: dict[str, Any] = {name: list(value) for name, value in vars(self).items() if isinstance(value, list)}
        return replace(self, **lists)


class Lineage:
    """Follow scores and weights through torch functions."""

    def __init__(self) -> None:
        self._notes = TensorNotes[tuple[Scores, Stage]]()
        self.clear, self.find = self._notes.clear, self._notes.get

    def tag(self, tensor: Tensor, scores: Scores, stage: Stage) -> None:
        """Follow a tensor from now on.

        Args:
            tensor: the tensor.
            scores: what it comes from.
            stage: what it is.
        """
        self._notes[tensor] = scores, stage

    def start(self, result: Tensor, product: Product) -> Scores:
        """Follow a product of two activations.

        Args:
            result: of the product.
            product: its factors.

        Returns:
            The record.
        """
        scores = Scores(product.left, product.right, product.row_axis, product.column_axis, tied=product.tied)
        self.tag(result, scores, "scores")
        return scores

    def any_of(self, tensors: Iterable[Tensor]) -> tuple[Tensor, Scores, Stage] | None:
        """Find the first tensor that is followed as scores or weights.

        Args:
            tensors: arguments.

        Returns:
            The tensor and what it is.
        """
        for one in tensors if self._notes else ():
            found = self.find(one)
            if found is not None and found[1] != "statistic":
                return one, *found
        return None

    def follow(self, call: Call) -> None:
        """Carry the facts about an argument on to the result of a function.

        Args:
            call: of the function.
        """
        if call.name == "__setitem__":
            self._set_item(*call.args)
            return
        found = self.any_of(call.tensors())
        if found is None:
            return
        tensor, scores, stage = found
        made = call.results
        if stage == "scores" and call.name in _REDUCED and all(one.shape != tensor.shape for one in made):
            for one in made:
                self.tag(one, scores, "statistic")
            return
        for one in made:
            if one is not tensor and not one.is_floating_point():
                continue
            new = scores if one is tensor else scores.branched()
            if stage == "scores":
                self._change_scores(new, call, tensor, one)
            else:
                _change_weights(new, call, tensor, one)
                is_mixed = bool(new.altered) and new.altered[-1].strip("_") in _MIXING
                if is_mixed and (new.query is None or one.shape[-2:] != tensor.shape[-2:]):
                    continue  # a gate of a mixture of experts, say, whose product is no weight of anything
            self.tag(one, new, stage)

    def _change_scores(self, scores: Scores, call: Call, tensor: Tensor, out: Tensor) -> None:
        base, args = call.base, call.args
        other = next((value for value in call.values if value is not tensor), None)
        if call.name in _SAME or call.name in _MOVED:
            _move(scores, call, tensor, out)
        elif base in ("mul", "multiply", "rmul") and len(call.values) == 2:
            _scale(scores, other, 1)
        elif base in ("div", "truediv", "divide", "true_divide") and args and args[0] is tensor:
            _scale(scores, other, -1)
        elif base in ("add", "radd"):
            self._add(scores, base, other, 1.0)
        elif base in ("sub", "subtract"):
            statistic = self.find(other)
            if statistic is not None and statistic[1] == "statistic":
                scores.shift = other
            elif args[0] is not tensor:
                scores.unknown.append(base)
            else:
                self._add(scores, base, other, -1.0)
        elif base == "masked_fill":
            _hide(scores, call.argument(1, "mask"), call.argument(2, "value"), "hidden")
        elif base == "where" and len(args) == 3:
            condition, one, two = (args[1], args[0], args[2]) if args[0] is tensor else args
            if one is tensor:
                _hide(scores, condition, two, "visible")
            else:
                _hide(scores, condition, one, "hidden")
        elif base in ("cat", "concat"):
            _widen(scores, call, tensor)
        elif _GATES.search(base):
            scores.kind = base
        elif base not in _DROPPED and base not in _BOUNDED:
            scores.unknown.append(call.name)

    def _add(self, scores: Scores, base: str, other: Any, sign: float) -> None:
        if self.find(other) is not None:
            scores.unknown.append(base)  # a sum of two products
        elif isinstance(other, Tensor):
            scores.terms.append(MaskTerm(other.detach(), "added", sign=sign))
            scores.biases.append((other.detach(), sign))
            _check_layout(scores)
        elif isinstance(other, (int, float)):
            scores.biases.append((float(other), sign))

    def _set_item(self, tensor: Tensor, places: Any, value: Any) -> None:
        found = self.find(tensor)
        if found is None:
            return
        scores, stage = found
        if stage == "scores" and isinstance(places, Tensor) and places.dtype is torch.bool:
            _hide(scores, places, value, "hidden")
        else:
            (scores.unknown if stage == "scores" else scores.altered).append("__setitem__")


def _hide(scores: Scores, mask: Any, value: Any, kind: Literal["visible", "hidden"]) -> None:
    is_number = isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.dim() == 0)
    if isinstance(mask, Tensor) and not is_number:
        scores.unknown.append("where")
    # A tensor of one number is not read, as the host would wait; nobody fills scores with anything else.
    elif isinstance(mask, Tensor) and (isinstance(value, Tensor) or value <= HIDDEN):
        scores.terms.append(MaskTerm(mask.detach(), kind))
        _check_layout(scores)
    else:
        scores.unknown.append("masked_fill")


def _check_layout(scores: Scores) -> None:
    """Masks are read with queries and keys last; of other layouts their rows are not known."""
    if (scores.row_axis, scores.key_axis) != (-2, -1) or scores.opened is not None:
        scores.terms.pop()
        scores.unknown.append("a mask over dimensions in another order")


def _scale(scores: Scores, factor: Any, power: int) -> None:
    by: float | Tensor | None = None
    number = torch.nan
    if isinstance(factor, (int, float)) and factor:
        number = float(factor) ** power
        by = None if isinstance(factor, bool) else number
    elif isinstance(factor, Tensor) and factor.numel() == 1:
        by = factor.detach().reshape(()).float() ** power
    elif isinstance(factor, Tensor) and factor.dim() > 2 and min(factor.shape[-2:]) > 1:
        scores.unknown.append("mul")
    scores.scale = None if by is None or scores.scale is None else scores.scale * by
    # Terms added before are multiplied as well.
    scores.biases = [(bias, before * number) for bias, before in scores.biases]


def _move(scores: Scores, call: Call, tensor: Tensor, out: Tensor) -> None:
    name, args = call.name, call.args
    if scores.opened is not None and name in _MOVED:
        scores.lost.append(name)
    elif name in ("transpose", "swapaxes", "swapdims") and len(args) == 3:
        first, second = (from_the_end(int(dim), tensor.dim()) for dim in args[1:])
        exchange = {first: second, second: first}
        scores.row_axis = exchange.get(scores.row_axis, scores.row_axis)
        scores.key_axis = exchange.get(scores.key_axis, scores.key_axis)
    elif name == "permute":
        dims = args[1] if len(args) == 2 and isinstance(args[1], (tuple, list)) else args[1:] or call.kwargs["dims"]
        order = [from_the_end(int(dim), tensor.dim()) for dim in dims]
        scores.row_axis = order.index(scores.row_axis) - len(order)
        scores.key_axis = order.index(scores.key_axis) - len(order)
    elif name in _MOVED:
        scores.lost.append(name)
    elif name in _RESHAPED and scores.opened == out.shape:
        scores.opened = None
    elif out.dim() < 2 or out.shape[-2:] != tensor.shape[-2:]:
        if name in _RESHAPED and (scores.row_axis, scores.key_axis) == (-2, -1):
            scores.opened = scores.opened or tensor.shape
        elif name == "__getitem__" and scores.after and out.shape[:-1] == tensor.shape[:-1]:
            scores.after -= tensor.shape[-1] - out.shape[-1]
        else:
            scores.lost.append(name)
    elif out.shape[:-2] != tensor.shape[:-2] and out.numel() == tensor.numel():
        scores.terms = [term.viewed(tensor.shape[:-2], out.shape[:-2]) for term in scores.terms]


def _widen(scores: Scores, call: Call, tensor: Tensor) -> None:
    parts, dim = call.argument(0, "tensors"), call.argument(1, "dim") or 0
    place = next((number for number, part in enumerate(parts) if part is tensor), None)
    is_along_keys = place is not None and from_the_end(dim, tensor.dim()) == scores.key_axis == -1
    if place is None or not is_along_keys or scores.opened is not None:
        scores.lost.append("cat")
        return
    scores.before += sum(int(part.shape[-1]) for part in parts[:place])
    scores.after += sum(int(part.shape[-1]) for part in parts[place + 1 :])


def _change_weights(scores: Scores, call: Call, tensor: Tensor, out: Tensor) -> None:
    if call.name in _SAME or call.base in _DROPPED:
        return
    if call.name in _MOVED:
        _move(scores, call, tensor, out)
        return
    if call.base == "masked_fill":
        value = call.argument(2, "value")
        # A tensor of one number is not read, as the host would wait; nobody fills weights with anything else.
        if isinstance(value, Tensor) or value == 0:
            return
    scores.altered.append(call.name)
