"""Readings of a pipeline, whose ranks hold other layers each, against those of the whole model in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hdi_callback import HeadDiversityMonitor, watch_heads
from hdi_callback.monitoring.history import read_records
from hdi_callback.monitoring.metrics import METRICS as CATALOGUE
from hdi_callback.monitoring.ranks.roster import in_model_order
from tests.models import HEADS, LENGTH, WIDTH, Block
from tests.regimes.test_ddp import METRICS, ROWS, by_layer
from tests.skips import NEEDS_ONE_MICROBATCH

SLOW = pytest.mark.slow
BLOCKS = 4
ALL = [*METRICS, *ROWS, *(name for name in CATALOGUE if name.startswith(("update_", "weight_movement")))]


class Stage(nn.Module):
    """The whole model, or the part of it that one rank holds, under the names of the whole."""

    def __init__(
        self, first: int = 0, last: int = BLOCKS, *, keeps_names: bool = True, has_embedding: bool | None = None
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        embed, blocks, head = nn.Embedding(16, WIDTH), [Block() for _ in range(BLOCKS)], nn.Linear(WIDTH, 5)
        has_embedding = first == 0 if has_embedding is None else has_embedding
        self.embed = embed if has_embedding else nn.Identity()
        shift = 0 if keeps_names else first
        self.blocks = nn.ModuleDict({str(place - shift): blocks[place] for place in range(first, last)})
        self.head = head if last == BLOCKS else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        return self.head(x)


def batch() -> torch.Tensor:
    return torch.randint(16, (4, LENGTH), generator=torch.Generator().manual_seed(3))


def monitor_of(model: nn.Module, **options: Any) -> HeadDiversityMonitor:
    return HeadDiversityMonitor(model, **({"metrics": ALL, "max_tokens": 10_000} | options))


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.square().sum() / 4 + 0 * target.sum()


def read_whole() -> dict[str, Any]:
    """What one process reads of the whole model."""
    model = Stage()
    with monitor_of(model) as monitor:
        monitor.measure(0)
        monitor.arm()
        loss(model(batch()), batch()).backward()
        move(model)
        record = monitor.measure(1).record()
    return {"tags": record.scalars(ALL), "facts": monitor.facts, "arrays": arrays(record)}


def move(model: nn.Module) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            seed = sum(map(ord, name))
            parameter += 0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))


def arrays(record: Any) -> dict[str, Any]:
    return {
        name: (layer.arrays, {key: value.tolist() for key, value in layer.matrices.items()})
        for name, layer in record.layers.items()
    }


# --- what the ranks do


def schedule_of(stage: nn.Module, rank: int, ranks: int, group: Any = None, microbatches: int = 2) -> Any:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    piped = PipelineStage(stage, rank, ranks, torch.device("cpu"), group=group)
    return ScheduleGPipe(piped, n_microbatches=microbatches, loss_fn=loss, scale_grads=False)


def run(schedule: Any, rank: int, ranks: int, tokens: torch.Tensor) -> None:
    if rank == 0:
        schedule.step(tokens)
    elif rank == ranks - 1:
        schedule.step(target=tokens)
    else:
        schedule.step()


def read_pipeline(rank: int, cuts: list[int], microbatches: int) -> dict[str, Any]:
    ranks = len(cuts) - 1
    model = Stage(cuts[rank], cuts[rank + 1], has_embedding=rank == 0)
    schedule = schedule_of(model, rank, ranks, microbatches=microbatches)
    with monitor_of(model) as monitor:
        monitor.measure(0)
        monitor.arm()
        run(schedule, rank, ranks, batch())
        move(model)
        record = monitor.measure(1).record()
    return {
        "tags": record.scalars(ALL), "absent": record.absent, "facts": monitor.facts, "arrays": arrays(record),
        "held": [layer.name for layer in monitor.layers],
    }  # fmt: skip


def read_stages_numbered_anew(rank: int) -> dict[str, float]:
    with monitor_of(Stage(2 * rank, 2 * rank + 2, keeps_names=False), metrics=["hdi"]) as monitor:
        return monitor.measure(0).record().scalars(["hdi"])


def read_without_an_output(rank: int) -> dict[str, Any]:
    """The output projection of the last block is never called."""
    model = Stage(2 * rank, 2 * rank + 2)
    with monitor_of(model, metrics=METRICS) as monitor:
        monitor.arm()
        x = batch() if rank == 0 else torch.randn(4, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
        if rank == 0:
            model(x).sum().backward()
        else:
            model.blocks["2"](x).sum().backward()
        record = monitor.measure(0).record()
    return {"tags": sorted(record.scalars(METRICS)), "absent": record.absent}


def watch_pipeline(rank: int, folder: str, resumes: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Stage(2 * rank, 2 * rank + 2)
    schedule = schedule_of(model, rank, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options = {"every_n_steps": 2, "verbose": False, "log_dir": folder, "strict": True}
    with watch_heads(model, optimizer, **options) as heads:
        if resumes:
            heads.load_state_dict(torch.load(f"{folder}/state0.pt"))  # of the first rank, as trainers save it
        for _ in range(4):
            with heads.step():
                run(schedule, rank, 2, batch())
                optimizer.step()
                optimizer.zero_grad()
        state = heads.state_dict()
        torch.save(state, f"{folder}/state{rank}.pt")
        dist.barrier()
    return {"latest": heads.latest, "layers": list(state["layers"]), "path": heads.history_path}


def read_stages_of_copies(rank: int, kind: str) -> dict[str, Any]:
    """Two stages of two copies each: rank = 2 x stage + copy."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "copy"))
    stage, copy = mesh.get_local_rank("stage"), mesh.get_local_rank("copy")
    inner: nn.Module = Stage(2 * stage, 2 * stage + 2)
    if kind == "tensor parallel":
        plan = {name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")} | {"out_proj": RowwiseParallel()}
        for block in inner.blocks.values():
            parallelize_module(block.attn, mesh["copy"], plan)
            block.attn.num_heads, block.attn.head_dim = HEADS // 2, WIDTH // HEADS
    if kind == "fsdp2":
        for block in inner.blocks.values():
            fully_shard(block, mesh=mesh["copy"])
        fully_shard(inner, mesh=mesh["copy"])
    model = nn.parallel.DistributedDataParallel(inner, process_group=mesh.get_group("copy")) if kind == "ddp" else inner
    metrics = [name for name in METRICS if "importance" not in name] if kind == "tensor parallel" else METRICS
    schedule = schedule_of(model, stage, 2, group=mesh.get_group("stage"))
    tokens = batch() if kind == "tensor parallel" else batch()[2 * copy : 2 * copy + 2]
    with monitor_of(model, metrics=metrics) as monitor:
        monitor.arm()
        run(schedule, stage, 2, tokens)
        record = monitor.measure(0).record()
    return {"tags": record.scalars(metrics), "absent": record.absent}


class Parts(nn.Module):
    """The stages that one rank holds of an interleaved pipeline, whose layers keep the names of the whole model."""

    def __init__(self, stages: list[Stage]) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({name: block for stage in stages for name, block in stage.blocks.items()})


def read_interleaved(rank: int, kind: str) -> dict[str, Any]:
    """Four stages, of which the first rank holds the first and the third."""
    from torch.distributed.pipelining import PipelineStage, schedules

    stages = [Stage(place, place + 1) for place in (rank, rank + 2)]
    piped = [PipelineStage(one, rank + 2 * turn, 4, torch.device("cpu")) for turn, one in enumerate(stages)]
    schedule = getattr(schedules, kind)(piped, n_microbatches=2, loss_fn=loss, scale_grads=False)
    with monitor_of(Parts(stages)) as monitor:
        monitor.measure(0)
        monitor.arm()
        run(schedule, rank, 2, batch())
        for stage in stages:
            move(stage)
        record = monitor.measure(1).record()
    return {"tags": record.scalars(ALL), "held": [layer.name for layer in monitor.layers]}


# --- what must come of it


def assert_same(found: Any, truth: Any) -> None:
    """Nested numbers, but for pairs and places, which a tie may decide either way."""
    if isinstance(truth, dict):
        assert set(found) == set(truth)
        for key in truth:
            assert_same(found[key], truth[key])
    elif isinstance(truth, list | tuple):
        assert len(found) == len(truth)
        for one, other in zip(found, truth):
            assert_same(one, other)
    else:
        assert found == pytest.approx(truth, rel=1e-4, abs=2e-5, nan_ok=True)


@pytest.mark.some_slow(quick=1)
@pytest.mark.parametrize("cuts", [[0, 2, 4], [0, 1, 4], [0, 0, 4]])
def test_two_stages_give_one_reading_of_the_whole_model_on_both_ranks(two_ranks, cuts):
    if torch.__version__ < "2.13":  # as a TorchVersion, number by number
        pytest.skip(NEEDS_ONE_MICROBATCH)
    whole = read_whole()
    reported = two_ranks(read_pipeline, cuts, 1)
    for rank, one in enumerate(reported):
        assert one.answer["absent"] == {}
        assert one.answer["tags"] == pytest.approx(whole["tags"], rel=1e-4, abs=1e-5)
        assert list(one.answer["tags"]) == list(whole["tags"])
        assert_same(one.answer["arrays"], whole["arrays"])
        assert one.answer["held"] == [f"blocks.{place}.attn" for place in range(cuts[rank], cuts[rank + 1])]
        assert one.answer["facts"] == whole["facts"]
    assert len(by_layer(whole["tags"])) >= 4 * len(METRICS)


def read_alone(metrics: list[str]) -> dict[str, float]:
    model = Stage()
    with monitor_of(model, metrics=metrics) as monitor:
        monitor.arm()
        loss(model(batch()), batch()).backward()
        return monitor.measure(0).record().scalars(metrics)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "tensor parallel"])
