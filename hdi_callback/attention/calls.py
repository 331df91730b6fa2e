"""The calls that are going on around attention, and the operator by which compiled graphs hand over what they have."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable
from types import FrameType

import torch
from torch import Tensor, nn

from hdi_callback.attention.padding import Frame, frame

_numbers = itertools.count()
_by_number: weakref.WeakValueDictionary[int, Entry] = weakref.WeakValueDictionary()


class Entry:
    """Where a compiled graph hands over what it has.

    Args:
        take: takes the tensor.
    """

    def __init__(self, take: Callable[[Tensor], None]) -> None:
        self.take = take
        # A tensor, as a graph that is shared by the layers of a model would have to be compiled anew for each number.
        self.number = torch.tensor(next(_numbers), device="cpu")
        _by_number[int(self.number)] = self


# An operator without a result would do, were it not for the compilers of torch before 2.13, which leave it out as dead
# code; so the projection works on what this one hands on.
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
    """Hand a tensor over from a compiled graph, whenever it runs.

    Args:
        passed: what the graph goes on with.
        outputs: what is handed over.
        entry: to whom.

    Returns:
        `passed`, for the graph to go on with.
    """
    handed_on: Tensor = torch.ops.hdi_callback.take(passed, outputs.detach(), entry.number)
    return handed_on


def is_recomputing() -> bool:
    """Return whether activation checkpointing repeats a forward that autograd has recorded.

    Returns:
        False also where the first time was without autograd, as with ``use_reentrant=True``.
    """
    code: FrameType | None = sys._getframe(1)
    while code is not None:
        if code.f_code.co_name == "unpack_hook" and "checkpoint" in code.f_code.co_filename:
            return True
        code = code.f_back
    return False


def is_inferring_shapes() -> bool:
    """Return whether a stage of a pipeline tries its module on made-up numbers, to learn the shapes that it gives.

    Returns:
        True within the first step of a `torch.distributed.pipelining.PipelineStage`, before its first real forward.
    """
    if "torch.distributed.pipelining.stage" not in sys.modules:
        return False
    code: FrameType | None = sys._getframe(1)
    while code is not None:
        if code.f_code.co_name in _INFERENCES and "pipelining" in code.f_code.co_filename:
            return True
        code = code.f_back
    return False


def calls_going_on() -> list[Frame]:
    """Give the calls of modules that are going on, from the innermost outwards.

    They are found on Python's stack, where torch keeps the arguments of each module: so nothing has to be put on the
    modules around attention.

    Returns:
        The calls; of a module that was compiled as a whole that of the whole.
    """
    found: list[Frame] = []
    code: FrameType | None = sys._getframe(1)
    while code is not None:
        if code.f_code in _CALLS:
            variables = code.f_locals
            module = variables["self"]
            module = getattr(module, "_orig_mod", module)
            if not found or found[-1].module is not module:
                found.append(frame(module, variables["args"], variables["kwargs"]))
        code = code.f_back
    return found


_INFERENCES = {"_forward_metadata_inference", "_shape_inference"}  # from torch 2.13 on, and before
_CALLS = {nn.Module._call_impl.__code__, nn.Module._wrapped_call_impl.__code__}
