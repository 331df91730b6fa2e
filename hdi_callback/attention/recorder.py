"""Keep something of the next forward of some modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from hdi_callback.attention.calls import is_inferring_shapes
from hdi_callback.attention.hooks import Handle, Hooks, observe_calls

Kept = TypeVar("Kept")


class Recorder(Hooks, Generic[Kept]):
    """Keeps what `_keep` makes of the arguments of the next forward of each module.

    Args:
        modules: the modules, by their names.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._recorded: dict[str, list[Kept]] = {}
        self.is_armed = self._is_done = False
        self.ran: frozenset[str] = frozenset()  # modules that were called in the last forward that was recorded
        super().__init__()
        self.resume()

    def arm(self) -> None:
        """Keep the arguments of the next forward."""
        self.is_armed = True

    def take(self) -> dict[str, list[Kept]]:
        """Stop recording, and hand over what was kept.

        The hooks leave if anything was, and else stay and do nothing more: a compiled model would be compiled anew
        without them.

        Returns:
            For each module that ran what was kept; an empty list if nothing could be.
        """
        self.is_armed = False
        if self._recorded:
            self._is_done = True
            self.suspend()
        recorded, self._recorded = self._recorded, {}
        self.ran = frozenset(recorded)
        return recorded

    def resume(self) -> None:
        """Put the hooks back after `suspend`, unless everything was recorded."""
        if not self._is_done:
            super().resume()

    def _keep(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Kept]:
        raise NotImplementedError

    def _install(self) -> Iterator[Handle]:
        for name, module in self._modules.items():
            if isinstance(module, torch.jit.ScriptModule):  # which takes no hooks
                continue
            yield from observe_calls(module, self._hook(name), eager_only=True)

    def _hook(self, name: str) -> Any:
        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if torch.compiler.is_compiling() or not self.is_armed or name in self._recorded or is_inferring_shapes():
                return
            try:
                self._recorded[name] = self._keep(module, args, kwargs)
            except Exception:  # what cannot be copied or cut is not tried
                self._recorded[name] = []

        return record
