"""The calls that are going on around attention, and the operator by which compiled graphs hand over what they have."""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hdi_callback.attention.hooks import Arguments, Handle, observe_calls
from hdi_callback.attention.padding import Frame, frame, masks_in_graphs

_numbers = itertools.count()
_by_number: weakref.WeakValueDictionary[int, Entry] = weakref.WeakValueDictionary()


class Entry:
    """Where a compiled graph hands over what it has.

    Args:
        receive: takes the tensor.
    """

    def __init__(self, receive: Callable[[Tensor], None]) -> None:
        self.receive = receive
        # A tensor, as a graph that is shared by the layers of a model would have to be compiled anew for each number.
        self.number = torch.tensor(next(_numbers))
        _by_number[int(self.number)] = self


# An operator without a result would do, were it not for the compilers of torch before 2.13, which leave it out as dead
# code; so the projection works on what this one hands on.
@torch.library.custom_op("hdi_callback::take", mutates_args=())
def _take(passed: Tensor, outputs: Tensor, number: Tensor) -> Tensor:
    entry = _by_number.get(int(number))
    if entry is not None:
        entry.receive(outputs)
    return passed.clone()


@_take.register_fake
def _(passed: Tensor, outputs: Tensor, number: Tensor) -> Tensor:
    return torch.empty_like(passed)


_take.register_autograd(lambda _, gradient: (gradient, None, None))


def take_in_graph(passed: Tensor, outputs: Tensor, entry: Entry) -> Tensor:
    """Hand a tensor over from a compiled graph, whenever it runs.

    Args:
        passed: what the graph goes on with.
        outputs: what is handed over.
        entry: to whom.

    Returns:
        `passed`, for the graph to go on with.
    """
    handed_on: Tensor = torch.ops.hdi_callback.take(passed, outputs.detach(), entry.number)
    return handed_on


def is_recomputing() -> bool:
    """Tell whether activation checkpointing repeats a forward that autograd has recorded.

    Returns:
        False also where the first time was without autograd, as with ``use_reentrant=True``.
    """
    code = sys._getframe(1)
    while code is not None:
        if code.f_code.co_name == "unpack_hook" and "checkpoint" in code.f_code.co_filename:
            return True
        code = code.f_back  # type: ignore[assignment]
    return False


class Calls:
    """The calls that are going on around attention: the layers themselves and the modules that they are parts of.

    Args:
        model: the outermost of these modules.

    Attributes:
        is_armed: whether calls are followed.
        is_in_graph: whether compiled graphs hand over masks.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self.model = model
        self.is_armed = self.is_in_graph = False
        self._around: dict[nn.Module, tuple[nn.Module, ...]] = {}
        self._followed: list[_Followed] = []
        self._going_on: dict[int, list[Frame]] = {}
        self._numbers = itertools.count(1)

    def surround(self, modules: Iterable[nn.Module]) -> None:
        """Find the modules around attention.

        Args:
            modules: attention layers.
        """
        wanted = set(modules)
        self._around = {module: (module,) for module in wanted}
        parents: list[nn.Module] = []

        def descend(module: nn.Module) -> None:
            parents.append(module)
            if module in wanted:
                self._around[module] = tuple(reversed(parents))
            for child in module.children():
                descend(child)
            parents.pop()

        if self.model is not None:
            descend(self.model)
        modules = dict.fromkeys(one for around in self._around.values() for one in around)
        fast = [module for module in modules if isinstance(module, nn.TransformerEncoderLayer)]
        # Hooks on them would keep torch from its fast path; what they are given their attention gets too.
        within = {one for module in fast for one in module.modules() if not isinstance(one, nn.MultiheadAttention)}
        self._followed = [_Followed(module, self) for module in modules if module not in within]

    def install(self) -> Iterator[Handle]:
        """Follow the calls.

        Yields:
            Handles that end it.
        """
        for one in self._followed:
            yield from observe_calls(one.module, one.begin, one.end)

    def forget(self) -> None:
        """Let go of all arguments."""
        self.is_armed = False
        self._going_on.clear()
        for one in self._followed:
            one.masks.clear()

    def around(self, attention: nn.Module) -> list[Frame]:
        """Give the calls around an attention layer.

        Args:
            attention: the layer.

        Returns:
            Those that are going on, from the attention outwards.
        """
        around = self._around.get(attention, ())
        return [one for one in reversed(self._stack()) if one.module in around]

    def compiled_around(self, attention: nn.Module) -> list[Frame]:
        """Give what compiled graphs have handed over of the calls around an attention layer.

        Args:
            attention: the layer.

        Returns:
            The latest masks, from the attention outwards.
        """
        masks = {one.module: one.masks for one in self._followed}
        around = self._around.get(attention, ())
        return [Frame(module, dict(masks[module])) for module in around if masks.get(module)]

    def outermost(self) -> int | None:
        """Tell apart the calls of the model.

        Returns:
            The number of the outermost call that is going on.
        """
        stack = self._stack()
        return stack[0].number if stack else None

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take note of a call that begins; see `frame`."""
        call = frame(module, args, kwargs)
        call.number = next(self._numbers)
        self._going_on.setdefault(threading.get_ident(), []).append(call)

    def end(self, module: nn.Module) -> None:
        """Forget a call that ends, and whatever it has called."""
        stack = self._stack()
        for place in range(len(stack) - 1, -1, -1):
            if stack[place].module is module:
                del stack[place:]
                return

    def _stack(self) -> list[Frame]:
        return self._going_on.get(threading.get_ident(), [])


class _Followed:
    """One module whose calls are followed."""

    def __init__(self, module: nn.Module, calls: Calls) -> None:
        self.module, self._calls = module, calls
        self.masks: dict[str, Tensor] = {}  # those that a compiled graph has handed over
        self._names = masks_in_graphs(module)
        self._entries = {name: self._entry(name) for _, name in self._names}

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """Take note of a call; in a compiled graph of its masks."""
        if torch.compiler.is_compiling():
            return self._pass_masks_on(args, kwargs) if self._calls.is_in_graph and self._names else None
        if self._calls.is_armed:
            self._calls.begin(module, args, kwargs)
        return None

    def end(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Forget a call."""
        if not torch.compiler.is_compiling() and self._calls.is_armed:
            self._calls.end(module)

    def _pass_masks_on(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        is_of_queries = not self._is_torch_attention or _queries_are_keys(args, kwargs)
        if not is_of_queries:
            return None
        args, kwargs = tuple(args), dict(kwargs)
        for place, name in self._names:
            value = args[place] if place < len(args) else kwargs.get(name)
            if type(value) is Tensor:
                value = take_in_graph(value, value, self._entries[name])
                if place < len(args):
                    args = (*args[:place], value, *args[place + 1 :])
                else:
                    kwargs[name] = value
        return args, kwargs

    def _entry(self, name: str) -> Entry:
        return Entry(lambda mask: self._receive(name, mask))

    def _receive(self, name: str, mask: Tensor) -> None:
        if self._calls.is_armed:
            self.masks[name] = mask.detach().clone()

    @property
    def _is_torch_attention(self) -> bool:
        return isinstance(self.module, nn.MultiheadAttention)


def _queries_are_keys(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    query = args[0] if args else kwargs["query"]
    key = args[1] if len(args) > 1 else kwargs["key"]
    return query is key
