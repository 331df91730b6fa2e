"""Forwards of what takes texts with pictures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.attention.sweep.documented.made import LENGTH, noise, tokens


def _picture(model: Any, batch: int) -> Tensor:
    config = model.config.vision_config
    side = config.image_size if isinstance(config.image_size, int) else config.image_size[0]
    return noise(batch, 3, side, side)


def _with_places(batch: int, count: int, token: int) -> Tensor:
    """Begin a text with the places that the features of its picture take."""
    return torch.cat([torch.full((batch, count), token), tokens(batch)], 1)


def _idefics(model: Any, batch: int) -> dict[str, Any]:
    """One picture for each text; every token may attend to it."""
    return {
        "input_ids": tokens(batch, model.config.vocab_size),
        "pixel_values": _picture(model, batch)[:, None],
        "image_attention_mask": torch.ones(batch, LENGTH, 1),
        "use_cache": False,
    }


def _blip2(model: Any, batch: int) -> dict[str, Any]:
    config = model.config
    return {
        "pixel_values": _picture(model, batch),
        "input_ids": _with_places(batch, config.num_query_tokens, config.image_token_id),
    }


def _instructblip(model: Any, batch: int) -> dict[str, Any]:
    return _blip2(model, batch) | {"qformer_input_ids": tokens(batch)}


def _instructblip_video(model: Any, batch: int) -> dict[str, Any]:
    """Two frames."""
    config = model.config
    return {
        "pixel_values": _picture(model, 2 * batch).unflatten(0, (batch, 2)),
        "qformer_input_ids": tokens(batch),
        "input_ids": _with_places(batch, 2 * config.num_query_tokens, config.video_token_id),
        "use_cache": False,
    }


def _qformer(model: Any, batch: int) -> dict[str, Any]:
    return {
        "query_embeds": noise(batch, LENGTH, model.config.hidden_size),
        "encoder_hidden_states": noise(batch, LENGTH + 2, model.config.encoder_hidden_size),
    }


def _kosmos2(model: Any, batch: int) -> dict[str, Any]:
    places = model.config.latent_query_num
    mask = torch.zeros(batch, places + LENGTH, dtype=torch.long)
    mask[:, :places] = 1
    return {
        "pixel_values": _picture(model, batch),
        "input_ids": _with_places(batch, places, 4),
        "image_embeds_position_mask": mask,
        "use_cache": False,
    }


def _pi0(model: Any, batch: int) -> dict[str, Any]:
    """A picture, what to do, and embeddings of the state and of actions."""
    config = model.config
    vision = config.vlm_config.vision_config
    side = vision.image_size
    places = (side // vision.patch_size) ** 2
    ids = _with_places(batch, places, config.vlm_config.image_token_id)
    return {
        "action_embeds": noise(batch, 5, config.dit_config.hidden_size),
        "input_ids": ids,
        "pixel_values": noise(batch, 1, 3, side, side),
        "pixel_attention_mask": torch.ones(batch, 1, dtype=torch.bool),
        "attention_mask": torch.ones_like(ids),
    }


def _siglip2(model: Any, batch: int) -> dict[str, Any]:
    from tests.attention.sweep.documented import vision

    return {"input_ids": tokens(batch)} | vision.FORWARDS["Siglip2VisionModel"](model, batch)


def _tvp(model: Any, batch: int) -> dict[str, Any]:
    """A few frames with a question."""
    config = model.config
    return {
        "input_ids": tokens(batch),
        "pixel_values": noise(batch, config.num_frames, 3, config.max_img_size, config.max_img_size),
        "attention_mask": torch.ones(batch, LENGTH, dtype=torch.long),
    }


FORWARDS: dict[str, Callable[[Any, int], dict[str, Any]]] = {
    "Blip2Model": _blip2,
    "Blip2QFormerModel": _qformer,
    "IdeficsModel": _idefics,
    "InstructBlipModel": _instructblip,
    "InstructBlipVideoModel": _instructblip_video,
    "Kosmos2Model": _kosmos2,
    "PI0Model": _pi0,
    "Siglip2Model": _siglip2,
    "TvpModel": _tvp,
}
