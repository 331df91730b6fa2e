"""Runs that end too early and are resumed, against twins that were not interrupted."""

from __future__ import annotations

import bisect
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hdi_callback import HDICallback
from hdi_callback.errors import MisconfigurationError, MonitoringWarning
from hdi_callback.monitoring.history import load_history, read_lines, read_records
from hdi_callback.monitoring.readings import Readout
from hdi_callback.monitoring.rules.replay import read_alerts, replay
from tests.histories import readings
from tests.models import HEADS, LIT_LAYERS, Classifier, batches
from tests.regimes.killed_run import LIMITS, STEPS, Moment, run
from tests.regimes.trainings import Module, in_a_process, reported, trainer_for

DUE = list(range(0, STEPS + 1, 2))
MOVEMENT = {"head_movement", "head_movement_min", "head_unchanged"}
"""What compares with the weights of the reading before, which are not saved."""


def process(folder: Path, moment: Moment = None, accumulate: int = 1) -> int:
    """Run in a process, and tell how it ended."""
    return in_a_process(run, folder, moment, accumulate)


@dataclass
class Ended:
    """What a run left behind."""

    folder: Path

    @property
    def state(self) -> dict[str, Any]:
        return torch.load(self.folder / "end.pt", weights_only=True)

    @property
    def history(self) -> Path:
        (path,) = self.folder.rglob("*.jsonl")
        return path

    def boards(self) -> list[dict[str, list[tuple[int, float]]]]:
        """The curves of each process, one event file each."""
        files = sorted((self.folder / "board").rglob("events.*"), key=lambda path: path.stat().st_ctime_ns)
        boards = []
        for file in files:
            events = EventAccumulator(str(file)).Reload()
            boards.append({tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]})
        return boards

    def resumed_at(self) -> list[int]:
        """The steps of the first reading after each resumption."""
        _, *resumptions = self.lines("run")
        return [DUE[bisect.bisect_right(DUE, line["last_reading"])] for line in resumptions]

    def readings(self, compared_with_nothing: list[int]) -> list[tuple]:
        """All that was read, but how far weights had moved at some steps."""
        return [
            (
                one.step, one.epoch, one.axis,
                still_absent(one.absent) if one.step in compared_with_nothing else one.absent,
                {
                    name: [without_movement(part) if one.step in compared_with_nothing else part
                           for part in (layer.values, layer.arrays)]
                    for name, layer in one.layers.items()
                },
            )
            for one in read_records(self.history)
        ]  # fmt: skip

    def has_movement(self) -> dict[int, bool]:
        """Whether all of the movement of all layers is known at a step, or none of any, with the reason."""
        found = {}
        for one in read_records(self.history):
            known = set()
            for layer in one.layers.values():
                heads = [number for name in MOVEMENT & {*layer.arrays} for number in layer.arrays[name]]
                assert len(heads) == 2 * HEADS
                known |= {(len(MOVEMENT & {*layer.values}), *(number is not None for number in heads))}
            reasons = [one.absent[tag] for tag in one.absent if tag not in still_absent(one.absent)]
            whole, none = (2, *[True] * 2 * HEADS), (0, *[False] * 2 * HEADS)
            assert (known, len(reasons)) in [({whole}, 0), ({none}, 2 * len(one.layers))]
            assert all(reason.startswith("there is no earlier reading to compare with") for reason in reasons)
            found[one.step] = not reasons
        return found

    def state_but_for_movement(self, part: str, compared_with_nothing: list[int]) -> Any:
        state = self.state["state"][part]
        if part != "alerts":
            return state
        series = {
            name: [
                {**row, "values": without_movement(row["values"]), "arrays": without_movement(row["arrays"])}
                if row["step"] in compared_with_nothing else row
                for row in rows
            ]
            for name, rows in state["series"].items()
        }  # fmt: skip
        for name in series:
            first = series[name][0]  # of step 0, whose movement is NaN, which is not equal to itself
            moved = {
                array: [str(number) for number in first["arrays"][array]] for array in MOVEMENT & {*first["arrays"]}
            }
            series[name][0] = {**first, "arrays": {**first["arrays"], **moved}}
        return {**state, "series": series}

    def lines(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in read_lines(self.history) if line["kind"] == kind]


