"""Which features and heads are which, on numbers whose answer is known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hdi_callback.attention.observe.compare.features import find_features, find_rotated, match_heads, tolerance
from hdi_callback.attention.observe.compare.judge import _candidates
from tests.attention.observe.test_features import WIDTH, H, P, turned

ORDER = [2, 0, 1]
TOL = 1e-4


def heads() -> torch.Tensor:
    return torch.randn(P, H, WIDTH, generator=torch.Generator().manual_seed(0))


def matches(observed: torch.Tensor, claimed: torch.Tensor) -> dict[str, list[list[int]]]:
    """For each sense, the claimed heads that fit each observed one."""
    return {
        one.how: [row.nonzero().flatten().tolist() for row in one.fits] for one in match_heads(observed, claimed, TOL)
    }


FOUND, NONE = [[2], [0], [1]], [[], [], []]


def test_heads_unchanged_or_times_a_factor_match_in_every_sense():
    x = heads()
    for factor in (1.0, -0.3):
        assert matches(factor * x[:, ORDER], x) == {
            "as they are": FOUND,
            "rotated": FOUND,
            "normed": FOUND if factor > 0 else NONE,
        }


@pytest.mark.parametrize("apart", [1, WIDTH // 2])
def test_heads_rotated_at_every_token_match_only_by_their_norms(apart):
    torch.manual_seed(0)
    x = heads()
    assert matches(turned(x, apart)[:, ORDER], x) == {"as they are": NONE, "rotated": FOUND, "normed": NONE}


def test_heads_divided_by_their_norms_match_only_by_their_directions():
    x = heads()
    normed = x / x.square().mean(-1, keepdim=True).sqrt()
    assert matches(normed[:, ORDER], x) == {"as they are": NONE, "rotated": NONE, "normed": FOUND}


def test_norms_that_are_equal_at_all_tokens_match_nothing():
    x, y = (torch.nn.functional.normalize(one, dim=-1) for one in (heads(), heads().flip(0)))
    assert matches(x, y) == {"as they are": NONE, "rotated": NONE, "normed": NONE}
    assert matches(x, heads())["rotated"] == matches(heads(), y)["rotated"] == NONE


@pytest.mark.parametrize("apart", [1, WIDTH // 2])
def test_the_scale_of_a_head_does_not_change_the_match(apart):
    torch.manual_seed(0)
    x = heads()
    for factor in (1e-3, 1e3):
        assert matches(factor * turned(x, apart)[:, ORDER], x)["rotated"] == FOUND
        assert matches(factor * turned(x, apart)[:, ORDER], factor * x)["rotated"] == FOUND


def test_a_difference_of_half_a_percent_is_not_taken_for_rounding():
    x, other = heads(), torch.randn(P, H, WIDTH, generator=torch.Generator().manual_seed(3))
    sizes = 1 + 0.005 * other[..., :1]
    assert matches(sizes * x, x) == {"as they are": NONE, "rotated": NONE, "normed": [[0], [1], [2]]}
    assert matches(x + 0.005 * other, x) == {"as they are": NONE, "rotated": NONE, "normed": NONE}
    assert bool((find_features((x + 0.005 * other).flatten(1), x.flatten(1), TOL) == -1).all())
    assert bool((find_rotated(x + 0.005 * other, x.flatten(1), TOL) == -1).all())


def test_directions_match_only_with_more_than_two_features():
    x = heads()[..., :2]
    normed = x / x.norm(dim=-1, keepdim=True)
    assert matches(normed, x)["normed"] == NONE
    three = heads()[..., :3]
    assert matches(three / three.norm(dim=-1, keepdim=True), three)["normed"] == [[0], [1], [2]]


def test_one_token_beyond_the_tolerance_is_enough_to_reject_a_match():
    x = heads()
    for error, fits in ((0.1 * TOL, True), (100 * TOL, False)):
        other = x.double().clone()
        other[3] += error * x.norm() / P**0.5 * torch.nn.functional.normalize(heads()[5].double(), dim=-1)
        assert (matches(other, x)["as they are"] == [[0], [1], [2]]) is fits
        assert (matches(other, x)["normed"] == [[0], [1], [2]]) is fits


def test_norms_are_not_matched_on_three_tokens_and_heads_of_zeros_match_nothing():
    x = heads()
    assert set(matches(x[:3], x[:3])) == {"as they are"}
    assert set(matches(x[:4], x[:4])) == {"as they are", "rotated", "normed"}
    x[:, 1] = 0.0
    assert matches(x, x) == {how: [[0], [], [2]] for how in ("as they are", "rotated", "normed")}


def test_each_feature_is_found_by_its_index_whatever_its_factor():
    x = heads().flatten(1)
    order = torch.randperm(H * WIDTH, generator=torch.Generator().manual_seed(1))
    observed = x[:, order] * torch.linspace(-2, 3, H * WIDTH)
    assert torch.equal(find_features(observed, x, TOL), order)
    observed[:, 4] = torch.randn(P, generator=torch.Generator().manual_seed(2))
    assert find_features(observed, x, TOL).tolist() == [-1 if at == 4 else one for at, one in enumerate(order.tolist())]
    assert find_features(observed[:3], x[:3], TOL).tolist() == [-1] * (H * WIDTH)


def test_features_with_a_large_mean_are_told_apart_and_constants_match_nothing():
    x = heads().flatten(1)
    assert find_features(x + 1000.0, x.flip(1) + 1000.0, TOL).tolist() == list(reversed(range(H * WIDTH)))
    assert find_features(torch.ones(P, 2), torch.ones(P, 2), TOL).tolist() == [-1, -1]


@pytest.mark.parametrize("apart", [1, WIDTH // 2])
def test_rotated_pairs_are_found_by_the_indices_of_both_features(apart):
    torch.manual_seed(0)
    x = heads()
    numbers = torch.arange(H * WIDTH).view(H, WIDTH)
    assert torch.equal(find_rotated(turned(x, apart)[:, ORDER], x.flatten(1), TOL), numbers[ORDER])
    assert bool((find_rotated(heads().flip(0), x.flatten(1), TOL) == -1).all())
    assert bool((find_rotated(turned(x, apart)[:3], x[:3].flatten(1), TOL) == -1).all())
    assert bool((find_rotated(turned(x, apart)[:4], x[:4].flatten(1), TOL) >= 0).all())
    assert bool((find_rotated(x[..., :7], x.flatten(1), TOL) == -1).all()), "features that cannot be paired"


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.float64, 1e-4), (torch.float32, 1e-4), (torch.bfloat16, 2**-5), (torch.float16, 2**-8)],
)
def test_the_tolerance_is_that_of_the_coarsest_type(dtype, expected):
    assert tolerance(torch.zeros(1, dtype=dtype), torch.zeros(1)) == expected
    assert tolerance(torch.zeros(1), torch.zeros(1, dtype=dtype), torch.zeros(1, dtype=torch.long)) == expected


@pytest.mark.parametrize("rows", [-1, 0, 1, 2])
def test_a_partial_product_is_compared_with_the_claimed_rows_only_if_it_computes_all_of_them(rows):
    made = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    call: Any = SimpleNamespace(rows=rows, outputs=made, tokens=5)
    part: Any = SimpleNamespace(index=lambda: torch.tensor([[1, 2], [3, 4]]))
    observed: Any = SimpleNamespace(tokens=5, features=torch.zeros(5, 2, 2))
    found = [claimed for _, claimed, _ in _candidates(call, part, [observed], [])]
    assert len(found) == (rows == 1)
    assert all(torch.equal(one, made.view(5, 2, 2)) for one in found)
