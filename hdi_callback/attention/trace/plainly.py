"""`plainly`: run a forward without checkpoints, custom functions and what else hides operations from the graph."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint

from hdi_callback.attention.trace.graph_cut import GraphCut
from hdi_callback.attention.trace.graph_walk import made_from
from hdi_callback.attention.trace.plain_batches import without_batching
from hdi_callback.attention.trace.plain_flex import without_kernels
from hdi_callback.attention.trace.products import nearest_products
from hdi_callback.attention.trace.replaced import in_this_thread, replaced


@contextmanager
def plainly(mode: GraphCut) -> Iterator[None]:
    """Run without checkpoints, autocast, `vmap` and nested tensors; custom autograd functions run only their forward.

    Args:
        mode: that of the run.

    Yields:
        Nothing.
    """
    known: Any = torch.autograd.Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:  # a class method, of Python or from torch 2.14 on of C
        return known.__get__(None, cls)(*args, **kwargs)

    applied = classmethod(in_this_thread(apply, _Applied(mode)))
    plain: list[tuple[Any, str, Any]] = [
        (checkpoint, name, in_this_thread(getattr(checkpoint, name), _as_it_is))
        for name in _GENERATORS
        if hasattr(checkpoint, name)
    ]
    # Half precision would lose small numbers.
    plain += [
        (torch.autocast, "__enter__", in_this_thread(torch.autocast.__enter__, lambda own, self: self)),
        (torch.autocast, "__exit__", in_this_thread(torch.autocast.__exit__, lambda own, self, *raised: None)),
        (torch.autograd.Function, "apply", applied),
    ]
    with replaced(*plain), without_batching(mode), without_kernels():
        yield


# Activation checkpoints: what they compute again is in no graph of the run. From torch 2.14 on the second.
_GENERATORS = ("_checkpoint_without_reentrant_generator", "_checkpoint_without_reentrant_generator_impl")


def _as_it_is(own: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
    yield


class _Applied:
    """Runs the body of a `torch.autograd.Function` that attends, or calls other ranks, so that it is in the graph.

    Args:
        mode: that of the run.
    """

    def __init__(self, mode: GraphCut) -> None:
        self.mode = mode

    def __call__(self, apply: Any, cls: Any, *args: Any, **kwargs: Any) -> Any:
        """Run in place of `apply` of a subclass of `torch.autograd.Function`."""
        if cls is checkpoint.CheckpointFunction:
            function, _, *own = args
            return function(*own)
        if not torch.is_grad_enabled():
            return NotImplemented
        mode, exchange, leaves = self.mode, self.mode.exchange, self.mode.run.leaves
        if (cls.__module__, cls.__name__) == _BY_SCATTERS:
            return tuple(exchange.received(args[2:], args[0]))
        known, calls, sent = len(leaves), dict(mode.calls), len(exchange.sent)
        hidden, moved, exponentials = mode.hidden, exchange.calls, mode.exponentials
        result = apply(cls, *args, **kwargs)
        is_open = mode.hidden == hidden and exchange.calls == moved
        multiplies = len(leaves) == known and sum(isinstance(arg, Tensor) and arg.requires_grad for arg in args) > 1
        if is_open and mode.exponentials == exponentials and not multiplies:
            return result
        kept = leaves[known:], dict(mode.calls)
        del leaves[known:], exchange.sent[sent:]
        mode.calls, of_scores = calls, mode.of_scores
        is_split = cls.setup_context is not torch.autograd.Function.setup_context
        forward = inspect.unwrap(cls.forward)  # that of a decorator, such as no_grad, records nothing
        try:
            plain = forward(*args, **kwargs) if is_split else forward(_Context(), *args, **kwargs)
        except Exception:
            return result
        if is_open and mode.of_scores == of_scores and not _has_products(plain, args):  # an activation, say
            leaves[known:], mode.calls = kept
            return result
        return plain


def _has_products(made: Any, arguments: Sequence[Any]) -> bool:
    """Return whether a tensor is made of its arguments by a product of two of them, as scores are."""
    before = {node for argument in arguments if isinstance(argument, Tensor) for node in nearest_products(argument)}
    return isinstance(made, Tensor) and any(
        None not in made_from(node)[-2:] for node in nearest_products(made) if node not in before
    )


# Torch's all-to-all of lists sends one scatter after the other with gloo.
_BY_SCATTERS = ("torch.distributed.nn.functional", "_AlltoAll")


class _Context:
    """The `ctx` of a forward: discards the tensors kept for a backward, keeps attributes."""

    needs_input_grad = (True,) * 64

    def save_for_backward(self, *tensors: Any) -> None: ...

    def save_for_forward(self, *tensors: Any) -> None: ...

    def mark_dirty(self, *tensors: Any) -> None: ...

    def mark_non_differentiable(self, *tensors: Any) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...
