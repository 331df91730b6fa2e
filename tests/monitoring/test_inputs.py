"""Keys as they come and the input tokens of layers, through the whole monitor, against textbook formulas."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hdi_callback import HeadDiversityMonitor, find_attention
from hdi_callback.attention.capture.inputs import tap_inputs
from tests.core.no_sync import NoSync
from tests.models import HEADS, LAYERS, LENGTH, WIDTH, Classifier, tokens

METRICS = [
    "hdi_keys", "hdi_keys_worst_pair", "hdi_keys_energy", "hdi_keys_energy_worst_pair", "token_rank", "token_cosine",
]  # fmt: skip


def read(model: nn.Module, *inputs, metrics=METRICS, padding_mask=None, **options) -> dict[str, dict[str, float]]:
    with HeadDiversityMonitor(model, metrics=metrics, max_tokens=10_000, **options) as monitor:
        monitor.arm(padding_mask=padding_mask)
        model(*inputs)
        record = monitor.measure(0).record()
    assert record.absent == {}
    return {name: layer.values for name, layer in record.layers.items()}


def truth_of(x: torch.Tensor, weight: torch.Tensor) -> dict[str, float]:
    """Canonical correlations by QR and singular values, RV by traces: x (n, d), weight (H, d_k, d)."""
    x = x.double().numpy()
    keys = [x @ head.double().numpy().T for head in weight]
    keys = [key - key.mean(0) for key in keys]
    bases = [np.linalg.qr(key)[0] for key in keys]
    pairs = list(itertools.combinations(range(len(keys)), 2))
    canonical = [np.mean(np.linalg.svd(bases[h].T @ bases[g], compute_uv=False) ** 2) for h, g in pairs]

    def shared(h: int, g: int) -> float:
        return float(np.sum((keys[h].T @ keys[g]) ** 2))

    rv = [shared(h, g) / np.sqrt(shared(h, h) * shared(g, g)) for h, g in pairs]
    spectrum = np.linalg.svd(x - x.mean(0), compute_uv=False) ** 2
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    cosines = (unit @ unit.T)[np.triu_indices(len(x), 1)]
    return {
        "hdi_keys": 1 - np.mean(canonical),
        "hdi_keys_worst_pair": np.max(canonical),
        "hdi_keys_energy": 1 - np.mean(rv),
        "hdi_keys_energy_worst_pair": np.max(rv),
        "token_rank": spectrum.sum() ** 2 / np.sum(spectrum**2),
        "token_cosine": np.mean(cosines),
    }


@pytest.fixture
def model() -> Classifier:
    torch.manual_seed(0)
    return Classifier()


def inputs_to(model: nn.Module, *inputs) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    handles = [
        model.get_submodule(name).k_proj.register_forward_pre_hook(
            lambda module, args, name=name: found.setdefault(name, args[0].detach().clone())
        )
        for name in LAYERS
    ]
    model(*inputs)
    for handle in handles:
        handle.remove()
    return found


def test_keys_and_tokens_are_those_of_the_forward(model):
    inputs_by_layer, values = inputs_to(model, tokens()), read(model, tokens())
    for name in LAYERS:
        weight = model.get_submodule(name).k_proj.weight.detach().unflatten(0, (HEADS, -1))
        truth = truth_of(inputs_by_layer[name].flatten(0, 1), weight)
        assert {metric: values[name][metric] for metric in METRICS} == pytest.approx(truth, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("metrics", [METRICS, METRICS[-2:]], ids=["with keys", "tokens alone"])
@pytest.mark.parametrize("batch", [6, 2], ids=["more tokens than features", "fewer"])
def test_padding_is_left_out(model, metrics, batch):
    padded = torch.zeros(batch, LENGTH, dtype=torch.bool)
    padded[1, -5:] = padded[0, :3] = True
    inputs = tokens(batch=batch)
    inputs_by_layer, values = inputs_to(model, inputs), read(model, inputs, padding_mask=padded, metrics=metrics)
    weight = model.get_submodule(LAYERS[0]).k_proj.weight.detach().unflatten(0, (HEADS, -1))
    truth = truth_of(inputs_by_layer[LAYERS[0]][~padded], weight)
    for metric in metrics:
        assert values[LAYERS[0]][metric] == pytest.approx(truth[metric], rel=1e-5, abs=1e-6)


class Cross(nn.Module):
    """Attention of torch's own to another stream."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first)

    def forward(self, query, memory):
        return self.attn(query, memory, memory, need_weights=False)[0]


