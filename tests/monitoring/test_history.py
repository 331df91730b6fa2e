from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hdi_callback import replay
from hdi_callback.errors import MisconfigurationError, MonitoringWarning
from hdi_callback.monitoring.history import History, load_history, read_history, read_lines, read_records
from hdi_callback.monitoring.history.files import locked
from hdi_callback.monitoring.history.place import place_history
from hdi_callback.monitoring.readings import LayerRecord, Record
from hdi_callback.monitoring.rules.replay import read_alerts


def record_at(step: int, hdi: float = 0.5) -> Record:
    layer = LayerRecord(
        values={"hdi": hdi}, arrays={"worst_pair": [1, 3]}, matrices={"overlap": torch.eye(4, dtype=torch.float64)}
    )
    return Record(step, {"attn": layer}, {"other": "a reason"}, epoch=2, axis=step + 1, time=12.5)


def test_a_written_history_is_read_back(tmp_path):
    history = History(tmp_path / "deep" / "history.jsonl")
    history.write(record_at(10, 1 / 3))
    (record,) = read_records(history.path)
    assert (record.step, record.epoch, record.axis, record.time) == (10, 2, 11, 12.5)
    assert record.absent == {"other": "a reason"}
    assert record.layers["attn"].values["hdi"] == pytest.approx(1 / 3, rel=1e-8)
    assert record.layers["attn"].arrays == {"worst_pair": [1, 3]}
    assert torch.equal(read_history(history.path).matrices(10, "attn")["overlap"], torch.eye(4, dtype=torch.float64))


def test_matrices_are_kept_in_the_first_and_every_nth_reading(tmp_path):
    history = History(tmp_path / "history.jsonl", matrix_every=3)
    for step in range(7):
        history.write(record_at(step))
    assert read_history(history.path).matrix_steps("attn") == [0, 3, 6]


def test_the_file_is_only_ever_appended_to(tmp_path):
    history = History(tmp_path / "history.jsonl")
    before = b""
    for step in range(4):
        history.write(record_at(step))
        after = history.path.read_bytes()
        assert after.startswith(before)
        assert len(after) > len(before)
        before = after


def test_nan_and_infinity_are_written_as_null(tmp_path):
    history = History(tmp_path / "history.jsonl")
    history.write(
        Record(0, {"attn": LayerRecord(values={"hdi": math.nan}, arrays={"nearest_overlap": [math.inf, 0.5]})})
    )
    line = json.loads(history.path.read_text(), parse_constant=lambda word: pytest.fail(word))
    assert line["layers"]["attn"]["values"] == {"hdi": None}
    assert line["layers"]["attn"]["arrays"] == {"nearest_overlap": [None, 0.5]}


def test_a_truncated_last_line_loses_only_its_own_reading(tmp_path):
    history = History(tmp_path / "history.jsonl")
    for step in (0, 1, 2):
        history.write(record_at(step))
    with history.path.open("r+b") as file:
        file.truncate(os.path.getsize(history.path) - 25)
    assert [record.step for record in read_records(history.path)] == [0, 1]
    resumed = History(history.path)
    resumed.begin(1, [])
    resumed.write(record_at(2, 0.25))
    assert [line["kind"] for line in read_lines(history.path)] == ["reading", "reading", "run", "reading"]
    records = read_records(history.path)
    assert [record.step for record in records] == [0, 1, 2]
    assert records[-1].layers["attn"].values["hdi"] == 0.25


def test_unreadable_lines_are_reported_by_number_except_a_truncated_last_one(tmp_path):
    history = History(tmp_path / "history.jsonl")
    for step in (0, 1):
        history.write(record_at(step))
    whole = history.path.read_bytes().splitlines()
    torn = whole[0][:-25]
    history.path.write_bytes(b"\n".join([whole[0], torn, torn, whole[1], torn]))
    with pytest.warns(MonitoringWarning, match=r"that are skipped: line 2 \(.*\), line 3 \(.*\)\.$"):
        assert [record.step for record in read_records(history.path)] == [0, 1]


