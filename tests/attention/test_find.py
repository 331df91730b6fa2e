"""Heads as they are found: their weights against those of modules whose truth is known by construction."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hdi_callback.attention.discovery.find import find_attention, survey, survey_tape
from hdi_callback.attention.layer import Survey
from hdi_callback.attention.tape import Tape
from hdi_callback.errors import MisconfigurationError, UnsupportedAttentionWarning
from tests.attention.by_hand import CASES, C, D, H, Written, attend, between, four, join, split, truth_of_four
from tests.attention.by_hand_refused import REFUSED
from tests.attention.models import Model, batches, contradiction

IN = ("query", "key", "value")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_the_weights_of_heads_are_those_by_construction(name, training):
    module, truths, inputs = CASES[name]()
    module.train(training and module.training)
    found = survey(module, lambda: module(*inputs))
    assert not found.refused
    assert len(found.layers) == len(truths)
    for layer, truth in zip(found.layers, truths):
        assert contradiction(layer) is None
        assert {role for role in (*IN, "output") if role in layer.weights} == {
            role for role in (*IN, "output") if role in truth
        }
        for role in layer.weights:
            torch.testing.assert_close(layer.weight(role), truth[role])
        assert truth.get("notes", "") in layer.notes
        if "key_of" in truth:
            assert layer.key_of == truth["key_of"]
        if "normed" in truth:
            assert layer.normed == truth["normed"]


def the_largest(scores: torch.Tensor) -> torch.Tensor:
    return scores.masked_fill(scores < scores.topk(3, -1).values[..., -1:], -torch.inf)


@pytest.mark.parametrize(
    "attention",
    [
        lambda m, q, k, v: the_largest(q @ k.mT).softmax(-1) @ v,
        lambda m, q, k, v: (e := (q @ k.mT).exp()) / (e.sum(-1, keepdim=True) + 1e-9) @ v,
        lambda m, q, k, v: (w := (q @ k.mT).softmax(-1)) @ v + 0 * w.argmax(-1).float().mean(),
    ],
    ids=["a choice before the softmax", "an epsilon in the sum", "a choice that values do not take"],
)
def test_nothing_is_noted_that_rows_show(attention):
    module = between(attention)
    (layer,) = survey(module, lambda: module(torch.randn(2, 7, C))).layers
    assert layer.notes == ""


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: m.o(m.v(x) * m.k(m.q(x).mean(1, keepdim=True)).sigmoid()).mean(1),
        lambda m, x: m.o((F.silu(m.q(x)) * m.k(x)).mean(1)),
        lambda m, x: m.o(m.q(x) * (m.w @ m.k(x))),
        lambda m, x: m.o(F.rms_norm(m.q(x), (C,)).cumsum(1)),
    ],
    ids=["squeeze and excitation", "a gate before a pool", "gated tokens that a map mixes", "a sum of norms"],
)
def test_gates_and_pools_are_no_attention(forward):
    module = Written(forward, **four(w=nn.Parameter(torch.randn(7, 7))))
    assert survey(module, lambda: module(torch.randn(2, 7, C))) == Survey()


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused_with_its_reason(name):
    build, reason = REFUSED[name]
    module, _, inputs = build()
    found = survey(module, lambda: module(*inputs))
    assert not found.layers
    assert found.refused
    assert any(re.search(reason, one.reason) for one in found.refused), found.refused


@pytest.mark.parametrize("name", ["separate_and_fused", "grouped_keys"])
def test_keys_of_heads_are_what_attention_receives(name, monkeypatch):
    module, _, inputs = CASES[name]()
    for one in module.modules():
        if isinstance(one, nn.Linear):
            nn.init.zeros_(one.bias)
    received = []
    original = F.scaled_dot_product_attention

    def watched(q, k, v, **options):
        received.append((q, k, v))
        return original(q, k, v, **options)

    layer = survey(module, lambda: module(*inputs)).layers[0]
    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    module(*inputs)
    q, k, _ = received[0]
    x = inputs[0]
    torch.testing.assert_close(torch.einsum("btc,hdc->bhtd", x, layer.weight("query")), q)
    torch.testing.assert_close(torch.einsum("btc,hdc->bhtd", x, layer.weight("key"))[:, list(layer.key_of)], k)


def test_a_plain_slice_is_a_live_view():
    module, _, inputs = CASES["packed_in_three_blocks"]()
    layer = survey(module, lambda: module(*inputs)).layers[0]
    with torch.no_grad():
        module.qkv.weight[C] = 7.0
    assert layer.weight("key")[0, 0].eq(7.0).all()
    assert layer.weight("key").untyped_storage().data_ptr() == module.qkv.weight.untyped_storage().data_ptr()


def test_layers_carry_the_path_of_the_module_that_runs_them():
    inner = CASES["separate_and_fused"]().module
    model = nn.Sequential(nn.Linear(C, C), inner)
    layer = find_attention(model, lambda: model(torch.randn(2, 7, C)))[0]
    assert (layer.name, layer.module, layer.output_module) == ("1", inner, inner.o)
    assert layer.sites[0].path == "1"
    assert layer.sites[0].kind == "fused"


def test_a_module_that_runs_twice_is_one_layer_with_a_period():
    module, _, inputs = CASES["a_layer_that_runs_twice"]()
    layer = survey(module, lambda: module(*inputs)).layers[0]
    assert len(layer.sites) == 1
    assert layer.sites[0].period == 1


def test_heads_in_a_loop_have_sites_in_their_order():
    module, _, inputs = CASES["one_module_for_each_head"]()
    layer = survey(module, lambda: module(*inputs)).layers[0]
    assert [(site.ordinal, site.order) for site in layer.sites] == [(head, (head,)) for head in range(H)]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_without_a_forward_torchs_own_attention_is_known(device):
    model = nn.Transformer(C, H, 2, 1, 32, device=device)
    before = torch.get_rng_state()
    names = [layer.name for layer in find_attention(model)]
    assert names == [
        "encoder.layers.0.self_attn", "encoder.layers.1.self_attn",
        "decoder.layers.0.self_attn", "decoder.layers.0.multihead_attn",
    ]  # fmt: skip
    assert torch.equal(torch.get_rng_state(), before)


def test_without_a_forward_inputs_of_the_model_are_taken_also_on_meta():
    module = CASES["written_out"]().module
    module.example_input_array = torch.randn(2, 5, C)
    assert survey(module).layers[0].num_heads == H
    assert survey(module.to("meta")).layers[0].num_heads == H


def test_without_a_forward_and_inputs_it_is_said_what_to_write():
    with pytest.raises(MisconfigurationError, match=r"forward=lambda: model\(batch\)"):
        find_attention(CASES["written_out"]().module)


def test_find_attention_warns_of_what_is_left_out():
    module, _, inputs = REFUSED["softmax_over_heads"][0]()
    with pytest.warns(UnsupportedAttentionWarning, match="softmax runs over heads"):
        assert find_attention(module, lambda: module(*inputs)) == []


def test_models_without_attention_give_nothing():
    model = nn.Sequential(nn.Linear(C, C), nn.ReLU(), nn.Linear(C, 5), nn.Softmax(-1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find_attention(model, lambda: model(torch.randn(2, C))) == []


def test_names_of_two_attentions_in_one_module_differ():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(C, 3 * C), nn.Linear(C, 3 * C)

        def forward(self, x):
            for packed in (self.a, self.b):
                x = x + join(F.scaled_dot_product_attention(*(split(one) for one in packed(x).chunk(3, -1))))
            return x

    model = Both()
    assert [layer.name for layer in find_attention(model, lambda: model(torch.randn(2, 7, C)))] == [
        "the model",
        "the model#2",
    ]


@pytest.mark.parametrize("mask", [False, True], ids=["plain", "block mask"])
def test_flex_attention_is_read(mask):
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    hidden = flex.create_block_mask(lambda b, h, q, k: q >= k, None, None, 7, 7, device="cpu") if mask else None

    def forward(m, x):
        return m.o(join(flex.flex_attention(*(split(f(x)) for f in (m.q, m.k, m.v)), block_mask=hidden)))

    module = Written(forward, **four())
    try:
        with torch.no_grad():  # on a CPU it has no gradient
            module(torch.randn(2, 7, C))
    except ValueError as error:
        pytest.skip(f"FlexAttention of torch {torch.__version__} does not take heads of 6 features: {error}")
    layer = survey(module, lambda: module(torch.randn(2, 7, C))).layers[0]
    for role, weight in truth_of_four(module).items():
        torch.testing.assert_close(layer.weight(role), weight)


def test_a_forward_that_shows_heads_leaves_nothing_behind():
    module, _, inputs = CASES["low_rank_updates"]()
    module.register_buffer("count", torch.zeros(()))
    before = torch.get_rng_state()
    survey(module, lambda: (module.count.add_(1), module(*inputs)))
    assert torch.equal(torch.get_rng_state(), before)
    assert module.count == 0
    assert all(parameter.grad is None for parameter in module.parameters())


def test_kernels_of_packages_that_are_known_are_read_by_their_names():
    library = torch.library.Library("flash_attn", "DEF")
    library.define("_flash_attn_forward(Tensor q, Tensor k, Tensor v, float scale) -> (Tensor, Tensor)")
    library.impl(
        "_flash_attn_forward",
        lambda q, k, v, scale: (
            attend(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2).contiguous(),
            q.sum(-1),
        ),
        "CompositeExplicitAutograd",
    )

    def forward(m, x):
        q, k, v = (f(x).unflatten(-1, (-1, D)) for f in (m.q, m.k, m.v))
        return m.o(torch.ops.flash_attn._flash_attn_forward(q, k, v, 1.0)[0].flatten(2))

    module = Written(forward, **four())
    layer = survey(module, lambda: module(torch.randn(2, 7, C))).layers[0]
    for role, weight in truth_of_four(module).items():
        torch.testing.assert_close(layer.weight(role), weight)


def test_parts_of_one_layer_that_run_in_recomputation_are_one_layer():
    module = CASES["separate_and_fused"]().module
    with Tape(module) as tape:
        checkpoint(module, torch.randn(2, 7, C, requires_grad=True), use_reentrant=False).sum().backward()
    found = survey_tape(tape)
    assert len(found.layers) == 1
    assert len(found.layers[0].sites) == 1


def test_peft_has_a_base_and_an_update():
    peft = pytest.importorskip("peft")
    module = CASES["separate_and_fused"]().module
    model = peft.get_peft_model(
        module, peft.LoraConfig(r=3, lora_alpha=6, target_modules=["q", "v"], init_lora_weights=False)
    )
    layer = survey(model, lambda: model(torch.randn(2, 7, C))).layers[0]
    for role, one in (("query", module.q), ("value", module.v)):
        update = one.lora_B["default"].weight @ one.lora_A["default"].weight
        torch.testing.assert_close(layer.weight(role), (one.base_layer.weight + 2 * update).unflatten(0, (H, D)))
    torch.testing.assert_close(layer.weight("key"), module.k.weight.unflatten(0, (H, D)))


def test_dora_of_peft_is_refused_while_it_trains_and_read_once_merged():
    peft = pytest.importorskip("peft")
    module, x = CASES["separate_and_fused"]().module, torch.randn(2, 7, C)
    config = peft.LoraConfig(r=3, use_dora=True, target_modules=["q", "k"], init_lora_weights=False)
    model = peft.get_peft_model(module, config)
    (refused,) = survey(model, lambda: model(x)).refused
    assert "gain of DoRA" in refused.reason
    model.merge_adapter()
    layer = survey(model, lambda: model(x)).layers[0]
    for role, projection in (("query", module.q), ("key", module.k)):
        with torch.no_grad():
            matrix = (projection(torch.eye(C)) - projection(torch.zeros(1, C))).mT
        torch.testing.assert_close(layer.weight(role).detach(), matrix.unflatten(0, (H, D)))


class OverEdges(nn.Module):
    """Attention over the edges of a graph, whose softmax is an exponential and a scattered sum."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x, edges):
        q, k, v = (project(x).unflatten(-1, (4, 4)) for project in (self.q, self.k, self.v))
        to, of = edges
        weights = ((q[to] * k[of]).sum(-1) / 2).exp()
        weights = weights / torch.zeros(len(x), 4).index_add(0, to, weights)[to]
        return self.o(torch.zeros(len(x), 4, 4).index_add(0, to, v[of] * weights[..., None]).flatten(1))


