"""The host never waits for the GPU, and little of its memory is taken, none for longer than a reading."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch

from hdi_callback import HeadDiversityMonitor, find_attention, watch_heads
from hdi_callback.monitor.metrics import WEIGHT_SOURCES
from hdi_callback.monitor.reading import Absent
from hdi_callback.monitor.weight_source import WeightReader
from tests.core.no_sync import Crossings
from tests.studies.gpu.training import DEVICE, Gpt, batch, note

pytestmark = pytest.mark.gpu
TOKENS = 256


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_waiting_is_noticed_here():
    with pytest.raises(RuntimeError, match="synchronizing"), waiting_is_an_error():
        torch.ones((), device=DEVICE).item()


@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neither_arming_nor_measuring_waits(dtype, key_heads):
    model = Gpt(key_heads=key_heads).to(DEVICE, dtype)
    batches = [batch(step) for step in range(5)]
    optimizer = torch.optim.AdamW(model.parameters())
    readings = []
    with HeadDiversityMonitor(model, max_tokens=TOKENS) as monitor:
        for step, tokens in enumerate(batches):
            with nullcontext() if step == 0 else waiting_is_an_error():  # the first call shows the heads
                monitor.arm()
                model(tokens).backward()
                readings.append(monitor.measure(step))
                optimizer.step()
                optimizer.zero_grad()
    values = readings[-1].record().layers["blocks.0.attention"].values
    assert {"hdi", "head_covariance", "attention_entropy", "head_movement_min"} <= values.keys()


def test_weights_of_the_last_reading_stay_on_the_gpu():
    model = Gpt().to(DEVICE)
    layers = find_attention(model, lambda: model(batch(0)))
    reader = WeightReader(WEIGHT_SOURCES)
    for step in range(3):
        with torch.no_grad(), Crossings() as made:
            results = reader.measure(step, layers, Absent())
        assert len(results) == len(WEIGHT_SOURCES)
        assert not made.names


def test_masks_of_padding_are_not_waited_for():
    model = torch.nn.MultiheadAttention(64, 4, batch_first=True).to(DEVICE)
    x, padding = torch.randn(3, 16, 64, device=DEVICE), torch.arange(16, device=DEVICE).expand(3, 16) > 11
    with HeadDiversityMonitor(model) as monitor:
        for step in range(3):
            with nullcontext() if step == 0 else waiting_is_an_error():
                monitor.arm()
                model(x, x, x, key_padding_mask=padding, need_weights=False)[0].sum().backward()
                reading = monitor.measure(step)
    assert {"head_covariance", "attention_entropy"} <= reading.record().layers["the model"].values.keys()


def test_steps_between_readings_do_not_wait(tmp_path: Path):
    model = Gpt().to(DEVICE)
    batches = [batch(step) for step in range(8)]
    optimizer = torch.optim.AdamW(model.parameters())
    with watch_heads(model, optimizer, every_n_steps=4, log_dir=tmp_path) as heads:
        for step, tokens in enumerate(batches):
            with nullcontext() if step == 0 else waiting_is_an_error(), heads.step():
                loss = model(tokens)
                loss.backward()
                heads.loss = loss
                optimizer.step()
                optimizer.zero_grad()
    assert "hdi/mean" in heads.latest


def test_a_reading_takes_bounded_memory_and_leaves_none():
    model = Gpt(layers=6).to(DEVICE)
    tokens = batch(0, size=64)
    width = model.head.in_features

    def step(monitor: HeadDiversityMonitor | None, number: int) -> tuple[int, int]:
        torch.cuda.reset_peak_memory_stats()
        if monitor is not None:
            monitor.arm()
        model(tokens).backward()
        if monitor is not None:
            monitor.measure(number).record()
        model.zero_grad()
        return torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()

    step(None, 0)
    alone, before = step(None, 0)
    with HeadDiversityMonitor(model, max_tokens=TOKENS) as monitor:
        step(monitor, 0)
        found = [step(monitor, number) for number in range(1, 4)]
    left = [own for _, own in found]
    taken = max(highest for highest, _ in found) - alone
    note(f"peak: {alone / 2**20:.1f} MiB, a reading adds {taken / 2**20:.1f} and leaves {left[-1] - before} bytes")
    assert left == left[:1] * 3
    assert left[0] - before < 2**25  # the workspace of a library that was not used before
    kept = 6 * TOKENS * 2 * width * 4  # outputs and inputs of each layer
    assert taken < 2 * kept + 2 * 2**26  # and the temporaries of a product
