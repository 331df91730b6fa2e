"""Which tokens are padding: from the masks that the calls around an attention take, or as the user says.

Masks over tokens, ``(batch, length)``, are looked for from the attention outwards to the model. Where there is none, a
key that the attention itself hides from every query is padding. Nothing here waits for the device.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from hdi_callback.attention.calls import ModuleCall, running_calls

__all__ = ["PaddingChoice", "TokenMask", "find_padding"]

PaddingChoice = Literal["auto"] | int | Callable[..., Any] | None
"""How padding is known: from masks, by the token that is padding, by a function of the model's arguments, or not."""

HIDDEN = -1e3
"""What is added to the score of a key that is hidden is less: -10000, the smallest number, minus infinity."""

# Names of masks over tokens. True, or minus infinity, where a token is padding:
_OF_PADDING = {
    "key_padding_mask", "padding_mask", "pad_mask", "src_key_padding_mask", "tgt_key_padding_mask",
    "decoder_padding_mask", "self_attn_padding_mask",
}  # fmt: skip
# True or 1 where there is a token:
_OF_TOKENS = {"attention_mask", "decoder_attention_mask", "input_mask", "token_mask", "valid_mask"}
_OF_DECODER = {"decoder_attention_mask", "decoder_padding_mask", "tgt_key_padding_mask"}
_OF_ANY = _OF_PADDING | _OF_TOKENS
_LONGEST_PREFIX = 8  # tokens of a class, of registers, that masks may leave out


@dataclass(frozen=True)
class TokenMask:
    """The padding among some tokens, as far as masks show it.

    Attributes:
        padded: ``(batch, length)`` as the tokens, true where one is padding; `None` if nothing says that there is any.
        doubt: a mask that was seen and does not fit the tokens, in words.
    """

    padded: Tensor | None = None
    doubt: str | None = None


def find_padding(
    shape: Sequence[int],
    choice: PaddingChoice,
    *,
    layer: str = "",
    hidden_keys: Tensor | None = None,
    calls: Sequence[ModuleCall] | None = None,
) -> TokenMask:
    """Return which tokens of a running call are padding.

    Args:
        shape: ``(batch, length)`` of the tokens, or more or fewer dimensions.
        choice: how padding is known.
        layer: name of the attention layer, by which encoders and decoders are told apart.
        hidden_keys: ``(batch, keys)``, true where the attention has hidden a key from every query.
        calls: the running calls, if they are known.

    Returns:
        What is known.
    """
    if choice is None:
        return TokenMask()
    calls = running_calls() if calls is None else calls
    if choice != "auto":
        return _chosen(shape, choice, calls, layer)
    doubt = None
    for name, mask, module in _masks(calls, layer):
        padded = fit(mask, shape)
        if padded is not None:
            return TokenMask(padded)
        prefix = shape[-1] - mask.shape[-1] if len(shape) == 2 and shape[0] == mask.shape[0] else 0
        if doubt is None and (mask.numel() == math.prod(shape) or 0 < prefix <= _LONGEST_PREFIX):
            doubt = f"`{name}` of {module} has the shape {tuple(mask.shape)}, and the tokens have {tuple(shape)}"
    if hidden_keys is not None and (padded := fit(hidden_keys, shape)) is not None:
        return TokenMask(padded)
    return TokenMask(None, doubt)


def fit(padded: Tensor, shape: Sequence[int]) -> Tensor | None:
    """Bring a mask over tokens, ``(batch, length)``, into the shape of the tokens; `None` if it is of others."""
    shape = tuple(shape)
    if padded.dim() == 2 and tuple(padded.shape[::-1]) == shape != tuple(padded.shape):  # length first
        return padded.T
    is_same = tuple(padded.shape) == shape
    is_flat = len(shape) != padded.dim() and padded.numel() == math.prod(shape)
    return padded.reshape(shape) if is_same or is_flat else None


def _masks(calls: Sequence[ModuleCall], layer: str) -> list[tuple[str, Tensor, str]]:
    """The masks over tokens that calls take: name, true where a token is padding, and whose argument it is."""
    is_decoder = "decoder" in layer.lower()
    masks = []
    for call in calls:
        names = call.arguments.keys()
        if names.isdisjoint(_OF_ANY):
            continue
        has_two_sides = any(name.startswith(("decoder_", "tgt")) for name in names) and bool(
            names & {"input_ids", "attention_mask", "src", "src_key_padding_mask", "inputs_embeds"}
        )
        for name, value in call.arguments.items():
            if name not in _OF_ANY or not isinstance(value, Tensor):
                continue
            of_other_side = has_two_sides and is_decoder != (name in _OF_DECODER)
            if of_other_side or value.dim() not in (1, 2) or value.is_nested or _is_of_other_keys(name, call):
                continue
            masks.append((name, _as_padding(value, name in _OF_PADDING), type(call.module).__name__))
    return masks


def _is_of_other_keys(name: str, call: ModuleCall) -> bool:
    """Whether a mask is of the keys of another stream, as in cross-attention, where queries are measured."""
    query, key = call.arguments.get("query"), call.arguments.get("key")
    if name != "key_padding_mask" or not isinstance(query, Tensor) or not isinstance(key, Tensor) or key is query:
        return False
    return key.shape != query.shape or key.data_ptr() != query.data_ptr()


def _as_padding(mask: Tensor, is_of_padding: bool) -> Tensor:
    if mask.is_floating_point():  # added to scores, or ones where there are tokens
        is_added = (mask < 0).any() | (mask == 0).all()
        return torch.where(is_added, mask < HIDDEN, mask == 0)
    return mask.bool() if is_of_padding else ~mask.bool()


def _chosen(shape: Sequence[int], choice: Any, calls: Sequence[ModuleCall], layer: str) -> TokenMask:
    """Ask the user's function, or look for the token that is padding."""
    masks: list[Any] = []
    if callable(choice):
        call = _call_for(choice, calls)
        masks = [] if call is None else [choice(**call.arguments)]
    else:
        is_decoder = "decoder" in layer.lower()
        for call in calls:
            ids = [
                (name, value)
                for name, value in call.arguments.items()
                if isinstance(value, Tensor) and value.dtype in (torch.int64, torch.int32) and value.dim() in (1, 2)
                and not any(word in name for word in ("mask", "position", "type", "label"))
            ]  # fmt: skip
            ids.sort(key=lambda item: item[0].startswith(("decoder", "tgt")) != is_decoder)
            masks += [value == choice for _, value in ids]
    for mask in masks:
        if mask is not None and (padded := fit(mask.bool(), shape)) is not None:
            return TokenMask(padded)
    shapes = [tuple(mask.shape) for mask in masks if mask is not None]
    doubt = f"`padding` gives masks of the shapes {shapes}, and the tokens have {tuple(shape)}" if shapes else None
    return TokenMask(None, doubt)


def _call_for(function: Callable[..., Any], calls: Sequence[ModuleCall]) -> ModuleCall | None:
    """The outermost call with the arguments that a function takes: wrappers of a model do not name them."""
    candidates = [call for call in reversed(calls) if all(name.isidentifier() for name in call.arguments)]
    for call in candidates:
        try:
            inspect.signature(function).bind(**call.arguments)
        except (TypeError, ValueError):
            continue
        return call
    return candidates[0] if candidates else None  # its error names the missing argument
