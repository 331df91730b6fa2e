"""What a layout claims, against what attention really receives."""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from torch import nn
from torch.nn import functional as F

from hdi_callback.attention import AttentionLayer, HeadSlice, find_attention, register_layout, survey
from hdi_callback.attention.layer import registry as known
from hdi_callback.errors import MisconfigurationError, UnsupportedAttentionError
from tests.attention import models as by_hand
from tests.attention.models import D, H
from tests.attention.witness import Computation, Witness, without_biases, witness


def linear_of(layer: AttentionLayer, role: str) -> nn.Module:
    """The module whose parameter a role is read from, reached by its path and not by the package."""
    part = layer.slices[role]
    return part.module.get_submodule(part.parameter.rpartition(".")[0])


def assert_right(layer: AttentionLayer, observed: Witness, really: Computation, *, scaled: bool = False) -> None:
    """Each head's weight, on the real input of its projection, gives what attention received for that head.

    `scaled`: a norm or a factor follows the projection, so that a token's vector is compared up to its length.
    """
    for role, actual in (("query", really.query), ("key", really.key), ("value", really.value)):
        x = observed.inputs[linear_of(layer, role)]
        x = x if x.dim() == 3 else x.unflatten(0, (actual.shape[0], -1))
        claimed = torch.einsum("bti,hki->bhtk", x, layer.weight(role).detach())
        repeat = actual.shape[1] // claimed.shape[1]
        claimed = claimed.repeat_interleave(repeat, 1)
        # Position 0 alone: there a rotary embedding is the identity.
        got, expected = actual[:, :, 0], claimed[:, :, 0]
        if scaled and role != "value":
            got, expected = F.normalize(got, dim=-1), F.normalize(expected, dim=-1)
        assert got.shape == expected.shape
        scale = float(expected.abs().max())
        assert float((got - expected).abs().max()) < 1e-5 * scale, role
        if layer.slices[role].heads > 1:
            assert float((got - expected.roll(1, 1)).abs().max()) > 1e-2 * scale, "heads are told apart"
    output = layer.weight("output").detach()
    heads = really.output.transpose(1, 2)  # (batch, length, heads, width)
    assert torch.allclose(observed.inputs[layer.output_projection].view_as(heads), heads, atol=1e-6)
    projected = layer.output_projection(heads.flatten(2)).detach()
    assert torch.allclose(torch.einsum("bthi,hid->btd", heads, output), projected, atol=1e-5)


