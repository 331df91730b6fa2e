"""Captured head outputs against those that the output projection really received."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import nn

from hdi_callback.attention import Taps, find_attention
from hdi_callback.attention.capture.sampling import sample_tokens
from tests.attention import models as by_hand
from tests.attention.models import D, H
from tests.attention.witness import witness
from tests.models import LAYERS, Checkpointed, Classifier


def tap(model: nn.Module, **options) -> Taps:
    return Taps(find_attention(model), **({"max_tokens": 10_000} | options))


def tokens(batch: int = 3, seed: int = 0) -> torch.Tensor:
    return torch.randint(16, (batch, 12), generator=torch.Generator().manual_seed(seed))


def inputs_of_projections(model: Classifier, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the output projections get in a forward, by a hook of the test's own."""
    got = {}
    handles = [
        model.get_submodule(name).out_proj.register_forward_pre_hook(
            lambda _, args, name=name: got.update({name: args[0].detach().clone()})
        )
        for name in LAYERS
    ]
    model(x)
    for handle in handles:
        handle.remove()
    return got


# --- what is captured


@pytest.mark.parametrize("module", [by_hand.NanoGPT, by_hand.Einops, by_hand.Grouped, by_hand.EinopsCross])
def test_captured_outputs_are_those_of_the_attention(module):
    model = nn.Sequential(module()).eval()
    with tap(model) as taps, witness(model) as observed:
        taps.arm()
        model(torch.randn(3, 6, D))
        capture = taps.captures["0"]
    really = observed.computations[0].output.transpose(1, 2)  # (batch, length, heads, width)
    assert torch.equal(capture.outputs, really.flatten(0, 1))
    assert capture.lengths == (6, 6, 6)
    assert capture.num_tokens == 18


def test_nothing_is_captured_unless_armed():
    model = Classifier()
    with tap(model) as taps:
        model(tokens())
        assert dict(taps.captures) == {}
        assert not taps.was_armed


def test_suspended_hooks_are_restored_under_their_old_handles():
    """torch 2.10 compiles a graph anew for each number that a hook in it is given."""
    model = Classifier()
    with tap(model) as taps:
        numbers = [list(part._forward_pre_hooks) for part in model.modules()]
        assert any(numbers)
        taps.suspend()
        assert not any(part._forward_pre_hooks for part in model.modules())
        taps.resume()
        assert [list(part._forward_pre_hooks) for part in model.modules()] == numbers


def test_all_forwards_of_an_armed_step_are_captured():
    model = Classifier()
    first, second = tokens(seed=1), tokens(batch=2, seed=2)
    truth = [inputs_of_projections(model, x) for x in (first, second)]
    with tap(model) as taps:
        taps.arm()
        model(first)
        model(second)
        for name in LAYERS:
            capture = taps.captures[name]
            both = torch.cat([one[name].flatten(0, 1) for one in truth])
            assert torch.equal(capture.outputs.flatten(1), both)
            assert capture.lengths == (12,) * 5


def test_arming_again_captures_the_next_forward():
    model = Classifier()
    with tap(model) as taps:
        for seed in (1, 2):
            truth = inputs_of_projections(model, tokens(seed=seed))
            taps.arm()
            model(tokens(seed=seed))
            assert torch.equal(taps.captures[LAYERS[1]].outputs.flatten(1), truth[LAYERS[1]].flatten(0, 1))
            taps.release()


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_is_captured_once(reentrant):
    model = Checkpointed(reentrant=reentrant, dropout=0.5)
    with tap(model) as taps:
        runs = []
        model.blocks[0].attn.register_forward_hook(lambda *_: runs.append(1))
        taps.arm()
        loss = model(tokens()).sum()
        forward_only = {name: capture.outputs.clone() for name, capture in taps.captures.items()}
        loss.backward()
        assert len(runs) == 2, "the forward ran again inside backward"
        for name in LAYERS:
            assert torch.equal(taps.captures[name].outputs, forward_only[name])


def test_a_capture_is_a_detached_copy_and_is_released():
    model = Classifier()
    with tap(model) as taps:
        taps.arm()
        model(tokens())
        capture = taps.captures[LAYERS[0]]
        assert not capture.outputs.requires_grad
        assert capture.outputs.untyped_storage().nbytes() == capture.outputs.numel() * 4
        remembered = weakref.ref(capture.outputs)
        del capture
        taps.release()
        gc.collect()
        assert remembered() is None


