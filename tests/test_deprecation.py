"""Names of earlier versions: they warn, and they work."""

from __future__ import annotations

import importlib
import warnings

import pytest
import torch

from hdi_callback import HDICallback, HeadDiversityMonitor, LayerRecord, Record
from hdi_callback.core import AttentionSums, rank_allocations
from hdi_callback.errors import MisconfigurationError, MonitoringWarning
from hdi_callback.monitoring.alerts import Alerts, Finding, Rule
from hdi_callback.monitoring.history import History, read_records
from hdi_callback.monitoring.interventions import ReviveHeads, StopTraining
from hdi_callback.monitoring.metrics import RULE_METRICS
from hdi_callback.monitoring.session.host import PlainHost
from hdi_callback.monitoring.session.schedule import Schedule
from tests.models import Classifier


def old(path: str):
    module, name = path.rsplit(".", 1)
    with pytest.warns(DeprecationWarning, match=name):
        return getattr(importlib.import_module(module), name)


SESSION = "hdi_callback.monitoring.session"


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("hdi_callback.monitoring.watch.Outcome", f"{SESSION}.sink.Result"),
        ("hdi_callback.monitoring.watch.Follower", f"{SESSION}.sink.Sink"),
        ("hdi_callback.monitoring.watch.OnAlert", f"{SESSION}.sink.OnAlert"),
        ("hdi_callback.monitoring.watch.check_patterns", f"{SESSION}.patterns.check_patterns"),
        (
            "hdi_callback.monitoring.watch.state_of_this_model",
            f"{SESSION}.resume.state_of_this_model",
        ),
        ("hdi_callback.integrations.loop.HeadWatch", "hdi_callback.integrations.loop.HeadSession"),
    ],
)
def test_a_moved_name_warns_and_still_works(before, now):
    module, name = now.rsplit(".", 1)
    assert old(before) is getattr(importlib.import_module(module), name)


def test_the_deprecated_faults_object_still_contains_reports_and_warns():
    faults = old("hdi_callback.monitoring.faults.Faults")()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with faults.contained("writing the history"):
                raise OSError("disk full")
            faults.tell("reading", ValueError("odd"))
            faults.say("kind", "a message")
    assert [item.category for item in caught] == [MonitoringWarning] * 3
    assert faults.count == {"writing the history": 2, "reading": 2, "kind": 2}


class Follower:
    """One as it was written for version 0.1."""

    name = "following"

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.reported: list[str] = []

    def follow(self, outcome):
        self.steps.append(outcome.record.step)
        self.reported += [alert.rule for alert in outcome.alerts]


class Always(Rule):
    name = "always"

    def judge(self, series, active):
        return active.finding if active else Finding("something")


class Loop:
    def __init__(self, monitor, optimizer):
        self.layers = {layer.name: layer for layer in monitor.layers}
        self.optimizers = [optimizer]
        self.stopped = 0

    def loss_scale(self, optimizer):
        return 8.0

    def stop(self):
        self.stopped += 1

    def save_checkpoint(self, name):
        return name


@pytest.mark.parametrize("begins", [True, False])
def test_a_session_reads_records_judges_intervenes_and_writes_to_its_sinks_as_before(tmp_path, begins):
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    follower = Follower()
    with HeadDiversityMonitor(model) as monitor:
        loop, stop = Loop(monitor, optimizer), StopTraining(on="warning")
        watch = old("hdi_callback.monitoring.watch.Watch")(
            monitor, Schedule(2), history=History(tmp_path / "history.jsonl"),
            alerts=Alerts([Always()], monitor.facts), interventions=[stop],
            training=loop, followers=[follower],
        )  # fmt: skip
        if begins:
            watch.begin(0)
        for step in range(5):
            watch.before_forward(step)
            model(torch.randint(16, (4, 12))).square().mean().backward()
            watch.after_backward(step, epoch=3)
            watch.before_optimizer_step(optimizer)
            optimizer.step()
            optimizer.zero_grad()
            watch.after_step(step + 1)
        told = stop.training.loss_scale(optimizer)
        watch.finish(5)
        kept = watch.state_dict()
    assert follower.steps == [record.step for record in read_records(tmp_path / "history.jsonl")] == [0, 2, 4, 5]
    assert follower.reported[0] == "always"
    assert (loop.stopped, told) == (1, 8.0)
    assert (kept["last_step"], kept["interventions"][0][0]) == (5, "StopTraining")
    assert [alert.rule for alert in watch.alerts.active] == ["always"] * 2


