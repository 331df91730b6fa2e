"""Linear maps of a module, and the stubs that replace them in a copy that is traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hdi_callback.attention.layer import projections


def linear_maps(module: nn.Module) -> dict[str, nn.Module]:
    """Return the linear maps within a module, adapters in place of the maps that they wrap.

    Args:
        module: the module.

    Returns:
        Path within the module -> linear map, in the module's order.
    """
    found: dict[str, nn.Module] = {}
    for path, part in module.named_modules():
        if path and not any(path.startswith(f"{other}.") for other in found) and is_like_a_map(part):
            found[path] = part
    return found


def is_like_a_map(module: nn.Module) -> bool:
    """Return whether a module is a linear map or names itself one, as quantised ones do that hold no matrix.

    Args:
        module: any module.

    Returns:
        True if so; `projections.objection` says whether its matrix can be read.
    """
    if projections.is_map(module):
        return True
    if _holds_matrix(module):  # its own code multiplies with that, and is followed
        return False
    if _whole_numbers(module) is not None:
        return True
    counts = (getattr(module, "in_features", None), getattr(module, "out_features", None))
    is_counted = all(type(count) is int for count in counts)
    return is_counted and "linear" in type(module).__name__.lower() and not isinstance(module, nn.Bilinear)


def _holds_matrix(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() == 2 and weight.is_floating_point()


def _whole_numbers(module: nn.Module) -> Tensor | None:
    """Return the integer matrix, ``(out_features, in_features)``, of a quantised map written by hand."""
    weight = module._parameters.get("weight", module._buffers.get("weight"))
    is_whole = weight is not None and weight.dim() == 2 and weight.dtype in (torch.int8, torch.uint8)
    return weight if is_whole and not any(True for _ in module.children()) else None


def objection_to(module: nn.Module) -> str | None:
    """Return the reason why the matrix of a map cannot be read.

    Args:
        module: a module that `is_like_a_map`.

    Returns:
        The reason, which begins with "a" and the name of the class; `None` if it can be read.
    """
    if not projections.is_map(module):
        return f"a {type(module).__name__} of {type(module).__module__.partition('.')[0]} without a matrix that is read"
    return projections.objection(module)


class MapStub(nn.Module):
    """Takes the place of a linear map: its size can be read, and its weight identifies the map.

    Attributes:
        draw_output: draws the outputs of all maps during a traced run, set by `GraphCut`.
        path: dotted path of the map.
        original: the map.
        has_parameter: its weight is a parameter of its own, and is not made of others.
        holds_numbers: numbers were drawn for its weight, as code reads it.
    """

    draw_output: Callable[..., Tensor] | None = None

    def __init__(self, linear: nn.Module, path: str) -> None:
        super().__init__()
        self.path, self.original = path, [linear]  # in a list, so that it is no part
        self.dim = projections.feature_dim(linear) if projections.is_map(linear) else -1
        try:
            taken, made = projections.features(linear)
        except Exception:
            whole = _whole_numbers(linear)
            made, taken = (linear.out_features, linear.in_features) if whole is None else whole.shape  # type: ignore[assignment]
        self.in_features, self.out_features = int(taken), int(made)
        self.in_channels, self.out_channels, self.nf = self.in_features, self.out_features, self.out_features
        self.kernel_size = getattr(linear, "kernel_size", ())
        self.strides: tuple[int, ...] = tuple(getattr(linear, "stride", ())) if self.dim < -1 else ()
        shape = getattr(linear, "weight", None)
        sizes = tuple(shape.shape) if isinstance(shape, Tensor) else (self.out_features, self.in_features)
        self.weight = torch.empty(sizes)  # written only where code reads it, so that it takes no memory
        self.has_parameter = isinstance(linear._parameters.get("weight"), nn.Parameter)
        self.holds_numbers = False
        self.bias = torch.zeros(self.out_features) if isinstance(getattr(linear, "bias", None), Tensor) else None
        self.is_transposed = projections.is_transposed(linear)

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        """Return the drawn output, ``(..., out_features)`` or with the features where the map has them."""
        draw_output = MapStub.draw_output
        assert draw_output is not None
        x = x.movedim(self.dim, -1)
        for dim, stride in enumerate(self.strides):
            x = x[(slice(None),) * (dim + x.dim() - 1 - len(self.strides)) + (slice(None, None, stride),)]
        made = draw_output(f"{self.path}.weight", x, self.out_features, module=self)
        return made if self.dim == -1 else made.movedim(-1, self.dim).contiguous()  # as a convolution has it