def test_a_resumption_voids_readings_after_its_step(tmp_path):
    history = History(tmp_path / "history.jsonl")
    history.begin(0, [])
    for step in (0, 10, 20, 30):
        history.write(record_at(step, 0.1))
    history.begin(15, [])
    for step in (20, 40):
        history.write(record_at(step, 0.2))
    assert [(r.step, r.layers["attn"].values["hdi"]) for r in read_records(history.path)] == [
        (0, 0.1), (10, 0.1), (20, 0.2), (40, 0.2),
    ]  # fmt: skip
    assert [line["kind"] for line in read_lines(history.path)].count("run") == 2


def test_the_later_of_two_readings_of_one_step_counts(tmp_path):
    history = History(tmp_path / "history.jsonl")
    history.write(record_at(5, 0.1))
    history.write(record_at(5, 0.9))
    assert [record.layers["attn"].values["hdi"] for record in read_records(history.path)] == [0.9]


def test_a_line_that_could_not_be_written_is_written_with_the_next_one(tmp_path):
    blocked = tmp_path / "folder"
    blocked.write_text("a file where the folder should be")
    history = History(blocked / "history.jsonl")
    with pytest.raises(OSError, match="folder"):
        history.write(record_at(0))
    blocked.unlink()
    history.write(record_at(1))
    assert [record.step for record in read_records(history.path)] == [0, 1]


