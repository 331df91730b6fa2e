"""The arguments of modules in a real forward, with which copies of them can be run."""

from __future__ import annotations

from typing import Any

from torch import nn

from hdi_callback.attention.isolation import isolated
from hdi_callback.attention.recorder import Recorder
from hdi_callback.attention.trace.inputs import Inputs, recorded_inputs


class ArgumentRecorder(Recorder[Inputs]):
    """Keeps the arguments of the next forward of some modules, for a traced run."""

    def _keep(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Inputs]:
        with isolated(module):
            return list(recorded_inputs(args, kwargs))
