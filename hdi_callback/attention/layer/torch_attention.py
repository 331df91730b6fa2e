"""`nn.MultiheadAttention`, which uses its output projection without calling it: its head outputs, computed again."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hdi_callback.attention.hooks import has_own_forward
from hdi_callback.attention.layer.weight_reading import read_tensor


def is_torch_attention(module: nn.Module) -> TypeGuard[nn.MultiheadAttention]:
    """Return whether a module computes as torch's own attention does.

    Args:
        module: any.

    Returns:
        True for an `nn.MultiheadAttention` whose forward is torch's; not for a subclass with one of its own.
    """
    if not isinstance(module, nn.MultiheadAttention):
        return False
    return type(module).forward is nn.MultiheadAttention.forward and not has_own_forward(module)


def before_projection(module: nn.Module, gradient: Tensor) -> Tensor:
    """G @ W_O: the gradient of the attention's output, taken back to the input of its output projection.

    Args:
        module: the attention.
        gradient: of its output, in the order of dimensions of its output.

    Returns:
        ``(batch, length, H * d_v)``, or ``(length, H * d_v)`` without a batch dimension.

    Raises:
        ValueError: if its output projection has no weight.
    """
    attention: Any = module
    weight = read_tensor(attention.out_proj, "weight")
    if weight is None:
        raise ValueError("its output projection has no weight")
    gradient = gradient if attention.batch_first or gradient.dim() < 3 else gradient.transpose(0, 1)
    return gradient @ weight.detach().to(gradient.dtype)


def recompute_unseen(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Compute head outputs unseen by function modes, such as the one that observes the model's own attention.

    Args:
        module: the attention.
        args: of its forward.
        kwargs: of its forward.

    Returns:
        See `recompute_head_outputs`.
    """
    with torch._C.DisableTorchFunction():
        return recompute_head_outputs(module, *args, **kwargs)  # type: ignore[arg-type]


@torch.no_grad()
def recompute_head_outputs(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Tensor:
    """Compute the input of the output projection of `nn.MultiheadAttention`, without attention dropout.

    Args:
        module: the attention.
        query: as its forward takes it, and so are all the others.
        key: see `query`.
        value: see `query`.
        key_padding_mask: see `query`.
        need_weights: not used.
        attn_mask: see `query`.
        average_attn_weights: not used.
        is_causal: see `query`.

    Returns:
        ``(batch, length, H * d_v)``, or ``(length, H * d_v)`` if the query has no batch dimension.
    """
    is_batched = query.dim() == 3
    if module.batch_first and is_batched:
        query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
    identity = torch.eye(module.embed_dim, dtype=query.dtype, device=query.device)
    separate = not module._qkv_same_embed_dim
    # A compiled graph cannot be read in parts, and the forward has the same parametrization in it.
    read: Any = getattr if torch.compiler.is_compiling() else read_tensor
    outputs, _ = F.multi_head_attention_forward(
        query,
        key,
        value,
        module.embed_dim,
        module.num_heads,
        read(module, "in_proj_weight"),
        read(module, "in_proj_bias"),
        module.bias_k,
        module.bias_v,
        module.add_zero_attn,
        0.0,
        identity,
        None,
        training=False,
        key_padding_mask=key_padding_mask,
        need_weights=False,
        attn_mask=attn_mask,
        use_separate_proj_weight=separate,
        q_proj_weight=read(module, "q_proj_weight"),
        k_proj_weight=read(module, "k_proj_weight"),
        v_proj_weight=read(module, "v_proj_weight"),
        is_causal=is_causal,
    )
    return outputs.transpose(0, 1) if is_batched else outputs
