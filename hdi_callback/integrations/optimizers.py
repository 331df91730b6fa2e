"""Optimizers: the one under what others put around it, and what they do within one step of a loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from hdi_callback.arguments import shown
from hdi_callback.errors import MisconfigurationError
from hdi_callback.monitoring.warn_once import WarnOnce

_MOST_WRAPPERS = 10  # objects that have every attribute end nowhere


def inner_optimizer(optimizer: Any) -> Optimizer:
    """Take the wrapper off an optimizer, such as that of accelerate, which calls no hooks of its own.

    Args:
        optimizer: a torch optimizer, or what holds one as ``optimizer``.

    Returns:
        The torch optimizer.

    Raises:
        MisconfigurationError: if there is none.
    """
    inner = optimizer
    for _ in range(_MOST_WRAPPERS):
        if isinstance(inner, Optimizer) and not hasattr(inner, "optimizer"):
            return inner
        if not hasattr(inner, "optimizer"):
            break
        inner = inner.optimizer
    raise MisconfigurationError(
        f"`optimizer` must be a torch optimizer, or a list of them, got {shown(optimizer)}: write "
        "torch.optim.AdamW(model.parameters()) or the like."
    )


def inner_optimizers(optimizer: Any) -> list[Optimizer]:
    """Take the wrappers off one optimizer, or several.

    Args:
        optimizer: an optimizer, or a list of them.

    Returns:
        The torch optimizers, each once.

    Raises:
        MisconfigurationError: if there is none.
    """
    several = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    if not len(several):
        raise MisconfigurationError("`optimizer` is an empty list: give the optimizer that steps.")
    return list({id(inner): inner for inner in map(inner_optimizer, several)}.values())


class OptimizerSteps:
    """The steps that optimizers make between `begin` and `end`, by hooks on them.

    Args:
        optimizers: those of the run.
        prepare: called with each optimizer once between `begin` and `end`, before it steps.
        warn_once: takes the warnings.

    Attributes:
        was_compiled: a step was compiled since `begin`, in which nothing can be called.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], prepare: Callable[[Optimizer], Any], warn_once: WarnOnce
    ) -> None:
        self._optimizers, self._prepare, self._warn_once = optimizers, prepare, warn_once
        self._is_inside = self.was_compiled = False
        self._prepared: set[int] = set()
        self._count: Counter[int] = Counter()
        self._handles: list[Any] = []
        for optimizer in optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._on_step_begin))
            self._handles.append(optimizer.register_step_post_hook(self._on_step_end))

    def begin(self) -> None:
        """Begin to count."""
        self._is_inside, self.was_compiled = True, False
        self._prepared.clear()
        self._count.clear()

    def prepare(self) -> None:
        """Prepare every optimizer now, if that has not been done."""
        for optimizer in self._optimizers:
            self._prepare_once(optimizer)

    def end(self) -> bool:
        """Count no more.

        Returns:
            Whether any optimizer made a step.
        """
        self._is_inside = False
        if max(self._count.values(), default=0) > 1:
            self._warn_once.warn(
                "several steps",
                "An optimizer made several steps within one `with heads.step():`, which counts as one. Write it "
                "within the loop, around each step.",
            )
        return bool(self._count) or self.was_compiled

    def close(self) -> None:
        """Leave no hook on the optimizers."""
        for handle in self._handles:
            handle.remove()

    def _prepare_once(self, optimizer: Optimizer) -> None:
        if id(optimizer) not in self._prepared:
            self._prepared.add(id(optimizer))
            self._prepare(optimizer)

    # Called by the optimizers. Where their step is compiled this is traced: it must break no graph, and depend on
    # nothing that changes from step to step.
    def _on_step_begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            self.was_compiled = True
            return
        if self._is_inside:
            self._prepare_once(optimizer)
        else:
            self._warn_once.warn(
                "outside",
                "The optimizer made a step outside of `with heads.step():`, so that it is not watched. Write it around "
                "forward, backward and optimizer.step().",
            )

    def _on_step_end(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling() and self._is_inside:
            self._count[id(optimizer)] += 1
