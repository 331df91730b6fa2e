"""Which heads a rule names as one, from matrices and from what a history keeps of them, and when alerts are over."""

from __future__ import annotations

import math

import pytest
import torch

from hdi_callback.monitoring.alerts import Row
from hdi_callback.monitoring.readings import LayerRecord, Record
from hdi_callback.monitoring.rules import AttendAlike, DeadHeads, FallingRank
from hdi_callback.monitoring.rules.groups import aligned_groups, groups_of, similar_groups
from tests.monitoring.test_rules import judge

WIDTH = 10
LENSES = {"subspace": ("rank", "overlap", ""), "energy": ("effective_rank", "energy_overlap", "energy_")}


def overlaps(pairs: dict[tuple[int, int], float], heads: int = 5) -> torch.Tensor:
    matrix = torch.eye(heads)
    for (h, g), value in pairs.items():
        matrix[h, g] = matrix[g, h] = value
    return matrix


def rows_of(lens: str, sizes: list[float], pairs: dict[tuple[int, int], float]) -> list[Row]:
    """The same heads twice: with the whole matrix, and with the nearest head of each alone."""
    weight, name, prefix = LENSES[lens]
    matrix = overlaps(pairs, len(sizes))
    apart = matrix - 2 * torch.eye(len(sizes))
    nearest = {f"{prefix}nearest": apart.argmax(-1).tolist(), f"{prefix}nearest_overlap": apart.amax(-1).tolist()}
    return [Row(10, {}, {weight: sizes}, matrices={name: matrix}), Row(10, {}, {weight: sizes, **nearest})]


@pytest.mark.parametrize("lens", LENSES)
def test_heads_are_grouped_from_the_limit_above_chance_on(lens):
    chance = 2 / WIDTH  # of two heads of rank 2
    at, below = chance + 0.5 * (1 - chance), chance + 0.499 * (1 - chance)
    for row in rows_of(lens, [2, 2, 2, 2, 2], {(0, 3): at + 1e-6, (1, 2): below}):
        assert aligned_groups(row, {"width": WIDTH}, lens, 0.5) == ((0, 3),)


@pytest.mark.parametrize("lens", LENSES)
def test_dead_heads_and_heads_that_span_the_whole_space_are_not_grouped(lens):
    for row in rows_of(lens, [1, 1, 10, 10, 0], {(0, 1): 1.0, (2, 3): 1.0}):
        assert aligned_groups(row, {"width": WIDTH}, lens, 0.9) == ((0, 1),)
    row = Row(10, {}, {LENSES[lens][0]: [0, 2, 2]}, matrices={LENSES[lens][1]: torch.ones(3, 3)})
    assert aligned_groups(row, {"width": WIDTH}, lens, 0.9) == ((1, 2),)


@pytest.mark.parametrize("lens", LENSES)
def test_without_a_matrix_the_closest_pair_is_the_only_group(lens):
    prefix = LENSES[lens][2]
    worst, pair = f"hdi_{prefix}worst_alignment", f"{prefix}worst_alignment_pair"
    row = Row(10, {worst: 0.91}, {pair: [2, 0]})
    assert {tuple(sorted(one)) for one in aligned_groups(row, {"width": WIDTH}, lens, 0.91)} == {(0, 2)}
    assert aligned_groups(row, {"width": WIDTH}, lens, 0.92) == ()
    assert aligned_groups(Row(10, {worst: 0.91}, {pair: [-1, -1]}), {"width": WIDTH}, lens, 0.5) == ()
    assert aligned_groups(Row(10, {worst: 0.91}), {"width": WIDTH}, lens, 0.5) == ()
    assert aligned_groups(Row(10, {}, {pair: [0, 2]}), {"width": WIDTH}, lens, 0.0) == ()


@pytest.mark.parametrize("lens", LENSES)
def test_a_head_joins_its_nearest_head_even_if_that_head_has_a_nearer_one(lens):
    for row in rows_of(lens, [2, 2, 2, 2], {(0, 1): 1.0, (0, 2): 0.95}):
        assert aligned_groups(row, {"width": WIDTH}, lens, 0.9) == ((0, 1, 2),)


