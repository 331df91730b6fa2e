from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import pytest
import torch

from hdi_callback.errors import MisconfigurationError
from hdi_callback.monitoring.history import History, load_history, read_lines, read_records
from hdi_callback.monitoring.readings import LayerRecord, Record


def record_at(step: int, hdi: float = 0.5) -> Record:
    layer = LayerRecord(
        values={"hdi": hdi}, arrays={"worst_pair": [1, 3]}, matrices={"overlap": torch.eye(4, dtype=torch.float64)}
    )
    return Record(step, {"attn": layer}, {"other": "a reason"}, epoch=2, axis=step + 1, time=12.5)


def test_what_is_written_is_read_back(tmp_path):
    history = History(tmp_path / "deep" / "history.jsonl")
    history.write(record_at(10, 1 / 3))
    (record,) = read_records(history.path)
    assert (record.step, record.epoch, record.axis, record.time) == (10, 2, 11, 12.5)
    assert record.absent == {"other": "a reason"}
    assert record.layers["attn"].values["hdi"] == pytest.approx(1 / 3, rel=1e-8)
    assert record.layers["attn"].arrays == {"worst_pair": [1, 3]}
    assert torch.equal(record.layers["attn"].matrices["overlap"], torch.eye(4))


def test_matrices_are_kept_in_the_first_and_every_nth_reading(tmp_path):
    history = History(tmp_path / "history.jsonl", matrix_every=3)
    for step in range(7):
        history.write(record_at(step))
    kept = [record.step for record in read_records(history.path) if record.layers["attn"].matrices]
    assert kept == [0, 3, 6]


def test_the_file_is_only_ever_appended_to(tmp_path):
    history = History(tmp_path / "history.jsonl")
    before = b""
    for step in range(4):
        history.write(record_at(step))
        after = history.path.read_bytes()
        assert after.startswith(before)
        assert len(after) > len(before)
        before = after


def test_what_json_has_no_word_for_is_written_as_null(tmp_path):
    history = History(tmp_path / "history.jsonl")
    history.write(
        Record(0, {"attn": LayerRecord(values={"hdi": math.nan}, arrays={"nearest_overlap": [math.inf, 0.5]})})
    )
    line = json.loads(history.path.read_text(), parse_constant=lambda word: pytest.fail(word))
    assert line["layers"]["attn"]["values"] == {"hdi": None}
    assert line["layers"]["attn"]["arrays"] == {"nearest_overlap": [None, 0.5]}


def test_a_torn_last_line_loses_only_itself(tmp_path):
    history = History(tmp_path / "history.jsonl")
    for step in (0, 1, 2):
        history.write(record_at(step))
    with history.path.open("r+b") as file:
        file.truncate(os.path.getsize(history.path) - 25)
    assert [record.step for record in read_records(history.path)] == [0, 1]
    resumed = History(history.path)
    resumed.begin(1, [])
    resumed.write(record_at(2, 0.25))
    records = read_records(history.path)
    assert [record.step for record in records] == [0, 1, 2]
    assert records[-1].layers["attn"].values["hdi"] == 0.25


def test_a_resumption_makes_void_what_was_written_beyond_its_step(tmp_path):
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


def test_of_two_readings_of_one_step_the_later_counts(tmp_path):
    history = History(tmp_path / "history.jsonl")
    history.write(record_at(5, 0.1))
    history.write(record_at(5, 0.9))
    assert [record.layers["attn"].values["hdi"] for record in read_records(history.path)] == [0.9]


def test_what_could_not_be_written_is_written_with_the_next_line(tmp_path):
    blocked = tmp_path / "folder"
    blocked.write_text("a file where the folder should be")
    history = History(blocked / "history.jsonl")
    with pytest.raises(OSError, match="folder"):
        history.write(record_at(0))
    blocked.unlink()
    history.write(record_at(1))
    assert [record.step for record in read_records(history.path)] == [0, 1]


def test_a_killed_process_leaves_all_that_it_had_written(tmp_path, root):
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
