"""Evaluation under a transformers `Trainer` runs as it does without the callback: no hook, the same kernels."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
import transformers
from torch import nn
from torch.utils.data import Dataset

from hdi_callback import HDITrainerCallback
from hdi_callback.monitoring.history import read_lines


class Rows(Dataset):
    def __init__(self, rows: int = 16) -> None:
        self.x = torch.randn(rows, 6, 32, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[index], "labels": self.x[index].mean()}


def hooks_on(model: nn.Module) -> int:
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


class Encoder(nn.Module):
    """An encoder that has the fast path of torch, and notes the hooks on it at every forward."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 1)
        self.in_evaluation: list[int] = []
        self.in_training: list[int] = []

    def forward(self, x, labels=None):
        (self.in_training if self.training else self.in_evaluation).append(hooks_on(self))
        logits = self.head(self.encoder(x).mean(1))[:, 0]
        return {"loss": (logits - labels).square().mean(), "logits": logits}


class Asks(transformers.TrainerCallback):
    """Evaluates in between steps, as callbacks that sample from a model do."""

    def __init__(self) -> None:
        self.recorded: list[torch.Tensor] = []

    @torch.no_grad()
    def on_step_end(self, args, state, control, model=None, **kwargs):
        mode = model.training
        model.eval()
        self.recorded.append(model(Rows().x, torch.zeros(16))["logits"])
        model.train(mode)


def run(folder, *callbacks, monkeypatch, **options):
    torch.manual_seed(0)
    model, fast = Encoder(), []
    original = torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", lambda *args: fast.append(1) or original(*args))
    asks = Asks()
    measured: list[float] = []

    def compute_metrics(prediction):
        with torch.no_grad():
            measured.append(float(model(Rows().x, torch.zeros(16))["loss"]))
        return {"measured": measured[-1]}

    arguments = {
        "output_dir": str(folder), "max_steps": 6, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "seed": 1,
        "report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "eval_strategy": "steps",
        "eval_steps": 1, "eval_on_start": True, "logging_steps": 1000, "remove_unused_columns": False,
    }  # fmt: skip
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(**(arguments | options)),
        train_dataset=Rows(),
        eval_dataset=Rows(8),
        compute_metrics=compute_metrics,
        callbacks=[*callbacks, asks],
    )
    trainer.train()
    predicted = trainer.predict(Rows(8)).predictions
    losses = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
    monkeypatch.undo()
    return model, len(fast), (losses, measured, torch.stack(asks.recorded).tolist(), predicted.tolist())


@pytest.mark.some_slow(quick=1)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("every", [1, 4])
def test_evaluation_has_no_hook_and_the_kernels_and_numbers_of_a_run_without_the_callback(
    tmp_path, monkeypatch, every, accumulate
):
    options = {"gradient_accumulation_steps": accumulate}
    plain, plain_fast, plain_numbers = run(tmp_path / "a", monkeypatch=monkeypatch, **options)
    callback = HDITrainerCallback(every_n_steps=every, verbose=False)
    watched, fast, numbers = run(tmp_path / "b", callback, monkeypatch=monkeypatch, **options)
    assert len(numbers[0]) >= 7  # before the first step, after each, and at the end
    assert set(watched.in_evaluation) == {0}
    assert fast == plain_fast > 0
    assert numbers == plain_numbers
    for left, right in zip(plain.parameters(), watched.parameters()):
        assert torch.equal(left, right)
    read = [line for line in read_lines(callback.history_path) if line["kind"] == "reading"]
    assert [line["step"] for line in read] == ([0, 1, 2, 3, 4, 5, 6] if every == 1 else [0, 4, 6])
    captured = [all("head_covariance" in layer["values"] for layer in line["layers"].values()) for line in read]
    assert captured == [*[True] * (len(read) - 1), False]  # after the last step there is no forward


def test_generation_in_an_evaluation_has_no_hook(tmp_path):
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=16, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=4, decoder_start_token_id=0, pad_token_id=0
    )
    recorded: list[int] = []

    class Noted(transformers.T5ForConditionalGeneration):
        @functools.wraps(transformers.T5ForConditionalGeneration.forward)  # generation looks at what it takes
        def forward(self, *args, **kwargs):
            if not self.training:
                recorded.append(hooks_on(self))
            return super().forward(*args, **kwargs)

    model = Noted(config)
    model.generation_config.eos_token_id = None  # as long as it may be
    rows = [{"input_ids": torch.arange(1, 7), "labels": torch.arange(1, 5)} for _ in range(8)]
    callback = HDITrainerCallback(every_n_steps=1, verbose=False)
    trainer = transformers.Seq2SeqTrainer(
        model=model,
        args=transformers.Seq2SeqTrainingArguments(
            str(tmp_path),
            max_steps=3,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            eval_strategy="steps",
            eval_steps=1,
            predict_with_generate=True,
            generation_max_length=6,
            remove_unused_columns=False,
        ),
        train_dataset=rows,
        eval_dataset=rows[:4],
        compute_metrics=lambda prediction: {"rows": len(prediction.predictions)},
        callbacks=[callback],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    assert len(recorded) > 9  # several tokens in each of three evaluations
    assert set(recorded) == {0}
    read = [line["step"] for line in read_lines(callback.history_path) if line["kind"] == "reading"]
    assert read == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_training_ended_by_an_exception_leaves_no_hook_for_the_next_one(tmp_path):
    class Fails(transformers.TrainerCallback):
        def on_substep_end(self, args, state, control, **kwargs):
            raise RuntimeError("out of luck")

    torch.manual_seed(0)
    model, callback = Encoder(), HDITrainerCallback(every_n_steps=1, verbose=False)
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=2, per_device_train_batch_size=4, gradient_accumulation_steps=2, report_to=[],
        save_strategy="no", use_cpu=True, disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    failing = transformers.Trainer(model, arguments, train_dataset=Rows(), callbacks=[callback, Fails()])
    with pytest.raises(RuntimeError, match="out of luck"):
        failing.train()
    trainer = transformers.Trainer(model, arguments, train_dataset=Rows(), callbacks=[callback])
    trainer.train()
    assert hooks_on(model) == 0
    model.eval()
    model(Rows().x, torch.zeros(16))
    assert model.in_evaluation == [0]
