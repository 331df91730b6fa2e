"""What attention really received and gave, seen where it is computed and without any of the package's code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass
class Computation:
    """One call of scaled dot-product attention; all tensors ``(batch, heads, length, width)``."""

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor


@dataclass
class Witness:
    """The computations of a forward in their order, and the last input of every module."""

    computations: list[Computation] = field(default_factory=list)
    inputs: dict[nn.Module, Tensor] = field(default_factory=dict)


@contextmanager
def witness(model: nn.Module) -> Iterator[Witness]:
    """Watch `torch.nn.functional.scaled_dot_product_attention`, and what each linear map of the model is given."""
    seen = Witness()
    original = F.scaled_dot_product_attention

    def watched(query, key, value, *args, **kwargs):
        output = original(query, key, value, *args, **kwargs)
        seen.computations.append(Computation(*(tensor.detach() for tensor in (query, key, value, output))))
        return output

    def keep(module, args):
        if args and isinstance(args[0], Tensor):
            seen.inputs[module] = args[0].detach()

    handles = [module.register_forward_pre_hook(keep) for module in model.modules()]
    F.scaled_dot_product_attention = watched
    try:
        yield seen
    finally:
        F.scaled_dot_product_attention = original
        for handle in handles:
            handle.remove()


def without_biases(model: nn.Module) -> nn.Module:
    """Set every bias to zero, so that a projection is its matrix and nothing else; and leave dropout out."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.rsplit(".", 1)[-1].endswith("bias"):
                parameter.zero_()
    return model.eval()
