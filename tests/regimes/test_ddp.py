"""Readings over the ranks of a data-parallel run against those of one process that has all the tokens."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hdi_callback import HeadDiversityMonitor
from hdi_callback.core import head_covariance
from hdi_callback.core.diversity import blocks_and_products
from hdi_callback.core.head_sums import HeadSums
from hdi_callback.errors import MisconfigurationError
from hdi_callback.monitoring.metrics import METRICS as CATALOGUE
from hdi_callback.monitoring.metrics import TOKENS
from hdi_callback.monitoring.monitor.inputs import SOURCES as OF_INPUTS
from hdi_callback.monitoring.monitor.weights import WeightSource
from hdi_callback.monitoring.ranks.rendezvous import _numbers as numbers
from tests.core.no_sync import NoSync
from tests.models import LAYERS, LENGTH, WIDTH, Attention, Classifier

METRICS = [
    "hdi", "hdi_worst_pair", "hdi_query", "head_covariance", "head_correlation", "head_output_overlap",
    "circuit_qk", "circuit_ov_worst", "head_contribution_min", "head_importance_min", "hdi_worst_pair_importance_both",
    "weights_not_finite",
]  # fmt: skip
SHARES = (slice(0, 5), slice(5, 7))
"""The sequences of each rank: uneven on purpose."""


def batch() -> torch.Tensor:
    return torch.randint(16, (7, LENGTH), generator=torch.Generator().manual_seed(3))


def classifier() -> Classifier:
    torch.manual_seed(0)
    return Classifier(blocks=3)


def monitor_of(model: nn.Module, **options) -> HeadDiversityMonitor:
    return HeadDiversityMonitor(model, **({"metrics": METRICS, "max_tokens": 10_000} | options))


def reading_alone() -> dict[str, float]:
    """What one process reads that sees the joined batch."""
    model = classifier()
    with monitor_of(model) as monitor:
        monitor.arm()
        model(batch()).sum().backward()
        return monitor.measure(0).record().scalars(METRICS)


def by_layer(tags: dict[str, float]) -> dict[str, float]:
    """Leave out what is over all layers."""
    return {tag: value for tag, value in tags.items() if tag.rpartition("/")[2] not in ("mean", "min", "max")}


# --- what the ranks do


def read_under_ddp(rank: int, lone_forward: bool) -> dict:
    model = DistributedDataParallel(classifier())
    collectives, shares, blanks = [], [], []
    with (
        monitor_of(model) as monitor,
        mock.patch.object(WeightSource, "measure", side_effect=WeightSource.measure, autospec=True) as measure,
        mock.patch.object(dist, "all_reduce", side_effect=_counted(dist.all_reduce, collectives)),
        mock.patch(
            "hdi_callback.monitoring.monitor.sources.blocks_and_products",
            side_effect=_counted(blocks_and_products, shares),
        ),
    ):
        records = []
        for step in range(2):
            monitor.arm()
            if not lone_forward or rank == 0:
                (model.module if lone_forward else model)(batch()[SHARES[rank]]).sum().backward()
            records.append(monitor.measure(step).record())
            on_meta = [call for call in measure.call_args_list if next(iter(call.args[2].values())).is_meta]
            blanks.append(len(on_meta))
            measure.reset_mock()
    return {
        "shapes computed": [count // max(1, blanks[0]) for count in blanks],
        "tags": [record.scalars(METRICS) for record in records],
        "absent": records[-1].absent,
        "pairs": [layer.arrays["worst_pair"] for layer in records[-1].layers.values()],
        "collectives": len(collectives),
        "layers measured": [shape[0] for shape in shares if shape.numel()],
    }


def read_in_rounds(rank: int, round_bytes: int) -> dict:
    model, mixed, collectives = DistributedDataParallel(classifier()), [], []
    real = HeadSums.mixed

    def counted(self: HeadSums, *args) -> HeadSums:
        mixed.append(1)
        return real(self, *args)

    with (
        mock.patch("hdi_callback.monitoring.monitor.outputs._ROUND", round_bytes),
        mock.patch.object(HeadSums, "mixed", counted),
        mock.patch.object(dist, "all_reduce", side_effect=_counted(dist.all_reduce, collectives)),
        monitor_of(model) as monitor,
    ):
        monitor.arm()
        model(batch()[SHARES[rank]]).sum().backward()
        tags = monitor.measure(0).record().scalars(METRICS)
    return {"tags": tags, "mixed": len(mixed), "sizes": [shape.numel() for shape in collectives]}


DECIDE = [
    *(f"core.{name}" for name in ("circuits", "diversity", "kernels", "whitening")),
    *(f"monitoring.monitor.{name}" for name in ("contributions", "inputs", "movement", "sources")),
]


def read_without_waiting(rank: int) -> dict:
    model, metrics = DistributedDataParallel(classifier()), [*METRICS, "token_cosine", "head_movement_min"]
    with ExitStack() as stack:
        for place in DECIDE:  # as on an accelerator
            stack.enter_context(mock.patch(f"hdi_callback.{place}.may_decide_on_host", return_value=False))
        monitor = stack.enter_context(monitor_of(model, metrics=metrics))
        for step in (0, 1):
            monitor.arm()
            model(batch()[SHARES[rank]]).sum().backward()
            # At the first reading the ranks compare some of their weights, for which the host waits.
            with NoSync() if step else nullcontext():
                reading = monitor.measure(step)
        return {"tags": len(reading.record().scalars(metrics)), "absent": reading.absent}


def _counted(function, calls):
    def call(tensor, *args, **kwargs):
        if tensor.device.type != "meta":  # shapes are read off a meta tensor
            calls.append(tensor.shape)
        return function(tensor, *args, **kwargs)

    return call


def read_with_a_layer_that_one_rank_lacks(rank: int) -> dict:
    model = classifier()
    with monitor_of(model) as monitor:
        monitor.arm()
        if rank == 1:
            model.blocks[1].attn.k_proj = nn.Identity()  # and no forward
        else:
            model(batch()).sum().backward()
        return monitor.measure(0).record().scalars(METRICS)


def read_where_one_rank_has_no_monitor(rank: int) -> dict | None:
    if rank == 1:
        next(numbers)  # so that the next monitors of both ranks meet again
        return None
    with (
        mock.patch("hdi_callback.monitoring.ranks.rendezvous._FIRST_TIMEOUT", timedelta(seconds=1)),
        monitor_of(classifier()) as one,
    ):
        return [one.measure(step).record().scalars(["hdi"]) for step in range(2)][-1]


def read_armed_on_one_rank(rank: int) -> list[dict]:
    """The second rank never arms, though metrics of forwards and claims to judge are asked for."""
    model = classifier()
    published = []
    with monitor_of(model, metrics=[*METRICS, *ROWS]) as monitor:
        for step in range(2):
            if rank == 0:
                monitor.arm()
            model(batch()).sum().backward()
            record = monitor.measure(step).record()
            published.append({"tags": record.scalars([*METRICS, *ROWS]), "absent": record.absent})
    return published


def miss_a_reading(rank: int) -> list[dict]:
    """The second rank takes one reading less, and the training goes on."""
    published = []
    with (
        mock.patch("hdi_callback.monitoring.ranks.rendezvous._TIMEOUT", timedelta(seconds=1)),
        monitor_of(classifier(), metrics=["hdi"]) as one,
    ):
        for step in range(3):
            if rank == 0 or step != 1:
                published.append(one.measure(step).record().scalars(["hdi"]))
            dist.all_reduce(torch.ones(3))  # the training's own call must meet its like
    return published


def keys_in_the_store(rank: int) -> list[int]:
    """How many entries readings leave behind."""
    store, counts, model = dist.distributed_c10d._get_default_store(), [], classifier()
    with monitor_of(model, metrics=[*METRICS, *ROWS, "token_cosine"]) as one:
        for step in range(8):
            one.arm()
            model(batch()).sum().backward()
            one.measure(step)
            with one.rendezvous.acting():
                one.rendezvous.share(step)
                one.rendezvous.failed_apart([], 2)
            dist.barrier()
            counts.append(store.num_keys())
            dist.barrier()
    return counts


UPDATES = [name for name in CATALOGUE if name.startswith("update_")]


def read_updates(rank: int) -> dict[str, float]:
    model = classifier()
    with monitor_of(model, metrics=UPDATES) as monitor:
        monitor.measure(0)
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.01 * torch.randn(parameter.shape, generator=generator)
        return monitor.measure(1).record().scalars(UPDATES)


def read_different_models(rank: int) -> dict:
    torch.manual_seed(rank)
    with monitor_of(Classifier(blocks=1 + rank)) as monitor:
        return monitor.measure(0).record().scalars(["hdi"])


def read_what_the_forward_of_one_rank_shows(rank: int, on_both: bool) -> list[list[str]]:
    from tests.attention.test_search import D, Model

    torch.manual_seed(0)
    model = Model()
    with monitor_of(model, metrics=["hdi"]) as monitor:
        monitor.measure(0)  # the ranks have met before the forward
        published = []
        for step in (1, 2):
            monitor.arm()
            if on_both or rank == 0:
                model({"x": torch.randn(2, 5, D)})
            published.append(sorted(monitor.measure(step).record().scalars(["hdi"])))
    return published


def read_alone_on_request(rank: int) -> int:
    collectives = []
    with (
        mock.patch.object(dist, "all_reduce", side_effect=_counted(dist.all_reduce, collectives)),
        monitor_of(classifier(), process_group=None) as monitor,
    ):
        monitor.measure(0)
    return len(collectives)


def read_over_a_collective_that_fails(rank: int) -> dict:
    with (
        mock.patch.object(dist, "all_reduce", side_effect=RuntimeError("no such backend")),
        monitor_of(classifier()) as monitor,
    ):
        return [monitor.measure(step).record().scalars(["hdi"]) for step in range(2)][-1]


ROWS = [name for name, metric in CATALOGUE.items() if metric.source in ("attention rows", *OF_INPUTS)]
FEW = (slice(0, 2), slice(2, 3))
"""Few enough sequences that all queries are read, on one rank as on two."""


def read_rows(rank: int, lone_forward: bool) -> dict:
    model = DistributedDataParallel(classifier())
    with monitor_of(model, metrics=ROWS) as monitor:
        monitor.arm()
        if not lone_forward or rank == 0:
            (model.module if lone_forward else model)(batch()[FEW[rank]]).sum().backward()
        record = monitor.measure(0).record()
    return {"tags": record.scalars(ROWS), "heads": record.layers[LAYERS[0]].arrays, "absent": record.absent}


class Masked(nn.Module):
    """One attention with a mask of valid tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.attn = nn.Embedding(16, 32), Attention()

    def forward(self, ids, attention_mask):
        x = self.embed(ids)
        q, k, v = (
            project(x).unflatten(-1, (4, 8)).transpose(1, 2)
            for project in (self.attn.q_proj, self.attn.k_proj, self.attn.v_proj)
        )
        out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask.bool()[:, None, None])
        return self.attn.out_proj(out.transpose(1, 2).flatten(2))