def test_a_killed_process_leaves_every_line_it_had_written(tmp_path, root):
    path = tmp_path / "history.jsonl"
    code = (
        "import os, signal, sys\n"
        "from hdi_callback.monitoring.history import History\n"
        "from tests.monitoring.test_history import record_at\n"
        "history = History(sys.argv[1])\n"
        "for step in range(3): history.write(record_at(step))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], cwd=root, check=False)
    assert done.returncode != 0
    assert [record.step for record in read_records(path)] == [0, 1, 2]


def test_the_frame_has_a_row_for_each_step_and_layer(tmp_path):
    history = History(tmp_path / "history.jsonl")
    for step in (0, 10):
        layers = {name: LayerRecord(values={"hdi": 0.1 * step}) for name in ("a", "b")}
        history.write(Record(step, layers))
    frame = load_history(history.path)
    assert frame[["step", "layer", "hdi"]].to_numpy().tolist() == [[0, "a", 0], [0, "b", 0], [10, "a", 1], [10, "b", 1]]


def test_the_frame_of_an_empty_history_is_empty(tmp_path):
    history = History(tmp_path / "history.jsonl")
    history.begin(0, [])
    assert load_history(history.path).empty


def test_a_path_without_a_history_and_a_newer_format_are_refused(tmp_path):
    with pytest.raises(MisconfigurationError, match=r"no history file at .*history\.jsonl"):
        load_history(tmp_path / "history.jsonl")
    (tmp_path / "newer.jsonl").write_text('{"kind":"run","format":99,"step":0,"layers":[]}\n')
    with pytest.raises(MisconfigurationError, match="Upgrade"):
        load_history(tmp_path / "newer.jsonl")


# --- lines that somebody or something else wrote


def reading_line(**changes) -> bytes:
    line = {"kind": "reading", "step": 7, "layers": {"attn": {"values": {"hdi": 0.5}}}}
    return json.dumps(line | changes).encode()


HOSTILE = {
    "no step": b'{"kind":"reading","layers":{}}',
    "no layers": b'{"kind":"reading","step":7}',
    "a step that is a text": reading_line(step="7"),
    "a step that is a truth value": reading_line(step=True),
    "a step below zero": reading_line(step=-1),
    "a step beyond a table": reading_line(step=10**30),
    "a step of five thousand digits": b'{"kind":"reading","step":' + b"9" * 5000 + b',"layers":{}}',
    "a layer that is a list": reading_line(layers={"attn": []}),
    "a value that is a text": reading_line(layers={"attn": {"values": {"hdi": "high"}}}),
    "an array that is a number": reading_line(layers={"attn": {"arrays": {"worst_pair": 3}}}),
    "a pair of three": reading_line(layers={"attn": {"arrays": {"worst_pair": [1, 2, 3]}}}),
    "a ragged matrix": reading_line(layers={"attn": {"matrices": {"overlap": [[1, 0], [1]]}}}),
    "layers nested a million deep": b'{"kind":"reading","step":7,"layers":' + b"[" * 10**6 + b"]" * 10**6 + b"}",
    "a kind that is a list": b'{"kind":["reading"],"step":7}',
    "a list": b"[1,2,3]",
    "a number": b"17",
    "null": b"null",
    "binary": bytes(range(128, 256)),
    "no UTF-8": b'{"kind":"reading","step":7,"layers":{"\xff":{}}}',
    "null bytes": b"\0" * 50,
    "half a line in the middle": b'{"kind":"reading","step":7,"lay',
    "a run without a step": b'{"kind":"run","format":1,"layers":[]}',
    "a run of format nothing": b'{"kind":"run","format":null,"step":7,"layers":[]}',
    "a run whose layers are numbers": b'{"kind":"run","format":1,"step":7,"layers":[3]}',
    "a run whose last reading is a text": b'{"kind":"run","format":1,"step":7,"layers":[],"last_reading":"x"}',
    "an alert without a finding": b'{"kind":"alert","step":7,"layer":"a","rule":"r","level":"warning","message":"m"}',
    "an alert of an unknown level": (
        b'{"kind":"alert","step":7,"layer":"a","rule":"r","level":"fatal","message":"m","finding":{"what":"w"}}'
    ),
    "an intervention without a name": b'{"kind":"intervention","step":7,"layer":"attn"}',
}  # fmt: skip


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE)
def test_a_malformed_line_is_reported_with_its_number_and_skipped(tmp_path, hostile):
    history = History(tmp_path / "history.jsonl")
    history.begin(0, [{"name": "attn"}])
    history.write(record_at(0))
    with history.path.open("ab") as file:
        file.write(hostile + b"\n")
    history.write(record_at(10))
    with pytest.warns(MonitoringWarning, match=r"cannot be read, and that are skipped: line 3 \(") as caught:
        frame = load_history(history.path)
    assert len(caught) == 1
    assert frame[["step", "hdi"]].to_numpy().tolist() == [[0, 0.5], [10, 0.5]]
    with pytest.warns(MonitoringWarning):
        assert replay(history.path) == []
    with pytest.warns(MonitoringWarning):
        assert read_alerts(history.path) == []


@pytest.mark.parametrize(
    "odd",
    [
        reading_line(layers={"attn": {"values": {"NaN": math.nan, "hdi": math.inf, "step": 3, "layer": 1}}}),
        reading_line(layers={"\ud800": {"values": {"hdi": 0.5}}}),
        b'{"kind":"something of a later version","step":7}',
        b"   ",
        reading_line(layers={}),
    ],
)
def test_an_unusual_but_valid_line_is_read(tmp_path, odd):
    (tmp_path / "history.jsonl").write_bytes(odd + b"\n" + reading_line(step=8))
    frame = load_history(tmp_path / "history.jsonl")
    assert frame["step"].tolist()[-1] == 8
    assert all(isinstance(name, str) and name.encode() for name in frame["layer"])


def test_a_line_that_is_far_too_long_is_reported_and_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr("hdi_callback.monitoring.history.scan._LONGEST", 500)
    path = tmp_path / "history.jsonl"
    path.write_bytes(reading_line(step=1) + b"\n" + b"x" * 5000 + b"\n" + reading_line(step=2) + b"\n")
    with pytest.warns(MonitoringWarning, match=r"line 2 \(it is far too long\)"):
        assert [record.step for record in read_records(path)] == [1, 2]


