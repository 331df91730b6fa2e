"""A training with QKClip that goes on from a checkpoint ends where an uninterrupted one does, in every shell."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from hdi_callback import HDICallback, HDIHandler, HDITrainerCallback, watch_heads
from hdi_callback.errors import MonitoringWarning
from hdi_callback.interventions import QKClip
from hdi_callback.monitoring.history import read_lines
from tests.integrations import test_transformers as with_transformers
from tests.models import Classifier, LitClassifier, batches, step

# Readings at 0, 3, 6, 8: the checkpoint at step 4 lies between two, with heads that were scaled since the last one.
OPTIONS = {"every_n_steps": 3, "verbose": False, "alerts": None, "metrics": ["default", "attention_logit_bound"]}
HALF, WHOLE = 4, 8
LIMITS = {"loop": 0.5, "loop, bfloat16": 0.5, "ignite": 0.5, "lightning": 0.5, "transformers": 0.02}


def made() -> tuple[Classifier, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Classifier()
    with torch.no_grad():
        for block in model.blocks:
            block.attn.q_proj.weight *= torch.tensor([1.0, 2.0, 3.0, 4.0]).repeat_interleave(8)[:, None]
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def in_a_loop(
    folder: Path, clip: QKClip, saved: Any, end: int, dtype: torch.dtype = torch.float32
) -> tuple[Any, Any, Any]:
    model, optimizer = made()
    model.to(dtype)
    with watch_heads(model, optimizer, interventions=[clip], log_dir=folder, **OPTIONS) as heads:
        start = 0
        if saved is not None:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            heads.load_state_dict(saved["heads"])
            start = HALF
        for number in range(start, end):
            with heads.step():
                step(model, optimizer, number)
        parts = {"model": model, "optimizer": optimizer, "heads": heads}
        kept = {name: part.state_dict() for name, part in parts.items()}
        kept = torch.load(_written(kept, folder / f"{end}.pt"), weights_only=True)
    return model, kept, heads.history_path


def in_ignite(folder: Path, clip: QKClip, saved: Any, end: int) -> tuple[Any, Any, Any]:
    pytest.importorskip("ignite", reason="pytorch-ignite is not installed")
    from ignite.engine import Engine, Events

    model, optimizer = made()
    trainer = Engine(lambda engine, number: step(model, optimizer, engine.state.iteration - 1))
    handler = HDIHandler(model, optimizer, interventions=[clip], log_dir=folder, **OPTIONS)
    handler.attach(trainer)
    parts = {"model": model, "optimizer": optimizer, "trainer": trainer, "heads": handler}
    kept: list[Any] = []

    @trainer.on(Events.EPOCH_COMPLETED)
    def keep() -> None:
        states = {name: part.state_dict() for name, part in parts.items()}
        kept.append(torch.load(_written(states, folder / "ignite.pt"), weights_only=True))

    if saved is not None:
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    trainer.run(range(HALF), max_epochs=end // HALF)
    return model, kept[0], handler.heads.history_path


def in_lightning(folder: Path, clip: QKClip, saved: Any, end: int) -> tuple[Any, Any, Any]:
    callback = HDICallback(interventions=[clip], **OPTIONS)
    torch.manual_seed(0)
    model = LitClassifier()
    model.net.load_state_dict(made()[0].state_dict())
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=end // HALF, logger=False, default_root_dir=folder, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[callback, ModelCheckpoint(folder, "{step}", save_top_k=-1)],
    )  # fmt: skip
    trainer.fit(model, batches(count=HALF), ckpt_path=saved)
    return model.net, folder / f"step={HALF}.ckpt", callback.history_path


def in_transformers(folder: Path, clip: QKClip, saved: Any, end: int) -> tuple[Any, Any, Any]:
    callback = HDITrainerCallback(interventions=[clip], **OPTIONS)
    trainer = with_transformers.train(
        folder, callback, resume=saved, max_steps=end, save_strategy="steps", save_steps=HALF,
        lr_scheduler_type="constant",
    )  # fmt: skip
    return trainer.model, str(folder / f"checkpoint-{HALF}"), callback.history_path


def _written(states: Any, path: Path) -> Path:
    torch.save(states, path)
    return path


SHELLS = {
    "loop": in_a_loop,
    "loop, bfloat16": partial(in_a_loop, dtype=torch.bfloat16),
    "ignite": in_ignite,
    "lightning": in_lightning,
    "transformers": in_transformers,
}


@pytest.mark.some_slow(quick=2)
@pytest.mark.parametrize("shell", SHELLS)
def test_a_resumed_training_ends_where_an_uninterrupted_one_does(shell, tmp_path):
    run, folders = SHELLS[shell], [tmp_path / name for name in ("whole", "parts")]
    clips = [QKClip(LIMITS[shell], at_most=WHOLE - 1) for _ in range(3)]
    for folder in folders:
        folder.mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MonitoringWarning)
        whole, _, expected = run(folders[0], clips[0], None, WHOLE)
        _, saved, _ = run(folders[1], clips[1], None, HALF)
        resumed, _, history = run(folders[1], clips[2], saved, WHOLE)
    for left, right in zip(whole.parameters(), resumed.parameters()):
        assert torch.equal(left, right)
    assert clips[2].watched == clips[0].watched
    assert clips[2].count == clips[0].count == WHOLE - 1
    actions = [
        {line["step"]: line["message"] for line in read_lines(path) if line["kind"] == "intervention"}
        for path in (expected, history)
    ]
    assert set(actions[0]) >= {3, 6}, "there is something to go on with"
    for at in (6, 8):  # what was done between the checkpoint and the reading before it is reported as well
        assert actions[1].get(at) == actions[0].get(at)
