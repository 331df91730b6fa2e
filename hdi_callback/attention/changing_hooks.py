"""Forward hooks of a linear map that may change what it gives, as updates of low rank by hooks do."""

from __future__ import annotations

import dis
import functools
from typing import Any

from torch import nn

# Their hooks gather, move or cast what a map gives, and ours do nothing to it.
_LEAVE_IT = ("torch", "hdi_callback", "accelerate", "deepspeed", "lightning", "transformers", "wandb", "peft")
_COLLECT = {"append", "extend", "update", "setdefault", "__setitem__"}


def changing_hook(module: nn.Module) -> str | None:
    """Find a forward hook whose code returns something, which takes the place of what the module gave.

    Args:
        module: any module.

    Returns:
        The name of the hook; `None` if no hook does, as far as their code shows: a call whose answer is handed on
        counts as something.
    """
    for hook in module._forward_hooks.values():
        function = _function_of(hook)
        is_known = (getattr(function, "__module__", None) or "").partition(".")[0] in _LEAVE_IT
        if not is_known and _returns_something(function):
            return str(getattr(function, "__name__", type(hook).__name__))
    return None


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
    for one in dis.get_instructions(code):
        is_return = one.opname in ("RETURN_VALUE", "RETURN_CONST")
        given = one if one.opname == "RETURN_CONST" else before
        if is_return and not (given is not None and given.opname.endswith("_CONST") and given.argval is None):
            return True
        before = one
    return False
