"""A watch on the size of every tensor that an operation makes."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorSizes(TorchDispatchMode):
    """Keep the number of elements of the largest tensor that was made."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.largest = max(
            [self.largest, *(leaf.numel() for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor))]
        )
        return made
