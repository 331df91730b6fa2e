"""A function of the package raises on one of two ranks: nobody waits for it, and the training's own calls meet."""

from __future__ import annotations

import os
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from hdi_callback import HDICallback, watch_heads
from hdi_callback.attention.layer.sharding import Sharding, whole
from hdi_callback.integrations.lightning_host import LightningHost
from hdi_callback.interventions import DiversityPenalty, Intervention, QKClip, ScaleLearningRate
from hdi_callback.monitoring.alerts import Alerts
from hdi_callback.monitoring.history import read_records
from hdi_callback.monitoring.layers import HeadVerifier, WatchedLayers
from hdi_callback.monitoring.monitor.inputs import LayerInputs
from hdi_callback.monitoring.monitor.outputs import HeadOutputs
from hdi_callback.monitoring.monitor.rows import AttentionReadings
from hdi_callback.monitoring.monitor.weights import WeightReader
from hdi_callback.monitoring.ranks.rendezvous import Rendezvous
from hdi_callback.monitoring.session.publisher import Publisher
from hdi_callback.monitoring.session.session import Session
from tests.models import Classifier
from tests.monitoring.test_watch_interventions import Always
from tests.regimes.test_ddp import METRICS, SHARES, batch, classifier, monitor_of
from tests.regimes.test_lightning_ddp import SIZES, Batches
from tests.regimes.test_sharding import WIDTHS, fsdp2
from tests.regimes.trainings import Losses, Module, trainer_for

PLACES = {
    "before the ranks meet": (HeadVerifier, "verify"),
    "before the first sum": (HeadOutputs, "shares"),
    "between two sums": (HeadOutputs, "sums"),
    "before the rows add up": (AttentionReadings, "measure_over"),
    "between the layers": (LayerInputs, "_add_up"),
}
ROWS = ["attention_entropy", "token_cosine"]


@contextmanager
def raising(owner: type, name: str, calls: set[int]):
    """Let a few calls of a method raise."""
    real, count = getattr(owner, name), [0]

    def method(self, *args, **kwargs):
        count[0] += 1
        if count[0] - 1 in calls:
            raise RuntimeError("a bug")
        return real(self, *args, **kwargs)

    with mock.patch.object(owner, name, method):
        yield


def read_while_one_rank_fails(rank: int, place: str) -> dict:
    model, records, sums = DistributedDataParallel(classifier()), [], []
    begun = time.monotonic()
    with ExitStack() as stack:
        monitor = stack.enter_context(monitor_of(model, metrics=[*METRICS, *ROWS]))
        if rank == 1:
            stack.enter_context(raising(*PLACES[place], calls={1}))
        for step in range(3):
            monitor.arm()
            model(batch()[SHARES[rank]]).sum().backward()
            records.append(monitor.measure(step).record())
            own = torch.full((3,), 1.0 + rank)
            dist.all_reduce(own)  # the training's own
            sums.append(own.tolist())
    tags = [record.scalars([*METRICS, *ROWS]) for record in records]
    return {"tags": tags, "sums": sums, "seconds": time.monotonic() - begun}


@pytest.mark.parametrize("place", PLACES)
def test_a_rank_that_fails_in_a_reading_blocks_no_other_and_takes_part_in_the_next(two_ranks, place):
    first, second = two_ranks(read_while_one_rank_fails, place)
    for rank in (first, second):
        assert rank.answer["sums"] == [[3.0] * 3] * 3, "the training's own calls meet their like"
        assert rank.answer["seconds"] < 30
        before, _, after = rank.answer["tags"]
        assert after == pytest.approx(before, abs=1e-6), "the ranks measure together again"
    assert len(first.warnings) == 1, "the rank that did not fail says why it was alone"
    assert sum("a bug" in line for line in second.warnings) == 1
    assert {tag for tag in first.answer["tags"][1] if tag.startswith("hdi/")} >= {"hdi/mean", "hdi/blocks.0.attn"}


