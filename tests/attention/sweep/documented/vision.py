"""Forwards of what takes pictures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.attention.sweep.documented.made import LENGTH, grids, integers, noise


def _inkling2(model: Any, batch: int) -> dict[str, Any]:
    """Squares of patches, one for each token of the language model."""
    config = model.config
    side = config.patch_size * config.spatial_merge_size
    return {
        "pixel_values": noise(batch * 4, side, side, config.num_channels).tanh(),
        "image_grid_thw": grids(batch, 2),
    }


def _patches(model: Any, batch: int) -> dict[str, Any]:
    """All patches of all pictures in one row, as pictures."""
    config = model.config
    return {
        "pixel_values": noise(batch * 16, 3, config.patch_size, config.patch_size),
        "grid_thw": grids(batch),
    }


def _paddleocr(model: Any, batch: int) -> dict[str, Any]:
    arguments = _patches(model, batch)
    return arguments | {"pixel_values": arguments["pixel_values"][None]}


def _video_llama(model: Any, batch: int) -> dict[str, Any]:
    config = model.config
    return {
        "pixel_values": noise(batch * 16, config.num_channels * config.patch_size**2),
        "grid_thw": grids(batch),
        "merge_sizes": torch.ones(batch, dtype=torch.long),
    }


def _qwen3_omni(model: Any, batch: int) -> dict[str, Any]:
    config = model.config
    width = config.in_channels * config.temporal_patch_size * config.patch_size**2
    return {"hidden_states": noise(batch * 16, width), "grid_thw": grids(batch)}


def _flattened(model: Any, batch: int) -> dict[str, Any]:
    """Patches that begin with their row and column."""
    width = next(part.in_features for name, part in model.named_modules() if name.endswith("patch_projection"))
    places = torch.cartesian_prod(torch.arange(1, 5), torch.arange(1, 5)).float()[None].repeat(batch, 1, 1)
    return {
        "flattened_patches": torch.cat([places, noise(batch, 16, width)], -1),
        "attention_mask": torch.ones(batch, 16),
    }


def _pix2struct(model: Any, batch: int) -> dict[str, Any]:
    return _flattened(model, batch) | {"decoder_input_ids": integers(100, batch, LENGTH), "use_cache": False}


def _pairs(model: Any, batch: int) -> dict[str, Any]:
    """Two pictures whose points are matched."""
    return {"pixel_values": noise(batch, 2, 3, 16, 16).sigmoid()}


def _mllama(model: Any, batch: int) -> dict[str, Any]:
    """One picture each, cut into tiles."""
    config = model.config
    side, tiles = config.image_size, config.max_num_tiles
    return {
        "pixel_values": noise(batch, 1, tiles, config.num_channels, side, side),
        "aspect_ratio_ids": torch.ones(batch, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(batch, 1, tiles, dtype=torch.long),
    }


def _molmo2(model: Any, batch: int) -> dict[str, Any]:
    config = model.config
    width = config.num_channels * config.patch_size**2
    return {"pixel_values": noise(batch, config.num_position_embeddings, width)}


def _molmo2_adapter(model: Any, batch: int) -> dict[str, Any]:
    """Squares of two by two patches are pooled."""
    config = model.config
    width = config.hidden_size * len(config.vision_feature_layer)
    return {
        "image_features": noise(batch, 16, width),
        "pooled_patches_idx": torch.arange(batch * 16).reshape(batch * 4, 4),
    }


def _siglip2(model: Any, batch: int) -> dict[str, Any]:
    config = getattr(model.config, "vision_config", model.config)
    return {
        "pixel_values": noise(batch, 16, config.num_channels * config.patch_size**2),
        "pixel_attention_mask": torch.ones(batch, 16, dtype=torch.long),
        "spatial_shapes": torch.tensor([[4, 4]] * batch),
    }


def _vitpose(model: Any, batch: int) -> dict[str, Any]:
    """Each picture is of one of the data sets."""
    config = getattr(model.config, "backbone_config", model.config)
    return {
        "pixel_values": noise(batch, config.num_channels, *config.image_size),
        "dataset_index": torch.zeros(batch, dtype=torch.long),
    }


def _vitmatte(model: Any, batch: int) -> dict[str, Any]:
    """Colours, and a map of what is in front."""
    return {"pixel_values": noise(batch, model.config.backbone_config.num_channels, 64, 64)}


def _depth_pro(model: Any, batch: int) -> dict[str, Any]:
    """Large enough for a patch at a quarter of its size."""
    side = int(model.config.patch_size / min(model.config.scaled_images_ratios))
    return {"pixel_values": noise(batch, 3, side, side)}


def _frames(model: Any, batch: int) -> dict[str, Any]:
    config = model.config
    return {"pixel_values": noise(batch * config.num_frames, config.num_channels, config.image_size, config.image_size)}


def _deepseek_queries(model: Any, batch: int) -> dict[str, Any]:
    """Patches, and then as many queries."""
    return {"inputs_embeds": noise(batch, 2 * LENGTH, model.config.hidden_size), "num_patches": LENGTH}


def _unlimited_ocr(model: Any, batch: int) -> dict[str, Any]:
    side = model.config.image_size // model.config.patch_size
    return {"patch_embeds": noise(batch, model.config.hidden_size, side, side)}


def _detr_encoder(model: Any, batch: int) -> dict[str, Any]:
    width = model.config.hidden_size
    return {
        "vision_features": [noise(batch, width, 4, 4)],
        "text_features": noise(batch, LENGTH, width),
        "vision_pos_embeds": [noise(batch, width, 4, 4)],
        "text_mask": torch.ones(batch, LENGTH, dtype=torch.bool),
    }


def _detr_decoder(model: Any, batch: int) -> dict[str, Any]:
    width = model.config.hidden_size
    return {
        "vision_features": noise(batch, 16, width),
        "text_features": noise(batch, LENGTH, width),
        "vision_pos_encoding": noise(batch, 16, width),
        "text_mask": torch.ones(batch, LENGTH, dtype=torch.bool),
        "spatial_shapes": torch.tensor([[4, 4]]),
    }


def _masks(model: Any, batch: int) -> dict[str, Any]:
    """Pictures at three sizes; what the encoder gives is of the smallest."""
    width = model.config.hidden_size
    return {
        "decoder_queries": noise(batch, 5, width),
        "backbone_features": [noise(batch, width, side, side) for side in (16, 8, 4)],
        "encoder_hidden_states": noise(batch, 16, width),
        "prompt_features": noise(batch, LENGTH, width),
        "prompt_mask": torch.ones(batch, LENGTH, dtype=torch.bool),
    }


def _memories(module: Any, batch: int) -> dict[str, Any]:
    """A frame of a video, and as many tokens of an earlier one; sequences come second."""
    config = module.config
    count, width = len(module.position_ids), module.layers[0].cross_attn_image.kv_in_dim
    of_frame = [noise(count, batch, config.memory_attention_hidden_size) for _ in range(2)]
    names = ("current_vision_features", "current_vision_position_embeddings")
    arguments: dict[str, Any] = dict(zip(names, of_frame))
    if hasattr(module, "position_ids_k"):
        count, arguments["num_spatial_memory_tokens"] = len(module.position_ids_k), 1
    memory = noise(count, batch, width)
    return arguments | {"memory": memory, "memory_posision_embeddings": memory.flip(0)}


def _bridgetower(model: Any, batch: int) -> dict[str, Any]:
    return {"image": noise(batch, 3, model.config.image_size, model.config.image_size)}


FORWARDS: dict[str, Callable[[Any, int], dict[str, Any]]] = {
    "BridgeTowerVisionModel": _bridgetower,
    "DeepseekOcr2VisionEncoder": _deepseek_queries,
    "DepthProModel": _depth_pro,
    "EdgeTamVideoMemoryAttention": _memories,
    "Inkling2VisionModel": _inkling2,
    "Kimi_K25VisionModel": _patches,
    "Kosmos2_5VisionModel": _flattened,
    "LightGlueForKeypointMatching": _pairs,
    "MllamaVisionModel": _mllama,
    "Molmo2Adapter": _molmo2_adapter,
    "Molmo2VisionModel": _molmo2,
    "PaddleOCRVisionModel": _paddleocr,
    "Pix2StructForConditionalGeneration": _pix2struct,
    "Pix2StructVisionModel": _flattened,
    "Qwen3OmniMoeVisionEncoder": _qwen3_omni,
    "Sam2VideoMemoryAttention": _memories,
    "Sam3DetrDecoder": _detr_decoder,
    "Sam3DetrEncoder": _detr_encoder,
    "Sam3LiteTextDetrDecoder": _detr_decoder,
    "Sam3LiteTextDetrEncoder": _detr_encoder,
    "Sam3LiteTextMaskDecoder": _masks,
    "Sam3MaskDecoder": _masks,
    "Sam3TrackerVideoMemoryAttention": _memories,
    "Siglip2VisionModel": _siglip2,
    "SuperGlueForKeypointMatching": _pairs,
    "UnlimitedOcrVisionEncoder": _unlimited_ocr,
    "VideoLlama3VisionModel": _video_llama,
    "VitMatteForImageMatting": _vitmatte,
    "VitPoseBackbone": _vitpose,
    "VitPoseForPoseEstimation": _vitpose,
    "XCLIPVisionModel": _frames,
}
