"""The running module, and the place of an attention within it."""

from __future__ import annotations

from typing import Any

from torch import nn


class ModuleStack:
    """The modules that run, outermost first, and how many attentions each has computed in this call of it.

    Attributes:
        modules: dotted path and module.
    """

    def __init__(self) -> None:
        self.modules: list[tuple[str, nn.Module]] = []
        self._runs: dict[str, int] = {}  # how often a module was entered
        self._places: dict[tuple[str, int], int] = {}

    def enter(self, name: str, module: nn.Module) -> None:
        """Note that a module begins.

        Args:
            name: its dotted path.
            module: the module.
        """
        self.modules.append((name, module))
        self._runs[name] = self._runs.get(name, 0) + 1
        self._places[name, self._runs[name]] = 0

    def leave(self, name: str) -> None:
        """Note that a module has ended, and those inside it that were left by an exception.

        Args:
            name: its dotted path.
        """
        names = [one for one, _ in self.modules]
        if name in names:
            del self.modules[len(names) - 1 - names[::-1].index(name) :]

    @property
    def innermost(self) -> nn.Module | None:
        """The innermost module that runs."""
        return self.modules[-1][1] if self.modules else None

    @property
    def owner(self) -> str:
        """Its path; empty outside all modules."""
        return self.modules[-1][0] if self.modules else ""

    @property
    def next_place(self) -> tuple[str, int]:
        """Path of the innermost module, and the number of its next attention: the same when the module runs again."""
        return self.owner, self._places.get((self.owner, self._runs.get(self.owner, 0)), 0)

    def take_place(self, via: str) -> tuple[Any, ...]:
        """Number an attention within its module.

        Args:
            via: what computes it.

        Returns:
            `next_place`; outside all modules the path and `via`.
        """
        name, number = self.next_place
        self._places[name, self._runs.get(name, 0)] = number + 1
        return name, number if self.modules else via
