"""A weight is what a projection multiplies with, whatever is put around it; otherwise the layer is refused by name."""

from __future__ import annotations

import peft
import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from torch.nn import functional as F

from hdi_callback import HeadDiversityMonitor
from hdi_callback.attention import HeadSlice, find_attention, survey
from tests.attention import models as by_hand
from tests.attention.models import D, H
from tests.attention.witness import witness


class LoraLayer:
    """The attributes of peft's class of this name."""


class Linear(nn.Module, LoraLayer):
    """LoRA around a linear map, with the attributes that peft gives it."""

    def __init__(self, base_layer: nn.Module, is_transposed: bool = False):
        super().__init__()
        rows, columns = base_layer.weight.shape
        in_features, out_features = (rows, columns) if is_transposed else (columns, rows)
        self.base_layer, self.is_transposed = base_layer, is_transposed
        self.lora_A = nn.ModuleDict(
            {"first": nn.Linear(in_features, 2, bias=False), "second": nn.Linear(in_features, 2, bias=False)}
        )
        self.lora_B = nn.ModuleDict(
            {"first": nn.Linear(2, out_features, bias=False), "second": nn.Linear(2, out_features, bias=False)}
        )
        self.scaling = {"first": 2.0, "second": 0.5}
        self.active_adapters, self.disable_adapters, self.merged = ["first"], False, False
        self.lora_variant: dict[str, object] = {}

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    def get_delta_weight(self, name: str) -> Tensor:
        delta = self.scaling[name] * self.lora_B[name].weight @ self.lora_A[name].weight
        return delta.mT if self.is_transposed else delta

    def forward(self, x):
        y = self.base_layer(x)
        if self.disable_adapters or self.merged:
            return y
        for name in self.active_adapters:
            y = y + self.scaling[name] * self.lora_B[name](self.lora_A[name](x))
        return y


def matrix_of(module: nn.Module, in_features: int) -> Tensor:
    """The matrix of a linear map, from what it gives for the unit vectors."""
    with torch.no_grad():
        return (module(torch.eye(in_features)) - module(torch.zeros(1, in_features))).mT


@pytest.mark.parametrize("active", [[], ["first"], ["second"], ["first", "second"]])
@pytest.mark.parametrize("kind", [by_hand.Grouped, by_hand.NanoGPT])
def test_the_weight_of_a_lora_layer_is_base_and_update(kind, active):
    module = kind()
    name = "c_attn" if kind is by_hand.NanoGPT else "k_proj"
    setattr(module, name, Linear(getattr(module, name)))
    projection = getattr(module, name)
    projection.active_adapters = active
    (layer,) = find_attention(nn.Sequential(module))
    start = D if kind is by_hand.NanoGPT else 0
    really = matrix_of(projection, D)[start : start + layer.num_key_heads * 8]
    assert torch.allclose(layer.weight("key").flatten(0, 1), really, atol=1e-5)
    is_base = torch.allclose(really, projection.base_layer.weight[start : start + len(really)], atol=1e-5)
    assert is_base == (active == []), "an active update is seen"


def test_adapter_updates_that_are_switched_off_or_merged_are_not_added():
    module = by_hand.Grouped()
    module.k_proj = Linear(module.k_proj)
    (layer,) = find_attention(nn.Sequential(module))
    for switch in ("disable_adapters", "merged"):
        setattr(module.k_proj, switch, True)
        assert torch.equal(layer.weight("key").flatten(0, 1), module.k_proj.base_layer.weight)
        setattr(module.k_proj, switch, False)


def test_gradients_of_a_read_weight_reach_the_adapter():
    """The gradient of what is read reaches the adapter: an intervention can act on it."""
    module = by_hand.Grouped()
    module.k_proj = Linear(module.k_proj)
    (layer,) = find_attention(nn.Sequential(module))
    layer.weight("key").square().sum().backward()
    assert module.k_proj.lora_A["first"].weight.grad.abs().max() > 0


class Bent(Linear):
    """No linear map of a token."""

    def forward(self, x):
        return super().forward(x).tanh()


Bent.__name__ = "Linear"  # as peft's


