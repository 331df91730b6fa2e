"""Parameters that are spread over ranks, as FSDP2 and tensor parallelism do: both as DTensors.

Gathering is a collective call: every rank that holds a part gathers the same things in the same order. DTensors are
recognised by their attributes, so that nothing of `torch.distributed` is imported in vain.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hdi_callback.errors import UnsupportedAttentionError

IN_PIECES = "Its weights are kept in pieces by DeepSpeed's ZeRO-3 or the first FSDP: use `fully_shard` (FSDP2)."


def is_sharded(tensor: Any) -> bool:
    """Return whether a tensor, or a class of tensors, is a DTensor, of which other ranks may hold a part."""
    return hasattr(tensor, "full_tensor") and hasattr(tensor, "placements")


def is_in_first_fsdp(model: nn.Module) -> bool:
    """Return whether `FullyShardedDataParallel` holds weights, which come and go within each of its calls."""
    return any("_fsdp_wrapped_module" in module._modules for module in model.modules())


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor of which other ranks hold a part, else itself; collective, and differentiable."""
    if hasattr(tensor, "ds_id") or hasattr(tensor, "_is_flat_param"):
        raise UnsupportedAttentionError(IN_PIECES)
    if not is_sharded(tensor):
        return tensor
    parts: Any = tensor
    device = parts.device_mesh.device_type
    if parts.device.type != device:  # offloaded to the host, where the mesh cannot talk
        parts = parts.to(device)
    gathered: Tensor = parts.full_tensor()
    return gathered
