"""`Hook`: a hook on a module that neither keeps its owner alive nor hinders copying and saving of the model.

And what a hook does about transforms of `torch.func` around the call: it looks within, and computes outside of them.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack


class Hook:
    """Calls a method of its owner outside of compiled code; a copy of it, or one without its owner, does nothing.

    Args:
        owner: the object.
        method: name of its method.
    """

    def __init__(self, owner: Any = None, method: str = "") -> None:
        self._owner = None if owner is None else weakref.ref(owner)
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method."""
        if torch.compiler.is_compiling():
            return None
        owner = None if self._owner is None else self._owner()
        return None if owner is None else getattr(owner, self._method)(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Hook:
        return Hook()

    def __reduce__(self) -> Any:
        return Hook, ()


def outside_transforms() -> AbstractContextManager[Any]:
    """Compute outside of the transforms of `torch.func` that run, which would wrap and record what is computed."""
    is_within = torch._C._functorch.peek_interpreter_stack() is not None
    return temporarily_clear_interpreter_stack() if is_within else nullcontext()


def within_transforms(tensor: Tensor) -> Tensor:
    """Return the tensor that `torch.func.grad` has wrapped; what `vmap` has wrapped stays, as its batch is hidden."""
    while torch._C._functorch.is_gradtrackingtensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor
