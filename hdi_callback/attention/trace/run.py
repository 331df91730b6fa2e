"""`TracedRun`: one forward of a copy, its graph cut at the output of every linear map.

Linear maps answer with random features, whatever they are given, so that no weight is needed and every output is a
leaf of the graph. A norm's factor for each token and the mean that it subtracts are taken for constants: they leave
each feature where it is. Attention is computed by plain products, so that its queries, keys and weights are in the
graph; dropout is left out, and all are chosen in place of the top k.
"""

from __future__ import annotations

import copy
import math
import threading
import types
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from hdi_callback.attention import projections
from hdi_callback.attention.dot_product import dot_product_scores, repeated_for_queries
from hdi_callback.attention.isolation import isolated, isolated_copy

_MOST_ELEMENTS = 2**26  # of one tensor in a traced run


@dataclass(eq=False)
class Leaf:
    """What one call of a linear map gave.

    Attributes:
        parameter: dotted path of its matrix in the module that was run.
        tensor: random features, ``(..., features)``.
        taken: what the map was given, ``(..., in_features)``, one for each position.
        start: the feature of the matrix that the first of them is.
        axes: dims of the parameter that number the features, where it is no module's matrix.
        module: the map in the original, where it is a module.
        is_called: the module was called; some code uses its weight without.
    """

    parameter: str
    tensor: Tensor
    taken: Tensor
    start: int = 0
    axes: tuple[int, ...] = ()
    module: nn.Module | None = None
    is_called: bool = True


@dataclass(eq=False)
class TracedRun:
    """What one forward of a copy showed.

    Attributes:
        module: the original.
        leaves: calls of linear maps, in their order.
        others: what else values may come from, parameters and inputs: name -> tensor.
        scores: node of each softmax -> what it was given.
        spans: path of a module -> the sequence numbers of nodes that were made in one of its calls.
        outputs: tensors that came back.
        normed: what norms were given.
        convolved: what convolutions that mix positions were given, ``(batch, features, ...)``.
        centred: a LayerNorm, or code that subtracts a mean over features, was passed.
        ids: inputs of whole numbers: tokens that a table gives vectors for.
        error: the exception that ended the forward, if one did.
    """

    module: nn.Module
    leaves: list[Leaf] = field(default_factory=list)
    others: dict[str, Tensor] = field(default_factory=dict)
    scores: dict[Any, Tensor] = field(default_factory=dict)
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    normed: list[Tensor] = field(default_factory=list)
    convolved: list[Tensor] = field(default_factory=list)
    centred: bool = False
    ids: list[Tensor] = field(default_factory=list)
    error: Exception | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """The features of all leaves, in their order."""
        return [leaf.tensor for leaf in self.leaves]

    @property
    def answers(self) -> dict[tuple[str, int], Tensor]:
        """The features of all leaves, by the map and the number of its call."""
        calls: Counter[str] = Counter()
        found = {}
        for leaf in self.leaves:
            found[leaf.parameter, calls[leaf.parameter]] = leaf.tensor.detach()
            calls[leaf.parameter] += 1
        return found

    def path_of(self, node: Any) -> str:
        """Name the innermost module in whose forward a node was made.

        Args:
            node: of the graph.

        Returns:
            Its dotted path.
        """
        number = node._sequence_nr()
        around = [(end - start, -len(path), path) for path, start, end in self.spans if start < number < end]
        return min(around)[2] if around else ""


@dataclass(frozen=True)
class Draw:
    """What linear maps answer: random features, the same for the same map, call and shape.

    Attributes:
        shares: the answer is this much of one draw and this much of another.
        seed: of all draws, and of the parameters that are left.
        known: answers of a run with the same draw, which are given again in place of drawing them.
    """

    shares: tuple[float, float] = (1.0, 0.0)
    seed: int = 0
    known: Mapping[tuple[str, int], Tensor] = field(default_factory=dict, compare=False)

    def __call__(self, parameter: str, call: int, shape: tuple[int, ...]) -> Tensor:
        """Draw away from zero, and of a size that leaves products of order one both with and without a scale.

        Args:
            parameter: of the map.
            call: which of its calls.
            shape: ``(..., features)``.

        Returns:
            The answer.
        """
        known = self.known.get((parameter, call))
        if known is not None and known.shape == shape:
            return known.clone()
        drawn: Tensor = torch.zeros(shape)
        for share, number in zip(self.shares, (call, call + 999)):
            if share:
                generator = torch.Generator().manual_seed(zlib.crc32(f"{parameter} {number} {self.seed}".encode()))
                size = torch.empty(shape).uniform_(0.5, 1.5, generator=generator)
                sign = torch.randint(2, shape, generator=generator) * 2 - 1
                drawn += share * size * sign
        scaled: Tensor = drawn * float(shape[-1]) ** -0.125
        return scaled


