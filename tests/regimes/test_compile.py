"""Monitors of compiled models."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch._dynamo
from torch import nn

from hdi_callback import HeadDiversityMonitor, watch_heads
from hdi_callback.errors import MonitoringWarning
from hdi_callback.integrations.loop import HeadSession
from tests.models import LAYERS, LENGTH, Checkpointed, Classifier

METRICS = ["hdi", "head_covariance", "head_correlation"]


pytestmark = pytest.mark.usefixtures("dynamo")


def tokens(batch: int = 4, length: int = LENGTH, seed: int = 0) -> torch.Tensor:
    return torch.randint(16, (batch, length), generator=torch.Generator().manual_seed(seed))


def classifier() -> Classifier:
    torch.manual_seed(0)
    return Classifier()


def torch_classifier() -> nn.Module:
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return nn.Sequential(nn.Embedding(16, 32), nn.TransformerEncoder(block, 2, enable_nested_tensor=False))


def compiled_whole(model: Classifier) -> nn.Module:
    return torch.compile(model, backend="eager")


def compiled_in_place(model: Classifier) -> nn.Module:
    model.compile(backend="eager")
    return model


def compiled_by_block(model: Classifier) -> nn.Module:
    for place, block in enumerate(model.blocks):
        model.blocks[place] = torch.compile(block, backend="eager")
    return model


def compiled_blocks_in_place(model: Classifier) -> nn.Module:
    for block in model.blocks:
        block.compile(backend="eager")
    return model


WAYS = [compiled_whole, compiled_in_place, compiled_by_block, compiled_blocks_in_place]


def read(monitor: HeadDiversityMonitor, model: nn.Module, x: torch.Tensor) -> dict[str, float]:
    monitor.arm()
    model(x).sum().backward()
    return monitor.measure(0).record().scalars(METRICS)


@pytest.mark.some_slow(quick=3)
@pytest.mark.parametrize("is_monitored_first", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_a_compiled_model_reads_as_the_eager_one_under_the_users_names(dynamo, way, is_monitored_first):
    model = classifier()
    with HeadDiversityMonitor(model, metrics=METRICS) as monitor:
        truth = read(monitor, model, tokens())
    assert {f"head_covariance/{name}" for name in LAYERS} < set(truth)
    if is_monitored_first:
        monitor = HeadDiversityMonitor(model, metrics=METRICS)
        compiled = way(model)
    else:
        compiled = way(model)
        monitor = HeadDiversityMonitor(compiled, metrics=METRICS)
    with monitor:
        for _ in range(2):
            compiled(tokens()).sum().backward()
        unarmed = dynamo["stats"]["unique_graphs"]
        for _ in range(3):
            assert read(monitor, compiled, tokens()) == pytest.approx(truth, abs=1e-5)
            compiled(tokens()).sum().backward()
        pieces = 2 if "block" in way.__name__ else 1
        assert dynamo["stats"]["unique_graphs"] - unarmed <= pieces, "one recompilation for each compiled piece"
    assert not dynamo["graph_break"]


@pytest.mark.slow
@pytest.mark.parametrize("make", [classifier, torch_classifier])
def test_sequences_of_different_lengths_compile_no_further_graphs(dynamo, make):
    """Else a monitor would use up the compiler's limit of recompilations, and the model would run uncompiled."""
    shapes = [(3, 12), (3, 13), (4, 14), (5, 17), (2, 20)]

    def graphs(is_armed: bool) -> int:
        torch._dynamo.reset()
        dynamo.clear()
        model = make()
        with HeadDiversityMonitor(model, max_tokens=16, padding=None) as monitor:
            compiled = torch.compile(model, backend="eager")
            for shape in shapes:
                if is_armed:
                    monitor.arm()
                compiled(tokens(*shape))
                if is_armed:
                    record = monitor.measure(0).record()
                    assert sum(tag.startswith("head_cov") for tag in record.scalars(METRICS)) == 2
        assert not dynamo["graph_break"]
        return dynamo["stats"]["unique_graphs"]

    assert graphs(is_armed=True) <= graphs(is_armed=False)


