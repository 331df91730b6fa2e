"""Modules known before they are run: layouts that users register, and torch's own attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from hdi_callback.arguments import shown
from hdi_callback.attention.layer import projections
from hdi_callback.attention.layer.heads import INPUT_ROLES, AttentionLayer, HeadSlice, RefusedError, Role, check_layer
from hdi_callback.attention.layer.torch_attention import is_torch_attention
from hdi_callback.errors import MisconfigurationError


@dataclass(frozen=True)
class Place:
    """A module and its place in the model.

    Attributes:
        name: dotted path.
        module: the module.
        parent: the module that holds it, `None` for the model itself.
    """

    name: str
    module: nn.Module
    parent: nn.Module | None = None


Layout = Callable[[Place], AttentionLayer | None]

_REGISTERED: list[tuple[type[nn.Module], Layout]] = []


def register_layout(module_type: type[nn.Module], describe: Callable[[str, Any], AttentionLayer]) -> None:
    """Teach the package how modules of one class keep their heads.

    Args:
        module_type: the class; subclasses are described in the same way.
        describe: takes the dotted path and the module to an `AttentionLayer`.

    Raises:
        MisconfigurationError: if the one is no class of modules, or the other no function.

    Example:
        >>> from hdi_callback import find_attention
        >>> class Mine(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.mix = nn.Linear(32, 96)  # all heads' queries, then keys, then values
        ...         self.back = nn.Linear(32, 32)
        >>> def describe(name, module):
        ...     return AttentionLayer(
        ...         name, module, num_heads=4, num_key_heads=4, head_dim=8, value_dim=8, kind="mine",
        ...         slices={"key": HeadSlice(module, "mix.weight", heads=4, width=8, start=32),
        ...                 "output": HeadSlice(module, "back.weight", heads=4, width=8)},
        ...         output_projection=module.back)
        >>> register_layout(Mine, describe)
        >>> [tuple(layer.weight("key").shape) for layer in find_attention(nn.Sequential(Mine()))]
        [(4, 8, 32)]
    """
    if not isinstance(module_type, type) or not issubclass(module_type, nn.Module):
        raise MisconfigurationError(
            f"`module_type` must be a class of modules, got {shown(module_type)}: write type(model.blocks[0].attn)."
        )
    if not callable(describe):
        raise MisconfigurationError(
            f"`describe` must be a function of a name and a module that gives an AttentionLayer, got {shown(describe)}."
        )

    def layout(place: Place) -> AttentionLayer:
        layer = describe(place.name, place.module)
        if not isinstance(layer, AttentionLayer):
            raise RefusedError(
                f"the layout that is registered for {module_type.__name__} gives {shown(layer)}",
                "Let it give an AttentionLayer.",
            )
        return layer

    _REGISTERED.insert(0, (module_type, layout))


def is_known_kind(module: nn.Module) -> bool:
    """Return whether torch's own code or a registered layout describes modules of a class, for `known_layer`.

    Args:
        module: any module.

    Returns:
        True for torch's own attention, and classes with a registered layout.
    """
    return is_torch_attention(module) or isinstance(module, tuple(kind for kind, _ in _REGISTERED))


def known_layer(place: Place) -> AttentionLayer | None:
    """Describe a module by a registered layout, or by torch's own code.

    Args:
        place: the module and its place in the model.

    Returns:
        The layer; `None` if nobody does.

    Raises:
        RefusedError: if the layout contradicts itself, or what it describes cannot be read.
    """
    for layout in (*(one for kind, one in _REGISTERED if isinstance(place.module, kind)), torch_attention):
        layer = layout(place)
        if layer is not None:
            return check_layer(layer)
    return None


def torch_attention(place: Place) -> AttentionLayer | None:
    """`nn.MultiheadAttention` with torch's forward: packed, or in three parameters when key or value widths differ."""
    module = place.module
    if not is_torch_attention(module):  # a forward of its own is read as that of any other module
        return None
    around = place.parent
    if getattr(around, "base_layer", None) is module:
        adapter = f"{type(around).__name__} of {type(around).__module__.partition('.')[0]}"
        raise RefusedError(f"the {adapter} around it changes its weights within each forward")
    reason = projections.objection(module.out_proj)
    if reason is not None:
        raise RefusedError(f"its `out_proj` is {reason}")
    H, width = module.num_heads, module.head_dim
    packed = module._qkv_same_embed_dim
    slices: dict[Role, HeadSlice] = {}
    for number, role in enumerate(INPUT_ROLES):
        name, start = ("in_proj_weight", number * module.embed_dim) if packed else (f"{role[0]}_proj_weight", 0)
        slices[role] = HeadSlice(module, name, H, width, start)
    slices["output"] = HeadSlice(module, "out_proj.weight", H, width)
    kind = "nn.MultiheadAttention, packed" if packed else "nn.MultiheadAttention, separate"
    return AttentionLayer(place.name, module, H, H, width, width, kind, slices)