class Traceable:
    """A copy of a module that can be run traced any number of times.

    Args:
        module: the module; it is not changed, and no matrix of a linear map is copied.

    Raises:
        IsolationError: if it cannot be copied.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.maps = linear_maps(module)
        stubs = {path: _Stub(linear, path) for path, linear in self.maps.items()}
        within = {part for linear in self.maps.values() for part in linear.modules()}
        replaced: dict[Any, Any] = {self.maps[path]: stub for path, stub in stubs.items()}
        held = {id(one) for linear in self.maps.values() for one in linear.parameters()}
        own: dict[int, Tensor] = {}
        for path, part in module.named_modules():
            if part in within:
                continue
            for name, one in part.named_parameters(recurse=False, remove_duplicate=False):
                if id(one) not in own and id(one) not in held:
                    own[id(one)] = replaced[one] = _drawn_parameter(f"{path}.{name}".removeprefix("."), one)
            for name, buffer in part.named_buffers(recurse=False):
                if buffer is not None and buffer.is_meta:
                    replaced[buffer] = _drawn_parameter(f"{path}.{name}".removeprefix("."), buffer).detach()
        # A map that lies in two places is one map; torch calls its weight by the first.
        with isolated(module):
            self.trial = isolated_copy(module, replaced)
            for part in self.trial.modules():
                object.__setattr__(part, "training", False)
            _to_float(self.trial)
            for part in self.trial.modules():
                _choose_attention(part, "eager")
        self.stubs = [part for part in self.trial.modules() if isinstance(part, _Stub)]
        self.parameters = {
            name: one for name, one in self.trial.named_parameters() if not name.endswith("_stub_weight")
        }
        for parameter in self.parameters.values():
            parameter.requires_grad_(parameter.is_floating_point())

    def run(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], draw: Draw, *, keeps_means: bool = False
    ) -> TracedRun:
        """Run it once.

        Args:
            args: by position.
            kwargs: by name.
            draw: what linear maps answer.
            keeps_means: means over features are no constants.

        Returns:
            What was seen.
        """
        run = TracedRun(self.module)
        run.others = {f"parameter {name}": one for name, one in self.parameters.items()}
        inputs = _Inputs(run)
        with isolated(self.module, seed=draw.seed), torch.enable_grad():
            args, kwargs = inputs.of(args), inputs.of(dict(kwargs))
            for stub in self.stubs:
                stub.count = 0
            mode = _Cut(run, self, draw, keeps_means)
            handles = list(_mark_spans(self.trial, run))
            try:
                with _without_checkpoints(), mode:
                    output = self._called(args, kwargs, mode)
            except Exception as error:
                output, run.error = None, error
            finally:
                for handle in handles:
                    handle.remove()
            run.outputs = [one for one in tensors_in(output) if one.requires_grad]
        return run

    def _called(self, args: Any, kwargs: Any, mode: _Cut) -> Any:
        try:
            return self.trial(*args, **kwargs)
        except KeyError as error:
            if error.args != ("eager",):
                raise
        for part in self.trial.modules():  # some know no attention but torch's own
            _choose_attention(part, "sdpa")
        return self.trial(*args, **kwargs)


def linear_maps(module: nn.Module) -> dict[str, nn.Module]:
    """Give the linear maps within a module, adapters in place of what they hold.

    Args:
        module: the module.

    Returns:
        Path within the module -> linear map, in the module's order.
    """
    found: dict[str, nn.Module] = {}
    for path, part in module.named_modules():
        if path and not any(path.startswith(f"{other}.") for other in found) and is_like_a_map(part):
            found[path] = part
    return found


def is_like_a_map(module: nn.Module) -> bool:
    """Tell what is a linear map or names itself one, as quantised ones do that hold no matrix.

    Args:
        module: any module.

    Returns:
        True if so; `projections.objection` tells whether its matrix can be read.
    """
    if projections.is_map(module):
        return True
    counts = (getattr(module, "in_features", None), getattr(module, "out_features", None))
    is_counted = all(type(count) is int for count in counts)
    return is_counted and "linear" in type(module).__name__.lower() and not isinstance(module, nn.Bilinear)


def objection_to(module: nn.Module) -> str | None:
    """Say why the matrix of a map cannot be read.

    Args:
        module: a module that `is_like_a_map`.

    Returns:
        The reason, which begins with "a" and the name of the class; `None` if it can be read.
    """
    if not projections.is_map(module):
        return f"a {type(module).__name__} of {type(module).__module__.partition('.')[0]} without a matrix that is read"
    return projections.objection(module)


def tensors_in(value: Any, depth: int = 4) -> Iterator[Tensor]:
    """Give the tensors in what a forward takes or returns.

    Args:
        value: tensors, containers and objects of them, or anything.
        depth: how deep containers are looked into.

    Yields:
        The tensors.
    """
    if isinstance(value, Tensor):
        yield value
    elif depth:
        items: Any = ()
        if isinstance(value, Mapping):
            items = value.values()
        elif isinstance(value, (tuple, list)):
            items = value
        elif hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type, types.ModuleType)):
            items = vars(value).values()
        for one in list(items):
            yield from tensors_in(one, depth - 1)


@contextmanager
def _without_checkpoints() -> Iterator[None]:
    """Let activation checkpoints of this thread run plainly: what they compute again is in no graph of the run."""
    thread = threading.get_ident()
    again, reentrant = (getattr(checkpoint, name) for name in _CHECKPOINTS)

    def plainly(*args: Any, **kwargs: Any) -> Iterator[None]:
        if threading.get_ident() == thread:
            yield
        else:
            yield from again(*args, **kwargs)

    class Plain:
        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            here = threading.get_ident() == thread
            return function(*args) if here else reentrant.apply(function, preserve, *args)

    for name, value in zip(_CHECKPOINTS, (plainly, Plain)):
        setattr(checkpoint, name, value)
    try:
        yield
    finally:
        for name, value in zip(_CHECKPOINTS, (again, reentrant)):
            setattr(checkpoint, name, value)


_CHECKPOINTS = ("_checkpoint_without_reentrant_generator", "CheckpointFunction")


# --- parts of a copy


class _Stub(nn.Module):
    """Stands in for a linear map: its size can be read, and its weight stands for the map."""

    def __init__(self, linear: nn.Module, path: str) -> None:
        super().__init__()
        self.path, self.original = path, [linear]  # in a list, so that it is no part
        self.dim = projections.feature_dim(linear) if projections.is_map(linear) else -1
        try:
            taken, given = projections.features(linear)
        except Exception:
            taken, given = linear.in_features, linear.out_features  # type: ignore[assignment]
        self.in_features, self.out_features = int(taken), int(given)
        self.in_channels, self.out_channels, self.nf = self.in_features, self.out_features, self.out_features
        self.kernel_size = getattr(linear, "kernel_size", ())
        self.strides: tuple[int, ...] = tuple(getattr(linear, "stride", ())) if self.dim < -1 else ()
        shape = getattr(linear, "weight", None)
        sizes = tuple(shape.shape) if isinstance(shape, Tensor) else (self.out_features, self.in_features)
        self.weight = torch.empty(sizes)  # never written, so that it takes no memory
        self.bias = torch.zeros(self.out_features) if isinstance(getattr(linear, "bias", None), Tensor) else None
        self.is_transposed = projections.is_transposed(linear)
        self.count = 0

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        mode = _Cut.current
        assert mode is not None
        x = x.movedim(self.dim, -1)
        for dim, stride in enumerate(self.strides):
            x = x[(slice(None),) * (dim + x.dim() - 1 - len(self.strides)) + (slice(None, None, stride),)]
        return mode.answer(f"{self.path}.weight", x, self.out_features, module=self).movedim(-1, self.dim)


def _drawn_parameter(name: str, like: Tensor) -> Tensor:
    """Draw in place of a parameter: what is the identity at first, or zero, does not stay so."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    shape = tuple(like.shape)
    if not like.is_floating_point():
        return nn.Parameter(torch.zeros(shape, dtype=like.dtype), requires_grad=False)
    if math.prod(shape) > _MOST_ELEMENTS:
        drawn = torch.randn(shape[-1:], generator=generator).mul_(shape[-1] ** -0.5).expand(shape)
    elif len(shape) < 2:
        drawn = torch.empty(shape).uniform_(0.5, 1.5, generator=generator)
    else:
        drawn = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
    return nn.Parameter(drawn)