def without_movement(held: dict[str, Any]) -> dict[str, Any]:
    return {name: held[name] for name in held if name not in MOVEMENT}


def still_absent(reasons: dict[str, str]) -> dict[str, str]:
    return {what: reasons[what] for what in reasons if what.partition("/")[0] not in MOVEMENT}


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    """A run that nothing interrupts, for each number of accumulated batches."""
    twins = {}
    for accumulate in (1, 2):
        folder = tmp_path_factory.mktemp("twin")
        assert process(folder, None, accumulate) == 0
        twins[accumulate] = Ended(folder)
    rules = {alert.rule for alert in read_alerts(twins[1].history)}
    assert rules >= {"worst pair", "mean alignment"}, "there is something to go on with"
    done = {line["intervention"] for line in twins[1].lines("intervention")}
    assert done == {"ScaleLearningRate", "ReviveHeads", "Call"}
    return twins


def check_against_twin(ended: Ended, twin: Ended) -> None:
    state = ended.state
    for name, weight in twin.state["weights"].items():
        assert torch.equal(state["weights"][name], weight), name
    assert state["history"] == str(ended.history)
    assert [line["step"] for line in ended.lines("reading")] == DUE, "no gap and no double point"
    resumed_at = ended.resumed_at()
    assert ended.has_movement() == {step: step not in (0, *resumed_at) for step in DUE}
    assert twin.has_movement() == {step: step != 0 for step in DUE}
    assert ended.readings(resumed_at) == twin.readings(resumed_at)
    assert ended.lines("alert") == twin.lines("alert")
    assert read_alerts(ended.history) == replay(ended.history, thresholds=LIMITS)
    assert ended.lines("intervention") == twin.lines("intervention")
    for part in ("last_step", "layers", "alerts", "interventions"):
        parts = [one.state_but_for_movement(part, resumed_at) for one in (ended, twin)]
        assert parts[0] == parts[1], part


MOMENTS = [
    ("measuring", 8), ("killed", 11), ("writing reading", 8), ("writing alert", 4), ("writing intervention", 14),
    ("interrupted", 13), ("terminated", 13),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("moment", "accumulate"), [*((moment, 1) for moment in MOMENTS), (("measuring", 6), 2)])
def test_a_run_that_was_killed_or_interrupted_resumes_with_the_same_curves(tmp_path, twins, moment, accumulate):
    ended, twin = Ended(tmp_path), twins[accumulate]
    code = process(tmp_path, moment, accumulate)
    assert (code == -signal.SIGKILL) == (moment[0] not in ("interrupted", "terminated"))
    assert not (tmp_path / "end.pt").exists()
    before = ended.history.read_bytes()
    if moment[0].startswith("writing"):
        assert not before.endswith(b"\n"), "a torn line"
    assert process(tmp_path, None, accumulate) == 0
    assert ended.history.read_bytes().startswith(before)
    check_against_twin(ended, twin)
    first, second = ended.boards()
    (truth,) = twin.boards()
    bound = [line for line in read_lines(ended.history) if line["kind"] == "run"][-1]["last_reading"]
    assert 0 < bound < moment[1]
    for tag, curve in truth.items():
        if tag.startswith(("hdi", "head")):
            axis = [point[0] for point in first.get(tag, ()) if point[0] <= bound * accumulate]
            assert [p for p in first.get(tag, ()) if p[0] in axis] + second.get(tag, []) == curve, tag


@pytest.mark.slow
def test_a_run_that_is_killed_twice(tmp_path, twins):
    assert process(tmp_path, ("measuring", 10)) < 0
    assert process(tmp_path, ("writing reading", 16)) < 0
    assert process(tmp_path) == 0
    check_against_twin(Ended(tmp_path), twins[1])


# --- what a checkpoint may hold


def fit(folder: Path, callback: HDICallback, lit: Module | None = None, *, epochs: int = 1, checkpoint=None) -> Any:
    trainer = trainer_for(folder, callback, max_epochs=epochs)
    trainer.fit(Module() if lit is None else lit, batches(count=5), ckpt_path=checkpoint)
    return trainer


@pytest.fixture
def saved(tmp_path):
    """A checkpoint at step 5, after readings at 0, 2, 4 and 5, and the history of its run."""
    callback = HDICallback(every_n_steps=2)
    trainer = fit(tmp_path / "first", callback)
    trainer.save_checkpoint(tmp_path / "five.ckpt")
    return tmp_path / "five.ckpt", callback.history_path