def test_a_variant_of_lora_is_refused_by_name():
    class BentVariant:
        pass

    module = by_hand.Grouped()
    module.k_proj = Bent(module.k_proj)
    module.k_proj.lora_variant["first"] = BentVariant()
    (refusal,) = survey(nn.Sequential(module)).refused
    assert "`k_proj` is a Linear of tests with the variant BentVariant" in refusal.reason


def test_an_adapter_of_another_kind_is_refused_by_name():
    class HiraLinear(Bent):
        pass

    module = by_hand.Grouped()
    module.q_proj = HiraLinear(module.q_proj)
    (refusal,) = survey(nn.Sequential(module)).refused
    assert "a HiraLinear of tests, whose update is not known to be an added matrix" in refusal.reason
    assert "not a linear map of a token" in refusal.reason


_NAMED = {"target_modules": ["q_proj", "k_proj", "v_proj"]}
PEFT = {
    "lora": lambda: peft.LoraConfig(r=2, init_lora_weights=False, **_NAMED),
    "rslora": lambda: peft.LoraConfig(r=2, use_rslora=True, init_lora_weights=False, **_NAMED),
    "adalora": lambda: peft.AdaLoraConfig(init_r=2, total_step=10, init_lora_weights=False, **_NAMED),
    "dora": lambda: peft.LoraConfig(r=2, use_dora=True, lora_dropout=0.2, init_lora_weights=False, **_NAMED),
    "ia3": lambda: peft.IA3Config(feedforward_modules=["q_proj"], init_ia3_weights=False, **_NAMED),
    "vera": lambda: peft.VeraConfig(r=2, **_NAMED),
    "oft": lambda: peft.OFTConfig(oft_block_size=4, r=0, init_weights=False, **_NAMED),
    "loha": lambda: peft.LoHaConfig(r=2, init_weights=False, **_NAMED),
    "lokr": lambda: peft.LoKrConfig(r=2, init_weights=False, **_NAMED),
    "fourierft": lambda: peft.FourierFTConfig(n_frequency=20, **_NAMED),
    "hra": lambda: peft.HRAConfig(r=2, init_weights=False, **_NAMED),
    "c3a": lambda: peft.C3AConfig(block_size=8, **_NAMED),  # which adds in place
}


@pytest.mark.some_slow(quick=1)
@pytest.mark.parametrize("kind", PEFT)
def test_adapters_of_peft_are_read_as_they_multiply(kind):
    torch.manual_seed(0)
    llama = tf.LlamaConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64, vocab_size=99
    )
    model = peft.get_peft_model(tf.LlamaModel(llama), PEFT[kind]())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:  # no longer that of the start
                parameter.add_(0.1 * torch.randn(parameter.shape))
    (layer,) = survey(model).layers
    for role in ("query", "key", "value"):
        projection = layer.module.get_submodule(f"{role[0]}_proj")
        really = matrix_of(projection.eval(), D)
        assert torch.allclose(layer.weight(role).flatten(0, 1), really, atol=1e-5 * really.abs().max())
        assert not torch.allclose(really, projection.base_layer.weight, atol=1e-3)


@pytest.mark.slow
def test_the_active_adapter_is_read_after_a_switch():
    torch.manual_seed(0)
    llama = tf.LlamaConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64, vocab_size=99
    )
    model = peft.get_peft_model(tf.LlamaModel(llama), PEFT["dora"]())
    model.add_adapter("other", PEFT["dora"]())
    (layer,) = survey(model).layers
    readings = []
    for name in ("default", "other"):
        model.set_adapter(name)
        really = matrix_of(layer.module.q_proj.eval(), D)
        readings.append(layer.weight("query").flatten(0, 1))
        assert torch.allclose(readings[-1], really, atol=1e-5)
    assert not torch.allclose(*readings, atol=1e-3)
    with model.disable_adapter():
        assert torch.equal(layer.weight("query").flatten(0, 1), layer.module.q_proj.base_layer.weight)
    layer.module.q_proj.merge()
    assert torch.allclose(layer.weight("query").flatten(0, 1), readings[-1], atol=1e-5)


# --- subclasses of nn.Linear


class Casts(nn.Linear):
    """As much code does for mixed precision."""

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class AddsBent(nn.Linear):
    """An update with an activation inside, which adds nothing at first."""

    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features)
        self.a, self.b = nn.Parameter(torch.randn(2, in_features)), nn.Parameter(torch.zeros(out_features, 2))

    def forward(self, x):
        return super().forward(x) + F.gelu(x @ self.a.mT) @ self.b.mT


