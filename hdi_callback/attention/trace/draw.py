"""`Draw`: random features in place of the outputs of linear maps, and numbers in place of parameters."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

MOST_ELEMENTS = 2**26  # of one tensor in a traced run


@dataclass(frozen=True)
class Draw:
    """Outputs drawn for linear maps: random features, the same for the same map, call and shape.

    Attributes:
        shares: the output is this much of one draw and this much of another.
        seed: of all draws, and of the parameters that are left.
        known: outputs in a run with the same draw, which are repeated in place of drawing them.
        keeps_means: what norms subtract is no constant: features depend on those that it is the mean of.
    """

    shares: tuple[float, float] = (1.0, 0.0)
    seed: int = 0
    known: Mapping[tuple[str, int], Tensor] = field(default_factory=dict, compare=False)
    keeps_means: bool = False

    def __call__(self, parameter: str, call: int, shape: tuple[int, ...]) -> Tensor:
        """Draw away from zero, and of a size that leaves products of order one both with and without a scale.

        Args:
            parameter: of the map.
            call: which of its calls.
            shape: ``(..., features)``.

        Returns:
            The output.
        """
        known = self.known.get((parameter, call))
        if known is not None and known.shape == shape:
            return known.clone()
        drawn: Tensor = torch.zeros(shape)
        for share, number in zip(self.shares, (call, call + 999)):
            if share:
                generator = torch.Generator().manual_seed(zlib.crc32(f"{parameter} {number} {self.seed}".encode()))
                size = torch.empty(shape).uniform_(0.5, 1.5, generator=generator)
                sign = torch.randint(2, shape, generator=generator) * 2 - 1
                drawn += share * size * sign
        scaled: Tensor = drawn * float(shape[-1]) ** -0.125
        return scaled


def drawn_parameter(name: str, like: Tensor) -> Tensor:
    """Draw values for a parameter, also for one that is the identity or zero at first."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    shape = tuple(like.shape)
    if not like.is_floating_point():
        return nn.Parameter(torch.zeros(shape, dtype=like.dtype), requires_grad=False)
    if math.prod(shape) > MOST_ELEMENTS:
        drawn = torch.randn(shape[-1:], generator=generator).mul_(shape[-1] ** -0.5).expand(shape)
    elif len(shape) < 2:
        drawn = torch.empty(shape).uniform_(0.5, 1.5, generator=generator)
    else:
        drawn = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
    return nn.Parameter(drawn)
