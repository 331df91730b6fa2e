"""Lightning's trainer on two ranks of one group: readings, what is left of them, and what training is like."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from hdi_callback import HDICallback
from hdi_callback.errors import HeadCollapseWarning
from hdi_callback.monitoring.history import read_lines, read_records
from hdi_callback.monitoring.readings import Record
from hdi_callback.monitoring.rules.replay import read_alerts
from tests.integrations.test_alerts_in_lightning import Collapse
from tests.models import CLASSES, HEADS, LENGTH, LIT_LAYERS, WIDTH, Classifier
from tests.regimes.trainings import Losses, Module, Witness, trainer_for

METRICS = ["hdi", "head_covariance"]
MOVEMENT = ["head_movement_min", "head_unchanged"]
SIZES = (5, 2)
"""Sequences in a batch of each rank: uneven on purpose."""


class Batches(Dataset):
    """Nine batches of one size; ranks that are given the same size get the same ones."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(size)
        self.batches = [torch.randint(16, (size, LENGTH), generator=generator) for _ in range(9)]

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, place: int):
        return self.batches[place], self.batches[place].sum(1) % CLASSES


class Skips(Classifier):
    """Leaves its second block out, on the second rank alone, at every other batch."""

    rank, forwards = 0, 0

    def forward(self, tokens):
        x = self.blocks[0](self.embed(tokens))
        self.forwards += 1
        if self.rank == 0 or self.forwards % 2 == 0:
            x = self.blocks[1](x)
        return self.head(x.mean(1))


# --- what the ranks do


def fit_on_rank(rank: int, folder: Path, kind: type[Classifier], is_watched: bool, options: dict[str, Any]) -> dict:
    """Train as one of two ranks, and give all that is left."""
    with mock.patch.dict(os.environ, {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": "2"}):
        torch.manual_seed(0)
        lit = Module(kind(dropout=0.2))
        lit.net.rank = rank
        losses, witness, callback = Losses(), Witness(), HDICallback(every_n_steps=2, verbose=False)
        stop = EarlyStopping(monitor="hdi/min", mode="max", stopping_threshold=0.0, patience=1000)
        torch.manual_seed(rank)
        trainer = trainer_for(
            folder, witness, losses, Collapse(start=2), *([callback, stop] if is_watched else []),
            devices=2, strategy=DDPStrategy(find_unused_parameters=kind is Skips), use_distributed_sampler=False,
            gradient_clip_val=0.5, **options,
        )  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HeadCollapseWarning)
            trainer.fit(lit, DataLoader(Batches(SIZES[rank]), batch_size=None))
        kept = [value for state in trainer.optimizers[0].state_dict()["state"].values() for value in state.values()]
        return {
            "left": [*losses.recorded, *lit.state_dict().values(), *kept, torch.get_rng_state()],
            "weights": witness.weights,
            "inputs": witness.inputs,
            "metrics": {tag: float(value) for tag, value in trainer.callback_metrics.items()},
            "history": str(callback.history_path),
            "epochs": trainer.current_epoch,
        }


def joined(first: dict, second: dict) -> Witness:
    """What both ranks saw, as one witness of all their tokens."""
    witness = Witness()
    witness.weights = first["weights"]
    for step, inputs in first["inputs"].items():
        both = zip(inputs, second["inputs"][step], strict=True)
        witness.inputs[step] = [[torch.cat([outputs[0] for outputs in pair if outputs])] for pair in both]
    return witness


@pytest.mark.some_slow(quick=1)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Classifier, {}),
        (Classifier, {"accumulate_grad_batches": 2, "precision": "bf16-mixed"}),
        (Skips, {}),
    ],
)
def test_two_ranks_write_one_history_of_all_tokens_and_train_as_without_it(tmp_path, two_ranks, kind, options):
    """The batches are uneven; in the third case a layer is unused on one of the ranks, now and then."""
    alone = [reported.answer for reported in two_ranks(fit_on_rank, tmp_path / "alone", kind, False, options)]
    reported = two_ranks(fit_on_rank, tmp_path / "watched", kind, True, options)
    watched = [one.answer for one in reported]
    assert reported[0].warnings == []
    assert len(reported[1].warnings) == (kind is Skips)
    assert kind is not Skips or f"No head outputs of `{LIT_LAYERS[1]}`" in reported[1].warnings[0]
    for without, with_it in zip(alone, watched, strict=True):
        pairs = list(itertools.zip_longest(without["left"], with_it["left"]))
        assert len(pairs) > 100
        assert [place for place, (a, b) in enumerate(pairs) if not torch.equal(a, b)] == []

    (history,) = tmp_path.rglob("history.jsonl")
    assert [one["history"] for one in watched] == [str(history), "None"]
    last = 9 if not options else 5
    steps = [*range(0, last, 2), last]
    assert [line["step"] for line in read_lines(history) if line["kind"] == "reading"] == steps
    witness = joined(*watched)
    for record in read_records(history):
        for place, name in enumerate(LIT_LAYERS):
            values = record.layers[name].values
            assert values["hdi"] == pytest.approx(witness.hdi(record.step, place), abs=1e-5)
            if record.step < last:
                truth = witness.covariance(record.step, place)
                assert values["head_covariance"] == pytest.approx(truth, rel=1e-3, abs=1e-8)
    assert any(alert.level == "critical" for alert in read_alerts(history))
    first, second = (one["metrics"] for one in watched)
    assert first == second
    assert first["hdi/min"] == pytest.approx(read_records(history)[-1].summary()["hdi/min"], rel=1e-8)


