"""A training on two processes that collapses and is intervened in; started by `test_alerts_over_ranks.py`.

python -m tests.integrations.ddp_run FOLDER
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

from hdi_callback import HDICallback, interventions
from tests.integrations.test_alerts_in_lightning import Collapse
from tests.models import LitClassifier


class Plain(LitClassifier):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    folder = Path(sys.argv[1])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = Plain()
    tokens = torch.randint(16, (64, 12))
    torch.manual_seed(int(torch.randint(10**6, ()).item()))
    callback = HDICallback(
        every_n_steps=2,
        thresholds={"*": {"mean": 0.3}},
        interventions=[
            interventions.ReviveHeads(max_output_error=1),
            interventions.DiversityPenalty(0.5),
            interventions.SaveCheckpoint(at_most=1),
            interventions.StopTraining(),
        ],
    )
    trainer = L.Trainer(
        default_root_dir=folder, accelerator="cpu", devices=2, strategy="ddp", max_epochs=8, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[Collapse(start=3, stop=7, rate=0.4, heads=[0, 1]), Collapse(start=24, rate=0.9), callback],
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(tokens, tokens.sum(1) % 5), batch_size=4))
    state = {"weights": module.state_dict(), "steps": trainer.global_step, "history": callback.history_path}
    torch.save({**state, "history": str(callback.history_path)}, folder / f"rank{trainer.global_rank}.pt")


if __name__ == "__main__":
    main()
