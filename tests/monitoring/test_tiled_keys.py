"""Heads that share keys elsewhere than side by side: what is measured is what a model with groups side by side has."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hdi_callback import HeadDiversityMonitor, find_attention
from hdi_callback.errors import MisconfigurationError
from hdi_callback.monitoring.interventions import ReviveHeads
from hdi_callback.monitoring.metrics import METRICS
from hdi_callback.monitoring.readings import Record
from tests.monitoring.interventions.training import Open

D, H, G, WIDTH = 24, 4, 2, 6
ORDER = [0, 2, 1, 3]


class Shared(nn.Module):
    def __init__(self, *, is_tiled: bool, fused: bool) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(D, D), nn.Linear(D, D)
        self.k, self.v = nn.Linear(D, G * WIDTH), nn.Linear(D, G * WIDTH)
        self.is_tiled, self.fused = is_tiled, fused

    def forward(self, x):
        q, k, v = (m(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for m in (self.q, self.k, self.v))
        times = H // G
        k, v = (t.repeat(1, times, 1, 1) if self.is_tiled else t.repeat_interleave(times, 1) for t in (k, v))
        attend = F.scaled_dot_product_attention if self.fused else written_out
        return self.o(attend(q, k, v).transpose(1, 2).flatten(2))


def written_out(q, k, v):
    return (q @ k.mT / WIDTH**0.5).softmax(-1) @ v


def pair(*, fused: bool) -> tuple[nn.Module, nn.Module]:
    """Two models that compute the same; the second has the heads of the first in the order of their keys."""
    torch.manual_seed(0)
    tiled, grouped = (nn.Sequential(Shared(is_tiled=tiled, fused=fused)) for tiled in (True, False))
    grouped.load_state_dict(tiled.state_dict())
    with torch.no_grad():
        for name, dim in (("q.weight", 0), ("q.bias", 0), ("o.weight", 1)):
            parts = tiled[0].get_parameter(name).unflatten(dim, (H, WIDTH))
            chosen = parts.index_select(dim, torch.tensor(ORDER)).flatten(dim, dim + 1)
            grouped[0].get_parameter(name).copy_(chosen)
    return tiled, grouped


def read(model: nn.Module, x: torch.Tensor) -> Record:
    with HeadDiversityMonitor(model, metrics=list(METRICS)) as monitor:
        monitor.arm()
        model(x).square().sum().backward()
        return monitor.measure(step=0).record()


def test_tiled_keys_are_read_with_heads_ordered_by_key_head():
    tiled, _ = pair(fused=False)
    (layer,) = find_attention(tiled)
    assert (layer.num_heads, layer.num_key_heads, layer.head_order) == (H, G, tuple(ORDER))
    assert torch.equal(layer.weight("query"), tiled[0].q.weight.view(H, WIDTH, D)[ORDER])
    assert torch.equal(layer.weight("key"), tiled[0].k.weight.view(G, WIDTH, D))
    assert torch.equal(layer.weight("output"), tiled[0].o.weight.T.reshape(H, WIDTH, D)[ORDER])


@pytest.mark.parametrize("fused", [False, True])
def test_all_metrics_of_tiled_keys_are_those_of_groups_side_by_side(fused):
    tiled, grouped = pair(fused=fused)
    x = torch.randn(3, 9, D)
    torch.testing.assert_close(tiled(x), grouped(x))
    own, expected = (read(model, x) for model in (tiled, grouped))
    assert own.absent == expected.absent
    here, there = own.layers["0"], expected.layers["0"]
    assert {"attention_entropy", "head_importance_min", "circuit_ov", "head_covariance"} <= here.values.keys()
    for what in ("values", "arrays", "matrices"):
        known, truth = getattr(here, what), getattr(there, what)
        assert known.keys() == truth.keys()
        for name, value in truth.items():
            found, real = (torch.as_tensor(one, dtype=torch.float64) for one in (known[name], value))
            torch.testing.assert_close(
                found, real, rtol=1e-4, atol=1e-5, equal_nan=True, msg=f"{name}: {found}, {real}"
            )


class OneKeyHead(nn.Module):
    """All heads share one key head, and each has values of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.v, self.o, self.k = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, WIDTH)

    def forward(self, x):
        q, v = (m(x).unflatten(-1, (H, WIDTH)).transpose(1, 2) for m in (self.q, self.v))
        return self.o(F.scaled_dot_product_attention(q, self.k(x)[:, None].expand_as(q), v).transpose(1, 2).flatten(2))


def test_one_key_head_with_several_value_heads_is_read():
    torch.manual_seed(0)
    model = nn.Sequential(OneKeyHead())
    (layer,) = find_attention(model)
    assert (layer.num_heads, layer.num_key_heads, layer.num_value_heads) == (H, 1, H)
    assert torch.equal(layer.weight("value"), model[0].v.weight.view(H, WIDTH, D))
    assert layer.facts()["num_value_heads"] == H


def test_circuits_and_outputs_with_more_value_heads_are_those_of_the_weights_by_hand():
    torch.manual_seed(0)
    model = nn.Sequential(OneKeyHead())
    found = read(model, torch.randn(3, 9, D)).layers["0"]
    module = model[0]
    values, outputs = module.v.weight.view(H, WIDTH, D), module.o.weight.T.reshape(H, WIDTH, D)
    queries, keys = module.q.weight.view(H, WIDTH, D), module.k.weight.expand(H, WIDTH, D)
    for name, circuits in (("circuit_ov", values.mT @ outputs), ("circuit_qk", queries.mT @ keys)):
        flat = F.normalize(circuits.flatten(1).double(), dim=1)
        similarity = (flat @ flat.T).abs() if found.values[name] >= 0 else flat @ flat.T
        mean = similarity[~torch.eye(H, dtype=torch.bool)].mean()
        assert found.values[name] == pytest.approx(float(mean), abs=1e-4), name
    assert {"head_covariance", "attention_entropy", "hdi_value"} - found.values.keys() == set()


def test_reviving_heads_is_refused_if_values_are_shared_in_other_groups_than_keys():
    model = nn.Sequential(OneKeyHead())
    revive = ReviveHeads()
    with pytest.raises(MisconfigurationError, match="1 key heads and 4 value heads"):
        revive.attach(Open(model))
