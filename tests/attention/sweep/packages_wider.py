"""Packages of further fields: recommendation, weather, proteins, tables, sound, whole models of vision.

They were chosen before any of them was examined, and their heads written down from their sources. Where one is not
installed its models are left out.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.attention.sweep.packages_building import Build, Example, make, noise, tokens, two, without

_SEQUENCE = noise(8, 32)
_TABLES = ("gensim", "spacy", "cv2", "imutils", "fastparquet", "pyarrow")
_SEGMENTS = ("hydra", "iopath")
_SERIES = ("xarray", "nfoursid", "shap", "statsmodels", "holidays", "pyod", "tbats", "ray")
_COLUMNS = 6


def _stacked(build: Build) -> Build:
    """Build two layers, one behind the other."""
    return lambda: nn.Sequential(build(), build())


def _several(*shapes: tuple[int, ...]) -> Callable[[int], tuple[Tensor, ...]]:
    def made(batch: int) -> tuple[Tensor, ...]:
        return tuple(noise(*shape)(batch)[0].roll(number) for number, shape in enumerate(shapes))

    return made


def _categories(batch: int) -> tuple[Tensor, ...]:
    return (torch.randint(1, 7, (batch, _COLUMNS), generator=torch.Generator().manual_seed(2)).float(),)


def _wide(name: str, **options: Any) -> Build:
    """Build a model of tables with a few categorical columns."""

    def build() -> nn.Module:
        names = [f"c{number}" for number in range(_COLUMNS)]
        places = {name: number for number, name in enumerate(names)}
        columns = [(name, 7) for name in names]
        return make("pytorch_widedeep.models", name, column_idx=places, cat_embed_input=columns, **options)()

    return without(build, *_TABLES)


def _memory() -> nn.Module:
    """Build the part of sam2 that attends to earlier frames."""
    rotated = importlib.import_module("sam2.modeling.sam.transformer").RoPEAttention
    memory = importlib.import_module("sam2.modeling.memory_attention")
    sizes: dict[str, Any] = {"embedding_dim": 32, "num_heads": 4, "feat_sizes": (4, 4)}
    own, other = rotated(**sizes), rotated(**sizes, rope_k_repeat=True, kv_in_dim=24)
    return memory.MemoryAttention(
        32, True, memory.MemoryAttentionLayer("relu", other, 32, 48, 0.0, False, True, False, own), 2
    )


def _frames_first(module: nn.Module, *inputs: Tensor) -> Any:
    return module(*(one.transpose(0, 1) for one in inputs))


def _weather() -> nn.Module:
    kernels = importlib.import_module("anemoi.models.layers.utils").load_layer_kernels()
    return make(
        "anemoi.models.layers.attention", "MultiHeadSelfAttention", 4, 32, kernels,
        attention_implementation="scaled_dot_product_attention",
    )()  # fmt: skip


def _of_points(module: Any, x: Tensor) -> Any:
    flat = x.flatten(0, 1)
    return module.attention_computation(
        *(part(flat) for part in (module.lin_q, module.lin_k, module.lin_v)), None, len(x)
    )


def _forecaster() -> nn.Module:
    config = make(
        "timesfm.configs", "TransformerConfig", model_dims=32, hidden_dims=48, num_heads=4, attention_norm="rms",
        feedforward_norm="rms", qk_norm="rms", use_bias=False, use_rotary_position_embeddings=True,
        ff_activation="swish", fuse_qkv=True,
    )()  # fmt: skip
    return make("timesfm.torch.transformer", "Transformer", config)()


def _speech(**options: Any) -> Build:
    part = make(
        "moshi.modules.transformer", "StreamingTransformer", d_model=32, num_heads=4, num_layers=2, dim_feedforward=48,
        causal=True, context=16, positional_embedding="rope", **options,
    )  # fmt: skip
    return without(part, "sphn", "sounddevice", "sentencepiece")


def _itself(module: nn.Module, x: Tensor) -> Any:
    return module(x, x, x)


# what is imported -> the examples
_BY_PACKAGE: dict[str, dict[str, Example]] = {
    "pytorch_tabular": {
        "pytorch-tabular": Example(
            without(_stacked(make("pytorch_tabular.models.common.layers.transformers", "TransformerEncoderBlock", 32, 4,
                                  transformer_head_dim=8)), "pytorch_tabnet", "torchsurv", "skbase"), _SEQUENCE),
    },
    "pytorch_widedeep": {
        "pytorch-widedeep.TabTransformer": Example(
            _wide("TabTransformer", input_dim=32, n_heads=4, n_blocks=2), _categories),
        "pytorch-widedeep.SAINT": Example(_wide("SAINT", input_dim=32, n_heads=4, n_blocks=2), _categories),
        "pytorch-widedeep.FTTransformer": Example(
            _wide("FTTransformer", input_dim=32, n_heads=4, n_blocks=2), _categories),
        "pytorch-widedeep.TabPerceiver": Example(
            _wide("TabPerceiver", input_dim=32, latent_dim=32, n_latents=5, n_cross_attn_heads=4, n_latent_heads=4,
                  n_latent_blocks=2, n_perceiver_blocks=2), _categories),
        "pytorch-widedeep.TabFastFormer": Example(
            _wide("TabFastFormer", input_dim=32, n_heads=4, n_blocks=2), _categories),
    },
    "deepctr_torch": {
        "deepctr-torch": Example(
            without(_stacked(make("deepctr_torch.layers.interaction", "InteractingLayer", 32, 4)), "tensorflow"),
            _SEQUENCE),
    },
    "torch_rechub": {
        "torch-rechub.interacting": Example(
            _stacked(make("torch_rechub.basic.layers", "InteractingLayer", 32, 4)), _SEQUENCE),
        "torch-rechub.hllm": Example(
            _stacked(make("torch_rechub.models.generative.hllm", "HLLMTransformerBlock", 32, 4)), _SEQUENCE),
    },
    "sam2": {
        "sam2.memory": Example(without(_memory, *_SEGMENTS), _several((16, 32), (32, 24), (16, 32), (32, 24)),
                               _frames_first),
        "sam2.two_way": Example(
            without(make("sam2.modeling.sam.transformer", "TwoWayTransformer", 2, 32, 4, 48), *_SEGMENTS),
            _several((32, 4, 4), (32, 4, 4), (5, 32))),
    },
    "graph_transformer_pytorch": {
        "graph-transformer-pytorch": Example(
            make("graph_transformer_pytorch", "GraphTransformer", dim=32, depth=2, edge_dim=16, heads=4, dim_head=8),
            two((8, 32), (8, 8, 16))),
    },
    "alphafold2_pytorch": {
        "alphafold2-pytorch": Example(
            without(make("alphafold2_pytorch.alphafold2", "Evoformer", depth=2, dim=32, seq_len=12, heads=4, dim_head=8,
                         attn_dropout=0.0, ff_dropout=0.0),
                    "pytorch3d", "mdtraj", "proDy", "Bio", "sidechainnet", "mp_nerf"), two((6, 6, 32), (5, 6, 32))),
    },
    "egnn_pytorch": {
        "egnn-pytorch": Example(
            make("egnn_pytorch.egnn_pytorch", "GlobalLinearAttention", dim=32, heads=4, dim_head=8),
            two((8, 32), (5, 32))),
    },
    "self_attention_cv": {
        "self-attention-cv.block": Example(_stacked(make("self_attention_cv", "TransformerBlock", 32, 4)), _SEQUENCE),
        "self-attention-cv.bottleneck": Example(
            make("self_attention_cv.bottleneck_transformer.bot_att", "BottleneckAttention", 32, (4, 4), heads=4),
            noise(32, 4, 4)),
        "self-attention-cv.linformer": Example(
            make("self_attention_cv", "LinformerAttention", 32, heads=4, shared_projection=False, proj_shape=(8, 4)),
            _SEQUENCE),
        "self-attention-cv.vit": Example(
            make("self_attention_cv", "ViT", img_dim=32, in_channels=3, patch_dim=8, num_classes=5, dim=32, blocks=2,
                 heads=4, dim_linear_block=48), noise(3, 32, 32)),
        "self-attention-cv.timesformer": Example(
            make("self_attention_cv", "Timesformer", img_dim=32, frames=2, patch_dim=8, dim=32, num_classes=5, blocks=2,
                 heads=4, dim_linear_block=48), noise(2, 3, 32, 32)),
    },
    "vformer": {
        "vformer.gated": Example(
            without(make("vformer.attention", "GatedPositionalSelfAttention", 32, 4, 8), "cv2"), noise(16, 32)),
        "vformer.convolved": Example(
            without(make("vformer.attention", "ConvVTAttention", 32, 32, 4, 4), "cv2"), noise(16, 32)),
        "vformer.cross": Example(
            without(make("vformer.attention", "CrossAttentionWithClsToken", 24, 32, 4, 8), "cv2"),
            two((1, 24), (8, 32))),
        "vformer.spatial": Example(
            without(make("vformer.attention", "SpatialAttention", 32, 4, sr_ratio=2), "cv2"), noise(16, 32),
            lambda m, x: m(x, 4, 4)),
    },
    "swin_transformer_pytorch": {
        "swin-transformer-pytorch": Example(
            make("swin_transformer_pytorch", "SwinTransformer", hidden_dim=32, layers=(2, 2, 2, 2), heads=(2, 4, 4, 8),
                 head_dim=8, window_size=2, channels=3, num_classes=5), noise(3, 64, 64)),
    },
    "aurora": {
        "microsoft-aurora": Example(
            make("aurora.model.swin3d", "WindowAttention", 32, (2, 2, 2), num_heads=4), _SEQUENCE),
    },
    "anemoi": {
        "anemoi-models": Example(without(_weather, "hydra", "anemoi.graphs", "trimesh"), _SEQUENCE, _of_points),
    },
    "darts": {
        "darts": Example(
            without(make("darts.models.components.tft_submodels", "_InterpretableMultiHeadAttention", 4, 32), *_SERIES),
            _SEQUENCE, _itself),
    },
    "timesfm": {
        "timesfm": Example(_forecaster, _SEQUENCE, lambda m, x: m(x, torch.zeros(x.shape[:2], dtype=torch.bool))),
    },
    "squeezeformer": {
        "squeezeformer": Example(
            make("squeezeformer.attention", "MultiHeadedSelfAttentionModule", 32, 4, 0.0), _SEQUENCE),
    },
    "moshi": {
        "moshi": Example(_speech(), _SEQUENCE),
        "moshi.groups": Example(_speech(kv_repeat=2), _SEQUENCE),
    },
    "earthformer": {
        "earthformer": Example(
            make("earthformer.cuboid_transformer.cuboid_transformer", "CuboidSelfAttentionLayer", dim=32, num_heads=4,
                 cuboid_size=(2, 2, 2), shift_size=(1, 1, 1), strategy=("l", "l", "l")), noise(4, 4, 4, 32)),
    },
    "borzoi_pytorch": {
        "borzoi-pytorch": Example(
            without(make("borzoi_pytorch.pytorch_borzoi_transformer", "Attention", 32, heads=4, dim_key=8, dim_value=8,
                         num_rel_pos_features=12), "intervaltree"), _SEQUENCE),
    },
    "stam_pytorch": {
        "stam-pytorch": Example(
            make("stam_pytorch", "STAM", dim=32, image_size=32, patch_size=8, num_frames=2, space_depth=1,
                 space_heads=4, space_mlp_dim=48, time_depth=1, time_heads=4, time_mlp_dim=48, num_classes=5,
                 space_dim_head=8, time_dim_head=8), noise(2, 3, 32, 32)),
    },
    "infini_transformer_pytorch": {
        "infini-transformer-pytorch": Example(
            make("infini_transformer_pytorch", "InfiniTransformer", num_tokens=64, dim=32, depth=1, heads=4,
                 dim_head=8), tokens(8)),
    },
    "robotic_transformer_pytorch": {
        "robotic-transformer-pytorch": Example(
            without(make("robotic_transformer_pytorch.robotic_transformer_pytorch", "TransformerAttention", 32,
                         dim_head=8, heads=4), "classifier_free_guidance_pytorch"), _SEQUENCE),
    },
    "gsa_pytorch": {
        "gsa-pytorch": Example(
            make("gsa_pytorch", "GSA", dim=32, dim_out=32, dim_key=8, heads=4, rel_pos_length=8), noise(32, 8, 8),
            attends=False),  # its softmax is over keys, which are summed before queries meet them
    },
    "torch_harmonics": {
        "torch-harmonics": Example(
            make("torch_harmonics", "AttentionS2", in_channels=32, num_heads=4, in_shape=(6, 12), out_shape=(6, 12)),
            noise(32, 6, 12)),
    },
    "grouped_query_attention_pytorch": {
        "grouped-query-attention-pytorch": Example(
            make("grouped_query_attention_pytorch.attention", "MultiheadGQA", 32, 4, 2), _SEQUENCE, _itself),
    },
    "compositional_attention_pytorch": {
        "compositional-attention-pytorch": Example(
            make("compositional_attention_pytorch", "CompositionalAttention", dim=32, dim_head=8, num_searches=4,
                 num_retrievals=2), _SEQUENCE),
    },
}  # fmt: skip

EXAMPLES: dict[str, Example] = {name: one for examples in _BY_PACKAGE.values() for name, one in examples.items()}


def names_here() -> list[str]:
    """List the examples whose package is installed."""
    return [
        name
        for package, examples in _BY_PACKAGE.items()
        if importlib.util.find_spec(package) is not None
        for name in examples
    ]
