"""What makes the host wait for the device is refused, and what goes from one device to another is counted."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_REFUSED = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "unique",
    "_unique",
    "equal",
    "is_nonzero",
    "_linalg_eigh",
    "_linalg_svd",
    "_linalg_check_errors",
    "linalg_qr",
    "linalg_lstsq",
    "repeat_interleave",
    "bincount",
)


class NoSync(TorchDispatchMode):
    """Raise on operations that read a tensor's value, or that CUDA runs with a host synchronisation.

    Shows without a GPU what `torch.cuda.set_sync_debug_mode("error")` shows with one.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if any(name.startswith(refused) for refused in _REFUSED):
            raise AssertionError(f"{func} makes the host wait for the device")
        # Writing one value through a mask is a masked fill, which does not wait.
        looks_up = name == "index" or (name in {"index_put", "index_put_"} and args[2].numel() > 1)
        if looks_up and any(
            isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8) for item in args[1]
        ):
            raise AssertionError("indexing with a mask makes the host wait for the device")
        return func(*args, **(kwargs or {}))


class Crossings(TorchDispatchMode):
    """List the operations that take more than one number from a device to another, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, torch.Tensor)]
        if len({tensor.device.type for tensor in tensors if tensor.numel() > 1}) > 1:
            self.names.append(func.overloadpacket.__name__)
        return out
