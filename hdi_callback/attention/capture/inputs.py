"""Capture of the inputs of layers: the tokens that their keys are made of, on armed steps, as head outputs are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from hdi_callback.attention.capture.padding import PaddingChoice
from hdi_callback.attention.capture.tap import Subject
from hdi_callback.attention.capture.taps import Taps
from hdi_callback.attention.layer.heads import AttentionLayer, HeadPieces, HeadProduct
from hdi_callback.attention.layer.projections import is_map


def tap_inputs(
    layers: Sequence[AttentionLayer], *, max_tokens: int, model: nn.Module, padding: PaddingChoice
) -> tuple[Taps, dict[str, str]]:
    """Capture the input of the key projections.

    Args:
        layers: the layers.
        max_tokens: largest number of tokens kept per layer.
        model: the model around them, whose masks show padding.
        padding: how padding is known, see `Taps`.

    Returns:
        Taps whose captures have the tokens as one head, ``(tokens, 1, in_features)``, and why layers have none.
    """
    tapped, why_not = layers_of_inputs(layers)
    return Taps(tapped, max_tokens=max_tokens, model=model, padding=padding, subject=_INPUTS), why_not


def layers_of_inputs(layers: Sequence[AttentionLayer]) -> tuple[list[AttentionLayer], dict[str, str]]:
    """Describe the input of the key projections as if it were the outputs of one head.

    Args:
        layers: the layers.

    Returns:
        Those to tap, and why others have none.
    """
    tapped, why_not = [], {}
    for layer in layers:
        projection = key_projection(layer)
        if isinstance(projection, str):
            why_not[layer.name] = projection
            continue
        key = layer.slices["key"]
        tapped.append(
            replace(
                layer,
                num_heads=1,
                num_key_heads=1,
                head_order=(),
                value_dim=key.in_features,
                slices={**layer.slices, "output": key},
                output_projection=projection,
            )
        )
    return tapped, why_not


def key_projection(layer: AttentionLayer) -> nn.Module | str:
    """Find the module whose input the keys are made of.

    Args:
        layer: the layer.

    Returns:
        The module; a reason if it is none that is called.
    """
    key = layer.slices["key"]
    if isinstance(key, HeadPieces):
        return "its keys come from several maps"
    if isinstance(key, HeadProduct) and key.gain:
        return "there is a norm between its two key projections, so that its keys are not linear in their input"
    owner = (key.inner if isinstance(key, HeadProduct) else key).owner
    if is_map(owner) or isinstance(owner, nn.MultiheadAttention):
        return owner
    return f"its key projection is a parameter of {type(owner).__name__} and not a module that is called"


def _pick_keys(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the argument that keys are computed from, ``(batch, length, features)``."""
    if not isinstance(module, nn.MultiheadAttention):
        return args[0] if args else next(iter(kwargs.values()), None)
    key = args[1] if len(args) > 1 else kwargs.get("key")
    if isinstance(key, Tensor) and key.dim() == 3 and not module.batch_first:
        return key.transpose(0, 1)
    return key


_INPUTS = Subject("inputs", "key projection", _pick_keys)
