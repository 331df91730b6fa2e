"""The callback in Lightning's mixed precision on a GPU, from the first step to the history."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hdi_callback import load_history
from tests.studies.gpu.training import DEVICE, Gpt, Outcome, batch, bits, random_states

pytestmark = pytest.mark.gpu


def fit(folder: Path, precision: str, *, is_watched: bool, steps: int = 8) -> Outcome:
    import lightning as L

    from hdi_callback import HDICallback

    outcome, losses = Outcome(), []

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Gpt()

        def training_step(self, tokens: torch.Tensor, index: int) -> torch.Tensor:
            loss = self.net(tokens)
            losses.append(loss.detach())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    torch.manual_seed(0)
    module, callback = Module(), HDICallback(every_n_steps=4)
    trainer = L.Trainer(
        accelerator="auto", devices=1, precision=precision, max_steps=steps, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        callbacks=[callback] if is_watched else [],
    )  # fmt: skip
    tokens = torch.stack([batch(step).cpu() for step in range(steps)])
    trainer.fit(module, torch.utils.data.DataLoader(tokens, batch_size=None))
    assert losses[0].device.type == DEVICE.type
    outcome.losses, outcome.weights = [bits(loss) for loss in losses], bits(*module.state_dict().values())
    outcome.random_states = random_states()
    if is_watched:
        assert callback.history_path is not None
        outcome.history = load_history(callback.history_path)
        assert 0 < float(trainer.callback_metrics["hdi/min"]) < 1
    return outcome


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true"])
def test_lightning_trains_alike_and_writes_every_reading(precision: str, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    alone = fit(tmp_path / "alone", precision, is_watched=False)
    watched = fit(tmp_path / "watched", precision, is_watched=True)
    assert watched == alone
    assert watched.history is not None
    steps = [record.step for record in watched.history.records]
    assert steps[:2] == [0, 4]
    for record in watched.history.records[:-1]:
        assert list(record.layers) == ["net.blocks.0.attention", "net.blocks.1.attention"]
        for layer in record.layers.values():
            assert {"hdi", "head_covariance", "attention_entropy"} <= layer.values.keys(), layer.absent
