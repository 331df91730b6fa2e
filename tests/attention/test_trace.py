"""Heads by the graph of one forward: what is claimed of modules that names say nothing, or something wrong, of."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hdi_callback.attention import find_attention, survey
from hdi_callback.attention.layer.heads import AttentionLayer
from hdi_callback.attention.trace.draw import Draw
from hdi_callback.attention.trace.layers import Found, layers_in
from hdi_callback.attention.trace.run import Traceable
from hdi_callback.attention.trace.support import Support, columns_of
from hdi_callback.attention.trace.verify import carried_over, compute_the_same
from hdi_callback.errors import UnsupportedAttentionWarning
from tests.attention import adversarial
from tests.attention import models as by_hand
from tests.attention.models import D, H
from tests.attention.sweep.judge import claim_of, judge, merged
from tests.attention.witness import witness

B, T = 41, 6


def read(module: nn.Module, *args: object, name: str = "") -> list[Found]:
    args = args or (torch.randn(2, 8, D),)
    return layers_in(Traceable(module), args, {}, name)[1]


def layers_of(module: nn.Module, *args: object) -> list[AttentionLayer]:
    found = read(module, *args)
    assert all(one.layer is not None for one in found), [one.reason for one in found]
    return [one.layer for one in found if one.layer is not None]


def require_right(module: nn.Module, layers: list[AttentionLayer], *args: torch.Tensor) -> None:
    """Each layer is what attention received, judged without the tracer, by values of a forward."""
    args = args or (torch.randn(B, T, D),)
    with torch.no_grad(), witness(module.eval()) as observed:
        module(*args)
    computations = merged(observed.computations, B)
    assert len(computations) == len(layers)
    for layer, computation in zip(layers, computations):
        finding = judge(claim_of(layer), observed, computation, B)
        assert finding.is_right, finding.reason


RIGHT = {
    by_hand.Strided: (4, 8), by_hand.TwiceAsMany: (8, 4), by_hand.HalfAsMany: (2, 16), by_hand.KeysFirst: (4, 8),
    by_hand.Interleaved: (4, 8), by_hand.NanoGPT: (4, 8), by_hand.Timm: (4, 8), by_hand.KeysRolled: (4, 8),
    adversarial.SwappedNames: (4, 8), adversarial.Mixer: (4, 8), adversarial.ReversedOutputs: (4, 8),
}  # fmt: skip


@pytest.mark.parametrize("kind", RIGHT, ids=lambda kind: kind.__name__)
def test_heads_are_found_by_what_attention_receives_even_under_misleading_names(kind):
    torch.manual_seed(0)
    module = kind()
    (layer,) = layers_of(module)
    assert (layer.num_heads, layer.head_dim) == RIGHT[kind]
    require_right(module, [layer])


def test_query_and_key_are_distinguished_by_computation_and_not_by_name():
    module = adversarial.SwappedNames()
    (layer,) = layers_of(module)
    assert torch.equal(layer.weight("query"), module.k_proj.weight.view(H, 8, D))
    assert torch.equal(layer.weight("key"), module.q_proj.weight.view(H, 8, D))


@pytest.mark.parametrize("kind", [adversarial.MapPerHead, adversarial.HeadsInAList])
def test_a_linear_map_per_head_makes_one_layer_of_all_heads(kind):
    torch.manual_seed(0)
    module = kind()
    (layer,) = layers_of(module)
    assert layer.module is module
    assert (layer.num_heads, layer.num_key_heads, layer.head_dim) == (H, H, 8)
    keys = [one.key.weight for one in module.heads] if hasattr(module, "heads") else [one.weight for one in module.keys]
    assert torch.equal(layer.weight("key"), torch.stack(keys))
    output = (module.proj if hasattr(module, "proj") else module.mix).weight
    assert torch.equal(layer.weight("output"), output.mT.view(H, 8, D))


@pytest.mark.parametrize("by_matmul", [False, True])
def test_projections_as_bare_parameters_are_read_as_live_views(by_matmul):
    torch.manual_seed(0)
    module = adversarial.BareParameters(by_matmul)
    (layer,) = layers_of(module)
    assert torch.equal(layer.weight("query"), module.W_Q.mT)
    assert torch.equal(layer.weight("key"), module.W_K.mT)
    assert torch.equal(layer.weight("output"), module.W_O)
    with torch.no_grad():
        module.W_K.mul_(2)
    assert torch.equal(layer.weight("key"), module.W_K.mT)


def test_two_attentions_in_one_module_are_two_layers_with_separate_names():
    torch.manual_seed(0)
    module = adversarial.TwoInOne()
    first, second = layers_of(module)
    assert [first.name, second.name] == ["qkv1", "qkv2"]
    assert first.module is second.module is module
    for layer, fused, back in ((first, module.qkv1, module.proj1), (second, module.qkv2, module.proj2)):
        assert torch.equal(layer.weight("key"), fused.weight[D : 2 * D].view(H, 8, D))
        assert layer.output_projection is back


def test_a_module_with_its_own_attention_and_an_attention_child_gives_two_layers():
    module = adversarial.BesideAChild()
    found = read(module, name="block")
    assert [(one.path, one.layer and one.layer.name) for one in found] == [("child", "block.child"), ("", "block")]


def test_each_stream_of_joint_attention_is_a_layer():
    torch.manual_seed(0)
    module = adversarial.Joint()
    layers = {one.name: one for one in layers_of(module, torch.randn(2, 8, D), torch.randn(2, 5, D))}
    assert sorted(layers) == ["add_k", "to_k"]
    for stream in ("to", "add"):
        for role in ("query", "key", "value"):
            weight = module.get_parameter(f"{stream}_{role[0]}.weight")
            assert torch.equal(layers[f"{stream}_k"].weight(role), weight.view(H, 8, D)), (stream, role)


@pytest.mark.parametrize(("kind", "centring"), [("function", "head"), ("ln_k", "head"), ("by hand", "head"), ("", "")])
def test_the_mean_that_a_functional_norm_subtracts_is_subtracted_from_the_key_weight(kind, centring):
    torch.manual_seed(0)
    module = adversarial.NormedByFunction(kind)
    (layer,) = layers_of(module)
    assert layer.slices["key"].centring == centring
    assert ("key" in layer.normed) == bool(kind)
    keys = module.k_proj.weight.view(H, 8, D)
    expected = keys - keys.mean(1, keepdim=True) if centring else keys
    assert torch.allclose(layer.weight("key"), expected, atol=1e-6)


@pytest.mark.parametrize("kind", [by_hand.GroupsTiled, adversarial.TiledWithOption])
def test_tiled_keys_are_read_with_heads_ordered_by_their_shared_key_head(kind):
    module = kind()
    (layer,) = layers_of(module)
    assert (layer.num_key_heads, layer.head_order) == (2, (0, 2, 1, 3))
    assert torch.equal(layer.weight("query"), module.q_proj.weight.view(H, 8, D)[[0, 2, 1, 3]])
    assert torch.equal(layer.weight("key"), module.k_proj.weight.view(2, 8, D))
    assert torch.equal(layer.weight("output"), module.o_proj.weight.mT.reshape(H, 8, D)[[0, 2, 1, 3]])


def test_outputs_in_reversed_order_have_weights_that_can_be_read():
    module = adversarial.ReversedOutputs()
    (layer,) = layers_of(module)
    assert layer.output_projection is None, "what it is given is in another order"
    assert torch.equal(layer.weight("key"), module.k_proj.weight.view(H, 8, D))
    assert torch.equal(layer.weight("output"), module.out_proj.weight.mT.view(H, 8, D).flip(0))


REFUSED = {
    by_hand.OverChannels: "of a feature and not of a token",
    by_hand.KeysMixed: "share or mix",
    by_hand.ValuesSquashed: "its value projection is followed by an activation",
    by_hand.KeysIgnored: "no query in its scores meets several keys",
    by_hand.GroupsOfTwoSizes: "not shared by adjacent heads in groups of one size",
}


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_a_module_without_separate_heads_is_refused_with_the_reason(kind):
    found = read(kind())
    assert [one.layer for one in found] == [None]
    assert REFUSED[kind] in found[0].reason


def test_heads_whose_outputs_are_subtracted_are_read_without_their_outputs():
    torch.manual_seed(0)
    module = by_hand.DifferentialByConstant()
    (layer,) = layers_of(module)
    assert layer.left_out == "the outputs of its heads, several of which are added up"
    assert sorted(layer.slices) == ["key", "query", "value"]
    for role, part in (("query", module.q_proj), ("key", module.k_proj)):
        assert torch.equal(layer.weight(role), part.weight.view(2 * H, 4, D)), "a softmax for each half"
    assert torch.equal(layer.weight("value"), module.v_proj.weight.view(H, 8, D)), "which two of them share"


@pytest.mark.filterwarnings("ignore")  # torch says that its own way to quantise is old
def test_linear_maps_whose_matrix_cannot_be_read_are_named_in_the_refusal():
    class Mixer(by_hand.Separate):
        def forward(self, x):
            return self.out_proj(by_hand.attend(*self.heads(x)))

    module = torch.ao.quantization.quantize_dynamic(Mixer().eval(), {nn.Linear})
    (found,) = read(module)
    assert found.layer is None
    assert found.reason == "its projection `q_proj` is a Linear of torch without a matrix that is read"


class InFront(by_hand.Separate):
    """One map in front of all projections."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(D, D, bias=False)

    def forward(self, x):
        return self.out_proj(by_hand.attend(*self.heads(self.shared(x))))


