"""What a monitor promises: training is not touched, nothing is missing in silence, misuse is an error."""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from unittest.mock import patch
from weakref import ref

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import hdi_callback
from hdi_callback.attention.capture.capture import Captured
from hdi_callback.core import attention_rows
from hdi_callback.core.movement import movement_sums
from hdi_callback.errors import MisconfigurationError, MonitoringWarning, NothingToWatchError
from hdi_callback.monitor import HeadDiversityMonitor, Reading
from hdi_callback.monitor import monitor as monitors
from hdi_callback.monitor import weight_source as weights_of_monitor
from hdi_callback.monitor.forward_source import FORWARD, measure_forwards
from hdi_callback.monitor.metrics import FORWARD_SOURCES, MOVEMENT, OUTPUTS, SOURCES, TRAINING, WEIGHT_SOURCES
from hdi_callback.monitor.parameter_source import ParameterReader
from hdi_callback.monitor.ranks import Ranks
from hdi_callback.monitor.reading import Absent
from hdi_callback.monitor.weight_source import WeightReader
from tests.core.no_sync import Crossings
from tests.monitor.models import Model, after_a_call

X = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(0))


def train(*, watched: bool, steps: int = 4) -> tuple[list[float], list[torch.Tensor], torch.Tensor]:
    torch.manual_seed(0)
    model = Model(2, dropout=0.2)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    monitor = HeadDiversityMonitor(model) if watched else None
    losses = []
    for step in range(steps):
        if monitor is not None:
            monitor.arm()
        loss = model(X).square().mean()
        loss.backward()
        if monitor is not None:
            reading = monitor.measure(step)
        optimizer.step()
        optimizer.zero_grad()
        if monitor is not None:
            assert reading.record().layers.keys() == {"layers.0", "layers.1"}
        losses.append(float(loss))
    return losses, [one.detach().clone() for one in model.parameters()], torch.get_rng_state()


def test_training_is_bit_identical_with_a_reading_at_every_step():
    losses, weights, state = train(watched=False)
    watched_losses, watched_weights, watched_state = train(watched=True)
    assert watched_losses == losses
    assert all(torch.equal(one, other) for one, other in zip(watched_weights, weights))
    assert torch.equal(watched_state, state)


def test_measuring_waits_for_nothing_before_the_record():
    """On the meta device, which has no numbers, everything that reads one raises."""
    model = Model(2)
    layers = after_a_call(model, lambda: model(X)).layers
    model.to("meta")
    captured = {}
    for layer in layers:
        rows = attention_rows(torch.zeros(1, 2, 4, 5, 5, device="meta"), layers=True), 0
        captured[layer.name] = Captured(
            outputs=torch.zeros(20, 4, 8, device="meta"), valid=torch.ones(20, dtype=torch.bool, device="meta"),
            rows=[rows],
        )  # fmt: skip
    absent, reader = Absent(), WeightReader(SOURCES)
    results = [*reader.measure(0, layers, absent)[0], *reader.measure(1, layers, absent)[0]]
    parameters = ParameterReader()
    parameters.look(model, layers)
    results += [result for step in range(2) for result in parameters.measure(step, with_changes=True)]
    results += measure_forwards(FORWARD, layers, captured, reader.output_weights, Ranks([]), absent)[0]
    assert not absent
    assert {result.source for result in results} == {*SOURCES, TRAINING}
    record = Reading(0, [layer.name for layer in layers], results, absent).record()
    assert record.layers["layers.0"].values == {"trains": 1.0}


