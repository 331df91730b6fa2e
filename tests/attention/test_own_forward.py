"""Attention in the forward of the model itself, over embeddings of ids: left to a forward, and read with it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hdi_callback import find_attention
from hdi_callback.errors import UnsupportedAttentionWarning

H, WIDTH = 3, 6  # heads, width of a head


def split(x: Tensor) -> Tensor:
    return x.unflatten(-1, (H, WIDTH)).transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = split(q) @ split(k).mT / WIDTH**0.5
    return (scores.softmax(-1) @ split(v)).transpose(1, 2).flatten(2)


class OneLayerInTwoRounds(nn.Module):
    """ALBERT: narrow embeddings are widened by a map, which feeds the first of the rounds alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.widen, self.norm = nn.Embedding(50, 4), nn.Linear(4, 18), nn.LayerNorm(18)
        self.q, self.k, self.v, self.o = (nn.Linear(18, 18) for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.widen(self.embed(ids))
        for _ in range(2):
            x = self.norm(x + self.o(attend(self.q(x), self.k(x), self.v(x))))
        return x


class StepsOfADecoder(nn.Module):
    """A recurrent decoder asks an encoder at every step; ids are turned, and taken one step at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.encoder = nn.Embedding(50, 18), nn.GRU(18, 18)
        self.q, self.k, self.v, self.o = (nn.Linear(18, 18) for _ in range(4))
        self.cell = nn.GRUCell(36, 18)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.encoder(self.embed(source.T))[0].transpose(0, 1)
        keys, values, state, states = self.k(memory), self.v(memory), memory[:, -1], []
        for step in range(target.shape[1]):
            context = self.o(attend(self.q(state)[:, None], keys, values))[:, 0]
            state = self.cell(torch.cat([self.embed(target[:, step]), context], -1), state)
            states.append(state)
        return torch.stack(states, 1)


class RowsOfATable(nn.Module):
    """Weights in a dictionary; the embeddings are rows of a parameter that ids index."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterDict({name: torch.randn(18, 18) for name in "qkvo"} | {"e": torch.randn(50, 18)})

    def forward(self, ids: Tensor) -> Tensor:
        x = self.weights["e"][ids]
        return attend(*(x @ self.weights[name] for name in "qkv")) @ self.weights["o"]


IDS = torch.randint(50, (2, 7), generator=torch.Generator().manual_seed(0))
TARGETS = torch.randint(50, (2, 4), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", [
    pytest.param(OneLayerInTwoRounds, marks=pytest.mark.slow), pytest.param(StepsOfADecoder, marks=pytest.mark.slow),
    RowsOfATable,
])  # fmt: skip
def test_attention_of_the_model_itself_is_read_with_a_forward(kind):
    torch.manual_seed(0)
    model = kind()
    with pytest.warns(UnsupportedAttentionWarning, match="the model .* could not be run with synthetic inputs"):
        assert find_attention(model) == []
    inputs = (IDS, TARGETS) if kind is StepsOfADecoder else (IDS,)
    (layer,) = find_attention(model, forward=lambda: model(*inputs))
    assert (layer.name, layer.num_heads, layer.left_out) == ("", H, "")
    for role, name in zip(("query", "key", "value"), "qkv"):
        matrix = model.weights[name].T if kind is RowsOfATable else model.get_parameter(f"{name}.weight")
        torch.testing.assert_close(layer.weight(role), matrix.unflatten(0, (H, WIDTH)))
    matrix = model.weights["o"] if kind is RowsOfATable else model.o.weight.T
    torch.testing.assert_close(layer.weight("output"), matrix.unflatten(0, (H, WIDTH)))
