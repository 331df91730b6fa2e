"""Models of packages whose attention is their own: the import path, arguments and what the forward takes of each."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.studies.zoo import configs

Example = tuple[nn.Module, Callable[[], object]]
Recipe = Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]


def example(name: str) -> Example:
    """Build a model and a forward of it."""
    torch.manual_seed(0)
    model, args, kwargs = RECIPES[name]()
    model = configs.randomized(model)
    return model, lambda: model(*args, **kwargs)


def _of(path: str, *given: Any, takes: dict[str, Any] | None = None, **options: Any) -> Recipe:
    """Build what is under an import path; options that can be called are, then."""

    def build() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        module, _, name = path.rpartition(".")
        made = {key: value() if callable(value) else value for key, value in options.items()}
        model = getattr(importlib.import_module(module), name)(**made)
        return model, tuple(one() if callable(one) else one for one in given), takes or {}

    return build


def _noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


def _ids(*shape: int, below: int = 32) -> Tensor:
    return torch.randint(4, below, shape, generator=torch.Generator().manual_seed(3))


def _object(path: str, **options: Any) -> Callable[[], Any]:
    def build() -> Any:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)(**options)

    return build


def _adapted(kind: str, **options: Any) -> Recipe:
    def build() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        import peft
        from transformers import LlamaConfig, LlamaModel

        config = LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                             num_key_value_heads=2, vocab_size=99)  # fmt: skip
        adapter = getattr(peft, kind)(task_type="FEATURE_EXTRACTION", **options)
        return peft.get_peft_model(LlamaModel(config), adapter), (), {"input_ids": _ids(2, 7)}

    return build


def _x(kind: str = "Decoder", **options: Any) -> Recipe:
    layers = _object(f"x_transformers.{kind}", dim=32, depth=2, heads=4, attn_dim_head=8, **options)
    return _of("x_transformers.TransformerWrapper", _ids(2, 7), num_tokens=40, max_seq_len=16, attn_layers=layers)


def _litgpt(**options: Any) -> Recipe:
    config = _object("litgpt.Config", n_layer=2, n_embd=32, n_head=4, vocab_size=99, block_size=16,
                     intermediate_size=48, **options)  # fmt: skip
    return _of("litgpt.GPT", _ids(2, 7), config=config)


def _curated(kind: str, config: str, **options: Any) -> Recipe:
    mask = _object("curated_transformers.layers.AttentionMask", bool_mask=torch.ones(2, 7, dtype=torch.bool))
    common = {"hidden_width": 32, "intermediate_width": 48, "n_hidden_layers": 2, "n_pieces": 99}
    made = _object(f"curated_transformers.models.{config}", **common, **options)
    return _of(f"curated_transformers.models.{kind}", _ids(2, 7), mask, config=made)


def _labml(kind: str, **options: Any) -> Recipe:
    x = _noise(5, 2, 32)
    takes = {"query": x, "key": x, "value": x}
    return _of(f"labml_nn.transformers.{kind}", takes=takes, heads=4, d_model=32, **options)


def _asr(**options: Any) -> Recipe:
    return _of("speechbrain.lobes.models.transformer.TransformerASR.TransformerASR", _noise(2, 9, 20), _ids(2, 5),
               tgt_vocab=40, input_size=20, d_model=32, nhead=4, num_encoder_layers=2, num_decoder_layers=2, d_ffn=48,
               **options)  # fmt: skip


_PICTURE = _noise(2, 3, 32, 32)
_VIT = {"image_size": 32, "patch_size": 8, "num_classes": 5, "dim": 32, "depth": 2, "heads": 4, "mlp_dim": 48,
        "dim_head": 8}  # fmt: skip
_TARGETS = {"target_modules": ["q_proj", "k_proj", "v_proj"]}
_DIFFUSION = {"num_layers": 2, "num_attention_heads": 4, "attention_head_dim": 8}


def _vit(path: str, **options: Any) -> Recipe:
    return _of(f"vit_pytorch.{path}", _PICTURE, **(_VIT | options))


def _stages(path: str, size: int = 64, **options: Any) -> Recipe:
    return _of(f"vit_pytorch.{path}", _noise(2, 3, size, size), num_classes=5, **options)


RECIPES: dict[str, Recipe] = {
    "torch": _of("torch.nn.Transformer", _noise(2, 7, 32), _noise(2, 5, 32), d_model=32, nhead=4, num_encoder_layers=2,
                 num_decoder_layers=2, dim_feedforward=48, batch_first=True),
    "peft.lora": _adapted("LoraConfig", r=4, lora_alpha=1, **_TARGETS),
    "peft.lora-everywhere": _adapted("LoraConfig", r=4, lora_alpha=1, target_modules="all-linear"),
    "peft.rslora": _adapted("LoraConfig", r=4, lora_alpha=1, use_rslora=True, **_TARGETS),
    "peft.dora": _adapted("LoraConfig", r=4, lora_alpha=1, use_dora=True, **_TARGETS),
    "peft.ia3": _adapted("IA3Config", feedforward_modules=[], **_TARGETS),
    "peft.adalora": _adapted("AdaLoraConfig", total_step=9, **_TARGETS),
    "peft.vera": _adapted("VeraConfig", r=4, target_modules=["q_proj"]),
    "peft.prefix": _adapted("PrefixTuningConfig", num_virtual_tokens=3),
    "peft.prompt": _adapted("PromptTuningConfig", num_virtual_tokens=3),
    "x-transformers.decoder": _x(rotary_pos_emb=True),
    "x-transformers.encoder": _x("Encoder", alibi_pos_bias=True, alibi_num_heads=4),
    "x-transformers.groups": _x(attn_kv_heads=2, attn_qk_norm=True),
    "x-transformers.one-key-head": _x(attn_one_kv_head=True, attn_flash=True),
    "x-transformers.talking": _x(attn_pre_talking_heads=True),
    "x-transformers.sparse": _x(attn_sparse_topk=3),
    "x-transformers.gated": _x(attn_gate_values=True, attn_head_scale=True),
    "x-transformers.encoder-decoder": _of(
        "x_transformers.XTransformer", _ids(2, 7), _ids(2, 6), dim=32, enc_num_tokens=40, enc_depth=2, enc_heads=4,
        enc_attn_dim_head=8, enc_max_seq_len=16, dec_num_tokens=40, dec_depth=2, dec_heads=4, dec_attn_dim_head=8,
        dec_max_seq_len=16),
    "vit-pytorch.vit": _vit("ViT"),
    "vit-pytorch.simple_vit": _of("vit_pytorch.simple_vit.SimpleViT", _PICTURE, **_VIT),
    "vit-pytorch.qk_norm": _vit("simple_vit_with_qk_norm.SimpleViT"),
    "vit-pytorch.cait": _vit("cait.CaiT", cls_depth=2),
    "vit-pytorch.deepvit": _vit("deepvit.DeepViT"),
    "vit-pytorch.parallel_vit": _vit("parallel_vit.ViT"),
    "vit-pytorch.normalized_vit": _vit("normalized_vit.nViT"),
    "vit-pytorch.small_dataset": _vit("vit_for_small_dataset.ViT"),
    "vit-pytorch.rvt": _vit("rvt.RvT"),
    "vit-pytorch.xcit": _vit("xcit.XCiT", cls_depth=1),
    "vit-pytorch.pit": _vit("pit.PiT", depth=(1, 1)),
    "vit-pytorch.cross_vit": _of(
        "vit_pytorch.cross_vit.CrossViT", _PICTURE, image_size=32, num_classes=5, sm_dim=32, lg_dim=48, sm_patch_size=8,
        lg_patch_size=16, depth=1, lg_enc_depth=1, sm_enc_heads=4, lg_enc_heads=4, cross_attn_heads=4,
        sm_enc_dim_head=8, lg_enc_dim_head=8, cross_attn_dim_head=8, cross_attn_depth=1),
    "vit-pytorch.cvt": _stages("cvt.CvT", s1_emb_dim=16, s2_emb_dim=32, s2_heads=2, s3_emb_dim=32, s3_heads=2,
                               s2_depth=1, s3_depth=1),
    "vit-pytorch.levit": _stages("levit.LeViT", image_size=64, dim=(16, 32), stages=2, depth=1, heads=(2, 4),
                                 mlp_mult=2, dim_key=8, dim_value=16),
    "vit-pytorch.max_vit": _stages("max_vit.MaxViT", 64, dim=16, depth=(1, 1), dim_head=8, window_size=4),
    "vit-pytorch.nest": _stages("nest.NesT", 32, image_size=32, patch_size=4, dim=32, heads=2, num_hierarchies=2,
                                block_repeats=1, dim_head=8),
    "vit-pytorch.sep_vit": _stages("sep_vit.SepViT", 56, dim=32, depth=(1, 1), heads=(2, 2), dim_head=8),
    "vit-pytorch.cct": _of("vit_pytorch.cct.CCT", _PICTURE, img_size=32, embedding_dim=32, n_conv_layers=1,
        num_layers=2,
                           num_heads=4, mlp_ratio=2.0, num_classes=5),
    "perceiver-pytorch.perceiver": _of(
        "perceiver_pytorch.Perceiver", _noise(2, 8, 8, 3), num_freq_bands=4, max_freq=8.0, depth=2, num_latents=6,
        latent_dim=32, cross_heads=2, latent_heads=4, cross_dim_head=8, latent_dim_head=8, num_classes=5),
    "perceiver-pytorch.io": _of(
        "perceiver_pytorch.PerceiverIO", _noise(2, 9, 32), takes={"queries": _noise(4, 32)}, dim=32, queries_dim=32,
        depth=2, num_latents=6, latent_dim=32, cross_heads=2, latent_heads=4, cross_dim_head=8, latent_dim_head=8),
    "open_clip": _of(
        "open_clip.model.CLIP", _PICTURE, _ids(2, 16), embed_dim=32,
        vision_cfg=_object("open_clip.model.CLIPVisionCfg", layers=2, width=32, head_width=8, patch_size=8,
            image_size=32),
        text_cfg=_object("open_clip.model.CLIPTextCfg", context_length=16, vocab_size=99, width=32, heads=4, layers=2)),
    "open_clip.coca": _of(
        "open_clip.coca_model.CoCa", _PICTURE, _ids(2, 16), embed_dim=32,
        vision_cfg=_object("open_clip.model.CLIPVisionCfg", layers=2, width=32, head_width=8, patch_size=8,
            image_size=32,
                           attentional_pool=True, attn_pooler_heads=4, output_tokens=True),
        text_cfg=_object("open_clip.model.CLIPTextCfg", context_length=16, vocab_size=99, width=32, heads=4, layers=2,
                         embed_cls=True, output_tokens=True),
        multimodal_cfg=_object("open_clip.coca_model.MultimodalCfg", context_length=16, vocab_size=99, width=32,
                               heads=4, layers=2, dim_head=8)),
    "openai-whisper": _of(
        "whisper.model.Whisper", _noise(2, 20, 40), _ids(2, 7),
        dims=_object("whisper.model.ModelDimensions", n_mels=20, n_audio_ctx=20, n_audio_state=32, n_audio_head=4,
                     n_audio_layer=2, n_vocab=99, n_text_ctx=16, n_text_state=32, n_text_head=4, n_text_layer=2)),
    "fair-esm.esm2": _of("esm.model.esm2.ESM2", _ids(2, 9, below=24), num_layers=2, embed_dim=32, attention_heads=4),
    "monai.vit": _of("monai.networks.nets.ViT", _noise(2, 1, 16, 16, 16), in_channels=1, img_size=16, patch_size=8,
                     hidden_size=32, mlp_dim=48, num_layers=2, num_heads=4),
    "monai.unetr": _of("monai.networks.nets.UNETR", _noise(2, 1, 32, 32, 32), in_channels=1, out_channels=2,
        img_size=32,
                       feature_size=4, hidden_size=48, mlp_dim=48, num_heads=4),
    "monai.swin_unetr": _of("monai.networks.nets.SwinUNETR", _noise(1, 1, 64, 64), in_channels=1, out_channels=2,
                            feature_size=12, depths=(2, 1, 1, 1), num_heads=(2, 2, 4, 4), spatial_dims=2),
    "monai.diffusion": _of(
        "monai.networks.nets.DiffusionModelUNet", _noise(2, 1, 16, 16), torch.tensor([3, 5]),
        takes={"context": _noise(2, 5, 16)}, spatial_dims=2, in_channels=1, out_channels=1, num_res_blocks=1,
        channels=(32, 32), attention_levels=(False, True), num_head_channels=8, with_conditioning=True,
        cross_attention_dim=16),
    "litgpt.neox": _litgpt(),
    "litgpt.llama": _litgpt(n_query_groups=2, norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP", bias=False,
                            parallel_residual=False, rotary_percentage=1.0),
    "litgpt.gemma": _litgpt(n_query_groups=2, norm_class_name="RMSNorm", mlp_class_name="GemmaMLP", bias=False,
                            parallel_residual=False, attention_logit_softcapping=50.0, norm_qk=True),
    "labml-nn.mha": _labml("mha.MultiHeadAttention"),
    "labml-nn.relative": _labml("xl.relative_mha.RelativeMultiHeadAttention"),
    "labml-nn.rope": _labml("rope.RotaryPEMultiHeadAttention"),
    "labml-nn.spatial": _of("labml_nn.diffusion.stable_diffusion.model.unet_attention.SpatialTransformer",
                            _noise(2, 32, 4, 4), _noise(2, 5, 16), channels=32, n_heads=4, n_layers=1, d_cond=16),
    "speechbrain.transformer": _asr(encoder_module="transformer"),
    "speechbrain.conformer": _asr(encoder_module="conformer", attention_type="RelPosMHAXL", causal=False,
                                 kernel_size=3, normalize_before=True),
    "speechbrain.branchformer": _asr(encoder_module="branchformer", attention_type="RelPosMHAXL", causal=False,
                                 kernel_size=3, normalize_before=True,
                                     csgu_linear_units=48),
    "curated-transformers.bert": _curated("BERTEncoder", "BERTConfig", embedding_width=32, n_attention_heads=4),
    "curated-transformers.neox": _curated("GPTNeoXDecoder", "GPTNeoXConfig", n_attention_heads=4),
    "curated-transformers.llama": _curated("LlamaDecoder", "LlamaConfig", n_query_heads=4, n_key_value_heads=2),
    "segment-anything.encoder": _of(
        "segment_anything.modeling.image_encoder.ImageEncoderViT", _noise(1, 3, 64, 64), img_size=64, patch_size=8,
        embed_dim=32, depth=2, num_heads=4, out_chans=16, use_rel_pos=True, window_size=4, global_attn_indexes=(1,)),
    "segment-anything.decoder": _of(
        "segment_anything.modeling.TwoWayTransformer", _noise(2, 32, 4, 4), _noise(2, 32, 4, 4), _noise(2, 5, 32),
        depth=2, embedding_dim=32, num_heads=4, mlp_dim=48),
    "rtdl.ft_transformer": _of(
        "rtdl_revisiting_models.FTTransformer", _noise(3, 6), None, n_cont_features=6, cat_cardinalities=[], n_blocks=2,
        d_block=32, attention_n_heads=4, attention_dropout=0.0, ffn_d_hidden=None, ffn_d_hidden_multiplier=1.5,
        ffn_dropout=0.0, residual_dropout=0.0, d_out=2),
    "torchaudio.conformer": _of("torchaudio.models.Conformer", _noise(2, 9, 32), torch.tensor([9, 9]), input_dim=32,
                                num_heads=4, ffn_dim=48, num_layers=2, depthwise_conv_kernel_size=3),
    "torchaudio.emformer": _of("torchaudio.models.Emformer", _noise(2, 10, 32), torch.tensor([8, 8]), input_dim=32,
                               num_heads=4, ffn_dim=48, num_layers=2, segment_length=4, right_context_length=2),
    "torchaudio.wav2vec2": _of(
        "torchaudio.models.wav2vec2_model", _noise(2, 2000), extractor_mode="group_norm",
        extractor_conv_layer_config=[(16, 10, 5), (16, 8, 8)], extractor_conv_bias=False, encoder_embed_dim=32,
        encoder_projection_dropout=0.0, encoder_pos_conv_kernel=8, encoder_pos_conv_groups=4, encoder_num_layers=2,
        encoder_num_heads=4, encoder_attention_dropout=0.0, encoder_ff_interm_features=48,
            encoder_ff_interm_dropout=0.0,
        encoder_dropout=0.0, encoder_layer_norm_first=False, encoder_layer_drop=0.0, aux_num_out=None),
    "torchaudio.wavlm": _of(
        "torchaudio.models.wavlm_model", _noise(2, 2000), extractor_mode="group_norm",
        extractor_conv_layer_config=[(16, 10, 5), (16, 8, 8)], extractor_conv_bias=False, encoder_embed_dim=32,
        encoder_projection_dropout=0.0, encoder_pos_conv_kernel=8, encoder_pos_conv_groups=4, encoder_num_layers=2,
        encoder_num_heads=4, encoder_num_buckets=16, encoder_max_distance=32, encoder_attention_dropout=0.0,
        encoder_ff_interm_features=48, encoder_ff_interm_dropout=0.0, encoder_dropout=0.0,
            encoder_layer_norm_first=False,
        encoder_layer_drop=0.0, aux_num_out=None),
    "torchvision.vit": _of("torchvision.models.VisionTransformer", _PICTURE, image_size=32, patch_size=8, num_layers=2,
                           num_heads=4, hidden_dim=32, mlp_dim=48),
    "torchvision.swin": _of("torchvision.models.SwinTransformer", _PICTURE, patch_size=[4, 4], embed_dim=16,
                            depths=[2, 1], num_heads=[2, 4], window_size=[4, 4], stochastic_depth_prob=0.0),
    "torchvision.maxvit": _of("torchvision.models.MaxVit", _noise(1, 3, 64, 64), input_size=(64, 64), stem_channels=8,
                              partition_size=4, block_channels=[16, 32], block_layers=[1, 1], head_dim=8,
                              stochastic_depth_prob=0.0),
    "torchvision.swin_v2": _of("torchvision.models.swin_v2_t", _noise(1, 3, 64, 64)),
    "spandrel.swinir": _of("spandrel.architectures.SwinIR.__arch.SwinIR.SwinIR", _noise(1, 3, 16, 16), img_size=16,
                           embed_dim=32, depths=[2], num_heads=[4], window_size=4),
    "spandrel.swin2sr": _of("spandrel.architectures.Swin2SR.__arch.Swin2SR.Swin2SR", _noise(1, 3, 16, 16), img_size=16,
                            embed_dim=32, depths=[2], num_heads=[4], window_size=4),
    "spandrel.hat": _of("spandrel.architectures.HAT.__arch.HAT.HAT", _noise(1, 3, 16, 16), img_size=16, embed_dim=32,
                        depths=(2,), num_heads=(4,), window_size=4),
    "spandrel.dat": _of("spandrel.architectures.DAT.__arch.DAT.DAT", _noise(1, 3, 16, 16), img_size=16, embed_dim=32,
                        depth=[2], num_heads=[4], split_size=[4, 4]),
    "spandrel.uformer": _of("spandrel.architectures.Uformer.__arch.Uformer.Uformer", _noise(1, 3, 32, 32), img_size=32,
                            embed_dim=16, depths=[1] * 9, num_heads=[1, 2, 2, 2, 2, 2, 2, 2, 1], win_size=2),
    "spandrel.restoreformer": _of("spandrel.architectures.RestoreFormer.__arch.restoreformer_arch.RestoreFormer",
                                  _noise(1, 3, 32, 32), ch=32, ch_mult=(1, 2), attn_resolutions=(16,), resolution=32,
                                  z_channels=32, embed_dim=32, n_embed=16, num_res_blocks=1),
    "diffusers.unet": _of(
        "diffusers.UNet2DConditionModel", _noise(1, 4, 16, 16), 3, _noise(1, 5, 16), sample_size=16,
        block_out_channels=(32, 32), down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), layers_per_block=1, cross_attention_dim=16,
        attention_head_dim=4, norm_num_groups=8),
    "diffusers.vae": _of("diffusers.AutoencoderKL", _noise(1, 3, 16, 16), block_out_channels=(32,), norm_num_groups=8),
    "diffusers.dit": _of("diffusers.DiTTransformer2DModel", _noise(2, 4, 8, 8), torch.tensor([3, 5]),
                         torch.tensor([1, 2]), sample_size=8, norm_num_groups=8, num_embeds_ada_norm=9, **_DIFFUSION),
    "diffusers.pixart": _of(
        "diffusers.PixArtTransformer2DModel", _noise(2, 4, 8, 8), _noise(2, 5, 16), torch.tensor([3, 5]),
        takes={"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}, sample_size=8, norm_num_groups=8,
        cross_attention_dim=32, caption_channels=16, use_additional_conditions=False, **_DIFFUSION),
    "diffusers.sd3": _of(
        "diffusers.SD3Transformer2DModel", _noise(2, 4, 8, 8), _noise(2, 5, 16), _noise(2, 16), torch.tensor([3, 5]),
        sample_size=8, in_channels=4, out_channels=4, joint_attention_dim=16, caption_projection_dim=32,
        pooled_projection_dim=16, pos_embed_max_size=8, qk_norm="rms_norm", **_DIFFUSION),
    "diffusers.flux": _of(
        "diffusers.FluxTransformer2DModel", _noise(1, 6, 16), _noise(1, 5, 16), _noise(1, 16), torch.tensor([3]),
        torch.zeros(6, 3), torch.zeros(5, 3), in_channels=16, num_single_layers=2, joint_attention_dim=16,
        pooled_projection_dim=16, axes_dims_rope=(4, 2, 2), **_DIFFUSION),
    "diffusers.wan": _of(
        "diffusers.WanTransformer3DModel", _noise(1, 4, 2, 8, 8), torch.tensor([3]), _noise(1, 5, 16), in_channels=4,
        out_channels=4, text_dim=16, freq_dim=16, ffn_dim=48, **_DIFFUSION),
    "diffusers.sana": _of(
        "diffusers.SanaTransformer2DModel", _noise(1, 4, 8, 8), _noise(1, 5, 16), torch.tensor([3]), in_channels=4,
        out_channels=4, num_cross_attention_heads=4, cross_attention_head_dim=8, cross_attention_dim=32,
        caption_channels=16, sample_size=8, patch_size=1, **_DIFFUSION),
}  # fmt: skip
