"""`Hook`: a hook on a module that neither keeps its owner alive nor hinders copying and saving of the model."""

from __future__ import annotations

import weakref
from typing import Any

import torch


class Hook:
    """Calls a method of its owner; a copy of it, or one without its owner, does nothing.

    Nor does it within compiled code and within transforms of `torch.func`, which would record what is computed.
    """

    def __init__(self, owner: Any = None, method: str = "") -> None:
        self._owner = None if owner is None else weakref.ref(owner)
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method."""
        if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
            return None
        owner = None if self._owner is None else self._owner()
        return None if owner is None else getattr(owner, self._method)(*args, **kwargs)

    def __reduce__(self) -> Any:
        return Hook, ()
