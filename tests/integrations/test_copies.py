"""Callbacks that are copied, pickled and given to another trainer."""

from __future__ import annotations

import copy
import pickle

import lightning as L
import pytest
import transformers
from torch.utils.data import DataLoader

from hdi_callback import HDICallback, HDITrainerCallback
from hdi_callback.monitoring.history import read_records
from hdi_callback.monitoring.interventions import DiversityPenalty, ScaleLearningRate
from tests.integrations.test_padding_argument import IDS, LitTokens, Rows, Tokens, made
from tests.monitoring.test_alerts import FewEffectiveHeads


def fit(callback, folder):
    L.Trainer(
        max_steps=2, callbacks=[callback], logger=False, accelerator="cpu", default_root_dir=folder,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    ).fit(made(LitTokens), DataLoader(IDS, batch_size=2))  # fmt: skip


def train(callback, folder):
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True,
        disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    transformers.Trainer(model=made(Tokens), args=arguments, train_dataset=Rows(), callbacks=[callback]).train()


def pickled(callback):
    return pickle.loads(pickle.dumps(callback))


@pytest.mark.some_slow(quick=3)
@pytest.mark.parametrize(("kind", "run"), [(HDICallback, fit), (HDITrainerCallback, train)])
@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, pickled])
@pytest.mark.parametrize("alerts", ["default", [FewEffectiveHeads()]], ids=["default", "own"])
def test_a_copy_after_a_fit_is_inert_and_watches_a_new_one(kind, run, copied, alerts, tmp_path):
    callback = kind(1, alerts=alerts, interventions=[DiversityPenalty(), ScaleLearningRate()], verbose=False)
    run(callback, tmp_path / "first")
    (first,) = (tmp_path / "first").rglob("history.jsonl")
    lines = first.read_text()
    other = copied(callback)
    assert other.history_path is None
    assert other.active_alerts == []
    run(other, tmp_path / "second")
    (second,) = (tmp_path / "second").rglob("history.jsonl")
    assert first.read_text() == lines
    assert [record.step for record in read_records(second)] == [0, 1, 2]
    values = [
        [layer.values for layer in record.layers.values()] for path in (first, second) for record in read_records(path)
    ]
    assert values[:3] == values[3:]
