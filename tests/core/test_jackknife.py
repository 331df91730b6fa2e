"""Standard errors by leaving out sequences that are told by number: against the computation written out in NumPy."""

from __future__ import annotations

import math

import pytest
import torch

from hdi_callback.core import head_covariance, jackknife
from tests.core.tensor_sizes import TensorSizes
from tests.core.test_covariance import explicit_jackknife
from tests.core.test_subspaces import gaussian

LENGTHS = [7, 4, 9, 6]
NUMBERS = torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS))


def test_a_sequence_that_holds_no_token_is_no_replicate():
    outputs, output_weight = gaussian(26, 3, 4, seed=1) + 1, gaussian(3, 4, 10, seed=2)
    covariance, correlation = explicit_jackknife(outputs, output_weight, LENGTHS)
    found = head_covariance(outputs, output_weight, sequences=(2 * NUMBERS, 9))  # of nine, every second one is empty
    assert float(found.covariance_error) == pytest.approx(covariance, rel=1e-10)
    assert float(found.correlation_error) == pytest.approx(correlation, rel=1e-10)


def test_tokens_are_taken_in_chunks_that_add_up_to_all_of_them(monkeypatch):
    outputs, output_weight = gaussian(26, 3, 4, seed=1) + 1, gaussian(3, 4, 50, seed=2)
    covariance, correlation = explicit_jackknife(outputs, output_weight, LENGTHS)
    monkeypatch.setattr(jackknife, "_CHUNK", 5 * 3 * 50)
    with TensorSizes() as sizes:
        found = head_covariance(outputs, output_weight, sequences=(NUMBERS, 4))
    assert sizes.largest <= 5 * 3 * 50
    assert float(found.covariance_error) == pytest.approx(covariance, rel=1e-10)
    assert float(found.correlation_error) == pytest.approx(correlation, rel=1e-10)


@pytest.mark.parametrize("numbers", [torch.zeros(26, dtype=torch.long), torch.tensor([0] * 25 + [1])])
def test_one_sequence_or_one_token_beside_it_gives_no_standard_error(numbers):
    outputs, output_weight = gaussian(26, 3, 4, seed=1) + 1, gaussian(3, 4, 10, seed=2)
    found = head_covariance(outputs, output_weight, sequences=(numbers, 2))
    assert math.isnan(float(found.correlation_error))
    assert math.isnan(float(found.covariance_error))


def test_padding_alone_gives_no_standard_error():
    outputs, output_weight = gaussian(26, 3, 4, seed=1) + 1, gaussian(3, 4, 10, seed=2)
    found = head_covariance(outputs, output_weight, sequences=(NUMBERS, 4), weights=torch.zeros(26))
    assert math.isnan(float(found.correlation_error))
    assert math.isnan(float(found.covariance_error))
