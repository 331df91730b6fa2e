"""When torch computes an encoder layer in one kernel, without calling the attention in it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def takes_fast_path(attention: nn.Module, model: nn.Module) -> bool:
    """Return whether the encoder layer around an attention takes torch's fast path, as it is set now.

    What torch asks of the input besides, such as no autocast and no odd number of heads, is not asked here.

    Args:
        attention: the module of an attention layer.
        model: the model that it is in.

    Returns:
        True if an `nn.TransformerEncoderLayer` around it is in evaluation mode and allows for it.
    """
    if not isinstance(attention, nn.MultiheadAttention) or not torch.backends.mha.get_fastpath_enabled():
        return False
    around = next(
        (one for one in model.modules() if isinstance(one, nn.TransformerEncoderLayer) and one.self_attn is attention),
        None,
    )
    if around is None or type(around).forward is not nn.TransformerEncoderLayer.forward or around.training:
        return False
    # What torch itself asks of the layer, in `nn.TransformerEncoderLayer.forward`.
    return bool(
        attention.batch_first
        and attention.in_proj_bias is not None
        and attention._qkv_same_embed_dim
        and attention.num_heads % 2 == 0
        and around.activation_relu_or_gelu
        and around.norm1.eps == around.norm2.eps
    )


FAST_PATH = "in evaluation mode torch's fast path computes attention in one kernel, which keeps its weights to itself"


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
    attention = module.self_attn if isinstance(module, nn.TransformerEncoderLayer) else module
    if module.training or not isinstance(attention, nn.MultiheadAttention):
        return False
    if not torch.backends.mha.get_fastpath_enabled() or torch.is_autocast_enabled():
        return False
    is_whole = attention.bias_k is None and not attention.add_zero_attn and attention._qkv_same_embed_dim
    if not (attention.batch_first and is_whole and attention.num_heads % 2 == 0):
        return False
    if isinstance(module, nn.TransformerEncoderLayer):
        has_own = type(module).forward is not nn.TransformerEncoderLayer.forward
        has_other_parts = not module.activation_relu_or_gelu or module.norm1.eps != module.norm2.eps
        if has_own or has_other_parts or attention.in_proj_bias is None:
            return False
    tensors = (*module.parameters(), *(one for one in arguments if isinstance(one, torch.Tensor)))
    return not (torch.is_grad_enabled() and any(one.requires_grad for one in tensors))
