"""`nn.MultiheadAttention`, whose heads are known without a forward: in evaluation it may be one operation."""

from __future__ import annotations

from typing import Any

from torch import nn

from hdi_callback.attention.layer import AttentionLayer, HeadWeight, Site

__all__ = ["torch_attention"]


def torch_attention(model: nn.Module) -> list[AttentionLayer]:
    """Return the layers of a model that are torch's own, with their own forward and stored weights, in model order."""
    # An adapter around one changes the weights within each forward.
    modules = ((name, module) for name, module in model.named_modules() if not name.endswith("base_layer"))
    return [_layer(name, module) for name, module in modules if _is_plain(module)]


def _is_plain(module: Any) -> bool:
    own = nn.MultiheadAttention.forward
    if not isinstance(module, nn.MultiheadAttention) or "forward" in vars(module) or type(module).forward is not own:
        return False
    weights = ["in_proj_weight"] if module._qkv_same_embed_dim else [f"{role}_proj_weight" for role in "qkv"]
    output = getattr(module.out_proj, "_parameters", {}).get("weight")
    return output is not None and all(module._parameters.get(name) is not None for name in weights)


def _layer(name: str, module: Any) -> AttentionLayer:
    H, width = module.num_heads, module.head_dim
    weights = {}
    for number, role in enumerate(("query", "key", "value")):
        packed, start = "in_proj_weight", number * module.embed_dim
        parameter, first = (packed, start) if module._qkv_same_embed_dim else (f"{role[0]}_proj_weight", 0)
        weights[role] = HeadWeight.from_blocks(module, parameter, heads=H, width=width, start=first)
    weights["output"] = HeadWeight.from_blocks(module, "out_proj.weight", heads=H, width=width, dim=1)
    kind = f"torch.nn.MultiheadAttention, {'packed' if module._qkv_same_embed_dim else 'separate'}"
    # `out_proj` is used, but not called: there is no output module.
    return AttentionLayer(name, module, weights, kind=kind, sites=(Site(name, 0, "fused", H),))
