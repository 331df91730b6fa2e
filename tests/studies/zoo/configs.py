"""Every architecture of transformers, from a config that is shrunken to a few thousand parameters.

Heads, layers, widths and vocabularies are made small by what they are called; nothing here is read by the oracle.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

H, G, WIDTH, MODEL = 4, 2, 8, 32
VOCABULARY = 320

# what is set to what, by the first pattern that fits the name; callables get the default
_SIZES: list[tuple[str, Any]] = [
    (r"num_channels|in_channels|num_input_channels|in_chans|n_channels$", None),
    (r"(^|_)(rank|temporal|spatial_merge_size|sampling_rate|sample_rate|num_labels|hop_length|n_fft)", None),
    (r"(kv|key_value|key)_heads$|n_head_kv|num_kv_heads", "key heads"),
    (r"(^|_)(num_)?(attention_|attn_|query_|self_)?n?_?heads?$|nhead|heads?_num|num_.*attention_heads", "heads"),
    (r"qk_rope_head_dim|rope_head_dim", 4),
    (r"(q_lora|kv_lora|lora|o_lora|latent|low_rank).*(rank|dim)", 16),
    (r"head_dim|head_size|d_kv|dim_head|kv_channels|head_width|d_head|attention_key_dim", WIDTH),
    (r"(num|n)_(routed_|local_|shared_|global_)?experts_per_tok|moe_topk|moe_top_k|top_k_experts", 2),
    (r"experts_per_token|num_selected_experts", 2),
    (r"n_shared_experts|num_shared_experts", 1),
    (r"(n_group|topk_group|num_expert_groups|n_expert_groups)$", 1),
    (r"(num|n)_.*experts$|moe_num_experts|num_experts|n_experts", 4),
    (r"intermediate|ffn|inner_dim|mlp_dim|mlp_hidden|feed_?forward|n_inner|ffw|d_ff", 48),
    (r"codebook_size|num_codes|codebook_dim", lambda v: min(v, 256)),
    (r"vocab(ulary)?_size|num_embeddings|audio_vocab", lambda v: min(v, VOCABULARY)),
    (r"num_feat_extract|head_num_layers|num_conv_pos|num_prompt|num_bins", None),
    (r"max_(position|seq|source|target|len|text)|n_positions|max_2d|n_ctx|context_length", lambda v: min(v, 1024)),
    (r"conv_(dim|hidden)|(conv|stem)_channels", lambda v: min(v, 32)),
    (r"kernel|stride|padding|dilation|pool|ratio|factor|_id$|_index$|window", None),
    (r"expan|reduction|groups?$|steps|scales?$", None),
    (r"image_size|input_size|img_size", "image"),
    (r"patch_size", lambda v: min(v, 8)),
    (r"(num|n)_.*(queries|latents|query_tokens)|num_latents|query_length|num_queries|num_query", lambda v: min(v, 12)),
    (r"layers?$|depths?$|num_blocks|n_blocks|num_hidden|stages?_layers|num_.*_blocks|_layer$", "layers"),
    (r"hidden_size|d_model|n_embd|^dim$|embed_dim|hidden_dim|model_dim|embedding_size|proj", "width"),
    (r"_dim$|_dims$|^width$", "width"),
    (r"d_latents|emb_dim|feature_size|_size$|_width$|channels$|features$|n_embed|d_embed|d_inner|d_proj", "width"),
]  # fmt: skip


def _resnet(*stages: str) -> Any:
    """Give a small backbone in place of one of timm's."""
    from transformers import ResNetConfig

    widths = [8, 8, 8, 8]
    return ResNetConfig(
        embedding_size=8, hidden_sizes=widths, depths=[1] * 4, layer_type="basic", out_features=list(stages)
    )


def _vision_tower() -> Any:
    """Give a small tower in place of one of timm's."""
    from transformers import CLIPVisionConfig

    return CLIPVisionConfig(
        hidden_size=MODEL, intermediate_size=48, num_hidden_layers=2, num_attention_heads=H, image_size=32, patch_size=8
    )


