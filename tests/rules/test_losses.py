"""A loss that rises once something has changed is a warning, whether that was written or computed otherwise."""

from __future__ import annotations

import math
import random

import pytest

from hdi_callback.record import Alert, LayerRecord, Record
from hdi_callback.rules import Alerts
from hdi_callback.rules.losses import Losses


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
    ((step, level, text),) = told(noisy(0.3, 19), change="forward", since=95)
    assert (step, level) == (25, "warning")
    assert text.startswith("the loss rose from 1.8")
    assert text.endswith("at step 125, after this: the forward has changed")


@pytest.mark.parametrize("change", ["", "forward", "write"])
def test_a_loss_that_comes_back_by_two_thirds_in_five_readings_is_no_warning(change):
    losses = [loss + (3 * 0.6 ** (step - 20) if step >= 20 else 0) for step, loss in enumerate(noisy(0, 99, 40))]
    assert {level for _, level, _ in told(losses, change=change)} == {"notice"}
    slowly = [loss + (3 * 0.9 ** (step - 20) if step >= 20 else 0) for step, loss in enumerate(noisy(0, 99, 40))]
    assert [(step, level) for step, level, _ in told(slowly, change=change) if level == "warning"] == [(26, "warning")]


def test_a_loss_that_rises_four_readings_later_is_told_and_ten_readings_later_is_not():
    assert [step for step, *_ in told(noisy(0.2, 22), change="forward", since=95)] == [28]
    assert all("after this" not in text for *_, text in told(noisy(0.2, 28, 40), change="forward", since=95))


@pytest.mark.parametrize(("level", "since"), [("warning", 95), ("notice", None)])
def test_what_was_told_as_a_warning_or_goes_by_a_schedule_is_not_told_again(level, since):
    texts = told(noisy(0.1, 19), change="forward", level=level, since=since)
    assert all("after this" not in text for *_, text in texts)


def test_a_write_is_a_notice_and_a_warning_where_the_loss_rises():
    assert [level for _, level, _ in told(noisy(0.0, 20), change="write")] == ["notice"]
    (_, notice, _), (step, level, text) = told(noisy(0.3, 20), change="write")
    assert (notice, step, level) == ("notice", 26, "warning")
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


def test_a_layer_that_changes_with_a_loss_that_comes_back_is_told_whatever_was_noticed_beside_it():
    draw = random.Random(1)
    entropies = [0.8 + draw.uniform(-0.01, 0.01) - (0.3 if step >= 20 else 0) for step in range(30)]
    losses = [loss + (0.5 if 20 <= step < 23 else 0) for step, loss in enumerate(noisy(0, 99))]
    for change, says in {
        "": "a changed as the loss rose",
        "forward": "after this: the forward",
        "write": "wrote",
    }.items():
        alerts = told(losses, change=change, since=96, entropies=entropies)
        (text,) = [text for _, level, text in alerts if level != "notice"]
        assert says in text


def test_a_rise_is_judged_at_the_last_reading_of_the_run():
    for count in (22, 24):
        rules = Alerts(layers=[{"name": "a", "num_heads": 2, "num_key_heads": 2}])
        given = []
        for step, loss in enumerate(noisy(0.5, 20, count)):
            extra = {"written": ("embed.weight",)} if step == 20 else {}
            record = Record(5 * step, {"a": LayerRecord()}, loss=loss, is_last=step == count - 1, **extra)
            given += [alert for alert in rules.judge(record) if alert.level == "warning"]
        (alert,) = given
        assert alert.step == 5 * (count - 1)
        assert "after this: something else than the optimizer wrote `embed.weight`" in alert.message


def judge_changes(losses, changes):
    """Judge losses alone; `changes` are reading -> parameters that were written at it. Return what is warned of."""
    judge, warned = Losses(), []
    for reading, loss in enumerate(losses):
        said = judge.judge(Record(5 * reading, {}, loss=loss, written=changes.get(reading, ())))
        judge.note(loss)
        warned += [said] if said is not None and said.level == "warning" else []
    return warned


def test_a_rise_is_told_with_the_change_before_it_and_not_with_one_before_an_earlier_and_smaller_rise():
    small, large = noisy(0.15, 20, 45), noisy(3.0, 25, 45)
    losses = [large[at] if at >= 25 else small[at] for at in range(45)]
    (said,) = judge_changes(losses, {20: ("a.weight",), 25: ("b.weight",)})
    assert said.written == ("b.weight",)
    (said,) = judge_changes(noisy(1.0, 20, 45), {20: ("a.weight",), 23: ("b.weight",)})
    assert said.written == ("a.weight",)


