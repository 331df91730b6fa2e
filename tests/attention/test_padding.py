"""Which tokens are padding, by the masks that calls take and by what the user says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hdi_callback.attention.capture.padding import TokenMask, find_padding, fit

PADDED = torch.tensor([[False, False, False, True], [False, False, True, True]])


class Inner(nn.Module):
    """Asks, as a hook on an output projection does."""

    def __init__(self, shape=(2, 4), **options) -> None:
        super().__init__()
        self.shape, self.options = shape, options

    def forward(self, *args: Tensor, query=None, key=None, key_padding_mask=None) -> TokenMask:
        return find_padding(self.shape, **self.options)


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(
        self, input_ids=None, attention_mask=None, decoder_attention_mask=None, src_key_padding_mask=None, **more
    ):
        return self.inner(**more)


def ask(choice="auto", inner=None, shape=(2, 4), layer="", hidden_keys=None, **arguments) -> TokenMask:
    return Outer(Inner(shape, choice=choice, layer=layer, hidden_keys=hidden_keys))(**arguments, **(inner or {}))


@pytest.mark.parametrize(
    "arguments",
    [
        {"attention_mask": (~PADDED).long()},
        {"attention_mask": ~PADDED},
        {"attention_mask": (~PADDED).float()},
        {"src_key_padding_mask": PADDED},
        {"src_key_padding_mask": torch.zeros(2, 4).masked_fill(PADDED, -torch.inf)},
    ],
    ids=["numbers", "booleans", "floats", "torch's", "added to scores"],
)
def test_masks_of_the_modules_around_are_found(arguments):
    assert torch.equal(ask(**arguments).padded, PADDED)


def test_without_a_mask_nothing_is_padding():
    assert ask(input_ids=torch.ones(2, 4, dtype=torch.long)) == TokenMask()
    assert ask(None, attention_mask=~PADDED) == TokenMask()


def test_a_mask_of_zeros_that_is_added_to_scores_hides_nothing():
    assert not ask(src_key_padding_mask=torch.zeros(2, 4)).padded.any()


def test_length_first_and_flattened_tokens_are_fitted():
    assert torch.equal(fit(PADDED, (4, 2)), PADDED.T)
    assert torch.equal(fit(PADDED, (8,)), PADDED.flatten())
    assert fit(PADDED, (2, 5)) is None


def test_a_mask_that_leaves_out_a_token_in_front_is_a_doubt():
    found = ask(attention_mask=~PADDED, shape=(2, 5))
    assert found.padded is None
    assert "`attention_mask` of Outer has the shape (2, 4), and the tokens have (2, 5)" in found.doubt


def test_masks_of_the_encoder_are_not_those_of_the_decoder():
    other = PADDED.flip(1)
    masks = {"attention_mask": ~PADDED, "decoder_attention_mask": ~other}
    assert torch.equal(ask(layer="encoder.0.attn", **masks).padded, PADDED)
    assert torch.equal(ask(layer="decoder.0.attn", **masks).padded, other)


def test_the_mask_of_keys_of_another_stream_says_nothing_of_the_queries():
    x, y = torch.zeros(2, 4, 3), torch.zeros(2, 4, 3)
    assert ask(inner={"query": x, "key": y, "key_padding_mask": PADDED}) == TokenMask()
    assert torch.equal(ask(inner={"query": x, "key": x, "key_padding_mask": PADDED}).padded, PADDED)


def test_keys_that_attention_hides_from_all_are_padding_if_no_mask_says_it():
    assert torch.equal(ask(hidden_keys=PADDED).padded, PADDED)
    assert torch.equal(ask(hidden_keys=PADDED, attention_mask=PADDED).padded, ~PADDED)


def test_the_token_that_is_padding():
    ids = torch.tensor([[5, 6, 7, 0], [5, 6, 0, 0]])
    assert torch.equal(ask(0, input_ids=ids).padded, PADDED)
    assert ask(0, input_ids=ids, shape=(2, 9)).padded is None