class Draws(TorchDispatchMode):
    """A mode of a user's that draws a random number at every operation."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        torch.rand(())
        return func(*args, **(kwargs or {}))


class Counts(TorchFunctionMode):
    calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_modes_of_the_user_and_autocast_do_not_see_the_measuring():
    model = Model(2)
    with HeadDiversityMonitor(model) as monitor:
        monitor.arm()
        model(X).sum().backward()
        state = torch.get_rng_state()
        plain = after_a_call(model, lambda: model(X), metrics=["hdi"])
        with Counts() as counts, Draws(), torch.autocast("cpu", dtype=torch.bfloat16):
            before = counts.calls
            reading = monitor.measure(0)
            assert counts.calls == before
        assert torch.equal(torch.get_rng_state(), state)
    values = reading.record().layers["layers.0"].values
    assert values["hdi"] == plain.measure(0).record().layers["layers.0"].values["hdi"]


def test_one_reading_passes_through_few_files():
    model = Model(2)
    root = Path(hdi_callback.__file__).parent
    files = set()

    def note(frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(root):
            files.add(str(path.relative_to(root)))

    with HeadDiversityMonitor(model) as monitor:
        for step in range(5):  # the fifth is compared with the contract as well, the sixth is not
            monitor.arm()
            model(X).sum().backward()
            monitor.measure(step).record()
        sys.setprofile(note)
        try:
            monitor.arm()
            model(X).sum().backward()
            monitor.measure(5).record()
        finally:
            sys.setprofile(None)
    outside = {name for name in files if not name.startswith("attention")}
    assert len(outside) <= 20, sorted(outside)


# --- absent, with its reason


def test_a_reading_without_an_armed_forward_says_so():
    model = Model(1)
    with after_a_call(model, lambda: model(X)) as monitor:
        layer = monitor.measure(0).record().layers["layers.0"]
    assert {"hdi", "circuit_qk_norm"} <= layer.values.keys()
    assert layer.absent[OUTPUTS] == "no forward was armed before this reading"
    assert set(FORWARD_SOURCES) <= layer.absent.keys()


def test_an_evaluation_is_not_captured():
    model = Model(1)
    with HeadDiversityMonitor(model) as monitor:
        monitor.arm()
        model(X).sum().backward()
        one = monitor.measure(0).record().layers["layers.0"].values
        monitor.arm()
        model(X).sum().backward()
        monitor.pause()
        with torch.no_grad():
            model(3 * X)
        model(3 * X)
        monitor.go_on()
        two = monitor.measure(1).record().layers["layers.0"].values
    assert two["head_covariance"] == one["head_covariance"]


def test_an_evaluation_takes_the_fast_path_of_torch_encoders(monkeypatch):
    calls = []
    fast = torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", lambda *a, **k: calls.append(1) or fast(*a, **k))
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, batch_first=True, dropout=0.0), 2)
    with HeadDiversityMonitor(model) as monitor:
        for step in range(2):
            monitor.go_on()
            monitor.arm()
            model.train()(X).sum().backward()
            record = monitor.measure(step).record()
            assert all("head_covariance" in layer.values for layer in record.layers.values())
            monitor.pause()
            with torch.no_grad():
                model.eval()(X)
            assert len(calls) == 2 * (step + 1)


def test_what_was_captured_is_forgotten_when_disarmed():
    model = Model(1)
    with HeadDiversityMonitor(model) as monitor:
        monitor.arm()
        model(X).sum().backward()
        monitor.disarm()
        layer = monitor.measure(0).record().layers["layers.0"]
    assert "head_covariance" not in layer.values


def test_one_source_that_fails_leaves_the_others(monkeypatch):
    def broken(*args):
        raise FloatingPointError("no such number")

    model = Model(2)
    monkeypatch.setattr(weights_of_monitor, "circuit_sums", broken)
    monkeypatch.setattr("hdi_callback.monitor.forward_source.row_metrics", broken)
    with HeadDiversityMonitor(model) as monitor:
        monitor.arm()
        model(X).sum().backward()
        record = monitor.measure(0).record()
    for layer in record.layers.values():
        assert {"hdi", "weights_not_finite", "head_covariance"} <= layer.values.keys()
        assert layer.absent["OV circuits"] == "measuring it failed (FloatingPointError: no such number)"
        assert "no such number" in layer.absent["attention rows"]


def test_weights_beyond_the_limit_are_not_kept(monkeypatch):
    monkeypatch.setattr(weights_of_monitor, "_LARGEST_KEPT", 0)
    model = Model(1)
    with after_a_call(model, lambda: model(X)) as monitor:
        monitor.measure(0)
        layer = monitor.measure(1).record().layers["layers.0"]
    assert "head_movement_min" not in layer.values
    assert "GiB" in layer.absent[MOVEMENT]


@pytest.mark.parametrize(("budget", "crossings"), [(2**28, []), (0, ["copy_", "_to_copy"])])
def test_weights_of_the_last_reading_stay_on_the_device_up_to_a_budget(budget, crossings, monkeypatch):
    monkeypatch.setattr(weights_of_monitor, "_LARGEST_ON_DEVICE", budget)
    reader = WeightReader({MOVEMENT})
    with FakeTensorMode(), Crossings() as made:  # a GPU that need not be there
        weights = torch.empty(4, 3, 2, 8, 32, device="cuda")
        reader._keep((("a", "b", "c"), ("key",)), weights)
        movement_sums(weights, *reader._next.values())
    assert made.names == crossings


def _numbers(readings):
    return [
        [[*layer.values.items(), *layer.heads.items()] for layer in each.record().layers.values()] for each in readings
    ]


def _read(is_later, worker=None):
    """Read at three steps, between which all weights and outputs change, and make the numbers at once or at the end."""
    torch.manual_seed(0)
    model, readings = Model(2), []
    with after_a_call(model, lambda: model(X)) as monitor:
        for step in range(3):
            monitor.arm()
            model(X + step).sum().backward()
            readings.append(monitor.measure(step))
            if worker is not None:
                worker.submit(readings[-1].record)
            elif not is_later:
                readings[-1].record()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.normal_()
        return _numbers(readings)


def test_numbers_are_those_of_the_step_whenever_and_wherever_they_are_made():
    at_once = _read(is_later=False)
    assert str(_read(is_later=True)) == str(at_once)
    with ThreadPoolExecutor(1) as worker:
        assert str(_read(is_later=True, worker=worker)) == str(at_once)
    assert len({str(numbers) for numbers in at_once}) == 3


def test_nothing_of_a_reading_stays_once_its_record_is_made():
    model, kept = Model(2), []
    with after_a_call(model, lambda: model(X)) as monitor:
        original = weights_of_monitor._Stacks
        with patch.object(weights_of_monitor, "_Stacks", lambda *args: kept.append(original(*args)) or kept[-1]):
            record = monitor.measure(0).record()
    stacks = [ref(each) for each in kept]
    kept.clear()
    assert {"hdi"} <= record.layers["layers.0"].values.keys()
    assert [each() for each in stacks] == [None]


def test_what_cannot_be_measured_later_has_a_reason_and_the_next_reading_goes_on(monkeypatch):
    model = Model(1)
    with after_a_call(model, lambda: model(X)) as monitor:
        with monkeypatch.context() as patched:
            patched.setattr(WeightReader, "_measured", lambda *args: 1 / 0)
            broken = monitor.measure(0)
            broken.complete()
        fresh = monitor.measure(1).record().layers["layers.0"]
    layer = broken.record().layers["layers.0"]
    assert {"trains"} == layer.values.keys()
    assert "ZeroDivisionError" in layer.absent["key weights"]
    assert {"hdi", "circuit_ov_norm"} <= fresh.values.keys()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="only where processes fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_process_forks_once_what_a_thread_measures_is_done():
    events, begun = [], Event()

    def measure(absent):
        begun.set()
        time.sleep(0.3)
        events.append("measured")
        return []

    reading = Reading(0, [], [], {}, later=[measure])
    with ThreadPoolExecutor(1) as worker:
        worker.submit(reading.complete)
        assert begun.wait(10)
        child = os.fork()
        if child == 0:
            os._exit(len(events))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert events == ["measured"]


def test_weights_that_are_not_kept_are_measured_at_once(monkeypatch):
    kept = _read(is_later=True)
    monkeypatch.setattr(weights_of_monitor, "_LARGEST_KEPT", 0)
    monkeypatch.setattr("hdi_callback.monitor.forward_source._LARGEST_LATER", 0)
    for ours, theirs in zip(_read(is_later=True), kept):
        for numbers, expected in zip(ours, theirs):
            assert numbers
            assert str(dict(numbers)) == str({name: dict(expected)[name] for name, _ in numbers})


def test_a_metric_that_is_asked_for_is_all_that_is_measured():
    model = Model(1)
    with after_a_call(model, lambda: model(X), metrics=["circuit_qk_norm"]) as monitor:
        layer = monitor.measure(0).record().layers["layers.0"]
    assert {"hdi", "circuit_qk_norm"} <= layer.values.keys()
    assert not {"circuit_ov_norm", "weights_not_finite"} & layer.values.keys()
    assert not layer.absent


def _replaced(attention: nn.Module, name: str) -> None:
    setattr(attention, name, nn.Linear(32, getattr(attention, name).out_features))


NEW_WEIGHTS = {
    "in place": lambda attention, name: getattr(attention, name).weight.copy_(torch.randn(1, 32)),
    "new memory": lambda attention, name: setattr(
        getattr(attention, name).weight, "data", torch.randn_like(getattr(attention, name).weight)
    ),
    "a new parameter": lambda attention, name: setattr(
        getattr(attention, name), "weight", nn.Parameter(torch.randn_like(getattr(attention, name).weight))
    ),
    "a new module": _replaced,
    "a loaded state": lambda attention, name: getattr(attention, name).load_state_dict(
        {key: torch.randn_like(each) for key, each in getattr(attention, name).state_dict().items()}, assign=True
    ),
    "another type": lambda attention, name: getattr(attention, name).to(torch.bfloat16),
    "another type and back": lambda attention, name: getattr(attention, name).to(torch.bfloat16).to(torch.float32),
    "memory of another weight": lambda attention, name: setattr(
        getattr(attention, name).weight, "data", attention.mix.weight.data[: len(getattr(attention, name).weight)]
    ),
}


@pytest.mark.parametrize("name", ["key", "query", "value"])
@pytest.mark.parametrize("change", NEW_WEIGHTS)
def test_a_weight_is_read_where_it_is_now(change, name):
    torch.manual_seed(0)
    model = Model(2)
    with after_a_call(model, lambda: model(X)) as monitor, torch.no_grad():
        monitor.measure(0)
        NEW_WEIGHTS[change](model.layers[1], name)
        measured = monitor.measure(1).record().layers
        absent, names = Absent(), [layer.name for layer in monitor.layers]
        weights, later = WeightReader(WEIGHT_SOURCES).measure(1, monitor.layers, absent)
        fresh = Reading(1, names, weights, absent, later=later).record().layers
    for layer in ("layers.0", "layers.1"):
        of_weights = {key: value for key, value in measured[layer].values.items() if key in fresh[layer].values}
        assert of_weights == fresh[layer].values
    if change != "another type":  # which is not compared with the last one
        assert min(measured["layers.1"].heads[f"{name}_movement"]) > 0


def test_of_a_weight_that_is_computed_since_it_was_found_the_reading_says_why_it_has_no_numbers():
    model = Model(2)
    with after_a_call(model, lambda: model(X)) as monitor, torch.no_grad():
        monitor.measure(0)
        linear = model.layers[1].key
        nn.utils.parametrize.register_parametrization(linear, "weight", nn.Hardtanh(-0.05, 0.05))
        first, changed = monitor.measure(1).record().layers.values()
    assert "hdi" in first.values
    assert not {"hdi", "circuit_qk_norm"} & changed.values.keys()
    assert "circuit_ov_norm" in changed.values
    for source in ("key weights", "QK circuits"):
        assert changed.absent[source].endswith("ParametrizedLinear has no parameter or buffer `weight` any more.)")


# --- which layers


def test_layers_are_found_right_before_the_first_forward():
    model = Model(2)
    with HeadDiversityMonitor(model) as monitor:
        assert monitor.layers == ()
        monitor.arm()
        model(X).sum().backward()
        assert [layer.name for layer in monitor.layers] == ["layers.0", "layers.1"]
        values = monitor.measure(0).record().layers["layers.1"].values
    assert "head_covariance" in values  # of this first forward


@pytest.mark.parametrize(
    ("include", "exclude", "names"),
    [
        (["layers.1"], None, ["layers.1"]),
        (None, ["*.0"], ["layers.1"]),
        (["layers.*"], ["layers.2"], ["layers.0", "layers.1"]),
    ],
)
def test_patterns_choose_layers(include, exclude, names):
    model = Model(3 if exclude == ["layers.2"] else 2)
    with after_a_call(model, lambda: model(X), include=include, exclude=exclude) as monitor:
        assert [layer.name for layer in monitor.layers] == names
        assert list(monitor.measure(0).record().layers) == names


def test_a_part_that_is_called_after_ranks_have_agreed_is_named_as_not_watched(monkeypatch):
    model = nn.ModuleDict({"first": Model(1), "late": Model(1)})
    with HeadDiversityMonitor(model) as monitor:
        monitor.arm()
        model["first"](X).sum().backward()
        monitor.measure(0)
        monkeypatch.setattr(monitors, "number_of_ranks", lambda: 2)
        with pytest.warns(MonitoringWarning, match=r"`late\.layers\.0` is not watched: it was first called"):
            model["late"](X)
        assert [layer.name for layer in monitor.layers] == ["first.layers.0"]


def test_a_failure_in_the_users_forward_is_a_warning(monkeypatch):
    def broken(*args, **kwargs):
        raise ZeroDivisionError("inside")

    model = Model(1)
    monkeypatch.setattr(monitors, "Capture", broken)
    with HeadDiversityMonitor(model), pytest.warns(MonitoringWarning, match="Watching heads failed"):
        model(X).sum().backward()


def test_nothing_remains_when_it_is_closed():
    model = Model(2)
    with HeadDiversityMonitor(model) as monitor:
        model(X)
    monitor.close()
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_a_model_without_attention_is_an_error_at_the_first_reading():
    model = nn.Linear(4, 4)
    with HeadDiversityMonitor(model) as monitor:
        model(torch.randn(2, 4))
        with pytest.raises(NothingToWatchError, match="Run a forward of the model before"):
            monitor.measure(0)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"metrics": ["hdi_worst_pairs"]}, "hdi_worst_pair"),
        ({"metrics": "hdi"}, r"write \['hdi'\]"),
        ({"include": "layers.*"}, "list of patterns"),
        ({"max_tokens": 1}, "at least 2"),
    ],
)
def test_misuse_is_an_error_that_says_what_to_write(arguments, says):
    with pytest.raises(MisconfigurationError, match=says):
        HeadDiversityMonitor(Model(1), **arguments)


def test_a_model_that_is_none_and_a_step_that_is_none_are_errors():
    with pytest.raises(MisconfigurationError, match="Module"):
        HeadDiversityMonitor("gpt2")
    with (
        HeadDiversityMonitor(nn.MultiheadAttention(8, 2)) as monitor,
        pytest.raises(MisconfigurationError, match="step"),
    ):
        monitor.measure(-1)


def test_the_record_of_a_reading_is_plain_and_repeatable():
    model, x = nn.MultiheadAttention(8, 2), torch.randn(3, 5, 8)
    with after_a_call(model, lambda: model(x, x, x)[0]) as monitor:
        reading = monitor.measure(7)
    assert isinstance(reading, Reading)
    one, two = reading.record(), reading.record()
    assert one.step == 7
    assert one.layers["the model"].values == two.layers["the model"].values
