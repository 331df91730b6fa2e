"""Batches that a model brings itself, or that are made up for it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

_TOKENS = (2, 8)  # sequences and their length, in a made-up batch


def own_forward(model: nn.Module) -> Callable[[], object] | None:
    """Return a forward on the first of a model's own batches; `None` if it has none."""
    batches = own_batches(model)
    return partial(run_batch, model, batches[0]) if batches else None


def forward_of_torchs_attention(model: nn.Module) -> Callable[[], object] | None:
    """Return a forward that calls each `nn.MultiheadAttention` by itself, on zeros; `None` if there is none."""
    own = nn.MultiheadAttention.forward
    modules: list[Any] = [module for module in model.modules() if getattr(type(module), "forward", None) is own]

    def forward() -> None:
        for module in modules:
            inputs = (torch.zeros(2, 3, width) for width in (module.embed_dim, module.kdim, module.vdim))
            module(*_moved(tuple(inputs), module))

    return forward if modules else None


def run_batch(model: nn.Module, batch: Any) -> Any:
    """Call a model with a batch: keywords of a mapping, the items of a tuple or list, or a single argument."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def own_batches(model: Any) -> list[Any]:
    """Return the batches that a model can be called with, as Lightning, timm and transformers say."""
    image = (getattr(model, "pretrained_cfg", None) or {}).get("input_size")
    batches = [getattr(model, "example_input_array", None), None if image is None else torch.zeros(2, *image)]
    with suppress(Exception):  # configs of some models lack what is asked
        batches += _made_up(model)
    return [_moved(batch, model) for batch in batches if batch is not None]


def _made_up(model: Any) -> Iterator[dict[str, Any]]:
    """Return batches for a model of transformers: a few tokens, an image, or a second of sound; none for others."""
    if not (hasattr(model, "main_input_name") and hasattr(model, "config")):
        return
    config, takes, main = model.config, inspect.signature(model.forward).parameters, model.main_input_name
    vision = getattr(config, "vision_config", config)

    def image() -> Tensor:
        size = vision.image_size
        return torch.zeros(1, getattr(vision, "num_channels", 3), *((size, size) if isinstance(size, int) else size))

    draw = torch.Generator().manual_seed(0)  # numbers that count up would be taken for positions
    ids = torch.randint(config.get_text_config().to_dict().get("vocab_size", 2), _TOKENS, generator=draw)
    inputs: dict[str, Callable[[], Tensor]] = {
        "input_ids": lambda: ids,
        "pixel_values": image,
        "input_values": lambda: torch.zeros(1, 16_000),
        "input_features": lambda: torch.zeros(1, config.num_mel_bins, 2 * config.max_source_positions),
    }
    if main not in inputs:
        return
    batch: dict[str, Any] = {main: inputs[main]()}
    # CLIP and its like take both; others put images in place of tokens, and there are none here.
    if main == "input_ids" and vision is not config and not hasattr(config, "image_token_id"):
        batch["pixel_values"] = image()
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in takes:
        batch["decoder_input_ids"] = ids[: len(batch[main])]
    if "use_cache" in takes:
        batch["use_cache"] = False
    yield batch
    if main == "input_ids" and "attention_mask" in takes:
        yield {**batch, "attention_mask": torch.ones_like(ids)}


def _moved(inputs: Any, model: nn.Module) -> Any:
    """Return inputs on the model's device, in its precision."""
    like = next(model.parameters(), torch.zeros(()))
    return tree_map_only(Tensor, lambda x: x.to(like.device, like.dtype if x.is_floating_point() else None), inputs)
