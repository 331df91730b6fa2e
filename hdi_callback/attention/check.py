"""The heads of a layer, checked once in a real run.

At the first armed forward the arguments of every attention layer are kept: a few tokens of one sequence. Once the
backward is over, the trial of `trial.py` is made with them in place of inputs that are made up: does a change in one
claimed head show in its own outputs, and in no other's?
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hdi_callback.attention.heads import AttentionLayer
from hdi_callback.attention.probe import MadeUp, Shape
from hdi_callback.attention.trial import contradiction

_TOKENS = 8
_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class HeadCheck:
    """Check claimed heads on the arguments of one real forward.

    Args:
        layers: the claims.
    """

    def __init__(self, layers: Sequence[AttentionLayer]) -> None:
        self._layers = {layer.name: layer for layer in layers}
        self._seen: dict[str, list[Given]] = {}
        self._is_armed = False
        self._handles: list[RemovableHandle] = []
        self.resume()

    @property
    def was_armed(self) -> bool:
        """Whether a forward was to be kept."""
        return self._is_armed

    def arm(self) -> None:
        """Keep the arguments of the next forward."""
        self._is_armed = True

    def contradictions(self, *, leave_out: Collection[str] = ()) -> dict[str, str]:
        """Compare, and let go of the arguments.

        The hooks stay and do nothing more, for without them a compiled model would be compiled anew.

        Args:
            leave_out: names of layers that are not to be compared.

        Returns:
            Layers whose heads are not what is claimed: name -> what shows it. A layer that did not run, or that cannot
            be run again with these arguments, is not among them.
        """
        self._is_armed = False
        shown = {
            name: contradiction(self._layers[name], ways) for name, ways in self._seen.items() if name not in leave_out
        }
        self._seen.clear()
        return {name: what for name, what in shown.items() if what is not None}

    def suspend(self) -> None:
        """Take the hooks off; calling it again does nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def resume(self) -> None:
        """Put the hooks back after `suspend`."""
        if self._handles:
            return
        for layer in self._layers.values():
            if layer.output_projection is None:  # nothing shows in what comes back
                continue
            self._handles.append(layer.module.register_forward_pre_hook(self._recorder(layer.name), with_kwargs=True))

    def _recorder(self, name: str) -> Any:
        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if torch.compiler.is_compiling() or not self._is_armed or name in self._seen:
                return
            try:
                self._seen[name] = given(args, kwargs)
            except Exception:  # what cannot be cut is not checked
                self._seen[name] = []

        return record


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
        place = 1 if self.shape == "length first" else 0
        return _each(self.args, batch, place), _each(dict(self.kwargs), batch, place)


def given(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Given]:
    """Cut the arguments of a forward.

    Args:
        args: by position.
        kwargs: by name.

    Returns:
        The cut arguments, once for each order that the dimensions of the tokens may have; copies.
    """
    tokens = next(
        (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.dim() == 3), None
    )
    if tokens is None:
        return []
    ways = []
    orders: tuple[tuple[Shape, int, int], ...] = (("batch first", 0, 1), ("length first", 1, 0))
    for shape, batch, length in orders:
        cut = _Cut(tokens.shape[batch], tokens.shape[length], batch)
        ways.append(Given(shape, cut.tokens, args=cut(args), kwargs=cut(dict(kwargs))))
    return ways


@dataclass(frozen=True)
class _Cut:
    """Cuts whatever has as many elements as there are sequences or tokens."""

    batch: int
    length: int
    batch_dim: int

    @property
    def tokens(self) -> int:
        return min(self.length, _TOKENS)

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
        if tensor.dim() > self.batch_dim and tensor.shape[self.batch_dim] == self.batch:
            tensor = tensor.narrow(self.batch_dim, 0, 1)
        elif tensor.dim() == 2 and tensor.shape[0] == self.batch:  # a mask has the batch first all the same
            tensor = tensor[:1]
        dims = [dim for dim, size in enumerate(tensor.shape) if size == self.length]
        if tensor.dim() < 2 or tensor.shape[-2:] != (self.length, self.length):
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
