"""Bounded samples of tokens: which are kept, and how many each stands for; and lengths that a module keeps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hdi_callback.attention.capture.sampling import TokenSample, largest_prime, sample_tokens
from hdi_callback.attention.trace.kept_lengths import kept_lengths

B, T = 3, 50
NUMBERS = torch.arange(B * T, dtype=torch.float32)


def outputs() -> torch.Tensor:
    """Features that tell which token they are of."""
    return NUMBERS.view(B, T, 1).repeat(1, 1, 2)


def taken(sample: TokenSample) -> list[int]:
    return sample.rows[:, 0].long().tolist()


def test_few_tokens_are_all_sampled_with_weight_one():
    sample = sample_tokens(outputs(), 1000, first_sequence=7)
    assert taken(sample) == list(range(B * T))
    assert sample.sequences.tolist() == [7] * T + [8] * T + [9] * T
    assert torch.equal(sample.weight(), torch.ones(B * T))


def test_a_prime_number_of_many_tokens_is_sampled_with_weights_that_sum_to_all():
    sample = sample_tokens(outputs(), 40)
    assert taken(sample) == [place * B * T // 37 for place in range(37)]
    assert sample.sequences.tolist() == [one // T for one in taken(sample)]
    assert torch.allclose(sample.weight(), torch.full((37,), B * T / 37))


def test_padding_has_weight_zero_if_all_tokens_are_sampled():
    padded = NUMBERS % 5 == 0
    sample = sample_tokens(outputs(), 1000, padded=padded)
    assert torch.equal(sample.weight(), (~padded).float())


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_padding_is_skipped_and_the_weights_of_the_sample_sum_to_all_other_tokens(share):
    padded = torch.rand(B * T, generator=torch.Generator().manual_seed(0)) < share
    sample = sample_tokens(outputs(), 40, padded=padded)
    weight, there = sample.weight(), ~padded[taken(sample)]
    assert len(weight) == 37
    assert bool(there[weight > 0].all())
    assert float(weight.sum()) == pytest.approx(float((~padded).sum()))
    kept = [one for one, by in zip(taken(sample), weight.tolist()) if by > 0]
    assert len(kept) == len(set(kept)) == min(37, int((~padded).sum()))
    assert kept == sorted(kept)


def test_weights_are_nan_if_the_padding_is_unknown():
    assert bool(sample_tokens(outputs(), 40, padded=torch.full((B * T,), torch.nan)).weight().isnan().all())


def test_thinning_a_sample_keeps_the_sum_of_its_weights():
    for padded in (None, NUMBERS % 5 == 0):
        sample = sample_tokens(outputs(), 1000, padded=padded)
        thin = sample.thinned(30)
        assert taken(thin) == list(range(0, B * T, 5))
        expected = 5.0 * torch.ones(30) if padded is None else 5.0 * (~padded[::5]).float()
        assert torch.allclose(thin.weight(), expected)
        assert thin.num_tokens == B * T
        assert sample.thinned(B * T) is sample


def test_the_largest_prime_below_a_number_agrees_with_a_table():
    assert [largest_prime(one) for one in (2, 3, 4, 10, 25, 40, 100, 1024)] == [2, 3, 3, 7, 23, 37, 97, 1021]


@pytest.mark.parametrize(
    ("attributes", "lengths"),
    [
        ({"window_size": (4, 8)}, [32]),
        ({"window_size": 7}, [49]),
        ({"input_resolution": 6}, [36]),
        ({"num_resolutions": 6}, [6]),
        ({"window_size": (16, 17)}, []),  # more than 256
        ({"window_size": (1, 2)}, []),
        ({"window": (2, 2, 2), "size": 7, "scale": (0.5, 2.0)}, []),
    ],
)
def test_sequence_lengths_are_taken_from_window_sizes_and_position_counts_of_a_module(attributes, lengths):
    module = nn.Module()
    for name, value in attributes.items():
        setattr(module, name, value)
    assert list(kept_lengths(module, [])) == lengths


def test_sequence_lengths_are_taken_from_square_tables_of_positions():
    tables = [torch.zeros(4, 9, 9), torch.zeros(9, 8), torch.zeros(2, 2), torch.zeros(257, 257), torch.zeros(5)]
    assert list(kept_lengths(nn.Module(), tables)) == [9]
