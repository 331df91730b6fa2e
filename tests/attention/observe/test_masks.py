"""Masks of attention that is written out: what hides a key is known however it is written, or the rows are not read."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from hdi_callback.attention.observe.scores.axes import Axes
from hdi_callback.attention.observe.scores.masks import MaskTerm
from hdi_callback.core.norms import NormSums, logit_bound
from tests.attention.observe.oracle import observed, observed_sums

B, T = 2, 7
HIDDEN = torch.ones(T, T, dtype=torch.bool).triu(1)


class Attention(nn.Module):
    """Attention of four heads whose weights are made in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.qkv, self.out = way, nn.Linear(16, 48), nn.Linear(16, 16)
        self.weights = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        weights = getattr(self, self.way)(q, k)
        self.weights = weights.detach()
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Read(Attention):
    """Ways that are read."""

    def chosen_hidden(self, q, k):
        return torch.where(HIDDEN, -torch.inf, q @ k.mT / 2).softmax(-1)

    def chosen_visible(self, q, k):
        return torch.where(~HIDDEN, q @ k.mT / 2, torch.tensor(-torch.inf)).softmax(-1)

    def chosen_by_method(self, q, k):
        return (q @ k.mT / 2).where(~HIDDEN, torch.tensor(-torch.inf)).softmax(-1)

    def set_by_index(self, q, k):
        scores = q @ k.mT / 2
        scores[HIDDEN.expand_as(scores)] = -torch.inf
        return scores.softmax(-1)

    def subtracted(self, q, k):
        return (q @ k.mT / 2 - HIDDEN * 1e9).softmax(-1)

    def added_on_the_left(self, q, k):
        return (HIDDEN * -1e9 + q @ k.mT / 2).softmax(-1)

    def added_and_multiplied(self, q, k):
        return ((q @ k.mT + torch.where(HIDDEN, -1e9, 0.0)) * 0.5).softmax(-1)

    def scaled_by_a_tensor(self, q, k):
        return (q @ k.mT * torch.tensor(0.5)).masked_fill(HIDDEN, -torch.inf).softmax(-1)

    def scaled_twice(self, q, k):
        return (q @ k.mT / 8 * 4).masked_fill(mask=HIDDEN, value=-torch.inf).softmax(-1)

    def moved_back_and_forth(self, q, k):
        scores = (q @ k.mT / 2).permute(0, 2, 3, 1).transpose(1, 2)  # (B, keys, queries, heads)
        return scores.permute((0, 3, 2, 1)).masked_fill(HIDDEN, -torch.inf).softmax(-1)

    def by_dots(self, q, k):
        return (torch.einsum("...qd,...kd->...qk", q, k) / 2).masked_fill(HIDDEN, -torch.inf).softmax(-1)

    def added_within_the_product(self, q, k):
        added = torch.where(HIDDEN, -1e9, 0.0).expand(B * 4, T, T)
        scores = torch.baddbmm(added, q.flatten(0, 1), k.flatten(0, 1).mT, alpha=0.5)
        return scores.unflatten(0, (B, 4)).softmax(-1)


class Swapped(Attention):
    def keys_on_the_left(self, q, k):
        return (torch.einsum("bhkd,bhqd->bhqk", k, q) / 2).masked_fill(HIDDEN, -torch.inf).softmax(-1)


class Changed(Attention):
    """Ways that change scores and hide nothing."""

    def numbers_set_by_index(self, q, k):
        scores = q @ k.mT / 2
        scores[:, :, 0] = 1.0
        return scores.softmax(-1)

    def filled_with_a_small_number(self, q, k):
        return (q @ k.mT / 2).masked_fill(HIDDEN, -3.0).softmax(-1)

    def chosen_from_other_numbers(self, q, k):
        return torch.where(HIDDEN, torch.randn(T, T), q @ k.mT / 2).softmax(-1)

    def two_products_added(self, q, k):
        return (q @ k.mT / 2 + k @ q.mT / 2).softmax(-1)


class Altered(Attention):
    """Ways that change weights after the softmax."""

    def set_by_index(self, q, k):
        weights = (q @ k.mT / 2).softmax(-1)
        weights[:, :, 0] = 1 / T
        return weights

    def multiplied(self, q, k):
        return (q @ k.mT / 2).softmax(-1) * 0.9

    def filled(self, q, k):
        return (q @ k.mT / 2).softmax(-1).masked_fill(HIDDEN, 0.1)


def ways(kind: type) -> list[str]:
    return [name for name in vars(kind) if not name.startswith("_")]


def require_rows(core, weights: Tensor, visible: Tensor) -> None:
    assert core.unread == ""
    assert (core.kind, core.heads, core.queries, core.keys) == ("softmax", 4, T, T)
    read = 0
    for chunk in core.rows.chunks:
        assert torch.allclose(chunk.weights, weights[chunk.sequences][:, :, chunk.positions], atol=1e-6)
        assert torch.equal(chunk.visible.expand_as(chunk.weights), visible[chunk.positions].expand_as(chunk.weights))
        read += chunk.weights[:, 0, :, 0].numel()
    assert read == B * T


