"""The user's model, and the user's names, under the wrappers that training puts around modules."""

from __future__ import annotations

import re

from torch import nn

# torch.compile, FullyShardedDataParallel, checkpoint_wrapper, Lightning's Fabric: the attribute that holds the wrapped
# module.
_INFIXES = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module")
# Data-parallel wrappers, torch's and DeepSpeed's: all hold the model as `module`.
_ENGINES = ("DistributedDataParallel", "DataParallel", "DeepSpeedEngine")


def inner_model(model: nn.Module) -> nn.Module:
    """Return the model within its wrappers.

    Args:
        model: any module.

    Returns:
        The innermost module that is the user's own.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> inner_model(nn.DataParallel(model)) is model
        True
    """
    while True:
        is_engine = any(kind.__name__ in _ENGINES for kind in type(model).__mro__)
        names = [*_INFIXES, *(["module"] if is_engine else [])]
        inner = next((child for name in names if isinstance(child := getattr(model, name, None), nn.Module)), None)
        if inner is None:
            return model
        model = inner


def is_wrapper(module: nn.Module) -> bool:
    """Return whether a module only wraps one of the user's for training.

    Args:
        module: any module.

    Returns:
        True for what `torch.compile`, FSDP, activation checkpointing and Fabric put around a module.
    """
    return any(isinstance(getattr(module, name, None), nn.Module) for name in _INFIXES)


def users_name(name: str) -> str:
    """Leave the wrappers out of a dotted path.

    Args:
        name: dotted path of a module or parameter.

    Returns:
        The path that it has in the user's own model.

    Example:
        >>> users_name("blocks.0._fsdp_wrapped_module._orig_mod.attn")
        'blocks.0.attn'
    """
    return re.sub(rf"(^|\.)({'|'.join(_INFIXES)})(?=\.|$)", "", name).removeprefix(".")