def _perception_tower() -> Any:
    """Make timm's tower of the perception encoder small."""
    from transformers import PeVideoEncoderConfig

    config = PeVideoEncoderConfig().vision_config
    config.model_args = {"depth": 2, "embed_dim": 64, "num_heads": 4, "img_size": 56}
    return config


_ROTATION = {"rope_type": "default", "rope_theta": 1e4}
_BY_AXIS = _ROTATION | {"mrope_section": [2, 1, 1]}
# By config class, wherever it is a part: what keeps the small model whole. What can be called is called.
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "ReformerConfig": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [4, 4], "attn_layers": ["local", "lsh"]},
    "XLNetConfig": {"d_head": WIDTH},
    "JambaConfig": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]]},
    "ZayaConfig": {"num_experts_per_tok": 1},
    **{
        name: {"_default": {"prediction_length": 4}, "context_length": 12, "num_time_features": 1, "input_size": 1}
        for name in ("AutoformerConfig", "InformerConfig", "TimeSeriesTransformerConfig")
    },
    "HGNetV2Config": {
        "stem_channels": [3, 16, 16], "stage_in_channels": [16, 32, 32, 32], "stage_mid_channels": [8] * 4,
        "stage_out_channels": [32] * 4, "stage_num_blocks": [1] * 4, "stage_numb_of_layers": [1] * 4,
        "hidden_sizes": [32] * 4, "depths": [1] * 4, "embedding_size": 16,
    },
    **{
        name: {"decoder_in_channels": [MODEL] * 3}
        for name in ("RTDetrConfig", "RTDetrV2Config", "DFineConfig", "Deimv2Config", "PPDocLayoutV3Config",
                     "PPDocLayoutV4Config")
    },
    "Sam2HieraDetConfig": {"hidden_size": 16, "blocks_per_stage": [1, 2, 1, 1], "global_attention_blocks": [2]},
    "SamPromptEncoderConfig": {"image_embedding_size": 4},
    "SamHQPromptEncoderConfig": {"image_embedding_size": 4},
    "SamVisionConfig": {"num_pos_feats": MODEL // 2},
    "SamHQVisionConfig": {"num_pos_feats": MODEL // 2},
    **{name: {"image_size": 64} for name in ("PvtConfig", "PvtV2Config")},  # so that more than one key is left
    "NeuCodecConfig": {"quantization_dim": 2 * MODEL},
    "Xcodec2Config": {"quantization_dim": 2 * MODEL},
    "SegGptConfig": {"image_size": [64, 32], "pretrain_image_size": 32},
    "DeepseekV2Config": {"num_experts_per_tok": 2},
    "LiltConfig": {"hidden_size": 48},
    "PeVideoEncoderConfig": {"vision_config": lambda: _perception_tower()},
    "LevitConfig": {"hidden_sizes": [64, 96, 128], "key_dim": [8, 8, 8], "num_attention_heads": [2, 4, 6]},
    "FastSpeech2ConformerConfig": {"speaking_speed": 8.0},  # so that sequences are longer than one token
    "LEDConfig": {"attention_window": 4},
    "LongformerConfig": {"attention_window": 4},
    "NemotronHConfig": {"mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2},
    "SqueezeBertConfig": {"q_groups": 1, "k_groups": 1, "v_groups": 1, "post_attention_groups": 1,
                          "intermediate_groups": 1, "output_groups": 1},
    "MobileBertConfig": {"num_feedforward_networks": 2},
    "WhisperConfig": {"max_source_positions": 40},
    "BambaConfig": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "attn_layer_indices": [1]},
    "FalconH1Config": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16},
    "GraniteMoeHybridConfig": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16,
                               "layer_types": ["linear_attention", "full_attention"]},
    "RecurrentGemmaConfig": {"block_types": ["recurrent", "attention"]},
    "Sam3LiteTextTextConfig": {"num_hidden_layers": 3},  # the first and the last are filters
    "Mamba2Config": {"num_heads": 8, "head_dim": 8},
    "Dots1Config": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "DbrxAttentionConfig": {"rope_theta": 10000.0, "clip_qkv": 8.0},
    "DeepseekOcr2TextConfig": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
    "MimiConfig": {"upsample_groups": MODEL, "codebook_dim": MODEL},
    "Gemma3nTextConfig": {"num_kv_shared_layers": 0},
    "BridgeTowerVisionConfig": {"hidden_size": 128},
    **{
        name: {"rope_parameters": _BY_AXIS}
        for name in ("Glm4vTextConfig", "GlmOcrTextConfig", "Qwen2VLTextConfig", "Qwen2_5_VLTextConfig",
                     "Qwen2_5OmniTextConfig", "Qwen2_5OmniTalkerConfig", "PaddleOCRTextConfig")
    },
    "CohereCompassTextConfig": {"rope_parameters": {"full_attention": _ROTATION}},
    "GPTJConfig": {"rotary_dim": WIDTH},
    # Its projection is in four blocks, whatever the number of heads.
    "CodeGenConfig": {"rotary_dim": WIDTH, "n_head": 8, "n_embd": 8 * WIDTH},
    "LayoutLMv3Config": {"coordinate_size": 6, "shape_size": 4, "input_size": 32},
    "ClapAudioConfig": {"spec_size": 256, "num_mel_bins": 64},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "DetrConfig": {"backbone_config": lambda: _resnet("stage4")},
    "ConditionalDetrConfig": {"backbone_config": lambda: _resnet("stage4")},
    "DabDetrConfig": {"backbone_config": lambda: _resnet("stage4")},
    "DeformableDetrConfig": {"backbone_config": lambda: _resnet("stage2", "stage3", "stage4")},
    "MuseSparkAudioConfig": {"num_hidden_layers": 4},
    "MoonshineStreamingConfig": {"num_key_value_heads": H},
    **{
        name: {"window_size": 2, "patch_size": 2}
        for name in ("SwinConfig", "DonutSwinConfig", "MaskFormerSwinConfig", "Swinv2Config")
    },
    **{
        name: {"global_head_dim": WIDTH}
        for name in ("Gemma4TextConfig", "Gemma4UnifiedTextConfig", "EmbeddingGemma2TextConfig",
                     "DiffusionGemmaTextConfig")
    },
    "Dots3NoteTextConfig": {
        "num_key_value_heads": H, "kv_lora_rank": 16, "q_lora_rank": 16, "swa_num_attention_heads": H,
        "swa_num_key_value_heads": H, "swa_head_dim": 12, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8,
        "swa_kv_lora_rank": 16,
    },
    "BigBirdConfig": {"block_size": 2, "num_random_blocks": 1},
    "BigBirdPegasusConfig": {"block_size": 2, "num_random_blocks": 1},
    "Pix2StructTextConfig": {"initializer_range": 0.02},
    "LwDetrViTConfig": {"image_size": 64, "patch_size": 4},
    "LwDetrConfig": {"projector_scale_factors": [1.0], "backbone_config": {"out_indices": [1, 2]}},
    "ZoeDepthConfig": {"backbone_config": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]}},
    # A sine and a cosine for each of eight coordinates.
    "BrosConfig": {"hidden_size": 64, "dim_bbox_sinusoid_emb_2d": 16, "dim_bbox_sinusoid_emb_1d": 2,
                   "dim_bbox_projection": 16},
    "DepthProConfig": {"patch_size": 32, "scaled_images_feature_dims": [16, 16, 16],
                       "intermediate_feature_dims": [16, 16], "intermediate_hook_ids": [1, 0]},
    "Molmo2AdapterConfig": {"vision_feature_layer": [1, 0]},
    "FunAsrNanoAdaptorConfig": {"intermediate_size": MODEL // 4},
    "Gemma4UnifiedAssistantConfig": {"text_config": {"num_kv_shared_layers": 2, "num_hidden_layers": 2}},
    "Gemma4AssistantConfig": {
        "_default": {"text_config": {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0,
                                     "vocab_size_per_layer_input": 0}},
        "text_config": {"num_kv_shared_layers": 2, "num_hidden_layers": 2, "hidden_size_per_layer_input": 0,
                        "vocab_size_per_layer_input": 0},
    },
    "EsmFold2AtomEncoderConfig": {"num_uid_rope_pairs": 1, "num_spatial_rope_pairs_per_axis": 1},
    "Granite4VisionConfig": {"deepstack_layer_map": [[-1, 0]], "spatial_target_layers": [1],
                             "downsample_rate": "2/4", "vision_config": {"hidden_size": 64 * H}},  # a head for every 64
    "EsmFold2Config": {"single_inputs_size": MODEL + 2 * 33 + 1, "atom_feature_dim": 5 + 128 + 64 * 4},
    **{  # windows are merged after that layer
        name: {"insert_layer_id": 0}
        for name in ("MiniCPMV4_6Config", "MiniCPMV4_6VisionConfig", "MiniCPMV4_7Config", "MiniCPMV4_7VisionConfig",
                     "MiniCPMOcrConfig", "MiniCPMOcrVisionConfig")
    },
    "FastVlmConfig": {"vision_config": lambda: _vision_tower()},
    "T5Gemma2TextConfig": {"dropout_rate": 0.0},
    "T5Gemma2DecoderConfig": {"dropout_rate": 0.0},
    "Qwen3OmniMoeTalkerConfig": {"spatial_merge_size": 2},
    "Qwen3OmniMoeTalkerTextConfig": {"shared_expert_intermediate_size": 48},
    "RadioConfig": {"video_temporal_patch_size": 2},
    "VibeVoiceAcousticTokenizerConfig": {"num_filters": 4},
    "VibeVoiceAcousticTokenizerEncoderConfig": {"num_filters": 4},
    "VibeVoiceAcousticTokenizerDecoderConfig": {"num_filters": 4},
    "VibeVoiceAsrConfig": {"acoustic_tokenizer_chunk_size": 3200},
    "ChameleonConfig": {"vocabulary_map": {"<image>": 5, "IMGIMGA": 6, "IMGIMGB": 7}},
    "Ernie4_5_MoeConfig": {"moe_k": 2},
    "Ernie4_5_VLMoeTextConfig": {"moe_k": 2, "rope_parameters": _ROTATION | {"mrope_section": [1, 1, 2]}},
    "BailingHybridConfig": {"num_expert_group": 1, "kv_lora_rank": 16},
    **{
        name: {"rope_parameters": _BY_AXIS | {"partial_rotary_factor": 1.0}}
        for name in ("Glm4vMoeTextConfig", "GlmImageTextConfig", "HunYuanVLTextConfig")
    },
    "Step3p7TextConfig": {"sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]},
    **{  # a feature map for each of four layers
        name: {"backbone_config": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]}}
        for name in ("DepthAnythingConfig", "PromptDepthAnythingConfig", "Tipsv2DptConfig", "CHMv2Config")
    },
    # A head is as wide as what is rotated of it; what the decoder says is among the tokens that the encoder knows.
    "ClvpEncoderConfig": {"hidden_size": 32 * H, "bos_token_id": 3},
    "ClvpDecoderConfig": {"hidden_size": 32 * H, "vocab_size": 256, "bos_token_id": 3, "eos_token_id": 2},
    "Dots3NoteAudioConfig": {"conv_output_size": 4 * MODEL, "samples_per_token": 8 * 160},
    "Kimi_K25VisionConfig": {"pos_emb_height": 32},
    "MllamaVisionConfig": {"intermediate_layers_indices": [0, 1]},
    "Phi4MultimodalAudioConfig": {"ext_pw_out_channel": MODEL, "depthwise_separable_out_channel": MODEL},
    "PPFormulaNetVisionConfig": {"post_conv_in_channels": MODEL},
    "SLANeXtConfig": {"post_conv_in_channels": MODEL},
    "PPDocLayoutV2Config": {"decoder_in_channels": [MODEL] * 3, "class_thresholds": [0.0] * 2, "class_order": [0, 1]},
    "Sam2PromptEncoderConfig": {"patch_size": 16},
    "FastSpeech2ConformerHifiGanConfig": {"model_in_dim": 80},
    # They set the size of their parts' pictures, to 1008 by default.
    **{name: {"image_size": 32} for name in ("Sam3TrackerVideoConfig", "Sam3VideoConfig")},
    "Sam3VisionConfig": {"backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]]},
    # Every place is a point: LightGlue rotates keys by them, and the judge compares keys of many pictures.
    "SuperPointConfig": {"keypoint_decoder_dim": 65, "keypoint_threshold": -1.0},
    "Llama4VisionConfig": {"intermediate_size": 4 * MODEL},
    "VitMatteConfig": {"backbone_config": {"patch_size": 16}},
    "AlignConfig": {"projection_dim": 256},
    "AlignVisionConfig": {"hidden_dim": 256},
    "EncodecConfig": {"codebook_dim": None},
    "Sam2VisionConfig": {"backbone_channel_list": [128, 64, 32, 16],
                         "backbone_feature_sizes": [[8, 8], [4, 4], [2, 2]]},
    "ShieldGemma2Config": {"yes_token_index": 10, "no_token_index": 11},
    "TvpConfig": {"max_img_size": 64, "num_frames": 3},
    **{
        name: {"max_source_positions": 40}
        for name in ("AudioFlamingo3EncoderConfig", "Qwen2AudioEncoderConfig", "VoxtralEncoderConfig",
                     "MossTranscribeDiarizeAudioConfig")
    },
    "Blip2Config": {"image_token_index": 5},
    "InstructBlipConfig": {"image_token_index": 5},
    "InstructBlipVideoConfig": {"video_token_index": 5},
    "VitsConfig": {"noise_scale": 0.0, "use_stochastic_duration_prediction": False},
    "Emu3Config": {"vocabulary_map": {"<image>": 5, "<|visual token 000001|>": 6, "<|extra_200|>": 7}},
}  # fmt: skip
# where the auto mappings name a part that does not take the whole's config
CLASSES = {
    "musicgen": "MusicgenForConditionalGeneration",
    "musicgen_melody": "MusicgenMelodyForConditionalGeneration",
}


