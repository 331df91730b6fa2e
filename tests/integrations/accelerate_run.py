"""A training with accelerate on two processes that collapses and is stopped; started by `test_accelerate.py`.

python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.integrations.accelerate_run FOLDER
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.nn import functional as F

from hdi_callback import interventions, watch_heads
from tests.models import Classifier, batches


@torch.no_grad()
def collapse(model: Classifier) -> None:
    heads = model.blocks[0].attn.k_proj.weight.unflatten(0, (4, 8))
    heads += 0.3 * (heads[:1] - heads)


def main() -> None:
    folder = Path(sys.argv[1])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, data = accelerator.prepare(model, optimizer, batches(count=64))
    saved, reported = [], []
    with watch_heads(
        model, optimizer, every_n_steps=2, log_dir=folder, on_alert=reported.append, tensorboard=True,
        thresholds={"*": {"mean": 0.3}}, save_checkpoint=saved.append,
        interventions=[
            interventions.DiversityPenalty(0.1), interventions.SaveCheckpoint(at_most=1), interventions.StopTraining(),
        ],
    ) as heads:  # fmt: skip
        for tokens, labels in data:
            with accelerator.accumulate(model), heads.step():
                accelerator.backward(F.cross_entropy(model(tokens), labels))
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients and heads.global_step > 3:
                collapse(accelerator.unwrap_model(model))
            if heads.should_stop:
                break
        active = [alert.message for alert in heads.active_alerts]
    torch.save(
        {
            "weights": accelerator.unwrap_model(model).state_dict(),
            "steps": heads.global_step,
            "latest": heads.latest,
            "active": active,
            "saved": saved,
            "reported": len(reported),
            "history": str(heads.history_path),
        },
        folder / f"rank{accelerator.process_index}.pt",
    )


if __name__ == "__main__":
    main()
