"""Numbers that are the same whenever they are made."""

from __future__ import annotations

import torch
from torch import Tensor

LENGTH = 7


def noise(*shape: int) -> Tensor:
    """Draw from a normal distribution."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def integers(most: int, *shape: int) -> Tensor:
    """Draw from 1 to below `most`."""
    return torch.randint(1, most, shape, generator=torch.Generator().manual_seed(len(shape)))


def tokens(batch: int, vocabulary: int = 100, length: int = LENGTH) -> Tensor:
    """Draw tokens of a text, none of which is a special one of small vocabularies."""
    return 10 + integers(min(100, vocabulary) - 10, batch, length)


def grids(batch: int, side: int = 4) -> Tensor:
    """Give times, rows and columns of the patches of each picture."""
    return torch.tensor([[1, side, side]] * batch)
