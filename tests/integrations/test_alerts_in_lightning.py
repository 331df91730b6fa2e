"""Alerts and interventions inside a real trainer: where they arrive, what they do, and what survives a resumption."""

from __future__ import annotations

import json
import warnings

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hdi_callback import HDICallback, Rule, replay
from hdi_callback.core import diversity_penalty, head_diversity
from hdi_callback.errors import HeadCollapseWarning, MisconfigurationError, MonitoringWarning
from hdi_callback.monitoring.history import read_lines
from hdi_callback.monitoring.interventions import (
    Call,
    DiversityPenalty,
    ReviveHeads,
    SaveCheckpoint,
    ScaleLearningRate,
    StopTraining,
)
from hdi_callback.monitoring.rules.replay import read_alerts
from tests.models import LIT_LAYERS, LitClassifier, batches
from tests.trainers import trainer_for
from tests.wandb_files import read_wandb

FIRST = LIT_LAYERS[0]


class Collapse(L.Callback):
    """Pulls the key heads of the first layer together from a step on, and lets them go at another."""

    def __init__(self, start: int = 3, stop: int = 10**9, rate: float = 0.5, heads=range(4)) -> None:
        self.start, self.stop, self.rate, self.heads = start, stop, rate, list(heads)

    @torch.no_grad()
    def on_train_batch_end(self, trainer, module, *args):
        # Once for each optimizer step, so that the weights stand still while gradients accumulate.
        is_whole = not trainer.fit_loop._should_accumulate()
        if is_whole and self.start <= trainer.global_step < self.stop:
            keys = module.net.blocks[0].attn.k_proj.weight.view(4, 8, 32)
            chosen = keys[self.heads]
            keys[self.heads] = chosen + self.rate * (chosen[:1] - chosen)


def lit(seed: int = 0, **options) -> LitClassifier:
    torch.manual_seed(seed)
    return LitClassifier(**options)


@pytest.fixture(scope="module")
def collapsed(tmp_path_factory):
    """One training that collapses, with everything that alerts can reach."""
    folder, passed, printed = tmp_path_factory.mktemp("run"), [], []
    board = TensorBoardLogger(folder)
    wandb_logger = WandbLogger(save_dir=folder, offline=True, project="hdi")
    callback = HDICallback(
        every_n_steps=2, on_alert=passed.append, interventions=[Call(lambda alert: "noted"), StopTraining(dry_run=True)]
    )
    trainer = trainer_for(folder, Collapse(heads=range(4)), callback, logger=[board, wandb_logger])
    trainer.print = lambda *args: printed.append(" ".join(map(str, args)))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer.fit(lit(), batches(count=24))
    wandb_logger.experiment.finish()
    board.experiment.flush()
    return {
        "board": board, "folder": folder, "callback": callback, "passed": passed, "printed": printed,
        "trainer": trainer, "warned": [item for item in warned if issubclass(item.category, HeadCollapseWarning)],
    }  # fmt: skip


def test_the_history_holds_the_alerts_that_a_replay_of_it_gives(collapsed):
    reported = read_alerts(collapsed["callback"].history_path)
    assert reported == replay(collapsed["callback"].history_path)
    assert [(alert.rule, alert.level, alert.layer) for alert in reported] == [
        ("mean alignment", "warning", FIRST),
        ("mean alignment", "critical", FIRST),
    ]


def test_the_function_of_the_user_gets_every_alert(collapsed):
    reported = read_alerts(collapsed["callback"].history_path)
    assert [alert.message for alert in collapsed["passed"]] == [alert.message for alert in reported]
    assert [alert.level for alert in collapsed["callback"].active_alerts] == ["critical"]


