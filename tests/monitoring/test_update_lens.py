"""The lenses on what training changed since the last reading."""

from __future__ import annotations

import pytest
import torch

from hdi_callback import HeadDiversityMonitor
from hdi_callback.core import head_diversity, spectral_entropy
from tests.models import HEADS, LAYERS, Classifier

METRICS = [
    "update_hdi", "update_worst_pair", "update_energy", "update_entropy_min", "update_circuit_qk",
    "update_circuit_qk_worst", "update_circuit_ov", "update_circuit_ov_worst",
]  # fmt: skip
ROLES = {"query": "q_proj", "key": "k_proj", "value": "v_proj"}


@pytest.fixture
def model() -> Classifier:
    torch.manual_seed(0)
    return Classifier()


def weights_of(model: Classifier) -> dict[str, torch.Tensor]:
    attn = model.get_submodule(LAYERS[0])
    heads = {
        role: getattr(attn, name).weight.detach().double().unflatten(0, (HEADS, -1)).clone()
        for role, name in ROLES.items()
    }
    return heads | {"output": attn.out_proj.weight.detach().double().T.unflatten(0, (HEADS, -1)).clone()}


def move(model: Classifier, changes: dict[str, torch.Tensor]) -> None:
    attn = model.get_submodule(LAYERS[0])
    with torch.no_grad():
        for role, name in ROLES.items():
            getattr(attn, name).weight += changes[role].flatten(0, 1)
        attn.out_proj.weight += changes["output"].flatten(0, 1).T


def changes(width: int, seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    roles = (*ROLES, "output")
    return {role: 0.05 * torch.randn(HEADS, width // HEADS, width, generator=generator) for role in roles}


def cosines(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    products = torch.einsum("hki,hkj->hij", left, right).flatten(1)
    return torch.nn.functional.cosine_similarity(products[:, None], products[None], dim=-1)


def test_update_curves_agree_with_the_difference_of_two_readings(model):
    with HeadDiversityMonitor(model, metrics=[*METRICS, "head_movement_min"]) as monitor:
        first = monitor.measure(0).record()
        before = weights_of(model)
        move(model, changes(32))
        second = monitor.measure(10).record().layers[LAYERS[0]]
    assert all("no earlier reading" in first.absent[f"{name}/{LAYERS[0]}"] for name in METRICS)
    update = {role: weight - before[role] for role, weight in weights_of(model).items()}
    keys = head_diversity(update["key"])
    assert second.values["update_hdi"] == pytest.approx(float(keys.index), abs=1e-4)
    assert second.values["update_worst_pair"] == pytest.approx(float(keys.worst), abs=1e-4)
    assert second.values["update_energy"] == pytest.approx(float(keys.energy_index), abs=1e-4)
    entropy = spectral_entropy(update["key"])
    assert second.arrays["update_entropy"] == pytest.approx(entropy.tolist(), abs=1e-4)
    assert second.values["update_entropy_min"] == pytest.approx(float(entropy.min()), abs=1e-4)
    above = torch.triu(torch.ones(HEADS, HEADS, dtype=torch.bool), 1)
    for name, (left, right) in {"qk": ("query", "key"), "ov": ("value", "output")}.items():
        truth = cosines(update[left], update[right])[above]
        assert second.values[f"update_circuit_{name}"] == pytest.approx(float(truth.mean()), abs=1e-4)
        assert second.values[f"update_circuit_{name}_worst"] == pytest.approx(float(truth.max()), abs=1e-4)


def test_heads_that_learn_the_same_are_detected_before_their_weights_are_alike(model):
    change = changes(32)
    for one in change.values():
        one[3] = one[1]
    with HeadDiversityMonitor(model, metrics=[*METRICS, "circuit_qk_worst"]) as monitor:
        monitor.measure(0)
        move(model, change)
        layer = monitor.measure(10).record().layers[LAYERS[0]]
    assert layer.values["update_worst_pair"] == pytest.approx(1, abs=1e-3)
    assert layer.arrays["update_worst_pair"] == layer.arrays["update_circuit_qk_worst_pair"] == [1, 3]
    assert layer.values["update_circuit_qk_worst"] == pytest.approx(1, abs=1e-3)
    assert layer.values["hdi_worst_pair"] < 0.5
    assert layer.values["circuit_qk_worst"] < 0.5


def test_update_curves_leave_out_a_still_head_and_are_absent_for_a_still_layer(model):
    change = changes(32)
    change["key"][2] = 0
    with HeadDiversityMonitor(model, metrics=METRICS) as monitor:
        monitor.measure(0)
        move(model, change)
        record = monitor.measure(10).record()
    layer = record.layers[LAYERS[0]]
    others = head_diversity(change["key"][[0, 1, 3]])
    assert layer.values["update_hdi"] == pytest.approx(float(others.index), abs=1e-3)
    assert layer.arrays["update_entropy"][2] != layer.arrays["update_entropy"][2]  # NaN
    assert layer.values["update_entropy_min"] > 0.5
    assert not set(METRICS) & set(record.layers[LAYERS[1]].values)
    assert "fewer than two heads have moved" in record.absent[f"update_hdi/{LAYERS[1]}"]


def test_weights_needed_by_several_curves_are_kept_once(model):
    with HeadDiversityMonitor(model, metrics=[*METRICS, "head_movement_min"]) as monitor:
        monitor.measure(0)
        kept = monitor._last_weights._kept.values()
        assert sum(weight.numel() for weight in kept) == 4 * 32 * 32 * len(LAYERS)
