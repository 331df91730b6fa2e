"""One forward, written down as operations on memory.

A `Tape` is a dispatch mode around a forward. It writes down each operation that makes or changes memory: which
storages it took, through which geometry, and what it wrote. Views are no operations: a tensor is a part of a storage
(`View`). A storage has another content after each write (`Cell`), so that slices that are assigned and operations in
place need no rule. Nothing is computed a second time, no floating point value is looked at, and the forward's own
operations, random states and gradients stay as they are.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from hdi_callback.attention import operations as ops
from hdi_callback.attention.calls import module_of, running_frames, running_module
from hdi_callback.attention.flex import FlexCall
from hdi_callback.attention.normalisers import Normaliser, Normalisers
from hdi_callback.attention.releases import FLEX, Mode, arguments_of, passed_on

# What a cell is: of neither parameters nor data (buffers, zeros); a parameter itself; made of parameters alone; of what
# the model is given. What is made of several is the last of them.
CONSTANT, WEIGHT, MADE, DATA = range(4)
_DRAWN = {"bernoulli", *ops.RANDOM}
_PLACED = ops.SOFTMAX_LIKE | ops.WHOLE_LAYERS | ops.BATCHED | ops.CUMULATIVE | ops.FUSED.keys()
_KEPT = 64  # of masks and factors so many queries and keys are kept, of the first 8 sequences and heads
# Arguments with such names say which tokens are padding, or by a position of 0 where documents start.
_PADDING = ("pad", "attention_mask", "key_mask", "position_ids", "cu_seq")
_Node = TypeVar("_Node")


@dataclass(eq=False, repr=False)
class Cell:
    """The content of a storage from one write to the next."""

    numel: int
    itemsize: int
    kind: int
    parameter: str | None = None  # also of a weight that is computed: see `Products`
    buffer: str | None = None
    step: Step | None = None  # what wrote it
    written: View | None = None  # which part of it the step wrote
    before: Cell | None = None  # the content that it was written over
    is_mapped: bool = False  # whether a parameter takes part in it
    users: list[Step] = field(default_factory=list)

    @property
    def inputs(self) -> list[Cell]:
        """The contents that it is made of."""
        views = [] if self.step is None else self.step.inputs
        return [view.cell for view in views] + ([] if self.before is None else [self.before])


def walk_back(nodes: Iterable[_Node], inputs: Callable[[_Node], Iterable[_Node]]) -> Iterator[_Node]:
    """Return nodes of a graph, as contents, and all that `inputs` finds before them, each once."""
    todo, met = list(nodes), set[_Node]()
    while todo:
        node = todo.pop()
        if node not in met:
            met.add(node)
            yield node
            todo += inputs(node)


class WalkOn:
    """The steps that use some contents, in their order; those after a step only if it is followed."""

    def __init__(self, cells: Iterable[Cell], most: int) -> None:
        self.met: set[Cell] = set()  # the contents so far
        self._todo: list[tuple[int, Step]] = []
        self._most = most
        for cell in cells:
            self._add(cell)

    def __iter__(self) -> Iterator[Step]:
        done = set[int]()
        while self._todo and len(done) < self._most:
            number, step = heapq.heappop(self._todo)
            if number not in done:
                done.add(number)
                yield step

    def follow(self, step: Step) -> None:
        """Go on to what uses the outputs of a step."""
        for view in step.outputs:
            if view is not None and view.is_float:
                self._add(view.cell)

    def _add(self, cell: Cell) -> None:
        self.met.add(cell)
        for user in cell.users:
            heapq.heappush(self._todo, (user.number, user))


@dataclass(eq=False, repr=False)
class View:
    """A tensor: a part of a cell."""

    cell: Cell
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    itemsize: int
    is_float: bool
    value: Tensor | None = None  # of indices, and the beginning of masks and factors

    def seen_as(self, shape: tuple[int, ...], stride: tuple[int, ...], offset: int | None = None) -> View:
        """Return the same memory in another geometry."""
        at = self.offset if offset is None else offset
        return View(self.cell, shape, stride, at, self.itemsize, self.is_float)

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)

    @property
    def mT(self) -> View:  # noqa: N802  as of a tensor
        """The last two dimensions exchanged."""
        *shape, rows, columns = self.shape
        *stride, down, along = self.stride
        return self.seen_as((*shape, columns, rows), (*stride, along, down))


@dataclass(eq=False, repr=False)
class Step:
    """An operation that made or changed memory."""

    number: int
    op: str  # "bmm"; operations that are not torch's with their namespace: "flash_attn::_flash_attn_forward"
    function: Any
    args: tuple[Any, ...]  # with views in place of tensors
    kwargs: dict[str, Any]
    path: str | None  # the module that ran, of operations that may be attention
    line: str  # where its forward called it
    inputs: list[View]
    outputs: list[View | None] = field(default_factory=list)
    module: str | None = None  # that ran, of what depends on parameters and data, or is drawn
    normaliser: Normaliser | None = None  # how it makes weights of scores
    padding: dict[str, Tensor] = field(default_factory=dict)  # masks of tokens that the forwards around it were given
    ordinal: int = -1  # its number among the softmaxes and fused attentions, or matmuls of batches, of that module

    def __repr__(self) -> str:
        where = f" in `{self.path}`" if self.path is not None else ""
        return f"<Step {self.number} {self.op}{where}: {[view.shape for view in self.inputs]}>"

    @property
    def arguments(self) -> dict[str, Any]:
        """All arguments by name, with the defaults of the operation."""
        has_schema = hasattr(self.function, "_schema")
        return arguments_of(self.function, self.args, self.kwargs) if has_schema else self.kwargs

    def argument(self, name: str, default: Any = None) -> Any:
        """Return an argument by its name."""
        return self.arguments.get(name, default)

    @property
    def output(self) -> View:
        """Its first tensor."""
        return next(view for view in self.outputs if view is not None)

    @property
    def is_recognised(self) -> bool:
        """Whether a forward that is watched recognises it as attention."""
        return self.op in ops.SOFTMAXES or ops.FUSED.get(self.op) == "b h q"

    @property
    def is_pointwise(self) -> bool:
        """Whether torch says that each element depends on that of the same place alone."""
        return torch.Tag.pointwise in getattr(self.function, "tags", ())


class Tape(Mode):
    """Writes down a forward of a model, around which it is entered."""

    def __init__(self, model: nn.Module, on_step: Callable[..., None] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model, self._on_step = model, on_step
        self.steps: list[Step] = []
        self.counts: Counter[tuple[str | None, bool]] = Counter()  # what `Step.ordinal` counts, by `Site.place`
        self.errors: list[str] = []  # what could not be written down, in words; the forward itself never fails of it
        self.names: list[str] = []  # of parameters and feature ranges, in the order of their first numbers
        self.places: dict[str, int] = {}
        self.first: list[int] = []  # the number of the first element of each: all elements have numbers of their own
        self.end = 1
        # Of sharded parameters this rank's shape, and where it begins.
        self.local: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self.read_out: list[Cell] = []  # of which the forward has read numbers, as `Tensor.item` does
        self.recipes: dict[str, Any] = {}  # a weight that is computed -> its `Recipe`, or why there is none
        # A storage's address is not used again while it is held.
        self._cells: dict[int, tuple[StorageWeakRef, Cell]] = {}
        self.normalisers = Normalisers()
        # As they are now: the model may be changed, and evaluated, until the tape is read.
        self.modules = dict(model.named_modules())
        self.training = {name for name, module in self.modules.items() if module.training}
        self._paths = {module: name for name, module in self.modules.items()}
        with torch._C.DisableTorchFunction():  # modes of the user's see nothing of it
            self.shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
            for name, parameter in model.named_parameters():
                self._add(name, parameter, WEIGHT)
            for name, buffer in model.named_buffers():
                self._add(name, buffer, CONSTANT)

    def _add(self, name: str, tensor: Tensor, kind: int) -> None:
        numel = tensor.numel()
        if isinstance(tensor, DTensor):
            tensor = self._of_this_rank(name, tensor)
        key = storage_key(tensor)
        if key is None or key in self._cells:
            return
        cell = Cell(_numel(tensor), tensor.element_size(), kind)
        if kind == WEIGHT:
            self.add_weight(name, cell, max(numel, cell.numel))
        else:
            cell.buffer = name
        self._hold(key, tensor, cell)

    def add_weight(self, name: str, cell: Cell, numel: int) -> None:
        """Number the elements of a parameter, or of a weight that is computed from some."""
        cell.parameter, cell.is_mapped = name, True
        self.places[name] = self.add_range(name, numel)

    def add_range(self, name: str, count: int) -> int:
        """Return the place in `names` of a new range of numbers."""
        self.names.append(name)
        self.first.append(self.end)
        self.end += count
        return len(self.names) - 1

    def unread_parameters(self) -> set[str]:
        """Return the parameters that nothing takes in training; none of what shares memory, nor in evaluation."""
        cells = [*(view.cell for step in self.steps for view in step.inputs), *self.read_out]
        is_known = "" in self.training
        return {name for name in self.places if is_known and name in self.shapes} - {cell.parameter for cell in cells}

    def _of_this_rank(self, name: str, tensor: DTensor) -> Tensor:
        shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        self.local[name] = tuple(shape), tuple(offset)
        return tensor._local_tensor

    def _hold(self, key: int, tensor: Tensor, cell: Cell) -> None:
        self._cells[key] = StorageWeakRef(tensor.untyped_storage()), cell

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # DTensor asks for operations on the part of this rank, which come here
        if torch.is_inference_mode_enabled() and _is_composite(func):  # in training they come in parts
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        out = passed_on(func, args, kwargs) if (is_view := getattr(func, "is_view", False)) else None
        flex = FlexCall(*args) if func is FLEX else None
        name = op_name(func) if flex is None else ops.FUSED_FLEX
        inputs, options = (args, kwargs) if flex is None else (args[:3], _of_flex(flex))
        try:
            with torch._C.DisableTorchFunction():  # modes of the user's see nothing of what is written down
                keys = {storage_key(tensor) for tensor in tensors_in((args[:1], out))} if is_view else set()
                if len(keys) == 1 and not self.local and keys <= self._cells.keys():
                    return out  # parts of its first argument alone, and so no step
                read = list[View]()
                views, named_views = mapped((inputs, options), Tensor, partial(self._view, op=name, read=read))
        except Exception as error:
            self.errors.append(f"{name}: {type(error).__name__}: {error}")
            return out if is_view else passed_on(func, args, kwargs)
        out = out if is_view else passed_on(func, args, kwargs) if flex is None else flex.run()
        try:
            with torch._C.DisableTorchFunction():
                step = self._write(func, name, inputs, options, views, named_views, read, out)
                if step is not None:
                    self.normalisers.look(step, tensors_in((inputs, tuple(options.values()))), tensors_in((out,)))
                if self._on_step is not None:
                    self._on_step(step, func, args, kwargs, out)
        except Exception as error:
            self.errors.append(f"{name}: {type(error).__name__}: {error}")
        return out

    def _view(self, tensor: Tensor, op: str = "", read: list[View] | None = None) -> View | None:
        key = storage_key(tensor)
        if key is None:
            return None
        if self.local and (cell := self._put_together(key, tensor)) is not None:
            self._hold(key, tensor, cell)
        if key not in self._cells:
            cell = Cell(_numel(tensor), tensor.element_size(), DATA)
            self._hold(key, tensor, cell)
            cell.written = self._view(tensor)
        cell = self._cells[key][1]
        is_float = tensor.is_floating_point() or tensor.is_complex()
        value = _value(tensor, op, cell, is_float=is_float) if op and not tensor.is_meta else None
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        view = View(cell, shape, stride, int(tensor.storage_offset()), tensor.element_size(), is_float, value)
        if read is not None:
            read.append(view)
        return view

    def _put_together(self, key: int, tensor: Tensor) -> Cell | None:
        """Return the cell of a parameter that lies elsewhere while its module runs, as FSDP gathers it."""
        outer = running_module(self._paths)
        module = None if outer is None else self.modules[outer]
        for name, parameter in module.named_parameters(recurse=False) if module is not None else ():
            path = f"{outer}.{name}".lstrip(".")
            if path not in self.local:
                continue
            local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
            if storage_key(local) == key:
                if isinstance(parameter, DTensor):
                    self._of_this_rank(path, parameter)
                else:
                    self.local[path] = tuple(parameter.shape), (0,) * parameter.dim()
                cell = self._cells.get(key, (None, None))[1]
                if cell is not None and cell.parameter == path:
                    return cell
                return Cell(_numel(tensor), tensor.element_size(), WEIGHT, path, is_mapped=True)
        return None

    def _write(
        self, func: Any, op: str, args: tuple[Any, ...], kwargs: Any, views: tuple[Any, ...], options: Any,
        inputs: list[View], out: Any
    ) -> Step | None:  # fmt: skip
        written = [tensor for tensor in written_tensors(func, args, kwargs) if storage_key(tensor) is not None]
        cells = {id(view.cell) for view in inputs}
        outs = out if isinstance(out, (tuple, list)) else (out,)
        fresh = [item if isinstance(item, Tensor) and self._is_fresh(item, cells) else None for item in outs]
        if op == "_local_scalar_dense":
            self.read_out += [view.cell for view in inputs]
        is_new = any(tensor is not None for tensor in fresh)  # some return a tensor and write into others
        if (not written or op in ops.RESHAPED_IN_PLACE) and not is_new:
            return None  # a view
        is_product = op == "sum" and any(view.cell.step is not None and view.cell.step.op == "mul" for view in inputs)
        path, line, padding = self._place("bmm" if is_product else op)
        step = Step(len(self.steps), op, func, views, options, path, line, inputs, padding=padding)
        self.steps.append(step)
        if step.is_recognised or op in ops.BATCHED:
            step.ordinal = self.counts[path, op in ops.BATCHED]
            self.counts[path, op in ops.BATCHED] += 1
        for view in inputs:
            view.cell.users.append(step)
        kind = max((view.cell.kind for view in inputs), default=CONSTANT)
        kind = DATA if op in ops.RANDOM else CONSTANT if op in ops.SHAPED_LIKE else MADE if kind == WEIGHT else kind
        for tensor in fresh if is_new or not written else ():
            step.outputs.append(None if tensor is None else self._new_content(tensor, step, kind, is_change=False))
        step.outputs += [self._new_content(tensor, step, kind, is_change=True) for tensor in written]
        contents = [view.cell for view in step.outputs if view is not None and view.is_float]
        if op in _DRAWN or any(cell.is_mapped and cell.kind == DATA for cell in contents):
            step.module = running_module(self._paths)
        return step

    def _is_fresh(self, tensor: Tensor, cells: set[int]) -> bool:
        key = storage_key(tensor)
        return key is not None and (key not in self._cells or id(self._cells[key][1]) not in cells)

    def _new_content(self, tensor: Tensor, step: Step, kind: int, *, is_change: bool) -> View | None:
        key = storage_key(tensor)
        if key is None:
            return None
        before = self._cells[key][1] if is_change and key in self._cells else None
        is_mapped = any(view.cell.is_mapped for view in step.inputs)
        kind = max(kind, before.kind if before else CONSTANT)
        cell = Cell(_numel(tensor), tensor.element_size(), kind, step=step, before=before, is_mapped=is_mapped)
        self._hold(key, tensor, cell)
        cell.written = self._view(tensor)
        return cell.written

    def _place(self, op: str) -> tuple[str | None, str, dict[str, Tensor]]:
        """Return which module runs what may be attention, on which line, and its masks of tokens, from the stack."""
        path, line, padding = None, "", dict[str, Tensor]()
        for frame in running_frames() if op in _PLACED or "::" in op else ():
            code = frame.f_code
            module = module_of(frame, self._paths)
            if module is not None:
                padding = {**_padding_given(frame), **padding}
                if path is None:
                    path, line = self._paths[module], line or f"{code.co_filename}:{frame.f_lineno}"
            is_torch = "torch" in code.co_filename.replace("\\", "/").split("/")
            if not (line or is_torch or code.co_filename == __file__):
                line = f"{code.co_filename}:{frame.f_lineno}"
        return path, line, padding


def _padding_given(frame: Any) -> dict[str, Tensor]:
    """Return arguments of a forward that say which tokens ``(batch, tokens)`` are padding."""
    code, values = frame.f_code, frame.f_locals
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    tensors = {name: values.get(name) for name in names if any(word in name for word in _PADDING)}
    with _disable_current_modes() if tensors else nullcontext():
        masks = {
            name: mask.detach()
            for name, mask in tensors.items()
            if type(mask) is Tensor and mask.dim() in {1, 2} and not mask.is_floating_point() and not mask.is_meta
        }
        for name in [name for name, mask in masks.items() if mask.dim() == 1]:  # where documents in a row end
            ends = masks.pop(name)
            if "cu_seq" in name and len(ends) > 1:
                masks[f"position_ids of {name}"] = ~torch.isin(torch.arange(_KEPT, device=ends.device), ends)[None]
        return {name: mask[:8, :_KEPT].bool() for name, mask in masks.items()}


@lru_cache(maxsize=1024)
def op_name(func: Any) -> str:
    """Return the name of an operation, the same for one that works in place."""
    packet = getattr(func, "overloadpacket", None)
    if packet is None:  # of operations that take functions
        return str(func.name()) if callable(getattr(func, "name", None)) else str(func)
    name = str(packet.__name__)
    name = name[:-1] if name.endswith("_") and not name.endswith("__") else name
    return name if func.namespace in {"aten", "prims"} else f"{func.namespace}::{name}"


def _of_flex(flex: FlexCall) -> dict[str, Any]:
    """Return the arguments of FlexAttention as those of another fused attention: the mask is evaluated on a grid."""
    sizes = min(8, len(flex.query)), min(8, flex.query.shape[1])
    places = (torch.arange(min(_KEPT, tensor.shape[2]), device=flex.query.device) for tensor in (flex.query, flex.key))
    options: dict[str, Any] = {"scale": flex.scale}
    with torch.no_grad(), _disable_current_modes():
        queries, keys = places
        mask = flex.visible(queries, keys, batch=sizes[0], heads=sizes[1])
        if not bool(mask.all()):
            options["attn_mask"] = mask.clone()
        if flex.changes_scores:  # what it makes of a score of zero
            options["score_mod"] = flex.changes_scores
            options["score_bias"] = flex.changed(torch.zeros(*mask.shape, device=mask.device), queries)
    return options


def _is_composite(func: Any) -> bool:
    return (
        isinstance(func, torch._ops.OpOverload)
        and func._can_decompose()
        and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    )


def _value(tensor: Tensor, op: str, cell: Cell, *, is_float: bool) -> Tensor | None:
    """Return a copy of an index or number, or of the beginning of a mask or factor; else `None`."""
    is_mask = op in ops.MASKS or ops.FUSED.get(op) == "b h q"
    is_number = cell.numel == 1 and not cell.is_mapped
    if not is_number and ((is_float and not is_mask) or (is_mask and cell.is_mapped)):
        return None
    dims = tensor.dim()
    with _disable_current_modes():  # modes of the user's see nothing of it
        part = tuple(slice(_KEPT if dim >= dims - 2 else 8) for dim in range(dims)) if is_mask else ...
        part = (slice(1),) * dims if is_number else part  # perhaps it is broadcast
        return tensor.detach()[part].clone()


def storage_key(tensor: Tensor) -> int | None:
    """Return what tells the storage of a tensor from others; `None` for a tensor without memory."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None


def _numel(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes() // max(1, tensor.element_size())


_Item = TypeVar("_Item", Tensor, View)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Return the tensors in lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def written_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that an operation writes into."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    written: list[Tensor] = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += tensors_in(args[position] if position < len(args) else kwargs.get(argument.name))
    return written


def mapped(value: Any, kind: type[_Item], function: Callable[[_Item], Any]) -> Any:
    """Return the arguments of an operation with something in place of each tensor, or view."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, (tuple, list)):
        return tuple([mapped(item, kind, function) for item in value])
    if isinstance(value, dict):
        return {name: mapped(item, kind, function) for name, item in value.items()}
    return value