def _to_float(trial: nn.Module) -> None:
    for part in trial.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_floating_point() and not isinstance(part, _Stub):
                part._buffers[name] = buffer.to(device="cpu", dtype=torch.float32)


def _choose_attention(module: nn.Module, name: str) -> None:
    config: Any = module.__dict__.get("config")
    if hasattr(config, "_attn_implementation"):
        config._attn_implementation = name  # the config is a copy as well


def _mark_spans(trial: nn.Module, run: TracedRun) -> Iterator[Any]:
    """Note which nodes are made in a call of which module."""
    clock = torch.zeros((), requires_grad=True)
    open_calls: list[tuple[str, int]] = []

    def now() -> int:
        with torch._C.DisableTorchFunction(), torch.enable_grad():  # a part of the forward may forbid gradients
            return int(clock.clone().grad_fn._sequence_nr())  # type: ignore[union-attr]

    for path, part in trial.named_modules():
        if isinstance(part, _Stub):
            continue

        def enter(part: nn.Module, args: Any, path: str = path) -> None:
            open_calls.append((path, now()))

        def leave(part: nn.Module, args: Any, output: Any, path: str = path) -> None:
            while open_calls:
                name, start = open_calls.pop()
                run.spans.append((name, start, now()))
                if name == path:
                    break

        yield part.register_forward_pre_hook(enter)
        yield part.register_forward_hook(leave, always_call=True)


