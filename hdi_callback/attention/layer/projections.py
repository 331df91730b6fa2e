"""Linear maps, and the matrix that they really multiply with.

A module that is called a linear map need not multiply with its parameter `weight`: adapters add to it, quantised
modules decode it first, and a subclass may do anything. Here the matrix is read as it is used, or the module is refused
by its name.

A convolution of kernel size one is a linear map of each position. It keeps the features in the dimension before those
of space, where a linear map has them last.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hdi_callback.attention.hooks import has_own_forward
from hdi_callback.attention.isolation import IsolationError
from hdi_callback.attention.layer import computed_maps
from hdi_callback.attention.layer.changing_hooks import changing_hook
from hdi_callback.attention.layer.weight_reading import read_tensor, shape_of
from hdi_callback.errors import UnsupportedAttentionError

_CONVOLUTIONS: tuple[type[nn.Conv1d | nn.Conv2d | nn.Conv3d], ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def is_map(module: Any) -> TypeGuard[nn.Module]:
    """Return whether a module is meant as a linear map of each token, by `is_linear` or `is_pointwise`.

    Args:
        module: anything.

    Returns:
        True if so; `objection` says whether its matrix can be read.
    """
    return is_linear(module) or is_pointwise(module)


def is_linear(module: Any) -> TypeGuard[nn.Module]:
    """Return whether a module is meant as a linear map: `nn.Linear`, GPT-2's ``Conv1D``, or an adapter around one.

    So is a module by hand that adds updates of low rank to what an `nn.Linear` in it gives, or scales its matrix.

    Args:
        module: anything.

    Returns:
        True if so; `objection` says whether its matrix can be read.
    """
    base = base_of(module)
    if isinstance(base, nn.Linear) or is_transposed(base):
        return True
    return computed_maps.is_sum_of_maps(base) or computed_maps.is_scaled(base)


def is_pointwise(module: Any) -> TypeGuard[nn.Module]:
    """Return whether a module is a convolution that maps each position by itself: kernel size one, and no padding.

    With a stride it leaves positions out, and maps each of the others by itself. It may have groups: then its matrix is
    zero outside the blocks on its diagonal.

    Args:
        module: anything.

    Returns:
        True for such an `nn.Conv1d`, `nn.Conv2d` or `nn.Conv3d`, and adapters around one.
    """
    base = base_of(module)
    if not isinstance(base, _CONVOLUTIONS) or any(size != 1 for size in base.kernel_size):
        return False
    # A kernel of size one needs no padding to be "same".
    return isinstance(base.padding, str) or not any(base.padding)


def feature_dim(module: nn.Module) -> int:
    """Return the dimension of the features in the input and output of a linear map.

    Args:
        module: a linear map in the sense of `is_map`.

    Returns:
        The dimension, counted from the last: -1 of linear maps, -3 of a convolution of images.

    Example:
        >>> feature_dim(nn.Linear(8, 8)), feature_dim(nn.Conv1d(8, 8, 1)), feature_dim(nn.Conv2d(8, 8, 1))
        (-1, -2, -3)
    """
    return -1 - len(base_of(module).kernel_size) if is_pointwise(module) else -1


def base_of(module: Any) -> Any:
    """Return the linear map that adapters wrap.

    Args:
        module: a linear map, or anything.

    Returns:
        The innermost module, whose parameters the adapters add to.
    """
    while _is_adapter(module):
        module = module.base_layer
    return module


def is_transposed(module: Any) -> bool:
    """Return whether a linear map keeps its matrix as ``(in_features, out_features)``.

    Args:
        module: a linear map, or anything.

    Returns:
        True for GPT-2's ``Conv1D`` and adapters around it.
    """
    base = base_of(module)
    # Known without importing transformers.
    if not isinstance(base, nn.Module) or type(base).__name__ != "Conv1D" or not hasattr(base, "nf"):
        return False
    shape = shape_of(base, "weight")
    return shape is not None and len(shape) == 2 and shape[1] == base.nf


def features(module: nn.Module) -> tuple[int, int]:
    """Count the input and output features of a linear map.

    Args:
        module: a linear map in the sense of `is_map` whose matrix can be read.

    Returns:
        Features that come in, and that go out.

    Raises:
        UnsupportedAttentionError: if it has no weight, or none before its first forward.
    """
    base = base_of(module)
    shape = stored_shape(base, "weight")
    if shape is None:
        raise UnsupportedAttentionError(f"A {type(base).__name__} has no weight, or none yet.")
    rows, columns, *_ = shape
    if is_pointwise(module):
        return int(columns) * base_of(module).groups, int(rows)
    return (int(rows), int(columns)) if is_transposed(module) else (int(columns), int(rows))


def stored_shape(module: nn.Module, name: str) -> torch.Size | None:
    """Return the shape of a parameter of a linear map, adapters taken off.

    Args:
        module: the module that holds it.
        name: of the parameter.

    Returns:
        Its shape, of a sum of maps that of their matrices; `None` if there is none, or it is not initialised yet.
    """
    base = base_of(module)
    if name == "weight" and computed_maps.base_of_sum(base) is not None:
        return torch.Size(computed_maps.sizes_of(base))
    return shape_of(base, name)


def objection(module: nn.Module) -> str | None:
    """Return why the matrix that a linear map multiplies with cannot be read.

    Args:
        module: a linear map in the sense of `is_map`.

    Returns:
        The reason, which begins with "a" and the name of the class; `None` if it can be read.
    """
    name = type(module).__name__
    if _is_adapter(module):
        return _objection_to_adapter(module)
    if computed_maps.is_sum_of_maps(module):
        return None
    if any(is_lazy(parameter) for parameter in module.parameters(recurse=False)):
        return f"a {name} whose parameters have no shape before the first forward"
    try:
        with torch.no_grad():
            weight = read_tensor(module, "weight")
    except IsolationError as error:
        return f"a {name} whose weight cannot be read: {error}"
    if weight is None or weight.dim() != 1 - feature_dim(module):
        return f"a {name} without a matrix `weight`"
    if weight.is_complex():
        return (
            f"a {name} with a complex weight ({str(weight.dtype).removeprefix('torch.')}), and only real ones are read"
        )
    if not weight.is_floating_point() or weight.dtype.itemsize < 2:
        return f"a {name} with a quantised weight ({str(weight.dtype).removeprefix('torch.')})"
    is_wrapped: bool = is_traceable_wrapper_subclass(weight)  # as torchao's; DTensors can be made whole
    if is_wrapped and not hasattr(weight, "full_tensor"):
        return f"a {name} with a quantised weight ({type(weight.data).__name__})"
    if has_own_forward(module) and not hasattr(module, "_hf_hook"):  # that of accelerate only moves tensors
        return f"a {name} whose forward was replaced"
    hook = changing_hook(module)
    if hook is not None:
        return f"a {name} {hook}"
    # Its weight is the one that is trained; a rounded copy of it is multiplied with.
    is_known = type(module).forward is nn.Linear.forward or name == "Float8Linear" or is_transposed(module)
    if is_known or _convolves(module):
        return None
    way = computed_maps.way_of(module)
    if way == "weight" or (way is not None and isinstance(module, nn.Linear)) or computed_maps.is_scaled(module):
        return None
    return f"a {name}, whose forward does more than multiply with its weight"


def effective_weight(module: nn.Module, name: str) -> Tensor:
    """Read the matrix that a module really multiplies with.

    Args:
        module: the module that holds the parameter.
        name: the name of the parameter.

    Returns:
        The matrix as it is stored, of adapters with their updates, of a convolution ``(out_features,
        in_features)``; a live view where it is a parameter, which it is not with LoRA, of a convolution with groups,
        and where the module's own forward computes it.

    Raises:
        UnsupportedAttentionError: if it cannot be read.
    """
    if name == "weight" and is_computed(module):
        matrix = computed_maps.computed_matrix(module)[0]
        return matrix.mT if is_transposed(module) else matrix
    if name != "weight" or not _is_adapter(module):
        weight = read_tensor(module, name)
        if weight is None:
            raise UnsupportedAttentionError(
                f"A {type(module).__name__} has no tensor `{name}`, or none before its first forward."
            )
        return _as_matrix(weight, module) if name == "weight" else weight
    reason = _objection_to_adapter(module)
    if reason is not None:
        raise UnsupportedAttentionError(f"The weight of a linear map cannot be read: it is {reason}.")
    weight = effective_weight(_child(module), name)
    for adapter in _active(module):
        update: Tensor = module.get_delta_weight(adapter)  # type: ignore[operator]
        weight = weight + _as_matrix(update, module).to(weight)
    return weight


def effective_bias(module: nn.Module, name: str) -> Tensor | None:
    """Read the bias that a linear map adds to its output.

    Args:
        module: the module that holds the parameter of its matrix.
        name: the name of that parameter.

    Returns:
        The bias, `None` if there is none; where the module's own forward computes its matrix, no live view.
    """
    if name == "weight" and is_computed(module):
        has_bias = any(own.rpartition(".")[2] == "bias" for own, _ in module.named_parameters())
        return computed_maps.computed_matrix(module)[1] if has_bias else None
    return read_tensor(base_of(module), name.removesuffix("weight") + "bias")


def is_computed(module: nn.Module) -> bool:
    """Return whether a linear map computes the matrix that it multiplies with in its own forward.

    Args:
        module: a linear map.

    Returns:
        False where it multiplies with its weight, a parametrized one included, and of adapters that add a matrix.
    """
    if _is_adapter(module):
        is_added = _more_than_added(module) is None or is_pointwise(module)
        return not is_added and objection(_child(module)) is None and computed_maps.computes_matrix(module)
    if not isinstance(module, nn.Linear):
        return computed_maps.is_sum_of_maps(module) or computed_maps.is_scaled(module)
    if type(module).forward is nn.Linear.forward or type(module).__name__ == "Float8Linear":
        return False
    return computed_maps.computes_matrix(module)


# --- convolutions


def _as_matrix(weight: Tensor, module: nn.Module) -> Tensor:
    """The matrix that each position is multiplied with, of a convolution; of other maps their weight."""
    return computed_maps.as_matrix(weight, base_of(module).groups) if is_pointwise(module) else weight


def _convolves(module: nn.Module) -> bool:
    """Return whether a convolution overrides nothing of the code that makes it one."""
    kind = type(module)
    return any(
        issubclass(kind, known) and kind.forward is known.forward and kind._conv_forward is known._conv_forward
        for known in _CONVOLUTIONS
    )


# --- adapters, as those of peft, known without importing it


def _is_adapter(module: Any) -> bool:
    return isinstance(getattr(module, "base_layer", None), nn.Module) and hasattr(module, "active_adapters")


def _child(module: Any) -> nn.Module:
    child: nn.Module = module.base_layer
    return child


def _active(module: Any) -> list[str]:
    """The adapters whose updates are added in a forward."""
    if module.disable_adapters or module.merged:
        return []
    return [name for name in module.active_adapters if name in module.lora_A]


def _objection_to_adapter(module: Any) -> str | None:
    where = f"a {type(module).__name__} of {type(module).__module__.partition('.')[0]}"
    below = objection(_child(module))
    if below is not None:
        return f"{where} around {below}"
    more = _more_than_added(module)
    return None if more is None or is_computed(module) else f"{where}{more}, and which is not a linear map of a token"


def _more_than_added(module: Any) -> str | None:
    """Return why an adapter is not known to add matrices to that of its base."""
    kinds = {kind.__name__ for kind in type(module).__mro__}
    known = ("Conv1d", "Conv2d") if is_pointwise(module) else ("Linear", "SVDLinear")
    if "LoraLayer" not in kinds or type(module).__name__ not in known or getattr(base_of(module), "groups", 1) > 1:
        return ", whose update is not known to be an added matrix"
    odd = [name for name in _active(module) if name in getattr(module, "lora_variant", {})]
    if odd or any(getattr(module, "use_dora", {}).get(name) for name in _active(module)):
        kind = type(module.lora_variant[odd[0]]).__name__ if odd else "DoRA"
        return f" with the variant {kind}, which does more than add a matrix"
    return None
