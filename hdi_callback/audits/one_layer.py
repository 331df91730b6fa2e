"""One layer at a time: within a block a layer has its weights, after it they are on the meta device again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from hdi_callback.attention import AttentionLayer
from hdi_callback.audits.sources import Source


@contextmanager
def with_weights(layer: AttentionLayer, source: Source) -> Iterator[dict[str, str]]:
    """Load the weights of a layer from the files within the block.

    Args:
        layer: a layer of the source's model.
        source: the model and its files.

    Yields:
        Name of a parameter within the layer -> why it could not be loaded.
    """
    if source.stored is None:
        yield {}
        return
    prefix = next(name for name, module in source.model.named_modules() if module is layer.module)
    missing: dict[str, str] = {}
    wanted: dict[str, tuple[nn.Module, str, Tensor]] = {}
    for owner_name, owner in layer.module.named_modules():
        for name, tensor in [*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False)]:
            inner = f"{owner_name}.{name}" if owner_name else name
            full = f"{prefix}.{inner}" if prefix else inner
            if not tensor.is_meta:
                continue
            if full in source.places:
                wanted[full] = (owner, name, tensor)
            else:
                missing[inner] = source.reasons.get(full, "it is not in the file")
    values = source.stored.read({source.places[full] for full in wanted})
    replaced = []
    try:
        for full, (owner, name, tensor) in wanted.items():
            value = values[source.places[full]]
            inner = full.removeprefix(f"{prefix}.") if prefix else full
            if value.shape != tensor.shape:
                missing[inner] = f"it is {tuple(value.shape)} in the file and {tuple(tensor.shape)} in the model"
            elif tensor.is_floating_point() and (not value.is_floating_point() or value.dtype.itemsize < 2):
                missing[inner] = f"it is quantised in the file ({str(value.dtype).removeprefix('torch.')})"
            else:
                _put(owner, name, value)
                replaced.append((owner, name, tensor))
        del values
        yield missing
    finally:
        for owner, name, tensor in replaced:
            _put(owner, name, tensor)


def _put(owner: nn.Module, name: str, value: Tensor) -> None:
    if name in owner._parameters:
        owner._parameters[name] = value if isinstance(value, nn.Parameter) else nn.Parameter(value, requires_grad=False)
    else:
        owner._buffers[name] = value
