"""Products with parameters in a traced run, replaced by random features."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hdi_callback.attention.trace.contractions import contracted, einsum
from hdi_callback.attention.trace.torch_arguments import torch_arguments

if TYPE_CHECKING:
    from hdi_callback.attention.trace.graph_cut import GraphCut

_LETTERS = "abcdefghijklmnop"  # of the dims of a tensor


def linear(cut: GraphCut, func: Any, args: Any, kwargs: Any) -> Any:
    """Random features in place of a product with the matrix of a map, or with some rows of it."""
    x, weight = torch_arguments(args, kwargs, "input", "weight")
    if not isinstance(x, Tensor) or not isinstance(weight, Tensor) or weight.dim() != 2:
        return NotImplemented
    tokens = _LETTERS[: x.dim() - 1]
    return contracted(cut, x, weight, f"{tokens}y", "zy", f"{tokens}z")


def matmul(cut: GraphCut, func: Any, args: Any, kwargs: Any) -> Any:
    """Random features in place of a product with a parameter: a matrix, its transpose, or one for each head."""
    x, other = torch_arguments(args, kwargs, "input", "mat2" if "mat2" in kwargs else "other")
    if func in (torch.addmm, Tensor.addmm, torch.baddbmm, Tensor.baddbmm):
        names = ("mat1", "mat2") if func.__name__ == "addmm" else ("batch1", "batch2")
        x, other = torch_arguments(args[1:], kwargs, *names)
    if not isinstance(x, Tensor) or not isinstance(other, Tensor):
        return NotImplemented
    with torch._C.DisableTorchFunction():
        if cut.views.is_of_parameter(x):
            return NotImplemented
    tokens = _LETTERS[: x.dim() - 1]
    if other.dim() == 2:
        return contracted(cut, x, other, f"{tokens}y", "yz", f"{tokens}z")
    if other.dim() != 3 or x.dim() < 3 or x.shape[-3] not in (1, len(other)) or len(other) == 1:
        return NotImplemented
    if x.shape[-3] == 1 or x.stride(-3) == 0:  # every matrix takes the same
        x, tokens = x.select(-3, 0), tokens[1:]
        return contracted(cut, x, other, f"{tokens}y", "xyz", f"{tokens[:-1]}x{tokens[-1:]}z")
    batch, each = tokens[:-2], tokens[-2:]
    return contracted(cut, x, other, f"{tokens}y", f"{each[0]}yz", f"{batch}{each}z")


def tensordot(cut: GraphCut, func: Any, args: Any, kwargs: Any) -> Any:
    """Random features in place of a contraction of some dims of a tensor with some of a parameter."""
    x, other, dims = torch_arguments(args, kwargs, "a", "b", "dims")
    if not isinstance(x, Tensor) or not isinstance(other, Tensor):
        return NotImplemented
    if type(dims) is int:  # the last of the one, the first of the other
        dims = list(range(x.dim() - dims, x.dim())), list(range(dims))
    are_pairs = (
        isinstance(dims, (tuple, list)) and len(dims) == 2 and all(isinstance(dim, (tuple, list)) for dim in dims)
    )
    if not are_pairs or not dims[0]:
        return NotImplemented
    taken, made = list(_LETTERS[: x.dim()]), list(_LETTERS[x.dim() : x.dim() + other.dim()])
    for one, two in zip(*dims):
        made[two] = taken[one]
    out = [dim for dim in taken if dim not in made] + [dim for dim in made if dim not in taken]
    return einsum(cut, torch.einsum, (f"{''.join(taken)},{''.join(made)}->{''.join(out)}", x, other), {})


def embedding(cut: GraphCut, func: Any, args: Any, kwargs: Any) -> Any:
    """Treat the embeddings of input ids as inputs of the run; embeddings of positions are not."""
    at = 1 if func is torch.embedding else 0
    ids = args[at] if len(args) > at else kwargs.get("indices" if at else "input")
    return _looked_up(cut, ids, func(*args, **kwargs))


def lookup(cut: GraphCut, func: Any, args: Any, kwargs: Any) -> Any:
    """Treat rows of a table that input ids number as inputs of the run, as `embedding` does."""
    table, ids = args
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int32, torch.int64) or table.dim() != 2:
        return NotImplemented
    with torch._C.DisableTorchFunction():
        if not cut.views.is_of_parameter(table):
            return NotImplemented
    return _looked_up(cut, ids, func(*args, **kwargs))


def _looked_up(cut: GraphCut, ids: Any, result: Tensor) -> Tensor:
    if not isinstance(ids, Tensor) or not any(_are_those(ids, known) for known in cut.run.ids):
        return result
    leaf = result.detach().requires_grad_()
    cut.run.inputs.append(leaf)
    return leaf * 1.0


def _are_those(ids: Tensor, known: Tensor) -> bool:
    """Recognise ids of the inputs, in any shape, or some steps of them; a table of positions takes others."""
    counted = torch.arange(ids.shape[-1], dtype=known.dtype) if ids.dim() else known
    ids = ids.to(known.dtype)
    if torch.equal(ids.reshape(-1)[: ids.shape[-1] if ids.dim() else 1], counted):
        return False
    if ids.numel() == known.numel() and torch.equal(ids.flatten(), known.flatten()):
        return True
    if known.dim() != 2 or ids.dim() not in (1, 2) or ids.numel() < 2:
        return False
    steps = ids if ids.dim() == 2 else ids[:, None]  # of all sequences
    return any(_are_steps(one, known) or _are_steps(one, known.mT) for one in (steps, steps.mT))


def _are_steps(steps: Tensor, known: Tensor) -> bool:
    (rows, count), (every, length) = steps.shape, known.shape
    return rows == every and any(torch.equal(steps, known[:, at : at + count]) for at in range(length - count + 1))


def convolution(cut: GraphCut, func: Any, args: Any, kwargs: Any) -> Any:
    """Random features in place of a filter of single tokens; the input of one of several is recorded before it runs."""
    names = "input", "weight", "bias", "stride", "padding", "dilation", "groups"
    x, weight, _, stride, padding, _, groups = torch_arguments(args, kwargs, *names)
    if not isinstance(x, Tensor):
        return NotImplemented
    if "transpose" not in func.__name__ and _is_of_single_tokens(x, weight, stride, padding, groups):
        places = _LETTERS[1 : x.dim() - 1]
        made = contracted(cut, x.movedim(1, -1), weight.flatten(1), f"a{places}y", "zy", f"az{places}")
        if made is not NotImplemented:
            return made
    cut.run.convolved.append(x)
    return NotImplemented


def _is_of_single_tokens(x: Tensor, weight: Any, stride: Any, padding: Any, groups: Any) -> bool:
    """Return whether a convolution maps each token by itself, as a linear map does."""
    if not isinstance(weight, Tensor) or weight.dim() != x.dim() or weight.shape[2:].numel() != 1:
        return False

    def are_all(given: Any, usual: int) -> bool:
        values = given if isinstance(given, (tuple, list)) else (given,)
        return all(value in (None, usual) for value in values)

    return are_all(stride, 1) and are_all(padding, 0) and groups in (None, 1) and weight.shape[1] == x.shape[1]


def note_mixed_tokens(cut: GraphCut, func: Any, made: Any) -> None:
    """Record the output of a convolution or a recurrent part for each token."""
    result = made[0] if isinstance(made, tuple) else made
    if isinstance(result, Tensor) and result.requires_grad:
        cut.run.mixed_tokens.append((result, MIXING_TOKENS[func]))


# Functions that mix tokens -> the feature dimension of their outputs.
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
    lookup: ("__getitem__",),
    convolution: ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
}
