"""A state read from disk may be anything: valid fields are restored, the rest costs one warning; training goes on."""

from __future__ import annotations

import copy
import json
import math
import warnings
from contextlib import contextmanager

import lightning as L
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hdi_callback import HDICallback, HDITrainerCallback, watch_heads
from hdi_callback.errors import HDIWarning
from hdi_callback.monitoring.atomic import create_atomically, write_atomically
from hdi_callback.monitoring.interventions import Call, ScaleLearningRate
from hdi_callback.monitoring.session.state import valid_state
from hdi_callback.monitoring.warn_once import WarnOnce
from tests.histories import readings
from tests.integrations.test_loop import adam, batch, classifier, loss_of
from tests.integrations.test_transformers import train as train_with_transformers
from tests.models import LIT_LAYERS, batches
from tests.regimes.trainings import Module, trainer_for

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5),
    st.sampled_from([10**9, -1, 10**400, math.nan, "\ud800", "\0", "a" * 5000]),
)  # fmt: skip
anything = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.one_of(st.text(max_size=3), st.sampled_from(["active", "series", "count", "standing"])),
            inner,
            max_size=3,
        ),
    ),
    max_leaves=6,
)
LIMITS = {"*": {"mean": 0.2}}


def interventions() -> list:
    return [ScaleLearningRate(0.5), Call(str)]


