"""Scores that are summed over the rows of an alignment: the heads are found, and what only looks so is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hdi_callback.attention import AttentionLayer, HeadSlice, find_attention, survey
from hdi_callback.attention.observe import AttentionObserver

H, WIDTH, D, ROWS, COLUMNS, BATCH = 4, 8, 32, 3, 7, 2
WAYS = {
    True: ("rinhd,rjnhd->hnij", "hnij,rjnhd->rinhd"),
    False: ("brihd,brjhd->bhij", "bhij,brjhd->brihd"),
}
KIND = "one map for all rows, of scores summed over them"


class Tied(nn.Module):
    """All rows attend with one map of weights; `turned` changes one of what they give before attention takes it."""

    def __init__(self, is_first: bool = True, turned: str = "") -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))
        self.is_first, self.turned = is_first, turned

    def forward(self, x: Tensor) -> Tensor:
        parts = {name: getattr(self, name)(x).unflatten(-1, (H, WIDTH)) for name in "qkv"}
        name, _, how = self.turned.partition(" ")
        dim = 0 if self.is_first else 1
        if how == "rows":
            parts[name] = parts[name].roll(1, dim)
        if how == "features":  # of one row, within its heads
            rows = list(parts[name].unbind(dim))
            parts[name] = torch.stack([rows[0].roll(1, -1), *rows[1:]], dim)
        if how == "heads":
            rows = list(parts[name].unbind(dim))
            parts[name] = torch.stack([rows[0].roll(1, -2), *rows[1:]], dim)
        q, k, v = parts.values()
        scores, sums = WAYS[self.is_first]
        weights = (torch.einsum(scores, q, k) / (WIDTH * ROWS) ** 0.5).softmax(-1)
        out = torch.einsum(sums, weights, v)
        self.weights = weights
        return self.o(out.flatten(-2))


def alignment(is_first: bool = True) -> Tensor:
    return torch.randn((ROWS, COLUMNS, BATCH, D) if is_first else (BATCH, ROWS, COLUMNS, D))


def claim(module: Tied) -> AttentionLayer:
    maps = {"query": "q", "key": "k", "value": "v", "output": "o"}
    slices = {role: HeadSlice(module, f"{name}.weight", H, WIDTH) for role, name in maps.items()}
    slices["output"] = HeadSlice(module, "o.weight", H, WIDTH, transposed=True)
    return AttentionLayer("0", module, H, H, WIDTH, WIDTH, "said", slices, module.o)


def observed(model: nn.Module, x: Tensor, layer: AttentionLayer, **options):
    observer = AttentionObserver(model, [layer], **options)
    observer.arm()
    model(x)
    observer.disarm()
    assert observer.failures == []
    return observer.verdicts()["0"]


@pytest.mark.parametrize("is_first", [True, False])
def test_heads_of_tied_row_attention_are_read_in_every_role(is_first):
    torch.manual_seed(0)
    model, x = nn.Sequential(Tied(is_first)), alignment(is_first)
    (layer,) = find_attention(model, forward=lambda: model(x))
    assert (layer.num_heads, layer.num_key_heads, layer.head_dim, layer.value_dim) == (H, H, WIDTH, WIDTH)
    # Of rows first nothing is known without the forward; else what is made up has one row, and the forward agrees.
    assert layer.kind == (f"separate, {KIND}" if is_first else "separate")
    assert layer.left_out == ""
    for role, part in (("query", model[0].q), ("key", model[0].k), ("value", model[0].v)):
        assert torch.equal(layer.weight(role), part.weight.view(H, WIDTH, D)), role
    assert torch.equal(layer.weight("output"), model[0].o.weight.mT.reshape(H, WIDTH, D))
    assert layer.output_projection is model[0].o


WIDER = "one of its softmaxes weighs blocks of 3 tokens, not single tokens"


@pytest.mark.parametrize("is_first", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("turned", "reason"),
    [
        ("k rows", WIDER),
        ("q rows", WIDER),
        ("v rows", WIDER),
        ("k features", WIDER),
        ("q features", WIDER),
        ("v features", "its head outputs go to other features of the output projection in every row"),
        ("k heads", "a key of 24 features depends on only 16 outputs of `k`"),
    ],
)
def test_tied_row_attention_with_reordered_rows_or_features_is_refused(turned, reason, is_first):
    torch.manual_seed(0)
    model, x = nn.Sequential(Tied(is_first, turned)), alignment(is_first)
    found = survey(model, forward=lambda: model(x))
    assert [one.reason.removeprefix("in the forward that was run, ") for one in found.refused] == [reason]
    assert found.layers == ()


@pytest.mark.parametrize("is_first", [True, False])
def test_a_forward_verifies_every_role_of_tied_row_attention(is_first):
    torch.manual_seed(0)
    model, x = nn.Sequential(Tied(is_first)), alignment(is_first)
    verdict = observed(model, x, claim(model[0]))
    assert (verdict.state, {role: one.state for role, one in verdict.roles.items()}) == (
        "established", dict.fromkeys(("query", "key", "value", "output"), "established"),
    )  # fmt: skip
    assert (verdict.core.heads, verdict.core.queries, verdict.core.keys, verdict.core.width) == (4, 7, 7, 8)


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("turned", ["k rows", "q rows", "v rows", "k features", "q features", "v features", "k heads"])
def test_a_forward_does_not_verify_tied_row_attention_with_reordered_rows_or_features(turned, is_first):
    torch.manual_seed(0)
    model, x = nn.Sequential(Tied(is_first, turned)), alignment(is_first)
    verdict = observed(model, x, claim(model[0]))
    role = {"q": "query", "k": "key", "v": "value"}[turned[0]]
    assert verdict.state != "established"
    assert {one for one, of_role in verdict.roles.items() if of_role.state != "established"} == {role}


@pytest.mark.parametrize("is_first", [True, False])
def test_the_attention_weights_shared_by_all_rows_are_read_once_for_each_head(is_first):
    torch.manual_seed(0)
    model, x = nn.Sequential(Tied(is_first)), alignment(is_first)
    read = []

    def keep(chunk):
        read.append(chunk)
        return torch.zeros(())

    verdict = observed(model, x, claim(model[0]), reduce_rows=keep)
    assert verdict.core.unread == ""
    expected = model[0].weights.movedim(1, 0) if is_first else model[0].weights  # (sequences, heads, queries, keys)
    met = torch.zeros_like(expected)
    for chunk in read:
        met[chunk.sequences[:, None], :, chunk.positions] = chunk.weights.transpose(1, 2)
    assert torch.allclose(met, expected.detach(), atol=1e-6)