BY_HAND = {
    "nanoGPT": (by_hand.NanoGPT(), 4, 4, 8, False),
    "timm": (by_hand.Timm(), 4, 4, 8, True),
    "einops": (by_hand.Einops(), 4, 4, 16, False),
    "cross-attention": (by_hand.EinopsCross(), 4, 4, 8, False),
    "grouped": (by_hand.Grouped(2), 4, 2, 8, False),
    "multi-query": (by_hand.Grouped(1), 4, 1, 8, False),
    "fused grouped": (by_hand.FusedGrouped(), 4, 2, 8, False),
    "one row per token": (by_hand.OneRowPerToken(), 4, 4, 8, False),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_attention_written_by_hand_is_read_right(name):
    module, heads, key_heads, width, normed = BY_HAND[name]
    model = without_biases(nn.Sequential(module))
    (layer,) = find_attention(model)
    x = torch.randn(3, 6, D, generator=torch.Generator().manual_seed(0))
    with witness(model) as observed:
        model(x)
    (really,) = observed.computations
    assert (layer.num_heads, layer.num_key_heads, layer.head_dim) == (heads, key_heads, width)
    if normed:  # a LayerNorm shifts the vector as well
        keys = torch.einsum("bti,hki->bhtk", x, layer.weight("key").detach())
        assert torch.allclose(F.layer_norm(keys, (8,)), really.key, atol=1e-5)
        queries = torch.einsum("bti,hki->bhtk", x, layer.weight("query").detach())
        assert torch.allclose(F.layer_norm(queries, (8,)), really.query, atol=1e-5)
    else:
        assert_right(layer, observed, really)


SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 99,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
IMAGE = {key: value for key, value in SMALL.items() if not key.endswith(("_id", "vocab_size"))} | {
    "image_size": 16,
    "patch_size": 4,
}
SEQ2SEQ = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 99, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip

# name -> (config, heads of each attention computation in order, key heads, head width, whether a norm follows)
TRANSFORMERS = {
    "bert": (tf.BertConfig(**SMALL), [4, 4], 4, 8, False),
    "roberta": (tf.RobertaConfig(**SMALL), [4, 4], 4, 8, False),
    "electra": (tf.ElectraConfig(**SMALL, embedding_size=16), [4, 4], 4, 8, False),
    "distilbert": (
        tf.DistilBertConfig(dim=32, n_layers=2, n_heads=4, hidden_dim=64, vocab_size=99, pad_token_id=0),
        [4, 4], 4, 8, False,
    ),
    "gpt2": (
        tf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=99, bos_token_id=1, eos_token_id=2),
        [4, 4], 4, 8, False,
    ),
    "opt, scaled queries": (
        tf.OPTConfig(hidden_size=32, num_hidden_layers=2, ffn_dim=64, num_attention_heads=4, vocab_size=99,
                     word_embed_proj_dim=32, pad_token_id=0),
        [4, 4], 4, 8, True,
    ),
    "llama": (tf.LlamaConfig(**SMALL, num_key_value_heads=2), [4, 4], 2, 8, False),
    "mistral": (tf.MistralConfig(**SMALL, num_key_value_heads=1), [4, 4], 1, 8, False),
    "qwen2": (tf.Qwen2Config(**SMALL, num_key_value_heads=2), [4, 4], 2, 8, False),
    "qwen3, wide heads and norms": (
        tf.Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=16), [4, 4], 2, 16, True,
    ),
    "olmo2, a norm over all heads": (tf.Olmo2Config(**SMALL, num_key_value_heads=2), [4, 4], 2, 8, True),
    "modernbert": (tf.ModernBertConfig(**SMALL, cls_token_id=1, sep_token_id=2), [4, 4], 4, 8, False),
    "vit": (tf.ViTConfig(**IMAGE), [4, 4], 4, 8, False),
    "bart": (tf.BartConfig(**SEQ2SEQ), [4, 2, 2], None, None, False),
    "whisper": (
        tf.WhisperConfig(**SEQ2SEQ, num_mel_bins=8, max_source_positions=6, suppress_tokens=None,
                         begin_suppress_tokens=None),
        [4, 2, 2], None, None, True,
    ),
}  # fmt: skip


def forward(name: str, model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 99, (3, 6), generator=generator)
    if name == "vit":
        model(torch.randn(3, 3, 16, 16, generator=generator))
    elif name == "whisper":
        model(torch.randn(3, 8, 12, generator=generator), decoder_input_ids=tokens)
    else:
        model(tokens)


@pytest.mark.some_slow(quick=8)
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers_are_read_right(name):
    config, heads, key_heads, width, normed = TRANSFORMERS[name]
    torch.manual_seed(0)
    model = without_biases(tf.AutoModel.from_config(config, attn_implementation="sdpa"))
    layers = find_attention(model)
    with torch.no_grad(), witness(model) as observed:
        forward(name, model)
    assert [layer.num_heads for layer in layers] == heads
    assert [computation.query.shape[1] for computation in observed.computations] == heads
    for layer, really in zip(layers, observed.computations, strict=True):
        if width is not None:
            assert (layer.num_key_heads, layer.head_dim) == (key_heads, width)
        assert really.query.shape[-1] == layer.head_dim
        assert_right(layer, observed, really, scaled=normed)


@pytest.mark.parametrize("kind", [by_hand.LengthFirst, by_hand.ThreeInputs, by_hand.AlwaysDrops])
def test_modules_with_unusual_forwards_are_read_with_the_heads_that_attention_receives(kind):
    model = without_biases(nn.Sequential(kind()))
    (layer,) = find_attention(model)
    x = torch.randn(3, 6, D, generator=torch.Generator().manual_seed(0))
    with witness(model) as observed:
        model[0](x, x, x, None) if kind is by_hand.ThreeInputs else model(x)
    (really,) = observed.computations
    x = x.transpose(0, 1) if kind is by_hand.LengthFirst else x
    for role, actual in (("query", really.query), ("key", really.key), ("value", really.value)):
        claimed = torch.einsum("bti,hki->bhtk", x, layer.weight(role).detach())
        assert torch.allclose(claimed, actual, atol=1e-5), role


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("tower", ["text", "vision"])
def test_clip_is_read_right(tower, attention):
    torch.manual_seed(0)
    model = (
        tf.CLIPTextModel(tf.CLIPTextConfig(**SMALL, attn_implementation=attention))
        if tower == "text"
        else tf.CLIPVisionModel(tf.CLIPVisionConfig(**IMAGE, attn_implementation=attention))
    )
    layers = find_attention(without_biases(model))
    with torch.no_grad(), witness(model) as observed:
        model(torch.randint(3, 99, (3, 6))) if tower == "text" else model(torch.randn(3, 3, 16, 16))
    assert len(layers) == len(observed.computations) == 2
    for layer, really in zip(layers, observed.computations, strict=True):
        assert layer.num_heads == really.query.shape[1] == 4
        assert_right(layer, observed, really)