def train_where_one_rank_cannot_judge(rank: int, fails: bool) -> dict:
    model = DistributedDataParallel(classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    begun = time.monotonic()
    with ExitStack() as stack:
        if fails and rank == 1:
            stack.enter_context(mock.patch.object(Alerts, "active", property(lambda self: 1 / 0)))
        acting = ScaleLearningRate(0.5)
        chosen = {"interventions": [acting], "alerts": [Always()]}
        heads = stack.enter_context(
            watch_heads(model, optimizer, every_n_steps=1, history=False, verbose=False, **chosen)
        )
        for _ in range(3):
            with heads.step():
                model(batch()[SHARES[rank]]).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    return {"acted": acting.count, "seconds": time.monotonic() - begun}


def test_no_rank_intervenes_if_one_cannot_take_part(two_ranks):
    acting, failing = (two_ranks(train_where_one_rank_cannot_judge, fails) for fails in (False, True))
    assert acting[0].answer["acted"] == acting[1].answer["acted"] > 0
    for rank in failing:
        assert rank.answer["acted"] == 0
        assert rank.answer["seconds"] < 30
        assert sum("agreeing on interventions failed" in line for line in rank.warnings) == 1


class Unsendable(ScaleLearningRate):
    def report(self, record):
        return lambda: None  # is no plain data


def train(rank: int, chosen: dict | None, place: tuple | None = None, on: int = 1, **calls) -> dict:
    """Four steps on two ranks, which add up a tensor of their own after each; one rank may fail at a place."""
    model = DistributedDataParallel(classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    begun, sums = time.monotonic(), []
    with ExitStack() as stack:
        if place is not None and rank == on:
            stack.enter_context(raising(*place, **calls))
        if chosen is not None:
            options = {"every_n_steps": 1, "history": False, "verbose": False, **chosen}
            heads = stack.enter_context(watch_heads(model, optimizer, **options))
        for _ in range(4):
            with heads.step() if chosen is not None else ExitStack():
                model(batch()[SHARES[rank]]).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            own = torch.full((3,), 1.0 + rank)
            dist.all_reduce(own)
            sums.append(own.tolist())
    weights = [value.detach().tolist() for value in model.parameters()]
    acted = [one.count for one in (chosen or {}).get("interventions", ())]
    return {"weights": weights, "sums": sums, "seconds": time.monotonic() - begun, "acted": acted}


def train_clipped(rank: int, name: str | None, calls: set[int]) -> dict:
    chosen = {"interventions": [QKClip(1e-6)], "alerts": None, "metrics": ["hdi"]}
    return train(rank, chosen, None if name is None else (QKClip, name), calls=calls)


def train_unwatched(rank: int) -> dict:
    return train(rank, None)


def train_with_a_limit_that_is_not_reached(rank: int, name: str) -> dict:
    chosen = {"interventions": [QKClip(1e6)], "alerts": None}
    return train(rank, chosen, (QKClip, name), calls={2, 3})


def check(both) -> None:
    first, second = (rank.answer for rank in both)
    for answer in (first, second):
        assert answer["sums"] == [[3.0] * 3] * 4, "the training's own calls meet their like"
        assert answer["seconds"] < 40
    assert first["weights"] == second["weights"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["_stepped_by", "_scores_of", "_collect", "_without_scores"])
def test_no_rank_clips_at_a_step_at_which_one_rank_fails_before_the_scores_are_compared(two_ranks, name):
    check(two_ranks(train_clipped, name, {5, 6}))
    lost = two_ranks(train_with_a_limit_that_is_not_reached, name)
    check(lost)
    assert lost[0].answer["weights"] == two_ranks(train_unwatched)[0].answer["weights"]


@pytest.mark.slow
def test_clipping_that_fails_on_one_rank_ends_on_all_ranks(two_ranks):
    first, second = two_ranks(train_clipped, "_clip_all", {1})
    assert [first.answer["acted"], second.answer["acted"]] == [[2], [1]], "of four steps"
    assert first.answer["sums"] == second.answer["sums"] == [[3.0] * 3] * 4


PLACES_OF_DECISIONS = {
    "before it is sent": (Publisher, "_seen", {0, 1, 2, 3, 4}, 0),
    "sending it": (Rendezvous, "share", {1, 2, 3, 4, 5}, 0),
    "acting": (ScaleLearningRate, "act", {0}, 3),
    "after acting": (Rendezvous, "failed_apart", {1}, 3),
    "attaching": (ScaleLearningRate, "attach", {0}, 0),
}


def train_where_a_decision_fails(rank: int, place: str, on: int) -> dict:
    *where, calls, _ = PLACES_OF_DECISIONS[place]
    return train(rank, {"interventions": [ScaleLearningRate(0.5)], "alerts": [Always()]}, where, on, calls=calls)


def train_with_what_cannot_be_sent(rank: int) -> dict:
    return train(rank, {"interventions": [Unsendable(0.5)], "alerts": [Always()]})


@pytest.mark.slow
@pytest.mark.parametrize("on", [0, 1])
@pytest.mark.parametrize("place", PLACES_OF_DECISIONS)
def test_training_is_unchanged_if_one_rank_fails_to_carry_out_a_decision(two_ranks, place, on):
    both = two_ranks(train_where_a_decision_fails, place, on)
    check(both)
    assert both[0].answer["weights"] == two_ranks(train_unwatched)[0].answer["weights"]
    acted = PLACES_OF_DECISIONS[place][-1]
    assert both[1 - on].answer["acted"] == [acted]
    assert 1 <= len(both[1 - on].warnings) <= 2, "the rank that did not fail says what it leaves out, or why"


@pytest.mark.slow
def test_no_rank_acts_on_a_decision_that_cannot_be_sent(two_ranks):
    both = two_ranks(train_with_what_cannot_be_sent)
    check(both)
    assert both[0].answer["weights"] == two_ranks(train_unwatched)[0].answer["weights"]


PLACES_OF_CALLS = {"the call raises": (dist, "all_reduce"), "no such device": (WatchedLayers, "device")}


def read_where_a_call_fails(rank: int, place: str, call: int | None) -> dict:
    """Three readings; on the second rank one call raises, or is given a device that the backend does not know."""
    owner, name = PLACES_OF_CALLS[place]
    model, records, sums, count = DistributedDataParallel(classifier()), [], [], [-1]
    real, begun = getattr(owner, name), time.monotonic()

    def function(*args, **kwargs):
        is_ours = "hdi_callback" in sys._getframe(1).f_code.co_filename
        count[0] += is_ours
        if is_ours and rank == 1 and count[0] == call:
            if name == "device":
                return torch.device("meta")
            raise RuntimeError("out of memory")
        return real(*args, **kwargs)

    with mock.patch.object(owner, name, function), monitor_of(model, metrics=[*METRICS, *ROWS]) as monitor:
        for step in range(3):
            monitor.arm()
            model(batch()[SHARES[rank]]).sum().backward()
            records.append(monitor.measure(step).record())
            own = torch.full((3,), 1.0 + rank)
            dist.all_reduce(own)
            sums.append(own.tolist())
    tags = [record.scalars([*METRICS, *ROWS]) for record in records]
    return {"tags": tags, "sums": sums, "calls": count[0] + 1, "seconds": time.monotonic() - begun}


@pytest.mark.slow
@pytest.mark.parametrize("call", [0, 3])
def test_a_collective_call_that_fails_at_once_on_one_rank_is_made_again(two_ranks, call):
    healthy = two_ranks(read_where_a_call_fails, "the call raises", None)
    failing = two_ranks(read_where_a_call_fails, "the call raises", call)
    assert call < healthy[1].answer["calls"] < failing[1].answer["calls"]
    for rank, other in zip(failing, healthy):
        assert rank.answer["sums"] == [[3.0] * 3] * 3, "the training's own calls meet their like"
        assert rank.answer["tags"] == other.answer["tags"]
        assert rank.warnings == []


@pytest.mark.slow
def test_a_device_that_the_backend_of_one_rank_does_not_know_keeps_no_other_waiting(two_ranks):
    healthy = two_ranks(read_where_a_call_fails, "no such device", None)
    failing = two_ranks(read_where_a_call_fails, "no such device", 1)
    for rank, other in zip(failing, healthy):
        assert rank.answer["sums"] == [[3.0] * 3] * 3, "the training's own calls meet their like"
        assert rank.answer["seconds"] < 30
        assert len(rank.warnings) == 1
        assert rank.answer["tags"] != other.answer["tags"]
        assert rank.answer["tags"][2] == other.answer["tags"][2], "the ranks measure together again"


class Pushes(Intervention):
    """Adds to every gradient at every step."""

    name, rules = "Pushes", ()

    def act(self, alert):
        return None

    def before_optimizer_step(self, optimizer):
        self.count += 1
        self.push(optimizer)

    def push(self, optimizer):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad += 0.1


def train_penalised(rank: int, calls: set[int] | None) -> dict:
    acting = DiversityPenalty(1.0, rules=["always"], at_most=9)
    place = None if calls is None else (DiversityPenalty, "_gradients")
    return train(rank, {"interventions": [acting], "alerts": [Always()]}, place, calls=calls)


def train_pushed(rank: int) -> dict:
    return train(rank, {"interventions": [Pushes()], "alerts": [Always()]}, (Pushes, "push"), calls={1})


@pytest.mark.slow
@pytest.mark.parametrize("call", [0, 3])
def test_no_rank_adds_a_penalty_at_a_step_at_which_one_rank_cannot(two_ranks, call):
    pushed, plain = (two_ranks(train_penalised, calls)[0].answer["weights"] for calls in (set(), None))
    assert pushed == plain
    failing = two_ranks(train_penalised, {call})
    check(failing)
    assert failing[0].answer["weights"] != pushed


@pytest.mark.slow
def test_an_intervention_that_fails_within_a_step_on_one_rank_ends_on_all_ranks(two_ranks):
    first, second = two_ranks(train_pushed)
    assert first.answer["sums"] == second.answer["sums"] == [[3.0] * 3] * 4
    assert first.answer["acted"] == second.answer["acted"] == [2], "of four steps"
    assert any("is left out from now on, as it failed on some of the ranks" in line for line in first.warnings)


PLACES_OF_STARTING = {"opening the folder": (LightningHost, "__init__"), "opening the session": (Session, "open")}


def fit_where_one_rank_cannot_start(rank: int, folder: Path, place: str | None, on: int, chosen: dict) -> dict:
    torch.manual_seed(0)
    lit, losses, callback = Module(Classifier()), Losses(), HDICallback(every_n_steps=2, verbose=False, **chosen)
    with ExitStack() as stack:
        ranks = {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": "2"}
        stack.enter_context(mock.patch.dict(os.environ, ranks))
        if place is not None and rank == on:
            stack.enter_context(raising(*PLACES_OF_STARTING[place], calls={0}))
        callbacks = [losses] if place is None else [losses, callback]
        options = {"devices": 2, "strategy": DDPStrategy(), "use_distributed_sampler": False}
        begun = time.monotonic()
        trainer_for(folder, *callbacks, **options).fit(lit, DataLoader(Batches(SIZES[rank]), batch_size=None))
    history = callback.history_path
    left = [*losses.recorded, *lit.parameters()]
    return {
        "left": [value.tolist() for value in left], "seconds": time.monotonic() - begun,
        "steps": None if history is None else [record.step for record in read_records(history)],
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("acts", [False, True])
@pytest.mark.parametrize("on", [0, 1])
@pytest.mark.parametrize("place", PLACES_OF_STARTING)
def test_a_rank_whose_callback_cannot_start_keeps_no_other_waiting(tmp_path, two_ranks, place, on, acts):
    chosen = {"interventions": [ScaleLearningRate(0.5)], "alerts": [Always()]} if acts else {}
    alone = two_ranks(fit_where_one_rank_cannot_start, tmp_path / "alone", None, on, {})
    both = two_ranks(fit_where_one_rank_cannot_start, tmp_path / "watched", place, on, chosen)
    for rank, without in zip(both, alone, strict=True):
        assert rank.answer["left"] == without.answer["left"]
        assert rank.answer["seconds"] < 40
    assert any("could not begin to watch" in line for line in both[1 - on].warnings)
    assert sum("a bug" in line for line in both[on].warnings) == 1
    assert both[0].answer["steps"] == (None if on == 0 else [0, 2, 4, 6, 8, 9])


PLACES_OF_SHARDS = {
    "finding the parts": (Sharding, "gathering"),
    "looking for parts": (Sharding, "is_sharded"),
    "reading a weight": (WeightReader, "weight"),
    "reading the weights of a source": (WeightReader, "measure"),
    "reading the head outputs of a layer": (HeadOutputs, "_own"),
    "weighing a scatter": (HeadOutputs, "_mix"),
    "measuring the keys of a layer": (LayerInputs, "_measure_one"),
    "adding up the tokens of a layer": (LayerInputs, "_add_up"),
}


def train_sharded(rank: int, place: str | None, call: int, tensor_parallel: bool) -> dict:
    model, sums, tags, begun = classifier(), [], [], time.monotonic()
    model = split_by_heads(model) if tensor_parallel else fsdp2(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    metrics = [*(name for name in METRICS if "importance" not in name), *ROWS, "hdi_keys"]
    with ExitStack() as stack:
        if place is not None:
            monitor = stack.enter_context(monitor_of(model, metrics=metrics))
            if rank == 1:
                stack.enter_context(raising(*PLACES_OF_SHARDS[place], calls={call}))
        for step in range(3):
            if place is not None:
                monitor.arm()
            model(batch()[slice(0, 5) if tensor_parallel else SHARES[rank]]).square().mean().backward()
            if place is not None:
                tags.append(monitor.measure(step).record().scalars(metrics))
            optimizer.step()
            optimizer.zero_grad()
            own = torch.full((3,), 1.0 + rank)
            dist.all_reduce(own)
            sums.append(own.tolist())
    weights = [whole(value).detach().tolist() for value in model.parameters()]
    return {"weights": weights, "sums": sums, "tags": tags, "seconds": time.monotonic() - begun}


def split_by_heads(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")} | {"out_proj": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block.attn, init_device_mesh("cpu", (2,)), plan)
        block.attn.num_heads //= 2
        block.attn.head_dim = WIDTHS
    return model


@pytest.mark.slow
@pytest.mark.parametrize(("call", "tensor_parallel"), [(2, False), (11, False), (2, True)])
@pytest.mark.parametrize("place", PLACES_OF_SHARDS)
def test_a_rank_that_fails_while_gathering_shards_still_joins_every_collective(two_ranks, place, call, tensor_parallel):
    ranks = [rank.answer for rank in two_ranks(train_sharded, place, call, tensor_parallel)]
    for rank in ranks:
        assert rank["sums"] == [[3.0] * 3] * 3, "the training's own calls meet their like"
        assert rank["seconds"] < 40
        assert len(rank["tags"][-1]) > 1
    assert ranks[0]["weights"] == two_ranks(train_sharded, None, 0, tensor_parallel)[0].answer["weights"]
