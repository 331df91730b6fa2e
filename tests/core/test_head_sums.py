"""Sums of head outputs over few tokens, small weights and small numbers, where rounding and empty sets show."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hdi_callback.core import HeadMoments, head_covariance
from hdi_callback.core.head_sums import HeadSums, count_and_total
from tests.core.test_subspaces import gaussian


def test_empty_moments_merged_with_one_token_are_that_token():
    token = gaussian(1, 3, 4)
    for moments in (HeadMoments.of(token[:0]).merge(HeadMoments.of(token)), HeadMoments.of(token).update(token[:0])):
        assert float(moments.count) == 1
        assert torch.equal(moments.mean, token[0])
        assert not moments.scatter.any()


@pytest.mark.parametrize("size", [1.0, 2.0**-10])
def test_token_weights_are_relative_however_small_their_sum(size):
    outputs, output_weight = gaussian(20, 3, 4, seed=1) + 2, gaussian(3, 4, 10, seed=2)
    weights = size * (torch.arange(20.0) % 3)
    parts = [HeadMoments.of(outputs[part], weights[part]) for part in (slice(0, 7), slice(7, 20))]
    merged = parts[0].merge(parts[1])
    z = np.einsum("thk,hkd->thd", outputs.numpy(), output_weight.numpy()).reshape(20, -1)
    expected = np.cov(z.T, aweights=weights.numpy(), ddof=0).reshape(3, 10, 3, 10).trace(axis1=1, axis2=3)
    mean = np.average(outputs.numpy(), axis=0, weights=weights.numpy())
    for moments in (merged, HeadMoments.of(outputs, weights)):
        np.testing.assert_allclose(moments.mean.numpy(), mean, rtol=1e-5)
        np.testing.assert_allclose(moments.trace(output_weight).numpy(), expected, rtol=1e-5)
    measured = head_covariance(outputs, output_weight, weights=weights)
    np.testing.assert_allclose(measured.trace.numpy(), expected, rtol=1e-5)
    assert int(measured.tokens) == 13


def test_count_and_total_weigh_each_token_and_ignore_padding():
    outputs, times = gaussian(6, 2, 3), torch.tensor([2, 0, 1, 3, 0, 1])
    often = outputs.repeat_interleave(times, 0).numpy()
    outputs[times == 0] = math.nan
    count, total = count_and_total(outputs, times)
    assert float(count) == len(often)
    np.testing.assert_allclose(total.numpy(), often.sum(0), rtol=1e-14)
    count, total = count_and_total(outputs[2:4])
    assert float(count) == 2
    np.testing.assert_allclose(total.numpy(), outputs[2:4].numpy().sum(0), rtol=1e-14)


def test_squares_of_small_outputs_stay_in_range_and_leave_the_scatter_as_it_is():
    outputs = gaussian(30, 3, 4).float()
    small = outputs * 2.0**-40  # a power of two, so that nothing but the exponent changes
    sums = [HeadSums.of(one, None, one.mean(0), with_scatter=True) for one in (outputs, small)]
    scatter = sums[1].scatter.clone()
    expected, found = (one.squares() for one in sums)
    centred = (outputs - outputs.mean(0)).double().numpy()
    blocks = np.einsum("thi,tgj->hgij", centred, centred)
    np.testing.assert_allclose(expected.numpy(), (blocks**2).sum((2, 3)), rtol=1e-5)
    assert torch.equal(found, expected * 2.0**-160)
    assert torch.equal(sums[1].scatter, scatter)