def test_a_head_weight_plus_its_bias_gives_what_attention_receives():
    torch.manual_seed(0)
    model = tf.GPT2Model(TRANSFORMERS["gpt2"][0]).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    layer = find_attention(model)[0]
    with torch.no_grad(), witness(model) as observed:
        model(torch.randint(3, 99, (3, 6)))
    c_attn = model.h[0].attn.c_attn
    for role, start, actual in (
        ("query", 0, observed.computations[0].query),
        ("key", 32, observed.computations[0].key),
        ("value", 64, observed.computations[0].value),
    ):
        bias = c_attn.bias[start : start + 32].view(4, 1, 8)
        claimed = torch.einsum("bti,hki->bhtk", observed.inputs[c_attn], layer.weight(role)) + bias
        assert torch.allclose(claimed, actual, rtol=1e-4, atol=1e-3), role


def test_t5_is_read_right():
    config = tf.T5Config(d_model=32, d_kv=16, num_heads=4, num_layers=1, d_ff=64, vocab_size=99)
    torch.manual_seed(0)
    model = without_biases(tf.T5Model(config))
    layers = find_attention(model)
    with torch.no_grad(), witness(model) as observed:
        model(torch.randint(3, 99, (3, 6)), decoder_input_ids=torch.randint(3, 99, (3, 5)))
    assert len(observed.computations) == 3
    for layer, really in zip(layers, observed.computations, strict=True):
        assert layer.num_heads == really.query.shape[1]
        assert_right(layer, observed, really)


@pytest.mark.parametrize("batch_first", [True, False])
def test_torch_layers_are_read_right_inside_their_encoder_and_decoder(batch_first):
    torch.manual_seed(0)
    model = without_biases(nn.Transformer(D, H, 1, 1, 64, batch_first=batch_first))
    x, y = torch.randn(3, 6, D), torch.randn(3, 5, D)
    actual: dict[nn.Module, list[torch.Tensor]] = {}
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            module.register_forward_pre_hook(lambda module, args: actual.update({module: list(args[:3])}))
    with witness(model) as observed:
        model(x, y) if batch_first else model(x.transpose(0, 1), y.transpose(0, 1))
    layers = find_attention(model)
    assert len(layers) == len(observed.computations) == 3
    for layer, really in zip(layers, observed.computations, strict=True):
        roles = ("query", "key", "value")
        for role, source, got in zip(roles, actual[layer.module], (really.query, really.key, really.value)):
            source = source if batch_first else source.transpose(0, 1)
            claimed = torch.einsum("bti,hki->bhtk", source, layer.weight(role))
            assert torch.allclose(claimed, got, atol=1e-5), role


