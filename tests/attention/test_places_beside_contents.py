"""Keys and queries to which places add, or in which they lie beside contents, as in DETR's kin: contents are read."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import Tensor, nn

from hdi_callback.attention import find_attention
from hdi_callback.attention.layer.heads import AttentionLayer

H, D, WIDTH = 4, 6, 24


def split(x: Tensor) -> Tensor:
    return x.unflatten(-1, (H, -1)).transpose(1, 2)


class Contents(nn.Module):
    """Maps of contents and of places; those of places may be silenced."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.q_place, self.k_place = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.of_places = nn.Sequential(nn.Linear(5, WIDTH), nn.ReLU())

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT / math.sqrt(D)
        return self.o((scores.softmax(-1) @ split(v)).transpose(1, 2).flatten(2))


class Beside(Contents):
    """Cross attention: each head has features of places beside those of contents (Conditional DETR)."""

    def forward(self, x: Tensor, memory: Tensor, asked: Tensor, places: Tensor) -> Tensor:
        q = torch.cat([split(self.q(x)), split(self.q_place(asked))], -1)
        k = torch.cat([split(self.k(memory)), split(self.k_place(places))], -1)
        return self.attend(q, k, self.v(memory))


class BesideAndAdded(Contents):
    """Its first layer: what places give is added to the contents as well."""

    def forward(self, x: Tensor, memory: Tensor, asked: Tensor, places: Tensor) -> Tensor:
        place = split(self.k_place(places))
        q = torch.cat([split(self.q(x)), split(self.q_place(asked))], -1)
        return self.attend(q, torch.cat([split(self.k(memory)) + place, place], -1), self.v(memory))


class Added(Contents):
    """Self attention: places add to queries and keys (DAB-DETR), after maps of their own."""

    def forward(self, x: Tensor, numbers: Tensor) -> Tensor:
        places = self.of_places(numbers)
        q, k = self.q(x) + self.q_place(places), self.k(x) + self.k_place(places)
        return self.attend(split(q), split(k), self.v(x))


BESIDE = "the features of its keys that come from `k_place`"
ADDED = "what `k_place` adds to its keys and what `q_place` adds to its queries"
CASES = {
    Beside: (((7, WIDTH), (9, WIDTH), (7, WIDTH), (9, WIDTH)), BESIDE),
    BesideAndAdded: (((7, WIDTH), (9, WIDTH), (7, WIDTH), (9, WIDTH)), BESIDE),
    Added: (((7, WIDTH), (7, 5)), ADDED),
}


def found(module: nn.Module, *inputs: Tensor) -> AttentionLayer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (layer,) = find_attention(nn.Sequential(module), forward=lambda: module(*inputs))
    return layer


@pytest.mark.parametrize("kind", CASES)
def test_with_positions_zeroed_the_content_weights_reproduce_the_output_of_the_module(kind: type[Contents]) -> None:
    torch.manual_seed(0)
    shapes, left_out = CASES[kind]
    module, inputs = kind(), [torch.randn(2, *shape) for shape in shapes]
    layer = found(module, *inputs)
    assert (layer.num_heads, layer.head_dim, layer.value_dim, layer.left_out) == (H, D, D, left_out)
    with torch.no_grad():
        module.q_place.weight.zero_()
        module.k_place.weight.zero_()
    tokens = inputs[0], *([inputs[1]] * 2 if len(inputs) > 2 else [inputs[0]] * 2)
    weights = (layer.weight(role) for role in ("query", "key", "value"))
    q, k, v = (torch.einsum("bnc,hdc->bhnd", x, weight) for x, weight in zip(tokens, weights))
    outputs = (q @ k.mT / math.sqrt(D)).softmax(-1) @ v
    expected = torch.einsum("bhnd,hdc->bnc", outputs, layer.weight("output"))
    torch.testing.assert_close(module(*inputs), expected)


class OfTwoMaps(Contents):
    """Two maps of the same tokens: neither is the one of contents."""

    def forward(self, x: Tensor) -> Tensor:
        q = torch.cat([split(self.q(x)), split(self.q_place(x))], -1)
        return self.attend(q, torch.cat([split(self.k(x)), split(self.k_place(x))], -1), self.v(x))


class Places(Contents):
    """Places are an argument of their own, which may be given the contents once more."""

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        k = torch.cat([split(self.k(hidden_states)), split(self.k_place(encoder_hidden_states))], -1)
        q = torch.cat([split(self.q(hidden_states)), split(self.q_place(encoder_hidden_states))], -1)
        return self.attend(q, k, self.v(hidden_states))


def test_keys_concatenated_from_two_projections_of_the_same_tokens_are_refused() -> None:
    module = nn.Sequential(OfTwoMaps())
    with pytest.warns(UserWarning, match="concatenated outputs of several maps: `k` and `k_place`"):
        assert find_attention(module) == []


def test_positional_key_features_are_left_out_even_if_synthetic_positions_equal_the_tokens() -> None:
    module = nn.ModuleDict({"attention": Places()})
    with pytest.warns(UserWarning, match="without the features of its keys that come from `k_place`"):
        (layer,) = find_attention(module)
    assert (layer.head_dim, layer.slices["query"].in_features) == (D, WIDTH)
    assert torch.equal(layer.weight("key"), module["attention"].k.weight.view(H, D, WIDTH))
