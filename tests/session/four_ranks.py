"""One small training on four ranks, spread over them in every way that torch has; run with `train_on_four`."""

from __future__ import annotations

import datetime
import hashlib
import inspect
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

from hdi_callback import HeadSession, MonitoringWarning, load_history, watch_heads
from hdi_callback.errors import NothingToWatchError
from tests.integrations.runs import CLASSES, HEADS, LENGTH, VOCABULARY, WIDTH
from tests.processes import on_ranks
from tests.versions import HAS_FSDP2_ON_CPU

RANKS, STEPS, TIMEOUT = 4, 5, 60.0  # seconds, of the process group
BLOCKS = 4


class Attention(nn.Module):
    """Attention that takes its number of heads from the width of its projections, as tensor parallelism needs it."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            proj(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.o_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(WIDTH), Attention()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(self.norm(x))


class Classifier(nn.Module):
    """Four blocks, any of which may be missing, as in a stage of a pipeline."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed: nn.Module | None = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleDict({str(place): Block() for place in range(BLOCKS)})
        self.head: nn.Module | None = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x.mean(1))


def batches() -> list[tuple[Tensor, Tensor]]:
    """The batches of all ranks together."""
    draw = torch.Generator().manual_seed(7)
    tokens = torch.randint(VOCABULARY, (STEPS, 4, LENGTH), generator=draw)
    return [(batch, batch.sum(1) % CLASSES) for batch in tokens]


class Training:
    """A model that is spread over the ranks, and the part of each batch that this rank trains on."""

    def __init__(self, how: str, rank: int, weights: dict[str, Tensor] | None = None) -> None:
        self.how, self.parts = how, 1  # among how many ranks a batch is shared out
        self.place = rank
        self.model: nn.Module = Classifier()
        if weights is not None:
            self.model.load_state_dict(weights)
        self.inner = self.model
        self.schedule: ScheduleGPipe | None = None
        SPREAD[how](self, rank)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self, tokens: Tensor, labels: Tensor) -> list[float]:
        losses: list[Tensor] = []
        if self.schedule is not None:
            inputs, is_last = ((tokens,) if dist.get_rank() == 0 else ()), dist.get_rank() == RANKS - 1
            self.schedule.step(*inputs, **({"target": labels, "losses": losses} if is_last else {}))
        else:
            size = len(tokens) // self.parts
            mine = slice(self.place * size, (self.place + 1) * size)
            losses = [F.cross_entropy(self.model(tokens[mine]), labels[mine])]
            losses[0].backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return [float(loss.detach()) for loss in losses]

    @property
    def weights(self) -> str:
        digest = hashlib.sha256()
        for parameter in self.model.parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            digest.update(local.detach().contiguous().numpy().tobytes())
        return digest.hexdigest()

    @property
    def blocks(self) -> Iterator[nn.Module]:
        return self.model.get_submodule("blocks").children()


def _alone(run: Training, rank: int) -> None:
    run.place = 0


def _ddp(run: Training, rank: int) -> None:
    run.parts, run.model = dist.get_world_size(), nn.parallel.DistributedDataParallel(run.model)


def _fsdp2(run: Training, rank: int, mesh: Any = None) -> None:
    run.parts = dist.get_world_size()
    for block in run.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(run.model, mesh=mesh)


def _fsdp1(run: Training, rank: int) -> None:
    run.parts, run.model = RANKS, FullyShardedDataParallel(run.model, device_id=torch.device("cpu"))


def _tensor_parallel(run: Training, rank: int, mesh: Any = None) -> None:
    run.place = 0
    mesh = init_device_mesh("cpu", (RANKS,)) if mesh is None else mesh
    plan = {name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")} | {"o_proj": RowwiseParallel()}
    for block in run.blocks:
        parallelize_module(block.get_submodule("attn"), mesh, plan)  # type: ignore[arg-type]


def _two_dimensions(run: Training, rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "heads"))
    _tensor_parallel(run, rank, mesh["heads"])
    _fsdp2(run, rank, mesh["data"])
    run.parts, run.place = 2, mesh.get_local_rank("data")


def _hybrid(run: Training, rank: int) -> None:
    _fsdp2(run, rank, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard")))


def _sequence_parallel(run: Training, rank: int) -> None:
    run.place = 0
    mesh = init_device_mesh("cpu", (RANKS,))
    along: dict[str, Any] = {"use_local_output": True}
    plan = {
        "norm": SequenceParallel(**along),
        "attn": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), **along),
        **{f"attn.{name}": ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")},
        "attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
    }
    for block in run.blocks:
        parallelize_module(block, mesh, plan)
    first = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), **along)
    last = PrepareModuleOutput(output_layouts=(Shard(1),), desired_output_layouts=(Replicate(),), **along)
    parallelize_module(run.model, mesh, {"blocks.0": first, f"blocks.{BLOCKS - 1}": last})


def _pipeline(run: Training, rank: int) -> None:
    model: Any = run.model
    model.blocks = nn.ModuleDict({str(rank): model.blocks[str(rank)]})
    model.embed = model.embed if rank == 0 else None
    model.head = model.head if rank == RANKS - 1 else None
    stage = PipelineStage(model, rank, RANKS, torch.device("cpu"))
    is_scaled = (
        "scale_grads" in inspect.signature(ScheduleGPipe).parameters
    )  # torch before 2.7 adds up gradients of parts
    loss = F.cross_entropy if is_scaled else lambda *pair: F.cross_entropy(*pair) / 4
    run.schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=loss)


