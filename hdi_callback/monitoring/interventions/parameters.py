"""The parameters that hold the heads of a layer."""

from __future__ import annotations

from torch import Tensor, nn

from hdi_callback.attention import AttentionLayer
from hdi_callback.errors import MisconfigurationError


def parameters_of(layer: AttentionLayer) -> list[nn.Parameter]:
    """The parameters of a layer, those of an output projection beside the module included."""
    modules = [layer.module] if layer.output_projection is None else [layer.module, layer.output_projection]
    return list({id(item): item for module in modules for item in module.parameters()}.values())


def owner_of(layer: AttentionLayer, part: Tensor) -> nn.Parameter | None:
    """The parameter that a tensor is a view of."""
    storage = part.untyped_storage().data_ptr()
    return next((item for item in parameters_of(layer) if item.untyped_storage().data_ptr() == storage), None)


def refuse_sharded(layer: AttentionLayer, name: str) -> None:
    """Raise an error if the weights of a layer are spread over ranks."""
    for item in parameters_of(layer):
        if type(item).__name__ == "DTensor" or type(item.data).__name__ == "DTensor" or hasattr(item, "ds_id"):
            raise MisconfigurationError(
                f"{name} needs whole weights, but those of `{layer.name}` are spread over ranks. Leave it out, or "
                "train data-parallel."
            )
