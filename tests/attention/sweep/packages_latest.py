"""More packages of others: brain signals, sound, tables, proteins, series, and models that are made to be taken apart.

They were chosen before any of them was examined. Where one is not installed its models are left out.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import nn

from tests.attention.sweep.packages_building import Build, Example, make, noise, tokens, two, without, without_start

_SEQUENCE = noise(8, 32)
_BRAINS = ("h5py", "mne", "skorch", "wfdb", "mne_bids", "torchaudio")
_SOUND = ("librosa", "torchlibrosa", "soundfile", "webdataset", "wget", "torchaudio", "braceexpand", "h5py")


def _native() -> nn.Module:
    """Build the model that transformer-lens has of its own, which needs no download."""
    settings = make(
        "transformer_lens.config", "TransformerBridgeConfig", d_model=32, n_layers=1, n_heads=4, d_head=8, n_ctx=16,
        d_vocab=64, act_fn="gelu", architecture="TransformerLensNative",
    )()  # fmt: skip
    return make("transformer_lens.model_bridge.sources.native.model", "NativeModel", settings)()


def _without_start(package: str, file: str, name: str, *args: Any) -> Build:
    return without_start(make(f"{package}.{file}", name, *args), package)


def is_here() -> bool:
    """Tell whether these packages are installed."""
    return all(importlib.util.find_spec(name) for name in ("uni2ts", "boltz", "hiera", "tabpfn"))


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
}  # fmt: skip
