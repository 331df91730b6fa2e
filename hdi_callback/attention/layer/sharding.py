"""Whole weights where every rank holds a part of them: FSDP2, FSDP1, DTensor tensor parallelism, DeepSpeed ZeRO-3.

One role of one layer is made whole at a time, then released. Gathering is a collective call: every rank that holds a
part gathers the same layers in the same order. For finding the layers no weight is gathered at all;
`with_global_shapes` puts stand-ins of the right shapes, without memory, in the place of the parts.

Nothing here imports FSDP, DTensor or DeepSpeed: their parameters are recognised by their attributes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hdi_callback.attention.layer.head_slice import HeadSlice
from hdi_callback.attention.layer.heads import AttentionLayer, Role

_HEAD_COUNTS = (
    "num_heads", "n_heads", "num_attention_heads", "n_head", "nhead", "heads", "num_head", "nheads", "n_h",
    "num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads", "num_key_heads",
)  # fmt: skip
_HEAD_WIDTHS = ("head_dim", "attention_head_size", "head_size", "dim_head", "d_head", "d_k", "key_value_proj_dim")

_PLAIN = (nn.Linear, nn.MultiheadAttention, nn.modules.linear.NonDynamicallyQuantizableLinear)
"""Modules whose forward multiplies with their parameter as it is."""


class Sharding:
    """The distribution of the weights of a model over ranks, and their gathering.

    Args:
        model: the model; its wrappers may come and go later, but FSDP1's must be there.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._units = [module for module in model.modules() if type(module).__name__ == "FullyShardedDataParallel"]

    def plain_owner(self, layer: AttentionLayer, role: Role) -> nn.Module | None:
        """Return torch's own module of which a weight is a parameter, or a part of one, that lies here whole.

        Args:
            layer: the layer.
            role: the role of the weight.

        Returns:
            It, if reading the weight runs torch's code alone, without other ranks; `None` otherwise.
        """
        part = layer.slices.get(role)
        if self._units or not isinstance(part, HeadSlice):
            return None
        owner = part.owner
        if type(owner) not in _PLAIN:
            return None
        parameter = owner._parameters.get(part.parameter.rpartition(".")[2])
        return owner if type(parameter) is nn.Parameter and not _is_part(parameter) else None

    def is_sharded(self, layer: AttentionLayer, role: Role) -> bool:
        """Return whether reading a weight is a collective call.

        Args:
            layer: the layer.
            role: the role of the weight.

        Returns:
            True if other ranks hold a part of the weight.
        """
        if self._unit_of(layer, role) is not None:
            return True
        return any(_is_part(parameter) for _, _, parameter in _underlying_parameters(layer, role))

    @property
    def has_parts(self) -> bool:
        """Whether other ranks hold parts of this rank's parameters."""
        own = (value for module in self._model.modules() for _, value in _own_parameters(module))
        return bool(self._units) or any(_is_part(value) for value in own)

    def weight(self, layer: AttentionLayer, role: Role) -> Tensor:
        """Read the whole weight of a role, as `AttentionLayer.weight` does where nothing is sharded.

        Args:
            layer: the layer.
            role: ``"query"``, ``"key"``, ``"value"`` or ``"output"``.

        Returns:
            ``(heads or key heads, width, in_features)``, detached; a live view where nothing is sharded.
        """
        with self.gathering(layer, role)() as must_copy:
            weight = layer.weight(role).detach()
            # Weights that FSDP1 and DeepSpeed gather are freed when the block ends.
            return weight.clone() if must_copy else weight

    def gathering(self, layer: AttentionLayer, role: Role) -> Callable[[], AbstractContextManager[bool]]:
        """Find the parts of a weight, without gathering them.

        Args:
            layer: the layer.
            role: the role of the weight.

        Returns:
            A function that gathers them while its result is entered, which is whether the weight is to be copied.
        """
        unit = self._unit_of(layer, role)
        parts = [(owner, name, value) for owner, name, value in _underlying_parameters(layer, role) if _is_part(value)]
        partitioned = [value for _, _, value in parts if hasattr(value, "ds_id")]
        distributed = [
            (owner, name, found) for owner, name, value in parts if (found := _distributed(value)) is not None
        ]

        @contextmanager
        def gather() -> Iterator[bool]:
            with ExitStack() as stack:
                if unit is not None:
                    if getattr(unit, "_is_root", False) is None:  # else the unit would take itself for the root
                        with type(self._units[0]).summon_full_params(self._units[0], recurse=False, writeback=False):  # type: ignore[attr-defined]
                            pass
                    stack.enter_context(type(unit).summon_full_params(unit, recurse=False, writeback=False))  # type: ignore[attr-defined]
                if partitioned:
                    stack.enter_context(sys.modules["deepspeed"].zero.GatheredParameters(partitioned))
                for owner, name, value in distributed:
                    stack.enter_context(_replaced(owner, name, _whole(value)))
                yield unit is not None or bool(partitioned)

        return gather

    def _unit_of(self, layer: AttentionLayer, role: Role) -> nn.Module | None:
        """The innermost FSDP1 unit around the module that holds a weight."""
        if not self._units:
            return None
        owners = {id(owner) for owner in _weight_owners(layer, role)}
        around = [unit for unit in self._units if any(id(module) in owners for module in unit.modules())]
        return min(around, key=lambda unit: sum(1 for _ in unit.modules()), default=None)