def test_chained_pairs_form_one_group_in_any_order():
    assert groups_of([(0, 1), (2, 3), (1, 2)]) == ((0, 1, 2, 3),)
    assert groups_of([(5, 4), (1, 0), (0, 3)]) == ((0, 1, 3), (4, 5))
    assert groups_of([]) == ()


def test_similar_heads_are_grouped_at_the_limit_by_matrix_or_by_worst_pair():
    row = Row(10, {}, {}, matrices={"circuit_qk": overlaps({(0, 4): 0.95, (1, 2): 0.949})})
    assert similar_groups(row, "circuit_qk", float(torch.tensor(0.95))) == ((0, 4),)
    alone = Row(10, {"circuit_qk_worst": 0.93}, {"circuit_qk_worst_pair": [3, 1]})
    assert similar_groups(alone, "circuit_qk", 0.93) == ((1, 3),)
    assert similar_groups(alone, "circuit_qk", 0.94) == ()


def record(step: int, **arrays: list[float]) -> Record:
    values = {"hdi_dead_heads": 0.0, "hdi_min_flatness": 0.0, "hdi_min_rank": 0.0, "hdi_head_norm": float(step)}
    return Record(step, {"attn": LayerRecord(values, arrays)}, {})


def steps_of(alerts) -> list[tuple[int, bool]]:
    return [(one.step, one.is_resolved) for one in alerts]


def test_falling_rank_is_reported_at_a_tenth_and_resolved_at_twice_that():
    def reading(step: int, flatness: float) -> Record:
        return record(step, flatness=[0.4, flatness], rank=[8.0, 8.0], effective_rank=[6.0, 6.0])

    reported = judge(
        FallingRank(), [reading(place, one) for place, one in enumerate([0.4, 0.041, 0.039, 0.079, 0.081])]
    )
    assert steps_of(reported) == [(2, False), (4, True)]  # a tenth of what it was at first
    small = [reading(place, one) for place, one in enumerate([1.0, 0.051, 0.049])]
    assert steps_of(judge(FallingRank(), small)) == [(2, False)], "five hundredths, where a tenth would be more"


def test_a_head_is_dead_at_a_hundredth_of_its_first_norm_and_resolved_at_twice_that():
    def reading(step: int, norm: float) -> Record:
        return record(step, head_norm=[1.0, norm, 1.0, 1.0], rank=[8.0] * 4)

    values = [1.0, 0.011, 0.0099, 0.019, 0.021]
    reported = judge(DeadHeads(), [reading(place, one) for place, one in enumerate(values)])
    assert steps_of(reported) == [(2, False), (4, True)]
    assert reported[0].finding.heads == (1,)


def test_normed_keys_are_dead_only_at_zero():
    def reading(step: int, norm: float) -> Record:
        return record(step, head_norm=[1.0, norm, 1.0, 1.0], rank=[8.0] * 4)

    facts = [{"name": "attn", "normed": ["key"]}]
    readings = [reading(place, one) for place, one in enumerate([1.0, 1e-6, 0.0])]
    assert steps_of(judge(DeadHeads(), readings, facts)) == [(2, False)]
    assert steps_of(judge(DeadHeads(), readings)) == [(1, False)]


def test_heads_initialised_at_zero_are_reported_only_after_others_moved():
    def reading(step: int, norm: float) -> Record:
        return record(step, head_norm=[0.0, norm, norm, norm], rank=[0.0, 8.0, 8.0, 8.0])

    reported = judge(DeadHeads(), [reading(step, 1.0 + 0.1 * step) for step in range(8)])
    assert [one.step for one in reported] == [DeadHeads.moved]
    assert reported[0].finding.heads == (0,)
    assert not math.isnan(reported[0].finding.value)


def test_heads_that_attend_alike_are_reported_at_the_third_reading_in_a_row_and_dated_to_the_first():
    def reading(step: int, value: float) -> Record:
        arrays = {"attention_alike_worst_pair": [1, 2]}
        return Record(step, {"attn": LayerRecord({"attention_alike_worst": value}, arrays)}, {})

    values = [0.5, 0.99, 0.5, 0.99, 0.985, 0.99, 0.97, 0.95]
    reported = judge(AttendAlike(), [reading(10 * place, one) for place, one in enumerate(values)])
    assert steps_of(reported) == [(50, False), (70, True)]
    assert reported[0].finding.heads == (1, 2)
    assert reported[0].finding.since == 30