def put_state(checkpoint: Path, change) -> None:
    """Change what the checkpoint holds for the callback."""
    held = torch.load(checkpoint, weights_only=False)
    (key,) = [key for key in held["callbacks"] if key.startswith("HDICallback")]
    held["callbacks"][key] = change(held["callbacks"][key])
    torch.save(held, checkpoint)


def only(*names: str):
    return lambda state: {name: state[name] for name in names}


@pytest.mark.parametrize(
    "change",
    [
        lambda state: {"format": 1, **only("last_step", "history")(state)},  # as the first version wrote it
        only("last_step", "history"),
        only("format", "last_step", "history", "alerts", "interventions"),  # before states named layers
    ],
)
def test_a_state_of_an_earlier_format_is_resumed(tmp_path, saved, change):
    checkpoint, history = saved
    put_state(checkpoint, change)
    callback = HDICallback(every_n_steps=2, strict=True)
    fit(tmp_path / "first", callback, epochs=2, checkpoint=checkpoint)
    assert callback.history_path == history
    assert readings(history) == [0, 2, 4, 5, 6, 8, 10]
    assert set(callback.state_dict()["alerts"]["series"]) == set(LIT_LAYERS)


def test_an_empty_state_starts_a_new_history(tmp_path, saved):
    checkpoint, history = saved
    put_state(checkpoint, lambda state: {})
    callback = HDICallback(every_n_steps=2)
    fit(tmp_path / "second", callback, epochs=2, checkpoint=checkpoint)
    assert callback.history_path != history
    assert readings(callback.history_path) == [5, 6, 8, 10]
    assert readings(history) == [0, 2, 4, 5]


def test_a_checkpoint_without_a_state_starts_a_new_history(tmp_path):
    trainer = trainer_for(tmp_path / "first")
    trainer.fit(Module(), batches(count=5))
    trainer.save_checkpoint(tmp_path / "five.ckpt")
    callback = HDICallback(every_n_steps=2)
    fit(tmp_path / "second", callback, epochs=2, checkpoint=tmp_path / "five.ckpt")
    assert readings(callback.history_path) == [5, 6, 8, 10]


def test_a_broken_state_costs_one_warning(tmp_path, saved):
    checkpoint, _ = saved
    put_state(checkpoint, lambda state: {**state, "alerts": {"active": [{"layer": 3}]}})
    callback = HDICallback(every_n_steps=2)
    with reported() as warnings:
        trainer = fit(tmp_path / "first", callback, epochs=2, checkpoint=checkpoint)
    assert len(warnings) == 1
    assert "state of head diversity is not valid: the active alerts are [{'layer': 3}]" in warnings[0]
    assert trainer.global_step == 10
    assert readings(callback.history_path) == [0, 2, 4, 5, 6, 8, 10]
    rows = callback.state_dict()["alerts"]["series"][LIT_LAYERS[0]]
    assert [row["step"] for row in rows] == [0, 0, 2, 4, 5, 6, 8, 10], "found again from the history"


def other_heads() -> Module:
    """The same parameters, with twice as many heads."""
    torch.manual_seed(0)
    return Module(Classifier(num_heads=8))


def test_a_checkpoint_of_a_model_with_other_heads_starts_a_new_history_with_one_warning(tmp_path, saved):
    checkpoint, history = saved
    before = history.read_bytes()
    callback = HDICallback(every_n_steps=2)
    with reported() as warnings:
        trainer = fit(tmp_path / "second", callback, other_heads(), epochs=2, checkpoint=checkpoint)
    assert len(warnings) == 1
    assert all(f"`{name}`" in warnings[0] for name in LIT_LAYERS)
    assert "start anew" in warnings[0]
    assert trainer.global_step == 10
    assert callback.history_path != history
    assert history.read_bytes() == before
    assert readings(callback.history_path) == [5, 6, 8, 10]
    assert {
        record.layers[LIT_LAYERS[0]].values["hdi_effective_heads"] > 4 for record in read_records(callback.history_path)
    } == {True}
    first, *_ = callback.state_dict()["alerts"]["series"][LIT_LAYERS[0]]
    assert first["step"] == 5, "rules compare with the start of the new model alone"


