"""What the functions of `core` are given by mistake: a clear error, whatever it is."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from hdi_callback import HeadDiversityMonitor, watch_heads
from hdi_callback.attention import HeadSlice
from hdi_callback.core import (
    allocate_heads,
    bias_variance_covariance,
    diversity_penalty,
    fresh_head,
    head_covariance,
    head_diversity,
    head_diversity_from_covariance,
    head_movement,
    head_overlap,
    head_slopes,
    head_update,
    orthonormal_bases,
    ov_circuits,
    principal_cosines,
    qk_circuits,
    spectral_entropy,
    token_spread,
    weight_update,
)
from hdi_callback.errors import HDIError, MisconfigurationError, ShapeError
from tests.models import Classifier

FUNCTIONS = {
    allocate_heads: 2,
    bias_variance_covariance: 2,
    diversity_penalty: 1,
    lambda weight: fresh_head(weight, 0): 1,
    head_covariance: 2,
    head_diversity: 1,
    head_diversity_from_covariance: 1,
    head_movement: 2,
    head_overlap: 1,
    head_slopes: 2,
    head_update: 2,
    orthonormal_bases: 1,
    ov_circuits: 2,
    principal_cosines: 1,
    qk_circuits: 2,
    spectral_entropy: 1,
    token_spread: 1,
    weight_update: 2,
}
shapes = st.lists(st.integers(0, 3), max_size=4)
kinds = st.sampled_from([torch.float32, torch.float16, torch.int64, torch.bool, torch.complex64])
tensors = st.builds(lambda shape, kind: torch.ones(shape, dtype=kind), shapes, kinds)
odd = st.sampled_from([None, 5, -1, 2.5, math.nan, "x", [[1.0]], {}, object(), nn.Linear(2, 2), True])


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_every_argument_is_computed_or_refused_with_a_package_error(data):
    function = data.draw(st.sampled_from(list(FUNCTIONS)))
    arguments = [data.draw(tensors | odd) for _ in range(FUNCTIONS[function])]
    refused = None
    try:
        function(*arguments)
    except HDIError as error:
        refused = str(error)
    assert refused is None or "got" in refused or "is" in refused


@pytest.mark.parametrize(
    ("wrong", "why"), [([[1.0]], "got a list"), (torch.ones(2, 2, 2).long(), "int64"), (None, "got a NoneType")]
)
def test_no_function_accepts_anything_but_float_tensors(wrong, why):
    for function, count in FUNCTIONS.items():
        if function is allocate_heads:
            continue
        with pytest.raises(ShapeError, match=why):
            function(*[wrong] * count)


@pytest.mark.parametrize(
    ("function", "given_shapes"),
    [
        (head_diversity_from_covariance, [(2, 0, 2, 0)]),
        (bias_variance_covariance, [(0, 2, 3), (3,)]),
        (bias_variance_covariance, [(2, 0), ()]),
        (head_covariance, [(0, 0, 0), (0, 0, 0)]),
        (head_covariance, [(5, 2, 3), (2, 3, 0)]),
        (spectral_entropy, [(3, 3)]),
    ],
)
def test_empty_tensors_and_those_without_heads_are_refused(function, given_shapes):
    with pytest.raises(ShapeError, match="got"):
        function(*map(torch.ones, given_shapes))


def test_a_fresh_head_wider_than_its_input_spans_the_input():
    weight = torch.randn(3, 5, 2, generator=torch.Generator().manual_seed(0))
    fresh = fresh_head(weight, 1)
    assert fresh.shape == (5, 2)
    assert torch.linalg.matrix_rank(fresh) == 2
    assert float(fresh.norm()) == pytest.approx(float(weight[[0, 2]].norm(dim=(-2, -1)).mean()), rel=1e-5)


numbers = st.integers(-3, 2000) | st.floats() | st.sampled_from([None, "x", [], True, math.inf, 64, 768])


@settings(max_examples=200, deadline=None)
@example((1, 2.9e-272), {"bias_scale": 2.9e-272})  # the argument of Lambert's W is below the smallest double
@given(st.tuples(numbers, numbers), st.fixed_dictionaries({}, optional=dict.fromkeys(
    ["bias_scale", "bias_decay", "variance_growth", "noise", "multiple_of"], numbers
)))  # fmt: skip
def test_an_allocation_is_valid_or_refused(places, options):
    try:
        found = allocate_heads(*places, **options)
    except MisconfigurationError:
        return
    assert found.num_heads * found.head_dim == places[0]


@pytest.mark.parametrize("step", ["x", None, 2.5, -1, True, torch.tensor(1.5)])
def test_a_reading_at_an_invalid_step_is_refused(step):
    with HeadDiversityMonitor(Classifier()) as monitor:
        with pytest.raises(MisconfigurationError, match="`step` must be a whole number"):
            monitor.measure(step)
        with pytest.raises(MisconfigurationError, match="`epoch` must be a whole number"):
            monitor.measure(0, epoch="first")


def test_a_step_with_an_invalid_epoch_is_refused_before_it_is_counted():
    model = Classifier()
    with watch_heads(model, torch.optim.SGD(model.parameters(), lr=0.1), history=False, verbose=False) as heads:
        with pytest.raises(MisconfigurationError, match="`epoch` must be a whole number"), heads.step(epoch="first"):
            pass
        assert heads.global_step == 0


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"module": 5}, "`module` of a HeadSlice"),
        ({"parameter": 5}, "`parameter` of a HeadSlice"),
        ({"heads": 0}, "`heads` of HeadSlice must be a whole number"),
        ({"heads": 2.0}, "`heads` of HeadSlice"),
        ({"width": "x"}, "`width` of HeadSlice"),
        ({"start": -1}, "`start` of HeadSlice"),
    ],
)
def test_an_invalid_head_slice_is_refused(wrong, why):
    with pytest.raises(MisconfigurationError, match=why):
        HeadSlice(**({"module": nn.Linear(4, 4), "parameter": "weight", "heads": 2, "width": 2} | wrong))