def test_the_console_shows_alerts_and_actions(collapsed):
    reported = read_alerts(collapsed["callback"].history_path)
    lines = [line for line in collapsed["printed"] if "hdi_callback" in line]
    more = [". More: hdi explain mean-alignment", ""]  # once for each rule
    assert [
        f"hdi_callback {alert.level}: {alert.message}{where}" for alert, where in zip(reported, more, strict=True)
    ] == [line for line in lines if ": step" in line.split(", ")[0]]
    assert any(f"{FIRST}: Call called" in line for line in lines)
    assert any("StopTraining would have stopped the training" in line for line in lines)


def test_a_critical_alert_is_one_python_warning(collapsed):
    (warned,) = collapsed["warned"]
    assert "all heads are nearly identical" in str(warned.message)
    assert FIRST in str(warned.message)


def test_tensorboard_has_the_alert_text_and_a_mark_on_the_curve(collapsed):
    events = EventAccumulator(collapsed["board"].log_dir, size_guidance={"tensors": 0}).Reload()
    reported = read_alerts(collapsed["callback"].history_path)
    texts = {
        event.step: event.tensor_proto.string_val[0].decode() for event in events.Tensors("hdi_alerts/text_summary")
    }
    assert {alert.step: alert.message in texts[alert.step] for alert in reported} == {
        alert.step: True for alert in reported
    }
    tags = [tag for tag in events.Tags()["scalars"] if tag.startswith(f"alert/hdi/{FIRST}")]
    assert len(tags) == len(reported), "each mark is a curve of one point, which no smoothing moves"
    marks = {event.step: event.value for tag in tags for event in events.Scalars(tag)}
    curve = {event.step: event.value for event in events.Scalars(f"hdi/{FIRST}")}
    assert marks == {alert.step: curve[alert.step] for alert in reported}
    acted = events.Tensors("hdi_interventions/text_summary")
    assert "StopTraining would have stopped" in acted[-1].tensor_proto.string_val[0].decode()


def test_wandb_gets_the_alerts_offline(collapsed):
    reported = read_alerts(collapsed["callback"].history_path)
    alerts = read_wandb(collapsed["folder"]).alerts
    by_level = {item["level"]: item for item in alerts if item["title"] == "Attention heads: mean alignment"}
    assert by_level["WARN"]["text"] == reported[0].message
    assert by_level["ERROR"]["text"] == reported[1].message
    assert float(by_level["WARN"]["wait_duration"]) >= 60
    assert any(item["title"] == "Attention heads: StopTraining" and item["level"] == "INFO" for item in alerts)


def test_actions_are_in_the_history(collapsed):
    lines = [line for line in read_lines(collapsed["callback"].history_path) if line["kind"] == "intervention"]
    assert [(line["intervention"], line["is_dry_run"]) for line in lines] == [
        ("Call", False), ("Call", False), ("StopTraining", True),
    ]  # fmt: skip
    assert lines[0]["facts"] == {"result": "noted"}


def test_without_alerts_no_reading_is_judged_and_nothing_is_printed(tmp_path, recwarn):
    callback, printed = HDICallback(every_n_steps=2, alerts=None), []
    trainer = trainer_for(tmp_path, Collapse(), callback)
    trainer.print = printed.append
    trainer.fit(lit(), batches(count=16))
    assert printed == []
    assert [item for item in recwarn if issubclass(item.category, HeadCollapseWarning)] == []
    assert read_alerts(callback.history_path) == []
    assert replay(callback.history_path) != [], "though there was something to tell"


def test_limits_by_layer_are_applied_in_lightning(tmp_path):
    callback = HDICallback(every_n_steps=2, thresholds={"*blocks.0*": {"mean": None, "energy_mean": None}})
    trainer = trainer_for(tmp_path, Collapse(), callback)
    with pytest.warns(HeadCollapseWarning):
        trainer.fit(lit(), batches(count=24))
    assert [alert.level for alert in read_alerts(callback.history_path)] == ["critical"]


