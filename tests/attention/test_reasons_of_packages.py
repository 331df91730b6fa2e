"""Ways to attend that packages use and no heads are read of; each is refused with what is true of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hdi_callback.attention import survey

H, WIDTH = 4, 32


def split(x: Tensor) -> Tensor:
    return x.unflatten(-1, (H, -1)).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


class Separate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))


class KeysOfPatches(nn.Module):
    """Twins: a convolution with a stride gives keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_out = nn.Conv2d(WIDTH, WIDTH, 1), nn.Conv2d(WIDTH, WIDTH, 1)
        self.to_kv = nn.Conv2d(WIDTH, 2 * WIDTH, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        q, kv = self.to_q(x).flatten(2).mT, self.to_kv(x).flatten(2).mT
        k, v = kv.chunk(2, -1)
        out = (split(q) @ split(k).mT).softmax(-1) @ split(v)
        return self.to_out(joined(out).mT.reshape(x.shape))


class KeysOfNeighbours(Separate):
    """Keys are what a filter over three tokens gives."""

    def __init__(self) -> None:
        super().__init__()
        self.k = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        scores = split(self.q(x)) @ split(self.k(x.mT).mT).mT
        return self.o(joined(scores.softmax(-1) @ split(self.v(x))))


class InverseByIteration(Separate):
    """Nystrom: three softmaxes, the second of which is inverted step by step."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(one(x)) for one in (self.q, self.k, self.v))
        few_q, few_k = (one.unflatten(2, (4, -1)).mean(3) for one in (q, k))
        first, middle, last = ((a @ b.mT).softmax(-1) for a, b in ((q, few_k), (few_q, few_k), (few_q, k)))
        inverse = middle.mT / (middle.abs().sum(-1).max() * middle.abs().sum(-2).max())
        for _ in range(6):
            one = middle @ inverse
            inverse = 0.25 * inverse @ (13 * torch.eye(4) - one @ (15 * torch.eye(4) - one @ (7 * torch.eye(4) - one)))
        return self.o(joined((first @ inverse) @ (last @ v)))


class SortedBlocks(Separate):
    """Sinkhorn transformer: blocks of tokens are weighed whole, before their tokens attend."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(one(x)).unflatten(2, (-1, 4)) for one in (self.q, self.k, self.v))
        order = (q.mean(3) @ k.mean(3).mT).softmax(-1)
        beside = [torch.einsum("bhuv,bhvtd->bhutd", order, one) for one in (k, v)]
        keys, values = (torch.cat([one, own], 3) for one, own in zip(beside, (k, v)))
        return self.o(joined(((q @ keys.mT).softmax(-1) @ values).flatten(2, 3)))


class ReshapedImage(nn.Module):
    """x-metaformer: features of an image come first, and a reshape takes places of one for features of a token."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Conv2d(WIDTH, 3 * WIDTH, 1), nn.Conv2d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).reshape(3, len(x), H, -1, WIDTH // H).unbind(0)
        out = (q @ k.mT).softmax(-1) @ v
        return self.out(out.transpose(1, 2).flatten(2).reshape(x.shape))


class OverChannels(ReshapedImage):
    """Attention over the channels of each image alone."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).flatten(2).unflatten(1, (3, H, -1)).unbind(1)
        return self.out(((q @ k.mT).softmax(-1) @ v).flatten(1, 2).unflatten(2, x.shape[2:]))


_IMAGE, _SEQUENCE = (2, WIDTH, 8, 8), (2, 16, WIDTH)


@pytest.mark.parametrize("has_forward", [False, True])
@pytest.mark.parametrize(
    ("kind", "shape", "reason"),
    [
        (KeysOfPatches, _IMAGE, "its values come from the convolution `to_kv`, whose filters cover several tokens"),
        (KeysOfNeighbours, _SEQUENCE, "its keys come from the convolution `k`, whose filters cover several tokens"),
        (InverseByIteration, _SEQUENCE, "the attention weights of one head are computed from several softmaxes"),
        (SortedBlocks, _SEQUENCE, "one of its softmaxes weighs blocks of 4 tokens, not single tokens"),
        (ReshapedImage, _IMAGE, "each of its keys holds a few features of several tokens, as after a reshape without "
         "a transpose, and its attention mixes the samples of a batch"),
        (OverChannels, _IMAGE, "each of its keys is of a feature and not of a token, as in attention over channels"),
    ],
)  # fmt: skip
def test_a_module_is_refused_with_a_true_reason(
    kind: type[nn.Module], shape: tuple[int, ...], reason: str, has_forward: bool
) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(kind()), torch.randn(shape)
    found = survey(model, forward=(lambda: model(x)) if has_forward else None)
    assert found.layers == ()
    assert [one.reason for one in found.refused] == [reason]


def test_the_strided_convolution_of_the_keys_covers_patches_of_several_tokens() -> None:
    torch.manual_seed(0)
    model, x = KeysOfPatches(), torch.randn(_IMAGE)
    taken = {}
    model.to_kv.register_forward_hook(lambda module, args, output: taken.update(given=output))
    model(x)
    patches = x.unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 1, 4, 5).flatten(3)  # of four tokens each
    expected = patches @ model.to_kv.weight.flatten(1).mT + model.to_kv.bias
    torch.testing.assert_close(taken["given"].movedim(1, -1), expected)


@pytest.mark.parametrize(("kind", "mixes"), [(ReshapedImage, True), (OverChannels, False)])
def test_modules_refused_for_mixing_the_samples_of_a_batch_do_mix_them(kind: type[nn.Module], mixes: bool) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(_IMAGE)
    other = torch.cat([x[:1], torch.randn_like(x[1:])])
    assert torch.allclose(model(x)[0], model(other)[0]) is not mixes
