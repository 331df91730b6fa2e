"""First steps that show no heads yet, or in an unusual way: training goes on, and the readings are complete."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F

from hdi_callback import MonitoringWarning, NothingToWatchError, head_diversity, watch_heads
from hdi_callback.history import load_history
from hdi_callback.record import Record
from tests.attention.models import Model, batches

STEPS = 4


def records_of(path: Path) -> list[Record]:
    *during, last = load_history(path).records
    assert last.is_last
    return list(during)


def assert_complete(records: list[Record], layers: list[str] | None = None) -> None:
    for record in records:
        assert list(record.layers) == (layers or ["blocks.0.attention", "blocks.1.attention"])
        for layer in record.layers.values():
            assert {"hdi", "head_covariance", "attention_entropy"} <= layer.values.keys(), layer.absent


def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "history.jsonl"


def test_a_closure_is_read_at_every_step_with_the_weights_of_its_first_forward(path: Path) -> None:
    model = Model()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    weights = []
    with watch_heads(model, optimizer, every_n_steps=1, history=str(path)) as heads:
        for x, y in batches(STEPS):
            weights.append(model.blocks[0].attention.qkv.weight[32:64].detach().clone())

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, x, y)
                loss.backward()
                return loss

            with heads.step():
                optimizer.step(closure)
    found = records_of(path)
    assert [record.step for record in found] == list(range(STEPS))
    assert_complete(found)
    for record, weight in zip(found, weights):
        expected = head_diversity(weight.unflatten(0, (4, 8))).subspace.index
        assert record.layers["blocks.0.attention"].values["hdi"] == pytest.approx(float(expected), abs=1e-6)


def steps(model: Any, path: Path, inputs: list[tuple[Tensor, Tensor]], **options: Any) -> Iterator[Any]:
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with watch_heads(model, optimizer, every_n_steps=1, history=str(path), **options) as heads:
        for x, y in inputs:
            with heads.step():
                yield heads, x, y
                optimizer.step()
                optimizer.zero_grad()


def test_an_empty_first_batch_is_waited_out(path: Path) -> None:
    model = Model().eval()  # batch norm takes no empty batch in training
    empty = torch.zeros(0, 9, 32), torch.zeros(0, 9, dtype=torch.long)
    for _, x, _ in steps(model, path, [empty, *batches(2)]):
        model(x).sum().backward()
    found = records_of(path)
    assert [record.step for record in found] == [1, 2]
    assert_complete(found)


class Fails(Model):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 1:
            raise ValueError("the first batch is odd")
        return super().forward(x)


def test_an_error_in_the_first_forward_that_the_user_catches_costs_nothing(path: Path) -> None:
    model = Fails()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with watch_heads(model, optimizer, every_n_steps=1, history=str(path)) as heads:
        for x, y in batches(3):
            try:
                with heads.step():
                    loss_of(model, x, y).backward()
                    optimizer.step()
            except ValueError:  # noqa: PERF203
                continue
    assert_complete(records_of(path))
    assert model.calls == 3


class Late(Model):
    """Drops all layers at first, and the last one for longer."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for block in self.blocks[: (0, 1, 2)[min(self.calls - 1, 2)]]:
            x = block(x)
        return self.head(x)


def test_layers_that_run_later_are_found_when_they_run(path: Path) -> None:
    model = Late()
    for _, x, y in steps(model, path, batches(STEPS)):
        loss_of(model, x, y).backward()
    last = load_history(max(path.parent.glob("*.jsonl"), key=lambda file: file.stat().st_mtime)).records[-2]
    assert_complete([last])


def test_lazy_modules_are_read_once_they_have_weights(path: Path) -> None:
    class Lazy(Model):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.LazyLinear(32)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.first(x))

    model, (x, y) = Lazy(), batches(1)[0]
    optimizer = torch.optim.SGD(model.blocks.parameters(), 0.01)
    with watch_heads(model, optimizer, every_n_steps=1, history=str(path)) as heads:
        for _ in range(3):
            with heads.step():
                loss_of(model, x, y).backward()
                optimizer.step()
    found = records_of(path)
    assert len(found) >= 2
    assert_complete(found)


def test_a_compiled_model_with_lazy_weights_keeps_its_graphs(path: Path) -> None:
    graphs = []
    for is_watched in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(0)
        model = nn.Sequential(nn.LazyLinear(32), Model().eval())
        run, (x, y) = torch.compile(model, backend="aot_eager"), batches(1)[0]
        if is_watched:
            optimizer = torch.optim.SGD(model[1].parameters(), 0.01)
            heads = watch_heads(run, optimizer, every_n_steps=1, history=str(path))
        for _ in range(3):
            if is_watched:
                with heads.step():
                    loss_of(run, x, y).backward()
                    optimizer.step()
            else:
                loss_of(run, x, y).backward()
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    heads.finish()
    assert graphs[0] == graphs[1]
    assert records_of(path)


class Scan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x).cumsum(1)


def test_a_model_without_attention_is_refused_with_what_was_seen(path: Path) -> None:
    model, (x, _) = Scan(), batches(1)[0]
    with pytest.raises(NothingToWatchError, match="no softmax and no fused attention"):
        for _ in steps(model, path, batches(2)):
            model(x).sum().backward()