def test_an_exception_in_the_function_of_the_user_costs_one_warning(tmp_path):
    def broken(alert):
        raise RuntimeError("no network")

    callback = HDICallback(every_n_steps=2, on_alert=broken)
    trainer = trainer_for(tmp_path, Collapse(), callback)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer.fit(lit(), batches(count=24))
    reported = [str(item.message) for item in warned if issubclass(item.category, MonitoringWarning)]
    assert len(reported) == 1
    assert "on_alert (broken) failed (RuntimeError: no network)" in reported[0]
    assert trainer.global_step == 24
    assert len(read_alerts(callback.history_path)) == 2


# --- interventions


def test_training_is_stopped_at_the_first_critical_alert(tmp_path):
    callback = HDICallback(every_n_steps=2, interventions=[StopTraining()])
    trainer = trainer_for(tmp_path, Collapse(), callback, max_epochs=5)
    with pytest.warns(HeadCollapseWarning):
        trainer.fit(lit(), batches(count=24))
    (critical,) = [alert for alert in read_alerts(callback.history_path) if alert.level == "critical"]
    assert trainer.global_step == critical.step + 1, "the batch whose reading it was is finished"
    assert trainer.should_stop


def test_a_checkpoint_is_saved_at_the_warning_and_training_resumes_from_it(tmp_path):
    callback = HDICallback(every_n_steps=2, interventions=[SaveCheckpoint(at_most=1)])
    trainer = trainer_for(tmp_path, Collapse(), callback)
    with pytest.warns(HeadCollapseWarning):
        trainer.fit(lit(), batches(count=24))
    warning = read_alerts(callback.history_path)[0]
    path = tmp_path / "hdi" / f"heads-mean-alignment-step={warning.step}.ckpt"
    state = torch.load(path, weights_only=True)
    assert state["global_step"] == warning.step + 1
    resumed = HDICallback(every_n_steps=2, interventions=[SaveCheckpoint(at_most=1)])
    trainer = trainer_for(tmp_path, Collapse(), resumed)
    with pytest.warns(HeadCollapseWarning):
        trainer.fit(lit(), batches(count=24), ckpt_path=path)
    assert len(list((tmp_path / "hdi").glob("*.ckpt"))) == 1, "it had acted as often as it may"
    assert resumed.history_path == callback.history_path
    reported = read_alerts(resumed.history_path)
    assert reported == replay(resumed.history_path)
    assert [alert.level for alert in reported] == ["warning", "critical"], "the warning is not reported again"


def keys(module) -> torch.Tensor:
    return module.net.blocks[0].attn.k_proj.weight.detach().view(4, 8, 32)


def test_the_penalty_is_in_the_step_under_accumulation_and_clipping(tmp_path):
    """Against a training whose loss holds the penalty, from the step at which the alert is raised.

    The reading is made in the first of the two batches of that step, so that its own step has the penalty too.
    """
    began = []

    class Plain(LitClassifier):  # Adam would blow up the rounding of tiny gradients
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.5)

    class Remember(Plain):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if began and self.trainer.global_step >= began[0]:
                # Lightning divides the loss of each of the two batches by two.
                loss = loss + 0.1 * diversity_penalty(self.net.blocks[0].attn.k_proj.weight.view(4, 8, 32))
            return loss

    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    callback = HDICallback(every_n_steps=2, interventions=[DiversityPenalty(0.1)], thresholds={"*": {"mean": 0.2}})
    collapse = Collapse(stop=5, rate=0.3)
    torch.manual_seed(0)
    acted = Plain()
    trainer_for(tmp_path / "a", collapse, callback, **options).fit(acted, batches(count=24))
    began.append(read_alerts(callback.history_path)[0].step)
    torch.manual_seed(0)
    reference = Remember()
    trainer_for(tmp_path / "b", Collapse(stop=5, rate=0.3), **options).fit(reference, batches(count=24))
    over = [alert for alert in read_alerts(callback.history_path) if alert.is_resolved]
    assert not over, "the comparison holds while the alert is active"
    for left, right in zip(acted.parameters(), reference.parameters()):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-6)
    torch.manual_seed(0)
    untouched = Plain()
    trainer_for(tmp_path / "c", Collapse(stop=5, rate=0.3), **options).fit(untouched, batches(count=24))
    assert not torch.allclose(keys(untouched), keys(acted), atol=1e-4)