def test_a_checkpoint_of_a_model_with_other_heads_is_refused_when_strict(tmp_path, saved):
    checkpoint, history = saved
    before, lit = history.read_bytes(), other_heads()
    weights = [
        parameter.detach().clone() for parameter in torch.load(checkpoint, weights_only=False)["state_dict"].values()
    ]
    with pytest.raises(MisconfigurationError, match=rf"other heads: `{re.escape(LIT_LAYERS[0])}`.* strict=False"):
        fit(tmp_path / "second", HDICallback(every_n_steps=2, strict=True), lit, epochs=2, checkpoint=checkpoint)
    assert all(torch.equal(now, then) for now, then in zip(lit.state_dict().values(), weights, strict=True)), "no step"
    assert history.read_bytes() == before


def test_a_second_fit_with_another_model_starts_a_new_run(tmp_path):
    callback = HDICallback(every_n_steps=2)
    trainer = fit(tmp_path, callback)
    history = callback.history_path
    trainer.fit_loop.max_epochs = 2
    with reported() as warnings:
        trainer.fit(other_heads(), batches(count=5))
    assert len(warnings) == 1
    assert readings(history) == [0, 2, 4, 5]
    assert readings(callback.history_path) == [5, 6, 8, 10]


def test_a_layer_that_the_checkpoint_lacks_is_read_from_the_resumption_on(tmp_path, saved):
    """As after an upgrade that can read more layers than before."""
    checkpoint, history = saved
    kept, new = LIT_LAYERS

    def without_second(state):
        series = {kept: state["alerts"]["series"][kept]}
        return {**state, "layers": {kept: state["layers"][kept]}, "alerts": {**state["alerts"], "series": series}}

    put_state(checkpoint, without_second)
    callback = HDICallback(every_n_steps=2, strict=True)
    fit(tmp_path / "first", callback, epochs=2, checkpoint=checkpoint)
    assert readings(history) == [0, 2, 4, 5, 6, 8, 10]
    series = callback.state_dict()["alerts"]["series"]
    assert [series[name][0]["step"] for name in (kept, new)] == [0, 6]


def test_a_history_that_was_moved_away_is_started_again_at_the_resumption(tmp_path, saved):
    checkpoint, history = saved
    history.rename(tmp_path / "elsewhere.jsonl")
    callback = HDICallback(every_n_steps=2)
    with pytest.warns(MonitoringWarning, match=r"checkpoint names, .*history\.jsonl`, does not exist"):
        fit(tmp_path / "second", callback, epochs=2, checkpoint=checkpoint)
    assert readings(callback.history_path) == [6, 8, 10]


def test_a_branch_in_its_own_folder_has_the_whole_curve_and_does_not_change_its_parent(tmp_path, saved):
    checkpoint, history = saved
    fit(tmp_path / "first", HDICallback(every_n_steps=2), epochs=3, checkpoint=checkpoint)  # the parent goes on
    before = history.read_bytes()
    for _ in range(2):  # ended before its first checkpoint, it begins once more
        branch = HDICallback(every_n_steps=2)
        trainer = fit(tmp_path / "branch", branch, epochs=2, checkpoint=checkpoint)
    assert history.read_bytes() == before
    assert readings(history) == [0, 2, 4, 5, 6, 8, 10, 12, 14, 15]
    assert branch.history_path == tmp_path / "branch" / "hdi" / "history.jsonl"
    assert readings(branch.history_path) == [0, 2, 4, 5, 6, 8, 10]
    frames = [load_history(path).query("step <= 5") for path in (history, branch.history_path)]
    assert frames[0].equals(frames[1])
    (header, *_) = [line for line in read_lines(branch.history_path) if line["kind"] == "run"]
    assert header["parent"] == {"run": next(read_lines(history))["run"], "history": str(history), "last_reading": 5}
    trainer.save_checkpoint(tmp_path / "ten.ckpt")
    # A checkpoint of the branch is none of its parent, even in its parent's folder.
    third = HDICallback(every_n_steps=2)
    fit(tmp_path / "first", third, epochs=3, checkpoint=tmp_path / "ten.ckpt")
    assert history.read_bytes() == before
    assert readings(third.history_path) == [0, 2, 4, 5, 6, 8, 10, 12, 14, 15]


