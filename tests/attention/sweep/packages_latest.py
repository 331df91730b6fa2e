"""More packages of others: brain signals, sound, tables, proteins, series, and models that are made to be taken apart.

They were chosen before any of them was examined. Where one is not installed its models are left out.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor, nn

from tests.attention.sweep.packages_building import (
    Build,
    Example,
    beside,
    make,
    noise,
    tokens,
    two,
    without,
    without_start,
)

_SEQUENCE = noise(8, 32)
_BRAINS = ("h5py", "mne", "skorch", "wfdb", "mne_bids", "torchaudio")
_ROBOTS = ("classifier_free_guidance_pytorch", "ema_pytorch", "torchtyping")
_SOUND = ("librosa", "torchlibrosa", "soundfile", "webdataset", "wget", "torchaudio", "braceexpand", "h5py")


def _native() -> nn.Module:
    """Build the model that transformer-lens has of its own, which needs no download."""
    settings = make(
        "transformer_lens.config", "TransformerBridgeConfig", d_model=32, n_layers=1, n_heads=4, d_head=8, n_ctx=16,
        d_vocab=64, act_fn="gelu", architecture="TransformerLensNative",
    )()  # fmt: skip
    return make("transformer_lens.model_bridge.sources.native.model", "NativeModel", settings)()


def _without_start(package: str, file: str, name: str, *args: Any, **options: Any) -> Build:
    return without_start(make(f"{package}.{file}", name, *args, **options), package)


def _routes(name: str, *args: Any) -> Build:
    """Build attention of rl4co, which plans routes, without its environments."""
    build = without_start(make("rl4co.models.nn.attention", name, *args), "rl4co", "rl4co.models", "rl4co.models.nn")
    return without(beside(build, "rl4co.utils", "rl4co.utils.pylogger"), "torchrl", "tensordict")


class _Pointing(nn.Module):
    """The part of a decoder of rl4co that holds the projections, which its attention is given."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes, self.context = nn.Linear(32, 96, bias=False), nn.Linear(32, 32, bias=False)
        self.pointer = _routes("PointerAttention", 32, 4)()

    def forward(self, x: Tensor, context: Tensor) -> Any:
        keys, values, logit_keys = self.nodes(x).chunk(3, -1)
        seen = torch.ones(len(x), x.shape[1], dtype=torch.bool)
        return self.pointer(self.context(context), keys, values, logit_keys, seen)


def names_here() -> list[str]:
    """List the examples whose package is installed."""
    packages = {
        name: name.partition(".")[0].removesuffix("-transformer" * name.startswith("hiera")) for name in EXAMPLES
    }
    return [name for name, package in packages.items() if importlib.util.find_spec(package.replace("-", "_"))]


EXAMPLES: dict[str, Example] = {
    "braindecode": Example(
        without(_without_start("braindecode", "modules.attention", "MultiHeadAttention", 32, 4), *_BRAINS), _SEQUENCE
    ),
    "laion-clap": Example(
        without(_without_start("laion_clap", "clap_module.htsat", "WindowAttention", 32, (4, 4), 4), *_SOUND),
        noise(16, 32)),
    "transformer-lens": Example(without(_native, "datasets"), tokens(10)),
    "uni2ts": Example(
        make("uni2ts.module.attention", "GroupedQueryAttention", 32, 4, 2), _SEQUENCE, lambda m, x: m(x, x, x)
    ),
    "uni2ts.one_key_head": Example(
        make("uni2ts.module.attention", "MultiQueryAttention", 32, 4), _SEQUENCE, lambda m, x: m(x, x, x)
    ),
    "tabicl": Example(make("tabicl._model.layers", "MultiheadAttentionBlock", 32, 4, 48), _SEQUENCE),
    "tabicl.induced": Example(
        make("tabicl._model.layers", "InducedSelfAttentionBlock", 32, 4, 48, 5), noise(3, 8, 32)),
    "boltz": Example(
        make("boltz.model.layers.attention", "AttentionPairBias", 32, 12, 4), two((8, 32), (8, 8, 12)),
        lambda m, s, z: m(s, z, torch.ones(len(s), 8))),
    "hiera-transformer": Example(make("hiera.hiera", "MaskUnitAttention", 32, 32, 4), _SEQUENCE),
    "hiera-transformer.pooled": Example(
        make("hiera.hiera", "MaskUnitAttention", 32, 32, 4, q_stride=2, window_size=4, use_mask_unit_attn=True),
        noise(16, 32)),
    "tabpfn": Example(
        without(make("tabpfn.architectures.tabpfn_v2_5", "AlongRowAttention", 32, 4, 8), "pydantic_settings", "skrub"),
        _SEQUENCE),
    "native-sparse-attention-pytorch": Example(
        make("native_sparse_attention_pytorch", "SparseAttention", dim=32, dim_head=8, heads=4, sliding_window_size=2,
             compress_block_size=4, compress_block_sliding_stride=2, selection_block_size=4, num_selected_blocks=2),
        noise(16, 32)),
    "ring-attention-pytorch": Example(
        make("ring_attention_pytorch", "RingAttention", dim=32, dim_head=8, heads=4, causal=True, bucket_size=4,
             force_regular_attn=True), _SEQUENCE),
    "ring-attention-pytorch.buckets": Example(
        make("ring_attention_pytorch", "RingAttention", dim=32, dim_head=8, heads=4, causal=True, bucket_size=4,
             use_cuda_kernel=False), _SEQUENCE),
    "transfusion-pytorch": Example(
        without(make("transfusion_pytorch.transfusion", "Attention", 32, dim_head=8, heads=4), "torchdiffeq",
                "ema_pytorch", "axial_positional_embedding", "rotary_embedding_torch", "hyper_connections",
                "discrete_continuous_embed_readout"), _SEQUENCE),
    "audiolm-pytorch": Example(
        without(_without_start("audiolm_pytorch", "audiolm_pytorch", "Attention", 32, True, 8, None, 4), *_SOUND,
                "fairseq", "joblib", "sklearn", "encodec", "gateloop_transformer", "hyper_connections",
                "local_attention", "lion_pytorch", "ema_pytorch", "vector_quantize_pytorch", "sentencepiece",
                "pytorch_warmup"), _SEQUENCE),
    "q-transformer": Example(
        without(_without_start("q_transformer", "q_robotic_transformer", "TransformerAttention", 32, dim_head=8,
                heads=4), *_ROBOTS), _SEQUENCE),
    "q-transformer.windows": Example(
        without(_without_start("q_transformer", "q_robotic_transformer", "Attention", 32, 4, 8, 0.0, 2, 4, False),
                *_ROBOTS), noise(2, 2, 2, 2, 32)),
    "rl4co": Example(_routes("MultiHeadAttention", 32, 4), _SEQUENCE),
    "rl4co.pointer": Example(_Pointing, two((8, 32), (3, 32))),
    "rl4co.scores": Example(_routes("MultiHeadCompat", 4, 32, 32), _SEQUENCE, attends=False),  # it returns scores
}  # fmt: skip
