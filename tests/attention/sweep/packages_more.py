"""Further attention of packages that others wrote: what people train with for images, speech, text, tables, generation.

The list was written before any of these was examined, and all of them are reported. Packages with small options of
their own (`x_transformers`, `vit_pytorch`, `diffusers`) stand here with those that are used most.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
from torch import Tensor, nn

from tests.attention.sweep.packages_building import (
    Example,
    beside,
    make,
    noise,
    tokens,
    two,
    unscripted,
    vit,
    x_decoder,
)

_IMAGE, _SEQUENCE = noise(3, 32, 32), noise(8, 32)


def _generated(*shapes: tuple[int, ...]) -> Any:
    """Tensors of noise, one for each shape."""

    def made(batch: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(4)
        return tuple(torch.randn(batch, *shape, generator=generator) for shape in shapes)

    return made


def _times(batch: int) -> Tensor:
    return torch.full((batch,), 5)


def _timely(module: nn.Module, x: Tensor) -> Any:
    """Run a module that has time first."""
    return module(x.transpose(0, 1))


def _whisper() -> nn.Module:
    from whisper.model import ModelDimensions, Whisper

    return Whisper(ModelDimensions(8, 8, 32, 4, 1, 64, 12, 32, 4, 1))


def _clip() -> nn.Module:
    from clip.model import CLIP

    return CLIP(32, 32, 1, 128, 8, 12, 64, 32, 4, 1)


def _old_bert() -> nn.Module:
    from pytorch_pretrained_bert.modeling import BertConfig, BertModel

    return BertModel(BertConfig(64, 32, 2, 4, 48, "gelu", 0.0, 0.0, 16))


def _foundation(**options: Any) -> Any:
    def build() -> nn.Module:
        from fms.models.llama import LLaMA, LLaMAConfig

        sizes = {"src_vocab_size": 64, "emb_dim": 32, "nheads": 4, "nlayers": 2, "multiple_of": 8}
        return LLaMA(LLaMAConfig(max_expected_seq_len=16, **(sizes | options)))

    return build


def _rows_and_columns() -> nn.Module:
    from esm.data import Alphabet
    from esm.model.msa_transformer import MSATransformer

    sizes = {
        "embed_dim": 32, "ffn_embed_dim": 48, "attention_heads": 4, "layers": 1, "dropout": 0.0,
        "attention_dropout": 0.0, "activation_dropout": 0.0, "max_positions": 32, "max_tokens": 2**14,
        "logit_bias": True, "max_tokens_per_msa": 2**14, "embed_positions_msa": True, "embed_positions_msa_dim": 32,
    }  # fmt: skip
    return MSATransformer(Namespace(**sizes), Alphabet.from_architecture("msa_transformer"))


def _alignments(batch: int) -> tuple[Tensor]:
    return (torch.randint(4, 20, (batch, 3, 8), generator=torch.Generator().manual_seed(2)),)


def _fttransformer() -> nn.Module:
    from rtdl import FTTransformer

    return FTTransformer.make_baseline(
        n_num_features=6, cat_cardinalities=None, d_token=32, n_blocks=2, attention_dropout=0.0, ffn_d_hidden=48,
        ffn_dropout=0.0, residual_dropout=0.0, d_out=1,
    )  # fmt: skip


def _encoder_decoder() -> nn.Module:
    from x_transformers import XTransformer

    return XTransformer(
        dim=32, enc_num_tokens=64, enc_depth=1, enc_heads=4, enc_max_seq_len=16, enc_attn_dim_head=8, dec_num_tokens=64,
        dec_depth=1, dec_heads=4, dec_max_seq_len=16, dec_attn_dim_head=8,
    )  # fmt: skip


def _encoder_for_images() -> nn.Module:
    from x_transformers import Encoder, ViTransformerWrapper

    layers = Encoder(dim=32, depth=2, heads=4, attn_dim_head=8)
    return ViTransformerWrapper(image_size=32, patch_size=8, num_classes=5, attn_layers=layers)


def _annotated(module: str, name: str) -> Any:
    def build() -> nn.Module:
        from labml import tracker

        tracker.debug = lambda *_: None  # which newer versions have no more
        return make(f"labml_nn.transformers.{module}", name, 4, 32, 0.0)()

    return build


def _swin(version: str) -> nn.Module:
    from torchvision.models import swin_transformer as swin

    kinds = {"block": swin.SwinTransformerBlockV2, "downsample_layer": swin.PatchMergingV2} if version == "2" else {}
    return swin.SwinTransformer([4, 4], 32, [2], [4], [4, 4], stochastic_depth_prob=0.0, num_classes=5, **kinds)


def _diffusers(name: str, **sizes: Any) -> Any:
    return make("diffusers", name, **sizes)


EXAMPLES: dict[str, Example] = {
    "x-transformers.xpos": Example(x_decoder(rotary_xpos=True), tokens(12)),
    "x-transformers.head_scale": Example(x_decoder(attn_head_scale=True), tokens(12)),
    "x-transformers.softclamp": Example(unscripted(x_decoder(attn_softclamp_logits=True)), tokens(12)),
    "x-transformers.dynamic_bias": Example(x_decoder(dynamic_pos_bias=True), tokens(12)),
    "x-transformers.encoder_decoder": Example(
        _encoder_decoder, lambda batch: (*tokens(12)(batch), *tokens(10)(batch))
    ),
    "x-transformers.image": Example(_encoder_for_images, _IMAGE),
    "vit-pytorch.cross_vit": Example(
        make("vit_pytorch.cross_vit", "CrossViT", image_size=32, num_classes=5, sm_dim=32, lg_dim=48, sm_patch_size=8,
              sm_enc_heads=4, sm_enc_mlp_dim=48, sm_enc_dim_head=8, lg_patch_size=16, lg_enc_depth=1, lg_enc_heads=4,
              lg_enc_mlp_dim=48, lg_enc_dim_head=8, cross_attn_depth=1, cross_attn_heads=4, cross_attn_dim_head=8,
              depth=1, dropout=0.0, emb_dropout=0.0), _IMAGE),
    "vit-pytorch.cvt": Example(
        make("vit_pytorch.cvt", "CvT", num_classes=5, s1_emb_dim=72, s1_heads=2, s2_emb_dim=72, s2_heads=2, s2_depth=1,
             s3_emb_dim=72, s3_heads=2, s3_depth=1), _IMAGE),
    "vit-pytorch.levit": Example(
        make("vit_pytorch.levit", "LeViT", image_size=64, num_classes=5, dim=(32, 48, 64), depth=1, heads=(2, 3, 4),
              mlp_mult=2, dim_key=8, dim_value=16), noise(3, 64, 64)),
    "vit-pytorch.twins_svt": Example(
        make("vit_pytorch.twins_svt", "TwinsSVT", num_classes=5, s1_emb_dim=72, s1_local_patch_size=4, s1_global_k=2,
             s2_emb_dim=72, s2_local_patch_size=4, s2_global_k=2, s3_emb_dim=72, s3_patch_size=1,
             s3_local_patch_size=2, s3_global_k=2, s3_depth=1, s4_emb_dim=72, s4_patch_size=1, s4_local_patch_size=2,
             s4_global_k=2, s4_depth=1), _IMAGE),
    "vit-pytorch.max_vit": Example(
        make("vit_pytorch.max_vit", "MaxViT", num_classes=5, dim=32, depth=(1,), dim_head=8, dim_conv_stem=16,
              window_size=4, dropout=0.0), _IMAGE),
    "vit-pytorch.crossformer": Example(
        make("vit_pytorch.crossformer", "CrossFormer", dim=(64, 96, 128, 160), depth=(1, 1, 1, 1), num_classes=5,
              global_window_size=(4, 2, 2, 2), local_window_size=2), noise(3, 64, 64)),
    "vit-pytorch.rvt": Example(vit("rvt", "RvT", dim_head=8), _IMAGE),
    "vit-pytorch.regionvit": Example(
        make("vit_pytorch.regionvit", "RegionViT", dim=(48, 48, 64, 64), depth=(1, 1, 1, 1), window_size=2,
              num_classes=5), noise(3, 64, 64)),
    "torchvision.vit": Example(
        make("torchvision.models.vision_transformer", "VisionTransformer", 32, 8, 2, 4, 32, 48, num_classes=5), _IMAGE
    ),
    "torchvision.swin": Example(lambda: _swin("1"), _IMAGE),
    "torchvision.swin_v2": Example(lambda: _swin("2"), _IMAGE),
    "torchvision.maxvit": Example(
        make("torchvision.models.maxvit", "MaxVit", (32, 32), 32, 4, [32], [1], 8, 0.0, num_classes=5), _IMAGE
    ),
    "segmentation-models-pytorch.mix_transformer": Example(
        make("segmentation_models_pytorch.encoders.mix_transformer", "MixVisionTransformer", img_size=64, patch_size=4,
              embed_dims=[16, 32, 32, 48], num_heads=[2, 4, 4, 4], mlp_ratios=[2, 2, 2, 2], depths=[1, 1, 1, 1],
              qkv_bias=True), noise(3, 64, 64)),
    "segment-anything.image": Example(
        make("segment_anything.modeling.image_encoder", "ImageEncoderViT", 32, 8, 3, 32, 2, 4, out_chans=16,
              use_rel_pos=True, window_size=2, global_attn_indexes=(1,)), _IMAGE),
    "segment-anything.two_way": Example(
        make("segment_anything.modeling.transformer", "TwoWayTransformer", 1, 32, 4, 48),
        _generated((32, 4, 4), (32, 4, 4), (5, 32))),
    "ultralytics.Attention": Example(
        beside(make("ultralytics.nn.modules.block", "Attention", 32, 4), "cv2"), noise(32, 4, 4)
    ),
    "ultralytics.AIFI": Example(
        beside(make("ultralytics.nn.modules.transformer", "AIFI", 32, 48, 4), "cv2"), noise(32, 4, 4)
    ),
    "kornia.ViT": Example(
        make("kornia.models.vit", "VisionTransformer", image_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4),
        _IMAGE),
    "kornia.LightGlue.cross": Example(
        make("kornia.feature.lightglue", "CrossBlock", 32, 4, False), two((8, 32), (6, 32))
    ),
    "clip-anytorch": Example(_clip, lambda batch: (*_IMAGE(batch), *tokens(12)(batch))),
    "x-clip": Example(
        make("x_clip.x_clip", "TextTransformer", 32, num_tokens=64, max_seq_len=16, dim_head=8, depth=2, heads=4),
        tokens(12)),
    "openai-whisper": Example(
        beside(_whisper, "tiktoken", "numba"), lambda batch: (*noise(8, 16)(batch), *tokens(10)(batch))
    ),
    "espnet.MultiHeadedAttention": Example(
        make("espnet.nets.pytorch_backend.transformer.attention", "MultiHeadedAttention", 4, 32, 0.0), _SEQUENCE,
        lambda m, x: m(x, x, x, None)),
    "espnet.RelPositionMultiHeadedAttention": Example(
        make("espnet.nets.pytorch_backend.transformer.attention", "RelPositionMultiHeadedAttention", 4, 32, 0.0),
        _SEQUENCE, lambda m, x: m(x, x, x, torch.randn(1, 2 * x.shape[1] - 1, 32), None)),
    "funasr.MultiHeadedAttention": Example(
        make("funasr.models.transformer.attention", "MultiHeadedAttention", 4, 32, 0.0), _SEQUENCE,
        lambda m, x: m(x, x, x, None)),
    "funasr.MultiHeadedAttentionSANM": Example(
        make("funasr.models.sanm.attention", "MultiHeadedAttentionSANM", 4, 32, 32, 0.0, 3), _SEQUENCE,
        lambda m, x: m(x, None)),
    "demucs": Example(
        make("demucs.transformer", "CrossTransformerEncoder", 32, num_heads=4, num_layers=2),
        two((32, 3, 4), (32, 10))),
    "encodec": Example(
        beside(make("encodec.modules.transformer", "StreamingTransformerEncoder", 32, num_heads=4, num_layers=2),
                "torchaudio"), _SEQUENCE),
    "bert-pytorch": Example(
        make("bert_pytorch.model", "BERT", 64, 32, 2, 4, 0.0), tokens(10), lambda m, x: m(x, torch.zeros_like(x))
    ),
    "pytorch-pretrained-bert": Example(beside(_old_bert, "boto3", "botocore", "botocore.exceptions"), tokens(10)),
    "ibm-fms": Example(_foundation(), tokens(10)),
    "ibm-fms.groups": Example(_foundation(kvheads=2), tokens(10)),
    "sockeye.MultiHeadSelfAttention": Example(
        unscripted(make("sockeye.layers", "MultiHeadSelfAttention", 32, 4, 32)), _SEQUENCE, _timely
    ),
    "sockeye.MultiHeadAttention": Example(
        unscripted(make("sockeye.layers", "MultiHeadAttention", 32, 4, 32, 0.0, 32)), two((8, 32), (6, 32)),
        lambda m, x, y: m(x.transpose(0, 1), y.transpose(0, 1))),
    "joeynmt": Example(
        make("joeynmt.transformer_layers", "MultiHeadedAttention", 4, 32, 0.0), _SEQUENCE, lambda m, x: m(x, x, x)
    ),
    "labml-nn.mha": Example(
        _annotated("mha", "MultiHeadAttention"), _SEQUENCE,
        lambda m, x: m(query=x.transpose(0, 1), key=x.transpose(0, 1), value=x.transpose(0, 1))),
    "labml-nn.relative": Example(
        _annotated("xl.relative_mha", "RelativeMultiHeadAttention"), _SEQUENCE,
        lambda m, x: m(query=x.transpose(0, 1), key=x.transpose(0, 1), value=x.transpose(0, 1))),
    "perceiver-io": Example(
        make("perceiver.model.core", "MultiHeadAttention", 4, 32, 24, causal_attention=False), two((8, 32), (6, 24))
    ),
    "fair-esm.msa": Example(_rows_and_columns, _alignments),
    "recbole": Example(
        beside(make("recbole.model.layers", "MultiHeadAttention", 4, 32, 0.0, 0.0, 1e-5), "colorlog", "colorama",
                "ray", "thop", "texttable", "tabulate", "hyperopt", "kmeans_pytorch"), _SEQUENCE,
        lambda m, x: m(x, torch.zeros(len(x), 1, 1, x.shape[1]))),
    "rtdl": Example(_fttransformer, noise(6), lambda m, x: m(x, None)),
    "pytorch-frame.ExcelFormer": Example(
        make("torch_frame.nn.conv", "ExcelFormerConv", 32, num_cols=6, num_heads=4), noise(6, 32)
    ),
    "pytorch-frame.TabTransformer": Example(make("torch_frame.nn.conv", "TabTransformerConv", 32, 4), noise(6, 32)),
    "pytorch-frame.FTTransformer": Example(
        make("torch_frame.nn.conv", "FTTransformerConvs", 32, num_layers=1, nhead=4, dropout=0.0), noise(6, 32)
    ),
    "pytorch-forecasting": Example(
        beside(make("pytorch_forecasting.models.temporal_fusion_transformer.sub_modules",
                      "InterpretableMultiHeadAttention", 4, 32, 0.0), "skbase", "skbase.base", "skbase.utils",
                "skbase.lookup", "skbase.utils.dependencies"), _SEQUENCE, lambda m, x: m(x, x, x)),
    "monai.ViT": Example(
        make("monai.networks.nets", "ViT", 1, (16, 16), 4, 32, 48, 2, 4, spatial_dims=2), noise(1, 16, 16)
    ),
    "monai.DiffusionModelUNet": Example(
        make("monai.networks.nets", "DiffusionModelUNet", 2, 1, 1, (1, 1), (16, 32), (False, True), 8,
              num_head_channels=8, with_conditioning=True, cross_attention_dim=24), two((1, 8, 8), (5, 24)),
        lambda m, x, context: m(x, _times(len(x)), context)),
    "dalle-pytorch": Example(
        beside(make("dalle_pytorch.attention", "Attention", 32, 8, heads=4, dim_head=8), "omegaconf", "taming",
               "taming.models", "taming.models.vqgan"), _SEQUENCE),
    "flamingo-pytorch": Example(
        make("flamingo_pytorch", "GatedCrossAttentionBlock", dim=32, dim_head=8, heads=4,
              only_attend_immediate_media=False), two((8, 32), (2, 5, 32))),
    "retro-pytorch": Example(
        beside(make("retro_pytorch.retro_pytorch", "Attention", 32, dim_head=8, heads=4), "faiss", "autofaiss"),
        _SEQUENCE),
    "invariant-point-attention": Example(
        make("invariant_point_attention", "InvariantPointAttention", dim=32, heads=4, scalar_key_dim=8,
              scalar_value_dim=8, pairwise_repr_dim=12), two((6, 32), (6, 6, 12)),
        lambda m, x, pairs: m(x, pairs, rotations=torch.eye(3).expand(len(x), 6, 3, 3),
                              translations=torch.zeros(len(x), 6, 3))),
    "diffusers.pixart": Example(
        _diffusers("PixArtTransformer2DModel", num_attention_heads=4, attention_head_dim=8, num_layers=1,
                   norm_num_groups=8, cross_attention_dim=32, sample_size=8, caption_channels=24,
                   use_additional_conditions=False), two((4, 8, 8), (6, 24)),
        lambda m, x, text: m(x, text, _times(len(x)), added_cond_kwargs={"resolution": None, "aspect_ratio": None})),
    "diffusers.cogvideox": Example(
        _diffusers("CogVideoXTransformer3DModel", num_attention_heads=4, attention_head_dim=8, in_channels=4,
                   out_channels=4, time_embed_dim=16, text_embed_dim=24, num_layers=1, sample_width=8, sample_height=8,
                   sample_frames=5, max_text_seq_length=6), two((2, 4, 8, 8), (6, 24)),
        lambda m, x, text: m(x, text, _times(len(x)))),
    "diffusers.wan": Example(
        _diffusers("WanTransformer3DModel", num_attention_heads=4, attention_head_dim=12, in_channels=4, out_channels=4,
                   text_dim=24, freq_dim=16, ffn_dim=48, num_layers=1, rope_max_seq_len=32), two((4, 1, 8, 8), (6, 24)),
        lambda m, x, text: m(x, _times(len(x)), text)),
    "diffusers.mochi": Example(
        _diffusers("MochiTransformer3DModel", num_attention_heads=4, attention_head_dim=8, num_layers=2,
                   pooled_projection_dim=16, in_channels=4, text_embed_dim=24, time_embed_dim=16,
                   max_sequence_length=6), two((4, 1, 8, 8), (6, 24)),
        lambda m, x, text: m(x, text, _times(len(x)), torch.ones(text.shape[:2], dtype=torch.bool))),
    "diffusers.prior": Example(
        _diffusers("PriorTransformer", num_attention_heads=4, attention_head_dim=8, num_layers=1, embedding_dim=16,
                   num_embeddings=6, additional_embeddings=4), _generated((16,), (16,), (6, 16)),
        lambda m, x, image, text: m(x, _times(len(x)), image, text)),
    "diffusers.qwen_image": Example(
        _diffusers("QwenImageTransformer2DModel", in_channels=16, out_channels=4, num_layers=1, attention_head_dim=16,
                   num_attention_heads=4, joint_attention_dim=24, axes_dims_rope=(4, 6, 6)), two((16, 16), (6, 24)),
        lambda m, x, text: m(x, text, torch.ones(text.shape[:2], dtype=torch.bool), _times(len(x)),
                             [[(1, 4, 4)]] * len(x))),
}  # fmt: skip