@given(data=st.binary(max_size=200))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_arbitrary_bytes_between_two_readings_do_not_hide_either(tmp_path, data):
    path = tmp_path / "history.jsonl"
    path.write_bytes(reading_line(step=1) + b"\n" + data + b"\n" + reading_line(step=2) + b"\n")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MonitoringWarning)
        assert {1, 2} <= {record.step for record in read_records(path)}


# --- whose file it is


FACTS = [{"name": "attn", "num_heads": 4}]


def start(history: History, *steps: int, hdi: float = 0.5, **header) -> History:
    if not header.pop("has_begun", False):
        history.begin(steps[0], FACTS, last_reading=header.pop("last", -1))
    for step in steps:
        history.write(record_at(step, hdi))
    return history


def state_of(history: History, last_step: int) -> dict:
    return {"last_step": last_step, "history": str(history.path), "run": history.run, "layers": {"attn": [4, 4, 8, 8]}}


def steps_of(path) -> list[int]:
    return [record.step for record in read_records(path)]


@pytest.mark.parametrize("is_path", [True, False])
def test_a_second_run_with_the_path_of_another_gets_a_separate_file(tmp_path, is_path):
    choice, said = (tmp_path / "hdi" / "history.jsonl" if is_path else True), []
    first, second = histories = [
        start(place_history(choice, tmp_path, say=lambda *reported: said.append(reported)), 0, 10, hdi=hdi)
        for hdi in (0.1, 0.9)
    ]
    assert (first.path.name, second.path.name) == ("history.jsonl", "history-1.jsonl")
    for history, hdi in zip(histories, (0.1, 0.9)):
        assert [record.layers["attn"].values["hdi"] for record in read_records(history.path)] == [hdi, hdi]
    assert [kind for kind, _ in said] == (["history is taken"] if is_path else [])


def test_runs_that_begin_at_the_same_moment_get_a_file_each(tmp_path):
    histories = [place_history(True, tmp_path) for _ in range(3)]
    for place, history in enumerate(histories):
        start(history, 0, hdi=0.1 * place)
    assert len({history.path for history in histories}) == 3
    for place, history in enumerate(histories):
        assert [r.layers["attn"].values["hdi"] for r in read_records(history.path)] == [pytest.approx(0.1 * place)]


