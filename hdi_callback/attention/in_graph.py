"""Compiled graphs: the operator by which one passes a tensor out and goes on, and the limits of recompiling."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from hdi_callback.attention.compiled_calls import is_within_compiled_call

_numbers = itertools.count()
_receivers: weakref.WeakValueDictionary[int, Receiver] = weakref.WeakValueDictionary()


class Receiver:
    """Takes the tensors that a compiled graph passes out.

    Args:
        take: called with each, detached.
    """

    def __init__(self, take: Callable[[Tensor], None]) -> None:
        self.take = take
        # A tensor, as a graph that layers share would be compiled anew for each number.
        self.number = torch.tensor(next(_numbers), device="cpu")
        _receivers[int(self.number)] = self


# An operator without a result would be left out as dead code by the compilers of torch before 2.13.
@torch.library.custom_op("hdi_callback::take", mutates_args=())
def _take(passed: Tensor, taken: Tensor, number: Tensor) -> Tensor:
    receiver = _receivers.get(int(number))
    if receiver is not None:
        receiver.take(taken)
    return passed.clone()


@_take.register_fake
def _(passed: Tensor, taken: Tensor, number: Tensor) -> Tensor:
    return torch.empty_like(passed)


_take.register_autograd(lambda _, gradient: (gradient, None, None))


def take_in_graph(passed: Tensor, taken: Tensor, receiver: Receiver) -> Tensor:
    """Pass a tensor out of a compiled graph whenever it runs: no graph break, and nothing but a flag is guarded.

    Args:
        passed: the tensor that the graph goes on with.
        taken: the tensor that is passed out.
        receiver: who takes it.

    Returns:
        A copy of `passed`, for the graph to go on with.
    """
    passed_on: Tensor = torch.ops.hdi_callback.take(passed, taken.detach(), receiver.number)
    return passed_on


def may_recompile(model: nn.Module, *, has_both: bool) -> bool:
    """Return whether the graphs of a model may be compiled once more.

    They may not under `torch.compiler.set_stance("fail_on_recompile")` and its like, and not where that could reach the
    limit of recompilations, at which a model runs uncompiled, or training ends under ``fullgraph=True``.

    Args:
        model: the model.
        has_both: there are graphs with and without the operator already.

    Returns:
        False if a setting forbids it.
    """
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    if frames is None:
        return True
    config: Any = sys.modules["torch._dynamo.config"]
    stance = frames._stance.stance
    if stance not in ("default", "eager_then_compile", "aot_eager_then_compile") or config.error_on_recompile:
        return False
    kinds = {type(module).forward for module in model.modules()}
    files = {code.co_filename for kind in kinds if isinstance(code := getattr(kind, "__code__", None), CodeType)}
    counts = _graphs()
    of_model = [count for code, count in counts.items() if code.co_filename in files]
    graphs = max(of_model or counts.values(), default=0)
    return graphs + (1 if has_both else graphs) <= int(config.recompile_limit)


def is_anything_compiled() -> bool:
    """Return whether this process has graphs of anything but optimizers, or is about to have some."""
    codes = (code for code in _graphs() if "/torch/optim/" not in code.co_filename.replace("\\", "/"))
    return is_within_compiled_call() or next(codes, None) is not None


def is_compiled(module: nn.Module) -> bool:
    """Return whether calls of a module run as compiled graphs, as far as the module shows it."""
    is_wrapper = isinstance(getattr(module, "_orig_mod", None), nn.Module)
    forward = vars(module).get("forward", type(module).forward)
    return is_wrapper or module._compiled_call_impl is not None or hasattr(forward, "_torchdynamo_orig_callable")


def _graphs() -> dict[CodeType, int]:
    """How many graphs there are of each code that torch has compiled."""
    convert: Any = sys.modules.get("torch._dynamo.convert_frame")
    if convert is None:
        return {}
    entries: Any = sys.modules["torch._dynamo.eval_frame"]
    seen = ((one() if callable(one) else one) for one in list(convert.input_codes.seen))
    counts = {code: len(entries._debug_get_cache_entry_list(code)) for code in seen if code is not None}
    return {code: count for code, count in counts.items() if count}