def test_a_linear_map_before_all_projections_is_multiplied_into_their_weights():
    torch.manual_seed(0)
    module = InFront()
    (layer,) = layers_of(module)
    for role in ("query", "key", "value"):
        expected = (getattr(module, f"{role[0]}_proj").weight @ module.shared.weight).view(H, 8, D)
        assert torch.allclose(layer.weight(role), expected, atol=1e-6), role


class Stacked(nn.Module):
    """A stack of matrices that is used turned, and an object for an input."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.randn(H, 8, D)) for _ in range(3))
        self.back = nn.Linear(D, D)

    def forward(self, batch):
        q, k, v = ((batch.x[:, None] @ one.mT).transpose(1, 2) for one in (self.a, self.b, self.c))
        return self.back(by_hand.attend(q, k, v))


def test_projections_stacked_in_one_parameter_are_read_from_a_forward_that_takes_an_object():
    module = Stacked()
    (layer,) = layers_of(module, SimpleNamespace(x=torch.randn(2, 8, D)))
    assert torch.equal(layer.weight("query"), module.a)
    assert torch.equal(layer.weight("key"), module.b)


class Latent(nn.Module):
    """Keys and values from a latent behind a LayerNorm, and a part of the keys that all heads share."""

    def __init__(self):
        super().__init__()
        self.q, self.down, self.up, self.out = (
            nn.Linear(*shape) for shape in ((D, H * 10), (D, 12), (8, H * 14), (H * 8, D))
        )
        self.between = nn.LayerNorm(8)
        nn.init.uniform_(self.between.weight, 0.5, 2)

    def shared(self, x):
        return x

    def forward(self, x):
        latent, shared = self.down(x).split([8, 4], -1)
        k, v = self.up(self.between(latent)).unflatten(-1, (H, 14)).split([6, 8], -1)
        k = torch.cat([k, self.shared(shared)[:, :, None].expand(-1, -1, H, -1)], -1)
        return self.out(by_hand.attend(self.q(x).unflatten(-1, (H, 10)), k, v))


def test_latent_keys_are_the_product_of_both_projections_with_the_norm_between_them():
    torch.manual_seed(0)
    module = Latent()
    (layer,) = layers_of(module)
    down = module.down.weight[:8] - module.down.weight[:8].mean(0)
    expected = (module.up.weight.view(H, 14, 8) * module.between.weight) @ down
    assert torch.allclose(layer.weight("key"), expected[:, :6], atol=1e-6)
    assert torch.allclose(layer.weight("value"), expected[:, 6:], atol=1e-6)
    assert torch.equal(layer.weight("query"), module.q.weight.view(H, 10, D)[:, :6])
    assert "without the part that all heads share" in layer.kind


class NormedRotary(Latent):
    """The part of the keys that all heads share has a norm of its own, and with it a factor for each token."""

    def shared(self, x):
        return nn.functional.rms_norm(x, (4,))


def test_a_norm_on_the_shared_rotary_part_of_latent_attention_changes_no_heads():
    torch.manual_seed(0)
    (layer,) = layers_of(NormedRotary())
    (plain,) = layers_of(Latent())
    assert layer.kind == plain.kind
    assert (layer.num_heads, layer.head_dim) == (plain.num_heads, plain.head_dim)
    assert layer.slices.keys() == plain.slices.keys()


class Blocks(by_hand.Separate):
    """Each block of tokens attends to itself and its neighbours; there is padding at both ends."""

    def forward(self, x):
        q, k, v = (part.unflatten(1, (-1, 2)).transpose(2, 3) for part in self.heads(x))
        k, v = (torch.cat([nn.functional.pad(one, (0, 0) * 3 + (1, 1))[:, i : i + q.shape[1]] for i in range(3)], -2)
                for one in (k, v))  # fmt: skip
        out = (q @ k.mT / 8**0.5).softmax(-1) @ v
        return self.out_proj(out.transpose(2, 3).flatten(1, 2).flatten(2))


def test_padding_of_attention_in_blocks_does_not_change_the_keys():
    torch.manual_seed(0)
    module = Blocks()
    (layer,) = layers_of(module)
    assert torch.equal(layer.weight("key"), module.k_proj.weight.view(H, 8, D))
    assert torch.equal(layer.weight("output"), module.out_proj.weight.mT.view(H, 8, D))


@pytest.mark.parametrize(
    "module", [nn.Sequential(nn.Linear(D, 64), nn.GELU(), nn.Linear(64, D)), nn.LSTM(D, D, batch_first=True)]
)
def test_modules_without_attention_have_no_layer_and_no_refusal(module):
    assert read(module) == []


class Chooser(nn.Module):
    """Says which tokens are worth a look; no gradient reaches it, as in DeepSeek's sparse attention."""

    def __init__(self):
        super().__init__()
        self.asked, self.kept = nn.Linear(D, 4), nn.Sequential(nn.Linear(D, 4))

    @torch.no_grad()
    def forward(self, x):
        return self.asked(x) @ self.kept(x.view(x.shape)).mT


