"""The watch inside a real transformers `Trainer`: when it reads, what it leaves, and what survives a resumption."""

from __future__ import annotations

import warnings

import pytest
import torch
import transformers
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import Dataset

from hdi_callback import HDITrainerCallback, replay
from hdi_callback.core import diversity_penalty
from hdi_callback.errors import HeadCollapseWarning, MisconfigurationError, MonitoringWarning
from hdi_callback.monitoring.history import read_lines, read_records
from hdi_callback.monitoring.interventions import DiversityPenalty, SaveCheckpoint, StopTraining
from hdi_callback.monitoring.rules.replay import read_alerts
from tests.histories import readings as steps

LAYERS = ["transformer.h.0.attn", "transformer.h.1.attn"]


class Tokens(Dataset):
    def __init__(self, rows: int = 64) -> None:
        self.tokens = torch.randint(32, (rows, 12), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class Collapse(transformers.TrainerCallback):
    """Pulls the key heads of the first layer together."""

    def __init__(self, start: int = 3, rate: float = 0.5) -> None:
        self.start, self.rate = start, rate

    @torch.no_grad()
    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step >= self.start:
            keys = model.transformer.h[0].attn.c_attn.weight[:, 32:64].view(32, 4, 8)
            keys += self.rate * (keys[:, :1] - keys)


def model(**options) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_head=4, n_embd=32, vocab_size=32, n_positions=16, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.1, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def train(tmp_path, *callbacks, resume=None, **options):
    settings = {
        "output_dir": str(tmp_path), "max_steps": 12, "per_device_train_batch_size": 4, "learning_rate": 1e-2,
        "report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "seed": 1, "logging_steps": 1000,
    }  # fmt: skip
    trained = model()
    trainer = transformers.Trainer(
        model=trained,
        args=transformers.TrainingArguments(**(settings | options)),
        train_dataset=Tokens(),
        eval_dataset=Tokens(8),
        callbacks=list(callbacks),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HeadCollapseWarning)
        trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.some_slow(quick=1)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_callback_reads_at_step_0_every_n_steps_and_the_end(tmp_path, accumulate):
    callback = HDITrainerCallback(every_n_steps=5)
    train(tmp_path, callback, gradient_accumulation_steps=accumulate)
    assert steps(callback.history_path) == [0, 5, 10, 12]
    first = read_records(callback.history_path)[0]
    assert list(first.layers) == LAYERS
    assert all("head_covariance" in layer.values for layer in first.layers.values())


def test_losses_and_weights_are_the_same_with_and_without_it(tmp_path):
    plain = train(tmp_path / "a")
    watched = train(tmp_path / "b", HDITrainerCallback(every_n_steps=2))
    assert plain.state.log_history[-1]["train_loss"] == watched.state.log_history[-1]["train_loss"]
    for left, right in zip(plain.model.parameters(), watched.model.parameters()):
        assert torch.equal(left, right)
    assert not any(module._forward_pre_hooks for module in watched.model.modules())


def test_evaluation_is_neither_read_nor_touched(tmp_path):
    evaluating = {"eval_strategy": "steps", "eval_steps": 5}
    plain = train(tmp_path / "a", **evaluating)
    callback = HDITrainerCallback(every_n_steps=5)
    watched = train(tmp_path / "b", callback, **evaluating)
    assert steps(callback.history_path) == [0, 5, 10, 12]
    losses = [[row["eval_loss"] for row in each.state.log_history if "eval_loss" in row] for each in (plain, watched)]
    assert len(losses[0]) >= 2
    assert losses[0] == losses[1]


class Raises(transformers.TrainerCallback):
    """Ends the training where a loss function of the user's would."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 4:
            raise OSError("the disk is gone")


@pytest.mark.slow
def test_a_failed_training_leaves_no_hook_once_the_callback_is_closed(tmp_path):
    callback = HDITrainerCallback(every_n_steps=2)
    watched: list[nn.Module] = []

    class Keeps(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **kwargs):
            watched.append(model)

    with pytest.raises(OSError, match="the disk is gone"):
        train(tmp_path, Keeps(), callback, Raises())
    callback.close()
    callback.close()
    assert not any(part._forward_pre_hooks or part._forward_hooks for part in watched[0].modules())
    assert steps(callback.history_path) == [0, 2], "what was read before is kept"
    train(tmp_path, callback)
    assert steps(callback.history_path)[-1] == 12, "the callback can be used again"


def test_tensorboard_gets_curves_text_and_marks(tmp_path):
    callback = HDITrainerCallback(every_n_steps=2)
    train(tmp_path, Collapse(), callback, report_to=["tensorboard"])
    (folder,) = {path.parent for path in tmp_path.rglob("events*") if path.parent.name == "hdi"}
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()
    assert [event.step for event in events.Scalars("hdi/mean")] == [0, 2, 4, 6, 8, 10, 12]
    reported = read_alerts(callback.history_path)
    assert reported == replay(callback.history_path)
    tags = [tag for tag in events.Tags()["scalars"] if tag.startswith(f"alert/hdi/{LAYERS[0]}")]
    assert [event.step for tag in tags for event in events.Scalars(tag)] == [alert.step for alert in reported]
    assert reported[0].message in events.Tensors("hdi_alerts/text_summary")[0].tensor_proto.string_val[0].decode()


def test_training_is_stopped(tmp_path):
    callback = HDITrainerCallback(every_n_steps=2, interventions=[StopTraining()])
    trainer = train(tmp_path, Collapse(), callback, max_steps=60)
    (critical,) = [alert for alert in read_alerts(callback.history_path) if alert.level == "critical"]
    assert trainer.state.global_step == critical.step + 1


@pytest.mark.slow
def test_a_run_resumes_its_history_and_its_alerts(tmp_path):
    first = HDITrainerCallback(every_n_steps=2, interventions=[SaveCheckpoint(at_most=1)])
    train(tmp_path, Collapse(), first)
    warning = read_alerts(first.history_path)[0]
    checkpoint = tmp_path / f"checkpoint-{warning.step + 1}"
    assert (checkpoint / "hdi_state.json").is_file()
    second = HDITrainerCallback(every_n_steps=2, interventions=[SaveCheckpoint(at_most=1)])
    train(tmp_path, Collapse(), second, resume=str(checkpoint))
    assert second.history_path == first.history_path
    assert steps(second.history_path) == [0, 2, 4, 6, 8, 10, 12]
    reported = read_alerts(second.history_path)
    assert reported == replay(second.history_path)
    assert [alert.level for alert in reported] == ["warning", "critical"]
    assert len(list(tmp_path.glob("checkpoint-*"))) == 1


@pytest.mark.slow
def test_a_checkpoint_without_the_state_starts_a_new_run_with_a_warning(tmp_path):
    train(tmp_path, save_strategy="steps", save_steps=6)
    callback = HDITrainerCallback(every_n_steps=4)
    with pytest.warns(MonitoringWarning, match="holds no hdi_state.json"):
        train(tmp_path, callback, resume=str(tmp_path / "checkpoint-6"))
    assert steps(callback.history_path) == [6, 8, 12]


def checkpointed(tmp_path, **options) -> HDITrainerCallback:
    """A run of six steps with a checkpoint at its end."""
    callback = HDITrainerCallback(every_n_steps=2)
    train(tmp_path, callback, max_steps=6, save_strategy="steps", save_steps=6, **options)
    return callback


@pytest.mark.slow
@pytest.mark.parametrize("has_state", [True, False], ids=["with its state", "killed before the state was written"])
def test_a_renamed_checkpoint_continues_the_history_and_alerts_of_its_run(tmp_path, has_state):
    first = checkpointed(tmp_path)
    (tmp_path / "checkpoint-6").rename(tmp_path / "best")
    if not has_state:
        (tmp_path / "best" / "hdi_state.json").unlink()
    second = HDITrainerCallback(every_n_steps=2)
    train(tmp_path, second, resume=str(tmp_path / "best"))
    assert second.history_path == first.history_path
    assert steps(second.history_path) == [0, 2, 4, 6, 8, 10, 12]
    series = second._session.state_dict()["alerts"]["series"]
    assert [[row["step"] for row in series[name][1:]] for name in LAYERS] == [[0, 2, 4, 6, 8, 10, 12]] * 2


@pytest.mark.slow
def test_a_checkpoint_of_another_run_of_the_same_step_is_not_taken_for_it(tmp_path):
    checkpointed(tmp_path / "a")
    checkpointed(tmp_path / "b")
    (tmp_path / "a" / "checkpoint-6").rename(tmp_path / "kept")
    (tmp_path / "kept" / "hdi_state.json").unlink()
    history = tmp_path / "b" / "hdi" / "history.jsonl"
    before = history.read_bytes()
    branch = HDITrainerCallback(every_n_steps=2)
    train(tmp_path / "b", branch, resume=str(tmp_path / "kept"))
    assert history.read_bytes() == before
    assert steps(branch.history_path) == [0, 2, 4, 6, 8, 10, 12]
    parent = next(line["parent"] for line in read_lines(branch.history_path) if "parent" in line)
    assert parent["history"] == str(tmp_path / "a" / "hdi" / "history.jsonl")


@pytest.mark.slow
def test_each_run_has_a_tensorboard_directory_that_a_resumption_continues(tmp_path):
    def curve(name: str) -> list[int]:
        return [e.step for e in EventAccumulator(str(tmp_path / "runs" / name)).Reload().Scalars("hdi/mean")]

    for _ in range(2):
        callback = checkpointed(tmp_path, report_to=["tensorboard"])
    assert (curve("hdi"), curve("hdi-1")) == ([0, 2, 4, 6], [0, 2, 4, 6])
    resumed = HDITrainerCallback(every_n_steps=2)
    train(tmp_path, resumed, resume=str(tmp_path / "checkpoint-6"), report_to=["tensorboard"])
    assert resumed.history_path == callback.history_path
    assert (curve("hdi"), curve("hdi-1")) == ([0, 2, 4, 6], [0, 2, 4, 6, 8, 10, 12])
    assert len([path for path in (tmp_path / "runs").iterdir() if path.name.startswith("hdi")]) == 2


@pytest.mark.slow
def test_the_penalty_is_in_the_step(tmp_path):
    class Penalised(transformers.Trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            if self.state.global_step > 4:
                keys = model.transformer.h[0].attn.c_attn.weight.mT[32:64].view(4, 8, 32)
                loss = loss + 0.1 * diversity_penalty(keys)
            return loss

    class Brief(Collapse):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step < 5:
                super().on_step_end(args, state, control, **kwargs)

    settings = {"max_steps": 10, "max_grad_norm": 0.0, "optim": "sgd", "learning_rate": 0.1}
    callback = HDITrainerCallback(
        every_n_steps=2, interventions=[DiversityPenalty(0.1)], thresholds={"*": {"mean": 0.2}}
    )
    acted = train(tmp_path / "a", Brief(), callback, **settings)
    (alert,) = read_alerts(callback.history_path)
    assert alert.step == 4, "the reading of step 4 is known after its step, and the penalty acts from step 5"
    reference = Penalised(
        model=model(),
        args=transformers.TrainingArguments(
            output_dir=str(tmp_path / "b"), per_device_train_batch_size=4, report_to=[], save_strategy="no",
            use_cpu=True, disable_tqdm=True, seed=1, **settings,
        ),
        train_dataset=Tokens(), callbacks=[Brief()],
    )  # fmt: skip
    reference.train()
    untouched = train(tmp_path / "c", Brief(), **settings)
    keys = [each.model.transformer.h[0].attn.c_attn.weight[:, 32:64].detach() for each in (acted, reference, untouched)]
    torch.testing.assert_close(keys[0], keys[1], rtol=1e-4, atol=1e-6)
    assert (keys[0] - keys[2]).abs().max() > 1e-4


def test_misuse_is_refused_at_once():
    with pytest.raises(MisconfigurationError, match="every_n_steps"):
        HDITrainerCallback(every_n_steps=0)
    with pytest.raises(MisconfigurationError, match="must be a list"):
        HDITrainerCallback(interventions=StopTraining())
