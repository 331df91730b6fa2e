"""`plainly`: what stands between the code of a forward and the graph of its run is left out for the time of the run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils import checkpoint

from hdi_callback.attention.trace.graph_cut import GraphCut
from hdi_callback.attention.trace.plain_batches import without_batching
from hdi_callback.attention.trace.plain_flex import without_kernels


@contextmanager
def plainly(mode: GraphCut) -> Iterator[None]:
    """Run without checkpoints, autocast, `vmap` and nested tensors, and own backwards by their forwards alone.

    Args:
        mode: that of the run.

    Yields:
        Nothing.
    """
    plain = _without_checkpoints(), _without_autocast(), _without_own_backwards(mode)
    with ExitStack() as stack:
        for one in (*plain, without_batching(mode), without_kernels()):
            stack.enter_context(one)
        yield


@contextmanager
def _without_checkpoints() -> Iterator[None]:
    """Let activation checkpoints of this thread run plainly: what they compute again is in no graph of the run."""
    thread = threading.get_ident()
    known = {name: getattr(checkpoint, name) for name in (*_GENERATORS, _REENTRANT) if hasattr(checkpoint, name)}

    def plain(generator: Callable[..., Iterator[None]]) -> Callable[..., Iterator[None]]:
        def plainly(*args: Any, **kwargs: Any) -> Iterator[None]:
            if threading.get_ident() == thread:
                yield
            else:
                yield from generator(*args, **kwargs)

        return plainly

    class Plain:
        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            here = threading.get_ident() == thread
            return function(*args) if here else known[_REENTRANT].apply(function, preserve, *args)

    for name, value in known.items():
        setattr(checkpoint, name, Plain if name == _REENTRANT else plain(value))
    try:
        yield
    finally:
        for name, value in known.items():
            setattr(checkpoint, name, value)


_REENTRANT = "CheckpointFunction"
# From torch 2.14 on the second.
_GENERATORS = ("_checkpoint_without_reentrant_generator", "_checkpoint_without_reentrant_generator_impl")


@contextmanager
def _without_autocast() -> Iterator[None]:
    """Let nothing of this thread begin autocast: what is small would be lost in numbers of half the digits."""
    thread, known = threading.get_ident(), torch.autocast
    enter, leave = known.__enter__, known.__exit__

    def entered(self: Any) -> Any:
        return self if threading.get_ident() == thread else enter(self)  # type: ignore[no-untyped-call]

    def left(self: Any, *raised: Any) -> Any:
        return None if threading.get_ident() == thread else leave(self, *raised)

    known.__enter__, known.__exit__ = entered, left  # type: ignore[method-assign]
    try:
        yield
    finally:
        known.__enter__, known.__exit__ = enter, leave  # type: ignore[method-assign]


@contextmanager
def _without_own_backwards(mode: GraphCut) -> Iterator[None]:
    """Let what attends, or asks other ranks, in a `torch.autograd.Function` run plainly, to be in the graph."""
    thread, own = threading.get_ident(), torch.autograd.Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:  # a class method, of Python or from torch 2.14 on of C
        return own.__get__(None, cls)(*args, **kwargs)

    def applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread or not torch.is_grad_enabled():
            return apply(cls, *args, **kwargs)
        if (cls.__module__, cls.__name__) == _BY_SCATTERS:
            return tuple(mode.exchange.received(args[2:], args[0]))
        leaves, exchange = mode.run.leaves, mode.exchange
        known, calls, sent = len(leaves), dict(mode.calls), len(exchange.sent)
        hidden, moved, exponentials = mode.hidden, exchange.calls, mode.exponentials
        answer = apply(cls, *args, **kwargs)
        is_open = mode.hidden == hidden and exchange.calls == moved
        if is_open and mode.exponentials == exponentials:
            return answer
        kept = leaves[known:], dict(mode.calls)
        del leaves[known:], exchange.sent[sent:]
        mode.calls, of_scores = calls, mode.of_scores
        is_split = cls.setup_context is not torch.autograd.Function.setup_context
        try:
            plain = cls.forward(*args, **kwargs) if is_split else cls.forward(_Context(), *args, **kwargs)
        except Exception:
            return answer
        if is_open and mode.of_scores == of_scores:  # an activation, say
            leaves[known:], mode.calls = kept
            return answer
        return plain

    torch.autograd.Function.apply = classmethod(applied)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = own  # type: ignore[method-assign]


# Torch's all-to-all of lists sends one scatter after the other with gloo.
_BY_SCATTERS = ("torch.distributed.nn.functional", "_AlltoAll")


class _Context:
    """Takes what a forward keeps for its backward, and keeps the attributes alone."""

    needs_input_grad = (True,) * 64

    def save_for_backward(self, *tensors: Any) -> None: ...

    def save_for_forward(self, *tensors: Any) -> None: ...

    def mark_dirty(self, *tensors: Any) -> None: ...

    def mark_non_differentiable(self, *tensors: Any) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...
