"""Arguments of a real forward, kept for trials of attention modules: a few tokens of one sequence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from hdi_callback.attention.behaviour.probe import MadeUp, Shape, has_other_norms
from hdi_callback.attention.projections import is_pointwise
from hdi_callback.attention.recorder import Recorder

_TOKENS = 8
_LONGEST, _LARGEST = 400, 2**18  # tokens that are kept where they cannot be cut, and features of all of them
_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class ArgumentRecorder(Recorder["Given"]):
    """Keeps the arguments of the next forward of some modules, cut to what a trial needs.

    Args:
        modules: the modules, by their names.
        keeps_whole: keep the arguments as they are too, where they are small.
    """

    def __init__(self, modules: Mapping[str, nn.Module], *, keeps_whole: bool = False) -> None:
        self._keeps_whole = keeps_whole
        super().__init__(modules)

    def _keep(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Given]:
        return given(module, args, kwargs, is_whole=self._keeps_whole)


@dataclass(frozen=True)
class Given(MadeUp):
    """Arguments of a real forward, cut to one sequence and few tokens.

    Attributes:
        args: by position.
        kwargs: by name.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def arguments(self, forward: Any, batch: int, width: int) -> _Arguments:
        """Give them to every element of a batch.

        Args:
            forward: not used.
            batch: sequences.
            width: not used.

        Returns:
            Arguments by position and by name.
        """
        if self.is_whole:
            return _each(self.args, 1, 0), _each(dict(self.kwargs), 1, 0)
        place = 1 if self.shape == "length first" else 0
        return _each(self.args, batch, place), _each(dict(self.kwargs), batch, place)


def given(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, is_whole: bool = False
) -> list[Given]:
    """Cut the arguments of a forward.

    Args:
        module: the module whose forward it is.
        args: by position.
        kwargs: by name.
        is_whole: give them as they are too, if they are small.

    Returns:
        The cut arguments, once for each order that the dimensions of the tokens may have, then as they are; copies.
    """
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    if not tensors:
        return []
    tokens, ways = tensors[0], list[Given]()
    if tokens.dim() == 4:  # an image, whose sides are kept
        cut = _Cut(tokens.shape[0], frozenset(), 0)
        size = tokens.shape[1] * tokens.shape[2]
        image = Given("batch first", size, args=cut(args), kwargs=cut(dict(kwargs)))
        ways += [image] if _is_small(size, tokens) else []
    orders: tuple[tuple[Shape, int, int], ...] = (("batch first", 0, 1), ("length first", 1, 0))
    for shape, batch, length in orders if tokens.dim() == 3 else ():
        sequences = [one for one in tensors if one.dim() == 3 and one.shape[batch] == tokens.shape[batch]]
        cut = _Cut(tokens.shape[batch], frozenset(one.shape[length] for one in sequences), batch)
        ways.append(Given(shape, cut.tokens, args=cut(args), kwargs=cut(dict(kwargs))))
    if tokens.dim() == 3 and _is_small(tokens.shape[1], tokens):  # a length that the module insists on
        cut = _Cut(tokens.shape[0], frozenset(), 0)
        ways.append(Given("batch first", tokens.shape[1], args=cut(args), kwargs=cut(dict(kwargs))))
    if tokens.dim() > 2 and any(is_pointwise(part) for part in module.modules()):  # (batch, features, ...)
        cut = _Cut(tokens.shape[0], frozenset(), 0)
        size = tokens.shape[2:].numel()
        whole = Given("batch first", size, args=cut(args), kwargs=cut(dict(kwargs)))
        ways += [whole] if size <= _LONGEST and tokens[0].numel() <= _LARGEST else []
    if is_whole and sum(tensor.numel() for tensor in _all_tensors((args, kwargs))) <= _LARGEST:
        cut = _Cut(0, frozenset(), 0)
        ways.append(Given("batch first", 1, args=cut(args), kwargs=cut(dict(kwargs)), is_whole=True))
    return _with_and_without_norms(module, ways)


def _is_small(length: int, tokens: Tensor) -> bool:
    return length <= _LONGEST and length * tokens.shape[-1] <= _LARGEST


def _with_and_without_norms(module: nn.Module, ways: list[Given]) -> list[Given]:
    return [*ways, *(replace(way, is_normed=False) for way in ways if has_other_norms(module))]


def _all_tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _all_tensors(item)


@dataclass(frozen=True)
class _Cut:
    """Cuts whatever has as many elements as there are sequences or tokens; nothing if their number is zero."""

    batch: int
    lengths: frozenset[int]
    batch_dim: int

    @property
    def tokens(self) -> int:
        return min(_TOKENS, *self.lengths, _TOKENS)

    def __call__(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if type(value) in (tuple, list):
            return type(value)(self(item) for item in value)
        if type(value) is dict:
            return {name: self(item) for name, item in value.items()}
        return value if value is None or isinstance(value, (bool, int, float, str)) else None  # no caches

    def _tensor(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        if not self.batch:
            return tensor.clone()
        if tensor.dim() > self.batch_dim and tensor.shape[self.batch_dim] == self.batch:
            tensor = tensor.narrow(self.batch_dim, 0, 1)
        elif tensor.dim() == 2 and tensor.shape[0] == self.batch:  # a mask has the batch first all the same
            tensor = tensor[:1]
        dims = [dim for dim, size in enumerate(tensor.shape) if size in self.lengths]
        if not {tensor.dim() - 2, tensor.dim() - 1} <= set(dims):  # else a mask
            dims = dims[:1]
        for dim in dims:
            tensor = tensor.narrow(dim, 0, self.tokens)
        return tensor.clone()


def _each(value: Any, batch: int, place: int) -> Any:
    """Give tensors of one sequence to every element of the batch."""
    if isinstance(value, Tensor):
        value = value.to(device="cpu", dtype=torch.float32 if value.is_floating_point() else None)
        if value.dim() > place + 1 and value.shape[place] == 1:
            return value.expand(*(batch if dim == place else -1 for dim in range(value.dim())))
        return value
    if isinstance(value, (tuple, list)):
        return type(value)(_each(item, batch, place) for item in value)
    if isinstance(value, dict):
        return {name: _each(item, batch, place) for name, item in value.items()}
    return value