@pytest.mark.parametrize(
    ("old_arguments", "now"),
    [
        ({"unasked": ["hdi_query"]}, {"rule_metrics": ["hdi_query"]}),
        ({"unasked": RULE_METRICS, "in_turn": True}, {"rule_metrics": RULE_METRICS, "rotate_layers": True}),
        ({"in_turn": False}, {"rotate_layers": False}),
    ],
)
def test_an_argument_under_its_old_name_warns_at_the_line_of_the_user_and_still_works(old_arguments, now):
    def reading(**arguments):
        model = torch.nn.ModuleDict({"attn": torch.nn.MultiheadAttention(528, 4, batch_first=True)})
        with HeadDiversityMonitor(model, **arguments) as monitor:
            monitor.measure(0)
            return sorted(monitor.measure(1).record().layers["attn"].values)

    with pytest.warns(DeprecationWarning, match="is deprecated: write") as caught:
        found = reading(**old_arguments)
    named = [str(one.message).split("`")[1::2] for one in caught if one.category is DeprecationWarning]
    assert named == [[one, other] for one, other in zip(old_arguments, now, strict=True)]
    assert {one.filename for one in caught if one.category is DeprecationWarning} == {__file__}
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        assert found == reading(**now)


def test_pretrained_weights_may_be_declared_under_the_old_name():
    with pytest.warns(DeprecationWarning, match="`loaded` is deprecated: write `pretrained`") as caught:
        assert HDICallback(loaded=True)._settings.pretrained is True
    assert [one.filename for one in caught] == [__file__]
    with pytest.warns(DeprecationWarning, match="`loaded`"), pytest.raises(MisconfigurationError, match="`pretrained`"):
        HDICallback(loaded="yes")
    with pytest.warns(DeprecationWarning, match="`loaded`"):
        alerts = Alerts([Always()], loaded=True)
    alerts.judge(Record(0, {"attn": LayerRecord({"hdi": 0.5})}))
    (series,) = alerts._series.values()
    assert series.is_pretrained
    with pytest.warns(DeprecationWarning, match="`is_loaded` is deprecated: write `is_pretrained`"):
        assert series.is_loaded


def test_revived_heads_may_be_limited_under_the_old_name():
    with pytest.warns(DeprecationWarning, match="`max_loss` is deprecated: write `max_output_error`"):
        revive = ReviveHeads(max_loss=1)
    assert revive.max_output_error == 1
    with pytest.warns(DeprecationWarning, match="`max_loss`"):
        assert revive.max_loss == 1


def test_a_ranking_has_its_attributes_under_their_old_names():
    ranking = rank_allocations(64, 64, effective_samples=[9.0, 11.0], head_dim=8, input_rank=3.0)
    with pytest.warns(DeprecationWarning, match="`tells` is deprecated: write `is_conclusive`"):
        assert ranking.tells is ranking.is_conclusive
    with pytest.warns(DeprecationWarning, match="`flat` is deprecated: write `near_best`"):
        assert ranking.flat is ranking.near_best


def test_a_name_that_never_existed_raises_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        importlib.import_module("hdi_callback.monitoring.watch").nothing  # noqa: B018


def test_a_custom_intervention_that_reads_lasts_is_warned_and_answered():
    class Mine(old("hdi_callback.interventions.WhileItStands")):
        name = "Mine"

        def begin(self):
            return "begins"

        def end(self):
            return "ends"

    mine = Mine()
    mine.standing = {"attn": ["worst pair"]}
    with pytest.warns(DeprecationWarning, match="write `is_active`"):
        assert mine.lasts
    assert mine.is_active


def test_methods_and_sums_work_under_their_old_names():
    rest = pytest.warns(DeprecationWarning, match="`rest` is deprecated: write `skip_forward`")
    with HeadDiversityMonitor(Classifier()) as monitor, rest:
        monitor.rest()
    with pytest.warns(DeprecationWarning, match="`say` is deprecated: write `print`"):
        assert PlainHost().say is not None
    with pytest.warns(DeprecationWarning, match="`broadcast` of a host is deprecated"):
        assert PlainHost(None).broadcast("mine") == "mine"
    sums = AttentionSums.of(torch.full((1, 2, 3, 4), 0.25))
    with pytest.warns(DeprecationWarning, match="`seeing` is deprecated: write `queries_with_keys`"):
        assert sums.seeing is sums.queries_with_keys
    with pytest.warns(DeprecationWarning, match="`seen` is deprecated: write `visible_keys`"):
        assert sums.seen is sums.visible_keys
