"""Inputs for any model: guessed from what its forward takes, from plain to odd, until attention has run."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

LENGTH = 7
# These compute attention by blocks, and do something else with fewer tokens than that.
_LONGER = ("BigBirdConfig", "BigBirdPegasusConfig", "ReformerConfig")


def _noise(*shape: Any) -> Tensor:
    shape = tuple(size if isinstance(size, int) and size > 0 else 32 for size in shape)
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def _tokens(batch: int, length: int, vocabulary: int) -> Tensor:
    return torch.randint(4, max(5, min(100, vocabulary)), (batch, length), generator=torch.Generator().manual_seed(3))


def read(config: Any, *names: str, default: Any = None) -> Any:
    """Read the first setting that is there, in the config or in one of its parts."""
    from transformers import PreTrainedConfig

    for name in names:
        try:
            value = getattr(config, name, None)
        except Exception:
            value = None
        if value is not None:
            return value
    for part in vars(config).values() if config is not None else ():
        if isinstance(part, PreTrainedConfig):
            value = read(part, *names)
            if value is not None:
                return value
    return default


def _size(value: Any) -> tuple[int, int]:
    if isinstance(value, dict):
        value = [value.get("height", 32), value.get("width", 32)]
    if isinstance(value, (list, tuple)):
        return (int(value[0]), int(value[-1]))
    return (int(value), int(value))


def for_model(model: nn.Module, batch: int) -> Iterator[dict[str, Any]]:
    """Give keyword arguments for a whole model, the likeliest first."""
    signature = inspect.signature(model.forward).parameters
    names = set(signature)
    config = getattr(model, "config", None)
    main = getattr(model, "main_input_name", "input_ids")
    shapes = _shapes(model, config, batch, names)
    required = [
        name
        for name, parameter in signature.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    base = {"use_cache": False} if "use_cache" in names else {}
    later = ("decoder_input_ids", "future_values", "future_time_features", "input_points", "input_labels",
             "protein_input_ids", "protein_attention_mask", "audio_mel", "audio_mel_mask")  # fmt: skip
    decoder = [name for name in later if name in names]
    all_known = [name for name in shapes if name in names and not name.startswith(("inputs_embeds", "encoder_"))]
    plain = [
        name for name in all_known if name in ("input_ids", "pixel_values", "input_features", "input_values", "bbox")
    ]
    wanted = [
        [main, *required, *decoder],
        [*plain, *required, *decoder],
        [main, "bbox", *required, *decoder],
        [*all_known],
        ["input_ids", *decoder],
        ["inputs_embeds"],
        ["hidden_states", *required],
    ]
    done: set[tuple[str, ...]] = set()
    for wanted_by_name in wanted:
        made = [name for name in wanted_by_name if isinstance(name, str) and name in names and name in shapes]
        chosen = list(dict.fromkeys(made))
        if not chosen or tuple(sorted(chosen)) in done:
            continue
        done.add(tuple(sorted(chosen)))
        options = [shapes[name] for name in chosen]
        for values in itertools.islice(itertools.product(*options), 24):
            yield base | {name: value for name, value in zip(chosen, values) if value is not None}


def _shapes(model: nn.Module, config: Any, batch: int, names: set[str]) -> dict[str, list[Any]]:
    vocabulary = read(config, "vocab_size", default=100)
    vocabulary = vocabulary if isinstance(vocabulary, int) else 100
    decoder_vocabulary = read(config, "decoder_vocab_size", default=vocabulary)
    channels = read(config, "num_channels", "in_channels", "in_chans", default=3)
    channels = channels if isinstance(channels, int) else 3
    width = read(config, "hidden_size", "d_model", "n_embd", "dim", "embed_dim", "hidden_dim", default=32)
    width = width if isinstance(width, int) else 32
    size = read(config, "image_size", "img_size", "input_size", default=64)
    height, breadth = _size(size if isinstance(size, (int, list, tuple, dict)) else 32)
    frames = read(config, "num_frames", "tubelet_frames", "frames_per_clip", default=2)
    mels = read(config, "num_mel_bins", "n_mels", "feature_size", "input_feat_per_channel", "mel_bins", "input_dim",
                default=80)  # fmt: skip
    mels = mels if isinstance(mels, int) else 80
    source = read(config, "max_source_positions", default=50)
    source = min(source, 200) if isinstance(source, int) else 50
    patch = _first_filter(model)
    grid = torch.tensor([[1, 4, 4]] * batch)
    images: list[Any] = [_noise(batch, channels, height, breadth), _noise(batch, channels, 64, 64)]
    if patch is not None and "pixel_position_ids" in names:
        images = [_noise(batch, 16, patch), *images]
    if patch is not None and ("grid_thw" in names or any("grid" in name for name in names)):
        images = [_noise(batch * 16, patch), *images]
    count = frames if isinstance(frames, int) else 2
    images += [_noise(batch, count, channels, height, breadth)]
    if "prompt_masks" in names:  # the picture is below the one that it is compared with
        images = [_noise(batch, channels, height // 2, breadth), *images]
    if "target_sizes" in names:  # the pictures' patches side by side
        side = _size(read(config, "patch_size", default=8))[0]
        images = [_noise(1, channels, side, batch * 16 * side), *images]
    images += [_noise(batch, 1, channels, height, breadth), _noise(batch, 16, patch or 48)]
    lags = read(config, "lags_sequence", default=[28])
    past = read(config, "context_length", default=12) + max(lags)
    ids = [_tokens(batch, LENGTH, vocabulary), _tokens(batch, 16, vocabulary)]
    if type(config).__name__ in _LONGER:
        ids.reverse()
    length = read(config, "max_length", default=128)
    features = [
        _noise(batch, mels, 2 * source),
        _noise(batch, 24, mels),
        _noise(batch, 24, patch or mels),
        _noise(batch, length if isinstance(length, int) else 128, mels),
        _noise(batch, mels, 48),
        _noise(batch, 24, 64),
        _noise(batch, 1, 64, mels),
        _noise(batch, 1, 1024, 64),
    ]
    sounds = [
        _noise(batch, 1600),
        _noise(batch, length if isinstance(length, int) else 128, mels),
        _noise(batch, 1, 3200),
        _noise(batch, 24, mels),
    ]
    if "input_features" in names:  # as long as those
        sounds = [_noise(batch, 1, 24 * 320), *sounds]
    return {
        "input_ids": ids,
        "decoder_input_ids": [_tokens(batch, LENGTH, decoder_vocabulary)],
        "pixel_values": images,
        "pixel_values_videos": [_noise(batch, max(2, count), channels, height, breadth)],
        "input_values": sounds,
        "input_features": features,
        "hidden_states": [_noise(batch * 16, patch)] * bool(patch and any("grid" in n for n in names))
        + [_noise(batch, LENGTH, width), _noise(batch, width, LENGTH), images[0]],
        "grid_thw": [grid],
        "image_grid_thw": [grid],
        "bbox": [torch.randint(0, 5, (batch, LENGTH, 4)).cumsum(-1), torch.rand(batch, LENGTH, 8)],
        "inputs_embeds": [_noise(batch, LENGTH, width)],
        "inputs": [_noise(batch, 16, width), _noise(batch, channels, height, breadth)],
        "encoder_hidden_states": [_noise(batch, LENGTH, width)],
        "query_embeds": [_noise(batch, LENGTH, width)],
        "query_tokens": [_noise(batch, LENGTH, width)],
        "visual_feats": [_noise(batch, LENGTH, read(config, "visual_feat_dim", default=32))],
        "visual_pos": [_noise(batch, LENGTH, 4)],
        "image_embeds": [_noise(batch, LENGTH, width)],
        "context": [_noise(batch, LENGTH, width)],
        "noise_embeds": [_noise(batch, LENGTH, width)],
        "context_hidden_states": [_noise(batch, LENGTH, width), _noise(batch, LENGTH, 2 * width)],
        "target_sizes": [torch.tensor([[4, 4]] * batch)],
        "past_values": [_noise(batch, past)],
        "past_time_features": [_noise(batch, past, 1)],
        "past_observed_mask": [torch.ones(batch, past)],
        "future_values": [_noise(batch, 4)],
        "future_time_features": [_noise(batch, 4, 1)],
        "pixel_position_ids": [torch.cartesian_prod(torch.arange(4), torch.arange(4))[None].repeat(batch, 1, 1)],
        "last_hidden_state": [_noise(batch, LENGTH, width)],
        "audio_values": [_noise(batch, 1, 64, 64)],
        "codes": [_tokens(batch, LENGTH, 100)],
        "audio_codes": [_tokens(batch, LENGTH, 100)[:, None], _tokens(batch, LENGTH, 100)[..., None]],
        "attention_mask": [torch.ones(batch, LENGTH, dtype=torch.long)],
        "protein_input_ids": [_tokens(batch, LENGTH, vocabulary)],
        "protein_attention_mask": [torch.ones(batch, LENGTH, dtype=torch.long)],
        "audio_mel": [_noise(batch, 48, read(config, "input_feat_size", default=mels))],
        "audio_mel_mask": [torch.zeros(batch, 48, dtype=torch.bool)],
        "input_points": [_noise(batch, 2, 3, 2).abs()],
        "input_labels": [torch.ones(batch, 2, 3, dtype=torch.long)],
        "classes_input_ids": [_tokens(2 * batch, LENGTH, vocabulary)],
        "classes_attention_mask": [torch.ones(2 * batch, LENGTH, dtype=torch.long)],
        "classes_structure": [torch.full((batch,), 2)],
        "tasks_input_ids": [_tokens(batch, LENGTH, vocabulary)],
        "tasks_attention_mask": [torch.ones(batch, LENGTH, dtype=torch.long)],
        "task_inputs": [_noise(batch, read(config, "task_seq_len", default=LENGTH))],
        "prompt_pixel_values": images[:2],
        "prompt_masks": images[:2],
        "token_type_ids": [torch.zeros(batch, LENGTH, dtype=torch.long)],
    }  # fmt: skip


def _first_filter(model: nn.Module) -> int | None:
    """Features of one patch: what the first filter or linear map takes."""
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, (nn.Linear, nn.Conv2d, nn.Conv3d)) and isinstance(weight, Tensor):
            return weight[0].numel()
    return None
