"""Attention that a model writes out itself: a product, what becomes of it, a softmax, and a product with values.

Tensors are followed by identity from the product of two activations through torch functions. Nothing is kept alive by
that except the two factors for as long as their product lives.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from hdi_callback.attention.observe.scores.masks import HIDDEN, MaskTerm
from hdi_callback.attention.observe.scores.products import Product

Stage = Literal["scores", "weights", "statistic"]

# What leaves every number as it is, up to its place and its type.
_SAME = frozenset((
    "to", "type", "type_as", "float", "half", "bfloat16", "double", "contiguous", "clone", "detach",
    "requires_grad_", "view", "reshape", "view_as", "unflatten", "flatten", "squeeze", "unsqueeze", "expand",
    "expand_as", "__getitem__", "narrow", "chunk", "split", "unbind", "select", "nan_to_num", "nan_to_num_",
    "checkpoint_name", "alias",
))  # fmt: skip
_MOVED = frozenset(["transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis", "mT", "t"])
_DROPPED = frozenset(["dropout", "dropout_", "native_dropout", "feature_dropout", "alpha_dropout", "dropout2d"])
_REDUCED = frozenset(["max", "amax", "logsumexp", "mean", "sum"])
_MIXING = frozenset((
    "mul", "multiply", "rmul", "add", "radd", "sub", "subtract", "div", "truediv", "sum", "mean", "max", "amax",
    "topk", "matmul", "linear", "einsum", "bmm", "cat", "concat", "stack", "argmax", "norm", "where", "gather",
    "index_select", "log", "sigmoid",
))  # fmt: skip
_LIMITED = frozenset(["clamp", "clip", "clamp_min", "max", "maximum"])  # by the least number of a type
_ADDED_OR_MASKED = frozenset((
    "add", "radd", "sub", "subtract", "masked_fill", "where", "tanh", "cat", "concat", "tril", "clamp",
))  # fmt: skip
_GATES = {"sigmoid": "sigmoid", "relu": "relu", "exp": "exp", "sparsemax": "sparsemax", "entmax": "entmax"}


@dataclass(eq=False)
class Scores:
    """A product of two activations, and what became of it.

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

    def branched(self) -> Scores:
        """Copy what is known so far, for a tensor that is made from this one."""
        lists: dict[str, Any] = {name: list(value) for name, value in vars(self).items() if isinstance(value, list)}
        return replace(self, **lists)