class _Inputs:
    """Copies of arguments, whose tensors of numbers are noted as what values may come from."""

    def __init__(self, run: TracedRun) -> None:
        self.run = run
        self.known: dict[int, Tensor] = {}

    def of(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) not in self.known:
                dtype = torch.float32 if value.is_floating_point() else None
                one = value.detach().to(device="cpu", dtype=dtype).clone()
                if one.dtype in (torch.int32, torch.int64) and one.dim():
                    self.run.ids.append(one)
                if one.is_floating_point():
                    leaf = one.requires_grad_()
                    self.run.others[f"input {len(self.known)}"] = leaf
                    one = leaf * 1.0  # some code works in place
                self.known[id(value)] = one
            return self.known[id(value)]
        if type(value) in (tuple, list):
            return type(value)(self.of(item) for item in value)
        if type(value) is dict:
            return {name: self.of(item) for name, item in value.items()}
        if hasattr(value, "__dict__") and not isinstance(
            value, (nn.Module, type, types.ModuleType, types.FunctionType)
        ):
            other = copy.copy(value)
            vars(other).update({name: self.of(item) for name, item in vars(value).items()})
            return other
        return value


# --- what torch's functions do in a traced run


class _Cut(TorchFunctionMode):
    """Cuts the graph where a parameter is multiplied with, and leaves out what hides which feature goes where."""

    current: _Cut | None = None

    def __init__(self, run: TracedRun, traceable: Traceable, draw: Draw, keeps_means: bool) -> None:
        super().__init__()
        self.run, self.draw, self.keeps_means = run, draw, keeps_means
        self.before: _Cut | None = None
        self.calls: dict[str, int] = {}
        self.weights: dict[int, _Stub] = {id(stub.weight): stub for stub in traceable.stubs}
        self.names = {id(one): name for name, one in traceable.parameters.items()}

    def __enter__(self) -> Any:
        self.before, _Cut.current = _Cut.current, self
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *raised: Any) -> None:
        _Cut.current, self.before = self.before, None  # else the last run, with its model, would live on
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
        module: _Stub | None = None,
        start: int = 0,
        axes: tuple[int, ...] = (),
        is_called: bool = True,
    ) -> Tensor:
        """Give random features for each position of what a map is given."""
        if taken.numel() // max(1, taken.shape[-1]) * features > _MOST_ELEMENTS:
            raise ValueError("a traced run would take too much memory")
        call = self.calls.get(parameter, 0)
        self.calls[parameter] = call + 1
        with torch._C.DisableTorchFunction():
            drawn = self.draw(parameter, call, (*taken.shape[:-1], features)).requires_grad_()
        original = None if module is None else module.original[0]
        taken = taken if torch.is_grad_enabled() else taken.detach()  # a view of what has a gradient claims one
        self.run.leaves.append(Leaf(parameter, drawn, taken, start, axes, original, is_called))
        return drawn.clone(memory_format=torch.contiguous_format)

    # --- products

    def linear(self, func: Any, args: Any, kwargs: Any) -> Any:
        x, weight = _given(args, kwargs, "input", "weight")
        found = self._rows_of(weight)
        if found is None:
            return NotImplemented
        if found[2] and isinstance(found[0], str):
            return NotImplemented  # a matrix that is used transposed by a plain linear map
        parameter, start, _ = found
        stub = parameter if isinstance(parameter, _Stub) else None
        name = f"{stub.path}.weight" if stub is not None else str(parameter)
        return self.answer(name, x, weight.shape[0], module=stub, start=start, is_called=False)

    def _rows_of(self, weight: Any) -> tuple[_Stub | str, int, bool] | None:
        """Tell which rows of which parameter a matrix is: the parameter, its first row, whether it is transposed."""
        if not isinstance(weight, Tensor) or weight.dim() != 2:
            return None
        with torch._C.DisableTorchFunction():
            base = weight if weight._base is None else weight._base
            owner: _Stub | str | None = self.weights.get(id(base), self.names.get(id(base)))
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

    def matmul(self, func: Any, args: Any, kwargs: Any) -> Any:
        x, other = _given(args, kwargs, "input", "other") if "mat2" not in kwargs else (args[0], kwargs["mat2"])
        if func in (torch.addmm, Tensor.addmm):
            x, other = args[1], args[2]
        if not isinstance(x, Tensor) or not isinstance(other, Tensor) or self._is_parameter(x):
            return NotImplemented
        name, is_turned = self.names.get(id(other)), False
        if name is None and other.dim() == 3:
            name, is_turned = self._turned(other)
        if name is not None and other.dim() == 3 and x.dim() >= 3 and x.shape[-3] in (1, other.shape[0]):
            if x.shape[-3] != 1 or other.shape[0] == 1:  # a matrix for each of what are heads already
                return NotImplemented
            heads, _, width = other.shape
            answer = self.answer(name, x.squeeze(-3), heads * width, axes=(0, 1) if is_turned else (0, 2))
            return answer.view(*answer.shape[:-1], heads, width).movedim(-2, -3)
        return self._by_matrix(x, other)

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
            found = self._rows_of(matrix.mT)
        if found is None:
            return NotImplemented
        parameter, start, is_transposed = found
        stub = parameter if isinstance(parameter, _Stub) else None
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
        operands = args[1] if len(args) == 2 and isinstance(args[1], (tuple, list)) else args[1:]
        if not isinstance(args[0], str) or len(operands) != 2 or "->" not in args[0] or "." in args[0]:
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
        scores = args[0] if args else kwargs["input"]
        answer = func(*args, **kwargs)
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        self.note(scores if dim is None else scores.movedim(dim, -1), answer)
        return answer

    def note(self, scores: Any, answer: Any) -> None:
        """Keep what a softmax was given, what it adds up last."""
        node = getattr(answer, "grad_fn", None)
        while node is not None and "Softmax" not in node.name():
            node = node.next_functions[0][0] if len(node.next_functions) == 1 else None
        if node is not None and isinstance(scores, Tensor):
            self.run.scores[node] = scores

    def attention(self, func: Any, args: Any, kwargs: Any) -> Any:
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
        """Look into torch's own function, which asks for modes before it does anything."""
        with self:
            return _LOOKED_INTO(*args, **kwargs)

    # --- what leaves features where they are

    def dropout(self, func: Any, args: Any, kwargs: Any) -> Any:
        return args[0] if args else kwargs["input"]

    def top(self, func: Any, args: Any, kwargs: Any) -> Any:
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

    def factor(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs).detach()

    def convolution(self, func: Any, args: Any, kwargs: Any) -> Any:
        x, _ = _given(args, kwargs, "input", "weight")
        if isinstance(x, Tensor):
            self.run.convolved.append(x)
        return NotImplemented

    def layer_norm(self, func: Any, args: Any, kwargs: Any) -> Any:
        x, shape, weight, bias, eps = _given(args, kwargs, "input", "normalized_shape", "weight", "bias", "eps")
        dims = tuple(range(-len(shape), 0))
        return self._normed(x, dims, weight, bias, 1e-5 if eps is None else eps, has_mean=True)

    def rms_norm(self, func: Any, args: Any, kwargs: Any) -> Any:
        x, shape, weight, eps = _given(args, kwargs, "input", "normalized_shape", "weight", "eps")
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
        x, groups, weight, bias, eps = _given(args, kwargs, "input", "num_groups", "weight", "bias", "eps")
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
        x, p, dim = _given(args, kwargs, "input", "p", "dim")
        if x.dim() and (dim is None or dim % x.dim() == x.dim() - 1 or x.dim() > 3):
            self.run.normed.append(x)
            size = torch.linalg.vector_norm(x.detach(), p or 2.0, 1 if dim is None else dim, keepdim=True)
            return x / size.clamp_min(1e-12)
        return NotImplemented