def test_a_file_named_in_a_checkpoint_is_not_written_to_unless_it_is_the_history(tmp_path, saved):
    checkpoint, history = saved
    letter = history.with_name("history-7.jsonl")
    letter.write_text("Dear Mr Vernon,\n\n")
    put_state(checkpoint, lambda state: {**state, "run": "0" * 32, "history": str(letter)})
    before = history.read_bytes()
    with reported() as warnings:
        fit(tmp_path / "first", HDICallback(every_n_steps=2), epochs=2, checkpoint=checkpoint)
    assert ["not the history of this run" in one or "belongs to another run" in one for one in warnings] == [True]
    assert letter.read_text() == "Dear Mr Vernon,\n\n"
    assert history.read_bytes() == before


def test_a_moved_run_continues_the_history_that_moved_with_it(tmp_path, saved):
    checkpoint, _ = saved
    (tmp_path / "first").rename(tmp_path / "renamed")
    callback = HDICallback(every_n_steps=2)
    fit(tmp_path / "renamed", callback, epochs=2, checkpoint=checkpoint)
    assert callback.history_path == tmp_path / "renamed" / "hdi" / "history.jsonl"
    assert readings(callback.history_path) == [0, 2, 4, 5, 6, 8, 10]


def test_a_checkpoint_of_another_run_begins_another_history_in_the_same_trainer(tmp_path, saved):
    checkpoint, history = saved
    before = history.read_bytes()
    callback = HDICallback(every_n_steps=2)
    trainer = fit(tmp_path / "other", callback)
    own = callback.history_path
    trainer.fit_loop.max_epochs = 2
    trainer.fit(Module(), batches(count=5), ckpt_path=checkpoint)
    assert (readings(own), history.read_bytes()) == ([0, 2, 4, 5], before)
    assert callback.history_path != own
    assert readings(callback.history_path) == [0, 2, 4, 5, 6, 8, 10]


class Breaks(Module):
    breaks = True

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.breaks and self.trainer.global_step == 4:
            raise RuntimeError("the user's own mistake")
        return loss


def test_a_checkpoint_of_the_exception_itself_resumes_without_a_gap(tmp_path):
    """The exception comes in a forward that was to be read."""
    callback, lit = HDICallback(every_n_steps=2), Breaks()
    keep = OnExceptionCheckpoint(tmp_path, filename="exception")
    with pytest.raises(RuntimeError, match="the user's own mistake"):
        trainer_for(tmp_path, callback, keep, enable_checkpointing=True).fit(lit, batches(count=5))
    assert readings(callback.history_path) == [0, 2]
    resumed, lit.breaks = HDICallback(every_n_steps=2), False
    trainer = fit(tmp_path, resumed, lit, epochs=2, checkpoint=tmp_path / "exception.ckpt")
    assert resumed.history_path == callback.history_path
    assert readings(callback.history_path) == [*range(0, trainer.global_step, 2), trainer.global_step]


class SaveInTheMiddle(L.Callback):
    """Saves a checkpoint, and looks at what the history holds by then."""

    def __init__(self, watching: HDICallback, path: Path) -> None:
        self.watching, self.path = watching, path
        self.recorded: list[list[int]] = []

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == 5:
            self.recorded.append(readings(self.watching.history_path))
            trainer.save_checkpoint(self.path)
            self.recorded.append(readings(self.watching.history_path))


def test_readings_up_to_a_checkpoint_are_written_before_it_is_saved(tmp_path, monkeypatch):
    """On a device whose numbers arrive late a process may be killed before they would have been written."""
    monkeypatch.setattr(Readout, "is_ready", lambda readout: readout.step == 0)
    callback = HDICallback(every_n_steps=2)
    save = SaveInTheMiddle(callback, tmp_path / "five.ckpt")
    trainer_for(tmp_path, callback, save).fit(Module(), batches(count=8))
    assert save.recorded == [[0], [0, 2, 4]]
    held = torch.load(tmp_path / "five.ckpt", weights_only=False)["callbacks"]
    assert [state["last_step"] for key, state in held.items() if key.startswith("HDICallback")] == [4]
    assert readings(callback.history_path) == [0, 2, 4, 6, 8]