class Chosen(by_hand.Separate):
    def __init__(self):
        super().__init__()
        self.chooser = Chooser()

    def forward(self, x):
        q, k, v = self.heads(x)
        best = self.chooser(x).topk(3, -1).indices
        mask = torch.full((*x.shape[:2], x.shape[1]), float("-inf")).scatter(-1, best, 0.0)
        scores = q.transpose(1, 2) @ k.transpose(1, 2).mT / 8**0.5 + mask[:, None]
        return self.out_proj((scores.softmax(-1) @ v.transpose(1, 2)).transpose(1, 2).flatten(2))


def test_heads_are_read_from_a_forward_with_parts_under_no_grad():
    torch.manual_seed(0)
    module = Chosen()
    (layer,) = layers_of(module)
    for role in ("query", "key", "value"):
        assert torch.equal(layer.weight(role), getattr(module, f"{role[0]}_proj").weight.view(H, 8, D))
    assert torch.equal(layer.weight("output"), module.out_proj.weight.mT.reshape(H, 8, D))


class UnderCheckpoint(by_hand.NanoGPT):
    """Recomputed in backward, and whenever what it saved is read."""

    def __init__(self, reentrant: bool):
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_attention_under_activation_checkpointing_is_read_as_without(reentrant):
    torch.manual_seed(0)
    module = UnderCheckpoint(reentrant)
    with torch.compiler.set_stance("force_eager"):
        (layer,) = layers_of(module)
    assert set(layer.slices) == {"query", "key", "value", "output"}
    require_right(module, [layer])
    # Checkpoints of the user's are what they were.
    x = torch.randn(2, 3, D, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        module(x)
    kept = [tensor for tensor in kept if tensor.numel()]  # torch 2.10 keeps an empty one besides
    assert len(kept) <= 1, "a checkpoint keeps its input alone"


def test_heads_are_found_on_the_meta_device():
    module = by_hand.Interleaved().to("meta")
    (layer,) = layers_of(module)
    assert tuple(layer.weight("key").shape) == (H, 8, D)
    assert layer.slices["key"].index()[:, 0].tolist() == [8, 32, 56, 80]


def test_neither_the_module_nor_the_random_state_nor_the_inputs_are_touched():
    module, x = by_hand.Interleaved(), torch.randn(2, 8, D)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    kept, state = x.clone(), torch.get_rng_state()
    read(module, x)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(x, kept)
    assert not x.requires_grad
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())