@pytest.mark.slow
def test_a_driven_collapse_is_held_off_by_the_penalty(tmp_path):
    ends = {}
    for name, chosen in (("alone", []), ("pushed", [DiversityPenalty(20.0)])):
        callback = HDICallback(every_n_steps=2, interventions=chosen, thresholds={"*": {"mean": 0.3}})
        module = lit()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HeadCollapseWarning)
            trainer_for(tmp_path / name, Collapse(rate=0.01), callback, max_epochs=12).fit(module, batches(count=24))
        ends[name] = float(head_diversity(keys(module)).alignment)
    assert ends["alone"] > 0.5
    assert ends["pushed"] < 0.4


def test_a_head_is_revived_in_the_middle_of_a_run(tmp_path):
    callback = HDICallback(every_n_steps=2, interventions=[ReviveHeads(max_output_error=1)])  # the keys alone collapse
    module = lit()
    trainer_for(tmp_path, Collapse(stop=5, heads=[1, 2], rate=0.9), callback, max_epochs=2).fit(
        module, batches(count=16)
    )
    reported = read_alerts(callback.history_path)
    assert [(alert.rule, alert.finding.heads, alert.is_resolved) for alert in reported] == [
        ("worst pair", (1, 2), False),
        ("worst pair", (1, 2), True),
    ]
    # Judged again, with what the intervention did between two readings: its fresh weights are no weights that vanish.
    assert [(alert.step, alert.rule) for alert in replay(callback.history_path)] == [
        (alert.step, alert.rule) for alert in reported
    ]
    (line,) = [line for line in read_lines(callback.history_path) if line["kind"] == "intervention"]
    assert line["intervention"] == "ReviveHeads"
    assert float(head_diversity(keys(module)).worst_alignment) < 0.6


def test_heads_that_collapse_only_in_their_keys_are_not_revived_and_the_history_says_why(tmp_path):
    callback = HDICallback(every_n_steps=2, interventions=[ReviveHeads()])
    module = lit()
    trainer_for(tmp_path, Collapse(stop=5, heads=[1, 2], rate=0.9), callback, max_epochs=2).fit(
        module, batches(count=16)
    )
    (line,) = [line for line in read_lines(callback.history_path) if line["kind"] == "intervention"]
    assert line["is_refusal"]
    assert "above max_output_error=0.1" in line["message"]
    assert all(bool(head.any()) for head in module.net.blocks[0].attn.out_proj.weight.T.unflatten(0, (4, -1)))


def test_equal_heads_of_a_loaded_checkpoint_are_not_revived_at_step_zero(tmp_path):
    module, loaded = lit(), lit()
    with torch.no_grad():
        keys(module)[2] = keys(module)[1]
    loaded.load_state_dict(module.state_dict())
    callback = HDICallback(
        every_n_steps=1, interventions=[ReviveHeads(), DiversityPenalty(), SaveCheckpoint(), ScaleLearningRate()]
    )
    trainer_for(tmp_path, callback, max_steps=1).fit(loaded, batches(count=1))
    lines = list(read_lines(callback.history_path))
    (reported,) = [line for line in lines if line["kind"] == "alert" and line["step"] == 0]
    assert reported["rule"] == "tied heads"
    assert "heads 1 and 2 are equal in their key weights" in reported["message"]
    assert [line for line in lines if line["kind"] == "intervention" and line["step"] == 0] == []


