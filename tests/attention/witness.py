"""What attention really received and gave, seen where it is computed and without any of the package's code.

Every call of every module is recorded, and every function of torch that runs: `scaled_dot_product_attention`, and
products of two activations around a softmax, as attention is written by hand. `multi_head_attention_forward` is looked
into. No name of a module, a parameter or a setting is read.
"""

from __future__ import annotations

import inspect
import re
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


@dataclass(eq=False)
class Call:
    """One call of a module: what it was given and gave, and when (in counts of events) it began and ended."""

    module: nn.Module
    inputs: list[Tensor]
    start: int
    outputs: list[Tensor] = field(default_factory=list)
    end: int | None = None
    is_done: bool = False  # it ended by itself, and by no exception


@dataclass(eq=False)
class Computation:
    """One computation of attention; all tensors ``(..., length, width)``, usually ``(batch, heads, length, width)``.

    Keys and values have fewer heads than queries where they were seen before being repeated. `others` are further pairs
    of queries and keys whose products were added to the scores (those of relative positions, as a rule).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    others: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    calls: tuple[Call, ...] = ()
    time: int = 0
    is_of_learned_values: bool = False
    tiles: int = 1  # the first of several dims of queries that meet the same keys: tiles of tokens, or heads


@dataclass
class Witness:
    """The computations of a forward in their order, all calls, and the last input and output of every module."""

    computations: list[Computation] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    inputs: dict[nn.Module, Tensor] = field(default_factory=dict)
    outputs: dict[nn.Module, Tensor] = field(default_factory=dict)
    stack: list[Call] = field(default_factory=list)
    time: int = 0

    def tick(self) -> int:
        self.time += 1
        return self.time


@contextmanager
def witness(
    model: nn.Module, *, shake: dict[nn.Module, float] | None = None, keep: Collection[nn.Module] | None = None
) -> Iterator[Witness]:
    """Watch every computation of attention, and what each module of the model is given and gives.

    `shake`: modules whose inputs are disturbed by noise of this size relative to their own, so that the samples differ
    in every direction even where the model gives all of them the same, as learned queries are.
    `keep`: modules whose inputs and outputs are kept, all if it is left out; of the others only that they were called.
    """
    observed = Witness()
    noise = torch.Generator().manual_seed(7)
    copies: dict[int, tuple[weakref.ref, int, Tensor]] = {}

    def copy_of(tensor: Tensor) -> Tensor:
        """Copy what may be changed in place; what one module gives and the next one takes is copied once."""
        known = copies.get(id(tensor))
        if known is not None and known[0]() is tensor and known[1] == tensor._version:
            return known[2]
        copies[id(tensor)] = weakref.ref(tensor), tensor._version, tensor.detach().clone()
        return copies[id(tensor)][2]

    def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if shake and module in shake:
            names = list(inspect.signature(module.forward).parameters)
            # What is one tensor stays one: some code asks whether queries and keys are made of the same.
            known: dict[int, Tensor] = {}
            args = tuple(
                _shaken(value, shake[module], noise, known) if not _is_rotation(names[place : place + 1]) else value
                for place, value in enumerate(args)
            )
            rotations = {name: value for name, value in kwargs.items() if _is_rotation([name])}
            kwargs = _shaken(kwargs, shake[module], noise, known) | rotations
        inputs = [copy_of(tensor) for tensor in _tensors((args, kwargs))] if keep is None or module in keep else []
        call = Call(module, inputs, observed.tick())
        observed.calls.append(call)
        observed.stack.append(call)
        if inputs and args and isinstance(args[0], Tensor):
            observed.inputs[module] = inputs[0]
        return args, kwargs

    def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        while observed.stack:  # calls that an exception ended are on the stack still
            call = observed.stack.pop()
            call.end = observed.tick()
            if call.module is module:
                call.is_done = True
                if keep is None or module in keep:
                    call.outputs = [copy_of(tensor) for tensor in _tensors(output)]
                break
        if isinstance(output, Tensor) and (keep is None or module in keep):
            observed.outputs[module] = output.detach()

    handles = [module.register_forward_pre_hook(enter, with_kwargs=True) for module in model.modules()]
    handles += [module.register_forward_hook(leave, with_kwargs=True) for module in model.modules()]
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        with _Products(observed):
            yield observed
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for handle in handles:
            handle.remove()


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        for value in values.values():
            yield from _tensors(value)


def _is_rotation(names: list[str]) -> bool:
    """Tell by its name what would not be a rotation any more if it were disturbed."""
    return any(re.search("cos|sin|rope|rotary|freqs", name) for name in names)


def _shaken(values: Any, size: float, noise: torch.Generator, known: dict[int, Tensor]) -> Any:
    """Disturb what may be a sequence of vectors; rotations come as tuples, masks have one head or none."""
    if isinstance(values, Tensor) and values.is_floating_point() and values.dim() in (2, 3, 4) and values.shape[-1] > 1:
        if (values.dim() == 4 and 1 in values.shape[:2]) or _is_mask(values):
            return values
        if id(values) not in known:
            scale = float(values.float().std()) or 1.0
            drawn = size * scale * torch.randn(values.shape, generator=noise)
            known[id(values)] = values + drawn.to(values.dtype)
        return known[id(values)]
    if type(values) is dict:
        return {
            name: _shaken(value, size, noise, known) if isinstance(value, Tensor) and "mask" not in name else value
            for name, value in values.items()
        }
    if type(values) is tuple and not _are_cosines_and_sines(values):
        return tuple(_shaken(value, size, noise, known) if isinstance(value, Tensor) else value for value in values)
    return values


def _are_cosines_and_sines(values: tuple[Any, ...]) -> bool:
    if len(values) != 2 or not all(isinstance(one, Tensor) and one.is_floating_point() for one in values):
        return False
    if values[0].shape != values[1].shape or not values[0].numel():
        return False
    return float((values[0].square() + values[1].square() - 1).abs().max()) < 1e-3


def _is_mask(tensor: Tensor) -> bool:
    least, most = tensor.min(), tensor.max()
    has_two_values = bool(least < most) and bool(((tensor == least) | (tensor == most)).all())
    return has_two_values or float(least) < -1e4 or float(least) == float(most) == 1


@dataclass(eq=False)
class _Product:
    """A product of two activations: ``left (..., T, w) @ right (..., S, w).mT``."""

    left: Tensor
    right: Tensor
    is_swapped: bool = False  # the softmax runs over the left one's tokens
    parameters: tuple[bool, bool] = (False, False)  # which of them are made of parameters alone
    shape: tuple[int, ...] = ()  # of the scores, where the tokens of the right one are no last dim
    column_dim: int = -1  # of them
    tiles: int = 1  # the first dim of the left one's tokens, where they have several
    is_tied: bool = False  # scores are summed over the first dim of both, the rows of an alignment

    def is_over_left(self, shape: Sequence[int], dim: int) -> bool:
        """Tell whether a softmax over a dim of the scores runs over the left one's tokens."""
        return dim % len(shape) != (self.column_dim if tuple(shape) == self.shape else -1) % len(shape)

    @property
    def has_keys(self) -> bool:
        """Tell whether keys are made of the input; queries may be learned."""
        return not self.parameters[0 if self.is_swapped else 1]

    @property
    def is_of_learned_queries(self) -> bool:
        return self.parameters[1 if self.is_swapped else 0]


