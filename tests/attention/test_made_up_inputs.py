"""What a forward is tried with before a real one ran: tokens, and what it asks for besides by what its names say."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hdi_callback.attention.trace.inputs import synthetic_inputs


class Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(8, 8)


class ForTokens(Asks):
    def forward(self, x): ...


class ForMoreTokens(Asks):
    def forward(self, x, context): ...


class ForAMask(Asks):
    def forward(self, x, attention_mask): ...


class ForSomething(Asks):
    def forward(self, x, something): ...


def made_up(kind: type[Asks]) -> list[tuple[Tensor, object]]:
    """Give the tokens of each trial, and what else is passed."""
    torch.manual_seed(0)
    return [(inputs.args[0], next(iter(inputs.kwargs.values()), None)) for inputs in synthetic_inputs(kind())]


def test_an_argument_named_after_tokens_gets_the_tokens_and_costs_no_further_tries():
    alone, both = made_up(ForTokens), made_up(ForMoreTokens)
    assert len(both) == len(alone) > 0
    for x, context in both:
        assert isinstance(context, Tensor)
        assert torch.equal(x, context)


def test_a_mask_argument_is_tried_as_none_first_and_then_with_all_tokens_visible():
    x, masks = made_up(ForAMask)[0][0], [mask for _, mask in made_up(ForAMask)]
    assert masks[0] is None
    shown = next(mask for mask in masks if mask is not None)
    assert torch.equal(shown, torch.ones(len(x), 1, x.shape[-2], x.shape[-2]))


def test_an_unknown_argument_is_tried_as_none_first_and_with_tokens_last():
    tried = made_up(ForSomething)
    assert len(tried) == 4 * len(made_up(ForTokens))
    own = [value for x, value in tried if x.shape == tried[0][0].shape]
    assert own[0] is None
    assert isinstance(own[3], Tensor)
    assert torch.equal(own[3], tried[0][0])