@pytest.mark.slow
def test_interventions_compose_and_are_undone_when_the_alert_is_resolved(tmp_path):
    callback = HDICallback(
        every_n_steps=2,
        interventions=[SaveCheckpoint(), ScaleLearningRate(0.5), DiversityPenalty(5.0)],
        thresholds={"*": {"mean": 0.3}},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HeadCollapseWarning)
        trainer = trainer_for(tmp_path, Collapse(stop=8), callback, max_epochs=4)
        trainer.fit(lit(learning_rate=0.02), batches(count=24))
    lines = [line for line in read_lines(callback.history_path) if line["kind"] == "intervention"]
    done = [line["message"].split(": ")[1].split(" (")[0] for line in lines]
    assert "ScaleLearningRate multiplied the learning rate by 0.5" in done
    assert "DiversityPenalty started to push the key heads apart" in done
    assert done[-2:] == [
        "ScaleLearningRate restored the learning rate",
        "DiversityPenalty stopped pushing the heads apart",
    ]
    (optimizer,) = trainer.optimizers
    assert not optimizer._optimizer_step_pre_hooks, "nothing is left behind"


def test_active_interventions_go_on_after_a_resumption(tmp_path):
    def make():
        return HDICallback(
            every_n_steps=2, interventions=[ScaleLearningRate(0.5, at_most=1)], thresholds={"*": {"critical": None}}
        )

    first = make()
    trainer = trainer_for(tmp_path, Collapse(), first, max_epochs=1)
    trainer.fit(lit(), batches(count=24))
    trainer.save_checkpoint(tmp_path / "here.ckpt")
    second = make()
    trainer = trainer_for(tmp_path, Collapse(stop=0), second, max_epochs=2)
    trainer.fit(lit(), batches(count=24), ckpt_path=tmp_path / "here.ckpt")
    (intervention,) = second._settings.interventions
    assert intervention.standing == {FIRST: ["mean alignment"]}
    assert [alert.rule for alert in second.active_alerts] == ["mean alignment"]
    assert len(read_alerts(second.history_path)) == 1


@pytest.mark.some_slow(quick=1)
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_the_penalty_works_in_half_precision(tmp_path, precision):
    callback = HDICallback(every_n_steps=2, interventions=[DiversityPenalty(1.0)], thresholds={"*": {"mean": 0.3}})
    trainer = trainer_for(tmp_path, Collapse(stop=8), callback, precision=precision, max_epochs=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HeadCollapseWarning)
        trainer.fit(lit(), batches(count=24))
    assert trainer.global_step == 48
    assert any(line["kind"] == "intervention" for line in read_lines(callback.history_path))


# --- misuse


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alerts": "all"}, '"default", None or a list'),
        ({"alerts": [Rule]}, "must hold rules"),
        ({"thresholds": {"*": {"men": 0.5}}}, "none of mean"),
        ({"interventions": StopTraining()}, r"must be a list, got one StopTraining: write \[StopTraining"),
        ({"interventions": [StopTraining]}, "must hold interventions"),
        ({"interventions": [StopTraining()], "alerts": None}, "alerts=None raises none"),
    ],
)
def test_misuse_is_refused_at_once(options, message):
    with pytest.raises(MisconfigurationError, match=message):
        HDICallback(**options)


def test_a_model_that_an_intervention_cannot_work_on_is_refused_before_the_first_step(tmp_path):
    module = lit()
    torch.nn.utils.parametrizations.weight_norm(module.net.blocks[1].attn.q_proj)
    trainer = trainer_for(tmp_path, HDICallback(interventions=[ReviveHeads()]))
    with pytest.raises(MisconfigurationError, match=f"query heads of `{LIT_LAYERS[1]}`"):
        trainer.fit(module, batches(count=2))
    assert trainer.global_step == 0


def test_the_state_is_plain_data(collapsed):
    state = collapsed["callback"].state_dict()
    assert json.loads(json.dumps(state))["format"] == 3
    assert "numpy" not in json.dumps(state)