class Lineage:
    """Follow scores and weights through torch functions."""

    def __init__(self) -> None:
        self._tags: dict[int, tuple[weakref.ref[Tensor], Scores, Stage]] = {}

    def clear(self) -> None:
        """Forget all tensors."""
        self._tags.clear()

    def find(self, tensor: Any) -> tuple[Scores, Stage] | None:
        """Find what is noted about a tensor.

        Args:
            tensor: anything.

        Returns:
            What it is; None if it is not followed.
        """
        tag = self._tags.get(id(tensor))
        return (tag[1], tag[2]) if tag is not None and tag[0]() is tensor else None

    def tag(self, tensor: Tensor, scores: Scores, stage: Stage) -> None:
        """Follow a tensor from now on.

        Args:
            tensor: the tensor.
            scores: what it comes from.
            stage: what it is.
        """
        key = id(tensor)
        self._tags[key] = (weakref.ref(tensor, lambda _, key=key: self._tags.pop(key, None)), scores, stage)  # type: ignore[misc]

    def start(self, result: Tensor, product: Product, scale: float = 1.0) -> Scores:
        """Follow a product of two activations.

        Args:
            result: of the product.
            product: its factors.
            scale: what it was multiplied with.

        Returns:
            The record.
        """
        scores = Scores(product.left, product.right, product.row_axis, product.column_axis, scale, tied=product.tied)
        self.tag(result, scores, "scores")
        return scores

    def any_of(self, values: Iterable[Any]) -> tuple[Tensor, Scores, Stage] | None:
        """Find the first argument that is followed, in tuples and lists too.

        Args:
            values: arguments.

        Returns:
            The tensor and what it is.
        """
        if not self._tags:
            return None
        for value in _flat(values):
            found = self.find(value)
            if found is not None and found[1] != "statistic":
                return value, *found
        return None

    def follow(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Carry on what is known of an argument to the result of a function.

        Args:
            name: of the function.
            args: by position.
            kwargs: by name.
            result: what it gave.
        """
        if name == "__setitem__":
            self._set_item(args)
            return
        found = self.any_of((*args, *kwargs.values()))
        if found is None:
            return
        tensor, scores, stage = found
        outs = [one for one in (result if isinstance(result, (tuple, list)) else (result,)) if isinstance(one, Tensor)]
        if stage == "scores" and name in _REDUCED and all(one.shape != tensor.shape for one in outs):
            for one in outs:
                self.tag(one, scores, "statistic")
            return
        for one in outs:
            if one is not tensor and not one.is_floating_point():
                continue
            new = scores if one is tensor else scores.branched()
            if stage == "scores":
                self._changed(new, name, tensor, args, kwargs, one)
            else:
                _weights_changed(new, name, args, kwargs, tensor, one)
                is_mixed = bool(new.altered) and new.altered[-1].strip("_") in _MIXING
                if is_mixed and (new.query is None or one.shape[-2:] != tensor.shape[-2:]):
                    continue  # a gate of a mixture of experts, say, whose product is no weight of anything
            self.tag(one, new, stage)

    def _changed(
        self, scores: Scores, name: str, tensor: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor
    ) -> None:
        base = name.strip("_").removeprefix("i") if name.startswith("__i") else name.rstrip("_").strip("_")
        other = next((one for one in (*args, *kwargs.values()) if one is not tensor), None)
        if name in _SAME or name in _MOVED:
            _moved(scores, name, args, kwargs, tensor, out)
        elif base in ("mul", "multiply", "rmul") and len(args) + len(kwargs) == 2:
            _scaled(scores, other, 1)
        elif base in ("div", "truediv", "divide", "true_divide") and args and args[0] is tensor:
            _scaled(scores, other, -1)
        elif base in _ADDED_OR_MASKED:
            self._added_or_masked(scores, base, tensor, args, kwargs, out, other)
        elif base in _GATES or "entmax" in base or "sparsemax" in base or "sigmoid" in base:
            scores.kind = _GATES.get(base, base)
        elif base not in _DROPPED and base not in _LIMITED:
            scores.unknown.append(name)

    def _added_or_masked(
        self,
        scores: Scores,
        base: str,
        tensor: Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Tensor,
        other: Any,
    ) -> None:
        if base in ("add", "radd", "sub", "subtract"):
            statistic = self.find(other)
            if base.startswith("sub") and statistic is not None and statistic[1] == "statistic":
                scores.shift = other
            elif base.startswith("sub") and args[0] is not tensor:
                scores.unknown.append(base)
            elif isinstance(other, Tensor) and statistic is None:
                sign = -1.0 if base.startswith("sub") else 1.0
                scores.terms.append(MaskTerm(other.detach(), "added", sign=sign))
                scores.biases.append((other.detach(), sign))
                _check_layout(scores)
            elif statistic is not None:
                scores.unknown.append(base)  # a sum of two products
            elif isinstance(other, (int, float)):
                scores.biases.append((float(other), -1.0 if base.startswith("sub") else 1.0))
        elif base == "masked_fill":
            mask = args[1] if len(args) > 1 else kwargs.get("mask")
            value = args[2] if len(args) > 2 else kwargs.get("value")
            self._hide(scores, mask, value, "hidden")
        elif base == "where" and len(args) == 3:
            visible, one, two = (args[1], args[0], args[2]) if args[0] is tensor else args
            self._hide(scores, visible, two if one is tensor else one, "visible" if one is tensor else "hidden")
        elif base in ("cat", "concat"):
            _widened(scores, args, kwargs, tensor, out)
        elif base == "tanh":
            pass  # |tanh x| <= |x|: a bound of the scores stays one
        elif base not in _LIMITED:
            scores.unknown.append(base)

    def _set_item(self, args: tuple[Any, ...]) -> None:
        found = self.find(args[0])
        if found is None:
            return
        scores, stage = found
        if stage == "scores" and isinstance(args[1], Tensor) and args[1].dtype is torch.bool:
            self._hide(scores, args[1], args[2], "hidden")
        elif stage == "scores":
            scores.unknown.append("__setitem__")
        else:
            scores.altered.append("__setitem__")

    def _hide(self, scores: Scores, mask: Any, value: Any, kind: Literal["visible", "hidden"]) -> None:
        if not isinstance(mask, Tensor):
            scores.unknown.append("masked_fill")
        elif isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.dim() == 0):
            # A tensor of one number is not read, as the host would wait; nobody fills scores with anything else.
            if isinstance(value, Tensor) or value <= HIDDEN:
                scores.terms.append(MaskTerm(mask.detach(), kind))
                _check_layout(scores)
            else:
                scores.unknown.append("masked_fill")
        else:
            scores.unknown.append("where")


def _check_layout(scores: Scores) -> None:
    """Masks are read with queries and keys last; of other layouts their rows are not known."""
    if (scores.row_axis, scores.key_axis) != (-2, -1):
        scores.terms.pop()
        scores.unknown.append("a mask over dimensions in another order")


def _scaled(scores: Scores, factor: Any, power: int) -> None:
    if isinstance(factor, (int, float)) and not isinstance(factor, bool):
        by: float | Tensor | None = float(factor) ** power if factor else None
    elif isinstance(factor, Tensor) and factor.numel() == 1:
        by = factor.detach().reshape(()).float() ** power
    else:
        by = None
    if by is None and isinstance(factor, Tensor) and factor.dim() > 2 and min(factor.shape[-2:]) > 1:
        scores.unknown.append("mul")
    scores.scale = None if by is None or scores.scale is None else scores.scale * by
    number = float(factor) ** power if isinstance(factor, (int, float)) and factor else torch.nan
    # What was added before is multiplied as well.
    scores.biases = [(bias, by_now * number) for bias, by_now in scores.biases]


def _moved(
    scores: Scores, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], tensor: Tensor, out: Tensor
) -> None:
    if name in ("transpose", "swapaxes", "swapdims") and len(args) == 3:
        first, second = (int(dim) - tensor.dim() if dim >= 0 else int(dim) for dim in args[1:])
        exchange = {first: second, second: first}
        scores.row_axis = exchange.get(scores.row_axis, scores.row_axis)
        scores.key_axis = exchange.get(scores.key_axis, scores.key_axis)
    elif name == "permute":
        dims = args[1] if len(args) == 2 and isinstance(args[1], (tuple, list)) else args[1:] or kwargs.get("dims", ())
        order = [int(dim) - tensor.dim() if dim >= 0 else int(dim) for dim in dims]
        scores.row_axis = order.index(scores.row_axis) - len(order)
        scores.key_axis = order.index(scores.key_axis) - len(order)
    elif name in _MOVED:
        scores.lost.append(name)
    elif out.dim() < 2 or tuple(out.shape[-2:]) != tuple(tensor.shape[-2:]):
        if out.shape[-1:] != tensor.shape[-1:] or (scores.row_axis, scores.key_axis) != (-2, -1):
            kept = out.dim() == tensor.dim() and out.shape[:-1] == tensor.shape[:-1]
            if not (name == "__getitem__" and kept and scores.after):
                scores.lost.append(name)
            else:
                scores.after -= tensor.shape[-1] - out.shape[-1]
        else:
            scores.lost.append(name)
    elif out.shape[:-2] != tensor.shape[:-2] and out.numel() == tensor.numel():
        scores.terms = [term.viewed(tensor.shape[:-2], out.shape[:-2]) for term in scores.terms]


def _widened(scores: Scores, args: tuple[Any, ...], kwargs: dict[str, Any], tensor: Tensor, out: Tensor) -> None:
    parts = args[0] if args and isinstance(args[0], (tuple, list)) else kwargs.get("tensors", ())
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    place = next((number for number, one in enumerate(parts) if one is tensor), None)
    if place is None or (dim if dim < 0 else dim - tensor.dim()) != scores.key_axis or scores.key_axis != -1:
        scores.lost.append("cat")
        return
    scores.before += sum(int(one.shape[-1]) for one in parts[:place])
    scores.after += sum(int(one.shape[-1]) for one in parts[place + 1 :])


def _weights_changed(
    scores: Scores, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], tensor: Tensor, out: Tensor
) -> None:
    base = name.strip("_")
    if name in _SAME or base in _DROPPED or name in _DROPPED:
        return
    if name in _MOVED:
        _moved(scores, name, args, kwargs, tensor, out)
        return
    if base == "masked_fill":
        value = args[2] if len(args) > 2 else kwargs.get("value")
        # A tensor of one number is not read, as the host would wait; nobody fills weights with anything else.
        if isinstance(value, Tensor) or value == 0:
            return
    scores.altered.append(name)


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from (one for one in value if isinstance(one, Tensor))
