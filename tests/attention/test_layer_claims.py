"""What a layer says of itself fits its weights, and torch's own attention is what it is taken for."""

from __future__ import annotations

from dataclasses import replace
from types import MethodType

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from hdi_callback.attention import AttentionLayer, HeadSlice
from hdi_callback.attention.layer.heads import RefusedError, check_layer
from hdi_callback.attention.layer.registry import Place, torch_attention
from hdi_callback.attention.layer.torch_attention import before_projection, is_torch_attention
from hdi_callback.attention.observe.forward import ObservedForward
from hdi_callback.attention.observe.row_reader import Request


def grouped() -> AttentionLayer:
    """Four heads of eight features over tokens of sixteen, of which two share a key head."""
    module = nn.ModuleDict({"q": nn.Linear(16, 32), "kv": nn.Linear(16, 32), "o": nn.Linear(32, 16)})
    slices = {
        "query": HeadSlice(module, "q.weight", 4, 8),
        "key": HeadSlice(module, "kv.weight", 2, 8),
        "value": HeadSlice(module, "kv.weight", 2, 8, start=16),
        "output": HeadSlice(module, "o.weight", 4, 8),
    }
    return AttentionLayer("attn", module, 4, 2, 8, 8, "said", slices, module["o"])


def without(layer: AttentionLayer, role: str) -> AttentionLayer:
    return replace(layer, slices={name: part for name, part in layer.slices.items() if name != role})


def with_part(layer: AttentionLayer, role: str, **fields: int) -> AttentionLayer:
    return replace(layer, slices={**layer.slices, role: replace(layer.slices[role], **fields)})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda one: replace(one, num_key_heads=3), "4 heads cannot share 3 key heads evenly"),
        (lambda one: replace(one, num_heads=0), "0 heads cannot share 2 key heads evenly"),
        (lambda one: replace(one, num_key_heads=0), "4 heads cannot share 0 key heads evenly"),
        (lambda one: replace(one, head_dim=4), r"its query weight is 4 x 8, expected \(4, 4\)"),
        (lambda one: replace(one, value_dim=4), r"its value weight is 2 x 8, expected \(2, 4\)"),
        (lambda one: with_part(one, "value", heads=1), r"its value weight is 1 x 8, expected \(2, 8\)"),
        (lambda one: with_part(one, "output", heads=2), r"its output weight is 2 x 8, expected \(4, 8\)"),
        (lambda one: with_part(one, "value", start=17), "its value weight has 32 features, fewer than 2 heads of 8"),
        (lambda one: with_part(one, "query", stride=4), "its query weight has heads that share features"),
        (lambda one: without(one, "key"), "it has no key weight"),
    ],
)
def test_a_claim_that_contradicts_itself_or_its_weights_is_refused_with_the_reason(change, reason):
    layer = grouped()
    assert check_layer(layer) is layer
    with pytest.raises(RefusedError, match=f"^{reason}$"):
        check_layer(change(layer))


def test_more_value_heads_than_key_heads_are_accepted_from_a_trace():
    layer = with_part(replace(grouped(), evidence="trace"), "value", heads=4, start=0)
    assert check_layer(layer) is layer
    assert layer.facts()["num_value_heads"] == 4
    assert "num_value_heads" not in grouped().facts()


def test_a_layer_trains_if_any_of_its_parameters_does():
    layer = grouped()
    assert (layer.facts()["trains"], layer.facts()["all_train"]) == (True, True)
    layer.module["q"].weight.requires_grad_(False)
    assert (layer.facts()["trains"], layer.facts()["all_train"]) == (True, False)
    layer.module.requires_grad_(False)
    assert (layer.facts()["trains"], layer.facts()["all_train"]) == (False, False)


class Mine(nn.MultiheadAttention):
    """Torch's attention by another name."""


class Other(nn.MultiheadAttention):
    """One with a forward of its own."""

    def forward(self, x):
        return x, None


def test_a_module_is_torchs_attention_if_its_forward_is_torchs():
    wrapped = Mine(8, 2)
    wrapped.forward = MethodType(lambda self, x: x, wrapped)
    kinds = [nn.MultiheadAttention(8, 2), Mine(8, 2), Other(8, 2), wrapped, nn.Linear(8, 8)]
    assert [is_torch_attention(one) for one in kinds] == [True, True, False, False, False]


@pytest.mark.parametrize(("batch_first", "dims"), [(True, 3), (False, 3), (True, 2), (False, 2)])
def test_a_gradient_after_the_output_projection_is_pulled_back_to_its_input(batch_first, dims):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, batch_first=batch_first)
    heads = torch.randn((3, 5, 8)[3 - dims :], requires_grad=True)
    out = F.linear(heads, module.out_proj.weight, module.out_proj.bias)
    out = out if batch_first or dims < 3 else out.transpose(0, 1)  # in the order in which the module gives it
    gradient = torch.randn(out.shape)
    (expected,) = torch.autograd.grad(out, heads, gradient)
    torch.testing.assert_close(before_projection(module, gradient), expected)


class Adapter(nn.Module):
    def __init__(self, base_layer: nn.Module):
        super().__init__()
        self.base_layer = base_layer


def test_torchs_attention_is_refused_if_it_does_not_multiply_with_its_own_weights():
    module = nn.MultiheadAttention(8, 2)
    around = Adapter(module)
    assert torch_attention(Place("attn", Other(8, 2))) is None
    assert torch_attention(Place("attn", module, nn.Sequential(module))).num_heads == 2
    with pytest.raises(RefusedError, match="the Adapter of tests around it changes its weights within each forward"):
        torch_attention(Place("attn", module, around))
    module.out_proj.weight = nn.Parameter(module.out_proj.weight.to(torch.complex64))
    with pytest.raises(RefusedError, match=r"its `out_proj` is a .*Linear with a complex weight"):
        torch_attention(Place("attn", module))


class NormOfParts(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = nn.LayerNorm(4)


class RMSNorm(nn.Module):
    pass


def test_linear_maps_of_other_libraries_norms_and_hooked_modules_are_recorded_as_they_run():
    x, y = torch.ones(2, 4), torch.zeros(2, 4)
    hooked = nn.Linear(4, 4)
    hooked.register_forward_hook(lambda *_: None)
    runs = {
        "linear": (nn.Linear(4, 4), []),  # by the function that it calls
        "conv1d": (Conv1D(4, 4), [("linear", -1)]),
        "norm": (RMSNorm(), [("norm", -1)]),
        "parts": (NormOfParts(), []),
        "other": (nn.Identity(), []),
        "hooked": (hooked, ["hooks"]),
    }
    forward = ObservedForward(Request(), {})
    found: list[object] = []
    maps = forward.recorder.maps
    maps.hooks_ran = lambda module, result: found.append("hooks")
    maps.module_ran = lambda module, kind, inputs, result, dim: found.append((kind, dim) if inputs is x else "other")
    for name, (module, expected) in runs.items():
        for args, kwargs in [((x,), {}), ((), {"input": x})]:
            forward.module_begins(name, module)
            forward.module_ends(name, module, args, kwargs, y)
            assert found == expected, name
            found.clear()
    maps.keeps_samples = False
    forward.module_begins("norm", RMSNorm())
    forward.module_ends("norm", RMSNorm(), (x,), {}, y)
    assert (found, forward.failures) == ([], [])
