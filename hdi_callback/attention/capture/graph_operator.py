"""The operator by which a compiled graph passes a tensor to a tap, and continues unchanged."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

_numbers = itertools.count()
_by_number: weakref.WeakValueDictionary[int, Entry] = weakref.WeakValueDictionary()


class Entry:
    """Receiver of the tensors of a compiled graph.

    Args:
        take: takes the tensor.
    """

    def __init__(self, take: Callable[[Tensor], None]) -> None:
        self.take = take
        # A tensor, as a graph that is shared by the layers of a model would have to be recompiled for each number.
        self.number = torch.tensor(next(_numbers), device="cpu")
        _by_number[int(self.number)] = self


# An operator without a result would do, were it not for the compilers of torch before 2.13, which leave it out as dead
# code; so the projection works on the result of this one.
@torch.library.custom_op("hdi_callback::take", mutates_args=())
def _take(passed: Tensor, outputs: Tensor, number: Tensor) -> Tensor:
    entry = _by_number.get(int(number))
    if entry is not None:
        entry.take(outputs)
    return passed.clone()


@_take.register_fake
def _(passed: Tensor, outputs: Tensor, number: Tensor) -> Tensor:
    return torch.empty_like(passed)


_take.register_autograd(lambda _, gradient: (gradient, None, None))


def take_in_graph(passed: Tensor, outputs: Tensor, entry: Entry) -> Tensor:
    """Pass a tensor out of a compiled graph, whenever it runs.

    Args:
        passed: the tensor that the graph continues with.
        outputs: the tensor that is passed out.
        entry: to whom.

    Returns:
        `passed`, for the graph to go on with.
    """
    passed_on: Tensor = torch.ops.hdi_callback.take(passed, outputs.detach(), entry.number)
    return passed_on
