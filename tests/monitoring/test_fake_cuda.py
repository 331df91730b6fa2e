"""Readings of a model on a CUDA device that is made up: devices, types and shapes, and no value.

The CUDA build of torch runs this without a GPU, under `FakeTensorMode`. A backward needs a device, and so do events.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from hdi_callback import HeadDiversityMonitor
from hdi_callback.monitoring.metrics import METRICS
from hdi_callback.monitoring.readings import Readout
from tests.skips import NEEDS_CUDA_BUILD

pytestmark = pytest.mark.skipif(not torch.backends.cuda.is_built(), reason=NEEDS_CUDA_BUILD)

READ = {
    "query", "key", "value", "output", "QK circuits", "OV circuits", "finiteness of weights", "movement of weights",
    "key updates", "QK circuits of updates", "OV circuits of updates", "head outputs", "head contributions",
    "keys as they come", "input tokens",
}  # fmt: skip


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(32, 32, device="cuda") for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (proj(x).unflatten(-1, (4, -1)).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj))
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Event:
    """Stands in for one of CUDA, which only a device has."""

    def record(self, stream: object) -> None:
        self.stream = stream

    def query(self) -> bool:
        return True


@pytest.mark.filterwarnings("ignore::hdi_callback.errors.MonitoringWarning")  # of what fake tensors do not show
def test_a_reading_of_a_model_on_cuda_stays_on_it_until_it_travels_in_one_copy(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    with FakeTensorMode():
        model = nn.Sequential(Attention(), Attention())
        with HeadDiversityMonitor(model, metrics=list(METRICS)) as monitor:
            assert [layer.name for layer in monitor.layers] == ["0", "1"]
            assert {layer.num_heads for layer in monitor.layers} == {4}
            for step in (0, 1):
                monitor.arm()
                model(torch.empty(2, 8, 32, device="cuda"))
                reading = monitor.measure(step)
                values = [value for one in reading.measurements for value in vars(one.values).values()]
                assert {one.source for one in reading.measurements} == READ
                assert {value.device.type for value in values} == {"cuda"}
                readout = Readout(reading)
                (host,) = readout._hosts.values()
                assert host.numel() == sum(value.numel() for value in values)
                assert host.dtype == torch.float64
                assert [event.stream for event in readout._events] == ["stream of cuda:0"]
                assert readout.is_ready()
        assert {name.partition("/")[0] for name in reading.absent} == {"attention rows", "head importance"}
