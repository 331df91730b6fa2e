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
        is_inside: between `begin` and `end`.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], prepare: Callable[[Optimizer], Any], warn_once: WarnOnce
    ) -> None:
        self._optimizers, self._prepare, self._warn_once = optimizers, prepare, warn_once
        self.is_inside = self._was_compiled = self._has_stepped = False
        self._prepared: set[int] = set()
        self._count: Counter[int] = Counter()
        self._handles: list[Any] = []
        for optimizer in optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._on_step_begin))
            self._handles.append(optimizer.register_step_post_hook(self._on_step_end))

    def begin(self) -> None:
        """Begin to count."""
        self.is_inside, self._was_compiled = True, False
        self._prepared.clear()
        self._count.clear()

    def prepare(self) -> None:
        """Prepare every optimizer now, if that has not been done."""
        if not self.is_inside:
            self._warn_once.warn(
                "order",
                "`heads.before_optimizer_step()` does nothing outside of `with heads.step():`. Write it within.",
            )
            return
        for optimizer in self._optimizers:
            self._prepare_once(optimizer)

    def end(self) -> bool:
        """Count no more.

        Returns:
            Whether any optimizer made a step.
        """
        self.is_inside = False
        if max(self._count.values(), default=0) > 1:
            self._warn_once.warn(
                "several steps",
                "An optimizer made several steps within one `with heads.step():`, which counts as one. Write it "
                "within the loop, around each step.",
            )
        if self.is_unprepared:
            self._warn_once.warn(
                "compiled step",
                "The optimizer's step is compiled, and within a graph the heads cannot be read: call "
                "`heads.before_optimizer_step()` before it.",
            )
        has_stepped = bool(self._count) or self._was_compiled
        self._has_stepped |= has_stepped
        return has_stepped

    @property
    def is_unprepared(self) -> bool:
        """Whether a step was made since `begin` that nothing could prepare, as it is compiled."""
        return self._was_compiled and not self._prepared

    def warn_if_none(self) -> None:
        """Warn if no optimizer has ever made a step between `begin` and `end`."""
        if not self._has_stepped:
            self._warn_once.warn(
                "no step",
                "The optimizer made no step in `with heads.step():`, so that there is one reading at most. "
                "Call optimizer.step() within it, on the optimizer that `watch_heads` got.",
            )

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
            self._was_compiled = True
            return
        if self.is_inside:
            self._prepare_once(optimizer)
        else:
            self._warn_once.warn(
                "outside",
                "The optimizer made a step outside of `with heads.step():`, so that it is not watched. Write it around "
                "forward, backward and optimizer.step().",
            )

    def _on_step_end(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling() and self.is_inside:
            self._count[id(optimizer)] += 1