def padded_batch(rank: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences of one rank, padded to its own longest; of both for `None`."""
    lengths = {0: [9, 4, 12, 7, 2], 1: [5, 3], None: [9, 4, 12, 7, 2, 5, 3]}[rank]
    ids = torch.randint(1, 16, (7, 12), generator=torch.Generator().manual_seed(5))
    ids = ids[SHARES[rank]] if rank is not None else ids
    there = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return ids[:, : max(lengths)] * there, there.long()


def read_padded(rank: int | None) -> dict[str, float]:
    model = Masked()
    # The attention's own forward is not what runs, and what it computes is another matter.
    with monitor_of(model, check_heads=False) as monitor:
        monitor.arm()
        model(*padded_batch(rank)).sum().backward()
        record = monitor.measure(0).record()
    (values,) = (layer.values for layer in record.layers.values())
    return {name: values[name] for name in ("hdi", "head_covariance", "head_correlation", "head_output_overlap")}


def read_tokens(rank: int | None) -> dict[str, float]:
    torch.manual_seed(0)
    model = nn.Sequential(Attention(), Attention())
    x = torch.randn(7, LENGTH, WIDTH, generator=torch.Generator().manual_seed(6)) * 1e3
    with monitor_of(model, metrics=TOKEN_METRICS) as monitor:
        monitor.arm()
        share = x if rank is None else x[SHARES[rank]]
        (model[0](share).sum() + model[1](x[0, 0] + 1e-3 * share).sum()).backward()
        return monitor.measure(0).record().scalars(TOKEN_METRICS)


TOKEN_METRICS = [name for name, metric in CATALOGUE.items() if metric.source == TOKENS]


# --- what must come of it


@pytest.mark.parametrize("lone_forward", [False, True])
def test_attention_and_inputs_over_ranks_are_those_of_the_joined_batch(two_ranks, lone_forward):
    model = classifier()
    with monitor_of(model, metrics=ROWS) as monitor:
        monitor.arm()
        model(batch()[: 2 if lone_forward else 3])
        alone = monitor.measure(0).record()
    assert len(by_layer(alone.scalars(ROWS))) == 3 * len(ROWS)
    for rank in two_ranks(read_rows, lone_forward):
        assert rank.answer["tags"] == pytest.approx(alone.scalars(ROWS), rel=1e-5, abs=1e-6)
        assert rank.answer["absent"] == {}
        for name, values in alone.layers[LAYERS[0]].arrays.items():
            assert rank.answer["heads"][name] == pytest.approx(values, rel=1e-5, abs=1e-6), name


def test_tokens_over_ranks_are_those_of_the_joined_batch_by_half_a_scatter(two_ranks):
    alone = read_tokens(None)
    assert len(by_layer(alone)) == 2 * len(TOKEN_METRICS)
    # The second layer is given tokens that are one up to a thousandth.
    assert 1 <= alone["token_rank/1"] < WIDTH
    for rank in two_ranks(read_tokens):
        assert rank.warnings == []
        assert rank.answer == pytest.approx(alone, rel=1e-5)


def test_padded_batches_of_different_lengths_add_up_to_the_joined_batch(two_ranks):
    alone = read_padded(None)
    model, (ids, mask) = Masked(), padded_batch(None)
    got = []
    model.attn.out_proj.register_forward_pre_hook(lambda _, args: got.append(args[0].detach().double()))
    model(ids, mask)
    weight = model.attn.out_proj.weight.detach().double().T.unflatten(0, (4, 8))
    truth = head_covariance(got[0][mask.bool()].unflatten(-1, (4, 8)), weight)
    assert alone["head_correlation"] == pytest.approx(float(truth.correlation), rel=1e-4)
    for rank in two_ranks(read_padded):
        assert rank.warnings == []
        assert rank.answer == pytest.approx(alone, rel=1e-5, abs=1e-7)


def test_a_reading_over_ranks_is_that_of_the_joined_batch(two_ranks):
    alone, reported = reading_alone(), two_ranks(read_under_ddp, False)
    for rank in reported:
        assert rank.warnings == []
        for tags in rank.answer["tags"]:
            assert tags == pytest.approx(alone, abs=1e-6)
            assert set(tags) == set(alone)
    assert reported[0].answer == reported[1].answer | {"layers measured": reported[0].answer["layers measured"]}


def test_updates_over_ranks_are_those_of_one_process(two_ranks):
    alone = read_updates(0)
    assert len(by_layer(alone)) == 3 * len(UPDATES)
    for rank in two_ranks(read_updates):
        assert rank.warnings == []
        assert rank.answer == pytest.approx(alone, abs=1e-6)


def test_each_layer_is_measured_once_and_three_sums_make_a_reading(two_ranks):
    reported = two_ranks(read_under_ddp, False)
    # Three layers, two roles, two readings: the first rank has layers 0 and 2, the second has layer 1.
    assert [rank.answer["layers measured"] for rank in reported] == [[2] * 4, [1] * 4]
    # The ranks agree on the layers in the store, not by a collective call.
    assert [rank.answer["collectives"] for rank in reported] == [6, 6]


def test_shapes_of_the_reduced_sums_are_computed_once(two_ranks):
    """Computing them takes as long as a small reading, so that each rank would pay for sharing."""
    for rank in two_ranks(read_under_ddp, False):
        assert rank.answer["shapes computed"] == [1, 0]


SCATTER = HeadSums.scatter_size(4, WIDTH // 4)


@pytest.mark.parametrize(
    ("round_bytes", "rounds"),
    [(1, [SCATTER] * 3), (8 * SCATTER, [2 * SCATTER, SCATTER]), (2**22, [3 * SCATTER])],
)
def test_scatters_reduced_in_rounds_agree_with_the_joined_batch(two_ranks, round_bytes, rounds):
    alone, reported = reading_alone(), two_ranks(read_in_rounds, round_bytes)
    for rank in reported:
        assert rank.warnings == []
        assert rank.answer["tags"] == pytest.approx(alone, abs=1e-6)
        assert set(rank.answer["tags"]) == set(alone)
        assert rank.answer["sizes"][1:-1] == rounds  # between the mean tokens and the sums
    # Three layers: the first rank has layers 0 and 2, the second has layer 1.
    assert [rank.answer["mixed"] for rank in reported] == [2, 1]


def test_over_ranks_no_value_is_read_from_the_device(two_ranks):
    for rank in two_ranks(read_without_waiting):
        assert rank.warnings == []
        assert rank.answer["absent"] == {}
        assert rank.answer["tags"] > 3 * len(METRICS)


def test_a_rank_without_a_forward_contributes_nothing_and_no_rank_waits(two_ranks):
    model = classifier()
    with monitor_of(model) as monitor:
        monitor.arm()
        model(batch()[SHARES[0]]).sum().backward()
        alone = monitor.measure(0).record().scalars(METRICS)
    reported = two_ranks(read_under_ddp, True)
    for rank in reported:
        assert rank.answer["tags"][-1] == pytest.approx(alone, abs=1e-6)


def test_a_layer_that_fails_on_one_rank_does_not_block_the_other(two_ranks):
    reported = two_ranks(read_with_a_layer_that_one_rank_lacks)
    first, second = (rank.answer for rank in reported)
    # The second rank had to measure layer 1 and could not, so that nobody has it; all the rest is there.
    of_keys = ("hdi", "hdi_worst_pair", "hdi_worst_pair_importance_both", "circuit_qk", "weights_not_finite")
    lost = {f"{metric}/blocks.1.attn" for metric in of_keys}
    whole = reading_alone()
    assert set(whole) - set(first) == lost
    for tag, value in by_layer(second).items():
        assert value == pytest.approx(whole[tag], abs=1e-6)
    # Over the layers that are left.
    largest = max(value for tag, value in second.items() if tag.startswith("circuit_qk/blocks."))
    assert second["circuit_qk/max"] == largest
    assert "hdi/blocks.2.attn" in second


def test_a_rank_reads_alone_with_a_warning_if_the_others_have_no_monitor(two_ranks):
    first, second = two_ranks(read_where_one_rank_has_no_monitor)
    assert [f"hdi/blocks.{place}.attn" in first.answer for place in range(3)] == [True] * 3
    assert len(first.warnings) == 1
    assert "every rank the same monitor" in first.warnings[0]
    assert second.warnings == []


def test_a_rank_that_never_arms_takes_part_and_no_rank_waits(two_ranks):
    model = classifier()
    with monitor_of(model, metrics=[*METRICS, *ROWS]) as monitor:
        monitor.arm()
        model(batch()).sum().backward()
        alone = monitor.measure(0).record().scalars([*METRICS, *ROWS])
    for rank in two_ranks(read_armed_on_one_rank):
        assert rank.warnings == []
        assert len(rank.answer) == 2
        for reading in rank.answer:
            assert reading["absent"] == {}
            assert reading["tags"] == pytest.approx(alone, rel=1e-5, abs=1e-6)


def test_a_rank_that_misses_a_reading_costs_one_warning_and_not_the_run(two_ranks):
    first, second = two_ranks(miss_a_reading)
    assert [len(reported.answer) for reported in (first, second)] == [3, 2]
    assert all(f"hdi/{name}" in tags for reported in (first, second) for tags in reported.answer for name in LAYERS)
    for reported in (first, second):
        (warning,) = reported.warnings
        assert "taken no reading within" in warning


def test_readings_do_not_fill_the_store(two_ranks):
    counts = two_ranks(keys_in_the_store)[0].answer
    assert len(set(counts[2:])) == 1


def test_ranks_with_different_models_warn_and_read_alone(two_ranks):
    for rank, reported in enumerate(two_ranks(read_different_models)):
        assert len(reported.answer) == 1 + rank + 2
        assert ["do not watch the same layers" in line for line in reported.warnings] == [True]


@pytest.mark.some_slow(quick=1)
@pytest.mark.parametrize("on_both", [True, False])
def test_layers_found_in_the_forward_of_one_rank_block_no_rank(two_ranks, on_both):
    first, second = two_ranks(read_what_the_forward_of_one_rank_shows, on_both)
    over_layers = ["hdi/mean", "hdi/min"]
    named = sorted(["hdi/second", *over_layers])
    all_layers = sorted(["hdi/first", "hdi/third", *named])
    assert first.answer == [all_layers] * 2
    assert second.answer == [all_layers if on_both else named] * 2
    for rank in (first, second):
        alone = [line for line in rank.warnings if "have shown different attention layers" in line]
        assert len(alone) == (0 if on_both else 1)


def test_a_collective_that_fails_costs_one_warning(two_ranks):
    for reported in two_ranks(read_over_a_collective_that_fails):
        assert {f"hdi/{name}" for name in LAYERS} < set(reported.answer)
        assert ["over several ranks failed" in line for line in reported.warnings] == [True]


def test_process_group_none_lets_each_rank_measure_alone(two_ranks):
    assert [reported.answer for reported in two_ranks(read_alone_on_request)] == [0, 0]
    with pytest.raises(MisconfigurationError, match='write "auto"'):
        HeadDiversityMonitor(classifier(), process_group="gloo")


@pytest.mark.parametrize("cuts", [(30, 10, 2), (42, 0, 0), (41, 1, 0)])
def test_sums_over_disjoint_tokens_make_the_covariance_of_all(cuts):
    generator = torch.Generator().manual_seed(1)
    # A common mean far above the spread: sums of products about the origin would lose the covariance in float32.
    outputs = torch.randn(42, 3, 4, generator=generator) @ torch.randn(4, 4, generator=generator) + 1000
    weight = torch.randn(3, 4, 12, generator=generator)
    truth = head_covariance(outputs.double(), weight.double())
    mean = outputs.double().mean(0)
    parts = [HeadSums.of(part, weight, mean, with_scatter=True) for part in outputs.split(list(cuts))]
    joined = (parts[2] + parts[0] + parts[1]).covariance()
    for name in ("covariance", "correlation", "variance_factor", "trace", "output_overlap", "tokens"):
        assert torch.allclose(getattr(joined, name).double(), getattr(truth, name), rtol=1e-4), name
