from __future__ import annotations

import gc
import sys
import warnings
import weakref

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.nn import functional as F

from hdi_callback import HeadDiversityMonitor, head_covariance, head_diversity, watch_heads
from hdi_callback.attention import ROLES, AttentionLayer
from hdi_callback.core.diversity import blocks_and_products
from hdi_callback.errors import MisconfigurationError, MonitoringWarning
from hdi_callback.monitoring.metrics import METRICS, RULE_METRICS
from hdi_callback.monitoring.monitor import weights
from tests.core.no_sync import NoSync
from tests.core.tensor_sizes import TensorSizes
from tests.models import HEADS, LAYERS, LENGTH, WIDTH, Classifier, tokens


@pytest.fixture
def model() -> Classifier:
    torch.manual_seed(0)
    return Classifier()


def test_a_reading_of_weights_agrees_with_each_layer_measured_alone(model):
    with HeadDiversityMonitor(model, metrics=["hdi", "hdi_output"]) as monitor:
        record = monitor.measure(step=3).record()
    assert list(record.layers) == LAYERS
    for name in LAYERS:
        attn = model.get_submodule(name)
        key = attn.k_proj.weight.detach().double().unflatten(0, (HEADS, -1))
        output = attn.out_proj.weight.detach().double().T.unflatten(0, (HEADS, -1))
        values = record.layers[name].values
        assert values["hdi"] == pytest.approx(float(head_diversity(key, method="exact").index), abs=1e-7)
        assert values["hdi_output"] == pytest.approx(float(head_diversity(output, method="exact").index), abs=1e-7)
        worst = head_diversity(key, method="exact")
        assert record.layers[name].arrays["worst_pair"] == worst.worst_pair.tolist()


def test_head_covariance_is_that_of_the_outputs_in_the_armed_forward(model):
    recorded = {}

    def keep(name):
        return lambda module, args: recorded.setdefault(name, args[0].detach().clone())

    for name in LAYERS:
        model.get_submodule(name).out_proj.register_forward_pre_hook(keep(name))
    with HeadDiversityMonitor(model, max_tokens=10_000) as monitor:
        monitor.arm()
        model(tokens(seed=1))
        with torch.no_grad():
            model(tokens(seed=2))  # it does not train
        record = monitor.measure(step=0).record()
    for name in LAYERS:
        outputs = recorded[name].double().flatten(0, 1).unflatten(-1, (HEADS, -1))
        weight = model.get_submodule(name).out_proj.weight.detach().double().T.unflatten(0, (HEADS, -1))
        truth = head_covariance(outputs, weight)
        assert record.layers[name].values["head_correlation"] == pytest.approx(float(truth.correlation), abs=1e-5)
        assert record.layers[name].values["head_covariance"] == pytest.approx(float(truth.covariance), rel=1e-4)


def test_without_arming_the_covariance_is_absent_without_a_warning(model):
    with HeadDiversityMonitor(model) as monitor:
        model(tokens())
        tags = monitor.measure(step=0).record().scalars(monitor.metrics)
    assert "hdi/mean" in tags
    assert not [tag for tag in tags if tag.startswith("head_")]


def test_an_armed_step_without_a_capture_warns_once(model):
    with HeadDiversityMonitor(model) as monitor, pytest.warns(MonitoringWarning, match="compiled") as caught:
        for step in range(3):
            monitor.arm()  # and no forward at all
            monitor.measure(step)
    assert len(caught) == 1


def test_captured_tensors_are_freed_after_their_reading(model):
    captured = []
    with HeadDiversityMonitor(model) as monitor:
        monitor.arm()
        model(tokens())
        captured += [weakref.ref(capture.outputs) for capture in monitor._taps.captures.values()]
        assert len(captured) == 2
        monitor.measure(step=0).record()
        gc.collect()
        assert [ref() for ref in captured] == [None, None]


