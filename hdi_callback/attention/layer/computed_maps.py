"""The matrix of a linear map with a forward of its own: its weight, or a matrix that it computes.

Examples: LoRA by hand, rounded or normed weights, DoRA. A copy that shares the parameters is run on the
unit vectors and on zero. If it multiplies once, the second factor is the matrix, whatever is done to the input before
(BitNet rounds it); else it must be linear as a whole, and its output for the unit vectors is the matrix. A trial with
other numbers in the parameters shows which of the two it is, and whether the matrix is the weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from hdi_callback.attention.hooks import has_own_forward
from hdi_callback.attention.isolation import ATOMS, isolated, isolated_copy, without_other_ranks
from hdi_callback.errors import UnsupportedAttentionError

Way = Literal["weight", "factor", "whole"]
_WAYS: dict[Any, Way | None] = {}
_MOST_PARAMETERS = 64  # of one map
_ALIKE = 0.9  # cosine of a token and what is multiplied, which may be rounded and normed


def is_sum_of_maps(module: Any) -> bool:
    """Return whether a module is a linear map with an update of low rank beside it, as LoRA by hand is.

    Args:
        module: anything.

    Returns:
        True if a trial shows that the whole is one linear map of each token.
    """
    return base_of_sum(module) is not None and way_of(module) is not None


def is_scaled(module: Any) -> bool:
    """Return whether a module of a class of its own holds a matrix and multiplies with another that it makes of it.

    Such as StyleGAN's maps, which scale their weights when they use them.

    Args:
        module: anything.

    Returns:
        True if a trial shows that it is a linear map of each token; False of what multiplies with the matrix as it is.
    """
    if not isinstance(module, nn.Module) or isinstance(module, (nn.Linear, nn.Embedding)):
        return False
    if hasattr(module, "base_layer") or type(module).__module__.startswith("torch."):  # of torch.jit as well
        return False
    weight = module._parameters.get("weight")
    if weight is None or is_lazy(weight) or weight.dim() != 2 or not weight.is_floating_point():
        return False
    return all(parameter.dim() < 2 for parameter in module.parameters() if parameter is not weight) and computes_matrix(
        module
    )


def base_of_sum(module: Any) -> nn.Linear | None:
    """Find the map beside which all other matrices of a module are the factors of updates of low rank.

    Args:
        module: anything.

    Returns:
        The map, a child of the module; `None` if there is none such.
    """
    is_plain = not isinstance(module, nn.Module) or isinstance(module, (nn.Linear, nn.Sequential, nn.ModuleList))
    if is_plain or hasattr(module, "active_adapters"):
        return None
    for base in module.children():
        if isinstance(base, nn.Linear) and type(base).forward is nn.Linear.forward and _has_factors(module, base):
            return base
    return None


def computes_matrix(module: nn.Module) -> bool:
    """Return whether a module multiplies with a matrix that it computes.

    Args:
        module: see `way_of`.

    Returns:
        False if it multiplies with its weight, or is no linear map.
    """
    return way_of(module) in ("factor", "whole")


def way_of(module: nn.Module) -> Way | None:
    """Determine by trial which matrix a module multiplies with.

    Args:
        module: a map with a forward of its own, a convolution of kernel size one included, or a sum of maps.

    Returns:
        ``"weight"``: with its parameter `weight`, as it lies or turned, as some do that only cast their input;
        ``"factor"``: with the second factor of its one product; ``"whole"``: the module is linear as a whole; `None` if
        it is neither.
    """
    if has_own_forward(module) and not hasattr(module, "_hf_hook"):  # that of accelerate only moves tensors
        return None
    kind = _kind_of(module)
    if kind not in _WAYS:
        try:
            with isolated(module, seed=0), without_other_ranks(), torch.no_grad():
                _WAYS[kind] = _verified_way(module)
        except Exception:
            _WAYS[kind] = None
    return _WAYS[kind]


def computed_matrix(module: nn.Module) -> tuple[Tensor, Tensor]:
    """Compute W and b of a module that computes W x + b.

    Args:
        module: one for which `way_of` knows a way.

    Returns:
        ``(out_features, in_features)`` and ``(out_features,)``, with a gradient by the parameters if gradients are on.

    Raises:
        UnsupportedAttentionError: if the module does not run that way any more.
    """
    way = way_of(module) if computes_matrix(module) else None
    with isolated(module, keeps_defaults=True), without_other_ranks():
        trial = isolated_copy(module, shares_parameters=True)
        found = None if way is None else _read(trial, way, sizes_of(module))
    if found is None:
        raise UnsupportedAttentionError(f"A {type(module).__name__} does not multiply with one matrix any more.")
    return found


def sizes_of(module: nn.Module) -> tuple[int, int]:
    """Count the input and output features of such a map.

    Args:
        module: a map with a forward of its own, or a sum of maps.

    Returns:
        Both, as a matrix has them.
    """
    base: Any = base_of_sum(module) or module
    while isinstance(getattr(base, "base_layer", None), nn.Module):  # of adapters
        base = base.base_layer
    rows, columns, *_ = map(int, base.get_parameter("weight").shape)
    return (columns, rows) if hasattr(base, "nf") else (rows, columns * getattr(base, "groups", 1))  # GPT-2's `Conv1D`


def as_matrix(weight: Tensor, groups: int) -> Tensor:
    """Write down the matrix with which a convolution of kernel size one multiplies each position.

    Args:
        weight: ``(out_features, in_features / groups, 1, ...)``.
        groups: of the convolution.

    Returns:
        ``(out_features, in_features)``, with zeros beside the blocks of groups.
    """
    matrix = weight.flatten(1)
    if groups == 1:
        return matrix
    blocks: Tensor = torch.block_diag(*matrix.chunk(groups))  # type: ignore[no-untyped-call]
    return blocks


# --- what a module is made of


def _has_factors(module: nn.Module, base: nn.Linear) -> bool:
    """Return whether all matrices beside a map are narrow, some on the input side and some on the output side.

    Its output may have several parts side by side, each with an update of its own, as of queries and values.
    """
    weight = base._parameters.get("weight")  # where it is computed, asking for it would run the user's code
    if weight is None or is_lazy(weight) or weight.dim() != 2:
        return False
    own = {id(one) for one in base.parameters()}
    rows, columns = weight.shape
    takes = gives = matrices = count = 0
    for parameter in module.parameters():
        count += 1
        if count > _MOST_PARAMETERS or is_lazy(parameter) or not parameter.is_floating_point():
            return False
        if id(parameter) in own or parameter.dim() < 2:
            continue
        narrow, wide = sorted(parameter.shape[-2:])
        is_of_a_part = rows % wide == 0 and rows > columns
        if parameter.dim() > 2 or narrow >= min(rows, columns) or not (wide in (rows, columns) or is_of_a_part):
            return False
        matrices += 1
        takes += wide == columns
        gives += wide == rows or is_of_a_part
    return min(takes, gives) > 0 and matrices > 1


def _kind_of(module: nn.Module) -> Any:
    """Class, shapes and plain attributes: modules of one kind compute their matrix in the same way."""
    is_of_any_size = isinstance(module, nn.Linear) and _holds_weight_alone(module)  # a trial of each may be large
    shapes = tuple(
        (name, () if is_of_any_size else tuple(parameter.shape)) for name, parameter in module.named_parameters()
    )
    plain = tuple(
        (path, type(part), name, value)
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if name not in ("training", "in_features", "out_features") and isinstance(value, ATOMS)
    )
    variants = [type(variant) for variant in getattr(module, "lora_variant", {}).values()]
    return type(module), shapes, plain, (*variants, *getattr(module, "active_adapters", ()))


# --- runs of copies


class _Products(TorchFunctionMode):
    """Records products with tokens; that with the unit vectors is computed from its second factor alone."""

    def __init__(self, tokens: Tensor, *, are_units: bool = False) -> None:
        super().__init__()
        self.tokens, self.are_units = tokens, are_units
        self.found: list[tuple[Tensor, Tensor, Tensor]] = []  # input, matrix (out, in), output

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (F.dropout, torch.dropout):
            return args[0] if args else kwargs["input"]
        taken, matrix, bias = _factors(func, args, kwargs)
        is_of_tokens = isinstance(taken, Tensor) and taken.shape[:-1] == self.tokens.shape[:-1]
        if not is_of_tokens or not isinstance(matrix, Tensor) or matrix.dim() != 2:
            return func(*args, **kwargs)
        if taken is self.tokens and self.are_units:
            made = F.pad(matrix.mT, (0, 0, 0, 1))[None]
            made = made if bias is None else made + bias
        else:
            made = func(*args, **kwargs)
        self.found.append((taken.clone(), matrix, made.clone()))  # as they are now: either may be changed in place
        return made


def _factors(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    if func is F.linear:
        passed = dict(zip(("input", "weight", "bias"), args)) | kwargs
        return passed["input"], passed["weight"], passed.get("bias")
    if func in (torch.matmul, Tensor.matmul, Tensor.__matmul__) and len(args) == 2 and not kwargs:
        return args[0], args[1].mT if isinstance(args[1], Tensor) and args[1].dim() == 2 else None, None
    return None, None, None


def _read(trial: nn.Module, way: Way, sizes: tuple[int, int]) -> tuple[Tensor, Tensor] | None:
    """Run a copy on the unit vectors and on zero."""
    like = next(parameter for parameter in trial.parameters() if parameter.is_floating_point())
    units = F.pad(torch.eye(sizes[1], device=like.device, dtype=like.dtype), (0, 0, 0, 1))[None]
    with _Products(units, are_units=True) as products:
        made = trial.forward(units)
    if way == "factor":
        found = _single_product(products, sizes)
        return None if found is None else (found[1], made[0, -1])
    if made.shape != (1, sizes[1] + 1, sizes[0]):
        return None
    return (made[0, :-1] - made[0, -1]).mT, made[0, -1]


def _single_product(products: _Products, sizes: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor] | None:
    if len(products.found) != 1:
        return None
    taken, matrix, made = products.found[0]
    return (taken, matrix, made) if taken.shape == products.tokens.shape and matrix.shape == sizes else None


def _verified_way(module: nn.Module) -> Way | None:
    """Determine the way, and verify it: the matrix must reproduce the output of a copy with other numbers."""
    generator = torch.Generator().manual_seed(0)
    sizes = sizes_of(module)
    trial = isolated_copy(module, dict(_drawn(module, generator)))
    for part in trial.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                part._buffers[name] = buffer.float()
    device = next(trial.parameters()).device
    tokens = torch.randn(2, 5, sizes[1], generator=generator).to(device)
    with _Products(tokens) as products:
        made = _run(trial, tokens)
    if not isinstance(made, Tensor) or made.shape != (2, 5, sizes[0]):
        return None
    if _multiplies_with_weight(trial, tokens, made):
        return "weight"
    one = _single_product(products, sizes)
    read = None if one is None else _read(trial, "factor", sizes)
    if one is not None and read is not None:
        taken, matrix, product = one
        is_of_tokens = F.cosine_similarity(taken, tokens, dim=-1).min() > _ALIKE
        added, factor = made - product, made / product
        is_kept = _is_constant(added, (0, 1)) or _is_constant(factor, (-1,))
        if is_of_tokens and is_kept and torch.allclose(matrix, read[0]) and not _is_whole_with_more(made, product):
            return "factor"
    read = _read(trial, "whole", sizes)
    if read is None:
        return None
    return "whole" if _are_close(made, F.linear(tokens, *read)) else None


def _run(trial: nn.Module, tokens: Tensor) -> Any:
    """Run a copy on tokens; a convolution takes each for an image of one position."""
    dims = len(getattr(trial, "kernel_size", ()))
    if not dims:
        return trial.forward(tokens)
    made = trial.forward(tokens.reshape(-1, tokens.shape[-1], *[1] * dims))
    return made.flatten(1).unflatten(0, tokens.shape[:2])


def _multiplies_with_weight(trial: nn.Module, tokens: Tensor, made: Tensor) -> bool:
    """Return whether a module computes ``x W^T + b`` with its weight, as is or transposed, and holds nothing else."""
    if not _holds_weight_alone(trial):
        return False
    matrix = as_matrix(trial.get_parameter("weight"), getattr(trial, "groups", 1))
    bias = trial._parameters.get("bias")
    shape = (made.shape[-1], tokens.shape[-1])
    ways = [oriented for oriented in (matrix, matrix.mT) if oriented.shape == shape]  # GPT-2's maps keep it turned
    return any(_are_close(made, F.linear(tokens, oriented, bias)) for oriented in ways)


def _holds_weight_alone(module: nn.Module) -> bool:
    held = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    return "weight" in held and held <= {"weight", "bias"}


def _are_close(made: Tensor, expected: Tensor) -> bool:
    size = float(expected.abs().max())
    return bool(size) and torch.allclose(made, expected, rtol=1e-4, atol=1e-4 * size)


def _is_whole_with_more(made: Tensor, product: Tensor) -> bool:
    """Return whether a product is scaled by one number in the end: as a whole the map has a scaled matrix."""
    factor = made / product
    return _is_constant(factor, (0, 1, 2)) and not torch.allclose(factor, torch.ones_like(factor), rtol=1e-3)


def _is_constant(numbers: Tensor, dims: tuple[int, ...]) -> bool:
    spread = (numbers.amax(dims) - numbers.amin(dims)).max()
    return bool(spread <= 1e-3 * numbers.abs().max().clamp_min(1e-3))


def _drawn(module: nn.Module, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    for parameter in module.parameters():
        if parameter.is_floating_point():
            if parameter.dim() > 1:
                drawn = torch.randn(parameter.shape, generator=generator) / math.sqrt(parameter.shape[-1])
            else:  # a gain of the input leaves its features where they are
                drawn = torch.empty(parameter.shape).uniform_(0.5, 1.5, generator=generator)
            yield parameter, nn.Parameter(drawn.to("cpu" if parameter.is_meta else parameter.device))
