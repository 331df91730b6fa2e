"""A training run with the monitor reading all the time, bit by bit against the same run without it."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hdi_callback import HeadDiversityMonitor
from hdi_callback.monitoring.metrics import METRICS as CATALOGUE
from tests.models import CLASSES, LENGTH, Classifier

METRICS = list(CATALOGUE)


class TorchClassifier(nn.Module):
    """Torch's own attention, whose head outputs are computed again."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 32)
        block = nn.TransformerEncoderLayer(32, 4, 64, dropout=dropout, batch_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x):
        return self.head(self.blocks(self.embed(x)).mean(1))


def train(kind, *, is_watched: bool, backend: str | None, precision: str, accumulate: int, steps: int = 5) -> list:
    """Everything that training leaves behind, as tensors."""
    torch.manual_seed(0)
    model = kind(dropout=0.2)
    if precision == "bf16-true":
        model.bfloat16()
    # There is no padding, which cannot be known where masks may be made inside a compiled graph.
    monitor = HeadDiversityMonitor(model, metrics=METRICS, padding=None) if is_watched else None
    forward = model if backend is None else torch.compile(model, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(1)
    left = []
    for step in range(steps):
        for part in range(accumulate):
            x = torch.randint(16, (4, LENGTH), generator=data)
            if monitor is not None and part == 0:
                monitor.arm()
            autocast = torch.autocast("cpu", dtype=torch.bfloat16) if precision == "bf16-mixed" else nullcontext()
            with autocast:
                loss = F.cross_entropy(forward(x), x.sum(1) % CLASSES) / accumulate
            loss.backward()
            left.append(loss.detach())
            if monitor is not None and part == 0:
                record = monitor.measure(step).record()
                assert sum(tag.startswith("head_correlation/") for tag in record.scalars(METRICS)) == 2
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    if monitor is not None:
        monitor.close()
    left += [parameter.detach() for parameter in model.parameters()]
    left += [value for state in optimizer.state.values() for value in state.values()]
    return [*left, torch.get_rng_state()]


def require_equal(kind, **options) -> None:
    torch._dynamo.reset()
    alone = train(kind, is_watched=False, **options)
    torch._dynamo.reset()
    watched = train(kind, is_watched=True, **options)
    assert len(alone) == len(watched) > 50
    assert [place for place, (a, b) in enumerate(zip(alone, watched)) if not torch.equal(a, b)] == []


# Some curves cannot be read under torch's own encoder or in compiled graphs, which is said.
SOME_ABSENT = pytest.mark.filterwarnings("ignore::hdi_callback.errors.MonitoringWarning")


@SOME_ABSENT
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("precision", ["32", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("kind", [Classifier, TorchClassifier])
@pytest.mark.some_slow(quick=6)
def test_eager_training_is_bit_identical(kind, precision, accumulate):
    require_equal(kind, backend=None, precision=precision, accumulate=accumulate)


@pytest.mark.slow
@SOME_ABSENT
@pytest.mark.parametrize(("kind", "precision"), [(Classifier, "32"), (TorchClassifier, "bf16-mixed")])
def test_compiled_training_is_bit_identical(kind, precision):
    require_equal(kind, backend="aot_eager", precision=precision, accumulate=1, steps=3)


# --- what stays behind


def test_tensors_of_a_reading_and_a_closed_monitor_are_freed():
    model = Classifier(dropout=0.1)
    alive: list[weakref.ref] = []
    with HeadDiversityMonitor(model, metrics=METRICS) as monitor:
        monitor.arm()
        model(torch.zeros(2, LENGTH, dtype=torch.long)).sum().backward()
        alive += [weakref.ref(capture.outputs) for capture in monitor._taps.captures.values()]
        alive += [weakref.ref(tap._forwards[0].sample.rows) for tap in monitor._taps._taps.values()]
        reading = monitor.measure(0)
        assert [ref() for ref in alive] == [None] * 4, "what was captured"
        alive = [weakref.ref(measurement.values.overlap) for measurement in reading.measurements[:2]]
        record = reading.record()
        assert {matrix.device.type for layer in record.layers.values() for matrix in layer.matrices.values()} == {"cpu"}
        del reading, record
        assert [ref() for ref in alive] == [None] * 2, "what was measured, without waiting for the garbage collector"
    parameter = weakref.ref(model.embed.weight)
    del monitor, model
    gc.collect()
    assert parameter() is None, "a closed monitor holds no model"


@pytest.mark.slow
def test_thousands_of_armed_steps_do_not_grow_the_process():
    model = Classifier(blocks=1, width=8, num_heads=2)
    x = torch.zeros(2, LENGTH, dtype=torch.long)
    grown, tensors = [], []
    with HeadDiversityMonitor(model) as monitor:
        gc.collect()
        tracemalloc.start()
        for step in range(401):
            monitor.arm()
            model(x).sum().backward()
            monitor.measure(step).record()
            model.zero_grad()
            if step in (100, 400):
                gc.collect()
                grown.append(tracemalloc.get_traced_memory()[0])
                tensors.append(sum(type(item) is torch.Tensor for item in gc.get_objects()))
        tracemalloc.stop()
    # 10,000 steps may cost less than a megabyte; one leaked tensor a step would cost several.
    assert grown[1] - grown[0] < 300 * 100
    assert tensors[0] == tensors[1]