class Calling(nn.Module):
    """Call attention with some arguments."""

    def __init__(self, attn: nn.Module, args: list[torch.Tensor], kwargs: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.attn, self.args, self.kwargs = attn, args, kwargs

    def forward(self):
        return self.attn(*self.args, **self.kwargs, need_weights=False)[0]


@pytest.mark.parametrize("batch_first", [True, False])
def test_keys_of_torchs_cross_attention_are_those_of_the_memory(batch_first):
    torch.manual_seed(1)
    model = Cross(batch_first)
    query, memory = torch.randn(3, 7, WIDTH), torch.randn(3, 20, WIDTH)
    inputs = (query, memory) if batch_first else (query.transpose(0, 1), memory.transpose(0, 1))
    weight = model.attn.in_proj_weight.detach()[WIDTH : 2 * WIDTH].unflatten(0, (HEADS, -1))
    values = read(model, *inputs)["attn"]
    truth = truth_of(memory.flatten(0, 1), weight)
    assert {metric: values[metric] for metric in METRICS} == pytest.approx(truth, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("by_name", [("value",), ("key", "value"), ("query", "key", "value")])
def test_keys_of_torchs_attention_are_found_with_positional_and_keyword_arguments(by_name):
    torch.manual_seed(1)
    attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    streams = {name: torch.randn(3, length, WIDTH) for name, length in (("query", 7), ("key", 20), ("value", 20))}
    placed = [stream for name, stream in streams.items() if name not in by_name]
    model = Calling(attention, placed, {name: streams[name] for name in by_name})
    weight = attention.in_proj_weight.detach()[WIDTH : 2 * WIDTH].unflatten(0, (HEADS, -1))
    values = read(model)["attn"]
    truth = truth_of(streams["key"].flatten(0, 1), weight)
    assert {metric: values[metric] for metric in METRICS} == pytest.approx(truth, rel=1e-5, abs=1e-6)


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10_000), spread=st.floats(0.3, 1.0))
def test_folding_a_norm_gain_into_the_weights_changes_no_input_metric(seed, spread):
    torch.manual_seed(seed)
    model, gains = Classifier(), torch.exp(spread * torch.randn(WIDTH))
    folded = Classifier()
    folded.load_state_dict(model.state_dict())
    inputs = inputs_to(model, tokens())[LAYERS[0]]
    attn, other = model.get_submodule(LAYERS[0]), folded.get_submodule(LAYERS[0])
    with torch.no_grad():  # the gain in the input of one, in the weights of the other
        for name in ("q_proj", "k_proj", "v_proj"):
            getattr(other, name).weight.mul_(gains)
    metrics = ["hdi", *METRICS]
    plain, after = (nn.ModuleDict({"attn": one}) for one in (attn, other))
    plain.forward, after.forward = (lambda x: attn(x * gains)), other.forward
    before, later = read(plain, inputs, metrics=metrics)["attn"], read(after, inputs, metrics=metrics)["attn"]
    for metric in METRICS[:4]:
        assert later[metric] == pytest.approx(before[metric], abs=1e-5)
    assert abs(later["hdi"] - before["hdi"]) > 1e-4  # which looks at the weights alone


def test_equal_tokens_have_rank_zero_and_cosine_one(model):
    with torch.no_grad():
        model.embed.weight.copy_(model.embed.weight[:1].expand_as(model.embed.weight))
    model.blocks[0].register_forward_pre_hook(
        lambda module, args: (args[0][:, :1].expand_as(args[0]).contiguous()[:1],)
    )
    values = read(model, tokens(), metrics=["token_rank", "token_cosine"])[LAYERS[0]]
    assert values["token_rank"] == 0
    assert values["token_cosine"] == pytest.approx(1)


def test_reading_inputs_never_makes_the_host_wait(model):
    model.to("meta")
    with HeadDiversityMonitor(model, metrics=METRICS) as monitor, NoSync():
        monitor.arm()
        model(torch.zeros(2, LENGTH, dtype=torch.long, device="meta"))
        reading = monitor.measure(step=0)
    assert {"keys as they come", "input tokens"} <= {one.source for one in reading.measurements}


def test_training_is_bit_identical_with_inputs_captured_at_every_step():
    def train(is_watched: bool) -> tuple[list[float], list[torch.Tensor]]:
        torch.manual_seed(3)
        model = Classifier()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        monitor = HeadDiversityMonitor(model, metrics=METRICS) if is_watched else None
        losses = []
        for step in range(4):
            if monitor is not None:
                monitor.arm()
            loss = model(tokens(seed=step)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            if monitor is not None:
                assert set(METRICS) <= set(monitor.measure(step).record().layers[LAYERS[0]].values)
            optimizer.step()
            losses.append(loss.item())
        if monitor is not None:
            monitor.close()
        return [*losses, float(torch.rand(()))], [parameter.detach().clone() for parameter in model.parameters()]

    (plain, weights), (watched, watched_weights) = train(False), train(True)
    assert plain == watched
    assert all(torch.equal(one, other) for one, other in zip(weights, watched_weights))


def test_inputs_of_a_compiled_model_are_captured(model):
    alone = read(model, tokens())
    compiled = torch.compile(model, backend="eager")
    with HeadDiversityMonitor(compiled, metrics=METRICS, max_tokens=10_000) as monitor:
        monitor.arm()
        compiled(tokens())
        record = monitor.measure(0).record()
    for name in LAYERS:
        assert {metric: record.layers[name].values[metric] for metric in METRICS} == pytest.approx(
            {metric: alone[name][metric] for metric in METRICS}, abs=1e-6
        )


def test_layers_that_share_a_key_projection_have_no_inputs_and_the_reason_names_it():
    model = Classifier()
    layer = find_attention(model)[0]
    taps, why_not = tap_inputs([layer, replace(layer, name="again")], max_tokens=8, model=model, padding=None)
    taps.remove()
    assert why_not == {}
    assert dict(taps.absent) == dict.fromkeys([layer.name, "again"], "it shares its key projection with another layer")