def _are_those(ids: Tensor, known: Tensor) -> bool:
    """Tell ids of the inputs, in whatever shape; a table of positions is asked for others."""
    same = ids.numel() == known.numel() and torch.equal(ids.flatten().to(known.dtype), known.flatten())
    counted = torch.arange(ids.shape[-1], dtype=known.dtype) if ids.dim() else known
    return same and not torch.equal(ids.reshape(-1)[: ids.shape[-1] if ids.dim() else 1].to(known.dtype), counted)


def _given(args: Any, kwargs: Any, *names: str) -> tuple[Any, ...]:
    return tuple(args[i] if len(args) > i else kwargs.get(name) for i, name in enumerate(names))


# The same code with an answer of its own to whether a mode is there.
_LOOKED_INTO = types.FunctionType(
    F.multi_head_attention_forward.__code__,
    {**vars(F), "has_torch_function": lambda *_: False},
    F.multi_head_attention_forward.__name__,
    F.multi_head_attention_forward.__defaults__,
    F.multi_head_attention_forward.__closure__,
)

_FUNCTIONS: tuple[tuple[Callable[..., Any], tuple[Any, ...]], ...] = (
    (_Cut.linear, (F.linear,)),
    (_Cut.matmul, (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, torch.addmm, Tensor.addmm)),
    (_Cut.einsum, (torch.einsum,)),
    (_Cut.embedding, (F.embedding, torch.embedding)),
    (_Cut.softmax, (F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax)),
    (_Cut.attention, (F.scaled_dot_product_attention,)),
    (_Cut.torch_attention, (F.multi_head_attention_forward,)),
    (_Cut.dropout, (F.dropout, torch.dropout)),
    (_Cut.top, (torch.topk, Tensor.topk)),
    (_Cut.layer_norm, (F.layer_norm, torch.layer_norm)),
    (_Cut.rms_norm, (F.rms_norm, torch.rms_norm)),
    (_Cut.group_norm, (F.group_norm,)),
    (_Cut.normalize, (F.normalize,)),
    (_Cut.largest, (torch.max, Tensor.max)),
    (_Cut.factor, (torch.rsqrt, Tensor.rsqrt)),
    (
        _Cut.convolution,
        (F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
    ),
    (
        _Cut.statistic,
        (
            torch.mean, Tensor.mean, torch.sum, Tensor.sum, torch.var, Tensor.var, torch.std, Tensor.std, torch.norm,
            Tensor.norm, torch.linalg.vector_norm, torch.linalg.norm, torch.amax, Tensor.amax,
        ),
    ),
)  # fmt: skip
_HANDLERS: dict[Any, Callable[..., Any]] = {func: handler for handler, functions in _FUNCTIONS for func in functions}
