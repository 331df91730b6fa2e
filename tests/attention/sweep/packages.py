"""Attention of packages that others wrote, as they install: small models of them with random weights.

Where a package is not installed its models are left out; `make zoo` installs those in `packages.txt`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.attention.sweep import packages_further, packages_latest, packages_more, packages_wider
from tests.attention.sweep.packages_building import Build, Example, beside, make, noise, tokens, two, vit, x_decoder

PREFIX = "pypi."


class Graph(nn.Module):
    """A layer of a graph network on one graph for each sequence."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        count, length, width = x.shape
        one = torch.cartesian_prod(torch.arange(length), torch.arange(length)).T
        edges = torch.cat([one + i * length for i in range(count)], 1)
        return self.layer(x.reshape(-1, width), edges)


def _graph(name: str, **options: Any) -> Build:
    def build() -> nn.Module:
        from torch_geometric import nn as geometric

        return Graph(getattr(geometric, name)(32, 8, heads=4, **options))

    return build


def _sd3() -> nn.Module:
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4,
        joint_attention_dim=32, caption_projection_dim=32, pooled_projection_dim=32, out_channels=4,
    )  # fmt: skip


def _diffusion(batch: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(2)

    def noise(*shape: int) -> Tensor:
        return torch.randn(batch, *shape, generator=generator)

    return noise(4, 8, 8), noise(6, 32), noise(32), torch.full((batch,), 5)


def _aura() -> nn.Module:
    from diffusers import AuraFlowTransformer2DModel

    return AuraFlowTransformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_mmdit_layers=1, num_single_dit_layers=1, attention_head_dim=8,
        num_attention_heads=4, joint_attention_dim=32, caption_projection_dim=32, out_channels=4, pos_embed_max_size=16,
    )  # fmt: skip


def _unet() -> nn.Module:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), block_out_channels=(32, 32), layers_per_block=1,
        cross_attention_dim=32, attention_head_dim=4, norm_num_groups=8,
    )  # fmt: skip


def _flux() -> nn.Module:
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip


def _fluxed(model: nn.Module, x: Tensor, text: Tensor, pooled: Tensor, time: Tensor) -> Any:
    places = torch.zeros(64, 3)
    places[:, 1], places[:, 2] = torch.arange(64) // 8, torch.arange(64) % 8
    return model(
        hidden_states=x.flatten(2).mT, encoder_hidden_states=text, pooled_projections=pooled, timestep=time,
        img_ids=places, txt_ids=torch.zeros(text.shape[1], 3),
    )  # fmt: skip


def _dit() -> nn.Module:
    from diffusers import DiTTransformer2DModel

    return DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=8, in_channels=4, out_channels=4, num_layers=2, sample_size=8,
        norm_num_groups=8, num_embeds_ada_norm=10,
    )  # fmt: skip


def _clip() -> nn.Module:
    from open_clip.model import CLIP

    return CLIP(
        embed_dim=32,
        vision_cfg={"image_size": 32, "patch_size": 8, "layers": 2, "width": 64, "head_width": 16},
        text_cfg={"context_length": 12, "vocab_size": 64, "width": 32, "heads": 4, "layers": 2},
    )


def _esm() -> nn.Module:
    from esm import ESM2

    return ESM2(num_layers=2, embed_dim=32, attention_heads=4)


def _fttransformer() -> nn.Module:
    from rtdl_revisiting_models import FTTransformer

    return FTTransformer(
        n_cont_features=6, cat_cardinalities=[], d_out=1, n_blocks=2, d_block=32, attention_n_heads=4,
        attention_dropout=0.0, ffn_d_hidden_multiplier=1.5, ffn_dropout=0.0, residual_dropout=0.0,
    )  # fmt: skip


def _tokens_to_tokens() -> nn.Module:
    from vit_pytorch.t2t import T2TViT
    from vit_pytorch.vit import Transformer

    transformer = Transformer(32, 1, 4, 8, 48)
    return T2TViT(image_size=32, num_classes=5, dim=32, transformer=transformer, t2t_layers=((7, 4), (3, 2)))


def _speech(name: str, *args: Any, **options: Any) -> Build:
    return beside(make("speechbrain.nnet.attention", name, *args, **options), "torchaudio")


