"""Optimizers without their wrappers, and the steps that they make in a loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from hdi_callback.arguments import shown
from hdi_callback.errors import MisconfigurationError
from hdi_callback.guard import guarded
from hdi_callback.monitoring.warn_once import WarnOnce

_MOST_WRAPPERS = 10  # mocks have every attribute, without end
_MOST_FOLLOWED = 16  # parameters that are checked for writes


def inner_optimizer(optimizer: Any) -> Optimizer:
    """The torch optimizer inside a wrapper, such as that of accelerate, which calls no hooks of its own.

    Args:
        optimizer: a torch optimizer, or an object with one as ``optimizer``.

    Returns:
        The torch optimizer.

    Raises:
        MisconfigurationError: if there is none, or if it calls no hooks.
    """
    inner = optimizer
    for _ in range(_MOST_WRAPPERS):
        if isinstance(inner, Optimizer) and not hasattr(inner, "optimizer") and _calls_hooks(inner):
            return inner
        if not hasattr(inner, "optimizer"):
            break
        inner = inner.optimizer
    found = f"`optimizer` must be a torch optimizer, or a list of them, got {shown(optimizer)}"
    for name, held in _optimizers_in(inner).items():
        raise MisconfigurationError(
            f"{found}, whose step calls no hooks. It holds {type(held).__name__} as `{name}`: write "
            f"watch_heads(model, optimizer.{name}), and call `heads.before_optimizer_step()` before its step, as what "
            "is around it may move the weights first."
        )
    raise MisconfigurationError(f"{found}: write torch.optim.AdamW(model.parameters()) or the like.")


def _calls_hooks(optimizer: Optimizer) -> bool:
    """Whether its step calls hooks: torch installs them in `Optimizer.__init__`."""
    return hasattr(optimizer, "_optimizer_step_pre_hooks") and hasattr(type(optimizer).step, "hooked")


def _optimizers_in(holder: Any) -> dict[str, Optimizer]:
    """Find the optimizers that an object holds, as one that is built on another does; by their names in it."""
    own = vars(holder) if hasattr(holder, "__dict__") else {}
    return {name: one for name, one in own.items() if isinstance(one, Optimizer) and _calls_hooks(one)}


def inner_optimizers(optimizer: Any) -> list[Optimizer]:
    """The torch optimizers inside the wrappers of one or several.

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


def _parameters_of(optimizers: Sequence[Optimizer]) -> Iterator[Tensor]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from (
                parameter for parameter in group["params"] if not (is_lazy(parameter) or parameter.is_inference())
            )


