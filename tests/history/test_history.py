"""What was written is read back, whatever happened to the process and to the file in between."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hdi_callback.errors import MisconfigurationError
from hdi_callback.history import History, RunHistory, load_history
from hdi_callback.record import Action, Alert, LayerRecord, Record

FACTS = [{"name": "attn", "num_heads": 4}]
ALERT = Alert(10, "worst pair", "warning", {"attn": (1, 3)}, "heads 1 and 3 of attn are nearly one head", "write this")


def record_at(step: int, hdi: float = 0.5, **changes) -> Record:
    matrix = torch.eye(4) * 0.25 + step / 1000
    layer = LayerRecord(
        values={"hdi": hdi},
        heads={"worst_alignment_pair": [1, 3], "attention_entropy": [0.123456789, math.nan, 2.0, 3.0]},
        matrices={"pair_alignment": matrix},
        absent={"head_covariance": "no forward"},
    )
    return replace(Record(step, {"attn": layer}, time=12.5, loss=1.25), **changes)


def write(path, *steps, hdi=0.5, **arguments) -> History:
    history = History(path, FACTS, **arguments)
    for step in steps:
        history.write(record_at(step, hdi))
    history.close()
    return history


def steps_of(path) -> list[int]:
    return [record.step for record in load_history(path).records]


def test_a_record_is_read_back(tmp_path):
    action = Action(10, "revive heads", ("attn",), "gave head 3 fresh weights", is_refusal=True)
    record = record_at(
        10, 1 / 3, alerts=(ALERT,), actions=(action,), active=(ALERT,), absent={"x": "why"}, is_last=True
    )
    history = History(tmp_path / "deep" / "history.jsonl", FACTS)
    history.write(record)
    history.close()
    run = load_history(history.path)
    (found,) = run.records
    assert run.layers == FACTS
    assert (found.step, found.time, found.loss, found.is_last) == (10, 12.5, 1.25, True)
    assert found.alerts == found.active == (ALERT,)
    assert found.actions == (action,)
    assert found.absent == {"x": "why"}
    layer = found.layers["attn"]
    assert layer.values["hdi"] == pytest.approx(1 / 3, rel=1e-8)
    assert layer.absent == {"head_covariance": "no forward"}
    assert layer.heads["worst_alignment_pair"] == [1, 3]
    assert layer.heads["attention_entropy"] == pytest.approx([0.123456789, math.nan, 2, 3], rel=1e-4, nan_ok=True)
    matrices = run.matrices(10)["attn"]
    torch.testing.assert_close(matrices["pair_alignment"], torch.eye(4) * 0.25 + 0.01, atol=1e-3, rtol=0)


def test_active_alerts_are_known_at_every_reading_and_written_when_they_change(tmp_path):
    history = History(tmp_path / "history.jsonl", FACTS)
    for step, active in ((0, ()), (10, (ALERT,)), (20, (ALERT,)), (30, ())):
        history.write(record_at(step, active=active))
    assert [record.active for record in load_history(history.path).records] == [(), (ALERT,), (ALERT,), ()]
    assert history.path.read_text().count("nearly one head") == 1


def test_numbers_that_are_not_finite_are_null_in_the_file_and_nan_when_read(tmp_path):
    history = History(tmp_path / "history.jsonl", FACTS)
    history.write(record_at(0, math.inf, alerts=(replace(ALERT, value=math.nan),)))
    for line in history.path.read_text().splitlines():
        json.loads(line, parse_constant=lambda word: pytest.fail(word))
    assert math.isnan(load_history(history.path).records[0].layers["attn"].values["hdi"])


@example([1.79765e308, -sys.float_info.max])
@given(st.lists(st.one_of(st.floats(), st.floats(-1, 1), st.integers(-9, 9)), max_size=40))
def test_numbers_of_heads_keep_five_digits_whatever_their_size(tmp_path_factory, numbers):
    layer = LayerRecord(values={"hdi": 1 / 3}, heads={"rank": [1, 2], "of_heads": numbers})
    history = History(tmp_path_factory.mktemp("run") / "history.jsonl", FACTS)
    history.write(Record(0, {"attn": layer}))
    history.close()
    written = json.loads(history.path.read_text().splitlines()[1])["layers"]["attn"]["heads"]
    assert written["rank"] == [1, 2]
    for number, of_file in zip(numbers, written["of_heads"], strict=True):
        if isinstance(number, int):
            assert (of_file, type(of_file)) == (number, int)
        elif math.isfinite(number):
            assert of_file == pytest.approx(number, rel=1.001 * 10**-4 / 2, abs=5e-324)
            is_largest = math.isinf(float(f"{number:.5g}"))
            assert is_largest or len(Decimal(repr(of_file)).normalize().as_tuple().digits) <= 5
        else:
            assert of_file is None


def test_matrices_are_kept_of_the_first_reading_every_tenth_alerts_and_the_last(tmp_path):
    history = History(tmp_path / "history.jsonl", FACTS)
    for step in range(25):
        history.write(record_at(step, alerts=(ALERT,) if step == 13 else (), is_last=step == 24))
    run = load_history(history.path)
    assert run.matrix_steps == [0, 10, 13, 20, 24]
    assert run.matrices(7) == {}


def test_a_series_has_nan_where_a_layer_was_not_measured(tmp_path):
    run = RunHistory(tmp_path, FACTS, [record_at(0, 0.25), replace(record_at(1), layers={})])
    assert run.series("hdi")["attn"] == pytest.approx([0.25, math.nan], nan_ok=True)


# --- whose file it is


def test_a_second_run_takes_the_next_free_name(tmp_path):
    first, second, third = (write(tmp_path / "history.jsonl", 0, hdi=hdi) for hdi in (0.1, 0.2, 0.3))
    assert [one.path.name for one in (first, second, third)] == ["history.jsonl", "history-1.jsonl", "history-2.jsonl"]
    for history, hdi in ((first, 0.1), (second, 0.2), (third, 0.3)):
        assert load_history(history.path).series("hdi")["attn"] == [hdi]


def test_of_two_histories_in_a_folder_the_newest_is_taken(tmp_path):
    old, new = write(tmp_path / "hdi" / "history.jsonl", 0), write(tmp_path / "hdi" / "history.jsonl", 0, 10)
    os.utime(old.path, (1, 1))
    assert load_history(tmp_path).path == new.path
    assert load_history(old.path).path == old.path


def test_a_change_of_directory_does_not_matter(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    history = History("run/history.jsonl", FACTS)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    history.write(record_at(0))
    history.close()
    assert history.path == tmp_path / "run" / "history.jsonl"
    assert steps_of(history.path) == [0]
    assert load_history(history.path).matrix_steps == [0]


def test_a_resumed_run_cuts_what_came_after_its_checkpoint(tmp_path):
    path = tmp_path / "history.jsonl"
    write(path, *range(0, 50, 5), hdi=0.1)
    write(path, 25, 30, hdi=0.2, resume_step=20)
    run = load_history(path)
    assert [(r.step, r.layers["attn"].values["hdi"]) for r in run.records] == [
        (0, 0.1), (5, 0.1), (10, 0.1), (15, 0.1), (20, 0.1), (25, 0.2), (30, 0.2),
    ]  # fmt: skip
    assert [file.name for file in tmp_path.glob("*.jsonl*")] == ["history.jsonl"]


def test_matrices_after_the_checkpoint_are_removed_too(tmp_path):
    path = tmp_path / "history.jsonl"
    write(path, *range(11))
    assert load_history(path).matrix_steps == [0, 10]
    write(path, resume_step=5)
    assert load_history(path).matrix_steps == [0]


def test_a_resumed_run_with_more_layers_goes_on_and_one_with_other_layers_does_not(tmp_path):
    path = tmp_path / "history.jsonl"
    write(path, 0)
    more = History(path, [*FACTS, {"name": "late"}], resume_step=0)
    more.close()
    assert more.path == path
    assert [facts["name"] for facts in load_history(path).layers] == ["attn", "late"]
    other = History(path, [{"name": "decoder"}], resume_step=0)
    other.close()
    assert other.path.name == "history-1.jsonl"
    assert steps_of(path) == [0], "what is another model's is left alone"


def test_a_resumed_run_whose_file_is_gone_begins_a_new_one(tmp_path):
    history = write(tmp_path / "history.jsonl", 30, resume_step=20)
    assert steps_of(history.path) == [30]


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_text("a, b\n1, 2\n"),
        lambda path: path.write_text('{"layers": 3}\n'),
        lambda path: path.write_text('{"layers": [{"heads": 3}]}\n'),
        lambda path: path.write_text("[1, 2]\n"),
        lambda path: (path.rename(path.with_name("other")), path.symlink_to(path.with_name("other"))),
        lambda path: (path.unlink(), path.symlink_to("nowhere")),
        lambda path: (path.unlink(), path.mkdir()),
    ],
    ids=["empty", "a table", "other JSON", "other layers", "a list", "linked", "linked to nothing", "a folder"],
)
def test_a_file_that_is_not_the_runs_own_history_is_left_alone_and_a_new_one_begun_beside_it(tmp_path, harm):
    first = write(tmp_path / "history.jsonl", 0, 1, 2)
    harm(first.path)
    before = first.path.read_bytes() if first.path.is_file() else None
    second = write(first.path, 2, 3, resume_step=1, resume_run=first.run, resume_path=first.path)
    assert second.path.name == "history-1.jsonl"
    assert steps_of(second.path) == [2, 3]
    assert (first.path.read_bytes() if first.path.is_file() else None) == before


def test_a_file_that_cannot_be_read_is_left_alone_and_a_new_one_begun_beside_it(tmp_path, monkeypatch):
    first = write(tmp_path / "history.jsonl", 0, 1, 2)
    read = Path.read_bytes

    def refuses(path):
        if path == first.path:
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", refuses)
        second = write(first.path, 2, 3, resume_step=1, resume_run=first.run, resume_path=first.path)
    assert second.path.name == "history-1.jsonl"
    assert (steps_of(first.path), steps_of(second.path)) == ([0, 1, 2], [2, 3])


def test_a_file_of_another_run_is_left_alone_and_the_runs_own_is_found_where_its_folder_was_moved(tmp_path):
    other = write(tmp_path / "a" / "history.jsonl", 0, 1, 2)
    own = write(tmp_path / "a" / "history.jsonl", 0, 1, 2, hdi=0.1)
    (tmp_path / "a").rename(tmp_path / "b")
    path = tmp_path / "b" / "history.jsonl"
    resumed = write(path, 2, resume_step=1, resume_run=own.run, resume_path=own.path)
    assert (resumed.path.name, resumed.run) == ("history-1.jsonl", own.run)
    assert load_history(resumed.path).series("hdi")["attn"] == [0.1, 0.1, 0.5]
    assert steps_of(path) == [0, 1, 2]
    assert other.run != own.run


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: path.unlink(),
        lambda path: path.rename(path.with_name("elsewhere")),
        lambda path: os.replace(write(path, 99).path, path),
    ],
    ids=["deleted", "moved", "replaced"],
)
def test_that_a_file_is_gone_is_an_error_and_what_has_its_name_is_left_alone(tmp_path, harm):
    history = History(tmp_path / "history.jsonl", FACTS)
    history.write(record_at(0))
    harm(history.path)
    with pytest.raises(OSError, match="moved, deleted or replaced"):
        history.write(record_at(1))
    history.close()
    assert not history.path.exists() or steps_of(history.path) == [99]


# --- interrupted writes


CHILD = """
import sys
from tests.history.test_history import FACTS, History, record_at
resume = int(sys.argv[2]) if sys.argv[2:] else None
history = History(sys.argv[1], FACTS, resume_step=resume)
print(history.path, flush=True)
step = -1 if resume is None else resume
while True:
    step += 1
    history.write(record_at(step))
