"""Sequences batched in a way that no graph shows, run plainly: `torch.vmap` by a loop, nested tensors padded.

Neither changes which features a head has: a loop computes the parts of `vmap` one by one, and of padded tensors only
the features are read. A `vmap` without a product with a parameter is not replaced: the graph shows all of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._functorch import apis
from torch._functorch import vmap as functorch
from torch.nn.utils.rnn import pad_sequence
from torch.utils import _pytree as pytree

from hdi_callback.attention.trace.replaced import in_this_thread, replaced

if TYPE_CHECKING:
    from hdi_callback.attention.trace.graph_cut import GraphCut

_MOST_PARTS = 64  # of one loop


def without_batching(cut: GraphCut) -> AbstractContextManager[None]:
    """Run `torch.vmap` and nested tensors of this thread plainly.

    Args:
        cut: that of the run.

    Returns:
        For the time of the run.
    """
    transforms: Any = apis
    places: list[tuple[Any, str, Any]] = [
        (transforms, "vmap_impl", _Mapped(cut)),
        *((torch.nested, name, one) for name, one in _NESTED.items()),
    ]
    return replaced(*((owner, name, in_this_thread(getattr(owner, name), plain)) for owner, name, plain in places))


class _Mapped:
    """Calls a function that is mapped for one part after the other, if it multiplies with parameters.

    Args:
        cut: of the run.
    """

    def __init__(self, cut: GraphCut) -> None:
        self.cut = cut

    def __call__(self, own: Any, func: Any, in_dims: Any, out_dims: Any, *args: Any, **kwargs: Any) -> Any:
        """Call `vmap_impl` (``args``: randomness, size of chunks, those of the function), or a loop for parameters."""
        leaves, calls = self.cut.run.leaves, dict(self.cut.calls)
        count, is_plain = len(leaves), any(isinstance(arg, Tensor) and self._is_parameter(arg) for arg in args)
        if not is_plain:
            try:
                made = own(func, in_dims, out_dims, *args, **kwargs)
            except Exception:
                is_plain = True
            else:
                is_plain = len(leaves) > count
        if is_plain:
            del leaves[count:]
            self.cut.calls.clear()
            self.cut.calls.update(calls)
            made = _looped(func, in_dims, out_dims, *args[2:], **kwargs)
        return made

    def _is_parameter(self, one: Tensor) -> bool:
        with torch._C.DisableTorchFunction():
            return self.cut.views.is_of_parameter(one)


def _looped(func: Any, in_dims: Any, out_dims: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function for one part after the other, and stack its outputs."""
    count, dims, flat, spec = functorch._process_batched_inputs(in_dims, args, func)
    if int(count) > _MOST_PARTS:
        return NotImplemented
    made = []
    for number in range(int(count)):
        parts = [tensor if dim is None else tensor.select(dim, number) for tensor, dim in zip(flat, dims)]
        made.append(func(*pytree.tree_unflatten(parts, spec), **kwargs))
    leaves, specs = zip(*(pytree.tree_flatten(output) for output in made))
    out = pytree._broadcast_to_and_flatten(out_dims, specs[0])
    if out is None or not all(isinstance(leaf, Tensor) for of in leaves for leaf in of):
        return NotImplemented
    stacked = [of[0] if dim is None else torch.stack(of, dim) for of, dim in zip(zip(*leaves), out)]
    return pytree.tree_unflatten(stacked, specs[0])


def _nested(own: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(tensors, Tensor):
        return tensors
    return _padded([tensor if isinstance(tensor, Tensor) else torch.as_tensor(tensor) for tensor in tensors])


def _of_jagged(
    own: Any, values: Tensor, offsets: Tensor | None = None, lengths: Tensor | None = None, *_: Any, **__: Any
) -> Any:
    if offsets is None:
        return _padded(torch.split(values, lengths.tolist() if lengths is not None else []))
    return _padded([values[int(start) : int(end)] for start, end in itertools.pairwise(offsets)])


def _padded(tensors: Sequence[Tensor]) -> Any:
    return pad_sequence(list(tensors), batch_first=True)


def _as_padded(own: Any, tensor: Tensor, *_: Any, **__: Any) -> Any:
    return NotImplemented if tensor.is_nested else tensor


_NESTED = {
    "nested_tensor": _nested,
    "as_nested_tensor": _nested,
    "nested_tensor_from_jagged": _of_jagged,
    "to_padded_tensor": _as_padded,
}


def to_padded(cut: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Return a tensor as it is: it was padded from the beginning."""
    return _as_padded(func, *args, **kwargs)


HANDLERS = {to_padded: ("to_padded_tensor",)}
