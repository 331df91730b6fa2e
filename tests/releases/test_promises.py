"""What must hold on every release of torch: graphs, compiled helpers, prepared autocasts, and unknown internals."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from hdi_callback import HDIWarning, load_history, watch_heads
from hdi_callback.attention import releases
from tests.monitor.models import WIDTH, Attention

STEPS = 14


class Model(nn.Module):
    """Two layers; between them something that may be compiled on its own."""

    def __init__(self, helper: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.first, self.second, self.helper = Attention(), Attention(), helper

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        return x + self.second(self.helper(x))


def train(model: nn.Module, call: Any, history: Path | None, around: Any = None) -> list[float]:
    """Train for `STEPS` steps with a reading at every second, or without a watch; return the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    heads = None if history is None else watch_heads(model, optimizer, every_n_steps=2, history=str(history))
    losses = []
    draw = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        batch = torch.randn(10, 6, WIDTH, generator=draw)
        step = None if heads is None else heads.step()
        if step is not None:
            step.__enter__()
        if around is not None:
            around.__enter__()
        loss = call(batch).float().square().mean()
        if around is not None:
            around.__exit__(None, None, None)
        loss.backward()
        optimizer.step()
        if step is not None:
            step.__exit__(None, None, None)
        optimizer.zero_grad()
        losses.append(loss.item())
    if heads is not None:
        heads.finish()
    return losses


def full_readings(history: Path) -> int:
    """How many readings have attention rows, head outputs and tokens of both layers."""
    complete = {"attention_entropy", "head_covariance"}
    records = load_history(history).records
    return sum(
        len(record.layers) == 2 and all(complete <= layer.values.keys() for layer in record.layers.values())
        for record in records
    )


def build(helper: Callable[[Tensor], Tensor] = torch.tanh) -> Model:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return Model(helper)


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("way", ["wrapped", "in place"])
def test_graphs_with_the_watch_are_those_without(way: str, fullgraph: bool, tmp_path: Path) -> None:
    graphs, losses, weights = [], [], []
    for history in (None, tmp_path / "history.jsonl"):
        model, counter = build(), CompileCounter()
        if way == "wrapped":
            call = torch.compile(model, backend=counter, fullgraph=fullgraph)
        else:
            model.compile(backend=counter, fullgraph=fullgraph)
            call = model
        losses.append(train(model if way == "in place" else call, call, history))
        graphs.append((counter.frame_count, counter.op_count))
        weights.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert graphs[0] == graphs[1]
    assert graphs[0][0] >= 1
    assert losses[0] == losses[1]
    assert torch.equal(*weights)
    assert full_readings(tmp_path / "history.jsonl") == STEPS // 2


def test_a_compiled_function_inside_an_eager_model_stays_compiled(tmp_path: Path) -> None:
    outcomes = []
    for history in (None, tmp_path / "history.jsonl"):
        runs: list[int] = []

        def backend(graph: Any, inputs: Any, runs: list[int] = runs) -> Any:
            def run(*args: Any) -> Any:
                runs.append(1)
                return graph.forward(*args)

            return run

        torch._dynamo.reset()
        model = build(torch.compile(lambda x: torch.tanh(x) * 2, backend=backend))
        losses = train(model, model, history)
        outcomes.append((losses, len(runs)))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][1] == STEPS
    assert full_readings(tmp_path / "history.jsonl") == STEPS // 2


@pytest.mark.parametrize("is_compiled", [False, True])
def test_bf16_under_an_autocast_that_was_prepared_before_keeps_its_gradients(is_compiled: bool, tmp_path: Path) -> None:
    losses = []
    for history in (None, tmp_path / "history.jsonl"):
        model = build()
        if is_compiled:
            model.compile(backend="eager")
        around = torch.autocast("cpu", torch.bfloat16)  # one object for all steps, as accelerate makes it
        losses.append(train(model, model, history, around))
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]
    assert full_readings(tmp_path / "history.jsonl") == STEPS // 2


@pytest.mark.filterwarnings("default::hdi_callback.errors.HDIWarning")
@pytest.mark.parametrize("way", ["eager", "in place", "wrapped"])
def test_a_compiler_that_is_not_known_costs_one_warning_and_no_training(
    way: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    outcomes = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", HDIWarning)
        for history in (None, tmp_path / "history.jsonl"):
            model = build()
            if way == "in place":
                model.compile(backend="eager")
            call = torch.compile(model, backend="eager") if way == "wrapped" else model
            call(torch.zeros(10, 6, WIDTH))  # dynamo is not the one that is taken away below
            releases._inspected.cache_clear()
            with monkeypatch.context() as patched:  # only while it is looked for: dynamo needs it to trace
                patched.delattr(torch._dynamo.eval_frame, "_TorchDynamoContext")
                if history is not None:
                    assert releases.compiler() is None
            outcomes.append(train(call, call, history))
            releases._inspected.cache_clear()
    told = [str(warning.message) for warning in caught if issubclass(warning.category, HDIWarning)]
    assert outcomes[0] == outcomes[1]
    assert sum(torch.__version__.split("+")[0] in message for message in told) == 1, told
    if way != "in place":  # whose hooks run within the graph: it is not read, as the warning says
        assert full_readings(tmp_path / "history.jsonl") == STEPS // 2


@pytest.mark.filterwarnings("error::hdi_callback.errors.HDIWarning")
def test_the_compiler_of_this_torch_is_known() -> None:

    releases._inspected.cache_clear()
    assert releases.compiler() is not None