def test_a_forked_process_writes_its_own_copy(tmp_path):
    said: list[str] = []
    history = start(place_history(True, tmp_path, say=lambda kind, message: said.append(message)), 0)
    process = os.fork()
    if process == 0:
        history.write(record_at(5, 0.1))
        os._exit(0 if len(said) == 1 and "parent of this forked process" in said[0] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    for step in (5, 10):
        history.write(record_at(step))
    assert [record.step for record in read_records(history.path)] == [0, 5, 10]
    copies = read_records(history.path.with_name("history-1.jsonl"))
    assert [(record.step, record.layers["attn"].values["hdi"]) for record in copies] == [(0, 0.5), (5, 0.1)]
    assert said == []


def test_the_later_of_two_writers_of_one_run_keeps_the_file_and_the_other_writes_a_copy(tmp_path):
    said: list[tuple[str, str]] = []
    first = start(place_history(True, tmp_path, say=lambda *reported: said.append(reported)), 0, 10, hdi=0.1)
    path, state = first.path, state_of(first, 10)
    second = start(place_history(True, tmp_path, state=state), 20, hdi=0.9, last=10)
    assert second.path == path
    for step in (20, 30):
        first.write(record_at(step, 0.1))
        second.write(record_at(step + 5, 0.9))
    assert [kind for kind, _ in said] == ["another writer"]
    assert first.path == path.with_name("history-1.jsonl")
    assert {r.step: r.layers["attn"].values["hdi"] for r in read_records(first.path)} == dict.fromkeys(
        (0, 10, 20, 30), 0.1
    )
    assert {r.step: r.layers["attn"].values["hdi"] for r in read_records(path)} == {
        0: 0.1,
        10: 0.1,
        20: 0.9,
        25: 0.9,
        35: 0.9,
    }
    again = place_history(True, tmp_path, state=state_of(first, 30))
    assert again.path == first.path, "each resumes its own"


def test_a_history_deleted_while_it_is_written_is_started_again_for_the_same_run(tmp_path):
    history = start(place_history(True, tmp_path), 0, 10)
    history.path.unlink()
    start(history, 20, has_begun=True)
    assert [line["kind"] for line in read_lines(history.path)] == ["run", "reading"]
    assert place_history(True, tmp_path, state=state_of(history, 20)).path == history.path


def test_a_copy_of_the_history_in_its_place_is_continued(tmp_path):
    said: list[tuple[str, str]] = []
    history = start(place_history(True, tmp_path, say=lambda *reported: said.append(reported)), 0, 10)
    path = history.path
    copy = path.with_name("copy")
    copy.write_bytes(path.read_bytes())  # as a tool does that synchronises folders
    copy.replace(path)
    start(history, 20, has_begun=True)
    assert history.path == path
    assert steps_of(path) == [0, 10, 20]
    assert said == []


def test_a_file_that_replaces_the_history_is_not_written_to(tmp_path):
    history = start(place_history(True, tmp_path, say=lambda *reported: None), 0, 10)
    history.path.rename(tmp_path / "kept.jsonl")
    history.path.write_text("a shopping list\n")
    place = history.path
    start(history, 20, has_begun=True)
    assert place.read_text() == "a shopping list\n"
    assert history.path == place.with_name("history-1.jsonl")
    assert steps_of(history.path) == [20]
    assert steps_of(tmp_path / "kept.jsonl") == [0, 10]


@pytest.mark.parametrize("content", ["Dear Mr Vernon,\n", '{"a": 1}\n', "\n", '{"kind":"reading"}\n'])
@pytest.mark.parametrize("is_named", [True, False])
def test_a_file_that_is_not_a_history_is_not_written_to(tmp_path, content, is_named):
    file = tmp_path / "hdi" / "history.jsonl"
    file.parent.mkdir()
    file.write_text(content)
    state = {"last_step": 10, "history": str(file), "run": "ab" * 16} if is_named else None
    history = start(place_history(True, tmp_path, state=state, say=lambda *reported: None), 20)
    assert file.read_text() == content
    assert steps_of(history.path) == [20]


def make_folder(path):
    path.mkdir(parents=True)


def make_link_to_nothing(path):
    path.parent.mkdir()
    path.symlink_to("nowhere")


def make_link_to_a_file(path):
    path.parent.mkdir()
    (path.parent.parent / "letter").write_text("Dear Mr Vernon,")
    path.symlink_to(path.parent.parent / "letter")


@pytest.mark.parametrize("make", [make_folder, make_link_to_nothing, make_link_to_a_file])
def test_a_folder_or_link_in_the_place_of_a_history_is_not_written_to(tmp_path, make):
    make(tmp_path / "hdi" / "history.jsonl")
    history = start(place_history(True, tmp_path), 0)
    assert history.path.name == "history-1.jsonl"
    assert steps_of(history.path) == [0]
    assert not (tmp_path / "hdi" / "nowhere").exists()
    assert not (tmp_path / "letter").exists() or (tmp_path / "letter").read_text() == "Dear Mr Vernon,"


def as_written_before_ids(path) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        for name in ("run", "session"):
            line.pop(name, None)
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))


