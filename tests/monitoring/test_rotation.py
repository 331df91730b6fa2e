"""Metrics for rules alone are measured on wide layers in rotation; all else at every reading."""

from __future__ import annotations

import pytest
import torch

from hdi_callback import HeadDiversityMonitor, watch_heads
from hdi_callback.attention import Role
from hdi_callback.core.products import HeadProducts
from hdi_callback.interventions import StopTraining
from hdi_callback.monitoring.alerts import Alerts, Rule
from hdi_callback.monitoring.history import read_records
from hdi_callback.monitoring.metrics import DEFAULT_METRICS, METRICS, MOVEMENT, OV, QK, RULE_METRICS, TOKENS
from hdi_callback.monitoring.monitor import rotation as rotation_of_layers
from hdi_callback.monitoring.monitor.rotation import EVERY, LayerRotation
from hdi_callback.monitoring.monitor.shared_products import SharedProducts
from hdi_callback.monitoring.readings import LayerRecord, Record
from hdi_callback.monitoring.rules import default_rules
from hdi_callback.monitoring.rules.levels import LogitGrowth, TokensAlike
from hdi_callback.monitoring.rules.masks import LaterTokens
from hdi_callback.monitoring.rules.similar_heads import MergedScores
from hdi_callback.monitoring.session.settings import Settings
from tests.models import LENGTH, Classifier

WIDE, NARROW = 528, 512
BLOCKS = 5
OFTEN, SELDOM = ("attention_logit", "token_cosine"), ("circuit_qk_worst", "circuit_ov_norm")
IN_TURN = (*OFTEN, *SELDOM)
EVERY_TIME = (*DEFAULT_METRICS, "head_movement_min", "weights_not_finite", "outputs_not_finite")


def classifier(width: int = 32, blocks: int = BLOCKS) -> Classifier:
    torch.manual_seed(0)
    return Classifier(blocks=blocks, width=width, num_heads=4)


@pytest.fixture
def small_is_wide(monkeypatch):
    """Takes small layers for wide ones: what is measured when does not depend on more."""
    monkeypatch.setattr(rotation_of_layers, "_WIDE", 100)