_BY_TWO = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm)
_ADDED = (torch.baddbmm, Tensor.baddbmm, Tensor.baddbmm_)
_SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax)


_MAPS = (F.linear, F.conv1d, F.conv2d, F.conv3d, F.layer_norm, F.rms_norm, F.embedding, F.group_norm, F.batch_norm)
_PLUS = (torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__iadd__)
_MINUS = (torch.sub, Tensor.sub, Tensor.__sub__)
_EXP = (torch.exp, Tensor.exp)
_MATRICES_TURNED = (Tensor.mT.__get__, Tensor.mH.__get__, Tensor.adjoint, torch.adjoint)
_DIMS_EXCHANGED = (torch.transpose, Tensor.transpose, torch.swapaxes, Tensor.swapaxes, torch.swapdims, Tensor.swapdims)
_PERMUTED = (torch.permute, Tensor.permute)
_LOG_SUMS = (torch.logsumexp, Tensor.logsumexp)
_SUMS = (torch.sum, Tensor.sum, torch.mean, Tensor.mean, torch.amax, Tensor.amax)


def _ends(func: Any, tensor: Tensor, mark: _Product) -> bool:
    """What is summed over keys, or mapped but for a mix of heads, is no score any more."""
    if func in _SUMS:
        return True
    lengths = {mark.left.shape[-2], mark.right.shape[-2]}
    return func in _MAPS and not lengths <= set(tensor.shape[:-1])


