"""The benchmarks run, small, and what they write says how to make it again. No time is asserted."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest

from tests.benchmarks import bench_growth, bench_reading, bench_start, bench_step, differences, plan, ratios
from tests.benchmarks.ratios import measure


@pytest.mark.slow
@pytest.mark.parametrize(("bench", "rows"), [(bench_reading, 12), (bench_step, 3)], ids=["bench_reading", "bench_step"])
def test_a_benchmark_writes_its_command_and_a_ratio_with_its_spread(bench, rows, tmp_path, capsys):
    path = tmp_path / "deep" / "report.md"
    bench.main(["--small", "--rounds", "3", "--output", str(path)])
    text = path.read_text()
    assert f"python -m {bench.__name__} " in text.splitlines()[0]
    found = re.findall(r"^\| .* \| ([\d.]+) \| ([\d.]+) - ([\d.]+) \|", text, flags=re.M)
    assert len(found) == rows
    for median, low, high in found:
        assert float(low) <= float(median) <= float(high)
    assert found[0] == ("1.00", "1.00", "1.00")
    assert capsys.readouterr().out.strip() == text.strip()


@pytest.mark.slow
def test_measured_pairs_of_armed_steps_are_stored_and_resumed(tmp_path):
    pairs, report = tmp_path / "pairs.jsonl", tmp_path / "report.md"
    for rounds in (2, 3):
        options = ["--gpt2", "--small", "--rounds", str(rounds), "--pairs", str(pairs), "--output", str(report)]
        bench_step.main(options)
        kept = [json.loads(line) for line in pairs.read_text().splitlines()]
        assert len(kept) == rounds
        ratios = sorted(one["armed"] / one["unarmed"] for one in kept)
        row = report.read_text().splitlines()[-3]
        assert row.startswith("| on, armed: reading, rules, history and logger | ")
        assert f"| {ratios[0]:.2f} - {ratios[-1]:.2f} |" in row


def test_finding_heads_is_measured_of_every_layer_of_the_models_that_the_report_names():
    for name, (layers, _) in bench_start.SMALL.items():
        found = bench_start.find(name)
        assert found["layers"] == layers
        assert found["seconds"] > 0
        # Parameters on the meta device have sizes, and no memory that finding could take for a copy.
        assert found["weights"] > 0


@pytest.mark.slow
def test_the_report_of_the_start_gives_each_import_and_each_model_its_row(tmp_path):
    path = tmp_path / "start.md"
    bench_start.main(["--small", "--rounds", "1", "--output", str(path)])
    rows = path.read_text().splitlines()
    assert "python -m tests.benchmarks.bench_start --small --rounds 1 " in rows[0]
    for name in (*bench_start.IMPORTS, *bench_start.SMALL, "2 layers", "2 layers whose heads nothing explains"):
        assert sum(row.startswith(f"| {name} | ") for row in rows) == 1


def test_exponents_are_fitted_round_by_round_and_compared_within_a_round():
    sizes = [1, 2, 4, 8, 16]
    assert bench_growth.exponent(sizes, [3 * size**2 for size in sizes]) == pytest.approx(2)
    powers, slower = (1.8, 2.0, 2.1), (1.0, 7.0, 3.0)  # a round in which all takes as many times as long
    readings = [[factor * size**power for power, factor in zip(powers, slower)] for size in sizes]
    products = [[factor * size ** (power + 0.5) for power, factor in zip(powers, slower)] for size in sizes]
    found = bench_growth.Exponents.of(sizes, readings, products)
    assert found.reading == pytest.approx(powers)
    assert found.products == pytest.approx([power + 0.5 for power in powers])
    assert found.cells() == "2.00 | 2.50 | -0.50 (-0.50 to -0.50)"


def test_ratios_are_taken_round_by_round(monkeypatch):
    clock = iter([0, 9, 9, 20, 20, 21, 21, 23, 23, 33, 33, 63])  # warm-up, 1 against 2, 10 against 30
    monkeypatch.setattr(ratios, "time", SimpleNamespace(process_time=lambda: next(clock), perf_counter=None))
    first, second = measure({"a": lambda: None, "b": lambda: None}, rounds=2)
    assert (first.median, first.low, first.high) == (1, 1, 1)
    assert (second.median, second.low, second.high) == (2.5, 2, 3)


def test_the_interval_of_a_median_leaves_out_what_order_statistics_allow():
    # P(Binomial(n, 1/2) <= k - 1) <= 0.025: tables give the k-th value from each end.
    assert [ratios.outside(rounds) for rounds in (2, 5, 8, 9, 15, 20, 100)] == [0, 0, 0, 1, 3, 5, 39]


def test_the_added_time_is_the_median_difference_of_pairs_under_any_drift(monkeypatch):
    clock = SimpleNamespace(now=0.0, drift=0.0)

    def takes(seconds):
        def work():
            clock.drift += 0.001
            clock.now += seconds + clock.drift

        return work

    monkeypatch.setattr(differences, "time", SimpleNamespace(process_time=lambda: clock.now))
    cost = differences.added(takes(5), takes(7), pairs=40)
    # Which of a pair comes first changes, so that the drift takes off as much as it adds.
    assert cost.median == pytest.approx(2, abs=0.0011)
    assert cost.low <= cost.median <= cost.high
    assert cost.high - cost.low <= 0.0021


def test_the_traffic_plan_sends_as_many_bytes_as_its_sizes_state():
    small = plan.Model(layers=1, heads=2, key_heads=1, value_dim=3, width=8)
    assert plan.bytes_of_weights(small) == 8 * (4 + 9 + 22)
    # Blocks of each pair of heads once, and the squares of them.
    assert plan.bytes_of_outputs(small) == 8 * (1 + 6 + 1 + 4) + 4 * 9 * 3 + 8 * 4
    large = plan.Model(layers=1, heads=2, key_heads=1, value_dim=256, width=8)
    assert plan.bytes_of_outputs(large) == 8 * (1 + 512 + 1 + 4) + 4 * 256**2 * 3 + 8 * 4
    assert plan.bytes_of_outputs(small, with_overlap=False) == 8 * 12
    assert plan.bytes_of_tokens(small) == 8 * (2 * 8 + 4) + 4 * 2 * (8 + 6 + 4 + 2)
    assert plan.ring_bytes(100, 2) == 100
    assert "10,000 ranks" in plan.report(10_000)[0]