class Gated(nn.Linear):
    """Each token is weighed by itself."""

    def forward(self, x):
        return F.linear(x, self.weight, self.bias) * x.sigmoid()[..., :16]


class Int8(nn.Linear):
    """Weights of one byte, decoded in the forward."""

    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features)
        self.weight = nn.Parameter(
            torch.randint(-128, 127, (out_features, in_features), dtype=torch.int8), requires_grad=False
        )

    def forward(self, x):
        return F.linear(x, self.weight / 127, self.bias)


def with_keys(kind: type[nn.Linear]) -> nn.Module:
    module = by_hand.Grouped()
    module.k_proj = kind(D, 16)
    return nn.Sequential(module)


def test_a_subclass_that_multiplies_with_its_weight_is_read():
    (layer,) = find_attention(with_keys(Casts))
    assert torch.equal(layer.weight("key").flatten(0, 1), layer.module.k_proj.weight)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (AddsBent, "its projection `k_proj` is a AddsBent, whose forward does more than multiply with its weight"),
        (Gated, "its projection `k_proj` is a Gated, whose forward does more than multiply with its weight"),
        (Int8, "its projection `k_proj` is a Int8 with a quantised weight (int8)"),
    ],
)
def test_a_subclass_that_does_something_else_is_refused_by_name(kind, reason):
    (refusal,) = survey(with_keys(kind)).refused
    assert reason in refusal.reason


def test_a_forward_that_was_replaced_is_refused():
    model = with_keys(nn.Linear)
    linear = model[0].k_proj
    linear.forward = lambda x: 2 * nn.Linear.forward(linear, x)
    (refusal,) = survey(model).refused
    assert "its projection `k_proj` is a Linear whose forward was replaced" in refusal.reason


# --- torch's attention, and what is put around it


class Tempered(nn.MultiheadAttention):
    """Keys of its own making."""

    def forward(self, query, key, value, **options):
        return super().forward(query, key.flip(-1), value, **options)


class Quiet(nn.MultiheadAttention):
    """A subclass that only has another constructor."""

    def __init__(self):
        super().__init__(D, H, batch_first=True)


class Alone(nn.MultiheadAttention):
    """Of one input, whose output alone it gives."""

    def forward(self, x):
        return super().forward(x, x, x, need_weights=False)[0]