class Turned(by_hand.NanoGPT):
    """The same class and shapes, and rows that are used in another order."""

    def __init__(self, is_turned):
        super().__init__()
        self.is_turned = is_turned

    def forward(self, x):
        q, k, v = self.c_attn(x).chunk(3, -1)[:: -1 if self.is_turned else 1]
        return self.c_proj(by_hand.attend(*(part.unflatten(-1, (H, 8)) for part in (q, k, v))))


def test_a_traced_copy_draws_biases_of_zero_at_random_and_keeps_the_matrices_of_linear_maps():
    module = nn.Module()
    module.map, module.bias = nn.Linear(4, 4), nn.Parameter(torch.zeros(5))
    module.twin = module.map.weight
    trial = Traceable(module).trial
    assert trial.bias.all(), "a bias of zero would hide what is added by it"
    assert torch.equal(trial.twin, module.map.weight)
    assert not module.bias.any()


def test_modules_that_compute_the_same_are_distinguished_from_those_that_only_look_alike():
    x = (torch.randn(2, 8, D),)
    one, twin, turned = (
        Traceable(module).run(x, {}, Draw()) for module in (Turned(False), Turned(False), Turned(True))
    )
    assert compute_the_same(one, twin)
    assert not compute_the_same(one, turned)


def test_a_layer_carried_over_to_an_equal_module_reads_the_weights_of_that_module():
    first, second = nn.Sequential(Turned(True)), nn.Sequential(Turned(True))
    found = read(first, name="blocks.0")
    (moved,) = carried_over(found, first, second, "blocks.0", "blocks.7")
    assert moved.layer is not None
    assert moved.layer.name == "blocks.7.0"
    assert moved.layer.module is second[0]
    assert moved.layer.output_projection is second[0].c_proj
    assert torch.equal(moved.layer.weight("query"), second[0].c_attn.weight[2 * D :].view(H, 8, D))