class OptimizerSteps:
    """The steps that optimizers make between `begin` and `end`, by hooks on them and on those that they are built on.

    A step of what an optimizer is built on is one of its own: some are stepped by calls that torch does not know, as
    sharpness-aware minimization by ``first_step`` and ``second_step``.

    Args:
        optimizers: those of the run.
        prepare: called with each optimizer once between `begin` and `end`, before it steps; where a step is given a
            closure, after each call of the closure.
        before_closure: called before a step that is given a closure.
        warn_once: warns once of each kind of misuse.

    Attributes:
        is_inside: whether it is between `begin` and `end`.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        prepare: Callable[[Optimizer], Any],
        before_closure: Callable[[], Any],
        warn_once: WarnOnce,
    ) -> None:
        self._optimizers, self._prepare, self._warn_once = optimizers, prepare, warn_once
        self._before_closure = before_closure
        self.is_inside = self._was_compiled = self._has_stepped = False
        self._prepared: set[int] = set()
        self._count: Counter[int] = Counter()
        self._depth: Counter[int] = Counter()  # steps that are going on
        self._followed: list[Tensor] = []
        self._versions: list[int] = []
        self._handles: list[Any] = []
        for optimizer in optimizers:
            for one in (optimizer, *_optimizers_in(optimizer).values()):
                self._handles.append(one.register_step_pre_hook(partial(self._on_step_begin, optimizer)))
                self._handles.append(one.register_step_post_hook(partial(self._on_step_end, optimizer)))

    def begin(self) -> None:
        """Begin counting."""
        self.is_inside, self._was_compiled = True, False
        self._prepared.clear()
        self._count.clear()
        self._depth.clear()
        self._followed = list(islice(_parameters_of(self._optimizers), _MOST_FOLLOWED))
        self._versions = [parameter._version for parameter in self._followed]

    @guarded("watching a step")
    def prepare(self) -> None:
        """Call `prepare` for every optimizer now, if that has not been done."""
        if not self.is_inside:
            self._warn_once.warn(
                "order",
                "`heads.before_optimizer_step()` does nothing outside of `with heads.step():`. Write it within.",
            )
            return
        for optimizer in self._optimizers:
            self._prepare_once(optimizer)

    def abandon(self) -> None:
        """End counting, where `end` could not."""
        self.is_inside = False

    def end(self) -> bool:
        """End counting.

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
        if not has_stepped and [parameter._version for parameter in self._followed] != self._versions:
            self._warn_once.warn(
                "other steps",
                "The weights changed within `with heads.step():`, but the optimizer that was passed to `watch_heads` "
                "made no step: changes by another optimizer or by your own code are neither counted nor measured. Pass "
                "every optimizer that trains them: watch_heads(model, [first, second]).",
            )
        self._has_stepped |= has_stepped
        return has_stepped

    @property
    def is_unprepared(self) -> bool:
        """Whether a compiled step was made since `begin` without a call of `prepare`."""
        return self._was_compiled and not self._prepared

    def warn_if_none(self) -> None:
        """Warn if no optimizer has ever made a step between `begin` and `end`."""
        if not self._has_stepped:
            self._warn_once.warn(
                "no step",
                "The optimizer made no step in `with heads.step():`, so that there is one reading at most. "
                "Call optimizer.step() within it, on the optimizer that was passed to `watch_heads`.",
            )

    def close(self) -> None:
        """Remove the hooks on the optimizers."""
        for handle in self._handles:
            handle.remove()

    def _failed(self, work: str, error: Exception) -> None:
        self._warn_once.error(work, error)

    @guarded("watching a step")
    def _prepare_once(self, optimizer: Optimizer) -> None:
        if id(optimizer) not in self._prepared:
            self._prepared.add(id(optimizer))
            self._prepare(optimizer)

    # Called by the optimizers. In a compiled step it is traced: it must not break the graph, nor depend on values that
    # change from step to step.
    @guarded("watching a step")
    def _on_step_begin(
        self, optimizer: Optimizer, stepping: Optimizer, args: Any, kwargs: Any
    ) -> tuple[Any, Any] | None:
        if torch.compiler.is_compiling():
            self._was_compiled = True
            return None
        if not self.is_inside:
            self._warn_once.warn(
                "outside",
                "The optimizer made a step outside of `with heads.step():`, so that it is not watched. Write it around "
                "forward, backward and optimizer.step().",
            )
            return None
        self._depth[id(optimizer)] += 1  # a step may call that of its base class, or of what it is built on
        if id(optimizer) not in self._prepared:
            if callable(closure := kwargs.get("closure")):
                return args, {**kwargs, "closure": self._preparing(optimizer, closure)}
            if len(args) > 1 and callable(args[1]):  # behind the optimizer itself
                return (args[0], self._preparing(optimizer, args[1]), *args[2:]), kwargs
            self._prepare_once(optimizer)
        return None

    def _preparing(self, optimizer: Optimizer, closure: Callable[..., Any]) -> Callable[..., Any]:
        """Make a closure end with the preparation: it runs forward and backward, and its gradients are used."""
        self._before_closure()

        @wraps(closure)
        def prepared(*args: Any, **kwargs: Any) -> Any:
            self._prepared.discard(id(optimizer))  # each call has gradients of its own
            result = closure(*args, **kwargs)
            self._prepare_once(optimizer)
            return result

        return prepared

    @guarded("watching a step")
    def _on_step_end(self, optimizer: Optimizer, stepping: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or not self.is_inside:
            return
        self._depth[id(optimizer)] -= 1
        if self._depth[id(optimizer)] == 0:
            self._count[id(optimizer)] += 1