def test_a_pipeline_of_copies_in_one_mesh_gives_one_reading_of_the_whole_model_on_all_ranks(four_ranks, kind):
    reported = four_ranks(read_stages_of_copies, kind)
    whole = read_alone(_metrics_of(kind))
    for one in reported:
        assert one.warnings == []
        assert one.answer["absent"] == {}
        assert one.answer["tags"] == pytest.approx(whole, rel=1e-4, abs=1e-5)


def _metrics_of(kind: str) -> list[str]:
    return [name for name in METRICS if "importance" not in name] if kind == "tensor parallel" else METRICS


@pytest.mark.slow
def test_four_stages_one_of_them_without_attention_give_one_reading_on_all_ranks(four_ranks):
    whole = read_whole()
    for one in four_ranks(read_pipeline, [0, 1, 1, 3, 4], 1):
        assert one.answer["tags"] == pytest.approx(whole["tags"], rel=1e-4, abs=1e-5)


@pytest.mark.slow
def test_microbatches_of_a_pipeline_count_as_the_whole_batch(two_ranks):
    whole = read_whole()["tags"]
    for one in two_ranks(read_pipeline, [0, 2, 4], 2):
        found = one.answer["tags"]
        for name in METRICS:  # attention rows are of the first microbatch
            for place in range(BLOCKS):
                tag = f"{name}/blocks.{place}.attn"
                assert found.get(tag) == (pytest.approx(whole[tag], rel=1e-4, abs=1e-5) if tag in whole else None), tag


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ScheduleInterleaved1F1B", pytest.param("ScheduleInterleavedZeroBubble", marks=SLOW)])
def test_two_stages_on_each_rank_give_one_reading_of_the_whole_model(two_ranks, kind):
    whole = read_whole()["tags"]
    reported = two_ranks(read_interleaved, kind)
    assert [one.answer["held"] for one in reported] == [
        ["blocks.0.attn", "blocks.2.attn"],
        ["blocks.1.attn", "blocks.3.attn"],
    ]
    for one in reported:
        for name in METRICS:  # attention rows are of the first microbatch
            for place in range(BLOCKS):
                tag = f"{name}/blocks.{place}.attn"
                found = one.answer["tags"].get(tag)
                assert found == (pytest.approx(whole[tag], rel=1e-4, abs=1e-5) if tag in whole else None), tag