class _Products(TorchFunctionMode):
    """Follow products from the scores through the softmax to the values, by marks that tensors hand on."""

    def __init__(self, observed: Witness) -> None:
        super().__init__()
        self.observed = observed
        self.is_paused = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_paused:
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            return self._step_into(func, args, kwargs)
        answer = func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            query, key, value = (_argument(args, kwargs, i, name) for i, name in enumerate(("query", "key", "value")))
            self._record(answer, [_Product(query, key)], value)
        elif func in _BY_TWO:
            self._multiplied(answer, *(list(args) + list(kwargs.values()))[:2])
        elif func in _ADDED:
            tensors = list(args) + [kwargs[name] for name in ("batch1", "batch2") if name in kwargs]
            self._multiplied(answer, tensors[1], tensors[2])
        elif func is torch.einsum:
            self._summed(answer, args)
        elif not isinstance(answer, Tensor) and not isinstance(answer, (tuple, list)):
            return answer
        else:
            self._handed_on(func, answer, args, kwargs)
        return answer

    def _step_into(self, func: Any, args: Any, kwargs: Any) -> Any:
        # Torch's own check for a mode would lead back here.
        with mock.patch.object(F, "has_torch_function", return_value=False), self:
            if not kwargs.get("need_weights", True):
                return func(*args, **kwargs)
            # Torch computes the weights by other means; the same call without them goes where it can be seen.
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                func(*args, **(kwargs | {"need_weights": False}))
        self.is_paused = True
        try:
            return func(*args, **kwargs)
        finally:
            self.is_paused = False

    def _multiplied(self, answer: Tensor, left: Any, right: Any) -> None:
        """Take ``(..., T, w) @ (..., w, S)``."""
        if not isinstance(left, Tensor) or not isinstance(right, Tensor) or left.dim() < 3 or right.dim() < 3:
            return
        if (weights := _marks(left, "_weights")) and not _are_mixed(weights, left.shape[-1], right):
            self._record(answer, weights, right)
        elif (others := _marks(right, "_weights")) and not _are_mixed(others, right.shape[-2], left):
            self._record(answer, others, left.mT, lambda one: one.mT)
        elif mixed := weights or others:
            answer._weights = mixed
        elif not all(learned := (_is_parameter(left), _is_parameter(right))):
            answer._scores = [_Product(left.detach(), right.detach().mT, False, learned)]

    def _summed(self, answer: Tensor, args: Any) -> None:
        """Take a sum of products of two tensors for the matrix product that it is."""
        operands = args[1] if len(args) == 2 and isinstance(args[1], (tuple, list)) else args[1:]
        if not isinstance(args[0], str) or len(operands) != 2 or "->" not in args[0]:
            return
        left, right = operands
        if not isinstance(left, Tensor) or not isinstance(right, Tensor):
            return
        terms, _, out = args[0].replace(" ", "").partition("->")
        one, other = terms.split(",")
        if "..." in one and "..." in other:
            count = left.dim() - len(one) + 3
            letters = "".join(i for i in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if i not in args[0])[:count]
            if right.dim() - len(other) + 3 != count:
                return
            one, other, out = (term.replace("...", letters) for term in (one, other, out))
        elif "." in one + other:
            return
        if _marks(right, "_weights") and not _marks(left, "_weights"):
            one, other, left, right = other, one, right, left
        # Values stand as the scores did, in whatever order what comes of them does.
        batch = [i for i in (one if _marks(left, "_weights") else out) if i in one and i in other and i in out]
        summed = [i for i in one if i in other and i not in out]
        rows = [i for i in one if i not in other]
        columns = [i for i in other if i not in one]
        if len(rows) == 1 and {len(summed), len(columns)} == {1, 2}:
            self._summed_over_rows(answer, left, right, (one, other, out), (batch, rows, columns, summed))
        if len(summed) != 1 or not rows or len(columns) != 1 or len(batch) + len(rows) + 1 != len(out):
            return
        first = left.permute([one.index(i) for i in batch + rows + summed])
        second = right.permute([other.index(i) for i in batch + columns + summed])
        tiles = first.shape[len(batch)] if len(rows) > 1 else 1
        first = first.flatten(len(batch), -2)  # rows in tiles are rows all the same
        if (weights := _marks(left, "_weights")) and _are_mixed(weights, left.shape[one.index(summed[0])], right):
            answer._weights = weights
        elif weights:
            order = [out.index(i) for i in batch + rows + columns]
            self._record(answer, weights, second.mT, lambda one: one.permute(order).flatten(len(batch), -2))
        elif not all(learned := (_is_parameter(left), _is_parameter(right))) and first.dim() >= 3:
            place = tuple(answer.shape), out.index(columns[0])
            answer._scores = [_Product(first.detach(), second.detach(), False, learned, *place, tiles)]

    def _summed_over_rows(
        self, answer: Tensor, left: Tensor, right: Tensor, terms: tuple[str, ...], letters: tuple[list[str], ...]
    ) -> None:
        """Take scores that are summed over rows, as well as features, and values of each row that they weigh."""
        one, other, out = terms
        batch, rows, columns, summed = letters
        weights = _marks(left, "_weights")
        if not weights and len(summed) == 2 and set(out) == {*batch, *rows, *columns}:
            row, feature = summed
            first = left.permute([one.index(i) for i in [row, *batch, *rows, feature]]).detach()
            second = right.permute([other.index(i) for i in [row, *batch, *columns, feature]]).detach()
            if not any(learned := (_is_parameter(left), _is_parameter(right))):
                place = tuple(answer.shape), out.index(columns[0])
                answer._scores = [_Product(first, second, False, learned, *place, is_tied=True)]
        elif weights and all(mark.is_tied for mark in weights) and len(columns) == 2:
            row, feature = columns
            value = right.permute([other.index(i) for i in [row, *batch, *summed, feature]])
            order = [out.index(i) for i in [row, *batch, *rows, feature]]
            self._record(answer, weights, value, lambda one: one.permute(order))

    def _record(
        self,
        answer: Tensor,
        products: list[_Product],
        value: Tensor,
        read: Callable[[Tensor], Tensor] = lambda one: one,
    ) -> None:
        pairs = [(p.right, p.left) if p.is_swapped else (p.left, p.right) for p in products]
        pairs = [(query.detach().clone(), key.detach().clone()) for query, key in pairs]
        # What is averaged stands beside keys, though the softmax may run over queries.
        pairs = [
            (one, other) if other.shape[-2] == value.shape[-2] or one.shape[-2] != value.shape[-2] else (other, one)
            for one, other in pairs
        ]
        (query, key), *others = pairs
        computation = Computation(query, key, value.detach().clone(), read(answer).detach().clone(), others)
        computation.is_of_learned_values = _is_parameter(value)
        computation.tiles = products[0].tiles
        computation.calls, computation.time = tuple(self.observed.stack), self.observed.tick()
        self.observed.computations.append(computation)
        answer._attended = [(computation, read)]

    def _added(self, answer: Any, tensors: list[Tensor]) -> None:
        """Take a sum for what attention gives: of its parts, or with what depends on relative positions."""
        parts = [part for one in tensors for part in getattr(one, "_attended", [])]
        if not parts or not isinstance(answer, Tensor) or any(one.shape != answer.shape for one in tensors):
            return
        # What is averaged of learned values, for relative positions, is added to what is averaged of tokens.
        learned = [computation for computation, _ in parts if computation.is_of_learned_values]
        if len(learned) < len(parts):
            parts = [part for part in parts if not part[0].is_of_learned_values]
            self.observed.computations = [
                one for one in self.observed.computations if not any(one is two for two in learned)
            ]
        for computation, read in parts:
            computation.output = read(answer).detach().clone()
        answer._attended = parts

    def _handed_on(self, func: Any, answer: Any, args: Any, kwargs: Any) -> None:
        tensors = list(_tensors((args, kwargs)))
        if not tensors:
            return
        if func in _PLUS:
            self._added(answer, tensors)
        scores, weights = (
            [mark for tensor in tensors for mark in _marks(tensor, name) if not _ends(func, tensor, mark)]
            for name in ("_scores", "_weights")
        )
        if func in _LOG_SUMS and scores:
            answer._is_log_sum = True
        if func in _MINUS and scores and len(tensors) == 2 and getattr(tensors[1], "_is_log_sum", False):
            answer._is_log_weights = True
        if func in _EXP and scores and getattr(tensors[0], "_is_log_weights", False):
            weights, scores = [mark for mark in scores if mark.has_keys], []
        if func in _SOFTMAX and scores:
            dim = _argument(args, kwargs, 1, "dim")
            if isinstance(dim, int):
                scores = [_turned(one) if one.is_over_left(tensors[0].shape, dim) else one for one in scores]
            # First the products of what the input gives; keys that are learned are no tokens.
            weights = sorted((mark for mark in scores if mark.has_keys), key=lambda mark: mark.is_of_learned_queries)
            scores = []
        elif scores and _turns(func, args, kwargs, tensors[0].dim()):
            scores = [_turned(mark) for mark in scores]
        is_parameter = all(_is_parameter(tensor) for tensor in tensors)
        if not scores and not weights and not is_parameter:
            return
        for tensor in _tensors(answer):
            if any(tensor is one for one in tensors):
                continue
            if scores:
                tensor._scores = _distinct(scores)
            if weights:
                tensor._weights = _distinct(weights)
            if is_parameter:
                tensor._is_parameter = True


