"""The heads of a layer, checked on the inputs of a real forward."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import pytest
import torch
import transformers as tf
from torch import nn

from hdi_callback import HeadDiversityMonitor
from hdi_callback.attention import AttentionLayer, HeadSlice, RuntimeVerifier, find_attention, register_layout
from hdi_callback.attention.layer import registry as known
from hdi_callback.attention.trace.inputs import recorded_inputs
from hdi_callback.errors import UnsupportedAttentionWarning
from tests.attention import models as by_hand
from tests.attention.models import D, H, attend
from tests.attention.test_layouts import SMALL


class Tables(nn.Module):
    """No inputs can be made up for it, so that nothing is known of it before it runs."""

    def __init__(self, is_swapped: bool):
        super().__init__()
        self.num_heads, self.is_swapped = H, is_swapped
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x, tables, mask=None, times=1):
        q, k, v = (proj(x).unflatten(-1, (H, -1)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        k = k.roll(1, 2) if self.is_swapped else k
        return self.out_proj(attend(q, k * tables["scale"][:, None], v)) * times


class Model(nn.Module):
    def __init__(self, *blocks: nn.Module):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        tables = {"scale": torch.ones(x.shape[1], 1)}
        for block in self.blocks:
            x = x + block(x, tables, times=2)
        return x


@pytest.fixture
def claimed_by_names(monkeypatch):
    """Somebody vouches for what names and shapes suggest of `Tables`."""

    def describe(name, module):
        slices = {role: HeadSlice(module, f"{role[0]}_proj.weight", H, 8) for role in ("query", "key", "value")}
        slices["output"] = HeadSlice(module, "out_proj.weight", H, 8)
        return AttentionLayer(name, module, H, H, 8, 8, "by names", slices, module.out_proj)

    monkeypatch.setattr(known, "_REGISTERED", [])
    register_layout(Tables, describe)


def scalars(record) -> dict[str, dict]:
    """The layers that have numbers."""
    return {name: layer.values for name, layer in record.layers.items() if layer.values}


def test_a_layer_whose_claim_the_first_forward_contradicts_is_removed_with_the_evidence(claimed_by_names):
    torch.manual_seed(0)
    model = Model(Tables(False), Tables(True), Tables(False))
    with HeadDiversityMonitor(model, metrics=["hdi", "hdi_query", "head_correlation"]) as monitor:
        assert len(monitor.layers) == 3, "names and shapes say nothing against it"
        monitor.arm()
        model(torch.randn(5, 11, D))
        with pytest.warns(UnsupportedAttentionWarning) as reported:
            record = monitor.measure(0).record()
        (message,) = [str(warning.message) for warning in reported]
        assert "`blocks.1`" in message
        assert "head 0 attends with the keys of claimed head 3" in message
        assert set(scalars(record)) == {"blocks.0", "blocks.2"}
        assert "contradicts its heads" in record.absent["blocks.1"]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            monitor.arm()
            model(torch.randn(5, 11, D))
            record = monitor.measure(1).record()
        assert set(scalars(record)) == {"blocks.0", "blocks.2"}, "from then on"
        assert "contradicts its heads" in record.absent["blocks.1"]


def test_the_check_of_heads_can_be_switched_off(claimed_by_names):
    model = Model(Tables(True))
    with HeadDiversityMonitor(model, check_heads=False) as monitor:
        assert not model.blocks[0]._forward_pre_hooks
        monitor.arm()
        model(torch.randn(5, 11, D))
        assert set(scalars(monitor.measure(0).record())) == {"blocks.0"}


def test_a_registered_layout_is_checked_too():
    class Mine(by_hand.Interleaved):
        pass

    def describe(name, module):
        slices = {
            "query": HeadSlice(module, "qkv_proj.weight", H, 8),
            "key": HeadSlice(module, "qkv_proj.weight", H, 8, start=D),
            "value": HeadSlice(module, "qkv_proj.weight", H, 8, start=2 * D),
            "output": HeadSlice(module, "o_proj.weight", H, 8),
        }
        return AttentionLayer(name, module, H, H, 8, 8, "mine", slices, module.o_proj)

    register_layout(Mine, describe)
    try:
        torch.manual_seed(0)
        model = nn.Sequential(Mine())
        with HeadDiversityMonitor(model) as monitor:
            monitor.arm()
            model(torch.randn(2, 5, D))
            with pytest.warns(UnsupportedAttentionWarning, match="contradicts its heads"):
                record = monitor.measure(0).record()
        assert not scalars(record)
    finally:
        known._REGISTERED.pop(0)


FAMILIES = {
    "Llama": tf.LlamaConfig(**SMALL, num_key_value_heads=2),
    "BERT": tf.BertConfig(**SMALL),
    "GPT-NeoX": tf.GPTNeoXConfig(**SMALL),
    "GPT-2": tf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=99),
}


@pytest.mark.some_slow(quick=1)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("length", [6, 32])
def test_true_heads_are_verified_in_real_inputs(name, length):
    """With masks, rotations and caches of a real forward; and a wrong claim about the same is contradicted."""
    torch.manual_seed(0)
    model = tf.AutoModel.from_config(FAMILIES[name]).train()
    layers = find_attention(model)
    wrong = [_wrong(layer) for layer in layers]
    checks = [RuntimeVerifier(layers), RuntimeVerifier(wrong)]
    for check in checks:
        check.arm()
    model(torch.randint(99, (3, length)), attention_mask=torch.ones(3, length, dtype=torch.long))
    assert checks[0].contradictions() == {}
    shown = checks[1].contradictions()
    assert set(shown) == {layer.name for layer in layers}
    for check in checks:
        check.suspend()
    assert not any(layer.module._forward_pre_hooks for layer in layers)


def _wrong(layer: AttentionLayer) -> AttentionLayer:
    """Claim the same rows for the keys in another order: strided for contiguous, contiguous for interleaved."""
    key = layer.slices["key"]
    order = {"stride": 1, "step": key.heads} if key.stride is None else {"stride": None}
    return replace(layer, slices={**layer.slices, "key": replace(key, **order)})


def test_arguments_are_cut_to_few_tokens_of_few_sequences_and_copied():
    x, mask, turn = torch.randn(5, 40, D), torch.zeros(5, 1, 40, 40), (torch.ones(1, 40, 8), torch.zeros(1, 40, 8))
    whole, first, second, *_ = recorded_inputs((x,), {"mask": mask, "turn": turn, "scale": 2.0})
    assert whole.args[0].shape == x.shape
    assert whole.args[0].untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    assert first.args[0].shape == (2, 8, D)
    assert first.kwargs["mask"].shape == (2, 1, 8, 8)
    assert [part.shape for part in first.kwargs["turn"]] == [(1, 8, 8)] * 2
    assert first.kwargs["scale"] == 2.0
    assert first.args[0].untyped_storage().nbytes() == 2 * 8 * D * 4
    assert second.args[0].shape == (5, 2, D), "if the length came first"


def test_large_arguments_are_not_kept_whole():
    shapes = [tuple(one.args[0].shape) for one in recorded_inputs((torch.randn(2, 1025, 1024),), {})]
    assert (2, 8, 1024) in shapes
    assert max(math.prod(shape) for shape in shapes) <= 2 * 1025 * 1024
    shapes = [tuple(one.args[0].shape) for one in recorded_inputs((torch.randn(3, 1025, 1024),), {})]
    assert max(math.prod(shape) for shape in shapes) < 3 * 1025 * 1024


def test_checking_draws_no_random_number_and_leaves_the_model_as_it_was(claimed_by_names):
    model = Model(Tables(False), Tables(True))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    check = RuntimeVerifier(find_attention(model))
    check.arm()
    model(torch.randn(5, 11, D))
    state = torch.get_rng_state()
    assert set(check.contradictions()) == {"blocks.1"}
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