def test_a_model_whose_modules_are_never_called_is_named_after_some_steps(path: Path) -> None:
    model = Scan()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", MonitoringWarning)
        for _, x, _ in steps(model, path, batches(10)):
            F.linear(x, model.mix.weight).sum().backward()
    assert [str(one.message) for one in caught if "none of its modules has been called" in str(one.message)]


def test_what_is_compiled_elsewhere_in_the_process_does_not_matter(path: Path) -> None:
    torch.compile(lambda x: x.sin() + 1, backend="eager")(torch.randn(3))
    model = Model()
    for _, x, y in steps(model, path, batches(3)):
        loss_of(model, x, y).backward()
    assert_complete(records_of(path))


def test_torchs_own_encoder_is_read_after_something_was_compiled(path: Path) -> None:
    torch.compile(lambda x: x.cos() + 1, backend="eager")(torch.randn(3))
    model = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True)
    for _, x, _ in steps(model, path, batches(2)):
        model(x).sum().backward()
    assert_complete(records_of(path), ["self_attn"])


@pytest.mark.parametrize("way", ["function around", "whole", "in place", "helper inside"])
def test_compiled_calls_are_read_completely(way: str, path: Path) -> None:
    torch._dynamo.reset()

    class Helped(Model):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.compile(torch.sin, backend="aot_eager")(x))

    model: Any = Helped() if way == "helper inside" else Model()
    run: Any = model
    if way == "function around":
        run = torch.compile(lambda x: model(x) * 1.0, backend="aot_eager")
    elif way == "whole":
        run = torch.compile(model, backend="aot_eager")
    elif way == "in place":
        model.compile(backend="aot_eager")
    for _, x, y in steps(run if way == "whole" else model, path, batches(3)):
        loss_of(run, x, y).backward()
    found = records_of(path)
    assert [record.step for record in found] == [0, 1, 2]
    assert_complete(found)


def test_torchs_own_attention_is_read_completely_in_a_compiled_model(path: Path) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(32, 32), nn.TransformerEncoderLayer(32, 4, 48, batch_first=True))
    run = torch.compile(model, backend="aot_eager")
    for _, x, _ in steps(run, path, batches(2)):
        run(x).sum().backward()
    assert_complete(records_of(path), ["1.self_attn"])


def test_a_compiled_step_of_an_optimizer_that_is_announced_counts(path: Path) -> None:
    torch._dynamo.reset()
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    step = torch.compile(optimizer.step, backend="aot_eager")
    with watch_heads(model, optimizer, every_n_steps=1, history=str(path)) as heads:
        for at, (x, y) in enumerate(batches(3)):
            with heads.step():
                loss_of(model, x, y).backward()
                heads.before_optimizer_step()
                if at != 1:  # as a gradient scaler that skips a step
                    step()
                optimizer.zero_grad()
        assert heads.global_step == 2


def test_settings_of_the_process_come_back_when_two_threads_look_at_once() -> None:
    models = [nn.TransformerEncoderLayer(32, 4, 48, batch_first=True).eval() for _ in range(2)]
    filters = list(warnings.filters)
    barrier = threading.Barrier(2)

    def work(model: nn.Module) -> None:
        from hdi_callback.attention.extra_forward import nothing_remains

        barrier.wait()
        for _ in range(3):
            with nothing_remains(model):
                model(torch.randn(2, 5, 32))

    threads = [threading.Thread(target=work, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.backends.mha.get_fastpath_enabled()
    assert warnings.filters == filters
    torch._dynamo.reset()
    counter = CompileCounter()
    torch.compile(lambda x: x.sin() + 1, backend=counter)(torch.randn(3))
    assert counter.frame_count == 1


class Unread(nn.Module):
    """Attention whose queries come through an operation that is not followed."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q = torch.slice_copy(self.map(x), 2, 0, 8).unflatten(-1, (2, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)


class ReadAndUnread(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.read, self.later, self.map = nn.TransformerEncoderLayer(8, 2, batch_first=True), Unread(), nn.Linear(8, 8)

    def forward(self, x: Tensor, *, is_late: bool = False, is_own: bool = False) -> Tensor:
        x = self.read(x)
        return self.later(x) if is_late else Unread.forward(self, x) if is_own else x  # type: ignore[arg-type]


def test_attention_that_is_not_read_and_runs_late_is_named_when_it_runs(path: Path) -> None:
    model = ReadAndUnread()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watch_heads(model, optimizer, every_n_steps=1, history=str(path)) as heads:
        for step in range(3):
            told = pytest.warns(MonitoringWarning, match=r"Not watched: `later` \(Unread\): .*slice_copy")
            with told if step == 1 else nullcontext(), heads.step():
                model(torch.randn(2, 5, 8), is_late=step > 0).sum().backward()
                optimizer.step()
    assert [list(record.layers) for record in records_of(path)] == [["read.self_attn"]] * 3


def test_attention_in_the_forward_of_the_model_itself_is_named_so(capsys: pytest.CaptureFixture[str]) -> None:
    model = ReadAndUnread()
    with watch_heads(model, torch.optim.SGD(model.parameters(), 0.1), history=False) as heads, heads.step():
        model(torch.randn(2, 5, 8), is_own=True).sum().backward()
    assert "not watched: the model: its queries depend on an operation" in " ".join(capsys.readouterr().out.split())
