"""Heads found where an activation, a convolution or nothing but what comes back stands behind attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.attention.test_support import WIDTH, D, H, Plain, blocks, find, joined, read, rows_of, split

pytestmark = pytest.mark.slow  # `make slow` runs these


class Activated(Plain):
    """An activation between attention and the output projection, as in LeViT."""

    def forward(self, x: Tensor) -> Tensor:
        out = joined(self.attend(split(self.a(x)), split(self.b(x)), split(self.c(x))))
        return self.d(F.hardswish(out))


class WithoutOutputProjection(nn.Module):
    """One map for all, features before positions; no output projection, as in BoTNet."""

    def __init__(self, groups: int = 1) -> None:
        super().__init__()
        self.mix = nn.Conv1d(WIDTH, 3 * WIDTH, 1, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(x).unflatten(1, (3, H, D)).unbind(1)  # (batch, H, D, positions)
        return (v @ (k.mT @ q).softmax(-2)).flatten(1, 2)


class Upsampled(nn.Module):
    """What attention gives goes to a convolution that mixes positions, as in LowFormer."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv2d(WIDTH, 3 * WIDTH, 1)
        self.up = nn.ConvTranspose2d(WIDTH, WIDTH, 4, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(x).flatten(2).unflatten(1, (H, 3, D)).unbind(2)
        return self.up((v @ (k.mT @ q).softmax(-2)).flatten(1, 2).unflatten(-1, x.shape[2:]))


class Halo(nn.Module):
    """Keys and values of a window reach over its edges, and over those of the image into padding, as in HaloNet."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv1d(WIDTH, WIDTH, 1), nn.Conv1d(WIDTH, 2 * WIDTH, 1)
        self.back = nn.Conv1d(WIDTH, WIDTH, 1)
        self.table = nn.Parameter(torch.randn(D, 4))

    def forward(self, x: Tensor) -> Tensor:
        q = self.a(x).unflatten(1, (H, D)).unflatten(-1, (-1, 2)).permute(0, 1, 3, 4, 2)  # (b, H, windows, 2, D)
        both = F.pad(self.b(x), (1, 1)).unfold(2, 4, 2).unflatten(1, (H, 2 * D)).permute(0, 1, 3, 4, 2)
        k, v = both.chunk(2, -1)  # (b, H, windows, 4, D)
        out = (q @ k.mT + q @ self.table).softmax(-1) @ v
        return self.back(out.flatten(2, 3).mT.flatten(1, 2))


def test_heads_before_an_activation_are_found_without_an_output_projection() -> None:
    layer = find(Activated(), torch.randn(3, 7, WIDTH))
    assert layer is not None
    assert {role: rows_of(layer, role) for role in layer.slices} == {
        "query": ("a.weight", blocks()), "key": ("b.weight", blocks()), "value": ("c.weight", blocks()),
    }  # fmt: skip
    assert layer.output_projection is None


@pytest.mark.parametrize("groups", [1, 4])
def test_heads_are_found_if_the_module_returns_features_before_positions(groups: int) -> None:
    layer = find(WithoutOutputProjection(groups), torch.randn(2, WIDTH, 7))
    assert layer is not None
    assert {role: rows_of(layer, role) for role in layer.slices} == {
        "query": ("mix.weight", blocks()), "key": ("mix.weight", blocks(WIDTH)),
        "value": ("mix.weight", blocks(2 * WIDTH)),
    }  # fmt: skip


def test_heads_before_a_convolution_that_mixes_positions_are_found_without_an_output_projection() -> None:
    layer = find(Upsampled(), torch.randn(2, WIDTH, 3, 3))
    assert layer is not None
    assert rows_of(layer, "key") == ("mix.weight", [list(range(24 * h + 8, 24 * h + 16)) for h in range(H)])
    assert set(layer.slices) == {"query", "key", "value"}


def test_padded_positions_do_not_change_the_rows_of_keys_and_values() -> None:
    layer = find(Halo(), torch.randn(2, WIDTH, 8))
    assert layer is not None
    assert rows_of(layer, "key") == ("b.weight", [list(range(16 * h, 16 * h + 8)) for h in range(H)])
    assert rows_of(layer, "value") == ("b.weight", [list(range(16 * h + 8, 16 * h + 16)) for h in range(H)])


class BentKeys(Plain):
    """An activation before the scores: what the map gives is not the key."""

    def forward(self, x: Tensor) -> Tensor:
        return self.d(joined(self.attend(split(self.a(x)), split(F.relu(self.b(x))), split(self.c(x)))))


class BentValues(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.d(joined(self.attend(split(self.a(x)), split(self.b(x)), split(F.silu(self.c(x))))))


class OnePosition(WithoutOutputProjection):
    """Of a single position query and key cannot be told apart."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[..., :1])


class Fused(WithoutOutputProjection):
    """Heads of the outputs are mixed by what follows attention without a map."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).roll(3, 1) + super().forward(x)


@pytest.mark.parametrize("kind", [BentKeys, BentValues])
def test_keys_after_an_activation_are_not_claimed(kind: type[nn.Module]) -> None:
    assert find(kind(), torch.randn(3, 7, WIDTH)) is None


@pytest.mark.parametrize("kind", [OnePosition, Fused])
def test_returned_outputs_that_are_mixed_or_of_one_position_are_not_claimed(kind: type[nn.Module]) -> None:
    assert find(kind(), torch.randn(2, WIDTH, 7)) is None


class ReturnsInterleaved(Plain):
    """Feature 0 of every head, then feature 1 of every head; the projection lies beside the module."""

    def forward(self, x: Tensor) -> Tensor:
        out = self.attend(split(self.a(x)), split(self.b(x)), split(self.c(x)))
        return out.permute(0, 2, 3, 1).flatten(2)


def test_head_outputs_returned_in_interleaved_order_are_refused():
    module = ReturnsInterleaved()
    (found,) = read(module, torch.randn(3, 6, WIDTH))
    assert "do not lie side by side in what it returns" in found.reason