def architectures() -> dict[str, tuple[str, str]]:
    """Give model type -> (module, config class) for every config class of the auto mappings, each once."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES, model_type_to_module_name

    found: dict[str, tuple[str, str]] = {}
    taken: set[str] = set()
    for model_type, config_class in CONFIG_MAPPING_NAMES.items():
        if config_class in taken:
            continue
        own = [name for name, value in CONFIG_MAPPING_NAMES.items() if value == config_class]
        plain = config_class.removesuffix("Config").lower()
        name = next((name for name in own if re.sub("[-_]", "", name) == plain), model_type)
        taken.add(config_class)
        found[name] = (f"transformers.models.{model_type_to_module_name(name)}", config_class)
    return dict(sorted(found.items()))


def model_class(model_type: str) -> Any:
    """Find the class to build: the one that the auto mappings name, `AutoModel` first, or one that takes the config."""
    import transformers
    from transformers.models.auto import modeling_auto

    if model_type in CLASSES:
        return getattr(transformers, CLASSES[model_type])
    mappings = ["MODEL_MAPPING_NAMES", *sorted(name for name in dir(modeling_auto) if name.endswith("_MAPPING_NAMES"))]
    for mapping in mappings:
        if mapping.startswith("CONFIG"):
            continue
        named = getattr(modeling_auto, mapping).get(model_type)
        named = named if isinstance(named, str) or not named else named[0]
        if named and hasattr(transformers, named):
            return getattr(transformers, named)
    module, config_class = architectures()[model_type]
    for path in _modeling_modules(module):
        kinds = [
            kind for kind in vars(path).values() if _takes(kind, config_class) and kind.__module__ == path.__name__
        ]
        kinds.sort(key=lambda kind: (kind.__name__.endswith("PreTrainedModel"), not kind.__name__.endswith("Model")))
        kinds = [kind for kind in kinds if "forward" in vars(kind)]
        if kinds:
            return kinds[0]
    raise NoModelError(f"no model takes a {config_class}")


def _takes(kind: Any, config_class: str) -> bool:
    own = getattr(kind, "config_class", None) if isinstance(kind, type) and issubclass(kind, nn.Module) else None
    return getattr(own, "__name__", None) == config_class


def _modeling_modules(module: str) -> Iterator[Any]:
    import pkgutil

    package = importlib.import_module(module)
    for info in pkgutil.iter_modules(package.__path__):
        if info.name.startswith("modeling_"):
            yield importlib.import_module(f"{module}.{info.name}")


def config_of(model_type: str, left: frozenset[str] = frozenset()) -> Any:
    """Build the shrunken config of a model type; `left` names groups of settings that are left as they are."""
    module, name = architectures()[model_type]
    kind = getattr(importlib.import_module("transformers"), name, None)
    if kind is None:
        package = importlib.import_module(module)
        kind = getattr(package, name, None) or getattr(
            importlib.import_module(f"{module}.configuration_{module.rsplit('.', 1)[-1]}"), name
        )
    return shrunken(kind, left=left)


def shrunken(
    kind: Any,
    overrides: dict[str, Any] | None = None,
    values: dict[str, Any] | None = None,
    left: frozenset[str] = frozenset(),
) -> Any:
    """Build a config of a class with everything made small, its parts too."""
    from transformers import PreTrainedConfig

    overrides = EXCEPTIONS.get(kind.__name__, {}) | (overrides or {})
    overrides = {name: value() if callable(value) else value for name, value in overrides.items()}
    needed = overrides.pop("_default", {})
    default = kind(**(needed | (values or {})))
    changed: dict[str, Any] = {}
    for name, value in vars(default).items():
        if name.startswith("_") or (name in overrides and not isinstance(overrides[name], dict)):
            continue
        if isinstance(value, PreTrainedConfig):
            inner = overrides.pop(name, {})
            changed[name] = shrunken(type(value), inner, _differences(value), left)
        elif isinstance(getattr(type(default), name, None), property):
            continue
        elif value is None and "empty" in left:
            filled = next((size for pattern, size in _EMPTY if re.search(pattern, name)), None)
            if filled is not None:
                changed[name] = filled
        elif isinstance(value, dict):
            changed |= _sections(name, value, default, left)
        else:
            small = _small(name, value, default, left)
            if small is not None:
                changed[name] = small
    if "types" not in left:
        changed |= _layer_types(default)
    changed |= _per_layer(default, changed)
    if "qk_rope_head_dim" in changed and _get(default, "head_dim") == _get(default, "qk_rope_head_dim"):
        changed["head_dim"] = changed["qk_rope_head_dim"]
    if "qk_head_dim" in changed and "qk_nope_head_dim" in changed:
        changed["qk_head_dim"] = changed["qk_nope_head_dim"] + changed.get("qk_rope_head_dim", 0)
    changed |= _token_ids(default)
    changed |= overrides
    kept = {name: value for name, value in (needed | (values or {})).items() if name not in changed}
    return kind(**(kept | changed))


_EMPTY = [
    (r"head_dim$", WIDTH),
    (r"vocab_size$", VOCABULARY),
    (r"^hidden_size$", MODEL),
    (r"key_value_heads$", G),
    (r"intermediate_size$", 48),
    (r"num_experts$", 4),
    (r"num_experts_per_tok$|top_k_experts$|moe_topk$", 2),
    (r"prediction_length$", 4),
]


def _differences(config: Any) -> dict[str, Any]:
    """What a part's config has that is not its class's default, as far as it is a plain switch."""
    try:
        default = type(config)()
    except Exception:
        return {}
    stages = getattr(config, "_out_indices", None)
    kept = {"out_indices": list(stages)} if stages and isinstance(_get(config, "depths"), (list, tuple)) else {}
    return kept | {
        name: value
        for name, value in vars(config).items()
        if not name.startswith("_")
        and (isinstance(value, (bool, str)) or name == "model_args")
        and getattr(default, name, None) != value
        and name not in ("dtype", "transformers_version", "model_type")
    }  # fmt: skip


def _small(name: str, value: Any, default: Any, left: frozenset[str] = frozenset()) -> Any:
    """Make a value small by what it is called; `None` leaves it."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, (list, tuple)):
        return None if "lists" in left else _small_list(name, list(value), default)
    if not isinstance(value, int):
        return None
    for pattern, size in _SIZES:
        if not re.search(pattern, name):
            continue
        if size is None or ("widths" in left and size in ("heads", "key heads", "width", "image", WIDTH)):
            return None
        if callable(size):
            return size(value)
        if isinstance(size, int):
            return size if value > 0 else None
        if size == "heads":
            return H if value > 1 else None
        if size == "key heads":
            heads = _default_heads(default)
            return None if value <= 0 else H if value == heads else G if value > 1 else 1
        if size == "layers":
            is_stages = re.search("blocks|stages", name) and any(
                isinstance(other, (list, tuple)) and len(other) == value for other in vars(default).values()
            )
            return None if is_stages else min(value, 2)
        if size == "image":
            return 32
        if size == "width":
            return MODEL if value >= MODEL else None
    return None


