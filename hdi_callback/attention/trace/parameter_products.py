"""Products with parameters in a traced run, each answered by features that are drawn at random."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hdi_callback.attention.trace.contractions import einsum, tensordot
from hdi_callback.attention.trace.stacks import by_each_matrix
from hdi_callback.attention.trace.torch_arguments import torch_arguments

if TYPE_CHECKING:
    from hdi_callback.attention.trace.graph_cut import GraphCut


def linear(cut: GraphCut, func: Any, args: Any, kwargs: Any) -> Any:
    """Answer in place of a product with the matrix of a map, or with some rows of it."""
    x, weight = torch_arguments(args, kwargs, "input", "weight")
    return _by_rows(cut, x, weight)


def matmul(cut: GraphCut, func: Any, args: Any, kwargs: Any) -> Any:
    """Answer in place of a product with a parameter: a matrix, its transpose, or one matrix for each head."""
    x, other = torch_arguments(args, kwargs, "input", "mat2" if "mat2" in kwargs else "other")
    if func in (torch.addmm, Tensor.addmm, torch.baddbmm, Tensor.baddbmm):
        x, other = torch_arguments(
            args[1:], kwargs, *(("mat1", "mat2") if func.__name__ == "addmm" else ("batch1", "batch2"))
        )
    with torch._C.DisableTorchFunction():
        if not isinstance(x, Tensor) or not isinstance(other, Tensor) or cut.views.is_of_parameter(x):
            return NotImplemented
        name, is_turned = cut.views.stack_of(other) if other.dim() == 3 else (None, False)
    if name is None or x.dim() < 3 or x.shape[-3] not in (1, len(other)):
        return _by_rows(cut, x, other.mT) if other.dim() == 2 else NotImplemented
    if x.shape[-3] > 1 and x.stride(-3) == 0:  # every matrix takes the same
        x = x[..., :1, :, :]
    if x.shape[-3] != 1 or len(other) == 1:  # a matrix for each of what are heads already
        return NotImplemented if is_turned else by_each_matrix(cut, name, x, other)
    heads, _, width = other.shape
    answer = cut.answer(name, x.squeeze(-3), heads * width, axes=(0, 1) if is_turned else (0, 2))
    return answer.view(*answer.shape[:-1], heads, width).movedim(-2, -3).contiguous()  # as the product has it


def _by_rows(cut: GraphCut, x: Tensor, matrix: Any) -> Any:
    """Answer in place of a product with the transpose of a matrix ``(features, in_features)``."""
    with torch._C.DisableTorchFunction():
        rows = cut.views.rows_of(matrix)
    if rows is None:
        return NotImplemented
    return cut.answer(rows.parameter, x, matrix.shape[0], module=rows.map, start=rows.start, axes=rows.axes)


def embedding(cut: GraphCut, func: Any, args: Any, kwargs: Any) -> Any:
    """Take what a table gives for ids of the inputs for inputs; what it gives for positions is none."""
    at = 1 if func is torch.embedding else 0
    ids = args[at] if len(args) > at else kwargs.get("indices" if at else "input")
    answer = func(*args, **kwargs)
    if not isinstance(ids, Tensor) or not any(_are_those(ids, known) for known in cut.run.ids):
        return answer
    leaf = answer.detach().requires_grad_()
    cut.run.inputs.append(leaf)
    return leaf * 1.0


def _are_those(ids: Tensor, known: Tensor) -> bool:
    """Recognise ids of the inputs, in whatever shape; a table of positions is asked for others."""
    same = ids.numel() == known.numel() and torch.equal(ids.flatten().to(known.dtype), known.flatten())
    counted = torch.arange(ids.shape[-1], dtype=known.dtype) if ids.dim() else known
    return same and not torch.equal(ids.reshape(-1)[: ids.shape[-1] if ids.dim() else 1].to(known.dtype), counted)


def convolution(cut: GraphCut, func: Any, args: Any, kwargs: Any) -> Any:
    """Note what is convolved, before it is."""
    (x,) = torch_arguments(args, kwargs, "input")
    if isinstance(x, Tensor):
        cut.run.convolved.append(x)
    return NotImplemented


def note_mixed_tokens(cut: GraphCut, func: Any, made: Any) -> None:
    """Note what a convolution or a recurrent part gave for each token."""
    answer = made[0] if isinstance(made, tuple) else made
    if isinstance(answer, Tensor) and answer.requires_grad:
        cut.run.mixed_tokens.append((answer, MIXING_TOKENS[func]))


# What gives each token something of others -> the dimension that numbers features in what it gives.
MIXING_TOKENS: dict[Any, int] = {
    **dict.fromkeys((F.conv1d, F.conv_transpose1d), -2),
    **dict.fromkeys((F.conv2d, F.conv_transpose2d), -3),
    **dict.fromkeys((F.conv3d, F.conv_transpose3d), -4),
    **dict.fromkeys((torch._VF.gru, torch._VF.lstm, torch._VF.rnn_tanh, torch._VF.rnn_relu), -1),
}
HANDLERS = {
    linear: ("linear",),
    matmul: ("matmul", "__matmul__", "mm", "addmm", "bmm", "baddbmm"),
    einsum: ("einsum",),
    tensordot: ("tensordot",),
    embedding: ("embedding",),
    convolution: ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
}
