"""`padding` as every trainer's callback takes it: what arrives in the history."""

from __future__ import annotations

import os

import lightning as L
import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.utils.data import DataLoader, Dataset

from hdi_callback import HDICallback, HDITrainerCallback, head_covariance, watch_heads
from hdi_callback.monitoring.history import read_records
from tests.models import Attention

IDS = torch.tensor([[3, 4, 5, 6, 7, 8], [9, 2, 11, 0, 0, 0], [5, 1, 0, 0, 0, 0], [7, 6, 1, 4, 0, 0]])
TAGS = ("head_covariance", "head_correlation")


class Tokens(nn.Module):
    """One attention over embedded tokens; only the tokens show which are padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attn = nn.Embedding(16, 32), Attention()

    def forward(self, input_ids, labels=None):
        return {"loss": self.attn(self.embed(input_ids)).square().mean()}


class LitTokens(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Tokens()

    def training_step(self, batch, batch_idx):
        return self.net(batch)["loss"]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Rows(Dataset):
    def __len__(self):
        return len(IDS)

    def __getitem__(self, place):
        return {"input_ids": IDS[place], "labels": torch.tensor(0)}


def is_zero(input_ids, **_):
    return input_ids == 0


def made(kind):
    torch.manual_seed(0)
    return kind()


def under_lightning(padding, path, folder, **options):
    callback = HDICallback(1, padding=padding, history=str(path), verbose=False)
    L.Trainer(
        max_steps=1, callbacks=[callback], logger=False, accelerator="cpu", default_root_dir=folder,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **options,
    ).fit(made(LitTokens), DataLoader(IDS, batch_size=4))  # fmt: skip


def under_ddp(padding, path, folder):
    before = dict(os.environ)
    try:
        under_lightning(padding, path, folder, strategy="ddp", devices=1)
    finally:  # what Lightning leaves would make every later trainer of this process a distributed one
        dist.destroy_process_group()
        os.environ.clear()
        os.environ.update(before)


def under_transformers(padding, path, folder):
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=1, per_device_train_batch_size=4, report_to=[], use_cpu=True,
        disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    callback = HDITrainerCallback(1, padding=padding, history=str(path), verbose=False)
    transformers.Trainer(model=made(Tokens), args=arguments, train_dataset=Rows(), callbacks=[callback]).train()


def in_a_loop(padding, path, folder):
    model = made(Tokens)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    heads = watch_heads(model, optimizer, every_n_steps=1, padding=padding, history=path, verbose=False)
    with heads, heads.step():
        model(IDS)["loss"].backward()
        optimizer.step()


def truth(padded):
    model = made(Tokens)
    got = []
    model.attn.out_proj.register_forward_pre_hook(lambda _, args: got.append(args[0].detach().double()))
    model(IDS)
    outputs = torch.cat([row[~out] for row, out in zip(got[0], padded)]).unflatten(-1, (4, 8))
    weight = model.attn.out_proj.weight.detach().double().T.unflatten(0, (4, 8))
    values = head_covariance(outputs, weight)
    return {"head_covariance": float(values.covariance), "head_correlation": float(values.correlation)}


@pytest.mark.some_slow(quick=7)
@pytest.mark.parametrize("shell", [under_lightning, under_ddp, under_transformers, in_a_loop])
@pytest.mark.parametrize("padding", [0, is_zero, None, "auto"], ids=["zero", "function", "none", "auto"])
def test_every_callback_leaves_out_declared_padding(shell, padding, tmp_path):
    shell(padding, tmp_path / "history.jsonl", tmp_path)
    record = read_records(tmp_path / "history.jsonl")[0]
    (values,) = (layer.values for layer in record.layers.values())
    # Without a mask "auto" knows of none.
    padded = torch.zeros_like(IDS, dtype=torch.bool) if padding in (None, "auto") else IDS == 0
    assert {tag: values[tag] for tag in TAGS} == pytest.approx(truth(padded), rel=1e-3)
