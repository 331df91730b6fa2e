"""`Hook`: a hook on a module that neither keeps its owner alive nor hinders copying and saving of the model."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils.hooks import RemovableHandle


class Hook:
    """Calls a method of its owner; without its owner it does nothing, and copies of the module have none.

    Nor does it within compiled code, transforms of `torch.func` and forward-mode differentiation, which would record
    what is computed, or compute otherwise.
    """

    def __init__(self, owner: Any, method: str) -> None:
        self._owner, self._method = weakref.ref(owner), method
        self._handles: list[RemovableHandle] = []

    def on(self, register: Callable[..., RemovableHandle], **options: Any) -> RemovableHandle:
        """Register it by a method of a module, and return what removes it."""
        self._handles.append(register(self, **options))
        return self._handles[-1]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method."""
        if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
            return None
        owner = self._owner() if forward_ad._current_level < 0 else None
        return None if owner is None else getattr(owner, self._method)(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Take the copy out of a module's copy as soon as all is copied, when Python drops its memo."""
        for handle in self._handles:
            if (hooks := memo.get(id(handle.hooks_dict_ref()))) is not None:
                leaving = _Leaving(hooks, extra_dict=[copy.deepcopy(each(), memo) for each in handle.extra_dict_ref])
                leaving.id, memo[id(leaving)] = handle.id, leaving
        return _NOTHING

    def __reduce__(self) -> Any:
        """Leave a function of Python's own in a file, which loads where we are not installed."""
        return _NOTHING.__reduce__()

    def __getattr__(self, name: str) -> Any:
        """Say what to do where torch scripts hooks as well."""
        raise AttributeError(f"a hook of hdi_callback has no `{name}`; script copy.deepcopy(model), which has no hooks")


class _Leaving(RemovableHandle):
    """Removes a hook from a copied module once nothing holds this any more."""

    __del__ = RemovableHandle.remove


_NOTHING = nullcontext().__exit__  # takes any arguments
