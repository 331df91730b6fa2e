"""The conditions under which torch computes an encoder layer in one kernel, without calling its attention."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def takes_fast_path(attention: nn.Module, model: nn.Module) -> bool:
    """Return whether the encoder layer around an attention takes torch's fast path, as it is set now.

    Torch's further conditions on the input, such as no autocast, are not tested here.

    Args:
        attention: the module of an attention layer.
        model: the model that it is in.

    Returns:
        True if an `nn.TransformerEncoderLayer` around it is in evaluation mode and allows for it.
    """
    layers = (module for module in model.modules() if isinstance(module, nn.TransformerEncoderLayer))
    return any(layer.self_attn is attention and _allows_fast_path(layer) for layer in layers)


FAST_PATH = "in evaluation mode torch's fast path computes attention in one kernel, which does not return its weights"


def may_take_fast_path(module: nn.Module, arguments: Iterable[Any] = ()) -> bool:
    """Return whether a call of one of torch's own modules may be computed in one kernel right now.

    Args:
        module: any module.
        arguments: the arguments of the call; of what autograd is to record no kernel of that kind is called.

    Returns:
        True for an `nn.TransformerEncoder`, a layer of one, or an `nn.MultiheadAttention` in evaluation mode whose
        settings allow for it.
    """
    if isinstance(module, nn.TransformerEncoder):  # may hand nested tensors to its layers
        first = next(iter(module.layers), None)
        return isinstance(first, nn.TransformerEncoderLayer) and may_take_fast_path(first, arguments)
    if torch.is_autocast_enabled() or not _allows_fast_path(module):
        return False
    tensors = (*module.parameters(), *(argument for argument in arguments if isinstance(argument, torch.Tensor)))
    return not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))


def _allows_fast_path(module: nn.Module) -> bool:
    """Evaluate the conditions of torch, in `nn.TransformerEncoderLayer.forward` and that of its attention."""
    attention = module.self_attn if isinstance(module, nn.TransformerEncoderLayer) else module
    if module.training or not isinstance(attention, nn.MultiheadAttention) or attention.num_heads % 2:
        return False
    is_whole = attention.bias_k is None and not attention.add_zero_attn and attention._qkv_same_embed_dim
    if not (torch.backends.mha.get_fastpath_enabled() and attention.batch_first and is_whole):
        return False
    if not isinstance(module, nn.TransformerEncoderLayer):
        return True
    has_usual_parts = bool(module.activation_relu_or_gelu) and module.norm1.eps == module.norm2.eps
    is_torchs = type(module).forward is nn.TransformerEncoderLayer.forward
    return is_torchs and has_usual_parts and attention.in_proj_bias is not None
