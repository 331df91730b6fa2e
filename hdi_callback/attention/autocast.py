"""Computing beside the user's forward in the types of the arguments."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Compute in the types of the arguments, whatever the user's autocast says: a backward may run inside it.

    Args:
        device: where it is computed.

    Returns:
        A context manager; of a device that knows no autocast one that does nothing.
    """
    return torch.autocast(device.type, enabled=False) if torch.amp.is_autocast_available(device.type) else nullcontext()
