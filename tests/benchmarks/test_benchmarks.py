"""The benchmarks run, small, and what they write says how to make it again. No time is asserted."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from tests.benchmarks import bench_reading, bench_step, ratios
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


def test_ratios_are_taken_round_by_round(monkeypatch):
    clock = iter([0, 9, 9, 20, 20, 21, 21, 23, 23, 33, 33, 63])  # warm-up, 1 against 2, 10 against 30
    monkeypatch.setattr(ratios, "time", SimpleNamespace(process_time=lambda: next(clock), perf_counter=None))
    first, second = measure({"a": lambda: None, "b": lambda: None}, rounds=2)
    assert (first.median, first.low, first.high) == (1, 1, 1)
    assert (second.median, second.low, second.high) == (2.5, 2, 3)


def test_the_interval_of_a_median_leaves_out_what_order_statistics_allow():
    # P(Binomial(n, 1/2) <= k - 1) <= 0.025: tables give the k-th value from each end.
    assert [ratios.outside(rounds) for rounds in (2, 5, 8, 9, 15, 20, 100)] == [0, 0, 0, 1, 3, 5, 39]