def test_early_stopping_decides_the_same_on_both_ranks(tmp_path, two_ranks):
    reported = two_ranks(fit_on_rank, tmp_path, Classifier, True, {"max_epochs": 4})
    assert [one.answer["epochs"] for one in reported] == [1, 1]


# --- weights that are spread over ranks


class Sharded(Module):
    """FSDP2, block by block."""

    def configure_model(self):
        from torch.distributed.fsdp import fully_shard

        mesh = self.device_mesh["data_parallel"]
        for block in self.net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.net, mesh=mesh)


class Parallel(Module):
    """Heads spread over the ranks of a tensor-parallel mesh."""

    def configure_model(self):
        styles = {f"{name}_proj": ColwiseParallel() for name in "qkv"} | {"out_proj": RowwiseParallel()}
        for block in self.net.blocks:
            block.attn.head_dim = WIDTH // HEADS
            block.attn.forward = partial(_attend_to_own_heads, block.attn)
            parallelize_module(block.attn, self.device_mesh["tensor_parallel"], styles)


def _attend_to_own_heads(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    q, k, v = (
        proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj)
    )
    return self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def fit_spread(rank: int, folder: Path, kind: type[Module], sizes: tuple[int, int], resumes: bool) -> str | None:
    """Train as one of two ranks; give the history's path on the first."""
    strategy: Any = DDPStrategy()
    if kind is not Module:
        widths = {"data_parallel_size": 2, "tensor_parallel_size": 1}
        if kind is Parallel:
            widths = {"data_parallel_size": 1, "tensor_parallel_size": 2}
        strategy = ModelParallelStrategy(**widths)
    with mock.patch.dict(os.environ, {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": "2"}):
        data = DataLoader(Batches(sizes[rank]), batch_size=None)
        callback = HDICallback(every_n_steps=2, verbose=False)
        options = {"devices": 2, "strategy": strategy, "use_distributed_sampler": False}
        trainer = trainer_for(folder, callback, max_steps=5 if resumes else -1, **options)
        trainer.fit(kind(), data)
        if resumes:
            trainer.save_checkpoint(folder / "five.ckpt")
            callback = HDICallback(every_n_steps=2, verbose=False, strict=True)
            options["strategy"] = type(strategy)(**widths)
            trainer = trainer_for(folder / "resumed", callback, max_epochs=2, **options)
            trainer.fit(kind(), data, ckpt_path=folder / "five.ckpt")
        return None if callback.history_path is None else str(callback.history_path)


def records_of(reported: list) -> list[Record]:
    assert [one.warnings for one in reported] == [[], []]
    assert reported[1].answer is None
    return read_records(reported[0].answer)


def check_alike(records: list[Record], truth: list[Record], absent: Collection[str] = ()) -> None:
    """Hold readings over ranks against others; `absent` names what cannot be measured there, layer by layer."""
    assert [record.step for record in records] == [0, 2, 4, 6, 8, 9]
    for record, other in zip(records, truth, strict=True):
        tags = record.scalars(METRICS)
        assert tags == pytest.approx(other.scalars(METRICS), rel=1e-3, abs=1e-5)
        moved = set(MOVEMENT) if record.step == 0 else set()  # nothing has moved before the first reading
        assert {key.partition("/")[0] for key in record.absent} == moved | set(absent if record.step < 9 else ())
        assert len(tags) == (6 if record.step < 9 else 4)


@pytest.mark.slow
def test_fully_sharded_weights_are_read_as_those_of_data_parallel_ranks(tmp_path, two_ranks):
    """`ModelParallelStrategy` with FSDP2; Lightning's FSDPStrategy asks for a GPU."""
    truth = records_of(two_ranks(fit_spread, tmp_path / "ddp", Module, SIZES, False))
    records = records_of(two_ranks(fit_spread, tmp_path / "fsdp", Sharded, SIZES, False))
    check_alike(records, truth)


@pytest.mark.slow
def test_tensor_parallel_weights_are_read_as_those_of_one_process(tmp_path, two_ranks):
    """Ranks that hold parts of one layer get the same batches."""
    callback = HDICallback(every_n_steps=2)
    trainer_for(tmp_path / "one", callback).fit(Module(), DataLoader(Batches(4), batch_size=None))
    reported = two_ranks(fit_spread, tmp_path / "two", Parallel, (4, 4), False)
    rows = {"attention rows"}  # every rank attends with its own heads
    check_alike(records_of(reported), read_records(callback.history_path), rows)


@pytest.mark.slow
def test_a_sharded_run_resumes_without_a_gap_or_a_double_point(tmp_path, two_ranks):
    """Lightning restores callbacks later here than elsewhere."""
    reported = two_ranks(fit_spread, tmp_path, Sharded, SIZES, True)
    records, history = records_of(reported), reported[0].answer
    assert Path(history).is_relative_to(tmp_path / "resumed"), "resumed in a folder of its own"
    steps = [line["step"] for line in read_lines(history) if line["kind"] == "reading"]
    assert steps[:5] == [0, 2, 4, 5, 6]
    assert steps == sorted(set(steps)) == [record.step for record in records]