def test_a_support_is_what_a_tensor_depends_on():
    leaf, other = torch.randn(3, 4, requires_grad=True), torch.randn(2, 4, requires_grad=True)
    one = Support.of((leaf * 2).sum(-1, keepdim=True), [leaf, other], [0])
    two = Support.of(leaf[:, 1:3] ** 2, [leaf, other])
    assert (one.positions(0), one.features(0)) == ((0,), (0, 1, 2, 3))
    assert (two.positions(0), two.features(0)) == ((0, 1, 2), (1, 2))
    assert one.is_equal(Support.of(leaf[0] * 3, [leaf]))
    assert not one.is_equal(two)
    assert not Support.of(leaf * 1.0, [other])
    assert (one.is_of_several_positions, two.is_of_several_positions) == (False, True)


def test_columns_are_read_from_few_derivatives():
    leaf = torch.randn(5, 7, requires_grad=True)
    order = torch.tensor([3, 0, 6, 5])
    codes = columns_of(leaf[:, order] * torch.rand(5, 1), [leaf])
    assert codes[0][2].tolist() == [1, -1, -1, 0, -1, 3, 2]
    mixed = columns_of(leaf[:, :2] @ torch.randn(2, 3), [leaf])
    assert mixed[0][0].tolist() == [-2, -2, -1, -1, -1, -1, -1]


