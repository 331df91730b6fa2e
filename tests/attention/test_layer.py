"""Weights of heads: against slices of parameters taken by hand, and layouts that users describe."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import transformers
from torch import nn
from torch.nn.utils import parametrizations, prune

from hdi_callback.attention.discovery.find import survey, survey_tape
from hdi_callback.attention.layer import AttentionLayer, HeadWeight, Term, WeightRows, bias_of
from hdi_callback.attention.tape import Tape
from hdi_callback.errors import UnsupportedAttentionError
from tests.attention.models import blocks


def starts(heads: int, width: int, by_head: int, by_row: int = 1, first: int = 0) -> torch.Tensor:
    return first + torch.arange(heads)[:, None] * by_head + torch.arange(width) * by_row


def test_rows_of_a_packed_projection_are_a_live_view():
    linear = nn.Linear(16, 24)
    weight = HeadWeight(
        (Term((WeightRows(linear, ("weight",), starts(2, 4, by_head=12 * 16, by_row=16, first=64), 16),)),)
    )
    assert torch.equal(weight.tensor()[1], linear.weight[16:20])
    with torch.no_grad():
        linear.weight[17] = 7
    assert (weight.tensor()[1, 1] == 7).all()
    assert (weight.heads, weight.width, weight.in_features) == (2, 4, 16)


@pytest.mark.parametrize("transposed", [False, True])
def test_columns_of_an_output_projection_are_its_input_features(transposed):
    module = nn.Module()
    module.register_parameter("weight", nn.Parameter(torch.randn(12, 20) if transposed else torch.randn(20, 12)))
    weight = blocks(module, "weight", heads=3, width=4, dim=0 if transposed else 1)
    columns = module.weight if transposed else module.weight.T
    assert torch.equal(weight.tensor(), columns.view(3, 4, 20))


def test_three_dimensional_and_pointwise_parameters_are_read_by_the_same_numbers():
    module = nn.Module()
    module.register_parameter("kernel", nn.Parameter(torch.randn(3, 10, 4)))  # heads, features, width
    rows = WeightRows(module, ("kernel",), starts(3, 4, by_head=40), columns=10, stride=4)
    assert torch.equal(rows.tensor(), module.kernel.mT)
    convolution = nn.Conv2d(8, 6, 1)
    weight = blocks(convolution, "weight", heads=2, width=3)
    assert torch.equal(weight.tensor(), convolution.weight.view(2, 3, 8))


def test_irregular_rows_are_read_one_by_one():
    linear = nn.Linear(5, 6)
    features = torch.tensor([[4, 1], [0, 5]])
    weight = HeadWeight((Term((WeightRows(linear, ("weight",), features * 5, 5),)),))
    assert torch.equal(weight.tensor(), linear.weight[features])


def test_each_head_may_have_a_parameter_of_its_own():
    maps = nn.ModuleList(nn.Linear(6, 3) for _ in range(4))
    names = tuple(f"{head}.weight" for head in range(4))
    weight = HeadWeight((Term((WeightRows(maps, names, starts(4, 3, by_head=0, by_row=6), 6),)),))
    assert torch.equal(weight.tensor(), torch.stack([one.weight for one in maps]))
    assert len(weight.parameters()) == 4


def test_a_product_of_a_map_of_each_head_and_one_that_all_share_with_the_gain_between():
    down, up, norm = nn.Linear(12, 5, bias=False), nn.Linear(5, 8, bias=False), nn.LayerNorm(5)
    module = nn.ModuleDict({"down": down, "up": up, "norm": norm})
    nn.init.normal_(norm.weight)
    inner = WeightRows(module, ("down.weight",), starts(1, 5, by_head=0, by_row=12), 12)
    outer = WeightRows(module, ("up.weight",), starts(2, 4, by_head=20, by_row=5), 5, gain="norm.weight")
    weight = HeadWeight((Term((outer, inner)),))
    expected = (up.weight * norm.weight) @ down.weight
    assert torch.allclose(weight.tensor(), expected.view(2, 4, 12), atol=1e-6)
    weight.tensor().square().sum().backward()
    assert norm.weight.grad.abs().sum() > 0


def test_a_sum_of_a_base_and_an_update_of_low_rank_ends_when_the_adapter_is_merged():
    adapter = nn.ModuleDict(
        {"base": nn.Linear(6, 8), "a": nn.Linear(6, 2, bias=False), "b": nn.Linear(2, 8, bias=False)}
    )
    adapter.merged = False
    update = Term(
        (
            WeightRows(adapter, ("b.weight",), starts(2, 4, 8, 2), 2),
            WeightRows(adapter, ("a.weight",), starts(1, 2, 0, 6), 6),
        ),
        scale=2.0,
    )
    base = Term((WeightRows(adapter, ("base.weight",), starts(2, 4, 24, 6), 6),))
    weight = HeadWeight((base, update))
    whole = adapter["base"].weight + 2 * adapter["b"].weight @ adapter["a"].weight
    assert torch.allclose(weight.tensor(), whole.view(2, 4, 6), atol=1e-6)
    adapter.merged = True
    assert torch.equal(weight.tensor(), adapter["base"].weight.view(2, 4, 6))


def test_replaced_modules_count():
    model = nn.Sequential(nn.Linear(4, 4))
    weight = blocks(model, "0.weight", heads=2, width=2)
    model[0] = nn.Linear(4, 4)
    assert torch.equal(weight.tensor().flatten(0, 1), model[0].weight)


def test_a_weight_is_differentiable_and_can_be_written():
    linear = nn.Linear(6, 4)
    weight = blocks(linear, "weight", heads=2, width=2)
    weight.tensor()[1].sum().backward()
    assert torch.equal(linear.weight.grad, torch.tensor([0.0, 0, 1, 1])[:, None].expand(4, 6))
    fresh = torch.randn(2, 6)
    weight.write(1, fresh)
    assert torch.equal(linear.weight[2:], fresh)
    parameter, index = weight.index(0)
    state = torch.ones(4, 6)
    state.put_(index, torch.zeros(2, 6))
    assert parameter is linear.weight
    assert torch.equal(state[:2], torch.zeros(2, 6))


def test_a_weight_that_is_parametrized_after_it_was_found_is_named_and_not_computed():
    linear = nn.Linear(6, 6)
    weight = blocks(linear, "weight", heads=2, width=3)
    parametrizations.spectral_norm(linear)
    vector = linear.parametrizations.weight[0]._u.clone()
    with pytest.raises(UnsupportedAttentionError, match="Linear has no parameter or buffer `weight` any more"):
        weight.tensor()
    with pytest.raises(UnsupportedAttentionError, match="computed when it is used"):
        weight.write(0, torch.zeros(3, 6))
    assert torch.equal(linear.parametrizations.weight[0]._u, vector)


def test_a_weight_that_is_pruned_after_it_was_found_is_what_the_last_forward_used():
    linear = nn.Linear(6, 4)
    weight = blocks(linear, "weight", heads=2, width=2)
    prune.l1_unstructured(linear, "weight", amount=0.5)
    linear(torch.randn(2, 6))
    assert torch.equal(weight.tensor().flatten(0, 1), linear.weight_orig * linear.weight_mask)
    with pytest.raises(UnsupportedAttentionError, match="computed when it is used"):
        weight.write(0, torch.zeros(2, 6))


def test_errors_name_what_is_there():
    key = blocks(nn.Linear(4, 4), "weight", heads=2, width=2)
    layer = AttentionLayer("x", nn.Identity(), {"key": key}, key_of=(0, 1), value_of=(0, 1), value_dim=2)
    with pytest.raises(UnsupportedAttentionError, match=r"has no 'keys' weight; it has \['key'\]"):
        layer.weight("keys")
    linear = nn.Linear(6, 4)
    weight = blocks(linear, "weight", heads=2, width=2)
    del linear.weight
    with pytest.raises(UnsupportedAttentionError, match="no parameter or buffer `weight` any more"):
        weight.tensor()


@pytest.mark.parametrize("options", [{}, {"kdim": 6, "vdim": 10}], ids=["packed", "separate"])
def test_torchs_attention_has_the_heads_of_its_parameters(options):
    module, x = nn.MultiheadAttention(8, 2, **options), torch.randn(3, 5, 8)
    key, value = torch.randn(3, 5, module.kdim), torch.randn(3, 5, module.vdim)
    (layer,) = survey(nn.ModuleDict({"inner": module}), lambda: module(x, key, value)).layers
    assert (layer.name, layer.num_heads, layer.head_dim, layer.output_module) == ("inner", 2, 4, None)
    rows = module.k_proj_weight if options else module.in_proj_weight[8:16]
    assert torch.equal(layer.weight("key"), rows.view(2, 4, -1))
    assert torch.equal(layer.weight("output"), module.out_proj.weight.T.view(2, 4, 8))
    assert layer.description()["width"] == options.get("kdim", 8)


def test_torchs_encoder_in_one_operation_is_refused_by_its_name():
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = torch.randn(2, 5, 8)
    with torch.no_grad(), Tape(model) as tape:
        model(x)
    (refusal,) = survey_tape(tape).refused
    assert refusal.reason == "it runs the operation _transformer_encoder_layer_fwd, which is not known"


@pytest.mark.parametrize("change", ["output projection replaced", "weight parametrized"])
def test_torchs_attention_that_was_changed_is_read_from_a_forward(change):
    module, x = nn.MultiheadAttention(8, 2), torch.randn(3, 5, 8)
    if change == "weight parametrized":
        parametrizations.weight_norm(module, "in_proj_weight")
    else:
        module.out_proj = nn.Linear(8, 8, bias=False)
        parametrizations.orthogonal(module.out_proj)
    (layer,) = survey(module, lambda: module(x, x, x)).layers
    assert torch.allclose(layer.weight("key"), module.in_proj_weight[8:16].view(2, 4, -1))
    assert torch.allclose(layer.weight("output"), module.out_proj.weight.T.view(2, 4, 8))


def test_layers_are_copied_and_saved_with_their_model():
    module, x = nn.MultiheadAttention(8, 2), torch.randn(3, 5, 8)
    (layer,) = survey(module, lambda: module(x, x, x)).layers
    again = pickle.loads(pickle.dumps(copy.deepcopy(layer)))
    assert torch.equal(again.weight("key"), layer.weight("key"))


def test_biases_of_heads_are_read_from_separate_packed_and_transposed_maps():
    bert = transformers.BertModel(transformers.BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64, vocab_size=20
    ))  # fmt: skip
    gpt = transformers.GPT2Model(transformers.GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=20, n_positions=16))
    torchs, tokens = nn.TransformerEncoderLayer(32, 4, batch_first=True), torch.randint(20, (2, 8))
    own = bert.encoder.layer[0].attention.self
    packed = gpt.h[0].attn.c_attn.bias, torchs.self_attn.in_proj_bias
    for bias in (own.query.bias, own.key.bias, *packed):
        nn.init.normal_(bias)
    for model, forward, biases in (
        (bert, lambda: bert(tokens), (own.query.bias, own.key.bias)),
        (gpt, lambda: gpt(tokens), packed[0].split(32)[:2]),
        (torchs, lambda: torchs(torch.randn(2, 8, 32)), packed[1].split(32)[:2]),
    ):
        (layer,) = survey(model, forward).layers
        for role, expected in zip(("query", "key"), biases):
            of_heads = [bias_of(layer.weights[role], head) for head in range(4)]
            assert torch.equal(torch.cat([bias[places] for bias, places in of_heads]), expected)
