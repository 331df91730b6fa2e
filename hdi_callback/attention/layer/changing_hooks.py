"""Forward hooks of a linear map that change its output, as updates of low rank by hooks do.

Before a forward their code alone shows whether they may. A forward shows it: a hook that returned its input tensor,
and wrote nothing into it, changes nothing; one that returned other numbers, or wrote into it, does. One that returned
a new tensor of the same numbers may change them later, as an update of low rank does that begins with zeros.
"""

from __future__ import annotations

import dis
import functools
import weakref
from collections.abc import Iterator
from typing import Any, Literal

from torch import nn

# Their hooks gather, move or cast the output of a map, and ours do nothing to it.
_LEAVE_IT = ("torch", "hdi_callback", "accelerate", "deepspeed", "lightning", "transformers", "wandb", "peft")
_COLLECT = {"append", "extend", "update", "setdefault", "__setitem__"}

Effect = Literal["none", "changed", "unknown"]

# Hooks of a map, and their effect on its output as forwards showed it.
_SHOWN: weakref.WeakKeyDictionary[nn.Module, tuple[tuple[int, ...], Effect]] = weakref.WeakKeyDictionary()


def changing_hook(module: nn.Module) -> str | None:
    """Find a forward hook that changes the output of a module, or may, until a forward shows that it does not.

    Args:
        module: any module.

    Returns:
        What it is, as a clause: the name of the hook, and whether it changes anything; `None` if no hook does, as far
        as forwards or their code show: a call whose result is passed on counts as something.
    """
    hooks = list(_hooks_of(module))
    effect = _shown(module, hooks)
    if effect != "unknown":
        return f"with {_named(hooks)}, which changed its output" if effect == "changed" and hooks else None
    may_change = [hook for hook in hooks if _returns_something(_function_of(hook))]
    return f"with {_named(may_change)}, which may change its output" if may_change else None


def shown_change(module: nn.Module) -> bool:
    """Return whether a forward showed that the hooks of a module change its output.

    Args:
        module: any module.

    Returns:
        False as long as no forward did.
    """
    hooks = list(_hooks_of(module))
    return bool(hooks) and _shown(module, hooks) == "changed"


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module has forward hooks that may change its output.

    Args:
        module: any module.

    Returns:
        False if it has none, or those of libraries alone that leave it as it is.
    """
    return any(True for _ in _hooks_of(module))


def note_effect(module: nn.Module, effect: Effect) -> None:
    """Record whether the hooks of a module changed its output in a forward.

    Args:
        module: a linear map.
        effect: ``"none"``, ``"changed"``, or ``"unknown"`` of a new tensor of the same numbers.
    """
    _SHOWN[module] = tuple(map(id, _hooks_of(module))), effect


def _shown(module: nn.Module, hooks: list[Any]) -> Effect:
    known, effect = _SHOWN.get(module, ((), "unknown"))
    return effect if known == tuple(map(id, hooks)) else "unknown"


def _hooks_of(module: nn.Module) -> Iterator[Any]:
    for hook in module._forward_hooks.values():
        if (getattr(_function_of(hook), "__module__", None) or "").partition(".")[0] not in _LEAVE_IT:
            yield hook


def _named(hooks: list[Any]) -> str:
    names = [str(getattr(_function_of(hook), "__name__", type(hook).__name__)) for hook in hooks]
    return f"the forward hook{'s' * (len(names) > 1)} `{'` and `'.join(names)}`"


def _function_of(hook: Any) -> Any:
    while isinstance(hook, functools.partial):
        hook = hook.func
    if not hasattr(hook, "__code__") and not hasattr(hook, "__func__"):
        hook = getattr(type(hook), "__call__", hook)  # noqa: B004
    return getattr(hook, "__func__", hook)


def _returns_something(function: Any) -> bool:
    code = getattr(function, "__code__", None)
    if code is None or _COLLECT & set(code.co_names):
        return False
    before: Any = None
    for instruction in dis.get_instructions(code):
        is_return = instruction.opname in ("RETURN_VALUE", "RETURN_CONST")
        returned = instruction if instruction.opname == "RETURN_CONST" else before
        if is_return and not (returned is not None and returned.opname.endswith("_CONST") and returned.argval is None):
            return True
        before = instruction
    return False