@pytest.mark.some_slow(quick=1)
@pytest.mark.parametrize("kind", [Checkpointed, Classifier])
def test_an_armed_step_leaves_the_model_compiled(kind):
    """What a checkpointed region does not allow would send the whole model back to eager, for the rest of the run."""
    runs = []

    def backend(graph, inputs):
        return lambda *args: runs.append(1) or graph(*args)

    torch.manual_seed(0)
    model = kind()
    with HeadDiversityMonitor(model, metrics=METRICS) as monitor:
        truth = read(monitor, model, tokens())
        compiled = torch.compile(model, backend=backend)
        for _ in range(3):
            assert read(monitor, compiled, tokens()) == pytest.approx(truth, abs=1e-5)
            runs.clear()
            compiled(tokens()).sum().backward()
            assert len(runs) == 1


def test_a_monitor_suspended_during_evaluation_captures_training_again(dynamo):
    model = classifier()
    compiled = torch.compile(model, backend="eager")
    with HeadDiversityMonitor(model, metrics=METRICS) as monitor:
        for _ in range(2):
            monitor.suspend()
            model.eval()
            with torch.no_grad():
                compiled(tokens())
            model.train()
            monitor.resume()
            assert len(read(monitor, compiled, tokens())) == 2 * 3 + 2


@pytest.mark.parametrize("way", WAYS)
def test_a_model_that_ran_compiled_before_the_monitor_came_is_reported_once_with_a_remedy_that_helps(way):
    model = classifier()
    compiled = way(model)
    compiled(tokens()).sum().backward()
    with HeadDiversityMonitor(model, metrics=METRICS) as monitor:
        with pytest.warns(MonitoringWarning, match=r"torch\.compiler\.reset\(\)") as caught:
            readings = [read(monitor, compiled, tokens()) for _ in range(3)]
        assert len(caught) == 1
        for tags in readings:
            assert set(tags) == {*(f"hdi/{name}" for name in LAYERS), "hdi/mean", "hdi/min"}
        torch.compiler.reset()
        assert {f"head_covariance/{name}" for name in LAYERS} < set(read(monitor, compiled, tokens()))


def test_reading_a_compiled_model_compiles_nothing_more(dynamo):
    model = classifier()
    compiled = torch.compile(model, backend="eager")
    with HeadDiversityMonitor(model, metrics=METRICS) as monitor:
        for step in range(3):
            monitor.arm()
            compiled(tokens())
            if step == 1:
                before = dynamo["stats"]["unique_graphs"]
            monitor.measure(step)
        assert dynamo["stats"]["unique_graphs"] == before


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, heads: HeadSession | None = None, *, is_whole_step: bool
) -> list[float]:
    """Train through a compiled function that calls the model; after three steps another graph is an error."""
    losses = []

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        if is_whole_step:
            loss.backward()
        return loss

    compiled = torch.compile(loss_of, backend="eager")
    for step in range(8):
        stance = torch.compiler.set_stance("fail_on_recompile" if step > 2 else "default")
        with nullcontext() if heads is None else heads.step(), stance:
            loss = compiled(tokens(seed=step))
            if not is_whole_step:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.some_slow(quick=1)
@pytest.mark.parametrize("is_whole_step", [False, True])
def test_a_compiled_function_that_calls_the_model_costs_one_more_graph(dynamo, is_whole_step):
    """Modules in its graph are compiled with the hooks that are on them, and anew with any other number of hooks."""
    model = classifier()
    losses = train(model, torch.optim.SGD(model.parameters(), lr=0.1), is_whole_step=is_whole_step)
    graphs = dynamo["stats"]["unique_graphs"]
    torch._dynamo.reset()
    dynamo.clear()
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    metrics = [*METRICS, "attention_entropy"]
    heads = watch_heads(model, optimizer, every_n_steps=2, metrics=metrics, history=False, verbose=False)
    with (
        pytest.warns(MonitoringWarning, match="attention rows.*did not run outside of compiled graphs") as said,
        heads,
    ):
        assert train(model, optimizer, heads, is_whole_step=is_whole_step) == losses
        assert {f"head_covariance/{name}" for name in LAYERS} < set(heads.latest)
    assert dynamo["stats"]["unique_graphs"] == 2 * graphs
    assert len(said) == 1
