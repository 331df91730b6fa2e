"""Circuits, contributions, finiteness and movement, as the monitor reads them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hdi_callback import HeadDiversityMonitor
from hdi_callback.monitoring.history import History, read_records
from hdi_callback.monitoring.monitor.movement import LastWeights
from tests.core.no_sync import NoSync
from tests.models import HEADS, LAYERS, LENGTH, Classifier, tokens

CIRCUITS = ["circuit_qk", "circuit_qk_worst", "circuit_ov", "circuit_ov_worst"]


@pytest.fixture
def model() -> Classifier:
    torch.manual_seed(0)
    return Classifier()


def weights_of(model: nn.Module, name: str) -> dict[str, torch.Tensor]:
    attn = model.get_submodule(name)
    of = {role: getattr(attn, f"{role}_proj").weight.detach() for role in "qkv"}
    heads = {role: weight.unflatten(0, (HEADS, -1)) for role, weight in of.items()}
    return heads | {"o": attn.out_proj.weight.detach().T.unflatten(0, (HEADS, -1))}


def cosines(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Cosines of the d x d products of each head, written out."""
    products = torch.einsum("hki,hkj->hij", left.double(), right.double()).flatten(1)
    return torch.nn.functional.cosine_similarity(products[:, None], products[None], dim=-1)


def test_circuits_agree_with_products_computed_by_hand(model):
    with HeadDiversityMonitor(model, metrics=CIRCUITS) as monitor:
        record = monitor.measure(step=0).record()
    for name in LAYERS:
        w = weights_of(model, name)
        for kind, truth in (("qk", cosines(w["q"], w["k"])), ("ov", cosines(w["v"], w["o"]))):
            above = truth[torch.triu(torch.ones(HEADS, HEADS, dtype=torch.bool), 1)]
            layer = record.layers[name]
            assert layer.values[f"circuit_{kind}"] == pytest.approx(float(above.mean()), abs=1e-6)
            assert layer.values[f"circuit_{kind}_worst"] == pytest.approx(float(above.max()), abs=1e-6)
            torch.testing.assert_close(layer.matrices[f"circuit_{kind}"].double(), truth, atol=1e-6, rtol=0)
            h, g = layer.arrays[f"circuit_{kind}_worst_pair"]
            assert float(truth[h, g]) == pytest.approx(float(above.max()), abs=1e-6)


def test_a_cloned_head_is_named(model):
    attn = model.get_submodule(LAYERS[0])
    with torch.no_grad():
        for projection in (attn.q_proj, attn.k_proj):
            heads = projection.weight.unflatten(0, (HEADS, -1))
            heads[3].copy_(heads[1])
    with HeadDiversityMonitor(model, metrics=CIRCUITS) as monitor:
        layer = monitor.measure(step=0).record().layers[LAYERS[0]]
    assert layer.values["circuit_qk_worst"] == pytest.approx(1, abs=1e-5)
    assert layer.arrays["circuit_qk_worst_pair"] == [1, 3]
    assert layer.values["circuit_ov_worst"] < 0.9


@pytest.mark.parametrize("beside", [[], ["head_correlation"]], ids=["alone", "beside the covariance"])
def test_contributions_agree_with_head_outputs_computed_by_hand(model, beside):
    recorded = {}
    for name in LAYERS:
        model.get_submodule(name).out_proj.register_forward_pre_hook(
            lambda module, args, name=name: recorded.setdefault(name, args[0].detach().clone())
        )
    with HeadDiversityMonitor(model, metrics=["head_contribution_min", *beside], max_tokens=10_000) as monitor:
        monitor.arm()
        model(tokens())
        record = monitor.measure(step=0).record()
    for name in LAYERS:
        outputs = recorded[name].double().flatten(0, 1).unflatten(-1, (HEADS, -1))
        z = torch.einsum("thk,hkd->thd", outputs, weights_of(model, name)["o"].double())
        truth = z.square().sum(-1).mean(0).sqrt() / z.sum(1).square().sum(-1).mean().sqrt()
        assert record.layers[name].arrays["head_contribution"] == pytest.approx(truth.tolist(), rel=1e-5)
        assert record.layers[name].values["head_contribution_min"] == pytest.approx(float(truth.min()), rel=1e-5)
        assert ("head_correlation" in record.layers[name].values) == bool(beside)  # only what is asked for


def test_non_finite_weights_and_outputs_are_counted_per_head_in_every_role(model):
    attn = model.get_submodule(LAYERS[0])
    with torch.no_grad():
        attn.v_proj.weight.unflatten(0, (HEADS, -1))[2, 0, 0] = torch.nan
        attn.out_proj.weight.T.unflatten(0, (HEADS, -1))[1, 0, 0] = torch.inf
    with HeadDiversityMonitor(model, metrics=["weights_not_finite", "outputs_not_finite"]) as monitor:
        monitor.arm()
        model(tokens())
        layers = monitor.measure(step=0).record().layers
    assert layers[LAYERS[0]].values["weights_not_finite"] == 2
    assert layers[LAYERS[0]].arrays["weights_not_finite"] == [0, 1, 1, 0][:HEADS]
    assert layers[LAYERS[0]].values["outputs_not_finite"] == 1
    assert layers[LAYERS[0]].arrays["outputs_not_finite"] == [0, 0, 1, 0][:HEADS]
    assert layers[LAYERS[1]].values["weights_not_finite"] == 0