def _are_mixed(weights: list[_Product], count: int, other: Tensor) -> bool:
    """Tell a matrix of parameters that mixes the weights of heads from values: there are other sizes than of tokens."""
    return _is_parameter(other) and not any(count in (one.left.shape[-2], one.right.shape[-2]) for one in weights)


def _turned(mark: _Product) -> _Product:
    return replace(mark, is_swapped=not mark.is_swapped, shape=())


def _turns(func: Any, args: Any, kwargs: Any, count: int) -> bool:
    """Tell what exchanges rows and columns, as where one product gives the scores of both of two streams."""
    if func in _MATRICES_TURNED:
        return True
    if func in _DIMS_EXCHANGED:
        dims = {_argument(args, kwargs, place, f"dim{place - 1}") for place in (1, 2)}
        return {dim % count for dim in dims if isinstance(dim, int)} == {count - 1, count - 2} and len(dims) == 2
    if func in _PERMUTED:
        dims = args[1] if len(args) > 1 and not isinstance(args[1], int) else args[1:]
        order = [dim % count for dim in dims or kwargs.get("dims", ())]
        return order[-2:] == [count - 1, count - 2]
    return False


def _argument(args: Any, kwargs: Any, index: int, name: str) -> Any:
    return args[index] if len(args) > index else kwargs.get(name)


def _marks(tensor: Tensor, name: str) -> list[_Product]:
    return getattr(tensor, name, [])


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) or getattr(tensor, "_is_parameter", False)


def _distinct(marks: list[_Product]) -> list[_Product]:
    return list({id(mark.left): mark for mark in marks}.values())[:8]


def without_biases(model: nn.Module) -> nn.Module:
    """Set every bias to zero, so that a projection is its matrix and nothing else; and leave dropout out."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.rsplit(".", 1)[-1].endswith("bias"):
                parameter.zero_()
    return model.eval()
