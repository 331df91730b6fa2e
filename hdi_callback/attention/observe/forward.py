"""`ObservedForward`: the record of one armed forward, module by module and function by function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hdi_callback.attention.layer.changing_hooks import has_hooks
from hdi_callback.attention.layer.projections import feature_dim, is_map
from hdi_callback.attention.observe.mode import ObservingMode
from hdi_callback.attention.observe.quiet import unnoticed
from hdi_callback.attention.observe.recorder import Recorder
from hdi_callback.attention.observe.row_reader import Request

_CALLED_BY_FUNCTION = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class ObservedForward:
    """Pass on to a recorder which modules and functions run.

    Args:
        request: what is to be read.
        names: id of a module or parameter -> its dotted path.

    Attributes:
        recorder: what ran.
        mode: the mode that is on while it runs.
        failures: what went wrong while observing.
    """

    def __init__(self, request: Request, names: Mapping[int, str]) -> None:
        self.failures: list[str] = []
        self.recorder = Recorder(request, names)
        self.mode = ObservingMode(self.recorder, self.failures)

    def module_begins(self, name: str, module: nn.Module) -> None:
        """Note that a module begins.

        Args:
            name: its dotted path.
            module: the module.
        """
        self.recorder.stack.enter(name, module)

    def module_ends(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Record that a module ends, and its input and output if it is a map or a norm.

        Args:
            name: its dotted path.
            module: the module.
            args: of its forward, by position.
            kwargs: by name.
            result: its output behind its hooks; None if it raised.
        """
        maps = self.recorder.maps
        self.recorder.stack.leave(name)
        if not maps.keeps_samples:
            return
        if has_hooks(module) and is_map(module):
            device = result.device if isinstance(result, Tensor) else torch.device("cpu")
            with unnoticed(name, device, self.failures):
                maps.hooks_ran(module, result)
        inputs = args[0] if args else next(iter(kwargs.values()), None)
        if isinstance(inputs, Tensor):
            with unnoticed(name, inputs.device, self.failures):
                if is_map(module) and type(module) not in _CALLED_BY_FUNCTION:
                    maps.module_ran(module, "linear", inputs, result, feature_dim(module))
                elif "norm" in type(module).__name__.lower() and not any(True for _ in module.children()):
                    maps.module_ran(module, "norm", inputs, result, -1)

    def ends(self) -> None:
        """Discard the state of this forward."""
        self.recorder.forget()
        self.mode.forget()
