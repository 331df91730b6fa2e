from __future__ import annotations

import base64
import itertools
import json
import os
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hdi_callback.core import head_diversity
from hdi_callback.monitoring.alerts import Alert, Finding
from hdi_callback.monitoring.history import History, read_history
from hdi_callback.monitoring.history.matrices import (
    MatrixError,
    MatrixFile,
    decode_layer,
    encode_layer,
    matrix_path,
    steps_to_leave_out,
)
from hdi_callback.monitoring.history.place import place_history
from hdi_callback.monitoring.readings import LayerRecord, Measurement, Reading, Record

NAMES = ("overlap", "energy_overlap", "pair_alignment", "energy_pair_alignment")


def symmetric(heads: int, seed: int = 0) -> torch.Tensor:
    drawn = torch.rand(heads, heads, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (drawn + drawn.T) / 2


def record_at(step: int, heads: int = 6, layers: tuple[str, ...] = ("a", "b")) -> Record:
    drawn = {name: symmetric(heads, seed=step) for name in NAMES}
    return Record(step, {name: LayerRecord({"hdi": 0.5}, {}, drawn) for name in layers}, time=1.7e9 + step / 8)


def alert_at(step: int, layer: str) -> Alert:
    return Alert(step, layer, "worst pair", "warning", "", Finding("", heads=(0, 1)))


@settings(max_examples=60, deadline=None)
@given(heads=st.integers(1, 9), low=st.floats(-1e3, 1e3), width=st.floats(0, 1e3), seed=st.integers(0, 99))
def test_a_decoded_entry_is_off_by_at_most_half_a_quantisation_step(heads, low, width, seed):
    matrix = low + width * symmetric(heads, seed)
    again = decode_layer(encode_layer({"m": matrix}))["m"]
    ranges = matrix.amax() - matrix.amin()
    assert (again - matrix).abs().max() <= ranges / 508 + 1e-6 * (1 + abs(low) + width)
    assert torch.equal(again, again.T)


def test_non_finite_matrix_entries_are_decoded_as_nan_and_do_not_affect_others():
    matrix = symmetric(5)
    matrix[1], matrix[:, 1] = torch.nan, torch.nan
    matrix[3, 4] = matrix[4, 3] = torch.inf
    again = decode_layer(encode_layer({"m": matrix, "other": torch.eye(3)}))
    assert torch.equal(again["m"].isnan(), ~matrix.isfinite())
    assert torch.allclose(again["m"].nan_to_num(), matrix.nan_to_num(posinf=0), atol=1 / 508)
    assert torch.equal(again["other"], torch.eye(3, dtype=torch.float64))


def test_matrices_can_be_decoded_with_the_standard_library_alone(tmp_path):
    record = record_at(0)
    History(tmp_path / "history.jsonl").write(record)
    line = json.loads((tmp_path / "history.matrices").read_text())
    layer = line["layers"]["a"]
    codes = zlib.decompress(base64.b64decode(layer["data"]))
    first = layer["matrices"][0]
    low, high = first["pairs"]
    assert (line["step"], first["name"], first["heads"]) == (0, "overlap", 6)
    pairs = [(i, j) for i in range(6) for j in range(i + 1, 6)]
    for place, (i, j) in enumerate(pairs):
        truth = float(record.layers["a"].matrices["overlap"][i, j])
        assert low + codes[place] * (high - low) / 254 == pytest.approx(truth, abs=(high - low) / 508 + 1e-8)


def test_matrices_are_kept_at_step_0_at_alerts_at_the_end_and_at_the_cadence(tmp_path):
    history = History(tmp_path / "history.jsonl", matrix_every=4)
    history.end_with(11)
    for step in range(12):
        history.write(record_at(step), [alert_at(step, "b")] if step == 6 else ())
    run = read_history(history.path)
    assert run.matrix_steps("a") == run.matrix_steps("b") == [0, 4, 6, 8, 11]
    assert torch.allclose(run.matrices(6, "b")["overlap"], record_at(6).layers["b"].matrices["overlap"], atol=1 / 508)
    assert run.matrices(5, "b") == run.matrices(6, "nothing") == {}


def test_matrix_every_0_keeps_no_matrix(tmp_path):
    history = History(tmp_path / "history.jsonl", matrix_every=0)
    history.write(record_at(0), [alert_at(0, "a")])
    assert not matrix_path(history.path).exists()


def test_a_run_stays_within_its_budget_and_keeps_its_alerts(tmp_path):
    budget = 60_000
    history = History(tmp_path / "history.jsonl", matrix_every=1, budget=budget)
    history.end_with(199)
    for step in range(200):
        history.write(record_at(step, heads=16), [alert_at(step, "b")] if step in (3, 50) else ())
    size = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert size <= budget
    run = read_history(history.path)
    assert len(run.records()) == 200
    kept = run.matrix_steps("a")
    assert {0, 199} <= set(kept)
    assert {3, 50} <= set(run.matrix_steps("b"))
    assert len([step for step in kept if step >= 100]) > len([step for step in kept if step < 100])
    assert run.matrices(3, "b")["overlap"].shape == (16, 16)


def test_a_budget_that_the_numbers_alone_exceed_costs_one_warning(tmp_path):
    said = []
    history = History(tmp_path / "history.jsonl", budget=500, say=lambda *reported: said.append(reported))
    for step in range(20):
        history.write(record_at(step))
    assert [kind for kind, _ in said] == ["history budget"]
    assert len(read_history(history.path).records()) == 20


def test_the_numbers_of_single_heads_are_left_out_once_a_quarter_of_the_budget_is_used(tmp_path):
    history = History(tmp_path / "history.jsonl", matrix_every=5, budget=4000)
    for step in range(12):
        layer = LayerRecord({"hdi": 0.5}, {"worst_pair": [0, 1], "rank": [2.0] * 30})
        history.write(Record(step, {"a": layer}))
    arrays = [record.layers["a"].arrays for record in read_history(history.path).records()]
    assert all("worst_pair" in names for names in arrays)
    has_heads = ["rank" in names for names in arrays]
    first = has_heads.index(False)
    assert 2 <= first <= 5
    assert has_heads[first:] == [step % 5 == 0 for step in range(first, 12)]


@settings(max_examples=100, deadline=None)
@given(steps=st.sets(st.integers(0, 10**6), min_size=1, max_size=60), share=st.floats(0, 1.2))
def test_thinning_removes_as_much_as_requested_and_no_more(steps, share):
    sizes = dict.fromkeys(steps, 10)
    surplus = share * 10 * len(steps)
    without = steps_to_leave_out(sizes, surplus)
    assert without <= set(steps)
    assert 10 * len(without) >= min(surplus, 10 * len(steps))
    assert 10 * len(without) <= surplus + 10


@settings(max_examples=50, deadline=None)
@given(steps=st.sets(st.integers(0, 200), min_size=5, max_size=40))
def test_thinning_a_third_of_the_readings_removes_no_two_neighbours(steps):
    kept = sorted(steps)
    count = (len(kept) - 2) // 3  # a reading that is dropped spares two others, and the first and last stay
    without = steps_to_leave_out(dict.fromkeys(steps, 1), count)
    assert len(without) == count
    assert not any({earlier, later} <= without for earlier, later in itertools.pairwise(kept))
    assert not {kept[0], kept[-1]} & without


def test_a_half_written_line_of_a_killed_process_loses_only_its_own_matrices(tmp_path):
    history = History(tmp_path / "history.jsonl", matrix_every=1)
    for step in (0, 1):
        history.write(record_at(step))
    path = matrix_path(history.path)
    with path.open("r+b") as file:
        file.truncate(os.path.getsize(path) - 30)
    History(history.path, matrix_every=1).write(record_at(2))
    assert read_history(history.path).matrix_steps("a") == [0, 2]


def test_matrices_beyond_the_checkpoint_that_a_run_resumed_from_do_not_count(tmp_path):
    history = History(tmp_path / "history.jsonl", matrix_every=1)
    history.begin(0, [])
    for step in (0, 10, 20, 30):
        history.write(record_at(step))
    again = History(history.path, matrix_every=1, run=history.run)
    again.begin(10, [], last_reading=10)
    later = record_at(20)
    again.write(Record(20, later.layers, time=later.time + 99))
    run = read_history(history.path)
    assert run.matrix_steps("a") == [0, 10, 20]
    assert run.matrices(30, "a") == {}


def test_a_branch_copies_the_matrices_of_its_parent_up_to_its_step(tmp_path):
    parent = place_history(True, tmp_path / "one", matrix_every=1)
    assert parent is not None
    parent.begin(0, [{"name": "a"}])
    for step in (0, 10, 20):
        parent.write(record_at(step, layers=("a",)))
    state = {"history": str(parent.path), "run": parent.run, "last_step": 10, "layers": {}}
    branch = place_history(True, tmp_path / "two", state=state, matrix_every=1)
    assert branch is not None
    branch.begin(10, [{"name": "a"}], last_reading=10)
    branch.write(record_at(30, layers=("a",)))
    assert read_history(branch.path).matrix_steps("a") == [0, 10, 30]
    assert read_history(parent.path).matrix_steps("a") == [0, 10, 20]


def test_matrices_in_the_lines_of_earlier_versions_are_read(tmp_path):
    path = tmp_path / "history.jsonl"
    layers = {"attn": {"values": {"hdi": 0.5}, "arrays": {}, "matrices": {"overlap": [[1, 0.3], [0.3, 1]]}}}
    path.write_text(json.dumps({"kind": "reading", "step": 5, "layers": layers}) + "\n")
    run = read_history(path)
    assert run.matrix_steps() == run.matrix_steps("attn") == [5]
    assert run.matrices(5, "attn")["overlap"][0, 1] == pytest.approx(0.3)


def test_listing_the_steps_of_every_layer_scans_the_file_once(tmp_path, monkeypatch):
    path = tmp_path / "history.jsonl"
    old = {"values": {}, "matrices": {"overlap": [[1.0, 0.5], [0.5, 1.0]]}}
    lines = [
        {"kind": "reading", "step": step, "time": 0.0, "layers": {"a": old, "b": {"values": {}}}} for step in (0, 10)
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    History(path).write(record_at(20))
    run = read_history(path)
    walked: list[str] = []
    monkeypatch.setattr(
        "hdi_callback.monitoring.history.run_history.printable", lambda name: walked.append(name) or name
    )
    for _ in range(5):
        assert [run.matrix_steps(layer) for layer in ("a", "b", "c")] == [[0, 10, 20], [20], []]
        assert run.matrix_steps() == [0, 10, 20]
    assert walked == ["a", "a"]


@pytest.mark.parametrize(
    "damage",
    [
        {"data": "no base64!"},
        {"data": base64.b64encode(zlib.compress(bytes(10**6))).decode()},
        {"data": base64.b64encode(b"not zlib").decode()},
        {"data": None},
        {"matrices": [{"name": "m", "heads": 10**9, "pairs": [0, 1], "diagonal": [0, 1]}]},
        {"matrices": [{"name": "m", "heads": 2, "pairs": [0], "diagonal": [0, 1]}]},
        {"matrices": 7},
    ],
)
def test_damaged_matrices_are_refused_and_read_as_not_kept(tmp_path, damage):
    layer = {**encode_layer({"m": torch.eye(3)}), **damage}
    with pytest.raises(MatrixError):
        decode_layer(layer)
    history = History(tmp_path / "history.jsonl")
    history.write(record_at(0, layers=("a",)))
    path = matrix_path(history.path)
    line = json.loads(path.read_text())
    line["layers"]["a"].update(layer)
    path.write_text(json.dumps(line, separators=(",", ":")) + "\n")
    assert read_history(history.path).matrices(0, "a") == {}


def test_a_reader_opened_before_thinning_returns_no_matrix_of_another_step(tmp_path):
    history = History(tmp_path / "history.jsonl", matrix_every=1)
    for step in range(30):
        history.write(record_at(step))
    run, file = read_history(history.path), MatrixFile(matrix_path(history.path))
    file.thin(file.size * 0.7)
    for step in range(30):
        found = run.matrices(step, "a")
        if found:
            assert torch.allclose(found["overlap"], record_at(step).layers["a"].matrices["overlap"], atol=1 / 508)
    assert 10 < len(read_history(history.path).matrix_steps("a")) < 20


def test_the_time_of_a_reading_is_kept_to_the_millisecond(tmp_path):
    history = History(tmp_path / "history.jsonl")
    history.write(Record(0, {}, time=1763778123.4567))
    assert read_history(history.path).records()[0].time == 1763778123.457


@pytest.mark.slow
def test_a_model_of_96_layers_of_128_heads_stays_within_two_tenths_of_a_megabyte_a_reading(tmp_path):
    weights = torch.randn(1, 128, 16, 512, generator=torch.Generator().manual_seed(0))
    reading = Reading(0, ("a",), (Measurement(("a",), "key", head_diversity(weights)),))
    layer = reading.record().layers["a"]
    history = History(tmp_path / "history.jsonl", budget=60e6)
    history.end_with(299)
    for step in range(300):
        alerts = [alert_at(step, "layers.17")] if step % 100 == 50 else ()
        layers = {f"layers.{number}": layer for number in range(96)}
        history.write(Record(step, layers, time=step), alerts)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 60e6
    run = read_history(history.path)
    assert {0, 299} <= set(run.matrix_steps("layers.3"))
    assert set(range(50, 300, 100)) <= set(run.matrix_steps("layers.17"))
