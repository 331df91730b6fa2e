"""A reading that keeps no samples for the comparison with claims sees the same attention as one that does."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hdi_callback.attention.observe import AttentionObserver, map_log


class Mixing(nn.Module):
    """Attention whose heads are mixed by a linear map, before the softmax, after it, or not at all."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.qkv, self.mix, self.out = where, nn.Linear(16, 48), nn.Linear(4, 4), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if self.where == "kernel":
            return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        scores = q @ k.mT / 2
        if self.where == "normed scores":
            scores = F.layer_norm(scores, scores.shape[-1:])
        if self.where == "scores":
            scores = self.mix(scores.movedim(1, -1)).movedim(-1, 1)
        weights = scores.softmax(-1)
        if self.where == "weights":
            weights = self.mix(weights.movedim(1, -1)).movedim(-1, 1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


def readings(model: nn.Module, *, keeps_samples: bool) -> list[tuple[object, ...]]:
    observer = AttentionObserver(model, reduce_rows=lambda chunk: chunk.weights.double().square().sum())
    observer.arm(keeps_samples=keeps_samples)
    model(torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1)))
    observer.disarm()
    assert not observer.failures
    return [(core.kind, core.unread, core.changed, None if core.rows is None else float(core.rows))
            for core in observer.cores]  # fmt: skip


@pytest.mark.parametrize("where", ["kernel", "nowhere", "scores", "normed scores", "weights"])
def test_later_readings_without_samples_observe_the_same_attention(where):
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(16), Mixing(where))
    later = readings(model, keeps_samples=False)
    assert later == readings(model, keeps_samples=True)
    if where != "weights":  # what is averaged with is no softmax then
        assert len(later) == 1
        assert (later[0][3] is None) == (where == "scores")


def test_linear_maps_and_norms_are_not_recorded_if_no_samples_are_kept(monkeypatch):
    examined = []
    for name in ("map_ran", "norm_ran", "module_ran"):
        monkeypatch.setattr(map_log.MapLog, name, lambda *args, name=name, **options: examined.append(name))
    model = nn.Sequential(nn.LayerNorm(16), Mixing("kernel"), nn.BatchNorm1d(5))
    readings(model, keeps_samples=True)
    assert set(examined) == {"map_ran", "norm_ran", "module_ran"}
    examined.clear()
    readings(model, keeps_samples=False)
    assert examined == []
