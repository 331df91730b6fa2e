"""When torch computes an encoder layer in one kernel, without calling the attention in it."""

from __future__ import annotations

import torch
from torch import nn


def takes_fast_path(attention: nn.Module, model: nn.Module) -> bool:
    """Tell whether the encoder layer around an attention takes torch's fast path, as it is set now.

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