def test_a_change_is_told_with_the_first_step_after_it_and_one_after_the_rise_is_not_accused():
    (said,) = judge_changes(noisy(0.5, 20, 45), {20: ("a.weight",), 21: ("b.weight",)})
    assert said.written == ("a.weight",)
    assert "rose from 1.83 to 2.3 after step 95" in said.text
    assert [said.written for said in judge_changes(noisy(0.5, 19, 45), {20: ("a.weight",)})] == [None]
    late = Alert(140, "contract change", "notice", {"a": ()}, "the forward has changed", since=96)
    texts = [text for _, level, text in alone(noisy(0.5, 20, 45), others={28: (late,)}) if level == "warning"]
    assert all("after step 95" in text for text in texts)


def test_the_last_bit_of_a_constant_loss_is_no_rise_and_what_is_not_finite_no_loss():
    assert judge_changes([0.7] * 20 + [0.7 + 1e-7] * 20, {20: ("a.weight",)}) == []
    endless = [*noisy(0, 99, 20), math.nan, math.inf, *noisy(0, 99, 40)[20:]]
    assert judge_changes(endless, {20: ("a.weight",)}) == []


def alone(losses, *, every=5, others=None):
    """Judge readings of a loss alone, and return reading, level and text of what is said of it."""
    rules, others, messages = Alerts(layers=[{"name": "a", "num_heads": 2, "num_key_heads": 2}]), others or {}, []
    for reading, loss in enumerate(losses):
        record = Record(every * reading, {"a": LayerRecord()}, loss=loss, alerts=others.get(reading, ()))
        messages += [(reading, alert.level, alert.message) for alert in rules.judge(record) if not alert.is_over]
    return messages


def test_a_loss_that_stays_above_all_of_the_fifteen_readings_before_is_a_warning_five_readings_later():
    (first, low, _), (second, high, text) = alone(noisy(0.5, 20))
    assert ((first, low), (second, high)) == ((21, "notice"), (26, "warning"))
    assert text.startswith("the loss rose from 1.8")
    assert text.endswith("at step 130, and no layer changed with it")


@pytest.mark.parametrize(
    "losses",
    [
        [*noisy(0, 99, 20), 3.0, 3.0, *noisy(0, 99, 30)[20:]],
        [2 + 0.05 * reading for reading in range(60)],
        [2 + draw.gauss(0, 0.1) for draw in [random.Random(3)] for _ in range(200)],
        noisy(0.5, 14),
    ],
    ids=["a spike of two readings", "a loss that rises evenly", "noise", "fewer than fifteen readings before"],
)
def test_what_is_no_sudden_rise_that_stays_is_no_warning(losses):
    assert all(level == "notice" for _, level, _ in alone(losses))


def test_readings_at_each_step_count_where_they_are_three_steps_apart():
    per_step = [loss for loss in noisy(0.5, 20) for _ in range(3)]
    ((reading, level, _),) = [said for said in alone(per_step, every=1) if said[1] == "warning"]
    assert (reading // 3, level) == (26, "warning")


def test_a_loss_that_stays_high_is_not_told_to_whom_has_been_warned_of_its_cause():
    cause = Alert(105, "contract change", "warning", {"a": ()}, "dropout is 0.9, and 0 before")
    assert [level for _, level, _ in alone(noisy(0.5, 20), others={21: (cause,)})] == ["notice"]
    assert "warning" in [level for _, level, _ in alone(noisy(0.5, 20), others={10: (cause,)})]


def test_a_cause_that_is_read_while_the_loss_is_waited_for_is_told_with_it_and_a_later_one_is_not():
    for since, at, ends in ((96, 24, "after this: the forward has changed"), (111, 24, "no layer changed with it")):
        cause = Alert(5 * at, "contract change", "notice", {"a": ()}, "the forward has changed", since=since)
        *_, (reading, level, text) = alone(noisy(0.5, 20), others={at: (cause,)})
        assert (reading, level) == (26, "warning")
        assert text.endswith(ends)


def share_that_is_good(rise):
    """Judge 40 losses that stand still but for noise 160 readings long, the last 20 of them higher by `rise`."""
    verdicts = []
    for seed in range(40):
        draw, losses = random.Random(seed), Losses()
        for reading in range(160):
            loss = 2 + draw.gauss(0, 0.1) + rise * (reading >= 140)
            losses.judge(Record(5 * reading, {}, loss=loss))
            losses.note(loss)
            verdicts += [losses.is_good] if reading >= (145 if rise else 8) else []
    return sum(verdicts) / len(verdicts)


def test_a_loss_that_stands_still_is_good_however_long_it_does_and_a_higher_one_is_not():
    assert share_that_is_good(0.0) > 0.95
    assert share_that_is_good(0.4) < 0.15
