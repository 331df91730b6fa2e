"""The contract that every trainer keeps: same model, same readings, same history."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hdi_callback.dashboards.names import curves
from hdi_callback.monitor.metrics import METRICS, MOVEMENT, PARAMETERS
from hdi_callback.record import Record
from tests.integrations.runs import EVERY, LAYERS, STEPS, TRAINERS, Training

PACKAGES = {"lightning": "lightning", "transformers": "transformers", "accelerate": "accelerate"}


@pytest.fixture(params=list(TRAINERS))
def kind(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(PACKAGES.get(request.param, "torch"))
    return str(request.param)


def plain(name: str) -> str:
    """The name of a layer, without the LightningModule around the model."""
    return name.removeprefix("net.")


def numbers(record: Record) -> dict[str, Any]:
    return {plain(name): layer.values for name, layer in record.layers.items()}


# Since the reading before, whose weights a checkpoint does not hold.
MOVED = {name for name, metric in METRICS.items() if metric.source in {MOVEMENT, PARAMETERS}}


def test_every_trainer_reads_the_same_at_the_same_steps(kind: str, tmp_path: Path) -> None:
    expected = Training(tmp_path / "loop").fit("loop").history
    found = Training(tmp_path / "this").fit(kind).history
    assert [record.step for record in found.records] == [0, 4, 8, STEPS]
    assert [plain(facts["name"]) for facts in found.layers] == LAYERS
    for record, other in zip(found.records, expected.records):
        for layer in LAYERS:
            assert numbers(record)[layer] == pytest.approx(numbers(other)[layer], rel=1e-5, abs=1e-6)


def test_the_last_reading_has_the_weights_alone(kind: str, tmp_path: Path) -> None:
    *before, last = Training(tmp_path).fit(kind).history.records
    assert last.is_last
    assert not any(record.is_last for record in before)
    for layer in last.layers.values():
        assert "hdi" in layer.values
        assert "head_covariance" not in layer.values
        assert layer.absent["head outputs"]
    assert all("head_covariance" in layer.values for record in before for layer in record.layers.values())


def test_the_latest_curves_of_a_callback_are_those_of_the_last_reading(kind: str, tmp_path: Path) -> None:
    run = Training(tmp_path).fit(kind)
    assert run.watcher.latest == pytest.approx(curves(run.history.records[-1]), rel=1e-6)


def test_each_step_is_read_once_under_accumulation(kind: str, tmp_path: Path) -> None:
    run = Training(tmp_path, accumulate=2).fit(kind)
    assert [record.step for record in run.history.records] == [0, 4, 8, STEPS]
    assert len(run.losses) == 2 * STEPS


def test_a_resumed_run_goes_on_without_a_gap_or_a_double_point(kind: str, tmp_path: Path) -> None:
    whole = Training(tmp_path / "whole").fit(kind)
    first = Training(tmp_path / "parts", steps=6, save_at=5).fit(kind)
    second = Training(tmp_path / "parts", resume=first.saved).fit(kind)
    assert first.watcher is not second.watcher
    assert [record.step for record in second.history.records] == [0, 4, 8, STEPS]
    for record, other in zip(second.history.records, whole.history.records):
        for layer, values in numbers(other).items():
            expected = {name: value for name, value in values.items() if record.step != 8 or name not in MOVED}
            assert numbers(record)[layer] == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert second.losses[-3:] == pytest.approx(whole.losses[-3:])


def test_the_loss_of_the_forward_is_kept_where_the_trainer_tells_it(kind: str, tmp_path: Path) -> None:
    run = Training(tmp_path).fit(kind)
    losses = [record.loss for record in run.history.records[:-1]]
    assert losses == pytest.approx(run.losses[::EVERY])


def test_nothing_stays_on_the_model(kind: str, tmp_path: Path) -> None:
    run = Training(tmp_path).fit(kind)
    for module in run.model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert "forward" not in vars(module)