def test_layers_of_one_shape_are_measured_in_one_call(model, monkeypatch):
    shapes = []

    def count(weight, **options):
        shapes.append(tuple(weight.shape))
        return blocks_and_products(weight, **options)

    monkeypatch.setattr("hdi_callback.monitoring.monitor.sources.blocks_and_products", count)
    with HeadDiversityMonitor(model) as monitor:
        monitor.measure(step=0)
    assert shapes == [(len(LAYERS), HEADS, WIDTH // HEADS, WIDTH)]


WEIGHTS = ["hdi", "hdi_query", "circuit_qk", "circuit_ov", "update_hdi", "update_circuit_qk"]


@pytest.mark.parametrize("share", [4, 1, 0.25])
def test_reading_weights_keeps_within_its_memory_budget(share):
    model = Classifier(blocks=6, width=96, num_heads=4)
    layer = 96 * 96 * 4  # bytes of one weight of one layer
    budget = int(share * 6 * layer)
    with HeadDiversityMonitor(model, metrics=WEIGHTS, memory_budget=budget) as monitor:
        monitor.measure(step=0)
        with TensorSizes() as sizes:
            reading = monitor.measure(step=1)
    # Two weights of the largest layer in float64 go beyond it, as one layer is read however little there is.
    assert sizes.largest * 4 <= budget + 4 * layer
    layers_at_once = max(len(measurement.layers) for measurement in reading.measurements)
    assert layers_at_once == {4: 4, 1: 1, 0.25: 1}[share]


def test_the_stacked_copies_stay_bounded(model):
    with HeadDiversityMonitor(model, metrics=["hdi"]) as monitor:
        whole = monitor.measure(step=0).record()
    with HeadDiversityMonitor(model, metrics=["hdi"], memory_budget=1) as monitor:
        reading = monitor.measure(step=0)
    assert [len(measurement.layers) for measurement in reading.measurements] == [1, 1]
    assert reading.record().scalars(["hdi"]) == pytest.approx(whole.scalars(["hdi"]), abs=1e-7)


def read_large(budget: int = 2**29):
    torch.manual_seed(0)
    model = Classifier(blocks=3, width=384, num_heads=6)
    with HeadDiversityMonitor(model, metrics=["default", *RULE_METRICS], memory_budget=budget) as monitor:
        monitor.arm()
        model(tokens())
        reading = monitor.measure(step=0)
        kept = monitor._shared._kept
    return reading, kept


@pytest.mark.parametrize("budget", [2**29, 2**21])
def test_large_layers_are_read_one_by_one_and_share_products_with_the_same_numbers(budget, monkeypatch):
    with TensorSizes() as sizes:
        reading, kept = read_large(budget)
    assert not kept
    monkeypatch.setattr(weights, "_LARGE", 2**40)
    with TensorSizes() as stacked:
        together, _ = read_large()
    assert sizes.largest == 384 * 384 < stacked.largest
    names = [name for one in reading.measurements if one.source == "key" for name in one.layers]
    assert names == list(reading.layers)
    record, expected = reading.record(), together.record()
    assert record.absent == expected.absent
    for name, layer in expected.layers.items():
        assert record.layers[name].values == pytest.approx(layer.values, rel=1e-4, abs=1e-6)
        for matrix in ("overlap", "energy_overlap", "circuit_qk", "circuit_ov", "output_overlap"):
            assert (record.layers[name].matrices[matrix] - layer.matrices[matrix]).abs().max() < 1e-6


def test_layers_of_different_shapes_keep_the_order_of_the_model():
    model = nn.ModuleList([Classifier(blocks=1), Classifier(blocks=1, width=48, num_heads=6), Classifier(blocks=1)])
    with HeadDiversityMonitor(model) as monitor:
        record = monitor.measure(step=0).record()
    assert list(record.layers) == [f"{place}.blocks.0.attn" for place in range(3)]
    assert all("hdi" in layer.values for layer in record.layers.values())


def test_measuring_never_makes_the_host_wait(model):
    model.to("meta")
    with HeadDiversityMonitor(model, metrics=["hdi", "hdi_query", "head_correlation_error"]) as monitor, NoSync():
        monitor.arm()
        model(torch.zeros(2, LENGTH, dtype=torch.long, device="meta"))
        reading = monitor.measure(step=0)
    assert {measurement.source for measurement in reading.measurements} == {"key", "query", "head outputs"}


def test_measuring_under_the_users_autocast_changes_nothing(model):
    with HeadDiversityMonitor(model, metrics=["hdi"]) as monitor:
        plain = monitor.measure(step=0).record().scalars(["hdi"])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mixed = monitor.measure(step=0).record().scalars(["hdi"])
            assert torch.is_autocast_enabled("cpu")
    assert mixed == plain


def test_a_single_key_head_has_no_index_and_the_absence_has_its_reason():
    class MultiQuery(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_heads, self.num_key_value_heads = 4, 1
            self.q_proj, self.out_proj = nn.Linear(32, 32), nn.Linear(32, 32)
            self.k_proj, self.v_proj = nn.Linear(32, 8), nn.Linear(32, 8)

        def forward(self, x):
            q, k, v = self.q_proj(x).unflatten(-1, (4, 8)).transpose(1, 2), self.k_proj(x), self.v_proj(x)
            out = F.scaled_dot_product_attention(q, *(one[:, None].expand(-1, 4, -1, -1) for one in (k, v)))
            return self.out_proj(out.transpose(1, 2).flatten(2))

    with HeadDiversityMonitor(nn.ModuleDict({"attn": MultiQuery()})) as monitor:
        record = monitor.measure(step=0).record()
    assert "hdi" not in record.layers["attn"].values
    assert record.absent["hdi/attn"] == "fewer than two live heads"
    assert record.summary() == {}


def test_a_layer_that_fails_costs_one_warning_and_not_the_others(model):
    with HeadDiversityMonitor(model) as monitor:
        model.blocks[0].attn.k_proj = nn.Identity()  # replaced behind the monitor's back
        with pytest.warns(MonitoringWarning, match=LAYERS[0]) as caught:
            records = [monitor.measure(step).record() for step in range(3)]
    assert len(caught) == 1
    for record in records:
        assert LAYERS[0] in record.absent
        assert set(record.scalars(["hdi"])) == {f"hdi/{LAYERS[1]}", "hdi/mean", "hdi/min"}


def test_mean_and_minimum_are_over_the_layers(model):
    with HeadDiversityMonitor(model) as monitor:
        tags = monitor.measure(step=0).record().scalars(["hdi"])
    index = [tags[f"hdi/{name}"] for name in LAYERS]
    assert tags["hdi/mean"] == pytest.approx(sum(index) / 2)
    assert tags["hdi/min"] == min(index)


def test_closing_the_monitor_removes_its_hooks(model):
    def hooks():
        return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())

    with pytest.raises(RuntimeError, match="mine"), HeadDiversityMonitor(model):
        assert hooks() > 0
        raise RuntimeError("mine")
    assert hooks() == 0


def test_no_hook_is_installed_when_no_metric_needs_it(model):
    with HeadDiversityMonitor(model, metrics=["hdi"], check_heads=False) as monitor:
        for arms in (False, True):
            if arms:
                monitor.arm()
            assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules()), arms


def test_a_model_without_attention_is_reported_with_the_modules_that_were_found():
    with pytest.warns(MonitoringWarning, match=r"Sequential.*Linear, ReLU, Sequential.*register_layout"):
        HeadDiversityMonitor(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    with pytest.raises(MisconfigurationError, match="nothing to watch"):
        HeadDiversityMonitor(nn.Sequential(nn.Linear(4, 4)), strict=True)


@pytest.mark.slow
def test_armed_steps_leave_no_tensor_behind():
    model = Classifier(blocks=1, width=8, num_heads=2)
    x = tokens(2)
    with HeadDiversityMonitor(model) as monitor, warnings.catch_warnings():
        alive = []
        for step in range(300):
            monitor.arm()
            with torch.no_grad():
                model(x)
            monitor.measure(step).record()
            if step in (100, 299):
                gc.collect()
                alive.append(sum(isinstance(item, torch.Tensor) for item in gc.get_objects()))
    assert alive[0] == alive[1]


def test_a_layer_on_the_meta_device_loses_only_its_own_readings(model):
    with HeadDiversityMonitor(model) as monitor:
        monitor.arm()
        model(tokens())
        model.blocks[0].attn.to("meta")
        with pytest.warns(MonitoringWarning, match="meta"):
            record = monitor.measure(step=0).record()
    assert "meta device" in record.absent[LAYERS[0]]
    assert record.layers[LAYERS[0]].values == {}
    assert {"hdi", "head_correlation"} <= set(record.layers[LAYERS[1]].values)


def test_a_reading_works_with_the_largest_max_tokens(model):
    with HeadDiversityMonitor(model, max_tokens=sys.maxsize) as monitor:
        monitor.arm()
        model(tokens())
        assert monitor.measure(step=0).record().layers[LAYERS[0]].values["head_correlation"] < 1


def test_the_default_device_of_the_user_changes_no_reading(model):
    ids = tokens()

    def read() -> list[str]:
        found = []
        with HeadDiversityMonitor(model, metrics=sorted(METRICS)) as monitor:
            for step in range(2):
                monitor.arm()
                model(ids).sum().backward()
                record = monitor.measure(step=step).record()
                for name, layer in record.layers.items():
                    found.append(repr((name, layer.values, layer.arrays, layer.matrices)))
                found.append(repr(sorted(record.absent.items())))
        return found

    expected = read()
    with torch.device("meta"):  # as after `torch.set_default_device`
        found = read()
    assert found == expected


def test_two_monitors_of_one_model_read_the_same():
    model = nn.Sequential(nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True))
    x = torch.randn(2, 6, 32)
    with HeadDiversityMonitor(model) as first, HeadDiversityMonitor(model) as second:
        first.arm()
        second.arm()
        with HeadDiversityMonitor(model) as third:
            assert [layer.name for layer in third.layers] == ["0.self_attn"]
            model(x).sum().backward()
        values = [monitor.measure(0).record().layers["0.self_attn"].values for monitor in (first, second)]
    assert "head_correlation" in values[0]
    assert values[0] == values[1]
    assert "forward" not in vars(model[0].self_attn)


@pytest.mark.parametrize("is_frozen", [True, False])
def test_outputs_that_the_fast_path_of_torch_computed_are_absent_with_that_reason(is_frozen):
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = nn.ModuleDict({"teacher": nn.TransformerEncoder(block, 1, enable_nested_tensor=False), "own": Classifier()})
    model["teacher"].eval().requires_grad_(not is_frozen)
    with HeadDiversityMonitor(model) as monitor, pytest.warns(MonitoringWarning, match="fast path"):
        monitor.arm()
        with torch.set_grad_enabled(is_frozen):
            model["teacher"](torch.randn(2, 6, 32))
        model["own"](tokens()).sum().backward()
        record = monitor.measure(0).record()
    assert "takes torch's fast path" in record.absent["head outputs/teacher.layers.0.self_attn"]
    assert "head_correlation" in record.layers["own.blocks.0.attn"].values


def test_a_weight_that_is_a_parameter_is_looked_up_once_per_reading(model, monkeypatch):
    asked = []
    of = AttentionLayer.weight

    def asking(layer, role):
        asked.append((layer.name, role))
        return of(layer, role)

    monkeypatch.setattr(AttentionLayer, "weight", asking)
    with HeadDiversityMonitor(model, metrics=["default", *RULE_METRICS]) as monitor:
        for step in range(2):
            asked.clear()
            monitor.arm()
            model(tokens())
            before = monitor.measure(step).record()
            assert sorted(asked) == sorted((name, role) for name in LAYERS for role in ROLES)
        with torch.no_grad():
            key = model.get_submodule(LAYERS[0]).k_proj
            key.weight = nn.Parameter(torch.eye(WIDTH))  # another parameter in its place is read at the next reading
        after = monitor.measure(3).record()
    assert after.layers[LAYERS[0]].values["hdi"] == pytest.approx(1)
    assert before.layers[LAYERS[0]].values["hdi"] < 0.99


def test_the_default_settings_log_at_most_eight_curves_per_layer(model, tmp_path):
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    heads = watch_heads(model, optimizer, every_n_steps=1, log_dir=tmp_path, tensorboard=True, verbose=False)
    with heads.step():
        model(tokens()).sum().backward()
        optimizer.step()
    heads.close()
    events = EventAccumulator(str(next(tmp_path.rglob("events.*"))))
    tags = events.Reload().Tags()["scalars"]
    for name in LAYERS:
        assert 1 <= sum(tag.endswith(f"/{name}") for tag in tags) <= 8


class Fused(nn.Module):
    """Attention by torch's kernel, which forms no matrix of all scores."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def test_attention_rows_form_no_matrix_of_all_queries_and_keys():
    T, metrics = 512, ["attention_entropy", "attention_sink", "attention_overlap", "attention_logit"]
    model, x = nn.Sequential(Fused()), torch.randn(1, T, 16)
    with HeadDiversityMonitor(model, metrics=metrics) as monitor:
        for step in range(2):  # the first reading checks the heads as well
            monitor.arm()
            with TensorSizes() as sizes:
                model(x)
                reading = monitor.measure(step)
            assert set(metrics) <= reading.record().layers["0"].values.keys()
            assert sizes.largest < T * T


@pytest.mark.parametrize("metric", ["head_covariance", "token_rank"])
def test_ranks_agree_on_a_captured_forward_if_only_outputs_or_only_inputs_are_captured(model, metric, monkeypatch):
    armed = []
    with HeadDiversityMonitor(model, metrics=[metric]) as monitor:
        join = monitor._rendezvous.join
        monkeypatch.setattr(
            monitor._rendezvous, "join", lambda *args, **more: armed.append(more["is_armed"]) or join(*args, **more)
        )
        for step in range(3):
            if step == 1:
                monitor.arm()
                model(tokens())
            monitor.measure(step)
    assert armed == [False, True, False]
