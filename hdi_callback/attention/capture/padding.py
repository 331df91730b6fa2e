"""Padding tokens, from the masks that attention and the modules around it take.

Masks over tokens, ``(batch, length)``, come first, from the attention outwards to the model; then masks over pairs of
tokens, of which a key that no query may attend to is padding. Masks of the keys of another stream (cross-attention)
do not concern the queries, whose outputs are measured. Nothing here waits for the device.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hdi_callback.attention.calls import Frame, parameters_of

PaddingChoice = Literal["auto"] | int | Callable[..., Any] | None
"""How padding is known: from masks, by the token that is padding, by a function of the arguments, or not at all."""

# Names of masks, and what a true value means.
_MEANINGS = {
    # True, or minus infinity, where a token is padding.
    **dict.fromkeys(("key_padding_mask", "padding_mask", "pad_mask", "self_attn_padding_mask"), "padding"),
    **dict.fromkeys(("src_key_padding_mask", "tgt_key_padding_mask", "decoder_padding_mask"), "padding"),
    # True or 1 where a token is there.
    **dict.fromkeys(("attention_mask", "input_mask", "token_mask", "valid_mask", "decoder_attention_mask"), "tokens"),
    # Either, as the module's author liked; the values of the mask decide.
    **dict.fromkeys(("mask", "attn_mask", "src_mask", "tgt_mask", "self_attn_mask", "x_mask"), "either"),
}
_OF_DECODER = {"decoder_attention_mask", "decoder_padding_mask", "tgt_key_padding_mask", "tgt_mask"}
_KEYS_OF_ITS_OWN = {"encoder_attention_mask", "memory_key_padding_mask", "memory_mask", "encoder_padding_mask"}
_OTHER_STREAM = {
    "key", "key_value_states", "encoder_hidden_states", "context", "memory", "kv", "key_value", "cross_states",
    "cross_attention_states", "encoder_outputs", "x_kv", "y",
}  # fmt: skip
_PACKED = {"cu_seqlens", "cu_seq_lens_q", "cu_seqlens_q", "cu_seqlens_cpu"}
_LONGEST_PREFIX = 8  # tokens of a class, of registers, that masks may leave out
_HIDDEN = -1e3  # what is added to the score of a key that is hidden is less: -10000, the smallest number, -inf


@dataclass(frozen=True)
class Padding:
    """Facts about the padding among the tokens of one call of attention.

    Attributes:
        padded: ``(tokens,)``, true where a token is padding, NaN where a mask can be read both ways; `None` if nothing
            says that there is any.
        doubt: a mask that was observed and could not be read.
    """

    padded: Tensor | None = None
    doubt: str | None = None


def find_padding(
    shape: Sequence[int], frames: Sequence[Frame], *, path: str = "", choice: PaddingChoice = "auto"
) -> Padding:
    """Return which tokens are padding.

    Args:
        shape: ``(batch, length)`` of the tokens, or more or fewer dimensions.
        frames: the calls that are going on, from the attention outwards.
        path: name of the attention layer, by which encoders and decoders are distinguished.
        choice: how padding is known.

    Returns:
        What is known.
    """
    if choice is None:
        return Padding()
    if choice != "auto":
        return _chosen(shape, frames, path, choice)
    doubt = None
    if any(name in _PACKED and value is not None for frame in frames for name, value in frame.arguments.items()):
        return Padding()
    found = [(frame, name, mask, kind) for frame in frames for name, mask, kind in _masks(frame, path)]
    for one, name, mask, kind in found:
        hidden = (
            _over_ambiguous_square(mask, kind, shape)
            if _is_ambiguous_square(mask, kind, shape)
            else _over_tokens(mask, kind)
        )
        if hidden is None:
            continue
        padded = fit_padding(hidden, shape)
        if padded is not None:
            return Padding(padded)
        # A mask of other tokens, as of text beside an image, does not count; one of the same in another order does.
        prefix = shape[-1] - mask.shape[-1] if len(shape) == mask.dim() and shape[0] == mask.shape[0] else 0
        is_of_these = mask.numel() == math.prod(shape) or 0 < prefix <= _LONGEST_PREFIX
        if is_of_these and doubt is None and kind != "either":
            what = f"`{name}` of {type(one.module).__name__}"
            doubt = f"{what} has the shape {tuple(mask.shape)}, and the tokens have {tuple(shape)}"
    for _, _, mask, kind in found:
        hidden = _over_pairs(mask, "padding" if kind == "pairs" else kind, shape)
        if hidden is not None:
            return Padding(hidden)
    return Padding(None, doubt)


def takes_masks(module: nn.Module) -> bool:
    """Return whether the forward of a module has a parameter for a mask that may mark padding.

    Args:
        module: any module.

    Returns:
        True for ``forward(self, x, padding_mask=None)``.
    """
    return not _MEANINGS.keys().isdisjoint(parameters_of(module))


def _masks(one: Frame, path: str) -> list[tuple[str, Tensor, str]]:
    """The masks of one call that show padding among its queries: name, mask, and what a true value means."""
    is_torch = type(one.module).__module__.startswith("torch.nn") or isinstance(one.module, nn.MultiheadAttention)
    is_decoder = "decoder" in path.lower()
    found = []
    for name, value in one.arguments.items():
        kind, is_of_decoder = _MEANINGS.get(name), name in _OF_DECODER
        if kind is None or not isinstance(value, Tensor):
            continue
        is_of_other_side = is_decoder != is_of_decoder and _is_encoder_decoder(one)
        if not is_of_other_side and (is_of_decoder or not _is_of_keys(one)):
            found.append((name, value, "pairs" if kind == "either" and is_torch else kind))
    return found


def _is_encoder_decoder(one: Frame) -> bool:
    """Whether it is an encoder-decoder model, whose masks belong to the encoder or to the decoder."""
    names = one.parameters | set(one.arguments)
    of_encoder = {"attention_mask", "src_key_padding_mask", "src_mask", "src"}
    return bool(names & {"decoder_attention_mask", "decoder_input_ids", "tgt"} and names & of_encoder)


def _is_of_keys(one: Frame) -> bool:
    """Whether its masks are of keys that come from another stream."""
    if one.parameters & _KEYS_OF_ITS_OWN or _KEYS_OF_ITS_OWN & set(one.arguments):
        return False
    first = one.first
    others = [value for name, value in one.arguments.items() if name in _OTHER_STREAM and isinstance(value, Tensor)]
    return any(value is not first and not _is_same(value, first) for value in others)


def _is_same(tensor: Tensor, other: Any) -> bool:
    """Whether two tensors are views of the same numbers."""
    if not isinstance(other, Tensor) or tensor.shape != other.shape or tensor.device != other.device:
        return False
    return tensor.device.type != "meta" and tensor.data_ptr() == other.data_ptr() and tensor.data_ptr() != 0


def _over_tokens(mask: Tensor, kind: str) -> Tensor | None:
    """Read a mask over tokens as true, or NaN, where one is padding; `None` if it is another mask."""
    if mask.is_nested or mask.dim() > 2 or mask.dim() == 0 or kind == "pairs":
        return None
    if mask.dim() == 2 and kind == "either" and mask.shape[0] == mask.shape[1]:
        return None  # over pairs, as a causal mask is
    if mask.is_floating_point():
        return _of_numbers(mask)
    if kind == "padding":
        return mask.bool()
    if kind == "tokens":
        return ~mask.bool()
    return _by_visible_keys(mask.bool()[:, None] if mask.dim() == 2 else mask.bool()[None, None]).view(mask.shape)


def _is_ambiguous_square(mask: Tensor, kind: str, shape: Sequence[int]) -> bool:
    """Whether a square mask may be over tokens or over pairs of them, as there are as many sequences as tokens."""
    n = shape[-1]
    is_square = not mask.is_nested and tuple(mask.shape) == tuple(shape) == (n, n)
    return is_square and kind in ("either", "tokens") and n > 1


def _over_ambiguous_square(mask: Tensor, kind: str, shape: Sequence[int]) -> Tensor:
    """Read a square mask, ``(batch, length)``: NaN where the two readings differ and nothing speaks for one of them."""
    # A mask that depends on the distance of two tokens alone, as a causal or a sliding one, is over pairs. By its name
    # an `attention_mask` is over tokens, unless it has that form.
    if mask.is_floating_point():
        of_tokens = _of_numbers(mask).to(torch.float32)
    elif kind == "tokens":
        of_tokens = (~mask.bool()).to(torch.float32)
    else:
        of_tokens = _by_visible_keys(mask.bool()[:, None])
    of_tokens = of_tokens.view(mask.shape)
    pairs = _over_pairs(mask, kind, shape)
    of_pairs = of_tokens if pairs is None else pairs.to(torch.float32).view(mask.shape)
    differ = ((of_tokens != of_pairs) | of_tokens.isnan() | of_pairs.isnan()).any()
    is_of_distance = (mask[1:, 1:] == mask[:-1, :-1]).all()
    if kind == "tokens":
        chosen = torch.where(is_of_distance, torch.nan, of_tokens)
    else:
        chosen = torch.where(is_of_distance, of_pairs, torch.nan)
    return torch.where(differ, chosen, of_tokens)


def _of_numbers(mask: Tensor) -> Tensor:
    """Read a mask that is added to scores, or one of zeros and ones: all zeros hide nothing."""
    return torch.where((mask < 0).any() | (mask == 0).all(), mask < _HIDDEN, mask == 0)


def _over_pairs(mask: Tensor, kind: str, shape: Sequence[int]) -> Tensor | None:
    """Find the keys that no query may see, ``(tokens,)``; `None` if the mask does not fit."""
    if mask.is_nested or mask.dim() < 2 or len(shape) < 1:
        return None
    length, batch = shape[-1], math.prod(shape[:-1])
    if mask.shape[-1] != length or mask.shape[-2] not in (1, length):
        return None
    if mask.dim() == 3 and mask.shape[0] not in (1, batch):
        if not batch or mask.shape[0] % batch:
            return None
        mask = mask.view(batch, -1, *mask.shape[1:])
    while mask.dim() < 4:
        mask = mask[None] if mask.dim() == 2 else mask[:, None]
    if mask.dim() != 4 or mask.shape[0] not in (1, batch):
        return None
    if mask.is_floating_point():
        hidden = (mask < _HIDDEN).all(-2).all(1)
    elif kind == "either":
        hidden = _by_visible_keys(mask.bool().flatten(1, -2))
    else:
        may_see = ~mask.bool() if kind == "padding" else mask.bool()
        hidden = ~may_see.any(-2).any(1)
    return hidden.expand(batch, length).reshape(-1)


def _by_visible_keys(pairs: Tensor) -> Tensor:
    """Decide whether true means visible: every query must see a key; NaN if both readings allow it."""
    shows_bad = (~pairs.any(-1)).any()
    hides_bad = pairs.all(-1).any()
    shown, hidden = ~pairs.any(1), pairs.all(1)
    # If both ways hide nothing there is no padding, whatever it means.
    is_clear = (shows_bad != hides_bad) | ~(shown.any() | hidden.any())
    chosen = torch.where(shows_bad, hidden, shown).to(torch.float32)
    return torch.where(is_clear, chosen, torch.nan)


def fit_padding(padded: Tensor, shape: Sequence[int]) -> Tensor | None:
    """Permute a mask over tokens to the order of the tokens.

    Args:
        padded: ``(batch, length)``.
        shape: of the tokens.

    Returns:
        ``(tokens,)``; `None` if the mask is of other tokens.
    """
    shape = tuple(shape)
    if tuple(padded.shape) == shape or (padded.numel() == math.prod(shape) and len(shape) == 1):
        return padded.reshape(-1)
    if padded.dim() == 2 and tuple(padded.shape[::-1]) == shape:  # length first
        return padded.T.reshape(-1)
    if padded.dim() == 2 and len(shape) > 2 and padded.shape[0] == shape[0] and padded.numel() == math.prod(shape):
        return padded.reshape(-1)
    if padded.dim() == 1 and shape[-1:] == tuple(padded.shape) and math.prod(shape) == shape[-1]:
        return padded
    return None


def _chosen(shape: Sequence[int], frames: Sequence[Frame], path: str, choice: Any) -> Padding:
    """Find padding by the user's function, or by comparison with the token that is padding."""
    if callable(choice):
        call = _call_for(choice, frames)
        masks = [] if call is None else [choice(**call.arguments)]
    else:
        is_decoder = "decoder" in path.lower()
        masks = []
        for frame in frames:
            ids = [
                (name, value)
                for name, value in frame.arguments.items()
                if isinstance(value, Tensor) and value.dim() in (1, 2) and name not in _MEANINGS
                and value.dtype in (torch.int64, torch.int32)
            ]  # fmt: skip
            ids.sort(key=lambda item: item[0].startswith(("decoder", "tgt")) != is_decoder)
            masks += [value == choice for name, value in ids if "position" not in name and "type" not in name]
    for mask in masks:
        if mask is not None and (padded := fit_padding(mask.bool(), shape)) is not None:
            return Padding(padded)
    shapes = [tuple(mask.shape) for mask in masks if mask is not None]
    doubt = f"`padding` gives masks of the shapes {shapes}, and the tokens have {tuple(shape)}" if shapes else None
    return Padding(None, doubt)


def _call_for(function: Callable[..., Any], frames: Sequence[Frame]) -> Frame | None:
    """Return the outermost call with the arguments that the function takes: wrappers of a model do not name them."""
    named = [frame for frame in reversed(frames) if all(name.isidentifier() for name in frame.arguments)]
    try:
        takes = inspect.signature(function)
    except (TypeError, ValueError):
        return named[0] if named else None
    for call in named:
        try:
            takes.bind(**call.arguments)
        except TypeError:
            continue
        return call
    # None fits: take the outermost, so that the error names the missing argument.
    return named[0] if named else None
