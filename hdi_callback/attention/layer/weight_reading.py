"""The tensor behind an attribute of a module, read without running the user's code on the user's objects.

``module.weight`` runs code where the weight is parametrized, or is a property: spectral norm iterates its vectors in
training mode, weight noise draws, counters count. Here a parameter is read where it is stored, and what is computed is
computed by a copy that shares the parameters: in evaluation mode, from buffers as they are. That is the weight that
the last forward has used, as spectral norm iterates before it multiplies; noise is left out.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from hdi_callback.attention.isolation import isolated, isolated_copy, without_other_ranks


def read_tensor(module: nn.Module, name: str) -> Tensor | None:
    """Read a parameter, a buffer, or a tensor that is computed from parameters.

    Args:
        module: the module.
        name: of the attribute.

    Returns:
        The parameter itself where it is one; what is computed from parameters has a gradient by them if gradients are
        on. `None` if there is no tensor of this name, or it is not initialised yet.

    Raises:
        IsolationError: if it is computed by code that cannot be run apart.
        CollectiveError: if it is computed by code that calls other ranks, and nothing states that they read it too.

    Example:
        >>> linear = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        >>> before = linear.parametrizations.weight[0]._u.clone()
        >>> tuple(read_tensor(linear, "weight").shape)
        (4, 4)
        >>> torch.equal(linear.parametrizations.weight[0]._u, before)
        True
    """
    if not _is_computed(module, name):
        for place in (module._parameters, module._buffers):
            if isinstance(stored := place.get(name), Tensor):
                return None if is_lazy(stored) else stored
        anew = _by_hook(module, name)
        if anew is not None:
            return anew
        kept = module.__dict__.get(name)
        if isinstance(kept, Tensor):
            return kept
        if type(module).__getattr__ is nn.Module.__getattr__ and name not in module._modules:
            return None
    # One rank may read alone, as in the forward of an armed step: it must not wait for the others.
    with isolated(module, keeps_defaults=True), without_other_ranks():
        trial = isolated_copy(module, shares_parameters=True)
        if _is_own(trial, name):
            return cast(Tensor, cast(nn.ModuleDict, trial.parametrizations)[name].forward())
        value = getattr(trial, name, None)
        return value if isinstance(value, Tensor) else None


def _is_computed(module: nn.Module, name: str) -> bool:
    return _is_property(module, name) or (parametrize.is_parametrized(module) and _is_own(module, name))


def _is_own(module: nn.Module, name: str) -> bool:
    """Return whether a tensor has parametrizations."""
    parts = module._modules.get("parametrizations")
    return isinstance(parts, nn.ModuleDict) and name in parts


def _is_property(module: nn.Module, name: str) -> bool:
    found = next((vars(kind)[name] for kind in type(module).__mro__ if name in vars(kind)), None)
    return hasattr(found, "__get__") and hasattr(found, "__set__")


def _by_hook(module: nn.Module, name: str) -> Tensor | None:
    """Compute the weight that torch's older weight norm, spectral norm and pruning set by hooks before a forward."""
    for hook in module._forward_pre_hooks.values():
        own: Any = hook
        kind = (type(own).__module__, getattr(own, "name", getattr(own, "_tensor_name", None)))
        if kind == ("torch.nn.utils.weight_norm", name):
            return cast(Tensor, own.compute_weight(module))
        if kind == ("torch.nn.utils.spectral_norm", name):
            return cast(Tensor, own.compute_weight(module, do_power_iteration=False))
        if kind == ("torch.nn.utils.prune", name):
            return cast(Tensor, own.apply_mask(module))
    return None


def shape_of(module: nn.Module, name: str) -> torch.Size | None:
    """Return the shape of a tensor.

    Args:
        module: the module.
        name: of the attribute.

    Returns:
        Its shape; `None` if there is none, or it is not initialised yet.
    """
    # A shape may be read at any time: computing it must not wait for other ranks.
    with torch.no_grad(), isolated() if _is_computed(module, name) else nullcontext():
        found = read_tensor(module, name)
    return None if found is None else found.shape