def _lit(**options: Any) -> Build:
    def build() -> nn.Module:
        from litgpt import GPT, Config

        sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "block_size": 16, "padded_vocab_size": 64}
        return GPT(Config(name="", intermediate_size=48, **(sizes | options)))

    return build


def _scale(name: str) -> Build:
    def build() -> nn.Module:
        from torchscale.architecture import config, encoder

        sizes = {
            "encoder_embed_dim": 32,
            "encoder_attention_heads": 4,
            "encoder_ffn_embed_dim": 48,
            "encoder_layers": 2,
        }
        return encoder.Encoder(config.EncoderConfig(vocab_size=64, **sizes), embed_tokens=nn.Embedding(64, 32))

    return build


_IMAGE = noise(3, 32, 32)
_SEQUENCE = noise(8, 32)

EXAMPLES: dict[str, Example] = {
    "x-transformers.plain": Example(x_decoder(), tokens(12)),
    "x-transformers.rotary": Example(x_decoder(rotary_pos_emb=True), tokens(12)),
    "x-transformers.groups": Example(x_decoder(attn_kv_heads=2), tokens(12)),
    "x-transformers.one_key_head": Example(x_decoder(attn_one_kv_head=True), tokens(12)),
    "x-transformers.talking": Example(x_decoder(attn_pre_talking_heads=True), tokens(12)),
    "x-transformers.talking_after": Example(x_decoder(attn_post_talking_heads=True), tokens(12)),
    "x-transformers.norm": Example(x_decoder(attn_qk_norm=True), tokens(12)),
    "x-transformers.norm_scaled": Example(x_decoder(attn_qk_norm=True, attn_qk_norm_dim_scale=True), tokens(12)),
    "x-transformers.gate": Example(x_decoder(attn_gate_values=True), tokens(12)),
    "x-transformers.gate_heads": Example(x_decoder(attn_gate_value_heads=True), tokens(12)),
    "x-transformers.memory": Example(x_decoder(attn_num_mem_kv=3), tokens(12)),
    "x-transformers.flash": Example(x_decoder(attn_flash=True, rel_pos_bias=False), tokens(12)),
    "x-transformers.alibi": Example(x_decoder(alibi_pos_bias=True), tokens(12)),
    "x-transformers.bias": Example(x_decoder(rel_pos_bias=True), tokens(12)),
    "x-transformers.values_wider": Example(x_decoder(attn_value_dim_head=12), tokens(12)),
    "x-transformers.sparse": Example(x_decoder(attn_sparse_topk=6), tokens(12)),
    "x-transformers.latent": Example(
        x_decoder(attn_use_latent_q=True, attn_dim_latent_q=12, attn_use_latent_kv=True, attn_dim_latent_kv=12),
        tokens(12),
    ),
    "vit-pytorch.vit": Example(vit("vit", dim_head=8), _IMAGE),
    "vit-pytorch.simple_vit": Example(vit("simple_vit", "SimpleViT", dim_head=8), _IMAGE),
    "vit-pytorch.qk_norm": Example(vit("simple_vit_with_qk_norm", "SimpleViT", dim_head=8), _IMAGE),
    "vit-pytorch.deepvit": Example(vit("deepvit", "DeepViT", dim_head=8), _IMAGE),
    "vit-pytorch.cait": Example(vit("cait", "CaiT", dim_head=8, cls_depth=1), _IMAGE),
    "vit-pytorch.parallel": Example(vit("parallel_vit", dim_head=8), _IMAGE),
    "vit-pytorch.patch_dropout": Example(vit("vit_with_patch_dropout", dim_head=8), _IMAGE),
    "vit-pytorch.small_dataset": Example(vit("vit_for_small_dataset", dim_head=8), _IMAGE),
    "vit-pytorch.learnable_memory": Example(vit("learnable_memory_vit", dim_head=8), _IMAGE),
    "vit-pytorch.cct": Example(
        make("vit_pytorch.cct", "CCT", img_size=32, embedding_dim=32, num_layers=2, num_heads=4, num_classes=5), _IMAGE
    ),
    "vit-pytorch.t2t": Example(_tokens_to_tokens, _IMAGE),
    "vit-pytorch.xcit": Example(vit("xcit", "XCiT", dim_head=8, cls_depth=1), _IMAGE),
    "vit-pytorch.registers": Example(vit("simple_vit_with_register_tokens", "SimpleViT", dim_head=8), _IMAGE),
    "vit-pytorch.value_residual": Example(vit("simple_vit_with_value_residual", "SimpleViT", dim_head=8), _IMAGE),
    "vit-pytorch.normalized": Example(vit("normalized_vit", "nViT", dim_head=8), _IMAGE),
    "local-attention": Example(
        make("local_attention", "LocalMHA", dim=32, window_size=4, dim_head=8, heads=4, causal=True), _SEQUENCE
    ),
    "local-attention.transformer": Example(
        make("local_attention.transformer", "LocalTransformer", num_tokens=64, max_seq_len=16, dim=32, depth=1,
              causal=True, local_attn_window_size=4, dim_head=8, heads=4), tokens(16)),
    "performer-pytorch": Example(
        make("performer_pytorch", "PerformerLM", num_tokens=64, max_seq_len=16, dim=32, depth=1, heads=4, dim_head=8,
              causal=False), tokens(16), attends=False),
    "reformer-pytorch": Example(
        make("reformer_pytorch", "ReformerLM", num_tokens=64, dim=32, depth=1, max_seq_len=16, heads=4, bucket_size=4,
              n_hashes=2), tokens(16)),
    "perceiver-pytorch": Example(
        make("perceiver_pytorch", "Perceiver", num_freq_bands=2, depth=1, max_freq=10, input_channels=24, input_axis=1,
              num_latents=5, latent_dim=32, cross_heads=2, latent_heads=4, cross_dim_head=8, latent_dim_head=8,
              num_classes=3, fourier_encode_data=False), noise(9, 24)),
    "tab-transformer-pytorch": Example(
        make("tab_transformer_pytorch", "FTTransformer", categories=(5, 5, 5), num_continuous=4, dim=32, depth=2,
              heads=4, dim_head=8),
        lambda batch: (torch.randint(0, 5, (batch, 3), generator=torch.Generator().manual_seed(1)), *noise(4)(batch))),
    "rtdl-revisiting-models": Example(_fttransformer, noise(6), lambda m, x: m(x, None)),
    "torch-geometric.TransformerConv": Example(_graph("TransformerConv"), _SEQUENCE),
    "torch-geometric.GATv2Conv": Example(_graph("GATv2Conv"), _SEQUENCE),
    "torch-geometric.GATConv": Example(_graph("GATConv"), _SEQUENCE),
    "torch-geometric.GPSConv": Example(
        lambda: Graph(make("torch_geometric.nn", "GPSConv", 32, None, heads=4)()), _SEQUENCE,
    ),
    "torch-geometric.MultiheadAttentionBlock": Example(
        make("torch_geometric.nn.aggr.utils", "MultiheadAttentionBlock", 32, heads=4), two((8, 32), (6, 32))
    ),
    "torch-geometric.SetAttentionBlock": Example(
        make("torch_geometric.nn.aggr.utils", "SetAttentionBlock", 32, heads=4), _SEQUENCE
    ),
    "speechbrain.MultiheadAttention": Example(_speech("MultiheadAttention", 4, 32), _SEQUENCE, lambda m, x: m(x, x, x)),
    "speechbrain.RelPosMHAXL": Example(
        _speech("RelPosMHAXL", 32, 4), _SEQUENCE, lambda m, x: m(x, x, x, torch.randn(1, 2 * x.shape[1] - 1, 32))
    ),
    "speechbrain.RoPEMHA": Example(_speech("RoPEMHA", 32, 4), _SEQUENCE, lambda m, x: m(x, x, x)),
    "diffusers.sd3": Example(_sd3, _diffusion),
    "diffusers.aura_flow": Example(_aura, _diffusion, lambda m, x, text, _, time: m(x, text, time / 10)),
    "diffusers.flux": Example(_flux, _diffusion, _fluxed),
    "diffusers.unet": Example(_unet, _diffusion, lambda m, x, text, _, time: m(x, time, text)),
    "diffusers.dit": Example(
        _dit, _diffusion, lambda m, x, text, _, time: m(x, time, torch.zeros(len(x), dtype=torch.long))
    ),
    "diffusers.attention": Example(
        make("diffusers.models.attention_processor", "Attention", 32, heads=4, dim_head=8, cross_attention_dim=32),
        two((8, 32), (6, 32)),
    ),
    "open-clip-torch": Example(_clip, lambda batch: (*_IMAGE(batch), *tokens(12)(batch))),
    "fair-esm": Example(_esm, tokens(10, 20)),
    "nystrom-attention": Example(
        make("nystrom_attention", "NystromAttention", dim=32, dim_head=8, heads=4, num_landmarks=4), _SEQUENCE
    ),
    "linear-attention-transformer": Example(
        make("linear_attention_transformer", "LinearAttentionTransformerLM", num_tokens=64, dim=32, depth=1,
              max_seq_len=16, heads=4), tokens(16), attends=False),
    "sinkhorn-transformer": Example(
        make("sinkhorn_transformer", "SinkhornTransformerLM", num_tokens=64, dim=32, max_seq_len=16, depth=1, heads=4,
              bucket_size=4), tokens(16)),
    "memory-efficient-attention-pytorch": Example(
        make("memory_efficient_attention_pytorch", "Attention", dim=32, heads=4, dim_head=8), _SEQUENCE
    ),
    "memory-efficient-attention-pytorch.buckets": Example(
        make("memory_efficient_attention_pytorch", "Attention", dim=32, heads=4, dim_head=8, memory_efficient=True,
              q_bucket_size=4, k_bucket_size=4), _SEQUENCE),
    "bottleneck-transformer-pytorch": Example(
        make("bottleneck_transformer_pytorch.bottleneck_transformer_pytorch", "Attention", dim=32, fmap_size=(4, 4),
              heads=4, dim_head=8), noise(32, 4, 4)),
    "axial-attention": Example(make("axial_attention", "AxialAttention", dim=32, dim_index=1, heads=4), noise(32,
        5, 6)),
    "timesformer-pytorch": Example(
        make("timesformer_pytorch", "TimeSformer", dim=32, image_size=16, patch_size=8, num_frames=3, num_classes=3,
              depth=1, heads=4, dim_head=8), noise(3, 3, 16, 16)),
    "coca-pytorch": Example(
        make("coca_pytorch.coca_pytorch", "ParallelTransformerBlock", dim=32, dim_head=8, heads=4), _SEQUENCE
    ),
    "coca-pytorch.cross": Example(
        make("coca_pytorch.coca_pytorch", "CrossAttention", dim=32, dim_head=8, heads=4), two((8, 32), (6, 32))
    ),
    "palm-pytorch": Example(
        make("palm_pytorch", "PaLM", num_tokens=64, dim=32, depth=1, heads=4, dim_head=8), tokens(10)
    ),
    "conformer": Example(make("conformer", "ConformerBlock", dim=32, dim_head=8, heads=4, conv_kernel_size=3),
        _SEQUENCE),
    "isab-pytorch": Example(make("isab_pytorch", "ISAB", dim=32, heads=4, num_latents=5), _SEQUENCE),
    "recurrent-memory-transformer-pytorch": Example(
        make("recurrent_memory_transformer_pytorch", "RecurrentMemoryTransformer", num_tokens=64, num_memory_tokens=2,
              dim=32, depth=1, seq_len=10, dim_head=8, heads=4), tokens(10)),
    "linformer": Example(make("linformer", "LinformerSelfAttention", dim=32, seq_len=8, k=5, heads=4), _SEQUENCE),
    "halonet-pytorch": Example(
        make("halonet_pytorch", "HaloAttention", dim=32, block_size=2, halo_size=1, dim_head=8, heads=4),
        noise(32, 4, 4)),
    "uniformer-pytorch": Example(
        make("uniformer_pytorch.uniformer_pytorch", "GlobalMHRA", dim=32, heads=4, dim_head=8), noise(32, 2, 4, 4)
    ),
    "h-transformer-1d": Example(
        make("h_transformer_1d", "HTransformer1D", num_tokens=64, dim=32, depth=1, max_seq_len=16, heads=4, dim_head=8,
              block_size=4, causal=False), tokens(16)),
    "flash-pytorch": Example(
        make("flash_pytorch", "FLASHTransformer", num_tokens=64, dim=32, depth=1, group_size=8, query_key_dim=8),
        tokens(16), attends=False),
    "simple-hierarchical-transformer": Example(
        make("simple_hierarchical_transformer", "HierarchicalTransformer", num_tokens=64, dim=32, depth=1, seq_len=16,
              dim_head=8, heads=4), tokens(16)),
    "block-recurrent-transformer-pytorch": Example(
        make("block_recurrent_transformer_pytorch", "BlockRecurrentTransformer", num_tokens=64, dim=32, depth=2,
              dim_head=8, heads=4, max_seq_len=16, block_width=8, num_state_vectors=4), tokens(16)),
    "titans-pytorch": Example(
        make("titans_pytorch.mac_transformer", "SegmentedAttention", dim=32, segment_len=4, dim_head=8, heads=4),
        _SEQUENCE),
    "iTransformer": Example(
        make("iTransformer", "iTransformer", num_variates=5, lookback_len=12, depth=1, dim=32, pred_length=4,
              dim_head=8, heads=4), noise(12, 5)),
    "slot-attention": Example(
        make("slot_attention", "MultiHeadSlotAttention", num_slots=4, dim=32, heads=4, dim_head=8, iters=1), _SEQUENCE
    ),
    "protein-bert-pytorch": Example(
        make("protein_bert_pytorch", "ProteinBERT", num_tokens=21, num_annotation=12, dim=32, dim_global=24, depth=1,
              attn_heads=4, attn_dim_head=8),
        lambda batch: (*tokens(10, 20)(batch), torch.ones(batch, 12))),
    "point-transformer-pytorch": Example(
        make("point_transformer_pytorch.multihead_point_transformer_pytorch", "MultiheadPointTransformerLayer", dim=32,
              heads=4, dim_head=8), two((8, 32), (8, 3))),
    "enformer-pytorch": Example(
        beside(make("enformer_pytorch.modeling_enformer", "Attention", 32, num_rel_pos_features=12, heads=4,
            dim_key=8,
              dim_value=8), "pyfaidx"), _SEQUENCE),
    "monai.SABlock": Example(make("monai.networks.blocks", "SABlock", 32, 4), _SEQUENCE),
    "monai.CrossAttentionBlock": Example(
        make("monai.networks.blocks", "CrossAttentionBlock", 32, 4), _SEQUENCE, lambda m, x: m(x, context=x[:, :5])
    ),
    "monai.SwinUNETR": Example(
        make("monai.networks.nets.swin_unetr", "WindowAttention", 32, num_heads=4, window_size=(2, 2)), noise(4, 32),
        lambda m, x: m(x, None)),
    "litgpt": Example(_lit(), tokens(10)),
    "litgpt.groups": Example(_lit(n_query_groups=2), tokens(10)),
    "litgpt.norm": Example(_lit(norm_qk=True, norm_class_name="RMSNorm"), tokens(10)),
    "torchscale": Example(_scale("Encoder"), tokens(10), lambda m, x: m(src_tokens=x)),
    "denoising-diffusion-pytorch": Example(
        make("denoising_diffusion_pytorch.denoising_diffusion_pytorch", "Attention", 32, heads=4, dim_head=8),
        noise(32, 4, 4)),
    "denoising-diffusion-pytorch.linear": Example(
        make("denoising_diffusion_pytorch.denoising_diffusion_pytorch", "LinearAttention", 32, heads=4, dim_head=8),
        noise(32, 4, 4), attends=False),
}  # fmt: skip
EXAMPLES |= packages_more.EXAMPLES | packages_further.EXAMPLES | packages_latest.EXAMPLES | packages_wider.EXAMPLES


def is_here() -> bool:
    """Tell whether the packages are installed."""
    return importlib.util.find_spec("x_transformers") is not None


def names() -> list[str]:
    """List the models."""
    lists = (packages_latest, packages_wider)
    missing = {name for each in lists for name in each.EXAMPLES.keys() - each.names_here()}
    return [PREFIX + name for name in EXAMPLES if name not in missing]


class Whole(nn.Module):
    """A model that has a module as its part, for most modules are parts."""

    def __init__(self, example: Example, part: nn.Module) -> None:
        super().__init__()
        self.part, self._call = part, example.call

    def forward(self, *inputs: Any) -> Any:
        return self._call(self.part, *inputs) if self._call is not None else self.part(*inputs)


def build(name: str) -> tuple[nn.Module, Callable[[nn.Module, int], Any]]:
    """Build a model, and what runs it for a batch."""
    from tests.attention.sweep import vision
    from tests.attention.sweep.architectures import randomized

    vision.declare_operators()
    example = EXAMPLES[name.removeprefix(PREFIX)]
    torch.manual_seed(0)
    model = randomized(Whole(example, example.build()))
    return model, lambda model, batch: model(*example.inputs(batch))
