"""A trial forward of a copy: in which order a fused projection's rows are used is seen, not guessed.

Neither names nor row counts tell whether a fused matrix holds all queries, then all keys, then all values, or
interleaves them head by head. So a copy of the module is run once on a few random tokens, and what it multiplies in
its attention is compared with what the claimed rows give. The user's module, its buffers and the random state are not
touched.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_TOKENS = 5
_PRODUCTS = (
    torch.matmul,
    torch.Tensor.matmul,
    torch.Tensor.__matmul__,
    torch.bmm,
    torch.Tensor.bmm,
    torch.einsum,
    torch.baddbmm,
    F.scaled_dot_product_attention,
)


class _Products(TorchFunctionMode):
    """Keep the factors of every product of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.factors: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PRODUCTS:
            for item in (*args, *(kwargs or {}).values()):
                if isinstance(item, Tensor) and item.dim() >= 3:
                    self.factors.append(item.detach())
        return func(*args, **(kwargs or {}))


def uses_rows_as_claimed(module: nn.Module, linear: str, blocks: list[tuple[int, int, int]]) -> bool | None:
    """Tell whether a module really uses the rows of a fused projection as claimed.

    Args:
        module: the attention; a copy of it is run.
        linear: dotted path of the fused projection in it.
        blocks: query, key and value, each as first row, number of heads and width of a head.

    Returns:
        True or False where the trial could be made; `None` where it could not: the module needs more than one input,
        cannot be copied, or multiplies nothing of the right size.
    """
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            trial = copy.deepcopy(module).to(device="cpu", dtype=torch.float32).eval()
            for child in trial.modules():
                child._forward_hooks.clear()
                child._forward_pre_hooks.clear()
            projected: list[Tensor] = []
            fused = trial.get_submodule(linear)
            fused.register_forward_hook(lambda _module, _args, output: projected.append(output))
            weight: Tensor = fused.weight  # type: ignore[assignment]
            width = weight.shape[0] if type(fused).__name__ == "Conv1D" else weight.shape[1]
            generator = torch.Generator().manual_seed(0)
            # Random weights, so that a fresh model's zeros or ties do not look alike.
            weight.copy_(torch.randn(weight.shape, generator=generator))
            with _Products() as products:
                trial(torch.randn(1, _TOKENS, width, generator=generator))
    except Exception:
        return None
    if len(projected) != 1 or projected[0].shape[:2] != (1, _TOKENS):
        return None
    claims = [projected[0][0, 0, start : start + heads * width].view(heads, width) for start, heads, width in blocks]
    used = [_first_token(factor, claim) for claim in claims for factor in products.factors]
    if not any(candidate is not None for candidate in used):
        return None
    return all(
        any(_is_same(_first_token(factor, claim), claim, exactly=role == 2) for factor in products.factors)
        for role, claim in enumerate(claims)
    )


def _first_token(factor: Tensor, claim: Tensor) -> Tensor | None:
    """Read the first token's heads ``(heads, width)`` from a factor in any usual order of dimensions."""
    heads, width = claim.shape
    shape = factor.shape[1:] if factor.dim() == 4 and factor.shape[0] == 1 else factor.shape
    if len(shape) != 3:
        return None
    factor = factor.reshape(shape)
    if shape[0] % heads == 0 and shape[1:] == (_TOKENS, width):
        found = factor[:, 0]
    elif shape[0] % heads == 0 and shape[1:] == (width, _TOKENS):
        found = factor[..., 0]
    elif shape[0] == _TOKENS and shape[1] % heads == 0 and shape[2] == width:
        found = factor[0]
    else:
        return None
    return found[:: found.shape[0] // heads]  # grouped keys are repeated for the heads that share them


def _is_same(found: Tensor | None, claim: Tensor, *, exactly: bool) -> bool:
    """Compare vectors: values exactly, queries and keys up to a scale or a norm."""
    if found is None:
        return False
    if exactly:
        return torch.allclose(found, claim, rtol=1e-4, atol=1e-4)
    return any(
        torch.allclose(F.normalize(a, dim=-1), F.normalize(b, dim=-1), atol=1e-4)
        for a, b in ((found, claim), (found, claim - claim.mean(-1, keepdim=True)))
    )
