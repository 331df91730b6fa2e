"""Which tokens are padding: from the masks that the calls around an attention take, or by the token that is padding.

Masks over tokens, ``(batch, length)``, are looked for from the attention outwards to the model. Where there is none, a
key that the attention itself hides from every query is padding. Nothing here waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hdi_callback.attention.calls import ModuleCall, running_calls

PaddingChoice = Literal["auto"] | int | None  # how padding is known: from masks, by the token that is padding, or not
HIDDEN = -1e3  # what is added to the score of a key that is hidden is less: -10000, the smallest number, minus infinity

# Names of masks over tokens. True, or minus infinity, where a token is padding:
_OF_PADDING = {
    "key_padding_mask", "padding_mask", "pad_mask", "src_key_padding_mask", "tgt_key_padding_mask",
    "decoder_padding_mask", "self_attn_padding_mask",
}  # fmt: skip
# True or 1 where there is a token:
_OF_TOKENS = {"attention_mask", "decoder_attention_mask", "input_mask", "token_mask", "valid_mask"}
_OF_MASKS = _OF_PADDING | _OF_TOKENS
_NO_TOKENS = ("mask", "position", "type", "label")  # in names of whole numbers that are no tokens
_LONGEST_PREFIX = 8  # tokens of a class, of registers, that masks may leave out


@dataclass(frozen=True)
class TokenMask:
    """The padding among some tokens, as far as masks show it."""

    padded: Tensor | None = None  # as the tokens, true where one is padding; `None` if nothing says that there is any
    doubt: str | None = None  # a mask that was seen and does not fit the tokens, in words


def find_padding(
    shape: Sequence[int],
    choice: PaddingChoice,
    *,
    layer: str = "",
    hidden_keys: Tensor | None = None,
    calls: Sequence[ModuleCall] | None = None,
) -> TokenMask:
    """Return which tokens of a running call, of a shape ``(batch, length)`` or another, are padding.

    By the name of the layer encoders and decoders are told apart; `hidden_keys` is true where the attention has hidden
    a key from every query.
    """
    if choice is None:
        return TokenMask()
    calls, doubt = running_calls() if calls is None else calls, None
    for name, mask, module in _masks(calls, layer) if choice == "auto" else _tokens(calls, layer, choice):
        if (padded := fit(mask, shape)) is not None:
            return TokenMask(padded)
        prefix = shape[-1] - mask.shape[-1] if len(shape) == 2 and shape[0] == mask.shape[0] else 0
        if doubt is None and (mask.numel() == math.prod(shape) or 0 < prefix <= _LONGEST_PREFIX):
            doubt = f"`{name}` of {module} has the shape {tuple(mask.shape)}, and the tokens have {tuple(shape)}"
    if choice == "auto" and hidden_keys is not None and (padded := fit(hidden_keys, shape)) is not None:
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


def _masks(calls: Sequence[ModuleCall], layer: str) -> Iterator[tuple[str, Tensor, str]]:
    """Yield the masks over tokens that calls take: name, true where a token is padding, and whose argument it is."""
    for call in calls:
        names = call.arguments.keys()
        if names.isdisjoint(_OF_MASKS):
            continue
        has_two_sides = any(map(_is_of_decoder, names)) and bool(
            names & {"input_ids", "attention_mask", "src", "src_key_padding_mask", "inputs_embeds"}
        )
        for name, mask in call.arguments.items():
            if name not in _OF_MASKS or not isinstance(mask, Tensor) or mask.dim() not in (1, 2):
                continue
            if mask.is_nested or (has_two_sides and ("decoder" in layer.lower()) != _is_of_decoder(name)):
                continue
            if not _is_of_other_keys(name, call):
                yield name, _as_padding(mask, name in _OF_PADDING), type(call.module).__name__


def _tokens(calls: Sequence[ModuleCall], layer: str, padding: int) -> Iterator[tuple[str, Tensor, str]]:
    """Yield, of the tokens that calls take, which are padding; first those of the layer's side."""
    for call in calls:
        for name in sorted(call.arguments, key=lambda name: _is_of_decoder(name) != ("decoder" in layer.lower())):
            ids = call.arguments[name]
            is_of_tokens = isinstance(ids, Tensor) and ids.dtype in (torch.int64, torch.int32) and ids.dim() in (1, 2)
            if is_of_tokens and not any(word in name for word in _NO_TOKENS):
                yield name, ids == padding, type(call.module).__name__


def _is_of_decoder(name: str) -> bool:
    return name.startswith(("decoder", "tgt"))


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
