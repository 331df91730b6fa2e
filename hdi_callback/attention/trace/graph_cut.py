"""`GraphCut`: what torch's functions do in a traced run.

The graph is cut where a parameter is multiplied with: the answer is a leaf of random features. A norm's factor for each
token and the mean that it subtracts are taken for constants: they leave each feature where it is. Attention is computed
by plain products, so that its queries, keys and weights are in the graph; dropout is left out, and all are chosen in
place of the top k. A map that mixes the weights of all heads after the softmax is left out as well, and noted.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hdi_callback.attention.dot_product import dot_product_scores, repeated_for_queries
from hdi_callback.attention.trace.cores import products_behind
from hdi_callback.attention.trace.draw import MOST_ELEMENTS, Draw
from hdi_callback.attention.trace.maps import MapStub
from hdi_callback.attention.trace.support import Support
from hdi_callback.attention.trace.traced_run import Leaf, TracedRun


class GraphCut(TorchFunctionMode):
    """Cuts the graph where a parameter is multiplied with, and leaves out what hides which feature goes where."""

    def __init__(
        self,
        run: TracedRun,
        draw: Draw,
        *,
        stubs: Iterable[MapStub],
        parameters: Mapping[str, nn.Parameter],
        mixing: dict[str, bool],
        keeps_means: bool,
    ) -> None:
        super().__init__()
        self.run, self.draw, self.mixing, self.keeps_means = run, draw, mixing, keeps_means
        self.before: Callable[..., Tensor] | None = None
        self.calls: dict[str, int] = {}
        self.hidden = 0  # softmaxes that ran where autograd records nothing
        self.weights: dict[int, MapStub] = {id(stub.weight): stub for stub in stubs}
        self.names = {id(one): name for name, one in parameters.items()}

    def __enter__(self) -> Any:
        self.before, MapStub.answer = MapStub.answer, self.answer
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *raised: Any) -> None:
        MapStub.answer, self.before = self.before, None  # else the last run, with its model, would live on
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        if handler is not None:
            answer = handler(self, func, args, kwargs)
            if answer is not NotImplemented:
                return answer
        return func(*args, **kwargs)

    def answer(
        self,
        parameter: str,
        taken: Tensor,
        features: int,
        *,
        module: MapStub | None = None,
        start: int = 0,
        axes: tuple[int, ...] = (),
        is_called: bool = True,
        is_of_parts: bool = False,
    ) -> Tensor:
        """Give random features for each position of the input of a map."""
        if taken.numel() // max(1, taken.shape[-1]) * features > MOST_ELEMENTS:
            raise ValueError("a traced run would take too much memory")
        if features == taken.shape[-1] and self._mixes_weights(parameter, taken):
            return taken
        call = self.calls.get(parameter, 0)
        self.calls[parameter] = call + 1
        with torch._C.DisableTorchFunction():
            drawn = self.draw(parameter, call, (*taken.shape[:-1], features)).requires_grad_()
        original = None if module is None else module.original[0]
        taken = taken if torch.is_grad_enabled() else taken.detach()  # a view of what has a gradient claims one
        self.run.leaves.append(Leaf(parameter, drawn, taken, start, axes, original, is_called, is_of_parts))
        return drawn.clone(memory_format=torch.contiguous_format)

    def _mixes_weights(self, parameter: str, taken: Tensor, dim: int = -1) -> bool:
        """Recognise what takes the weights of attention, those of all heads for a pair of tokens; note it."""
        node = taken.grad_fn
        while node is not None and "Softmax" not in node.name():
            is_view = any(node.name().startswith(kind) for kind in _VIEWS)
            node = node.next_functions[0][0] if is_view and len(node.next_functions) == 1 else None
        scores = None if node is None else self.run.scores.get(node)
        if scores is None or scores.numel() != taken.numel() or not products_behind(scores):
            return False
        if parameter not in self.mixing:  # the first run tells: where maps answer nothing, nothing depends on them
            with torch._C.DisableTorchFunction():
                self.mixing[parameter] = self._is_over_heads(taken, dim)
        if not self.mixing[parameter]:
            return False
        self.run.mixed.setdefault(node, parameter.removesuffix(".weight"))
        return True

    def _is_over_heads(self, weights: Tensor, dim: int) -> bool:
        """Return whether two weights of the same pair of tokens are of different features; those of tokens are not."""
        last = weights.movedim(dim, -1)
        found = []
        for number in range(min(2, last.shape[-1])):
            one = torch.zeros(last.shape)
            one.view(-1, last.shape[-1])[-1, number] = 1.0
            support = Support.of(last, one, self.run.tensors)
            found.append({(leaf, feature) for leaf in support.masks for feature in support.features(leaf)})
        return len(found) > 1 and found[0] != found[1]

    # --- products

    def linear(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Answer in place of a product with the matrix of a map, or with some rows of it."""
        x, weight = _arguments(args, kwargs, "input", "weight")
        found = self._rows_of(weight)
        if found is None:
            stacked = self._rows_of_stack(weight)
            if stacked is None:
                return NotImplemented
            return self.answer(stacked[0], x, weight.shape[0], start=stacked[1], axes=stacked[2], is_called=False)
        if found[2] and isinstance(found[0], str):
            return NotImplemented  # a matrix that is used transposed by a plain linear map
        parameter, start, _ = found
        stub = parameter if isinstance(parameter, MapStub) else None
        name = f"{stub.path}.weight" if stub is not None else str(parameter)
        return self.answer(name, x, weight.shape[0], module=stub, start=start, is_called=False)

    def _rows_of(self, weight: Any) -> tuple[MapStub | str, int, bool] | None:
        """Return which rows of which parameter a matrix is: the parameter, its first row, whether it is transposed."""
        if not isinstance(weight, Tensor) or weight.dim() != 2:
            return None
        with torch._C.DisableTorchFunction():
            base = weight if weight._base is None else weight._base
            owner: MapStub | str | None = self.weights.get(id(base), self.names.get(id(base)))
            if owner is None or not base.is_contiguous() or base.dim() != 2:
                return None
            rows, columns = base.shape
            by_row, by_column = weight.stride()
            offset = weight.storage_offset() - base.storage_offset()
            if (by_column, by_row) == (1, columns) and weight.shape[1] == columns and offset % columns == 0:
                return owner, int(offset // columns), False
            if (by_row, by_column) == (1, columns) and weight.shape[0] == columns and offset % columns == 0:
                return owner, int(offset // columns), True
            if (by_column, by_row) == (1, columns) and weight.shape[0] == rows and offset < columns:
                return owner, int(offset), True
        return None

    def _rows_of_stack(self, weight: Any) -> tuple[str, int, tuple[int, ...]] | None:
        """Return which features of a parameter of more dims a matrix is: the parameter, the first, their dims."""
        if not isinstance(weight, Tensor) or weight.dim() != 2:
            return None
        with torch._C.DisableTorchFunction():
            base = weight._base
            name = None if base is None else self.names.get(id(base))
            if base is None or name is None or base.dim() < 3 or not base.is_contiguous():
                return None
            columns, strides = base.shape[-1], weight.stride()
            offset = int(weight.storage_offset() - base.storage_offset())
            if strides == (columns, 1) and weight.shape[1] == columns and offset % columns == 0:
                return (
                    name,
                    offset // columns,
                    tuple(range(base.dim() - 1)),
                )  # several stacks of rows, one behind another
            rows = base.shape[1]
            place, first = divmod(offset, rows * columns)
            if base.dim() == 3 and strides == (1, columns) and weight.shape[1] == rows and first < columns:
                return name, place * columns + first, (0, 2)  # one of several matrices, stored transposed
        return None

    def matmul(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Answer in place of a product with a parameter: a matrix, its transpose, or one matrix for each head."""
        x, other = _arguments(args, kwargs, "input", "other") if "mat2" not in kwargs else (args[0], kwargs["mat2"])
        if func in (torch.addmm, Tensor.addmm):
            x, other = args[1], args[2]
        if not isinstance(x, Tensor) or not isinstance(other, Tensor) or self._is_parameter(x):
            return NotImplemented
        name, is_turned = self.names.get(id(other)), False
        if name is None and other.dim() == 3:
            name, is_turned = self._turned(other)
        if name is not None and other.dim() == 3 and x.dim() >= 3 and x.shape[-3] in (1, other.shape[0]):
            if x.shape[-3] != 1 or other.shape[0] == 1:  # a matrix for each of what are heads already
                return NotImplemented if is_turned else self._of_parts(name, x, other)
            heads, _, width = other.shape
            answer = self.answer(name, x.squeeze(-3), heads * width, axes=(0, 1) if is_turned else (0, 2))
            return answer.view(*answer.shape[:-1], heads, width).movedim(-2, -3)
        return self._by_matrix(x, other)

    def _of_parts(self, name: str, x: Tensor, stack: Tensor) -> Any:
        """Answer in place of a product of parts of tokens ``(..., H, n, d)`` with a matrix each, ``(H, d, width)``."""
        if stack.shape[0] == 1 or x.dim() < 3 or self._is_made_of_maps(x):
            return NotImplemented
        heads, _, width = stack.shape
        taken = x.movedim(-3, -2).flatten(-2)
        answer = self.answer(name, taken, heads * width, axes=(0, 2), is_of_parts=True)
        return answer.view(*answer.shape[:-1], heads, width).movedim(-2, -3)

    def _is_made_of_maps(self, x: Tensor) -> bool:
        """Tell what maps gave, of which each head has a part already."""
        tensors = self.run.tensors
        with torch._C.DisableTorchFunction():
            if not x.requires_grad or not tensors:
                return False
            found = torch.autograd.grad(x.sum(), tensors, retain_graph=True, allow_unused=True)
        return any(one is not None for one in found)

    def _turned(self, stack: Tensor) -> tuple[str | None, bool]:
        """Recognise a whole parameter ``(H, d_k, d)`` that is used with its last two dims turned."""
        with torch._C.DisableTorchFunction():
            base = stack._base
            if base is None or base.dim() != 3 or not base.is_contiguous() or stack.shape != base.mT.shape:
                return None, False
            return (self.names.get(id(base)), True) if stack.stride() == base.mT.stride() else (None, False)

    def _by_matrix(self, x: Tensor, matrix: Tensor) -> Any:
        """Multiply with an ``(in_features, features)`` matrix."""
        if matrix.dim() != 2:
            return NotImplemented
        with torch._C.DisableTorchFunction():
            found, stacked = self._rows_of(matrix.mT), self._rows_of_stack(matrix.mT)
        if stacked is not None:
            return self.answer(stacked[0], x, matrix.shape[1], start=stacked[1], axes=stacked[2], is_called=False)
        if found is None:
            return NotImplemented
        parameter, start, is_transposed = found
        stub = parameter if isinstance(parameter, MapStub) else None
        if stub is not None and is_transposed != stub.is_transposed:
            return NotImplemented
        name = f"{stub.path}.weight" if stub is not None else str(parameter)
        axes = (1,) if is_transposed and stub is None else ()
        return self.answer(name, x, matrix.shape[1], module=stub, start=start, axes=axes, is_called=False)

    def _is_parameter(self, tensor: Tensor) -> bool:
        with torch._C.DisableTorchFunction():
            base = tensor if tensor._base is None else tensor._base
            return id(base) in self.names or id(base) in self.weights

    def einsum(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Answer in place of a contraction of a tensor with a parameter."""
        operands = args[1] if len(args) == 2 and isinstance(args[1], (tuple, list)) else args[1:]
        if not isinstance(args[0], str) or "->" not in args[0] or "." in args[0]:
            return NotImplemented
        if len(operands) == 3:
            return self._einsum_of_three(func, args[0].replace(" ", ""), operands)
        if len(operands) != 2:
            return NotImplemented
        joined, _, out = args[0].replace(" ", "").partition("->")
        terms = joined.split(",")
        names = [self.names.get(id(one)) for one in operands]
        if (names[0] is None) == (names[1] is None):
            return NotImplemented
        which = 0 if names[0] is not None else 1
        (ix, iw), (x, weight) = (terms[1 - which], terms[which]), (operands[1 - which], operands[which])
        summed = [i for i in iw if i in ix and i not in out]
        new = [i for i in iw if i not in ix]
        positions = [i for i in ix if i not in summed]
        shared = [i for i in iw if i in ix and i in out]
        if (
            len(shared) == len(summed) == len(new) == 1
            and len(iw) == 3 == len(set(iw))
            and x.dim() == len(ix) == len(out)
        ):
            order = [i for i in ix if i not in (*shared, *summed)]
            moved = x.permute([ix.index(i) for i in (*order[:-1], *shared, *order[-1:], *summed)])
            stack = weight.permute([iw.index(i) for i in (*shared, *summed, *new)])
            is_stack = (iw.index(shared[0]), iw.index(new[0])) == (0, 2) and bool(order)
            parts = self._of_parts(str(names[which]), moved, stack) if is_stack else NotImplemented
            if parts is not NotImplemented:
                made = [*order[:-1], *shared, *order[-1:], *new]
                return parts.permute([made.index(i) for i in out])
            return NotImplemented
        if len(summed) == len(new) == 1 and weight.dim() == 2 and weight.shape[0] == weight.shape[1]:
            axis = ix.index(summed[0])
            if set(out) == {*positions, *new} and self._mixes_weights(str(names[which]), x, axis):
                return x.permute([ix.index(i) if i in positions else axis for i in out])
        is_map = len(summed) + len(new) == len(iw) and new and set(new) <= set(out) and set(positions) <= set(out)
        if not is_map or not summed or x.dim() != len(ix) or len(set(iw)) < len(iw):
            return NotImplemented
        # Learned queries are met by keys in the same way; a map has as many features to take as its input gives last.
        if summed != [i for i in ix if i in summed] or ix[-1] not in summed or len(summed) > 2:
            return NotImplemented
        taken = x.permute([ix.index(i) for i in positions + summed]).flatten(len(positions))
        sizes = [weight.shape[iw.index(i)] for i in new]
        axes = tuple(iw.index(i) for i in new)
        answer = self.answer(str(names[which]), taken, math.prod(sizes), axes=axes)
        order = positions + new
        return answer.view(*answer.shape[:-1], *sizes).permute([order.index(i) for i in out])

    def _einsum_of_three(self, func: Any, formula: str, operands: Any) -> Any:
        """Contract two tensors first, then their product with a parameter, as for values, weights and output maps."""
        parameters = [place for place, one in enumerate(operands) if id(one) in self.names]
        if len(parameters) != 1:
            return NotImplemented
        joined, _, out = formula.partition("->")
        terms, (which,) = joined.split(","), parameters
        (one, left), (other, right) = [(terms[place], operands[place]) for place in range(3) if place != which]
        kept = "".join(i for i in dict.fromkeys(one + other) if i in terms[which] or i in out)
        summed = [i for i in terms[which] if i in kept and i not in out]  # what a map takes comes last
        if set(kept) == set(one + other):  # what is made of two tensors and a matrix at once
            return NotImplemented
        kept = "".join(sorted(kept, key=lambda i: summed.index(i) if i in summed else -1))
        product = torch.einsum(f"{one},{other}->{kept}", left, right)
        answer = self.einsum(func, (f"{kept},{terms[which]}->{out}", product, operands[which]), {})
        return func(formula, *operands) if answer is NotImplemented else answer

    def embedding(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Take what a table gives for ids of the inputs for inputs; what it gives for positions is none."""
        at = 1 if func is torch.embedding else 0
        ids = args[at] if len(args) > at else kwargs.get("indices" if at else "input")
        answer = func(*args, **kwargs)
        if not isinstance(ids, Tensor) or not any(_are_those(ids, known) for known in self.run.ids):
            return answer
        leaf = answer.detach().requires_grad_()
        self.run.others[f"input table {len(self.run.others)}"] = leaf
        return leaf * 1.0

    # --- attention

    def softmax(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Note what a softmax is of."""
        scores = args[0] if args else kwargs["input"]
        answer = func(*args, **kwargs)
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        self.note(scores if dim is None else scores.movedim(dim, -1), answer)
        return answer

    def note(self, scores: Any, answer: Any) -> None:
        """Keep the input of a softmax, with what it adds up last."""
        self.hidden += not torch.is_grad_enabled()
        node = getattr(answer, "grad_fn", None)
        while node is not None and "Softmax" not in node.name():
            node = node.next_functions[0][0] if len(node.next_functions) == 1 else None
        if node is not None and isinstance(scores, Tensor):
            self.run.scores[node] = scores

    def attention(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Write scaled dot-product attention out, so that scores and weights are in the graph."""
        return self._attend(*args, **kwargs)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if enable_gqa:
            key, value = repeated_for_queries(query, key, value)
        # With a finite score for what is hidden, a row without any key has an average of all.
        scores = dot_product_scores(query, key, attn_mask, is_causal=is_causal, scale=scale, hidden=-1e9)
        weights = scores.softmax(-1)
        self.note(scores, weights)
        return weights @ value

    def torch_attention(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Trace through torch's own function, which asks for modes before it does anything."""
        with self:
            return _LOOKED_INTO(*args, **kwargs)

    # --- what leaves features where they are

    def dropout(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Leave dropout out."""
        return args[0] if args else kwargs["input"]

    def top(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Choose all in place of the top k."""
        kwargs = dict(kwargs)
        dim = kwargs.get("dim", args[2] if len(args) > 2 else -1)
        if "k" in kwargs:
            kwargs["k"] = args[0].shape[dim]
        else:
            args = (args[0], args[0].shape[dim], *args[2:])
        return func(*args, **kwargs)

    def statistic(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A factor for each token is a constant, and so is a mean over features."""
        answer = func(*args, **kwargs)
        if not isinstance(answer, Tensor):
            return answer
        dim = kwargs.get("dim", next((one for one in args[1:] if isinstance(one, (int, tuple, list))), None))
        if func in (Tensor.norm, torch.norm):
            dim = kwargs.get("dim", args[2] if len(args) > 2 else None)
        dims = tuple(dim) if isinstance(dim, (tuple, list)) else (dim,)
        last = {-1, args[0].dim() - 1}
        if not kwargs.get("keepdim", answer.dim() == args[0].dim()) or not set(dims) & last:
            return answer
        is_of_sizes = bool((args[0].detach() >= 0).all())
        if func in (torch.mean, Tensor.mean) and not is_of_sizes:
            self.run.centred = True
            self.run.normed.append(args[0])
            return answer if self.keeps_means else answer.detach()
        if func in (torch.sum, Tensor.sum) and not is_of_sizes:  # of products, as of two vectors
            return answer
        self.run.normed.append(args[0])
        return answer.detach()

    def rounded(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Keep numbers of half the digits whole, as what is small would be lost in them."""
        answer = func(*args, **kwargs)
        is_half = isinstance(answer, Tensor) and answer.dtype in (torch.float16, torch.bfloat16)
        if is_half and isinstance(args[0], Tensor) and args[0].is_floating_point():
            return args[0].float()
        return answer

    def factor(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Take the factor of a norm for a constant."""
        return func(*args, **kwargs).detach()

    def convolution(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Note what is convolved, before it is."""
        x, _ = _arguments(args, kwargs, "input", "weight")
        if isinstance(x, Tensor):
            self.run.convolved.append(x)
        return NotImplemented

    def layer_norm(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Write `layer_norm` out, its mean and its scale constants."""
        x, shape, weight, bias, eps = _arguments(args, kwargs, "input", "normalized_shape", "weight", "bias", "eps")
        dims = tuple(range(-len(shape), 0))
        return self._normed(x, dims, weight, bias, 1e-5 if eps is None else eps, has_mean=True)

    def rms_norm(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Write `rms_norm` out, its scale a constant."""
        x, shape, weight, eps = _arguments(args, kwargs, "input", "normalized_shape", "weight", "eps")
        return self._normed(x, tuple(range(-len(shape), 0)), weight, None, eps or 1e-6, has_mean=False)

    def _normed(self, x: Tensor, dims: Any, weight: Any, bias: Any, eps: float, *, has_mean: bool) -> Tensor:
        self.run.normed.append(x)
        mean = x.mean(dims, keepdim=True) if has_mean else torch.zeros(())
        if has_mean:
            self.run.centred = True
            mean = mean if self.keeps_means else mean.detach()
        centred = x - mean
        out = centred * (centred.detach().square().mean(dims, keepdim=True) + eps).rsqrt()
        out = out if weight is None else out * weight
        return out if bias is None else out + bias

    def group_norm(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Write `group_norm` out, its mean and its scale constants."""
        x, groups, weight, bias, eps = _arguments(args, kwargs, "input", "num_groups", "weight", "bias", "eps")
        parts = x.unflatten(1, (groups, -1))
        normed = self._normed(parts, tuple(range(2, parts.dim())), None, None, eps or 1e-5, has_mean=True)
        out = normed.flatten(1, 2)
        shape = (1, -1, *[1] * (x.dim() - 2))
        out = out if weight is None else out * weight.view(shape)
        return out if bias is None else out + bias.view(shape)

    def largest(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The largest of all, which is taken from all scores, moves none of them against another."""
        with torch._C.DisableTorchFunction():
            return func(*args).detach() if len(args) == 1 and not kwargs else NotImplemented

    def normalize(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Divide by the norm of each token as by a constant."""
        x, p, dim = _arguments(args, kwargs, "input", "p", "dim")
        if x.dim() and (dim is None or dim % x.dim() == x.dim() - 1 or x.dim() > 3):
            self.run.normed.append(x)
            size = torch.linalg.vector_norm(x.detach(), p or 2.0, 1 if dim is None else dim, keepdim=True)
            return x / size.clamp_min(1e-12)
        return NotImplemented


def _are_those(ids: Tensor, known: Tensor) -> bool:
    """Recognise ids of the inputs, in whatever shape; a table of positions is asked for others."""
    same = ids.numel() == known.numel() and torch.equal(ids.flatten().to(known.dtype), known.flatten())
    counted = torch.arange(ids.shape[-1], dtype=known.dtype) if ids.dim() else known
    return same and not torch.equal(ids.reshape(-1)[: ids.shape[-1] if ids.dim() else 1].to(known.dtype), counted)


def _arguments(args: Any, kwargs: Any, *names: str) -> tuple[Any, ...]:
    return tuple(args[i] if len(args) > i else kwargs.get(name) for i, name in enumerate(names))


# The same code with an answer of its own to whether a mode is there.
_LOOKED_INTO = types.FunctionType(
    F.multi_head_attention_forward.__code__,
    {**vars(F), "has_torch_function": lambda *_: False},
    F.multi_head_attention_forward.__name__,
    F.multi_head_attention_forward.__defaults__,
    F.multi_head_attention_forward.__closure__,
)

# Nodes that leave numbers as they are, in another shape.
_VIEWS = (
    "Alias",
    "Clone",
    "Permute",
    "Reshape",
    "Slice",
    "Squeeze",
    "ToCopy",
    "Transpose",
    "Unsafe",
    "Unsqueeze",
    "View",
)

_FUNCTIONS: tuple[tuple[Callable[..., Any], tuple[Any, ...]], ...] = (
    (GraphCut.linear, (F.linear,)),
    (GraphCut.matmul, (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, torch.addmm, Tensor.addmm)),
    (GraphCut.einsum, (torch.einsum,)),
    (GraphCut.embedding, (F.embedding, torch.embedding)),
    (GraphCut.softmax, (F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax)),
    (GraphCut.attention, (F.scaled_dot_product_attention,)),
    (GraphCut.torch_attention, (F.multi_head_attention_forward,)),
    (GraphCut.dropout, (F.dropout, torch.dropout)),
    (GraphCut.top, (torch.topk, Tensor.topk)),
    (GraphCut.layer_norm, (F.layer_norm, torch.layer_norm)),
    (GraphCut.rms_norm, (F.rms_norm, torch.rms_norm)),
    (GraphCut.group_norm, (F.group_norm,)),
    (GraphCut.normalize, (F.normalize,)),
    (GraphCut.rounded, (Tensor.to, Tensor.half, Tensor.bfloat16, Tensor.type, Tensor.type_as)),
    (GraphCut.largest, (torch.max, Tensor.max)),
    (GraphCut.factor, (torch.rsqrt, Tensor.rsqrt)),
    (
        GraphCut.convolution,
        (F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
    ),
    (
        GraphCut.statistic,
        (
            torch.mean, Tensor.mean, torch.sum, Tensor.sum, torch.var, Tensor.var, torch.std, Tensor.std, torch.norm,
            Tensor.norm, torch.linalg.vector_norm, torch.linalg.norm, torch.amax, Tensor.amax,
        ),
    ),
)  # fmt: skip
_HANDLERS: dict[Any, Callable[..., Any]] = {func: handler for handler, functions in _FUNCTIONS for func in functions}