def _default_heads(default: Any) -> int | None:
    for name in (
        "num_attention_heads",
        "n_head",
        "num_heads",
        "n_heads",
        "decoder_attention_heads",
        "encoder_attention_heads",
    ):
        value = _get(default, name)
        if isinstance(value, int):
            return value
    return None


def _get(config: Any, name: str) -> Any:
    """Read a setting; what is not there, or differs from layer to layer, is `None`."""
    try:
        return getattr(config, name, None)
    except Exception:
        return None


def _sections(name: str, value: dict[str, Any], default: Any, left: frozenset[str]) -> dict[str, Any]:
    """Divide the narrower heads' rotations into as many sections."""
    sections = value.get("mrope_section")
    if not isinstance(sections, (list, tuple)) or "widths" in left:
        return {}
    width = _get(default, "head_dim") or default.hidden_size // default.num_attention_heads
    total = round(sum(sections) * WIDTH / width)
    shares = [total // len(sections)] * len(sections)
    shares[0] += total - sum(shares)
    return {name: value | {"mrope_section": shares}}


def _small_list(name: str, values: list[Any], default: Any) -> Any:
    if not values or not all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        if values and all(isinstance(value, (list, tuple)) for value in values) and "size" not in name:
            return None
        return None
    if re.search(r"kernel|stride|pad|dilation|ratio|window|index|indices|pool|out_features|ids?$|scale|factor", name):
        return None
    if re.search(r"heads?$|num_heads|nheads", name):
        low = min(values)
        return [min(2 * max(1, round(value / low)), 16) for value in values]
    if re.search(r"depth|layers?$|blocks", name):
        return [min(value, 1) if len(values) > 2 else min(value, 2) for value in values]
    if re.search(r"image_size|input_size|img_size", name):
        return [32 for _ in values]
    if re.search(r"patch_size", name):
        return [min(value, 8) for value in values]
    if re.search(r"hidden|dim|channels|width|size", name) and max(values) >= 32:
        low = min(values)
        heads = next(
            (list(getattr(default, other)) for other in ("num_attention_heads", "num_heads", "encoder_num_heads")
             if isinstance(getattr(default, other, None), (list, tuple))), None,
        )  # fmt: skip
        if heads and len(heads) == len(values):
            least = min(heads)
            return [8 * min(2 * max(1, round(value / least)), 16) for value in heads]
        return [min(16 * max(1, round(value / low)), 128) for value in values]
    return None


def _layer_types(default: Any) -> dict[str, Any]:
    """Keep one layer of every type, in their first order."""
    types = getattr(default, "layer_types", None)
    if not isinstance(types, (list, tuple)) or not any("attention" in str(kind) for kind in types):
        return {}
    name = (type(default).attribute_map or {}).get("layer_types", "layer_types")
    if isinstance(getattr(type(default), name, None), property):
        return {}
    kinds = list(dict.fromkeys(types))
    kinds = kinds * 2 if len(kinds) == 1 else kinds
    return {"layer_types": kinds, "num_hidden_layers": len(kinds)}


def _per_layer(default: Any, changed: dict[str, Any]) -> dict[str, Any]:
    """Shorten what has an entry for each layer; those of the layers that stay."""
    count, now = getattr(default, "num_hidden_layers", None), changed.get("num_hidden_layers")
    if not isinstance(count, int) or not isinstance(now, int) or count < 5:
        return {}
    types, kept = getattr(default, "layer_types", None), list(range(now))
    if "layer_types" in changed and isinstance(types, (list, tuple)) and len(types) == count:
        firsts = [list(types).index(kind) for kind in dict.fromkeys(types)]
        kept = firsts if len(firsts) == now else kept
    return {
        name: [_small(name, values[i], default) or values[i] for i in kept]
        for name, values in vars(default).items()
        if isinstance(values, (list, tuple)) and len(values) == count and name != "layer_types"
        and not isinstance(getattr(type(default), name, None), property) and not name.startswith("_")
    }  # fmt: skip


def _token_ids(default: Any) -> dict[str, Any]:
    """Give every special token an id within the small vocabulary."""
    small: dict[str, Any] = {}
    names = [n for n in vars(default) if re.search(r"token_(id|index)$|_token$|(start|end)_id$|_token_ids$", n)]
    for i, name in enumerate(sorted(names)):
        value = getattr(default, name)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 100:
            small[name] = VOCABULARY - 1 - i
        elif isinstance(value, (list, tuple)) and all(isinstance(v, int) for v in value):
            small[name] = [min(v, VOCABULARY - 40 - j) for j, v in enumerate(value)]
    return small


# what is left as it is, from little to much, until the model can be built
LEFT = [(), ("empty",), ("types",), ("lists",), ("lists", "types", "empty"), ("widths", "empty"),
        ("widths", "lists", "types")]  # fmt: skip
MOST_PARAMETERS = 60e6


class NoModelError(LookupError):
    """No class of models takes a config by itself: it is that of a part."""


def variants(model_type: str) -> Iterator[nn.Module]:
    """Build small models, from one in which everything is small to one in which much is left as it is."""
    kind = model_class(model_type)
    first: Exception | None = None
    sizes: set[int] = set()
    for left in LEFT:
        try:
            config = config_of(model_type, frozenset(left))
            if left:
                with torch.device("meta"):
                    meta = kind(config_of(model_type, frozenset(left)))
                size = sum(parameter.numel() for parameter in meta.parameters())
                if size > MOST_PARAMETERS:
                    raise ValueError(f"{size} parameters where the config is left as it is")
                if size in sizes:
                    continue
            torch.manual_seed(0)
            model = randomized(kind(config))
        except Exception as error:
            if isinstance(error, ImportError):
                raise
            first = first or error
        else:
            sizes.add(sum(parameter.numel() for parameter in model.parameters()))
            yield model
    if not sizes:
        assert first is not None
        raise first


def randomized(model: nn.Module) -> nn.Module:
    """Draw every parameter anew: matrices that keep a vector's length, gains around one; biases are zero."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.is_floating_point() or not parameter.numel():
                continue
            if parameter.dim() >= 2:
                fan = max(1, parameter[0].numel())
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * min(fan, 512) ** -0.5)
            elif name.endswith(("bias", "self_attn.A")):  # doge's `A` lets the values of all heads mask each
                parameter.zero_()
            elif name.endswith("weight"):
                parameter.copy_(0.5 + torch.rand(parameter.shape, generator=generator))
            else:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model.float().eval()
