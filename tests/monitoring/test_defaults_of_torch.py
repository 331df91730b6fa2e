"""Types and devices that torch makes tensors with by default, as a program may set them, change no reading."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from examples.train_gpt import GPT
from hdi_callback import HeadDiversityMonitor
from hdi_callback.monitoring.readings import Record
from hdi_callback.monitoring.session.settings import Settings


@contextmanager
def default_type(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("default", [lambda: default_type(torch.float64), lambda: torch.device("meta")])
def test_a_reading_is_the_same_under_any_default_type_and_device(default):
    torch.manual_seed(0)
    model = GPT(layers=1, heads=6, width=384, length=48)  # layers so large are read one by one
    embedded = model.bytes(torch.randint(256, (1, 48)))

    def read(monitor: HeadDiversityMonitor, step: int) -> Record:
        monitor.arm()
        model.blocks(embedded)
        return monitor.measure(step).record()

    with HeadDiversityMonitor(model, **Settings().measuring) as monitor:
        first, expected = (read(monitor, step) for step in (0, 1))
        with default():
            found = read(monitor, 2)
    assert first.layers
    for name, layer in expected.layers.items():
        assert layer.values.keys() >= {"hdi", "circuit_ov", "attention_entropy", "token_rank", "head_movement_min"}
        assert found.layers[name].values == layer.values
        assert found.layers[name].arrays == layer.arrays
    assert found.absent == expected.absent