@pytest.mark.parametrize("way", ways(Read))
def test_hidden_keys_are_known_for_every_way_to_write_a_mask(way):
    torch.manual_seed(0)
    model, x = nn.Sequential(Read(way)), torch.randn(B, T, 16)
    (core,) = observed(model, lambda: model(x)).cores
    require_rows(core, model[0].weights, ~HIDDEN)
    assert core.changed == ()
    assert core.is_bounded


@pytest.mark.parametrize("way", ways(Read))
def test_the_bound_of_the_scores_holds_and_is_tight_for_every_way_to_write_a_mask(way):
    torch.manual_seed(0)
    model, x = nn.Sequential(Read(way)), torch.randn(B, T, 16)
    (core,) = observed_sums(model, lambda: model(x)).cores
    assert float(core.scale) == 0.5
    assert core.bias is None or float(core.bias) == 0.0, "what hides a key raises no score"
    bound = logit_bound(core.norms["query"], core.norms["key"], 0.5)
    largest = core.rows.rows().logit
    assert (largest <= bound * (1 + 1e-5)).all()
    assert (largest > 0.05 * bound).all()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_constant_added_to_all_scores_moves_their_bound_by_the_same_amount(sign):
    class Shifted(Attention):
        def shifted(self, q, k):
            scores = q @ k.mT / 2
            return ((scores + 3.0 if sign > 0 else scores - 3.0) * 2).softmax(-1)

    torch.manual_seed(0)
    model, x = nn.Sequential(Shifted("shifted")), torch.randn(B, T, 16)
    (core,) = observed(model, lambda: model(x), reduce_norms=NormSums.of).cores
    assert float(core.scale) == 1.0
    assert float(core.bias) == 6.0 * sign


@pytest.mark.parametrize("way", ways(Changed))
def test_scores_changed_in_an_unknown_way_have_all_keys_visible_and_no_bound(way):
    torch.manual_seed(0)
    model, x = nn.Sequential(Changed(way)), torch.randn(B, T, 16)
    (core,) = observed(model, lambda: model(x)).cores
    require_rows(core, model[0].weights, torch.ones_like(HIDDEN))
    assert core.changed != ()
    assert not core.is_bounded


@pytest.mark.parametrize("way", ways(Altered))
def test_attention_weights_changed_after_the_softmax_are_not_read(way):
    torch.manual_seed(0)
    model, x = nn.Sequential(Altered(way)), torch.randn(B, T, 16)
    (core,) = observed(model, lambda: model(x)).cores
    assert "after the softmax" in core.unread
    assert core.rows is None


def test_a_mask_on_transposed_scores_is_read_from_the_scores():
    torch.manual_seed(0)
    model, x = nn.Sequential(Swapped("keys_on_the_left")), torch.randn(B, T, 16)
    (core,) = observed(model, lambda: model(x)).cores
    require_rows(core, model[0].weights, ~HIDDEN)
    assert not core.is_bounded


@pytest.mark.parametrize("shape", [(3, 3), (5, 3, 3), (4, 1, 3, 3), (1, 4, 1, 3, 3), (2, 1, 1, 3, 3), (1, 1, 5, 3, 3)])
@pytest.mark.parametrize(("before", "after"), [((2, 4, 5), (8, 5)), ((8, 5), (2, 4, 5))])
def test_masks_follow_scores_whose_leading_dimensions_are_joined_or_split(shape, before, after):
    if len(shape) > len(before) + 2 or any(a not in (1, b) for a, b in zip(shape[-3::-1], before[::-1])):
        shape = (8, 1, 3, 3)
    mask = torch.arange(math.prod(shape)).view(shape)
    term = MaskTerm(mask, "added").viewed(before, after)
    assert torch.equal(term.tensor.expand(*after, 3, 3), mask.expand(*before, 3, 3).reshape(*after, 3, 3))


@pytest.mark.parametrize("shape", [(B, 1, 1, T), (B, 4, 1, T), (B, 1, T, T)])
def test_keys_that_no_query_of_a_sequence_sees_are_marked_by_sequence(shape):
    padded = torch.zeros(B, T, dtype=torch.bool)
    padded[1, -2:] = True
    term = MaskTerm(torch.zeros(shape).masked_fill(padded[:, None, None], -torch.inf), "added")
    found = term.hidden_from_all(Axes(lead=(B, 4), batch=(0,)), torch.arange(B), T, T)
    assert found.shape == padded.shape
    assert torch.equal(found, padded)


@pytest.mark.parametrize("window", [-1, 0, 1, 3])
def test_a_sliding_window_hides_the_keys_before_its_start(window):
    n, offset = 6, 1
    term = MaskTerm(None, "causal", offset=offset, window=window)
    hidden = term.hidden(None, torch.arange(1), torch.arange(n), n + offset)[0, 0]
    for query in range(n):
        last = query + offset
        first = 0 if window < 0 else last - window
        assert [key for key in range(n + offset) if not hidden[query, key]] == list(range(max(first, 0), last + 1))