def test_movement_is_the_change_since_the_last_reading(model):
    with HeadDiversityMonitor(model, metrics=["head_movement_min"]) as monitor:
        first = monitor.measure(step=0).record()
        before = weights_of(model, LAYERS[0])
        before = {role: weight.clone() for role, weight in before.items()}
        with torch.no_grad():
            for parameter in model.get_submodule(LAYERS[0]).parameters():
                parameter += 0.01 * torch.randn_like(parameter)
            attn = model.get_submodule(LAYERS[0])  # head 2 is frozen
            for role, name in (("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj")):
                getattr(attn, name).weight.unflatten(0, (HEADS, -1))[2] = before[role][2]
            attn.out_proj.weight.T.unflatten(0, (HEADS, -1))[2] = before["o"][2]
        second = monitor.measure(step=10).record()
        again = monitor.measure(step=10).record()
        third = monitor.measure(step=20).record()
    tag = f"head_movement_min/{LAYERS[0]}"
    assert "no earlier reading" in first.absent[tag]
    after = weights_of(model, LAYERS[0])
    change = sum((after[role] - before[role]).double().square().sum((1, 2)) for role in after)
    truth = (change / sum(before[role].double().square().sum((1, 2)) for role in after)).sqrt()
    assert second.layers[LAYERS[0]].arrays["head_movement"] == pytest.approx(truth.tolist(), rel=1e-5)
    assert second.layers[LAYERS[0]].arrays["head_movement"][2] == 0
    assert second.layers[LAYERS[0]].values["head_movement_min"] == 0
    assert tag in again.absent  # the same step says nothing of movement
    assert third.layers[LAYERS[0]].values["head_movement_min"] == 0


@pytest.mark.parametrize("others", [[], ["update_hdi"]])
def test_movement_is_measured_from_the_previous_reading(model, others):
    """Alone, a reading is written over the last one; with curves of updates both are kept till its end."""
    with HeadDiversityMonitor(model, metrics=["head_movement_min", *others]) as monitor:
        monitor.measure(step=0)
        for step in range(1, 5):
            before = {role: weight.clone() for role, weight in weights_of(model, LAYERS[0]).items()}
            with torch.no_grad():
                for parameter in model.get_submodule(LAYERS[0]).parameters():
                    parameter += 0.01 * step * torch.randn_like(parameter)
            record = monitor.measure(step=step).record()
            change = sum(
                (weight - before[role]).double().square().sum((1, 2))
                for role, weight in weights_of(model, LAYERS[0]).items()
            )
            truth = (change / sum(weight.double().square().sum((1, 2)) for weight in before.values())).sqrt()
            assert record.layers[LAYERS[0]].arrays["head_movement"] == pytest.approx(truth.tolist(), rel=1e-5)


def test_movement_is_absent_with_a_warning_if_the_weights_exceed_the_memory_limit(model, monkeypatch):
    with HeadDiversityMonitor(model, metrics=["head_movement_min"]) as monitor:
        monkeypatch.setattr(monitor, "_last_weights", LastWeights(largest=1))
        monitor._weight_sources[-1] = type(monitor._weight_sources[-1])(
            "movement of weights", monitor._weight_sources[-1].roles, monitor._last_weights.movement
        )
        with pytest.warns(match="more than .* of host memory"):
            monitor.measure(step=0)
        record = monitor.measure(step=1).record()
    assert f"head_movement_min/{LAYERS[0]}" in record.absent


def test_the_history_holds_heads_and_pairs(model, tmp_path):
    metrics = [*CIRCUITS, "head_contribution_min", "weights_not_finite", "outputs_not_finite", "head_movement_min"]
    history = History(tmp_path / "history.jsonl")
    with HeadDiversityMonitor(model, metrics=metrics) as monitor:
        history.begin(0, monitor.facts)
        for step in (0, 1):
            monitor.arm()
            model(tokens())
            history.write(monitor.measure(step=step).record())
    _, last = read_records(tmp_path / "history.jsonl")
    layer = last.layers[LAYERS[1]]
    assert set(metrics) <= set(layer.values)
    for name in ("head_contribution", "weights_not_finite", "outputs_not_finite", "head_movement"):
        assert len(layer.arrays[name]) == HEADS
    assert layer.arrays["circuit_qk_worst_pair"][0] < layer.arrays["circuit_qk_worst_pair"][1]


def test_reading_the_heads_never_makes_the_host_wait(model):
    model.to("meta")
    metrics = [*CIRCUITS, "head_contribution_min", "weights_not_finite", "head_movement_min"]
    metrics += ["update_hdi", "update_circuit_qk", "update_circuit_ov", "head_importance_min"]
    with HeadDiversityMonitor(model, metrics=metrics) as monitor, NoSync():
        monitor.arm()
        model(torch.zeros(2, LENGTH, dtype=torch.long, device="meta")).sum().backward()
        reading = monitor.measure(step=0)
    assert {"QK circuits", "OV circuits", "head contributions", "key updates", "head importance"} <= {
        item.source for item in reading.measurements
    }
    assert not reading.record().layers[LAYERS[0]].values
