"""Lengths of sequences that a module may insist on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor, nn
from torch.nn.parameter import is_lazy


def kept_lengths(module: nn.Module, tables: Iterable[Tensor]) -> Iterator[int]:
    """Guess lengths that a module may insist on: the sizes of windows and images that it keeps.

    Args:
        module: the module, whose attributes are read.
        tables: its tensors that may be tables of pairs of positions.

    Yields:
        Numbers of tokens, from 3 to 256.
    """
    for name, value in vars(module).items():
        if isinstance(value, (tuple, list)) and len(value) == 2 and all(type(size) is int for size in value):
            area = value[0] * value[1]
        elif type(value) is int and "window" in name:
            area = value * value
        elif type(value) is int and "resolution" in name:
            area = value if "num" in name else value * value
        else:
            continue
        if 2 < area <= 256:
            yield area
    for table in tables:
        is_square = not is_lazy(table) and table.dim() >= 2 and table.shape[-1] == table.shape[-2]
        if is_square and 2 < table.shape[-1] <= 256:
            yield int(table.shape[-1])