def whole(tensor: Tensor) -> Tensor:
    """Gather a tensor of which other ranks may hold a part.

    Args:
        tensor: any tensor; a collective call if it is a DTensor.

    Returns:
        All of it.
    """
    return _whole(tensor) if _is_dtensor(tensor) else tensor


def is_part(tensor: Tensor) -> bool:
    """Return whether other ranks hold a part of a tensor.

    Args:
        tensor: any tensor.

    Returns:
        True for a DTensor, which `whole` gathers.
    """
    return _is_dtensor(tensor)


def is_first_holder(tensor: Tensor) -> bool:
    """Return whether this rank speaks for the ranks that have parts of the same tensor.

    Args:
        tensor: any tensor.

    Returns:
        True on one of these ranks, and for a tensor that is not distributed.
    """
    return not _is_dtensor(tensor) or not any(tensor.device_mesh.get_coordinate() or ())  # type: ignore[attr-defined]


def as_part(outputs: Tensor, projection: nn.Module | None) -> Tensor:
    """Recognise the local heads of a tensor-parallel layer before its output projection does.

    Args:
        outputs: ``(..., features)``, what a rank passes to the projection.
        projection: the output projection.

    Returns:
        The DTensor of all heads if the projection takes its input in parts, the same tensor otherwise.
    """
    weight = getattr(projection, "weight", None)
    if weight is None or not _is_dtensor(weight) or _is_dtensor(outputs):
        return outputs
    dims = [dim for dim, placement in enumerate(weight.placements) if placement.is_shard(1)]
    if len(dims) != 1 or outputs.shape[-1] * weight.device_mesh.size(dims[0]) != weight.shape[1]:
        return outputs
    mesh = weight.device_mesh
    mesh = mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[dims[0]]]
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(outputs, mesh, [Shard(outputs.dim() - 1)], run_check=False)


def on_parts(function: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """Apply a function of rows to a tensor, part by part where its features are spread over ranks.

    Args:
        function: takes ``(..., features)`` to ``(rows, features)``, whatever the number of features.
        tensor: any tensor.

    Returns:
        ``(rows, features)``, spread as `tensor` is.

    Raises:
        ValueError: if something else than the features is spread.
    """
    if not _is_dtensor(tensor):
        return function(tensor)
    from torch.distributed.tensor import DTensor, Shard

    parts: Any = tensor
    placements = [Shard(1) if place.is_shard(parts.dim() - 1) else place for place in parts.placements]
    if not all(place.is_shard(1) or place.is_replicate() for place in placements):
        raise ValueError(f"they are spread over ranks as {parts.placements}")
    return DTensor.from_local(function(parts.to_local()), parts.device_mesh, placements, run_check=False)


@contextmanager
def with_global_shapes(model: nn.Module) -> Iterator[set[nn.Module]]:
    """Present a sharded model as whole while its layers are searched; nothing is gathered.

    Parameters become stand-ins of their whole shapes. A tensor-parallel module that states its head width and counts
    its own heads alone is made to count all of them.

    Args:
        model: the model.

    Yields:
        The tensor-parallel modules whose heads cannot be counted for sure, as they do not state their width.
    """
    uncounted: set[nn.Module] = set()
    with ExitStack() as stack:
        managed = _managed_by_fsdp2(model)
        for module in model.modules():
            degrees = {
                (int(parts.shape[0]), degree)
                for child in module.children()
                for _, value in _own_parameters(child)
                if not is_lazy(value)
                and value.dim() == 2
                and (parts := _distributed(value)) is not None
                and (degree := _tensor_parallel_degree(parts, is_managed=id(value) in managed)) > 1
            }
            if degrees:
                _count_all_heads(module, degrees, stack, uncounted)
        for owner, name, shape, like in list(_shapes(model)):
            stand_in = torch.empty((), dtype=like.dtype, device=like.device).expand(shape)
            stack.enter_context(_replaced(owner, name, nn.Parameter(stand_in, requires_grad=False)))
        yield uncounted


def _count_all_heads(
    module: nn.Module, degrees: set[tuple[int, int]], stack: ExitStack, uncounted: set[nn.Module]
) -> None:
    widths = {value for name in _HEAD_WIDTHS if isinstance(value := getattr(module, name, None), int)}
    if len(widths) != 1:
        if any(isinstance(getattr(module, name, None), int) for name in _HEAD_COUNTS):
            uncounted.add(module)
        return
    (width,) = widths
    for name in _HEAD_COUNTS:
        count = module.__dict__.get(name)
        if not isinstance(count, int) or isinstance(count, bool):
            continue
        if any(count * width * degree == rows for rows, degree in degrees) and not any(
            count * width == rows for rows, _ in degrees
        ):
            stack.callback(module.__dict__.__setitem__, name, count)
            module.__dict__[name] = count * next(iter(degrees))[1]


def _tensor_parallel_degree(parts: Any, *, is_managed: bool) -> int:
    """Over how many ranks the rows of a DTensor are split for computing; not for storing, as FSDP does."""
    # FSDP's dims of the mesh come first: copies, if any, and the one over which it stores.
    split = [dim for dim, placement in enumerate(parts.placements) if _split_dim(placement) is not None]
    computed = split[1:] if is_managed else split
    return math.prod(parts.device_mesh.size(dim) for dim in computed if _split_dim(parts.placements[dim]) == 0)


def _split_dim(placement: Any) -> int | None:
    """The dim of a tensor that is split over ranks, also where FSDP splits again what is split (`_StridedShard`)."""
    dim = getattr(placement, "dim", None)
    return dim if isinstance(dim, int) else None


def _managed_by_fsdp2(model: nn.Module) -> set[int]:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", ())
    return {id(value) for module in model.modules() if isinstance(module, kind) for value in module.parameters()}


def _shapes(model: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Size, Tensor]]:
    """Every parameter that is not whole here: owner, name, whole shape, and the part."""
    for module in model.modules():
        for name, value in _own_parameters(module):
            parts = _distributed(value)
            if parts is not None:
                yield module, name, parts.shape, parts.to_local()
            elif hasattr(value, "ds_id"):
                yield module, name, torch.Size(value.ds_shape), value  # type: ignore[attr-defined]
        handle = getattr(module, "_handle", None)
        flat = getattr(handle, "flat_param", None)
        if flat is None:
            continue
        for info, shape in zip(flat._param_infos, flat._shapes):
            yield info.module, info.param_name, torch.Size(shape), flat
        for shared in flat._shared_param_infos:
            place = next(
                place
                for place, info in enumerate(flat._param_infos)
                if info.module is shared.prim_module and info.param_name == shared.prim_param_name
            )
            yield shared.module, shared.param_name, torch.Size(flat._shapes[place]), flat