@pytest.mark.parametrize(
    ("change", "is_ours"),
    [
        ({}, True),
        ({"last_step": 11}, False),
        ({"layers": {"another": [4, 4, 8, 8]}}, False),
        ({"alerts": {"active": [], "series": {"attn": [{"step": 10, "values": {"hdi": 0.5}}]}}}, True),
        ({"alerts": {"active": [], "series": {"attn": [{"step": 10, "values": {"hdi": 0.4}}]}}}, False),
    ],
)
def test_a_history_without_an_id_is_continued_if_its_last_reading_agrees(tmp_path, change, is_ours):
    history = start(place_history(True, tmp_path), 0, 10)
    as_written_before_ids(history.path)
    before = history.path.read_bytes()
    state = {**state_of(history, 10), "run": None, **change}
    resumed = start(place_history(True, tmp_path, state=state, say=lambda *reported: None), 20, last=10)
    assert (resumed.path == history.path) == is_ours
    assert (history.path.read_bytes() == before) != is_ours
    assert steps_of(resumed.path) == ([0, 10, 20] if is_ours else [20])


def test_names_that_map_to_one_file_name_get_separate_files_and_long_ones_are_shortened(tmp_path):
    names = ["a/b", "a-b", "a\\b", "../../a", "x" * 300, "x" * 301, "köpfe", "\ud800", "\0", "a\nb", "…" * 200]
    paths = [start(place_history(True, tmp_path, name=name), 0).path for name in names]
    assert len({path.name for path in paths}) == len(names)
    assert {path.parent for path in paths} == {tmp_path / "hdi"}
    assert not any(path.stem[-2:] == "-1" for path in paths), "apart by name, not by who was first"
    assert paths[1].name == "history-a-b.jsonl"


def test_facts_that_json_cannot_represent_do_not_lose_the_line(tmp_path):
    history = History(tmp_path / "history.jsonl")
    history.note("intervention", step=3, facts={"value": torch.tensor(0.5), "set": {1}, "odd": object, 3: b"x"})
    (line,) = read_lines_of_any_kind(history.path)
    assert (line["facts"]["value"], line["facts"]["set"]) == (0.5, [1])


def read_lines_of_any_kind(path) -> list[dict]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def test_the_frame_holds_the_worst_pair_of_each_layer_that_has_one(tmp_path):
    history = History(tmp_path / "history.jsonl")
    history.write(record_at(10))
    history.write(Record(20, {"attn": LayerRecord({"hdi": 0.4})}))
    frame = load_history(history.path)
    assert frame["worst_pair"][0] == (1, 3)
    assert not isinstance(frame["worst_pair"][1], tuple)


def test_a_checkpoint_without_its_history_starts_a_new_one_with_a_warning(tmp_path):
    said = []
    state = {"history": str(tmp_path / "gone" / "history.jsonl"), "run": "abc"}
    history = place_history(True, tmp_path, state=state, say=lambda kind, message: said.append((kind, message)))
    assert history.path == tmp_path / "hdi" / "history.jsonl"
    ((kind, message),) = said
    assert kind == "no history"
    assert "gone" in message
    assert place_history(True, tmp_path, state=state).path == history.path  # without a word where nobody listens


def test_while_a_line_is_written_no_other_writer_gets_the_lock(tmp_path):
    fcntl = pytest.importorskip("fcntl")
    path = tmp_path / "history.jsonl"
    with path.open("ab", buffering=0) as file, path.open("ab", buffering=0) as other:
        with locked(file), pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with locked(file), locked(other):  # which does not wait for it
            pass


def test_a_history_of_a_relative_path_stays_one_file_when_the_working_directory_changes(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    history = History(Path("run/history.jsonl"), is_new=True)
    history.begin(0, [])
    history.note("first")
    monkeypatch.chdir(tmp_path / "elsewhere")
    history.note("second")
    assert [path.relative_to(tmp_path) for path in tmp_path.rglob("*.jsonl")] == [Path("run/history.jsonl")]
    assert [line["kind"] for line in read_lines(tmp_path / "run/history.jsonl")][-2:] == ["first", "second"]