def train(model: Classifier, first: int, last: int) -> list[float]:
    losses = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number in range(first, last):
        tokens = torch.randint(16, (2, LENGTH), generator=torch.Generator().manual_seed(number))
        loss = model(tokens).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def watched(model: Classifier, path, first: int = 0, last: int = 10, *, state=None, **options):
    """Train with a reading at every step; give the state that a checkpoint would hold, and the readings."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    quiet = {"tensorboard": False, "verbose": False, "figures_every": 0}
    with watch_heads(model, optimizer, every_n_steps=1, log_dir=path, **quiet, **options) as heads:
        if state is not None:
            heads.load_state_dict(state)
        for number in range(first, last):
            tokens = torch.randint(16, (2, LENGTH), generator=torch.Generator().manual_seed(number))
            with heads.step():
                model(tokens).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        kept = heads.state_dict()
        history = heads.history_path
    return kept, read_records(history)


def layers_with(record: Record, metric: str) -> list[int]:
    return [place for place, layer in enumerate(record.layers.values()) if metric in layer.values]


def test_wide_layers_are_measured_all_at_the_first_reading_and_then_every_fourth_or_eighth_in_rotation(tmp_path):
    _, records = watched(classifier(WIDE), tmp_path, last=5)
    everyone = list(range(BLOCKS))
    for metric in IN_TURN:
        found = [layers_with(record, metric) for record in records[:5]]
        assert found == [everyone, [3], [2], [1], [0, 4]] if metric in OFTEN else [everyone, [], [], [], [4]], metric
    for metric in EVERY_TIME:
        since = 1 if metric == "head_movement_min" else 0
        assert all(layers_with(record, metric) == everyone for record in records[since:5]), metric
    for record in records[1:5]:
        for metric, of_heads in (("attention_logit", "attention_sink"), ("circuit_qk_worst", "circuit_qk_norm")):
            held = [place for place, layer in enumerate(record.layers.values()) if of_heads in layer.arrays]
            assert held == layers_with(record, metric), "what is kept of heads goes with the curves"
        assert not any(key.partition("/")[0] in (QK, OV, TOKENS) for key in record.absent), "a turn is no failure"


def test_layers_of_ordinary_width_are_measured_at_every_reading(tmp_path):
    _, records = watched(classifier(NARROW, 2), tmp_path, last=3)
    for metric in IN_TURN:
        assert [layers_with(record, metric) for record in records[:3]] == [[0, 1]] * 3, metric


def test_metrics_named_by_the_user_are_measured_at_every_reading(tmp_path, small_is_wide):
    _, records = watched(classifier(), tmp_path, last=6, metrics=["default", "attention_sink", "circuit_qk"])
    everyone = list(range(BLOCKS))
    for metric in ("attention_sink", "attention_logit", "circuit_qk", "circuit_qk_worst"):
        assert all(layers_with(record, metric) == everyone for record in records[:6]), metric
    assert [layers_with(record, "token_cosine") for record in records[:3]] == [everyone, [3], [2]]
    assert [layers_with(record, "circuit_ov_norm") for record in records[:5]] == [everyone, [], [], [], [4]]


class Own(Rule):
    name = "own"

    def judge(self, series, active):
        return None


def test_user_interventions_and_rules_get_every_layer_at_every_reading(small_is_wide):
    assert Settings().measuring["rotate_layers"]
    assert Settings(alerts=default_rules()).measuring["rotate_layers"]
    assert not Settings(alerts=[*default_rules(), Own()]).measuring["rotate_layers"]
    assert not Settings(interventions=[StopTraining()]).measuring["rotate_layers"]
    assert not Settings(alerts=None).measuring["rotate_layers"]
    everyone = HeadDiversityMonitor(classifier(), rule_metrics=RULE_METRICS)
    with everyone:
        records = [everyone.measure(step).record() for step in range(3)]
    assert [layers_with(record, "circuit_qk_worst") for record in records] == [list(range(BLOCKS))] * 3


def test_values_with_rotation_equal_values_without(small_is_wide):
    found = []
    for rotate_layers in (False, True):
        model, records = classifier(), []
        with HeadDiversityMonitor(model, rule_metrics=RULE_METRICS, rotate_layers=rotate_layers) as monitor:
            for number in range(5):
                monitor.arm()
                train(model, number, number + 1)
                records.append(monitor.measure(number).record())
        found.append(records)
    for number, (whole, part) in enumerate(zip(*found, strict=True)):
        assert list(part.layers) == list(whole.layers)
        assert len(part.layers) == BLOCKS
        fewer = sum(len(whole.layers[name].values) - len(layer.values) for name, layer in part.layers.items())
        assert (fewer > 0) == (number > 0), "all have their turn at the first reading, some at each later one"
        for name, layer in part.layers.items():
            left = {metric for metric in whole.layers[name].values if metric not in layer.values}
            assert not left & set(EVERY_TIME)
            # Movement is read off a quarter: here of two rows of a head, which says little.
            found_here = {metric: one for metric, one in layer.values.items() if METRICS[metric].source != MOVEMENT}
            expected = {metric: whole.layers[name].values[metric] for metric in found_here}
            assert found_here == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_training_with_rotation_is_bit_identical_to_training_without_a_monitor(tmp_path, small_is_wide):
    alone, beside = classifier(), classifier()
    train(alone, 0, 6)
    watched(beside, tmp_path, last=6)
    for one, other in zip(alone.parameters(), beside.parameters()):
        assert torch.equal(one, other)


def test_a_resumed_run_starts_with_a_full_reading_and_continues_the_rotation(tmp_path, small_is_wide):
    model = classifier()
    state, _ = watched(model, tmp_path, last=3)
    _, records = watched(model, tmp_path, first=3, last=9, state=state)
    after = {record.step: layers_with(record, "attention_logit") for record in records}
    assert [len(after[step]) for step in (0, 1, 2)] == [BLOCKS, 1, 1]
    later = [places for step, places in sorted(after.items()) if step >= 3]
    assert later[0] == list(range(BLOCKS))
    assert later[1:5] == [[3], [2], [1], [0, 4]]


def test_an_armed_step_that_is_released_does_not_advance_the_rotation(small_is_wide):
    model = classifier()
    with HeadDiversityMonitor(model, rule_metrics=RULE_METRICS, rotate_layers=True) as monitor:
        monitor.measure(0)
        for _ in range(3):
            monitor.arm()
            monitor.release()
        monitor.arm()
        train(model, 0, 1)
        record = monitor.measure(1).record()
    assert [layers_with(record, metric) for metric in OFTEN] == [[3], [3]]


@pytest.mark.parametrize("source", EVERY)
def test_every_wide_layer_is_measured_once_per_rotation_period(source):
    layers = [{"name": str(place), "num_heads": 12, "head_dim": 64, "width": 768} for place in range(11)]
    layers.insert(3, {"name": "narrow", "num_heads": 4, "head_dim": 16, "width": 64})
    rotation, every = LayerRotation([source]), EVERY[source]
    rotation.begin(layers)
    rotation.end()
    measured: list[set[str]] = []
    for _ in range(2 * every):
        rotation.begin(layers)
        measured.append({facts["name"] for facts in layers} - rotation.skipped(source))
        others = {other for other in (*EVERY, "key") if rotation.skipped(other)} - {source}
        assert not others, "only what it was made for waits"
        rotation.end()
    assert all("narrow" in read and len(read) - 1 in (11 // every, 11 // every + 1) for read in measured)
    for first in range(every):
        assert set().union(*measured[first : first + every]) == {facts["name"] for facts in layers}


def test_products_of_layers_not_due_at_this_reading_are_not_kept():
    role: Role = "key"
    part = HeadProducts(((slice(0, 1), torch.zeros(1, 2, 1, 2)),), torch.ones(1))
    shared = SharedProducts(part.nbytes, frozenset({role}))
    shared.begin({"key": {"waits"}})
    shared.keep("waits", role, part)
    shared.keep("has its turn", role, part)
    assert shared.take("waits", role) is None
    assert shared.take("has its turn", role) is part


# --- rules


def judged(rule: Rule, metric: str, values: list[float | None], **arrays) -> tuple[Alerts, list]:
    """Judge readings of one layer, some of which lack the metric; give what was new at each."""
    alerts = Alerts([rule], [{"name": "layer", "num_heads": 2, "num_key_heads": 2, "head_dim": 4, "width": 64}])
    news = []
    for place, value in enumerate(values):
        known = {} if value is None else {metric: value}
        of_heads = {} if value is None else {name: [value, value] for name in arrays.get("of", ())}
        news.append(alerts.judge(Record(10 * place, {"layer": LayerRecord({"hdi": 0.5} | known, of_heads)})))
    return alerts, news


def test_a_streak_counts_only_readings_that_measured_the_layer():
    _, news = judged(TokensAlike(), "token_cosine", [0.1, 0.1, 0.1, 0.1, None, 0.999, None, 0.9991, None, 0.9992])
    assert [len(one) for one in news] == [0] * 9 + [1]
    assert news[-1][0].finding.since == 50, "since the first of its own readings at which it was so"


def test_an_alert_stays_active_until_its_own_layer_is_measured_again():
    values = [1.0, 90.0, None, None, None, 95.0, None, None, None, 2.0, None]
    alerts, news = judged(LogitGrowth(), "attention_logit", values, of=["attention_logit"])
    assert [len(one) for one in news] == [0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0]
    assert news[9][0].is_resolved
    assert alerts.active == []


@pytest.mark.parametrize(
    ("rule", "metric", "quiet", "loud"),
    [
        (LaterTokens(), "attention_ahead", 0.0, 0.2),
        (MergedScores(), "circuit_qk_worst", 0.1, 0.97),
        (LogitGrowth(), "attention_logit", 1.0, 90.0),
    ],
)
def test_the_start_of_a_finding_is_counted_in_readings_of_its_own_layer(rule, metric, quiet, loud):
    alerts = Alerts([rule], [{"name": "layer", "num_heads": 2, "num_key_heads": 2, "head_dim": 4, "width": 64}])
    worse = loud + 0.01
    of_heads = {"attention_ahead": [loud] * 2, "attention_logit": [loud] * 2, "circuit_qk_worst_pair": [0, 1]}
    found = []
    for place, value in enumerate([quiet, None, None, loud, None, None, None, worse]):
        known = {} if value is None else {metric: value}
        found += alerts.judge(Record(10 * place, {"layer": LayerRecord(known, of_heads if value else {})}))
    assert [(alert.step, alert.finding.since, alert.is_resolved) for alert in found] == [(30, 30, False)]
    (active,) = alerts.active
    again = rule.judge(alerts._series["layer"], active)
    assert again is not None
    assert again.since == 30, "a reading of other layers does not end what has gone on"


def test_movement_of_wide_layers_is_measured_on_a_quarter_of_their_weights():
    model = classifier(WIDE, 1)
    attention, head_dim = model.blocks[0].attn, WIDE // 4
    maps = [attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj]
    last: list[torch.Tensor] = []
    with HeadDiversityMonitor(model, rule_metrics=RULE_METRICS, rotate_layers=True) as monitor:
        for step in range(3):
            with torch.no_grad():
                for one in maps[:3]:
                    one.weight[head_dim:].add_(1e-3 * torch.randn(one.weight[head_dim:].shape))
                if step == 2:
                    maps[0].weight[head_dim + 1, 1] = torch.nan  # of a row that is not among the quarter
                maps[3].weight[:, head_dim : 2 * head_dim] *= 1.01
            weights = [one.weight.detach().clone() for one in maps]
            layer = monitor.measure(step).record().layers["blocks.0.attn"]
            if step == 1:
                own = [*(one.view(4, head_dim, WIDE) for one in weights[:3]), weights[3].T.view(4, head_dim, WIDE)]
                was = [*(one.view(4, head_dim, WIDE) for one in last[:3]), last[3].T.view(4, head_dim, WIDE)]
                changes = torch.stack([(a - b).square().sum((1, 2)) for a, b in zip(own, was)]).sum(0)
                sizes = torch.stack([one.square().sum((1, 2)) for one in was]).sum(0)
                moved = layer.arrays["head_movement"]
                assert moved == pytest.approx((changes / sizes).sqrt().tolist(), rel=0.01)
                assert moved[0] == 0
                assert layer.arrays["head_unchanged"][0] == 1
                assert layer.arrays["head_unchanged"][2:] == pytest.approx([0.25, 0.25], abs=1e-3)
                assert min(layer.arrays["head_unchanged"][2:]) >= 0.25, "an unchanged weight counts whole"
            last = weights
        assert layer.arrays["weights_not_finite"] == [0, 1, 0, 0], "all of it is looked at for that"


@pytest.mark.parametrize("options", [{"metrics": ["default", "head_movement_min"]}, {"rotate_layers": False}])
def test_movement_uses_all_weights_if_named_by_the_user_or_without_rotation(options):
    model = classifier(WIDE, 1)
    with HeadDiversityMonitor(model, **{"rule_metrics": RULE_METRICS, "rotate_layers": True, **options}) as monitor:
        monitor.measure(0)
        with torch.no_grad():
            model.blocks[0].attn.q_proj.weight[1] += 1.0  # not among the quarter
        assert monitor.measure(1).record().layers["blocks.0.attn"].arrays["head_movement"][0] > 0