@pytest.mark.parametrize(("width", "heads"), [(32, 1), (32, 32), (96, 3), (512, 8), (64, 1), (1024, 128)])
@pytest.mark.parametrize("is_scaled", [True, False])
def test_heads_of_any_number_and_width_are_found_in_the_traced_run(width, heads, is_scaled):
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_heads, self.qkv, self.proj = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

        def forward(self, x):
            q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
            scores = q @ k.mT * ((width // heads) ** -0.5 if is_scaled else 1)
            return self.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    with torch.device("meta"):
        model = nn.Sequential(Plain())
    (layer,) = find_attention(model)
    assert (layer.num_heads, layer.head_dim) == (heads, width // heads)


def test_a_layer_is_found_before_its_weights_exist():
    """The trial forward needs no weight, so that a model on the meta device is described as well."""
    model = nn.Sequential(by_hand.NanoGPT(), by_hand.Interleaved(), by_hand.Grouped()).to("meta")
    found = survey(model)
    assert [layer.name for layer in found.layers] == ["0", "1", "2"]
    assert found.refused == ()


@pytest.mark.parametrize("need_weights", [True, False])
def test_the_witness_records_the_same_heads_with_and_without_attention_weights(need_weights):
    torch.manual_seed(0)
    module, x = nn.MultiheadAttention(D, H, batch_first=True).eval(), torch.randn(3, 6, D)
    with torch.no_grad(), witness(module) as observed:
        answer, _ = module(x, x, x, need_weights=need_weights)
    (really,) = observed.computations
    by_softmax = (really.query @ really.key.mT / 8**0.5).softmax(-1) @ really.value
    assert torch.allclose(by_softmax, really.output, atol=1e-6)
    assert torch.allclose(module.out_proj(by_softmax.transpose(1, 2).flatten(2)), answer, atol=1e-6)


def test_both_towers_of_clip_are_found_with_separate_heads():
    text = SMALL | {"num_attention_heads": 8}
    config = tf.CLIPConfig(text_config=text, vision_config=IMAGE, projection_dim=16)
    layers = find_attention(tf.CLIPModel(config))
    counts = {layer.name.split(".")[0]: layer.num_heads for layer in layers}
    assert counts == {"text_model": 8, "vision_model": 4}
    assert len(layers) == 4


def test_t5_heads_are_wider_together_than_the_model():
    config = tf.T5Config(d_model=32, d_kv=16, num_heads=4, num_layers=1, d_ff=64, vocab_size=99)
    layers = find_attention(tf.T5Model(config))
    assert [(layer.num_heads, layer.head_dim) for layer in layers] == [(4, 16)] * 3
    assert tuple(layers[0].weight("key").shape) == (4, 16, 32)
    assert tuple(layers[0].weight("output").shape) == (4, 16, 32)


# --- torch's own attention


@pytest.mark.parametrize("widths", [{}, {"kdim": 20, "vdim": 24}, {"kdim": 20}], ids=["packed", "kdim vdim", "kdim"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_torch_attention_is_read_right(widths, batch_first):
    torch.manual_seed(0)
    module = without_biases(nn.MultiheadAttention(D, H, batch_first=batch_first, **widths))
    (layer,) = find_attention(nn.Sequential(module))
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(3, 6, width, generator=generator) for width in (D, widths.get("kdim", D), widths.get("vdim", D))
    )
    inputs = [tensor if batch_first else tensor.transpose(0, 1) for tensor in (query, key, value)]
    with witness(module) as observed:  # with gradients on, so that torch does not take its fused path
        module(*inputs, need_weights=False)
    (really,) = observed.computations
    for role, x, actual in (("query", query, really.query), ("key", key, really.key), ("value", value, really.value)):
        claimed = torch.einsum("bti,hki->bhtk", x, layer.weight(role).detach())
        assert torch.allclose(claimed, actual, atol=1e-5), role
    heads = really.output.transpose(1, 2)
    projected = torch.einsum("bthi,hid->btd", heads, layer.weight("output").detach())
    assert torch.allclose(projected, module.out_proj(heads.flatten(2)), atol=1e-5)


def test_encoders_and_decoders_of_torch_are_found_in_model_order():
    model = nn.Transformer(D, H, num_encoder_layers=2, num_decoder_layers=1, dim_feedforward=64, batch_first=True)
    assert [layer.name for layer in find_attention(model)] == [
        "encoder.layers.0.self_attn",
        "encoder.layers.1.self_attn",
        "decoder.layers.0.self_attn",
        "decoder.layers.0.multihead_attn",
    ]


# --- how a layer behaves


def test_a_weight_is_a_live_view_of_its_parameter():
    for module in (nn.MultiheadAttention(D, H), by_hand.NanoGPT(), by_hand.Grouped()):
        (layer,) = find_attention(nn.Sequential(module))
        for role in ("query", "key", "value", "output"):
            before = layer.weight(role).detach().clone()
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.mul_(2)
            assert torch.equal(layer.weight(role), 2 * before), role


def test_the_weight_of_a_replaced_projection_is_read_or_refused():
    module = by_hand.Grouped()
    (layer,) = find_attention(nn.Sequential(module))
    module.k_proj = nn.Linear(D, 16)
    assert torch.equal(layer.weight("key").flatten(0, 1), module.k_proj.weight)
    module.k_proj = nn.Identity()
    with pytest.raises(UnsupportedAttentionError, match="Identity has no tensor `weight`"):
        layer.weight("key")


def test_a_parametrized_weight_is_read_as_it_is_used():
    module = by_hand.Grouped()
    (layer,) = find_attention(nn.Sequential(module))
    torch.nn.utils.parametrizations.weight_norm(module.k_proj)
    with torch.no_grad():
        module.k_proj.parametrizations.weight.original0.mul_(3)
    assert torch.equal(layer.weight("key").flatten(0, 1), module.k_proj.weight)


def test_an_unknown_role_is_refused_with_the_list_of_roles():
    (layer,) = find_attention(nn.Sequential(by_hand.Grouped()))
    with pytest.raises(UnsupportedAttentionError, match=r"no 'rotary' weight; it has \['key', 'output'"):
        layer.weight("rotary")


def test_a_module_under_two_names_is_one_layer():
    shared = by_hand.Grouped()
    assert [layer.name for layer in find_attention(nn.ModuleList([shared, shared]))] == ["0"]


def test_patterns_choose_layers():
    model = nn.ModuleDict(
        {"encoder": nn.ModuleList([by_hand.Grouped(), by_hand.Grouped()]), "decoder": by_hand.NanoGPT()}
    )

    def names(**patterns: list[str]) -> list[str]:
        return [layer.name for layer in find_attention(model, **patterns)]

    assert names(include=["encoder.*"]) == ["encoder.0", "encoder.1"]
    assert names(exclude=["encoder.1"]) == ["encoder.0", "decoder"]
    assert names(include=["encoder.*"], exclude=["*.0"]) == ["encoder.1"]


@pytest.mark.parametrize("argument", ["include", "exclude"])
def test_a_pattern_that_matches_nothing_is_refused_with_the_layers_that_exist(argument):
    model = nn.ModuleDict({"encoder": by_hand.Grouped()})
    with pytest.raises(
        MisconfigurationError, match=r"'decoder\.\*', which matches no attention layer. There are: encoder"
    ):
        find_attention(model, **{argument: ["decoder.*"]})
    with pytest.raises(MisconfigurationError, match=r"write \['encoder'\]"):
        find_attention(model, **{argument: "encoder"})


# --- layouts of the user's own


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(known, "_REGISTERED", [])


def describe(name: str, module: by_hand.Interleaved) -> AttentionLayer:
    return AttentionLayer(
        name, module, num_heads=1, num_key_heads=1, head_dim=8, value_dim=8, kind="first head of an interleaved one",
        slices={"key": HeadSlice(module, "qkv_proj.weight", heads=1, width=8, start=8)},
    )  # fmt: skip


def test_a_registered_layout_describes_its_class_and_subclasses(registry):
    class Mine(by_hand.Interleaved):
        pass

    register_layout(by_hand.Interleaved, describe)
    model = without_biases(nn.Sequential(Mine()))
    (layer,) = find_attention(model)
    x = torch.randn(3, 6, D)
    with witness(model) as observed:
        model(x)
    claimed = torch.einsum("bti,hki->bhtk", x, layer.weight("key").detach())
    assert torch.allclose(claimed[:, 0], observed.computations[0].key[:, 0], atol=1e-5)


def test_a_registered_layout_comes_before_the_built_in_ones(registry):
    register_layout(by_hand.Grouped, lambda name, module: AttentionLayer(
        name, module, 2, 2, 16, 16, "mine", {"key": HeadSlice(module, "q_proj.weight", 2, 16)}))  # fmt: skip
    (layer,) = find_attention(nn.Sequential(by_hand.Grouped()))
    assert layer.kind == "mine"


def test_a_registered_layout_that_contradicts_its_weights_is_refused(registry):
    def wrong(name: str, module: nn.Module) -> AttentionLayer:
        return AttentionLayer(name, module, 4, 4, 16, 16, "wrong", {"key": HeadSlice(module, "k_proj.weight", 4, 16)})

    register_layout(by_hand.Grouped, wrong)
    (refusal,) = survey(nn.Sequential(by_hand.Grouped())).refused
    assert "16 features, fewer than 4 heads of 16" in refusal.message