# --- the sample


@pytest.mark.parametrize(
    ("batch", "length", "limit"), [(16, 128, 256), (8, 12, 24), (3, 7, 5), (64, 2, 16), (1, 50, 7)]
)
def test_the_sample_is_bounded_and_spread_over_all_positions(batch, length, limit):
    positions = torch.arange(length).repeat(batch).reshape(batch, length, 1).float()
    sequences = torch.arange(batch).repeat_interleave(length).reshape(batch, length, 1).float()
    outputs = torch.cat([positions, sequences], -1)
    sample = sample_tokens(outputs, limit)
    kept, lengths = sample.rows, torch.bincount(sample.sequences, minlength=batch).tolist()
    assert 0 < len(kept) <= limit
    assert len(kept) >= min(batch * length, limit) * 0.8
    assert sum(lengths) == len(kept)
    assert len(lengths) == batch
    assert torch.equal(kept[:, 1].long(), torch.arange(batch).repeat_interleave(torch.tensor(lengths)))
    # Every n-th token with a common factor would see the same few positions again and again.
    assert len(kept[:, 0].unique()) == min(length, len(kept))
    places, apart = (kept[:, 1] * length + kept[:, 0]).long(), -(-batch * length // len(kept))
    assert places[0] == 0
    assert places[-1] >= batch * length - apart, "the last sequences too"
    assert len(kept) == 1 or int(places.diff().max()) <= apart, "none is skipped"


def test_a_small_batch_is_kept_whole():
    outputs = torch.randn(2, 5, 8)
    sample = sample_tokens(outputs, 10)
    assert torch.equal(sample.rows, outputs.reshape(10, 8))
    assert sample.sequences.tolist() == [0] * 5 + [1] * 5


@pytest.mark.parametrize("shape", [(0, 6, D), (3, 0, D), (1, 1, D), (6, D), (2, 3, 4, D)])
def test_outputs_of_unusual_shapes_are_captured_without_a_warning(shape):
    projection = nn.Linear(D, D)
    module = by_hand.Grouped()
    module.o_proj = projection
    with tap(nn.Sequential(module)) as taps:
        taps.arm()
        projection(torch.randn(shape))
        assert taps.captures["0"].outputs.shape == (torch.Size(shape[:-1]).numel(), H, 8)


def test_nested_tensors_are_absent_with_the_reason():
    module = by_hand.Grouped()
    with tap(nn.Sequential(module)) as taps:
        taps.arm()
        module.o_proj(torch.nested.nested_tensor([torch.randn(2, D), torch.randn(5, D)]))
        assert dict(taps.captures) == {}
        assert taps.absent == {"0": "nested tensors are not captured"}


def test_an_unexpected_width_is_absent_with_the_reason():
    module = by_hand.Grouped()
    with tap(nn.Sequential(module)) as taps:
        taps.arm()
        module.o_proj.weight = nn.Parameter(torch.randn(D, 3))
        module.o_proj(torch.randn(2, 3))
        assert taps.absent == {"0": "the input of its output projection has 3 features, expected 4 x 8"}


def test_a_shared_output_projection_is_absent_with_the_reason():
    """A tap on it could not tell whose input it sees."""
    first, second, own = (by_hand.LengthFirst() for _ in range(3))
    second.out_proj = first.out_proj
    model = nn.ModuleList([first, second, own])
    with tap(model) as taps:
        taps.arm()
        own(second(torch.randn(3, 6, D)))
        assert set(taps.captures) == {"2"}
        assert taps.absent == dict.fromkeys("01", "it shares its output projection with another layer")


# --- torch's own attention, whose output projection is never called


def truth_of(module: nn.MultiheadAttention, *args, **kwargs) -> torch.Tensor:
    """The head outputs, from the attention's own answer: with the identity as output projection they are the answer."""
    plain = copy.deepcopy(module)
    with torch.no_grad():
        plain.out_proj.weight.copy_(torch.eye(D))
        if plain.out_proj.bias is not None:
            plain.out_proj.bias.zero_()
    plain.dropout = 0.0
    return plain(*args, **kwargs)[0].detach()


FLOAT_MASK = torch.randn(6, 6, generator=torch.Generator().manual_seed(5))
CAUSAL = torch.triu(torch.ones(6, 6, dtype=torch.bool), 1)
PADDING = torch.tensor([[False] * 6, [False] * 4 + [True] * 2, [False] * 5 + [True]])
CALLS = {
    "plain": {},
    "no weights": {"need_weights": False},
    "weights per head": {"average_attn_weights": False},
    "padding": {"key_padding_mask": PADDING},
    "bool mask": {"attn_mask": CAUSAL},
    "float mask": {"attn_mask": FLOAT_MASK},
    "mask per head": {"attn_mask": FLOAT_MASK.expand(3 * H, 6, 6)},
    "causal": {"attn_mask": CAUSAL, "is_causal": True, "need_weights": False},
    "causal and padding": {"attn_mask": CAUSAL, "key_padding_mask": PADDING},
}
BUILDS = {
    "packed": {},
    "kdim and vdim": {"kdim": 20, "vdim": 24},
    "no bias": {"bias": False},
    "bias to keys and values": {"add_bias_kv": True},
    "a zero token": {"add_zero_attn": True},
    "dropout": {"dropout": 0.4},
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("batch_first", [True, False])
def test_torch_attention_is_captured_as_it_computes(build, call, batch_first):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(D, H, batch_first=batch_first, **BUILDS[build])
    key_width, value_width = BUILDS[build].get("kdim", D), BUILDS[build].get("vdim", D)
    inputs = [torch.randn(3, 6, width) for width in (D, key_width, value_width)]
    inputs = inputs if batch_first else [tensor.transpose(0, 1) for tensor in inputs]
    truth = truth_of(module, *inputs, **CALLS[call])
    with tap(nn.Sequential(module)) as taps:
        taps.arm()
        module(*inputs, **CALLS[call])
        capture = taps.captures["0"]
    truth = truth if batch_first else truth.transpose(0, 1)
    assert torch.allclose(capture.outputs.flatten(1), truth.flatten(0, 1), atol=1e-5)
    assert capture.lengths == (6, 6, 6), "the sequences are told apart whatever the order of dimensions"


def test_torch_attention_without_a_batch_dimension():
    module = nn.MultiheadAttention(D, H)
    x = torch.randn(6, D)
    with tap(nn.Sequential(module)) as taps:
        taps.arm()
        module(x, x, x)
        assert torch.allclose(taps.captures["0"].outputs.flatten(1), truth_of(module, x, x, x), atol=1e-5)


def encoder(dropout: float = 0.0) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(D, H, 64, dropout=dropout, batch_first=True)
    return nn.TransformerEncoder(block, 2, enable_nested_tensor=False)


def test_an_encoder_in_evaluation_is_captured_when_armed():
    model, x = encoder().eval(), torch.randn(3, 6, D)
    with tap(model) as taps:
        taps.arm()
        model(x)
        first = model.layers[0].self_attn
        assert torch.allclose(
            taps.captures["layers.0.self_attn"].outputs.flatten(1), truth_of(first, x, x, x).flatten(0, 1), atol=1e-5
        )


@pytest.mark.parametrize("state", ["new", "armed", "released"])
@pytest.mark.parametrize("is_nested", [False, True])
def test_no_tap_keeps_torch_from_its_fast_path(monkeypatch, state, is_nested):
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(D, H, 64, batch_first=True)
    model = nn.TransformerEncoder(block, 2, enable_nested_tensor=is_nested).eval().requires_grad_(False)
    x, padding = torch.randn(3, 6, D), PADDING if is_nested else None
    calls = []
    fast = torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(
        torch, "_transformer_encoder_layer_fwd", lambda *args, **kwargs: calls.append(1) or fast(*args, **kwargs)
    )
    without = model(x, src_key_padding_mask=padding)
    assert len(calls) == 2
    with tap(model) as taps:
        if state != "new":
            taps.arm()
        if state == "released":
            taps.release()
        assert torch.equal(model(x, src_key_padding_mask=padding), without)
        assert len(calls) == 4
        if state == "armed":
            assert dict(taps.captures) == {}
            assert set(taps.missed) == {"layers.0.self_attn", "layers.1.self_attn"}


# --- training is not touched


@pytest.mark.parametrize("make", [lambda: Classifier(dropout=0.3), lambda: encoder(0.3)], ids=["own", "torch"])
def test_gradients_and_random_state_are_bit_identical(make):
    def run(mode: str):
        torch.manual_seed(0)
        model = make()
        x = tokens() if isinstance(model, Classifier) else torch.randn(3, 6, D)
        taps = None if mode == "absent" else tap(model)
        torch.manual_seed(1)
        for _ in range(2):
            if mode == "armed":
                taps.arm()
            model(x).square().sum().backward()
        if mode == "armed":
            assert len(taps.captures) == 2
        return [parameter.grad for parameter in model.parameters()], torch.get_rng_state()

    absent, unarmed, armed = run("absent"), run("unarmed"), run("armed")
    for other in (unarmed, armed):
        assert all(torch.equal(a, b) for a, b in zip(absent[0], other[0], strict=True))
        assert torch.equal(absent[1], other[1])


def touched(model: nn.Module) -> int:
    return sum(
        len(module._forward_pre_hooks) + len(module._forward_hooks) + ("forward" in vars(module))
        for module in model.modules()
    )


@pytest.mark.parametrize("make", [Classifier, lambda: torch_classifier()], ids=["own", "torch"])
def test_a_model_known_to_run_uncompiled_has_hooks_only_on_armed_steps(make):
    model = make()
    taps = tap(model)
    assert touched(model) > 0
    for _ in range(2):
        taps.arm()
        assert touched(model) == 2
        model(tokens())
        assert len(taps.captures) == 2
        taps.release()
        assert touched(model) == 0
    taps.remove()
    taps.remove()
    assert touched(model) == 0


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, saved, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("make", [Classifier, lambda: torch_classifier()], ids=["own", "torch"])
def test_a_copy_of_a_tapped_model_computes_the_same_and_is_not_captured(make, copied):
    model = make()
    with tap(model) as taps:
        taps.arm()
        twin = copied(model)
        with torch.no_grad():
            twin.get_parameter("0.weight" if make is not Classifier else "embed.weight").zero_()
        assert not torch.equal(twin(tokens()), model(tokens()))
        assert {capture.num_tokens for capture in taps.captures.values()} == {36}
        assert b"hdi_callback" not in pickle.dumps(nn.Sequential(*copied(model).children()))


# --- torch.compile


def torch_classifier() -> nn.Module:
    return nn.Sequential(nn.Embedding(16, D), encoder())


@pytest.mark.some_slow(quick=1)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("make", [Classifier, torch_classifier], ids=["own", "torch"])
def test_a_compiled_model_is_captured_without_a_graph_break(dynamo, make, backend):
    torch.manual_seed(0)
    model = make()
    truth_taps = tap(model)
    truth_taps.arm()
    model(tokens())
    truth = {name: capture.outputs.clone() for name, capture in truth_taps.captures.items()}
    truth_taps.remove()
    with tap(model) as taps:
        compiled = torch.compile(model, backend=backend)
        for _ in range(3):
            compiled(tokens())
        unarmed = dynamo["stats"]["unique_graphs"]
        for _ in range(4):
            taps.arm()
            compiled(tokens())
            assert set(taps.captures) == set(truth)
            for name, outputs in truth.items():
                assert torch.allclose(taps.captures[name].outputs, outputs, atol=1e-5)
            taps.release()
            compiled(tokens())
        assert dynamo["stats"]["unique_graphs"] - unarmed <= 1, "armed steps cost one recompilation"
    assert not dynamo["graph_break"]


def test_a_model_compiled_and_called_before_is_detected(dynamo):
    model = Classifier()
    compiled = torch.compile(model, backend="eager")
    compiled(tokens())
    with tap(model) as taps:
        taps.arm()
        compiled(tokens())
        assert taps.was_armed
        assert dict(taps.captures) == {}


def test_skipping_a_forward_switches_off_sampling_in_compiled_graphs():
    taps = Taps(find_attention(Classifier()))
    for tap in taps._taps.values():
        tap.is_in_graph = True
    taps.skip_forward()
    assert taps._taps
    assert not any(tap.is_in_graph for tap in taps._taps.values())
    taps.remove()