def test_attention_over_edges_is_named_with_what_it_runs():
    model, x, edges = OverEdges(), torch.randn(10, 16), torch.randint(10, (2, 30))
    (refused,) = survey(model, lambda: model(x, edges)).refused
    assert "edges of a graph" in refused.reason
    assert "index_add" in refused.reason


def test_layers_have_the_names_of_the_model_within_its_wrappers():
    model, x = Model(), batches(1)[0][0]
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    wrapped = torch.compile(model, backend="eager")
    names = [layer.name for layer in survey(wrapped, lambda: wrapped(x)).layers]
    assert names == ["blocks.0.attention", "blocks.1.attention"]


class Core(nn.Module):
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


class AroundAPackedProjection(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.core = Core()
        self.attn = nn.ModuleDict({"qkv": nn.Linear(32, 96), "out": nn.Linear(32, 32)})

    def forward(self, x):
        q, k, v = self.attn["qkv"](x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        return self.attn["out"](self.core(q, k, v).transpose(1, 2).flatten(2))


def test_a_layer_is_named_by_what_is_around_its_packed_projection():
    model, x = AroundAPackedProjection(), torch.randn(2, 5, 32)
    assert [layer.name for layer in survey(model, lambda: model(x)).layers] == ["attn"]


def test_the_layout_of_a_layer_says_how_many_projections_it_does_not_name():
    class Apart(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = nn.ModuleList(nn.ModuleList(nn.Linear(16, 8) for _ in IN) for _ in range(2))
            self.out = nn.Linear(16, 16)

        def forward(self, x):
            maps = [[project(x) for project in head] for head in self.heads]
            return self.out(torch.cat([(q @ k.mT / 8**0.5).softmax(-1) @ v for q, k, v in maps], -1))

    model = Apart()
    (layer,) = find_attention(model, lambda: model(torch.randn(2, 6, 16)))
    assert layer.kind.startswith("in `")
    assert layer.kind.count("`") == 6
    assert layer.kind.endswith(" and 3 more")