class Turned(nn.MultiheadAttention):
    """Torch's weights, and attention written out."""

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (H, -1)).transpose(1, 2)
            for part in F.linear(x, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        )
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("kind", [Tempered, Alone, Turned])
def test_a_subclass_of_torch_attention_with_its_own_forward_is_read_by_tracing(kind):
    module = kind(D, H, batch_first=True)
    (layer,) = find_attention(nn.Sequential(module))
    weights = dict(zip(("query", "key", "value"), module.in_proj_weight.detach().chunk(3)))
    for role, rows in weights.items():
        assert torch.equal(layer.weight(role), rows.view(H, D // H, D))
    assert torch.equal(layer.weight("output"), module.out_proj.weight.detach().mT.reshape(H, D // H, D))
    assert layer.evidence == "trace"


def test_a_subclass_of_torch_attention_with_its_own_forward_has_attention_rows_in_training():
    torch.manual_seed(0)
    model = nn.Sequential(Turned(D, H, batch_first=True))
    with HeadDiversityMonitor(model, metrics=["hdi", "attention_entropy", "head_correlation"]) as monitor:
        monitor.arm()
        model(torch.randn(2, 5, D))
        values = monitor.measure(0).record().layers["0"].values
    assert {"hdi", "attention_entropy", "head_correlation"} <= values.keys()


class UsesItsParts(nn.Module):
    """Attention with the weights of a module that is not called."""

    def __init__(self, attention):
        super().__init__()
        self.attn = attention

    def forward(self, x):
        y, one = x.transpose(0, 1), self.attn
        return F.multi_head_attention_forward(
            y, y, y, D, H, one.in_proj_weight, one.in_proj_bias, None, None, False, 0.0,
            one.out_proj.weight, one.out_proj.bias, need_weights=False,
        )[0].transpose(0, 1)  # fmt: skip


class UsesItsMaps(UsesItsParts):
    """The same of a module by hand."""

    def forward(self, x):
        one = self.attn
        q, k, v = (linear(x).unflatten(-1, (H, -1)).transpose(1, 2) for linear in (one.q_proj, one.k_proj, one.v_proj))
        return one.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    "model",
    [
        lambda: UsesItsParts(nn.MultiheadAttention(D, H, batch_first=True)),
        lambda: UsesItsMaps(by_hand.LengthFirst()),
    ],
)
@pytest.mark.parametrize("has_forward", [False, True])
def test_weights_of_torch_attention_that_its_parent_uses_directly_are_read_once(model, has_forward):
    model = nn.Sequential(model())
    layers = find_attention(model, forward=(lambda: model(torch.randn(2, 5, D))) if has_forward else None)
    assert [(layer.name, layer.module) for layer in layers] == [("0.attn", model[0])]


def test_a_subclass_of_torch_attention_without_one_is_read():
    assert [layer.num_heads for layer in find_attention(nn.Sequential(Quiet()))] == [H]


def test_torch_attention_within_an_adapter_is_refused():
    class MultiheadAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.base_layer = nn.MultiheadAttention(D, H)

    (refusal,) = survey(nn.Sequential(MultiheadAttention())).refused
    assert refusal.name == "0.base_layer"
    assert "the MultiheadAttention of tests around it changes its weights within each forward" in refusal.reason


# --- counts that contradict each other


class Config:
    def __init__(self, **values):
        self.__dict__.update(values)


class Raises:
    """As configs do where a value differs from layer to layer."""

    num_attention_heads = H

    @property
    def num_key_value_heads(self):
        raise ValueError("there is one for each layer")


class NeedsMore(by_hand.Grouped):
    """A forward that nobody can make up the inputs of."""

    def forward(self, x, tables):
        return super().forward(x + tables["position"])


@pytest.mark.parametrize("config", [{"num_attention_heads": 8}, {"num_key_value_heads": 4}])
def test_head_counts_that_contradict_the_config_are_decided_by_a_run(config):
    unclear, clear = NeedsMore(), by_hand.Grouped()
    unclear.config = clear.config = Config(**config)
    model, x = nn.ModuleList([unclear, clear]), torch.randn(2, 5, D)
    (refusal,) = survey(model).refused
    assert (refusal.name, refusal.reason) == ("0", "it could not be run with synthetic inputs")
    layers = find_attention(model, forward=lambda: clear(unclear(x, {"position": 0})))
    for layer, run in zip(layers, (lambda: unclear(x, {"position": 0}), lambda: clear(x)), strict=True):
        with witness(layer.module) as observed:
            run()
        (really,) = observed.computations
        assert (layer.num_heads, layer.head_dim) == (really.query.shape[1], really.query.shape[-1])


def test_a_key_head_attribute_that_contradicts_the_rows_is_decided_by_a_forward():
    module, x = NeedsMore(key_heads=4), torch.randn(2, 5, D)
    module.num_kv_heads = 2
    model = nn.Sequential(module)
    (refusal,) = survey(model).refused
    assert refusal.reason == "it could not be run with synthetic inputs"
    (layer,) = find_attention(model, forward=lambda: module(x, {"position": 0}))
    assert (layer.num_key_heads, layer.evidence) == (4, "trace")


def test_a_config_that_raises_on_access_is_ignored():
    module = by_hand.Grouped()
    module.config = Raises()
    (layer,) = find_attention(nn.Sequential(module))
    assert (layer.num_heads, layer.num_key_heads) == (4, 2)


def test_a_module_that_raises_on_inspection_costs_one_refusal():
    class Broken(nn.MultiheadAttention):
        num_heads = property(lambda self: 1 / 0, lambda self, value: None)

    found = survey(nn.ModuleDict({"odd": Broken(D, H), "good": by_hand.Grouped()}))
    assert [layer.name for layer in found.layers] == ["good"]
    (refusal,) = found.refused
    assert "inspecting it raises ZeroDivisionError (division by zero)" in refusal.message


def test_a_stack_of_matrices_has_no_head_bias():
    module = nn.Module()
    module.weight, module.bias = nn.Parameter(torch.randn(4, 6, 3)), nn.Parameter(torch.randn(12))
    assert HeadSlice(module, "weight", 4, 3, axes=(0, 2)).bias() is None