def places(value, path=()):
    """Every place within nested data."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def put(value, path, new):
    """Replace what is at one place."""
    if not path:
        return new
    changed = list(value) if isinstance(value, tuple) else copy.copy(value)
    changed[path[0]] = put(value[path[0]], path[1:], new)
    return changed


@st.composite
def malformed(draw, good):
    """A state in which one to three places hold anything at all, or that is altogether something else."""
    state = copy.deepcopy(good)
    for _ in range(draw(st.integers(1, 3))):
        state = put(state, draw(st.sampled_from(list(places(state))[:200])), draw(anything))
    return state


@contextmanager
def warned_at_most_once():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    reported = [str(item.message) for item in caught if issubclass(item.category, HDIWarning)]
    about_state = [text for text in reported if "state of" in text and "not valid" in text]
    assert len(about_state) <= 1, reported


def small(**options) -> dict:
    return {"every_n_steps": 2, "verbose": False, "thresholds": LIMITS, "interventions": interventions(), **options}


def steps(heads, model, optimizer, count: int) -> None:
    for step in range(count):
        with heads.step():
            loss_of(model, *batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.fixture(scope="module")
def loop_state(tmp_path_factory):
    model = classifier()
    optimizer = adam(model)
    with (
        warnings.catch_warnings(),
        watch_heads(model, optimizer, log_dir=tmp_path_factory.mktemp("loop"), **small()) as heads,
    ):
        warnings.simplefilter("ignore")
        steps(heads, model, optimizer, 5)
    return json.loads(json.dumps(heads.state_dict()))


SLOW = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@given(data=st.data())
@settings(max_examples=300, **SLOW)
def test_a_malformed_state_is_validated_with_at_most_one_warning(loop_state, data):
    state = data.draw(malformed(loop_state))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        valid = valid_state(state, step=5, warn_once=WarnOnce())
    assert len(caught) <= 1
    if valid is None:
        return
    for name in ("last_step", "step"):
        assert valid.get(name) is None or (type(valid[name]) is int and 0 <= valid[name] <= 5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = {"alerts" if name == "alerts_in_part" else name: value for name, value in valid.items()}
        held = [entry for entry in whole.get("interventions", []) if entry[1] is not None]
        whole["interventions"] = held
        assert valid_state(whole, step=5, warn_once=WarnOnce()) == whole, "checked again it is valid as a whole"


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=25, **SLOW)
def test_a_loop_resumes_from_a_malformed_state_and_takes_readings(loop_state, tmp_path_factory, data):
    state = data.draw(malformed(loop_state))
    model = classifier()
    optimizer = adam(model)
    folder = tmp_path_factory.mktemp("again")
    with warned_at_most_once(), watch_heads(model, optimizer, log_dir=folder, **small()) as heads:
        heads.load_state_dict(state)
        began = heads.global_step
        steps(heads, model, optimizer, 3)
        rates = [group["lr"] for group in optimizer.param_groups]
    assert heads.global_step == began + 3
    due = [step for step in range(began, began + 4) if step % 2 == 0]
    assert set(due) <= {*readings(heads.history_path), began}
    assert began + 3 in readings(heads.history_path)
    assert rates == [0.01]


@pytest.fixture(scope="module")
def lightning_checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lightning")
    trainer = trainer_for(folder, HDICallback(**small()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(Module(), batches(count=5))
    trainer.save_checkpoint(folder / "five.ckpt")
    return torch.load(folder / "five.ckpt", weights_only=False)


class Puts(L.Callback):
    """Hands a callback its state as Lightning does, whatever its type is."""

    def __init__(self, callback, state) -> None:
        self.callback, self.state = callback, state

    def on_fit_start(self, *args):
        self.callback.load_state_dict(self.state)


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=8, **SLOW)
def test_lightning_resumes_from_a_malformed_state_and_takes_readings(lightning_checkpoint, tmp_path_factory, data):
    (key,) = [key for key in lightning_checkpoint["callbacks"] if key.startswith("HDICallback")]
    state = data.draw(malformed(lightning_checkpoint["callbacks"][key]))
    folder = tmp_path_factory.mktemp("again")
    torch.save({**lightning_checkpoint, "callbacks": {}}, folder / "five.ckpt")
    callback = HDICallback(**small())
    trainer = trainer_for(folder, callback, Puts(callback, state), max_epochs=2)
    with warned_at_most_once():
        trainer.fit(Module(), batches(count=5), ckpt_path=folder / "five.ckpt")
    assert trainer.global_step == 10
    assert readings(callback.history_path)[-3:] == [6, 8, 10]


@pytest.fixture(scope="module")
def trainer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train_with_transformers(folder, HDITrainerCallback(**small()), max_steps=5, save_strategy="steps", save_steps=5)
    return folder


TORN = {
    "half": lambda text: text[: len(text) // 2],
    "nothing": lambda text: b"",
    "no text": lambda text: b"\xff\xfe" + text,
    "zeros": lambda text: b"\0" * len(text),
    "nested": lambda text: b"[" * 10**6,
    "a huge number": lambda text: b'{"last_step":' + b"9" * 5000 + b"}",
    "a list": lambda text: b"[1,2]",
    "a text": lambda text: b'"state"',
    "last step": lambda text: json.dumps(json.loads(text) | {"last_step": 10**9}).encode(),
    "no number": lambda text: json.dumps(json.loads(text) | {"last_step": math.nan}).encode(),
    "truth value": lambda text: json.dumps(json.loads(text) | {"last_step": True}).encode(),
}


@pytest.mark.some_slow(quick=1)
@pytest.mark.parametrize("tear", TORN.values(), ids=TORN)
def test_a_damaged_state_file_costs_one_warning_and_the_run_goes_on(trainer_folder, tear):
    file = trainer_folder / "checkpoint-5" / "hdi_state.json"
    whole = file.read_bytes()
    histories = {path: path.read_bytes() for path in (trainer_folder / "hdi").glob("*.jsonl")}
    callback = HDITrainerCallback(**small())
    try:
        file.write_bytes(tear(whole))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train_with_transformers(trainer_folder, callback, max_steps=8, resume=str(file.parent))
    finally:
        file.write_bytes(whole)
    reported = [str(item.message) for item in caught if item.category.__name__ == "MonitoringWarning"]
    assert len(reported) == 1, reported
    read = readings(callback.history_path)
    assert read[-2:] == [6, 8]
    for path in histories:
        assert path.read_bytes().startswith(histories[path])
        path.write_bytes(histories[path])


@pytest.mark.parametrize("number", [10**9, -1, math.nan, True, "5", [5], 2.0])
def test_an_impossible_last_step_is_reported_and_the_next_forward_is_read(loop_state, tmp_path, number):
    model = classifier()
    optimizer = adam(model)
    with pytest.warns(HDIWarning, match="`last_step`") as caught, watch_heads(
        model, optimizer, log_dir=tmp_path, **{**small(), "interventions": None}
    ) as heads:  # fmt: skip
        heads.load_state_dict({**loop_state, "last_step": number})
        steps(heads, model, optimizer, 2)
    assert len([item for item in caught if "not valid" in str(item.message)]) == 1
    assert heads.global_step == 7
    assert readings(heads.history_path) == [0, 2, 4, 5, 6, 7], "what the history holds by then counts"


class FailsHalfWay(Call):
    name = "FailsHalfWay"

    def load_state_dict(self, state):
        super().load_state_dict(state)
        raise ZeroDivisionError


def test_an_intervention_that_cannot_load_its_state_is_unchanged_and_the_next_one_loads_its_own(tmp_path):
    model = classifier()
    optimizer = adam(model)
    state = {"step": 0, "last_step": None, "interventions": [("FailsHalfWay", {"count": 7}), ("Call", {"count": 5})]}
    chosen = [FailsHalfWay(str), Call(str)]
    with pytest.warns(HDIWarning, match="resuming the intervention FailsHalfWay failed"), watch_heads(
        model, optimizer, history=False, verbose=False, alerts=[], interventions=chosen
    ) as heads:  # fmt: skip
        heads.load_state_dict(state)
        steps(heads, model, optimizer, 1)
    assert [item.count for item in chosen] == [0, 5]


def test_an_intervention_is_not_active_for_an_alert_that_the_state_lacks(loop_state):
    model = classifier()
    optimizer = adam(model)
    slow = ScaleLearningRate(0.5)
    state = {
        "step": 4,
        "last_step": 4,
        "interventions": [(slow.name, {"count": 1, "standing": {"blocks.0.attn": ["gone"]}})],
    }
    with watch_heads(model, optimizer, history=False, verbose=False, alerts=[], interventions=[slow]) as heads:
        heads.load_state_dict(state)
        steps(heads, model, optimizer, 1)
    assert (slow.count, slow.standing) == (1, {})


# --- files that are there whole or not at all


def test_an_atomic_write_that_fails_leaves_only_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "state.json"
    write_atomically(path, b"old")
    monkeypatch.setattr("os.fsync", lambda handle: (_ for _ in ()).throw(OSError("the disk is full")))
    with pytest.raises(OSError, match="full"):
        write_atomically(path, b"new")
    with pytest.raises(OSError, match="full"):
        create_atomically(tmp_path / "another", b"new")
    assert {one.name: one.read_bytes() for one in tmp_path.iterdir()} == {"state.json": b"old"}


@pytest.mark.parametrize("has_links", [True, False])
def test_a_file_is_created_once(tmp_path, monkeypatch, has_links):
    if not has_links:
        monkeypatch.setattr("os.link", lambda *args: (_ for _ in ()).throw(PermissionError("no links here")))
    create_atomically(tmp_path / "file", b"first")
    with pytest.raises(FileExistsError):
        create_atomically(tmp_path / "file", b"second")
    assert {one.name: one.read_bytes() for one in tmp_path.iterdir()} == {"file": b"first"}


def test_a_saved_state_lists_the_layers_of_the_model_and_is_valid(lightning_checkpoint):
    (state,) = [held for key, held in lightning_checkpoint["callbacks"].items() if key.startswith("HDICallback")]
    assert list(state["layers"]) == LIT_LAYERS
    assert valid_state(state, step=5, warn_once=WarnOnce()) == {name: state[name] for name in state if name != "format"}
