"""The arguments of modules in a real forward, with which copies of them can be run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from hdi_callback.attention.calls import is_inferring_shapes
from hdi_callback.attention.hooks import Handle, Hooks, observe_calls
from hdi_callback.attention.isolation import isolated
from hdi_callback.attention.trace.inputs import Inputs, recorded_inputs
from hdi_callback.guard import guarded


class ArgumentRecorder(Hooks):
    """Keeps the arguments of the next forward of some modules, for a traced run.

    Args:
        modules: the modules, by their names.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._recorded: dict[str, list[Inputs]] = {}
        self.is_armed = self._is_done = False
        self.ran: frozenset[str] = frozenset()  # modules that were called in the last forward that was recorded
        super().__init__()
        self.resume()

    def arm(self) -> None:
        """Keep the arguments of the next forward."""
        self.is_armed = True

    def take(self) -> dict[str, list[Inputs]]:
        """Stop recording, and return the recorded arguments.

        The hooks are removed if anything was recorded; else they stay and do nothing: without them a compiled model
        would be recompiled.

        Returns:
            For each module that ran its arguments, cut in several ways; an empty list if they could not be copied.
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

    def _install(self) -> Iterator[Handle]:
        for name, module in self._modules.items():
            if isinstance(module, torch.jit.ScriptModule):  # which takes no hooks
                continue
            yield from observe_calls(module, _Record(self, name), eager_only=True)

    def keep(self, name: str, ways: list[Inputs]) -> None:
        """Keep the arguments of a module.

        Args:
            name: of the module.
            ways: its arguments, cut in several ways.
        """
        self._recorded[name] = ways

    def awaits(self, name: str) -> bool:
        """Return whether the arguments of a module are to be recorded.

        Args:
            name: of the module.

        Returns:
            False once they were.
        """
        return self.is_armed and name not in self._recorded


class _Record:
    """The hook of one module."""

    def __init__(self, recorder: ArgumentRecorder, name: str) -> None:
        self._recorder, self._name = recorder, name

    @guarded("recording arguments")
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or not self._recorder.awaits(self._name) or is_inferring_shapes():
            return
        with isolated(module):
            self._recorder.keep(self._name, list(recorded_inputs(args, kwargs)))

    def _failed(self, work: str, error: Exception) -> None:
        self._recorder.keep(self._name, [])  # what cannot be copied or cut is not tried