def _local_names(run: Training, rank: int) -> None:
    _pipeline(run, rank)
    model: Any = run.model
    model.blocks = nn.ModuleDict({"0": model.blocks[str(rank)]})


def _sharded_stages(run: Training, rank: int) -> None:
    """Two models of equal names, each sharded over two ranks, as stages that number their blocks themselves."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("model", "shard"))
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter *= 1 + mesh.get_local_rank("model")
    _fsdp2(run, rank, mesh["shard"])
    run.parts, run.place = 2, mesh.get_local_rank("shard")


SPREAD: dict[str, Callable[[Training, int], None]] = {
    "one process": _alone,
    "DDP": _ddp,
    "FSDP2": _fsdp2,
    "FSDP2 over two dimensions": _hybrid,
    "tensor parallel": _tensor_parallel,
    "FSDP2 x tensor parallel": _two_dimensions,
    "sequence parallel": _sequence_parallel,
    "pipeline": _pipeline,
    "pipeline, names of each stage": _local_names,
    "FSDP2 of two models": _sharded_stages,
    "FSDP1": _fsdp1,
}


def train(how: str, rank: int, folder: Path, is_watched: bool) -> dict[str, Any]:
    """Return losses and weights, and what was read and said."""
    run, losses = Training(how, rank), []
    begin = time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        heads = watch_heads(run.model, run.optimizer, 2, log_dir=folder) if is_watched else None
        for batch in batches():
            with nullcontext() if heads is None else heads.step():
                losses += run.step(*batch)
        if heads is not None:
            heads.finish()
    outcome = {} if heads is None else outcome_of(heads, caught)
    return {**outcome, "losses": losses, "weights": run.weights, "seconds": time.monotonic() - begin}


def outcome_of(heads: HeadSession, caught: list[warnings.WarningMessage]) -> dict[str, Any]:
    """Return what was read and said."""
    outcome: dict[str, Any] = {}
    outcome["messages"] = [str(one.message) for one in caught if issubclass(one.category, MonitoringWarning)]
    if heads.history_path is not None:
        records = load_history(heads.history_path).records
        outcome["file"] = heads.history_path.name
        outcome["records"] = [
            (record.step, {name: layer.values for name, layer in record.layers.items()}) for record in records
        ]
        outcome["absent"] = [{name: layer.absent for name, layer in record.layers.items()} for record in records]
    return outcome


def train_on_four(folder: Path, ways: list[str]) -> dict[str, list[dict[str, Any]]]:
    """Return for each way what each rank found, without a monitor under `unwatched`."""
    on_ranks(RANKS, folder, _work, folder, ways, timeout=TIMEOUT)
    ranks = [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(RANKS)]
    return {how: [rank[how] for rank in ranks] for how in ranks[0]}


def _watched(how: str, rank: int, folder: Path) -> dict[str, Any]:
    try:
        return train(how, rank, folder, is_watched=True)
    except NothingToWatchError as refusal:
        return {"error": str(refusal)}


PARTS = [(2, "DDP", 0, 2), (4, "FSDP2" if HAS_FSDP2_ON_CPU else "DDP", 2, 4), (1, "one process", 4, STEPS)]
"""Number of ranks, how the model is spread over them, first step and last."""


def train_part(rank: int, folder: Path, how: str, first: int, last: int) -> dict[str, Any]:
    """Go on from the checkpoint in a folder, if a step was made, and leave one there; return what was read and said."""
    saved = torch.load(folder / "saved.pt") if first else {}
    run = Training(how, rank, saved.get("model"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        heads = watch_heads(run.model, run.optimizer, 2, log_dir=folder)
        heads.load_state_dict(saved.get("heads"))
        for batch in batches()[first:last]:
            with heads.step():
                run.step(*batch)
        state = heads.state_dict()
        heads.close() if last < STEPS else heads.finish()
    parameters = run.inner.state_dict().items()
    model = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in parameters}
    if rank == 0:
        torch.save({"model": model, "heads": state}, folder / "saved.pt")
    return outcome_of(heads, caught)


def _work(rank: int, folder: Path, ways: list[str]) -> None:
    limit, outcomes = datetime.timedelta(seconds=TIMEOUT), {}
    for how in ways:
        unwatched = train(how, rank, folder / how, is_watched=False)
        outcomes[how] = {**_watched(how, rank, folder / how), "unwatched": unwatched}
    _leave()
    parts = []
    for size, how, *steps in PARTS:
        if rank < size:
            if size > 1:
                store = f"file://{folder}/store-{size}"
                dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=limit)
            parts.append(train_part(rank, folder / "resumed", how, *steps))
            _leave()
    outcomes["resumed"] = {"parts": parts}
    torch.save(outcomes, folder / f"rank-{rank}.pt")


def _leave() -> None:
    if dist.is_initialized():
        dist.barrier()  # gloo aborts where one rank leaves while another still talks
        dist.destroy_process_group()
