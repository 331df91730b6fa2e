"""Further packages of others: what people train with for series, images, translation, sound, text.

Twenty packages were chosen before any of them was examined. Of three of them parts are in `packages_latest`:
`transformer-lens` wraps models that it downloads, `laion-clap` asks for tokenizers when it is imported, and models
of `braindecode` derive from classes of MNE.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from tests.attention.sweep.packages_building import Build, Example, beside, make, noise, tokens, two, without

_SEQUENCE = noise(8, 32)
_SERIES = ("ray", "optuna", "utilsforecast", "coreforecast")


def _self(module: nn.Module, x: Any) -> Any:
    return module(x, x, x)


def _unmasked(module: nn.Module, x: Any) -> Any:
    return module(x, x, x, attn_mask=None)


def _curated(mode: str, key_heads: int = 4) -> Build:
    def build() -> nn.Module:
        attention = importlib.import_module("curated_transformers.layers.attention")
        split = attention.QkvSplitGroupedByKVHeads() if key_heads < 4 else attention.QkvSplitGroupedByHead()
        heads = attention.AttentionHeads.key_value_broadcast(
            n_query_heads=4, n_key_value_heads=key_heads, qkv_split=split
        )
        scorer = attention.ScaledDotProductAttention(dropout_prob=0.0, linear_biases=None)
        mode_of_maps = getattr(attention.QkvMode, mode)
        return attention.SelfAttention(
            attention_heads=heads, attention_scorer=scorer, hidden_width=32, qkv_mode=mode_of_maps, use_bias=True
        )  # fmt: skip

    return build


def _curated_call(module: nn.Module, x: Any) -> Any:
    attention = importlib.import_module("curated_transformers.layers.attention")
    return module(x, attention.AttentionMask(torch.ones(len(x), 1, 1, x.shape[1], dtype=torch.bool)))


def _tuned(key_heads: int, **options: Any) -> Build:
    def build() -> nn.Module:
        modules = importlib.import_module("torchtune.modules")
        maps = {
            "q_proj": nn.Linear(32, 32, bias=False), "k_proj": nn.Linear(32, 8 * key_heads, bias=False),
            "v_proj": nn.Linear(32, 8 * key_heads, bias=False), "output_proj": nn.Linear(32, 32, bias=False),
        }  # fmt: skip
        norms = {name: modules.RMSNorm(8) for name in ("q_norm", "k_norm")} if options.get("has_norms") else {}
        places = modules.RotaryPositionalEmbeddings(8, max_seq_len=32)
        return modules.MultiHeadAttention(
            embed_dim=32, num_heads=4, num_kv_heads=key_heads, head_dim=8, pos_embeddings=places, **maps, **norms
        )  # fmt: skip

    return build


def _series(module: str, name: str) -> Build:
    def build() -> nn.Module:
        layer = make("neuralforecast.common._modules", "AttentionLayer", None, 32, 4)()
        layer.inner_attention = make(f"neuralforecast.{module}", name, False, attention_dropout=0.0)()
        return layer

    return build


def _imputing(operator: str, **options: Any) -> Build:
    def build() -> nn.Module:
        module, _, name = operator.partition(":")
        inner = make(f"pypots.nn.modules.{module}", name, **options)()
        return make("pypots.nn.modules.transformer.attention", "MultiHeadAttention", inner, 32, 4, 8, 8)()

    return build


def _chronos() -> nn.Module:
    config = make("chronos.chronos2.config", "Chronos2CoreConfig", d_model=32, d_kv=8, d_ff=48, num_heads=4)()
    config._attn_implementation = "sdpa"
    return make("chronos.chronos2.layers", "MHA", config)()


def _chronos_call(module: nn.Module, x: Any) -> Any:
    places = torch.arange(x.shape[1]).expand(len(x), -1)
    return module(x, mask=torch.zeros(len(x), 4, x.shape[1], x.shape[1]), position_ids=places)


def _old(file: str, kind: str, config: str, *args: Any, **options: Any) -> Build:
    def build() -> nn.Module:
        module = importlib.import_module(f"pytorch_transformers.modeling_{file}")
        return getattr(module, kind)(*args, getattr(module, config)(**options))

    return without(build, "boto3", "botocore", "sacremoses", "sentencepiece")


def _imagen(name: str, *args: Any, **options: Any) -> Build:
    part = make("imagen_pytorch.imagen_pytorch", name, *args, dim_head=8, heads=4, **options)
    return without(beside(part, "imagen_pytorch.t5"), "pytorch_warmup", "datasets")


_TUNING = ("torchao", "torchdata", "kagglehub", "datasets", "sentencepiece", "tiktoken", "blobfile")
_TRANSLATION = (
    "pyonmttok",
    "ctranslate2",
    "sacrebleu",
    "rapidfuzz",
    "ahocorasick",
    "fasttext",
    "spacy",
    "flask",
    "waitress",
)
_IMPUTATION = ("pygrinder", "tsdb", "benchpots", "ai4ts", "h5py", "seaborn")
_READING = (
    "cv2", "pypdfium2", "pyclipper", "shapely", "langdetect", "rapidfuzz", "anyascii", "validators", "onnx", "h5py",
    "defusedxml",
)  # fmt: skip

EXAMPLES: dict[str, Example] = {
    "curated-transformers.separate": Example(_curated("SEPARATE"), _SEQUENCE, _curated_call),
    "curated-transformers.groups": Example(_curated("SEPARATE", 2), _SEQUENCE, _curated_call),
    "curated-transformers.split_before": Example(_curated("MERGED_SPLIT_BEFORE"), _SEQUENCE, _curated_call),
    "curated-transformers.split_after": Example(_curated("MERGED_SPLIT_AFTER", 1), _SEQUENCE, _curated_call),
    "opennmt-py": Example(
        without(make("onmt.modules.multi_headed_attn", "MultiHeadedAttention", 4, 32, 0.0, attn_type="self"),
                *_TRANSLATION), _SEQUENCE, _self
    ),
    "torchtune": Example(without(_tuned(4), *_TUNING), _SEQUENCE, lambda m, x: m(x, x)),
    "torchtune.groups": Example(without(_tuned(2, has_norms=True), *_TUNING), _SEQUENCE, lambda m, x: m(x, x)),
    "neuralforecast.full": Example(
        without(_series("common._modules", "FullAttention"), *_SERIES), _SEQUENCE, _unmasked
    ),
    "neuralforecast.prob": Example(
        without(_series("models.informer", "ProbAttention"), *_SERIES), _SEQUENCE, _unmasked
    ),
    "neuralforecast.patchtst": Example(
        without(make("neuralforecast.models.patchtst", "_MultiheadAttention", 32, 4), *_SERIES), _SEQUENCE
    ),
    "neuralforecast.tft": Example(
        without(make("neuralforecast.models.tft", "InterpretableMultiHeadAttention", 4, 32, 8, 0.0, 0.0), *_SERIES),
        _SEQUENCE),
    "pypots": Example(
        without(_imputing("transformer.attention:ScaledDotProductAttention", temperature=8**0.5, attn_dropout=0.0),
                *_IMPUTATION), _SEQUENCE,
        lambda m, x: m(x, x, x, None)),
    "gluonts": Example(
        make("gluonts.torch.model.tft.layers", "TemporalFusionDecoder", 5, 3, 32, 32, 4), two((8, 32), (1, 32)),
        lambda m, x, static: m(x, static, torch.ones(len(x), 5))),
    "chronos-forecasting": Example(_chronos, _SEQUENCE, _chronos_call),
    "imagen-pytorch": Example(_imagen("Attention", 32), _SEQUENCE),
    "imagen-pytorch.cross": Example(_imagen("CrossAttention", 32, context_dim=24), two((8, 32), (6, 24))),
    "muse-maskgit-pytorch": Example(
        make("muse_maskgit_pytorch.muse_maskgit_pytorch", "Attention", 32, 8, 4, flash=False), _SEQUENCE
    ),
    "zorro-pytorch": Example(
        without(make("zorro_pytorch.zorro_pytorch", "Attention", 32, 8, 4), "torchaudio", "torchaudio.transforms"),
        _SEQUENCE),
    "hourglass-transformer-pytorch": Example(
        make("hourglass_transformer_pytorch", "HourglassTransformerLM", num_tokens=64, dim=32, max_seq_len=16,
              shorten_factor=2, depth=(1, 2, 1), heads=4, dim_head=8), tokens(16)),
    "deformable-attention": Example(
        make("deformable_attention", "DeformableAttention2D", dim=32, dim_head=8, heads=4), noise(32, 16, 16)
    ),
    "python-doctr": Example(
        without(make("doctr.models.modules.transformer.pytorch", "MultiHeadAttention", 4, 32, 0.0), *_READING),
        _SEQUENCE, _self),
    "pytorch-transformers.gpt2": Example(
        _old("gpt2", "GPT2Model", "GPT2Config", vocab_size_or_config_json_file=64, n_positions=16, n_ctx=16, n_embd=32,
             n_layer=1, n_head=4), tokens(10)),
    "pytorch-transformers.xlnet": Example(
        _old("xlnet", "XLNetModel", "XLNetConfig", vocab_size_or_config_json_file=64, d_model=32, n_layer=1, n_head=4,
             d_inner=48), tokens(10)),
    "pytorch-transformers.distilbert": Example(
        _old("distilbert", "DistilBertModel", "DistilBertConfig", vocab_size_or_config_json_file=64,
             sinusoidal_pos_embds=False, max_position_embeddings=16, dim=32, n_layers=1, n_heads=4, hidden_dim=48),
        tokens(10)),
    "agent-attention-pytorch": Example(
        make("agent_attention_pytorch", "AgentSelfAttention", 32, num_agent_tokens=5, dim_head=8, heads=4), _SEQUENCE
    ),
    "megabyte-pytorch": Example(
        make("MEGABYTE_pytorch", "MEGABYTE", num_tokens=64, dim=(32, 32), depth=(1, 1), max_seq_len=(4, 4), dim_head=8,
              heads=4), tokens(16), lambda m, x: m(x, return_loss=False)),
    "x-metaformer": Example(
        make("x_metaformer", "CAFormer", in_channels=3, depths=(1, 1, 1, 1), dims=(32, 32, 64, 64)), noise(3, 64, 64)
    ),
}  # fmt: skip
