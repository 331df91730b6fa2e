"""Numbers on a GPU against float64 on the CPU, and against what kernels were given."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hdi_callback import HeadDiversityMonitor, load_history, watch_heads
from hdi_callback.core import circuit_similarity, head_covariance, head_diversity
from tests.monitor.models import Model, inputs_of, naive, of_outputs, of_rows
from tests.studies.gpu.training import DEVICE, HEADS, LENGTH, Gpt, batch, kernel, note

pytestmark = pytest.mark.gpu


@pytest.fixture(params=[False, True], ids=["float32 products", "TF32 products"])
def tf32(request: pytest.FixtureRequest) -> Iterator[bool]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = request.param
    yield request.param
    torch.backends.cuda.matmul.allow_tf32 = before


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def weights(kind: str) -> Tensor:
    """Heads ``(3, 12, 64, 768)``: as they come, ill-conditioned, of low rank, two alike and one dead."""
    weight = gaussian(3, 12, 64, 768)
    if kind == "condition 1e4":
        weight = gaussian(3, 12, 64, 64, seed=1) @ (torch.logspace(0, -4, 64).double()[:, None] * weight)
    elif kind == "rank 40":
        weight = gaussian(3, 12, 64, 40, seed=1) @ weight[:, :, :40]
    elif kind == "alike":
        weight[:, 3], weight[:, 5] = weight[:, 1], 0
    return weight.float().double()  # what float32 holds


def error(measured: Any, expected: Any, name: str) -> float:
    one, other = getattr(measured, name).double().cpu(), getattr(expected, name).double()
    assert one.shape == other.shape
    assert bool((one.isnan() == other.isnan()).all()), name
    return float((one - other).nan_to_num().abs().max())


@pytest.mark.parametrize("kind", ["random", "condition 1e4", "rank 40", "alike"])
def test_diversity_is_that_of_float64_on_the_cpu(kind, tf32):
    weight = weights(kind)
    expected, measured = head_diversity(weight), head_diversity(weight.to(DEVICE, torch.float32))
    assert measured.rank.cpu().tolist() == expected.rank.tolist()
    assert measured.dead.cpu().tolist() == expected.dead.tolist()
    assert measured.subspace.worst_pair.cpu().tolist() == expected.subspace.worst_pair.tolist()
    for lens in ("subspace", "energy"):
        ours, theirs = getattr(measured, lens), getattr(expected, lens)
        index, overlap = error(ours, theirs, "index"), error(ours, theirs, "overlap")
        note(f"diversity, {kind}, {lens}, TF32 {tf32}: error of the index {index:.0e}, of an overlap {overlap:.0e}")
        assert index < (5e-6 if tf32 else 5e-7)
        assert overlap < (1e-3 if tf32 else 5e-6)


def test_circuits_are_those_of_float64_on_the_cpu(tf32):
    query, key, output = (gaussian(2, heads, 64, 768, seed=heads) for heads in (12, 4, 6))
    query, key, output = (one.float().double() for one in (query, key, output))
    query[:, 1] = query[:, 0]
    query_on, key_on, output_on = (one.to(DEVICE, torch.float32) for one in (query, key, output))
    pairs = [
        (circuit_similarity(query, key), circuit_similarity(query_on, key_on)),
        (circuit_similarity(query[:, :6], output), circuit_similarity(query_on[:, :6], output_on)),
    ]
    for expected, measured in pairs:
        found = error(measured, expected, "cosine")
        note(f"circuits, TF32 {tf32}: error of a cosine {found:.0e}")
        assert found < (1e-4 if tf32 else 1e-6)
        assert error(measured, expected, "norm") < 1e-5 * float(expected.norm.max())
        assert measured.worst_pair.cpu().tolist() == expected.worst_pair.tolist()


def test_covariance_is_that_of_float64_on_the_cpu(tf32):
    outputs, weight = gaussian(2048, 12, 64), gaussian(12, 64, 768, seed=1) / 28
    outputs[:, 4] = 0.7 * outputs[:, 2] + 0.3 * outputs[:, 4]
    outputs += gaussian(12, 64, seed=2) * 3  # means beside which the spread is small
    outputs, weight = outputs.float().double(), weight.float().double()
    expected, measured = (
        head_covariance(outputs, weight),
        head_covariance(outputs.to(DEVICE, torch.float32), weight.to(DEVICE, torch.float32)),
    )
    variance = float(expected.variance)
    for name, scale in (("trace", variance), ("correlation", 1), ("output_overlap", 1)):
        found = error(measured, expected, name) / scale
        note(f"covariance, {name}, TF32 {tf32}: error {found:.0e}")
        assert found < (2e-3 if tf32 else 2e-5), name


def test_every_metric_of_a_float32_model_is_what_its_definition_says():
    torch.manual_seed(0)
    model = Model()
    x = torch.randn(2, 9, 32)
    expected = [naive(*args) for args in zip(model.layers, inputs_of(model, x))]
    model.to(DEVICE)
    with HeadDiversityMonitor(model) as monitor:
        monitor.arm()
        model(x.to(DEVICE)).square().mean().backward()
        record = monitor.measure(0).record()
    assert list(record.layers) == ["layers.0", "layers.1"]
    for layer, own in zip(record.layers.values(), expected):
        assert {"hdi", "head_covariance", "attention_entropy"} <= layer.values.keys(), layer.absent
        for name in own.keys() & layer.values.keys():
            assert layer.values[name] == pytest.approx(own[name], rel=5e-5, abs=5e-6), name


RUNS = [
    ("efficient", torch.float32, 40, 4),
    ("efficient", torch.bfloat16, 24, 4),
    ("flash", torch.bfloat16, 40, 4),
    ("flash", torch.bfloat16, 20, 4),
    ("flash", torch.float16, 64, 2),
    ("cudnn", torch.bfloat16, 64, 4),
    ("math", torch.float32, 40, 2),
    (None, torch.bfloat16, 64, 2),
]


@pytest.mark.parametrize(("name", "dtype", "head_dim", "key_heads"), RUNS, ids=str)
def test_rows_and_outputs_are_those_of_the_queries_and_keys_that_the_kernel_gets(name, dtype, head_dim, key_heads):
    torch.use_deterministic_algorithms(name != "cudnn")  # it has none
    torch.manual_seed(0)
    model = Gpt(head_dim=head_dim, key_heads=key_heads, dropout=0.0).to(DEVICE, dtype)
    for block in model.blocks:  # rows that are not all flat
        block.attention.query.weight.data.mul_(8)
    given: dict[tuple[int, str], Tensor] = {}
    for place, block in enumerate(model.blocks):
        for role in ("query", "key"):
            projection = getattr(block.attention, role)
            projection.register_forward_hook(lambda _, __, out, at=(place, role): given.update({at: out.detach()}))
        mix = block.attention.mix
        mix.register_forward_pre_hook(lambda _, args, at=(place, "outputs"): given.update({at: args[0].detach()}))
    with HeadDiversityMonitor(model) as monitor, kernel(name):
        monitor.arm()
        model(batch(0, size=1)).backward()  # one sequence of 64 tokens: all of its rows are read
        record = monitor.measure(0).record()
    assert list(record.layers) == ["blocks.0.attention", "blocks.1.attention"]
    for place, layer in enumerate(record.layers.values()):
        q, k = (given[place, role][0].double().cpu().unflatten(-1, (-1, head_dim)) for role in ("query", "key"))
        q, k = q.transpose(0, 1), k.transpose(0, 1).repeat_interleave(HEADS // key_heads, 0)
        scores = (q @ k.mT / head_dim**0.5).masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -torch.inf)
        outputs = given[place, "outputs"][0].double().cpu().unflatten(-1, (HEADS, head_dim))
        mix: nn.Linear = model.blocks[place].attention.mix
        weight = mix.weight.detach().double().cpu().T.reshape(HEADS, head_dim, -1)
        expected = of_rows(scores.softmax(-1)[None], scores[None]) | of_outputs(outputs, weight)
        # Written out, scores and weights are rounded to the type of the model; kernels keep float32 within.
        tolerance = 2e-2 if name is None and dtype != torch.float32 else 5e-4
        missing = expected.keys() - layer.values.keys()
        assert not missing, layer.absent
        for metric in expected.keys() & layer.values.keys():
            assert layer.values[metric] == pytest.approx(expected[metric], rel=tolerance, abs=tolerance), metric


def test_rows_of_a_llama_with_grouped_keys_are_those_that_its_eager_attention_reports():
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8,
        "num_key_value_heads": 2, "vocab_size": 64,
    }  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, attn_implementation="sdpa")).to(DEVICE)
    torch.manual_seed(0)
    eager = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, attn_implementation="eager")).double()
    eager.load_state_dict(model.state_dict())
    ids = torch.randint(64, (1, 48))
    with HeadDiversityMonitor(model) as monitor:
        monitor.arm()
        model(ids.to(DEVICE), labels=ids.to(DEVICE), use_cache=False).loss.backward()
        record = monitor.measure(0).record()
    attentions = eager(ids, output_attentions=True).attentions
    assert len(record.layers) == 2
    for layer, attention in zip(record.layers.values(), attentions):
        for name, value in of_rows(attention.detach(), torch.zeros(1)).items():
            if name != "attention_logit":
                assert layer.values[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name


def test_torch_attention_with_padding_is_read_as_on_the_cpu():
    torch.manual_seed(0)
    model, x = nn.MultiheadAttention(64, 4, batch_first=True), torch.randn(3, 16, 64)
    padding = torch.arange(16) >= torch.tensor([16, 9, 4])[:, None]
    found = []
    for device in (torch.device("cpu"), DEVICE):
        model, x, padding = model.to(device), x.to(device), padding.to(device)
        with HeadDiversityMonitor(model) as monitor:
            monitor.arm()
            model(x, x, x, key_padding_mask=padding, need_weights=False)[0].sum().backward()
            found.append(monitor.measure(0).record().layers["the model"].values)
    expected, measured = found
    assert {"hdi", "head_covariance", "attention_entropy", "circuit_qk_norm"} <= measured.keys()
    assert measured == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_heads_that_are_copied_on_the_gpu_are_named(tmp_path: Path):
    torch.manual_seed(0)
    model = Gpt(head_dim=32).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with watch_heads(model, optimizer, every_n_steps=5, log_dir=tmp_path) as heads:
        for step in range(40):
            if step == 18:
                attention = model.blocks[1].attention
                with torch.no_grad():
                    for parameter in (*attention.query.parameters(), *attention.key.parameters()):
                        parameter[96:128] = parameter[32:64]
            with heads.step():
                model(batch(step)).backward()
                optimizer.step()
                optimizer.zero_grad()
        path = heads.history_path
    assert path is not None
    alerts = [alert for record in load_history(path).records for alert in record.alerts if not alert.is_over]
    assert [(alert.step, alert.rule, alert.where) for alert in alerts if alert.step < 30] == [
        (20, "worst pair", {"blocks.1.attention": (1, 3)})
    ]
