"""A loss that rises once something has changed is a warning, whether that was written or computed otherwise."""

from __future__ import annotations

import random

import pytest

from hdi_callback.record import Alert, LayerRecord, Record
from hdi_callback.rules import Alerts


def told(losses, *, change="", at=20, level="notice", since=19, entropies=()):
    """Judge readings, of which one tells a change, and return reading, level and text of what is said of it."""
    rules = Alerts(layers=[{"name": "a", "num_heads": 2, "num_key_heads": 2}])
    messages = []
    for step, loss in enumerate(losses):
        alert = Alert(5 * step, "contract change", level, {"a": ()}, "the forward has changed", since=since)
        extra = {} if step != at else {"alerts": (alert,)} if change == "forward" else {"written": ("a.weight",)}
        values = dict(zip(("attention_entropy",), entropies[step : step + 1]))
        record = Record(5 * step, {"a": LayerRecord(values=values)}, loss=loss, **(extra if change else {}))
        messages += [
            (alert.step // 5, alert.level, alert.message) for alert in rules.judge(record) if not alert.is_over
        ]
    return messages


def noisy(rise, at, count=30):
    draw = random.Random(0)
    return [2 - 0.01 * step + draw.uniform(-0.02, 0.02) + (rise if step >= at else 0) for step in range(count)]


def test_a_loss_that_rises_with_a_forward_that_has_changed_is_a_warning_with_what_has():
    # The change was there at reading 19, and a notice of the contract at 20.
    ((step, level, text),) = told(noisy(0.1, 19), change="forward", since=95)
    assert (step, level) == (20, "warning")
    assert text.startswith("the loss rose from 1.8")
    assert text.endswith("after this: the forward has changed")


def test_a_loss_that_rises_four_readings_later_is_told_and_ten_readings_later_is_not():
    assert [step for step, *_ in told(noisy(0.2, 22), change="forward", since=95)] == [23]
    assert all("after this" not in text for *_, text in told(noisy(0.2, 28, 40), change="forward", since=95))


@pytest.mark.parametrize(("level", "since"), [("warning", 95), ("notice", None)])
def test_what_was_told_as_a_warning_or_goes_by_a_schedule_is_not_told_again(level, since):
    texts = told(noisy(0.1, 19), change="forward", level=level, since=since)
    assert all("after this" not in text for *_, text in texts)


def test_a_write_is_a_notice_and_a_warning_where_the_loss_rises():
    assert [level for _, level, _ in told(noisy(0.0, 20), change="write")] == ["notice"]
    (_, notice, _), (step, level, text) = told(noisy(0.1, 20), change="write")
    assert (notice, step, level) == ("notice", 21, "warning")
    assert "after this: something else than the optimizer wrote `a.weight` between steps 95 and 100" in text


def test_without_a_rise_a_change_of_the_forward_is_not_told_again():
    assert told(noisy(0.0, 20), change="forward", since=95) == []


def test_a_layer_that_changes_with_a_loss_that_rose_after_a_write_is_no_second_alert():
    draw = random.Random(1)
    entropies = [0.8 + draw.uniform(-0.01, 0.01) - (0.3 if step >= 20 else 0) for step in range(30)]
    (_, level, text), *others = told(noisy(0.5, 20), entropies=entropies)
    assert (level, others) == ("warning", [])
    assert "changed as the loss rose: its mean entropy went" in text
    levels = [level for _, level, _ in told(noisy(0.5, 20), change="write", entropies=entropies)]
    assert levels == ["notice", "warning"]
