"""A softmax that is computed in parts is one whose weights add up to one when its parts are put together."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from hdi_callback.attention.trace.plain_attention import attention, softmax
from hdi_callback.attention.trace.softmax_parts import parts_that_add_up
from tests.attention.test_plain_forms import activations, cut


class Part:
    """A product of exponentials and values, by rows or by columns."""

    def __init__(self, seed: int, is_turned: bool = False):
        generator = torch.Generator().manual_seed(seed)
        self.weights = torch.randn(2, 5, 3, generator=generator).exp().requires_grad_()
        self.values = torch.randn(2, 3, 4, generator=generator)
        self.is_turned = is_turned
        made = self.weights @ self.values
        self.output = made.mT if is_turned else made

    @property
    def sums(self) -> torch.Tensor:
        sums = self.weights.sum(-1, keepdim=True)
        return sums.mT if self.is_turned else sums


@pytest.mark.parametrize("is_turned", [False, True])
def test_parts_of_one_softmax_are_found_by_their_common_denominator(is_turned):
    one, other, undivided, apart = (Part(seed, is_turned) for seed in range(4))
    ends = [
        undivided.output + 1,
        (one.output + other.output) / (one.sums + other.sums),
        2 * apart.output / apart.sums,
    ]
    parts = [one, other, undivided, apart]
    assert parts_that_add_up(parts, ends) == {one, other}
    assert parts_that_add_up(parts, [torch.cat([ends[1], 0 * undivided.output], 0)]) == {one, other}
    assert parts_that_add_up(parts, [torch.cat([ends[1], ends[2]], 0)]) == set(), "outputs are no averages"
    alone = parts_that_add_up(parts, [apart.output / apart.sums, *ends])
    assert alone == {one, other, apart}


@pytest.mark.parametrize(("args", "kwargs", "last"), [((1,), {}, 1), ((), {"dim": 1}, 1), ((-1,), {}, 2)])
def test_scores_are_recorded_with_the_softmax_dimension_last(args, kwargs, last):
    run = cut()
    run.run.scores, run.hidden = {}, 0
    (scores,) = activations((2, 3, 4))
    answer = softmax(run, torch.softmax, (scores, *args), kwargs)
    assert torch.equal(answer, torch.softmax(scores, last))
    ((node, noted),) = run.run.scores.items()
    assert run.hidden == 0
    assert node is answer.grad_fn
    assert torch.equal(noted, scores.movedim(last, -1))
    with torch.no_grad():
        softmax(run, torch.softmax, (scores, *args), kwargs)
    assert (run.hidden, len(run.run.scores)) == (1, 1)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}, {"enable_gqa": True}, {"mask": True}])
def test_the_handwritten_attention_agrees_with_scaled_dot_product_attention(options):
    options = dict(options)
    query, key, value = activations((2, 4, 5, 8), *[(2, 2 if "enable_gqa" in options else 4, 5, 8)] * 2)
    if options.pop("mask", False):
        options["attn_mask"] = torch.ones(5, 5, dtype=torch.bool).tril()
    run = cut()
    run.run.scores, run.hidden = {}, 0
    found = attention(run, F.scaled_dot_product_attention, (query, key, value), options)
    torch.testing.assert_close(found, F.scaled_dot_product_attention(query, key, value, **options))
    assert len(run.run.scores) == 1
