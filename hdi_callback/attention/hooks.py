"""Hooks that can be taken off and put back."""

from __future__ import annotations

from collections.abc import Iterable

from torch.utils.hooks import RemovableHandle


class Hooks:
    """Hooks on some modules; what they are says `_install`."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []

    def suspend(self) -> None:
        """Take the hooks off, as their mere presence switches off torch's fast path in an evaluation."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def resume(self) -> None:
        """Put the hooks back after `suspend`; calling it again does nothing."""
        if not self._handles:
            self._handles.extend(self._install())

    def _install(self) -> Iterable[RemovableHandle]:
        raise NotImplementedError