"""


def run_and_kill(path, root, *arguments) -> None:
    command = [sys.executable, "-c", CHILD, str(path), *map(str, arguments)]
    child = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True)
    child.stdout.readline()
    time.sleep(0.3)
    child.send_signal(signal.SIGKILL)
    child.wait(30)


def test_a_run_killed_while_it_writes_and_one_killed_after_it_resumed_leave_a_history_without_gaps(tmp_path, request):
    path, root = tmp_path / "history.jsonl", request.config.rootpath
    run_and_kill(path, root)
    steps = steps_of(path)
    assert steps == list(range(len(steps)))
    assert len(steps) > 5
    run_and_kill(path, root, 4)
    run = load_history(path)
    assert [record.step for record in run.records] == list(range(len(run.records)))
    assert run.skipped_lines <= 1
    write(path, resume_step=2)
    assert steps_of(path) == [0, 1, 2]


def test_a_line_that_was_being_written_is_skipped_counted_and_cut_by_a_resumed_run(tmp_path):
    path = write(tmp_path / "history.jsonl", 0, 1, 2).path
    os.truncate(path, path.stat().st_size - 25)
    run = load_history(path)
    assert ([record.step for record in run.records], run.skipped_lines) == ([0, 1], 1)
    write(path, 2, resume_step=1)
    run = load_history(path)
    assert ([record.step for record in run.records], run.skipped_lines) == ([0, 1, 2], 0)


def test_a_process_that_dies_while_it_cuts_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = write(tmp_path / "history.jsonl", 0, 1, 2).path
    before = path.read_bytes()

    def die(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("hdi_callback.history.writer.os.replace", die)
    with pytest.raises(KeyboardInterrupt):
        History(path, FACTS, resume_step=0)
    monkeypatch.undo()
    assert path.read_bytes() == before
    write(path, resume_step=0)
    assert steps_of(path) == [0]
    assert [file.name for file in tmp_path.glob("*.part")] == []


def test_after_a_full_disk_only_the_readings_that_did_not_fit_are_missing(tmp_path, monkeypatch):
    history = History(tmp_path / "history.jsonl", FACTS)
    history.write(record_at(0))
    whole = os.write
    monkeypatch.setattr("hdi_callback.history.writer.os.write", lambda file, data: whole(file, data[:50]))
    with pytest.raises(OSError, match="is the disk full"):
        history.write(record_at(1))
    monkeypatch.undo()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        history.write(record_at(2))
    assert steps_of(history.path) == [0, 2]


# --- files of others


@given(data=st.binary(max_size=200))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_between_two_readings_hide_neither(tmp_path, data):
    path = write(tmp_path / f"history{os.urandom(4).hex()}.jsonl", 1, 2).path
    header, first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(header + first + data + b"\n" + second)
    assert steps_of(path) == [1, 2]


@pytest.mark.parametrize(
    "line", ['{"step":7,"layers":[]}', '{"layers":{"attn":{}},"step":7}', "[1]", "null", '{"layers":3}']
)
def test_json_that_is_no_reading_is_skipped_and_counted(tmp_path, line):
    path = write(tmp_path / "history.jsonl", 1).path
    with path.open("a") as file:
        file.write(f"{line}\n")
    run = load_history(path)
    assert ([record.step for record in run.records], run.skipped_lines) == ([1], 1)


def test_a_path_without_a_history_is_an_error_that_says_what_to_write(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(MisconfigurationError, match=r"its run has not begun, .*Write the file, or the folder"):
            load_history(path)


def test_a_metric_of_no_name_is_an_error_and_no_list_of_nan(tmp_path):
    with pytest.raises(MisconfigurationError, match="Did you mean 'hdi_worst_pair'"):
        load_history(write(tmp_path / "history.jsonl", 0).path).series("hdi_worst_pairs")


def test_a_record_tells_its_active_alerts_also_where_none_is_new():
    assert repr(record_at(3)) == "<Record at step 3: 1 layers, no active alert>"
    active = (replace(ALERT, level="critical"), ALERT, ALERT)
    assert repr(record_at(3, active=active)) == "<Record at step 3: 1 layers, active alerts: 1 critical, 2 warning>"


def test_the_frame_has_a_row_for_each_step_and_layer(tmp_path):
    pytest.importorskip("pandas")
    frame = load_history(write(tmp_path / "history.jsonl", 0, 10).path).to_frame()
    assert frame[["step", "layer", "hdi", "loss"]].to_numpy().tolist() == [
        [0, "attn", 0.5, 1.25],
        [10, "attn", 0.5, 1.25],
    ]


def test_alerts_of_a_run_are_one_for_each_event_with_its_highest_level_and_how_it_ended(tmp_path):
    worse = replace(ALERT, step=20, level="critical", message="worse", status="worse")
    over = replace(ALERT, step=30, status="resolved")
    records = [record_at(10, alerts=(ALERT,)), record_at(20, alerts=(worse,)), record_at(30, alerts=(over,))]
    run = RunHistory(tmp_path / "history.jsonl", FACTS, records)
    assert [(alert.step, alert.level, alert.message, alert.status) for alert in run.alerts] == [
        (10, "critical", "worse", "resolved")
    ]
    assert run.alerts[0].is_over


def test_a_plot_has_the_curves_of_one_layer_and_a_layer_of_no_name_is_an_error(tmp_path):
    run = load_history(write(tmp_path / "history.jsonl", 0, 10).path)
    figure = run.plot("attn")
    drawn = {line.get_label(): list(line.get_ydata()) for panel in figure.axes for line in panel.lines}
    assert drawn == {"lowest": [0.5, 0.5], "training loss": [1.25, 1.25]}
    with pytest.raises(MisconfigurationError, match=r"`layer` must be .attn., got 'atn'\. Did you mean 'attn'"):
        run.plot("atn")
    with pytest.raises(MisconfigurationError, match="There is nothing to draw: Nothing to judge"):
        RunHistory(tmp_path / "history.jsonl", FACTS, []).plot()