def test_pipeline_stages_that_renumber_their_layers_are_reported_and_not_taken_for_copies(two_ranks):
    for one in two_ranks(read_stages_numbered_anew):
        assert sorted(one.answer) == ["hdi/blocks.0.attn", "hdi/blocks.1.attn", "hdi/mean", "hdi/min"]
        (warning,) = one.warnings
        assert "different weights under the same names" in warning
        assert "keep the names of the whole model" in warning


def test_outputs_that_one_stage_cannot_capture_are_absent_with_the_reason_on_all_ranks(two_ranks):
    first, second = (one.answer for one in two_ranks(read_without_an_output))
    assert first["tags"] == second["tags"]
    assert "hdi/blocks.3.attn" in first["tags"]
    assert "head_covariance/blocks.3.attn" not in first["tags"]
    for one in (first, second):
        assert "no call of its output projection was captured" in one["absent"]["head outputs/blocks.3.attn"]


@pytest.mark.slow
def test_the_first_rank_writes_a_history_of_all_stages_and_resumes_it_on_all_ranks(two_ranks, tmp_path):
    names = [f"blocks.{place}.attn" for place in range(BLOCKS)]
    first, second = (one.answer for one in two_ranks(watch_pipeline, str(tmp_path), False))
    assert first["latest"] == second["latest"]
    assert first["layers"] == second["layers"] == names
    assert second["path"] is None
    records = read_records(first["path"])
    assert [record.step for record in records] == [0, 2, 4]
    assert all(list(record.layers) == names for record in records)
    assert all(len(layer.values) > 3 for record in records for layer in record.layers.values())
    reported = two_ranks(watch_pipeline, str(tmp_path), True)
    assert [one.warnings for one in reported] == [[], []]
    assert reported[0].answer["latest"] == reported[1].answer["latest"]
    assert [record.step for record in read_records(reported[0].answer["path"])] == [0, 2, 4, 6, 8]


def test_layers_of_stages_come_in_the_order_of_the_model():
    names = ["m.embed.attn", *(f"m.h.{place}.{kind}" for place in range(12) for kind in ("own", "cross")), "m.last"]
    interleaved = [*names[:3], *names[13:], *names[3:13]]
    assert in_model_order(interleaved) == names
