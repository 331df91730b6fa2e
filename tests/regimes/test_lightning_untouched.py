"""A training under Lightning with a reading at every step, bit by bit against the same without the callback."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo

from hdi_callback import HDICallback
from hdi_callback.errors import HeadCollapseWarning
from hdi_callback.monitoring.history import read_records
from hdi_callback.monitoring.rules.replay import read_alerts
from tests.integrations.test_alerts_in_lightning import Collapse
from tests.models import LIT_LAYERS, batches
from tests.regimes.trainings import Losses, Module, trainer_for

METRICS = ["hdi", "hdi_query", "head_covariance", "head_correlation", "head_correlation_error"]


def train(folder: Path, *watching: HDICallback, backend: str | None = None, **options: Any) -> list[torch.Tensor]:
    """Everything that training leaves behind, as tensors; heads collapse, so that there is something to alert of."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    losses, lit = Losses(), Module(dropout=0.3)
    if backend is not None:
        lit.net.compile(backend=backend)
    trainer = trainer_for(
        folder, losses, Collapse(start=2), *watching, gradient_clip_val=0.5, num_sanity_val_steps=1,
        val_check_interval=4, **options,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HeadCollapseWarning)
        trainer.fit(lit, batches(count=12), batches(count=2))
    kept = [value for state in trainer.optimizers[0].state_dict()["state"].values() for value in state.values()]
    assert len(losses.recorded) == 12
    return [*losses.recorded, *lit.state_dict().values(), *kept, torch.get_rng_state(), torch.rand(3)]


COMPILED = [
    ("eager", "32-true", 1),
    ("eager", "bf16-mixed", 1),
    ("eager", "32-true", 2),
    ("aot_eager", "bf16-mixed", 2),
]


@pytest.mark.some_slow(quick=2)
@pytest.mark.parametrize(
    ("backend", "precision", "accumulate"),
    [*itertools.product([None], ["32-true", "bf16-mixed"], [1, 2]), *COMPILED],
)
def test_losses_weights_optimizer_and_random_state_are_those_without_the_callback(
    tmp_path, backend, precision, accumulate
):
    options = {"backend": backend, "precision": precision, "accumulate_grad_batches": accumulate}
    alone = train(tmp_path / "alone", **options)
    callback = HDICallback(every_n_steps=1, metrics=METRICS)
    watched = train(tmp_path / "watched", callback, **options)
    assert len(alone) == len(watched) > 100
    assert [place for place, (a, b) in enumerate(zip(alone, watched)) if not torch.equal(a, b)] == []
    records = read_records(callback.history_path)
    assert [record.step for record in records] == list(range(12 // accumulate + 1))
    assert all(f"head_correlation/{LIT_LAYERS[0]}" in record.scalars(METRICS) for record in records[:-1])
    assert any(alert.level == "critical" for alert in read_alerts(callback.history_path)), "rules were asked, and spoke"


def test_the_comparison_detects_one_extra_random_number(tmp_path):
    """One random number drawn, and all is different."""
    alone, other = train(tmp_path / "alone"), None

    class Draws(HDICallback):
        def on_train_batch_start(self, trainer, *args):
            super().on_train_batch_start(trainer, *args)
            if trainer.global_step == 5:
                torch.rand(1)

    other = train(tmp_path / "other", Draws(every_n_steps=1))
    differ = [place for place, (a, b) in enumerate(zip(alone, other)) if not torch.equal(a, b)]
    assert min(differ) == 5, "the loss of that step"
