"""What goes wrong in a run: one warning at most for each, the other layers are read, and the run is finished."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from hdi_callback import HeadDiversityMonitor, head_covariance, head_diversity
from hdi_callback.core.diversity import blocks_and_products
from hdi_callback.core.head_sums import HeadMoments
from hdi_callback.errors import MonitoringWarning, UnsupportedAttentionWarning
from hdi_callback.monitoring.layers import HeadVerifier
from hdi_callback.monitoring.metrics import COVARIANCE
from hdi_callback.monitoring.metrics import METRICS as CATALOGUE
from tests.models import LAYERS, LENGTH, Attention, Classifier

METRICS = ["hdi", "head_covariance"]
FIRST, SECOND = LAYERS


class Run:
    """Five training steps with a reading at each, and what may happen in between."""

    def __init__(self, model: nn.Module | None = None, **options) -> None:
        torch.manual_seed(0)
        self.model = Classifier() if model is None else model
        self.monitor = HeadDiversityMonitor(self.model, **({"metrics": METRICS} | options))
        self.records: list = []
        self.warnings: list[str] = []

    def step(self, x: torch.Tensor | None = None) -> None:
        x = torch.randint(16, (4, LENGTH)) if x is None else x
        optimizer = torch.optim.SGD([p for p in self.model.parameters() if p.requires_grad], lr=1e-3)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.monitor.arm()
            self.model(x).sum().backward()
            self.records.append(self.monitor.measure(len(self.records)).record())
        self.warnings += [str(item.message) for item in caught if issubclass(item.category, MonitoringWarning)]
        for item in caught:
            if issubclass(item.category, UnsupportedAttentionWarning):
                warnings.warn(item.message, stacklevel=2)
        optimizer.step()
        optimizer.zero_grad()

    def tags(self, place: int = -1) -> set[str]:
        return set(self.records[place].scalars(METRICS)) - {"hdi/mean", "hdi/min"}


ALL = {f"{metric}/{name}" for metric in METRICS for name in LAYERS}


# --- weights


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_not_finite(value):
    run = Run()
    run.step()
    with torch.no_grad():
        run.model.blocks[0].attn.k_proj.weight[3, 5] = value
    for _ in range(3):
        run.step()
    assert run.warnings == []
    assert {tag for tag in run.tags() if tag.startswith("hdi")} == set()  # the gradients made both layers so
    assert {tag for tag in run.tags(1) if tag.startswith("hdi")} == {f"hdi/{SECOND}"}
    assert run.records[1].absent == {f"hdi/{FIRST}": "the weights are not finite"}


def test_a_head_that_is_all_zero():
    run = Run(metrics=["hdi", "hdi_dead_heads"])
    with torch.no_grad():
        run.model.blocks[1].attn.k_proj.weight[8:16] = 0
    run.step()
    values = {name: layer.values for name, layer in run.records[0].layers.items()}
    assert (values[FIRST]["hdi_dead_heads"], values[SECOND]["hdi_dead_heads"]) == (0, 1)
    assert 0 < values[SECOND]["hdi"] < 1
    assert run.warnings == []


def test_a_factorisation_that_fails(monkeypatch):
    run = Run()

    def fails(*_, **__):
        raise torch.linalg.LinAlgError("the factorization could not be completed")

    for name in ("svd", "cholesky_ex"):
        monkeypatch.setattr(torch.linalg, name, fails)
    for _ in range(3):
        run.step()
    assert len(run.warnings) == 1
    assert "could not be completed" in run.warnings[0]
    assert run.tags() == {f"head_covariance/{name}" for name in LAYERS}
    assert set(run.records[-1].absent) == set(LAYERS)
    monkeypatch.undo()
    run.step()
    assert run.tags() == ALL, "it is tried again at each reading"


# --- layers that come, go, and rest


def test_a_layer_that_is_deleted():
    run = Run()
    run.step()
    del run.model.blocks[1]
    for _ in range(3):
        run.step()
    assert len(run.warnings) == 1
    assert f"{SECOND}: " in run.warnings[0]
    assert "no longer part of the model" in run.warnings[0]
    assert run.tags() == {tag for tag in ALL if tag.endswith(FIRST)}
    assert SECOND in run.records[-1].absent


def test_a_layer_that_is_replaced_is_not_read_under_its_old_name():
    run = Run()
    run.model.blocks[0].attn = Attention()
    for _ in range(3):
        run.step()
    assert len(run.warnings) == 1
    assert "a new monitor would find its replacement" in run.warnings[0]
    assert run.tags() == {tag for tag in ALL if tag.endswith(SECOND)}


def test_a_block_added_during_a_run_is_read_from_then_on():
    run = Run()
    run.step()
    run.model.blocks.append(copy.deepcopy(run.model.blocks[0]))
    key = run.model.blocks[2].attn.k_proj.weight.detach().clone()
    run.step()
    run.step()
    new = "blocks.2.attn"
    assert [layer.name for layer in run.monitor.layers] == [*LAYERS, new]
    assert run.records[1].layers[new].values["hdi"] == pytest.approx(head_diversity(key.unflatten(0, (4, 8))).index)
    assert run.tags() == ALL | {f"{metric}/{new}" for metric in METRICS}


def test_a_block_in_the_place_of_a_moved_one_is_reported_once():
    run = Run()
    run.step()
    moved = run.model.blocks[0].attn
    run.model.blocks.insert(0, copy.deepcopy(run.model.blocks[0]))
    with pytest.warns(UnsupportedAttentionWarning, match="A new monitor would watch both") as caught:
        run.step(again := torch.randint(16, (4, LENGTH)))
    assert len(caught) == 1
    assert f"`{FIRST}`" in str(caught[0].message)
    run.step(again)
    assert run.tags() == ALL, "others keep their names"
    assert run.monitor.layers[0].module is moved


def test_a_replaced_projection_is_read_from_its_new_weight():
    def index(projection: nn.Linear) -> float:
        return float(head_diversity(projection.weight.detach().unflatten(0, (4, 8))).index)

    run = Run()
    old, new = run.model.blocks[0].attn.k_proj, nn.Linear(32, 32)
    run.model.blocks[0].attn.k_proj = new
    expected = index(new)
    run.step()
    assert run.records[0].layers[FIRST].values["hdi"] == pytest.approx(expected, abs=1e-6)
    assert expected != pytest.approx(index(old), abs=1e-4)


def split_into_more_heads(attention: Attention) -> None:
    """The same weights, in heads of half the width."""
    attention.num_heads *= 2


def lose_a_head(attention: Attention) -> None:
    width = attention.q_proj.out_features * (attention.num_heads - 1) // attention.num_heads
    for name in ("q_proj", "k_proj", "v_proj"):
        linear = getattr(attention, name)
        linear.weight, linear.bias = nn.Parameter(linear.weight[:width]), nn.Parameter(linear.bias[:width])
    attention.out_proj.weight = nn.Parameter(attention.out_proj.weight[:, :width])
    attention.num_heads -= 1


@pytest.mark.parametrize("change", [split_into_more_heads, lose_a_head])
def test_a_layer_whose_heads_change_during_a_run_is_left_out(change):
    run = Run(metrics=[*METRICS, "attention_entropy", "circuit_qk", "circuit_ov"])
    for _ in range(2):
        run.step()
    change(run.model.blocks[0].attn)
    heads = run.model.blocks[0].attn.num_heads
    with pytest.warns(UnsupportedAttentionWarning, match=f"since then its attention has {heads} heads, and 4 were"):
        run.step()
    for _ in range(2):
        run.step()
    assert len(run.warnings) <= 1  # of head outputs that do not have the width any more
    assert {tag.rpartition("/")[2] for tag in run.tags()} == {SECOND}
    for record in run.records[2:]:
        assert f"{FIRST}" in record.absent
        assert FIRST not in record.layers or not record.layers[FIRST].values


def test_a_layer_that_can_no_longer_be_read_costs_one_warning_for_all_metrics():
    every = [name for name, metric in CATALOGUE.items() if metric.source not in (COVARIANCE, "attention rows")]
    run = Run(metrics=every)
    run.step()
    run.model.blocks[0].attn = Attention()
    for _ in range(2):
        run.step()
    gone = [message for message in run.warnings if "it is no longer part of the model" in message]
    assert len(gone) == 1
    absent = {key.partition("/")[0] for key, why in run.records[-1].absent.items() if "no longer part of" in why}
    assert absent > {"QK circuits", "OV circuits", "movement of weights"}


def test_a_layer_that_is_frozen():
    run = Run()
    run.model.blocks[0].requires_grad_(False)
    for _ in range(3):
        run.step()
    assert run.warnings == []
    assert all(run.tags(place) == ALL for place in range(3))
    hdi = [record.layers[FIRST].values["hdi"] for record in run.records]
    assert hdi[0] == hdi[1] == hdi[2]


@pytest.mark.parametrize("others_await", [False, True])
def test_a_forward_that_skips_a_layer_on_some_steps(monkeypatch, others_await):
    if others_await:  # another rank judges claims for longer, so that this one does too
        monkeypatch.setattr(HeadVerifier, "is_verifying", property(lambda verifier: verifier._is_armed))

    class Skipping(Classifier):
        skips = False

        def forward(self, x):
            x = self.blocks[0](self.embed(x))
            return self.head((x if self.skips else self.blocks[1](x)).mean(1))

    run = Run(Skipping())
    for step in range(4):
        run.model.skips = step % 2 == 1
        run.step()
    assert len(run.warnings) == 1
    assert f"`{SECOND}`" in run.warnings[0]
    assert f"`{FIRST}`" not in run.warnings[0]
    assert [run.tags(place) for place in range(4)] == [ALL, ALL - {f"head_covariance/{SECOND}"}] * 2
    assert "head outputs/" + SECOND in run.records[1].absent


# --- odd batches


@pytest.mark.parametrize("shape", [(0, LENGTH), (1, 1)])
def test_batches_of_no_token_and_of_one(shape):
    run = Run()
    run.step()
    for _ in range(2):
        run.step(torch.zeros(shape, dtype=torch.long))
    run.step()
    assert len(run.warnings) == 1
    assert f"{shape[0] * shape[1]} tokens" in run.warnings[0]
    assert run.tags(1) == {f"hdi/{name}" for name in LAYERS}
    assert set(run.records[1].absent) == {f"head outputs/{name}" for name in LAYERS}
    assert run.tags(-1) == ALL


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors(layout):
    class Nested(nn.Module):
        """Attention over sequences of different lengths, none of them padded."""

        def __init__(self):
            super().__init__()
            self.attn = Attention()

        def forward(self, x):
            outputs = torch.nested.nested_tensor([x[0, :5], x[1, :3]], layout=layout)
            return self.attn.out_proj(outputs).to_padded_tensor(0.0)

    run = Run(Nested())
    for _ in range(3):
        run.step(torch.randn(2, 6, 32))
    assert len(run.warnings) == 1
    assert "nested tensors are not captured" in run.warnings[0]
    assert run.tags() == {"hdi/attn"}
    assert run.records[-1].absent == {"head outputs/attn": "nested tensors are not captured"}


# --- memory


def out_of_memory(*_, **__):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_out_of_memory_in_a_reading_halves_the_layers_measured_at_once(monkeypatch):
    at_once = []

    def only_one(weight, **options):
        at_once.append(weight.shape[0])
        return blocks_and_products(weight, **options) if weight.shape[0] == 1 else out_of_memory()

    run = Run(Classifier(blocks=4))
    monkeypatch.setattr("hdi_callback.monitoring.monitor.sources.blocks_and_products", only_one)
    run.step()
    run.step()
    assert run.warnings == []
    assert sum(tag.startswith("hdi/") for tag in run.tags()) == 4
    assert at_once == [4, 2, 1, 1, 2, 1, 1, *(1, 1, 1, 1)], "what was learnt is remembered"


def test_out_of_memory_for_a_single_layer_costs_one_warning(monkeypatch):
    run = Run()
    monkeypatch.setattr("hdi_callback.monitoring.monitor.sources.blocks_and_products", out_of_memory)
    monkeypatch.setattr("hdi_callback.monitoring.monitor.outputs.head_covariance", out_of_memory)
    for _ in range(3):
        run.step()
    assert sorted("head outputs" in line for line in run.warnings) == [False, True]
    assert run.tags() == set()
    assert set(run.records[-1].absent) == {*LAYERS, *(f"head outputs/{name}" for name in LAYERS)}
    monkeypatch.undo()
    run.step()
    assert run.tags() == ALL


def test_out_of_memory_in_a_capture_costs_one_warning(monkeypatch):
    run = Run()
    monkeypatch.setattr("hdi_callback.attention.capture.tap.sample_tokens", out_of_memory)
    for _ in range(3):
        run.step()
    assert len(run.warnings) == 1
    assert "out of memory" in run.warnings[0]
    assert run.tags() == {f"hdi/{name}" for name in LAYERS}


def test_outputs_of_a_whole_run_are_measured_as_by_hand():
    """The runs above would pass with a covariance that is always there and always wrong."""
    run, recorded = Run(max_tokens=10_000), []
    run.model.blocks[0].attn.out_proj.register_forward_pre_hook(lambda _, args: recorded.append(args[0].detach()))
    weight = run.model.blocks[0].attn.out_proj.weight.detach().clone().T.unflatten(0, (4, 8))
    run.step()
    outputs = recorded[0].flatten(0, 1).unflatten(-1, (4, 8))
    truth = head_covariance(outputs.double(), weight.double())
    assert HeadMoments.of(outputs).count == outputs.shape[0]
    assert run.records[0].layers[FIRST].values["head_covariance"] == pytest.approx(float(truth.covariance), rel=1e-4)
