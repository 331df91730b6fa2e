"""What attention really received and gave, seen where it is computed and without any of the package's code.

Four places are watched: `scaled_dot_product_attention`; transformers' attention functions, eager ones included;
`multi_head_attention_forward`; and products of tensors around a softmax, as attention is written by hand.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


@dataclass
class Computation:
    """One computation of attention; all tensors ``(batch, heads, length, width)``.

    Keys and values have fewer heads than queries where they were seen before being repeated.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    place: str


@dataclass
class Witness:
    """The computations of a forward in their order, and the last input and output of every module."""

    computations: list[Computation] = field(default_factory=list)
    inputs: dict[nn.Module, Tensor] = field(default_factory=dict)
    outputs: dict[nn.Module, Tensor] = field(default_factory=dict)
    depth: int = 0

    def watch(self, function: Callable, place: str, record: Callable) -> Callable:
        """Wrap a function so that `record` sees its answer and arguments, unless a watched one called it."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            index = len(self.computations)
            self.depth += 1
            try:
                answer = function(*args, **kwargs)
            finally:
                self.depth -= 1
            if self.depth == 0 and len(self.computations) == index:
                four = record(answer, *args, **kwargs)
                self.computations.append(Computation(*(tensor.detach() for tensor in four), place))
            return answer

        return watched


def _of_torch(answer, query, key, value, *args, **kwargs):
    return query, key, value, answer


def _of_transformers(answer, module, query, key, value, *args, **kwargs):
    return query, key, value, answer[0].transpose(1, 2)


class _Products(TorchFunctionMode):
    """Attention by hand: a product of two tensors of four dimensions, a softmax, and a product with its answer."""

    def __init__(self, seen: Witness) -> None:
        super().__init__()
        self.seen = seen
        self.scores: tuple[Tensor, Tensor] | None = None
        self.weights: tuple[int, ...] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = func(*args, **(kwargs or {}))
        if self.seen.depth:
            return answer
        if func in (torch.matmul, Tensor.matmul, Tensor.__matmul__) and answer.dim() == 4:
            left, right = args
            if self.weights is not None and left.shape == self.weights:
                query, key = self.scores
                four = (query, key.mT, right, answer)
                self.seen.computations.append(Computation(*(tensor.detach() for tensor in four), "products"))
                self.scores = self.weights = None
            else:
                self.scores = (left, right)
        elif func in (F.softmax, torch.softmax, Tensor.softmax) and answer.dim() == 4 and self.scores is not None:
            self.weights = tuple(answer.shape)
        return answer


@contextmanager
def witness(model: nn.Module) -> Iterator[Witness]:
    """Watch every computation of attention, and what each module of the model is given and gives."""
    seen = Witness()

    def take_input(module, args):
        if args and isinstance(args[0], Tensor):
            seen.inputs[module] = args[0].detach()

    def take_output(module, args, output):
        if isinstance(output, Tensor):
            seen.outputs[module] = output.detach()

    original = F.multi_head_attention_forward
    sdpa = seen.watch(F.scaled_dot_product_attention, "scaled_dot_product_attention", _of_torch)

    def with_weights(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("need_weights", True):
            # Torch computes the weights by other means; the same call without them goes where it can be seen.
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                original(*args, **(kwargs | {"need_weights": False}))
            seen.depth += 1
            try:
                return original(*args, **kwargs)
            finally:
                seen.depth -= 1
        return original(*args, **kwargs)

    handles = [module.register_forward_pre_hook(take_input) for module in model.modules()]
    handles += [module.register_forward_hook(take_output) for module in model.modules()]
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(F, "multi_head_attention_forward", with_weights))
            stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", sdpa))
            for patch in _of_transformers_functions(seen):
                stack.enter_context(patch)
            stack.enter_context(_Products(seen))
            yield seen
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for handle in handles:
            handle.remove()


def _of_transformers_functions(seen: Witness) -> Iterator[Any]:
    if "transformers.modeling_utils" not in sys.modules:
        return
    functions = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS
    watched = {
        name: seen.watch(function, f"transformers {name}", _of_transformers) for name, function in functions.items()
    }
    yield mock.patch.dict(functions._local_mapping, watched)
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.models.") and "eager_attention_forward" in vars(module):
            eager = seen.watch(module.eager_attention_forward, "transformers eager", _of_transformers)
            yield mock.patch.object(module, "eager_attention_forward", eager)


def without_biases(model: nn.Module) -> nn.Module:
    """Set every bias to zero, so that a projection is its matrix and nothing else; and leave dropout out."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.rsplit(".", 1)[-1].endswith("bias"):
                parameter.zero_()
    return model.eval()
