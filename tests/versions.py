"""What older releases of torch cannot do: tests that need it are skipped there, each with its reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch

TELLS_OF_SAVING_HOOKS = hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks")
needs_saved_tensors = pytest.mark.skipif(
    not TELLS_OF_SAVING_HOOKS,
    reason=f"torch {torch.__version__} does not tell whether hooks save tensors: rows are read by the mode",
)

needs_dropout_of_tables = pytest.mark.skipif(
    not TELLS_OF_SAVING_HOOKS,
    reason=f"dropout of torch {torch.__version__} draws other numbers than that with which the tables were made",
)

HAS_FSDP2_ON_CPU = hasattr(torch.cpu.Stream, "record_event")


class Outcomes(dict[str, Any]):
    """What ranks found by the name of a case; a test that asks for one that this torch cannot train is skipped."""

    def __missing__(self, name: str) -> Any:
        if HAS_FSDP2_ON_CPU:
            raise KeyError(name)
        pytest.skip(f"torch {torch.__version__} does not run FSDP2 on a CPU: {name}")