class BothWays(nn.Module):
    """Two streams attend to each other by the same scores, less the largest of all, as in GroundingDINO."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.va, self.vb, self.oa, self.ob = (nn.Linear(D, D) for _ in range(6))

    def forward(self, one, other):
        q, k, v, w = (part.unflatten(-1, (H, 8)).transpose(1, 2)
                      for part in (self.a(one), self.b(other), self.va(one), self.vb(other)))  # fmt: skip
        scores = q @ k.mT
        scores = scores - scores.max()
        there, back = scores.softmax(-1) @ w, scores.mT.softmax(-1) @ v
        return self.oa(there.transpose(1, 2).flatten(2)), self.ob(back.transpose(1, 2).flatten(2))


def test_two_streams_that_attend_to_each_other_are_two_layers():
    torch.manual_seed(0)
    module = BothWays()
    layers = layers_of(module, torch.randn(2, 9, D), torch.randn(2, 5, D))
    keys = {module.b: (module.a, module.vb, module.oa), module.a: (module.b, module.va, module.ob)}
    assert len(layers) == 2
    for layer, (key, (query, value, output)) in zip(layers, keys.items()):
        for role, part in (("query", query), ("key", key), ("value", value)):
            assert torch.equal(layer.weight(role), part.weight.view(H, 8, D))
        assert torch.equal(layer.weight("output"), output.weight.mT.reshape(H, 8, D))


class AndAnotherOne(by_hand.Separate):
    """A second attention beside the first, whose heads mix."""

    def __init__(self):
        super().__init__()
        self.talk, self.second = nn.Parameter(torch.randn(H, H)), nn.Linear(D, 3 * D)

    def forward(self, x):
        q, k, v = self.second(x).unflatten(-1, (3, H, 8)).permute(2, 0, 3, 1, 4)
        mixed = torch.einsum("bhij,hg->bgij", q @ k.mT, self.talk).softmax(-1) @ v
        return self.out_proj(by_hand.attend(*self.heads(x))) + mixed.transpose(1, 2).flatten(2)


def test_a_layer_beside_an_attention_that_cannot_be_read_reports_it_as_left_out():
    torch.manual_seed(0)
    (layer,) = survey(nn.Sequential(AndAnotherOne())).layers
    assert "another attention in it" in layer.left_out
    assert torch.equal(layer.weight("key"), layer.module.k_proj.weight.view(H, 8, D))


class QuantLinear(nn.Module):
    """Counts its features as a linear map does, and gives a scale beside what it computes, as I-BERT's does."""

    def __init__(self, *, scaled: bool) -> None:
        super().__init__()
        self.in_features = self.out_features = D
        self.weight, self.scaled = nn.Parameter(torch.randn(D, D)), scaled

    def forward(self, x, scale=None):
        weight = self.weight.round() if self.scaled else self.weight
        return F.linear(x, weight), scale


class BesideScales(nn.Module):
    def __init__(self, *, scaled: bool) -> None:
        super().__init__()
        self.one, self.two, self.three = (QuantLinear(scaled=scaled) for _ in range(3))

    def forward(self, x):
        parts = (one(x)[0].unflatten(-1, (4, -1)).transpose(1, 2) for one in (self.two, self.one, self.three))
        return F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)


def test_a_linear_map_of_a_custom_class_is_read_from_the_matrix_it_multiplies_with():
    torch.manual_seed(0)
    (layer,) = find_attention(nn.Sequential(BesideScales(scaled=False)))
    assert {role: one.parameter for role, one in layer.slices.items()} == {
        "query": "two.weight", "key": "one.weight", "value": "three.weight"
    }  # fmt: skip
    assert torch.equal(layer.weight("key").flatten(0, 1), layer.module.one.weight)


def test_a_linear_map_that_multiplies_with_a_computed_matrix_is_refused():
    torch.manual_seed(0)
    model = nn.Sequential(BesideScales(scaled=True), BesideScales(scaled=False))
    reason = r"`0` \(BesideScales\).*its query heads come from `0.two`, which multiplies with a matrix that is not"
    with pytest.warns(UnsupportedAttentionWarning, match=reason):
        found = find_attention(model, forward=lambda: model(torch.randn(2, 6, D)))
    assert [layer.name for layer in found] == ["1"]


class OneHeadAfterAnother(nn.Module):
    """Two attentions of one head each in a residual stream, and a map that takes what both add to it."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.out = nn.Linear(D, 3 * D), nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x):
        for part in (self.one, self.two):
            x = x + F.scaled_dot_product_attention(*part(x).chunk(3, -1))
        return self.out(x)


def test_attentions_of_one_head_in_a_row_are_separate_layers():
    torch.manual_seed(0)
    module = OneHeadAfterAnother()
    layers = layers_of(module)
    assert [layer.num_heads for layer in layers] == [1, 1]
    for layer, part in zip(layers, (module.one, module.two)):
        assert torch.equal(layer.weight("key")[0], part.weight[D : 2 * D])
