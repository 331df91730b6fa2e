"""Attention that is known without a forward: torch's own, and layouts that users describe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from hdi_callback.arguments import shown
from hdi_callback.attention.layer import AttentionLayer, HeadWeight, Refusal, Site
from hdi_callback.errors import MisconfigurationError, UnsupportedAttentionError

__all__ = ["known_layer", "known_layers", "register_layout"]

Layout = Callable[[str, Any], "AttentionLayer | None"]

_REGISTERED: dict[type[nn.Module], Layout] = {}


def register_layout(module_type: type[nn.Module], function: Layout) -> None:
    """Describe how modules of a class lay out their heads; their attention is then not read from a forward.

    Args:
        module_type: the class; subclasses are described in the same way, unless they have a layout of their own.
        function: takes the dotted path and the module, and returns an `AttentionLayer`; or `None` where the class has
            no heads to watch, so that its attention is read from a forward as that of any other module.

    Raises:
        MisconfigurationError: if `module_type` is not a class of modules, or `function` not a function.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> class Mine(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.mix = nn.Linear(32, 96)
        ...         self.back = nn.Linear(32, 32)
        >>> def describe(name, module):
        ...     key = HeadWeight.from_blocks(module, "mix.weight", heads=4, width=8, start=32)
        ...     output = HeadWeight.from_blocks(module, "back.weight", heads=4, width=8, dim=1)
        ...     return AttentionLayer(name, module, {"key": key, "output": output}, output_module=module.back)
        >>> register_layout(Mine, describe)
        >>> known_layer("attention", Mine()).weight("key").shape
        torch.Size([4, 8, 32])
    """
    if not isinstance(module_type, type) or not issubclass(module_type, nn.Module):
        raise MisconfigurationError(
            f"`module_type` must be a class of modules, got {shown(module_type)}: write type(model.blocks[0].attn)."
        )
    if not callable(function):
        raise MisconfigurationError(
            f"`function` must take a name and a module and give an AttentionLayer, got {shown(function)}."
        )
    _REGISTERED[module_type] = function


def known_layers(model: nn.Module) -> list[AttentionLayer | Refusal]:
    """Return the attention of a model that is known without a forward, or why it is not read, in model order."""
    # An adapter around torch's attention changes the weights within each forward.
    modules = ((name, module) for name, module in model.named_modules() if not name.endswith("base_layer"))
    return [layer for name, module in modules if (layer := known_layer(name, module)) is not None]


def known_layer(name: str, module: nn.Module) -> AttentionLayer | Refusal | None:
    """Return the layer of a module with a registered layout or of torch's attention, or why it has none; else `None`.

    Raises:
        MisconfigurationError: if a registered layout contradicts itself or the shapes of the module.
    """
    registered = next((kind for kind in type(module).__mro__ if kind in _REGISTERED), None)
    if registered is not None:
        layer = _described(name, module, registered)
        if layer is not None:
            return layer
    if not is_torch_attention(module):
        return None
    try:
        return _torch_attention(name, module)
    except UnsupportedAttentionError as error:
        return Refusal(name, str(error), type(module).__name__)


def is_torch_attention(module: nn.Module) -> bool:
    """Return whether a module is an `nn.MultiheadAttention` with torch's own forward."""
    if not isinstance(module, nn.MultiheadAttention):
        return False
    return "forward" not in vars(module) and type(module).forward is nn.MultiheadAttention.forward


def _described(name: str, module: nn.Module, kind: type[Any]) -> AttentionLayer | None:
    where = f"The layout that is registered for {kind.__name__}"
    try:
        layer = _REGISTERED[kind](name, module)
    except UnsupportedAttentionError as error:
        raise MisconfigurationError(f"{where} does not fit `{name}`: {error}") from error
    if layer is None:
        return None
    if not isinstance(layer, AttentionLayer):
        raise MisconfigurationError(f"{where} gives {shown(layer)}: let it return an AttentionLayer, or None.")
    problem = layer.contradiction()
    if problem is not None:
        raise MisconfigurationError(f"{where} does not fit `{name}`: {problem}.")
    return layer


def _torch_attention(name: str, module: Any) -> AttentionLayer:
    """`nn.MultiheadAttention`: packed, or in three parameters where widths of keys or values differ."""
    H, width = module.num_heads, module.head_dim
    weights = {}
    for number, role in enumerate(("query", "key", "value")):
        if module._qkv_same_embed_dim:
            parameter, start = "in_proj_weight", number * module.embed_dim
        else:
            parameter, start = f"{role[0]}_proj_weight", 0
        weights[role] = HeadWeight.from_blocks(module, parameter, heads=H, width=width, start=start)
    weights["output"] = HeadWeight.from_blocks(module, "out_proj.weight", heads=H, width=width, dim=1)
    kind = f"torch.nn.MultiheadAttention, {'packed' if module._qkv_same_embed_dim else 'separate'}"
    # `out_proj` is used, but not called: there is no output module.
    return AttentionLayer(name, module, weights, kind=kind, sites=(Site(name, 0, "fused", H),))