@contextmanager
def _replaced(owner: nn.Module, name: str, value: Tensor) -> Iterator[None]:
    """Replace a parameter by a tensor, without hooks or registrations being called."""
    # FSDP1 without original parameters keeps plain tensors among the attributes.
    place: dict[str, Any] = owner._parameters if name in owner._parameters else owner.__dict__
    absent = object()
    before = place.get(name, absent)
    place[name] = value
    try:
        yield
    finally:
        if before is absent:
            del place[name]
        else:
            place[name] = before


def _weight_owners(layer: AttentionLayer, role: Role) -> list[nn.Module]:
    """The modules that hold a weight: that at the end of its path, and its children (adapters, parametrizations)."""
    part = layer.slices[role]
    owner = part.module
    for step in part.parameter.split(".")[:-1]:
        child = getattr(owner, step, None)
        if not isinstance(child, nn.Module):
            break
        owner = child
    return list(owner.modules())


def _underlying_parameters(layer: AttentionLayer, role: Role) -> list[tuple[nn.Module, str, Tensor]]:
    last = layer.slices[role].parameter.rpartition(".")[2]
    found: list[tuple[nn.Module, str, Tensor]] = [
        (owner, name, value) for owner in _weight_owners(layer, role) for name, value in _own_parameters(owner)
    ]
    # Where one parameter is the whole weight, the bias beside it need not be gathered.
    named = [item for item in found if item[1] == last]
    is_whole = len(named) == 1 and len({id(owner) for owner, _, _ in found}) == 1
    # A linear map with further parameters may compute its matrix from all of them.
    is_computed = is_whole and isinstance(named[0][0], nn.Linear) and {name for _, name, _ in found} - {last, "bias"}
    return named if is_whole and not is_computed else found


def _own_parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters of a module itself; DDP over a mesh keeps them among the plain attributes during forwards."""
    yield from module.named_parameters(recurse=False)
    yield from ((name, value) for name, value in module.__dict__.items() if _is_dtensor(value))


def _is_dtensor(tensor: Any) -> bool:
    return hasattr(tensor, "full_tensor") and hasattr(tensor, "placements")


def _distributed(tensor: Tensor) -> Any:
    """The DTensor that a parameter is, or that DDP makes of it in forwards; `None` if it is neither."""
    if _is_dtensor(tensor):
        return tensor
    spec: Any = getattr(tensor, "_st_info", None)  # of a mesh with tensor parallelism: only the part is left between
    if not (hasattr(spec, "mesh") and hasattr(spec, "placements")):
        return None
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(tensor.detach(), spec.mesh, spec.placements, run_check=False)


def _is_part(tensor: Tensor) -> bool:
    return _distributed(tensor) is not None or hasattr(tensor, "ds_id")


def _whole(tensor: Any) -> Tensor:
    tensor = tensor.detach()
    mesh_device = tensor.device_mesh.device_type
    if tensor.device.type != mesh_device:  # offloaded to the host, where the mesh cannot talk
        tensor = tensor.to(mesh_device)
    gathered: Tensor = tensor.full_tensor()
    return gathered
