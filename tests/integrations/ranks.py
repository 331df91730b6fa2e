"""Lightning and transformers on two ranks of this machine; run with `train` and `spawn_lightning`."""

from __future__ import annotations

import inspect
import json
import os
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
import transformers
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.data import DataLoader, SequentialSampler, Subset

from hdi_callback import HDICallback, HDITrainerCallback, MonitoringWarning, load_history
from hdi_callback.errors import NothingToWatchError
from tests.integrations.runs import Classifier, dataset
from tests.processes import on_ranks
from tests.versions import HAS_FSDP2_ON_CPU

RANKS, STEPS, EVERY, BATCH = 2, 3, 2, 4  # sequences of all ranks together
WAYS = ("ddp", *(["fsdp2"] if HAS_FSDP2_ON_CPU else []), "fsdp", "transformers")


def _outcome(losses: list[float], model: nn.Module, messages: list[str], history: Path | None) -> dict[str, Any]:
    outcome: dict[str, Any] = {
        "losses": losses,
        "weights": [_local(parameter).double().sum().item().hex() for parameter in model.parameters()],
        "messages": messages,
    }
    if history is not None:
        records = load_history(history).records
        outcome["read"] = [record.step for record in records]
        outcome["values"] = [{name: layer.values for name, layer in record.layers.items()} for record in records]
    return outcome


def _local(parameter: Tensor) -> Tensor:
    return (parameter.to_local() if hasattr(parameter, "to_local") else parameter).detach()


def _listen(messages: list[str]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("always", MonitoringWarning)
    warnings.showwarning = lambda message, kind, *_: (
        messages.append(str(message)) if issubclass(kind, MonitoringWarning) else None
    )


def _classifier() -> Classifier:
    torch.manual_seed(0)
    return Classifier()


class Module(L.LightningModule):
    """The classifier, which both kinds of FSDP shard here; ranks take every second sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.net: Any = _classifier()
        self.losses: list[float] = []

    def configure_model(self) -> None:
        mesh: Any = self.device_mesh
        if mesh is not None:
            for block in self.net.blocks:
                fully_shard(block, mesh=mesh["data_parallel"])
            fully_shard(self.net, mesh=mesh["data_parallel"])
        if isinstance(self.trainer.strategy, OnCPU):
            self.net = FullyShardedDataParallel(self.net, device_id=torch.device("cpu"), use_orig_params=True)

    def train_dataloader(self) -> Any:
        ranks, rank = self.trainer.world_size, self.trainer.global_rank
        data = dataset(BATCH * STEPS)
        return DataLoader(Subset(data, range(rank, len(data), ranks)), batch_size=BATCH // ranks)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.net(*batch)["loss"]
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.trainer.model.parameters(), lr=0.1)


class Leave(L.Callback):
    """The last callback, which leaves what its process has to tell in a file: Lightning spawns copies."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.messages: list[str] = []

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        _listen(self.messages)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        watchers = [callback for callback in trainer.callbacks if isinstance(callback, HDICallback)]
        history = watchers[0].history_path if watchers else None
        outcome = _outcome(pl_module.losses, trainer.strategy.model, self.messages, history)
        (self.folder / f"rank-{trainer.global_rank}.json").write_text(json.dumps(outcome))


class OnCPU(FSDPStrategy):
    """The first FSDP, as a strategy of the user's: given by name, Lightning asks for a GPU."""


def fit_lightning(strategy: str, folder: Path, ranks: int, is_watched: bool) -> None:
    """Train, and leave what each rank has to tell in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    plan: Any = strategy
    if strategy == "fsdp2":
        plan = ModelParallelStrategy(ranks, 1, process_group_backend="gloo")
    elif strategy == "fsdp":
        plan = OnCPU(process_group_backend="gloo")
    callbacks = [*([HDICallback(every_n_steps=EVERY)] if is_watched else []), Leave(folder)]
    trainer = L.Trainer(
        max_steps=STEPS, callbacks=callbacks, accelerator="cpu", devices=ranks, strategy=plan, logger=False,
        default_root_dir=folder, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(Module())


class Trainer(transformers.Trainer):
    losses: list[float]

    def _get_train_sampler(self, *args: Any) -> Any:
        return SequentialSampler(self.train_dataset)  # type: ignore[arg-type]

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        self.losses.append(float(loss))
        return loss


def fit_transformers(rank: int, folder: Path, ranks: int, is_watched: bool) -> None:
    """Train, and leave what a rank has to tell in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    messages: list[str] = []
    _listen(messages)
    watcher = HDITrainerCallback(every_n_steps=EVERY) if is_watched else None
    known = inspect.signature(transformers.TrainingArguments).parameters
    per_device = {"average_tokens_across_devices": False} if "average_tokens_across_devices" in known else {}
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=BATCH // ranks, use_cpu=True, seed=0,
        report_to=[], disable_tqdm=True, logging_strategy="no", save_strategy="no", max_grad_norm=0.0,
        remove_unused_columns=False, **per_device,
        **({} if ranks == 1 else {"ddp_backend": "gloo"}),
    )  # fmt: skip
    tokens, labels = dataset(BATCH * STEPS).tensors
    rows = [{"tokens": row, "labels": label} for row, label in zip(tokens, labels)]
    model = _classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    callbacks = [] if watcher is None else [watcher]
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=callbacks, optimizers=(optimizer, constant))
    trainer.losses = []
    trainer.train()
    outcome = _outcome(trainer.losses, model, messages, None if watcher is None else watcher.history_path)
    (folder / f"rank-{rank}.json").write_text(json.dumps(outcome))


def train(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return what each rank has to tell of each way, and of "ddp_spawn"; without a monitor under `unwatched`."""
    on_ranks(RANKS, folder, _work, folder)
    fit_lightning("ddp_spawn", folder / "ddp_spawn", RANKS, is_watched=True)
    return {
        way: [
            {**_left(folder / way, rank), "unwatched": _left(folder / "unwatched" / way.removesuffix("_spawn"), rank)}
            for rank in range(RANKS)
        ]
        for way in (*WAYS, "ddp_spawn")
    }


def _left(folder: Path, rank: int) -> dict[str, Any]:
    outcome: dict[str, Any] = json.loads((folder / f"rank-{rank}.json").read_text())
    return outcome


def _work(rank: int, folder: Path) -> None:
    """One rank, with the environment that launchers give it."""
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0", RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(RANKS), NODE_RANK="0")
    for way in WAYS:
        for place, is_watched in ((folder / "unwatched" / way, False), (folder / way, True)):
            _fit(way, rank, place, is_watched)


def _fit(way: str, rank: int, folder: Path, is_watched: bool) -> None:
    try:
        if way == "transformers":
            fit_transformers(rank, folder, RANKS, is_watched)
        else:
            fit_lightning(way, folder, RANKS, is_watched)
    except NothingToWatchError as refusal:
        (folder / f"rank-{rank}.json").write_text(json.dumps({"error": str(refusal)}))
