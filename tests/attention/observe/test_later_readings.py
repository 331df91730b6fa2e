"""A reading that keeps no samples for the comparison with claims sees the same attention as one that does."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hdi_callback import HeadDiversityMonitor
from hdi_callback.attention import find_attention
from hdi_callback.attention.observe import AttentionObserver, map_log


class Mixing(nn.Module):
    """Attention whose heads are mixed by a linear map, before the softmax, after it, or not at all."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.qkv, self.mix, self.out = where, nn.Linear(16, 48), nn.Linear(4, 4), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if self.where == "kernel":
            return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        scores = q @ k.mT / 2
        if self.where == "normed scores":
            scores = F.layer_norm(scores, scores.shape[-1:])
        if self.where == "scores":
            scores = self.mix(scores.movedim(1, -1)).movedim(-1, 1)
        weights = scores.softmax(-1)
        if self.where == "weights":
            weights = self.mix(weights.movedim(1, -1)).movedim(-1, 1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


def readings(model: nn.Module, *, keeps_samples: bool) -> list[tuple[object, ...]]:
    observer = AttentionObserver(model, reduce_rows=lambda chunk: chunk.weights.double().square().sum())
    observer.arm(keeps_samples=keeps_samples)
    model(torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1)))
    observer.disarm()
    assert not observer.failures
    return [(core.kind, core.unread, core.changed, None if core.rows is None else float(core.rows))
            for core in observer.cores]  # fmt: skip


@pytest.mark.parametrize("where", ["kernel", "nowhere", "scores", "normed scores", "weights"])
def test_later_readings_without_samples_observe_the_same_attention(where):
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(16), Mixing(where))
    later = readings(model, keeps_samples=False)
    assert later == readings(model, keeps_samples=True)
    if where != "weights":  # what is averaged with is no softmax then
        assert len(later) == 1
        assert (later[0][3] is None) == (where == "scores")


def test_linear_maps_and_norms_are_not_recorded_if_no_samples_are_kept(monkeypatch):
    examined = []
    for name in ("map_ran", "norm_ran", "module_ran"):
        monkeypatch.setattr(map_log.MapLog, name, lambda *args, name=name, **options: examined.append(name))
    model = nn.Sequential(nn.LayerNorm(16), Mixing("kernel"), nn.BatchNorm1d(5))
    readings(model, keeps_samples=True)
    assert set(examined) == {"map_ran", "norm_ran", "module_ran"}
    examined.clear()
    readings(model, keeps_samples=False)
    assert examined == []


class Windows(nn.Module):
    """Attention in windows, which a dimension behind that of the heads numbers, or heads before sequences in one."""

    def __init__(self, heads: int, layout: str) -> None:
        super().__init__()
        self.heads, self.layout = heads, layout
        self.query, self.key, self.value, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.weights = torch.empty(0)

    def forward(self, x):
        split = (part(x).unflatten(-1, (self.heads, -1)) for part in (self.query, self.key, self.value))
        if self.layout == "windows":
            q, k, v = (part.unflatten(1, (-1, 4)).permute(0, 3, 1, 2, 4) for part in split)  # (b, h, w, i, d)
            self.weights = (q @ k.mT / 2).softmax(-1)
            mixed = (self.weights @ v).permute(0, 2, 3, 1, 4).flatten(1, 2)
        else:
            q, k, v = (part.permute(2, 0, 1, 3).flatten(0, 1) for part in split)  # (h b, i, d)
            self.weights = (q @ k.mT / 2).softmax(-1).unflatten(0, (self.heads, -1)).transpose(0, 1)
            mixed = (self.weights.transpose(0, 1) @ v.unflatten(0, (self.heads, -1))).permute(1, 2, 0, 3)
        return self.out(mixed.flatten(2))

    @property
    def diagonal(self) -> torch.Tensor:
        """Mean weight of a token on itself, of each head."""
        return self.weights.diagonal(dim1=-2, dim2=-1).transpose(0, 1).flatten(1).mean(1)


def diagonals(chunk):
    return chunk.weights.diagonal(dim1=-2, dim2=-1).transpose(0, 1).flatten(1).mean(1)


@pytest.mark.parametrize("layout", ["windows", "heads first"])
@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize("sequences", [1, 4])
def test_rows_are_those_of_heads_at_every_reading_where_other_dimensions_number_sequences(layout, heads, sequences):
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(16), Windows(heads, layout))
    observer = AttentionObserver(model, find_attention(model), reduce_rows=diagonals)
    for reading, count in enumerate((sequences, sequences, 3, 2)):
        observer.arm(keeps_samples=not reading)
        model(torch.randn(count, 16, 16))
        observer.disarm()
        if not reading:
            assert [one.state for one in observer.verdicts().values()] == ["established"]
        (core,) = observer.cores
        if core.rows is None and not reading:
            assert "which numbers heads" in core.unread
        elif core.rows is None:
            assert (layout, sequences) == ("heads first", 1)
            assert "share a dimension" in core.unread
        else:
            torch.testing.assert_close(core.rows, model[1].diagonal)


def test_rows_are_not_read_if_as_many_windows_as_heads_lie_in_a_dimension_beside_them():
    class TilesOfPictures(Windows):
        def forward(self, x):  # windows in two directions: their tokens lie in another order than those of the maps
            split = (part(x).unflatten(-1, (self.heads, -1)) for part in (self.query, self.key, self.value))
            q, k, v = (
                part.unflatten(1, (2, 2, 2, 2)).permute(0, 5, 1, 3, 2, 4, 6).flatten(4, 5).flatten(2, 3)
                for part in split
            )
            mixed = (q @ k.mT / 2).softmax(-1) @ v
            mixed = mixed.unflatten(3, (2, 2)).unflatten(2, (2, 2)).permute(0, 2, 4, 3, 5, 1, 6)
            return self.out(mixed.flatten(5).flatten(1, 4))

    torch.manual_seed(0)
    for heads in (4, 2):
        model = nn.Sequential(nn.LayerNorm(16), TilesOfPictures(heads, "windows"))
        observer = AttentionObserver(
            model,
            find_attention(model, forward=lambda model=model: model(torch.randn(3, 16, 16))),
            reduce_rows=diagonals,
        )
        for reading in range(2):
            observer.arm(keeps_samples=not reading)
            model(torch.randn(3, 16, 16))
            observer.disarm()
            if not reading:
                observer.verdicts()
            (core,) = observer.cores
            assert (core.rows is None) == (heads == 4)  # there are four windows
            assert heads == 4 or len(core.rows) == 2


class HidesPadding(Mixing):
    """Attention that hides tokens of zeros itself: nothing but its mask shows which tokens are padding."""

    def __init__(self) -> None:
        super().__init__("masked")

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        scores = (q @ k.mT / 2).masked_fill((x == 0).all(-1)[:, None, None], -torch.inf)
        self.weights = scores.softmax(-1)
        return self.out((self.weights @ v).transpose(1, 2).flatten(2))


def test_queries_that_are_padding_by_the_mask_alone_are_left_out_of_later_readings_too():
    torch.manual_seed(0)
    layer = HidesPadding()
    model, x = nn.Sequential(layer), torch.randn(2, 6, 16)
    x[1, 2:] = 0
    with HeadDiversityMonitor(model, metrics=("attention_entropy",)) as monitor:
        for step in range(3):
            monitor.arm()
            model(x)
            read = monitor.measure(step).record().layers["0"].arrays["attention_entropy"]
            entropy = torch.special.entr(layer.weights).sum(-1)  # (2, 4, queries)
            of_tokens = torch.cat([entropy[0] / math.log(6), entropy[1, :, :2] / math.log(2)], -1)
            torch.testing.assert_close(torch.as_tensor(read), of_tokens.mean(-1), check_dtype=False)


class Groups(nn.Module):
    """Heads that share keys, computed in the order of their places in the groups."""

    def __init__(self, *, is_contracted: bool) -> None:
        super().__init__()
        self.is_contracted = is_contracted
        self.query, self.out = nn.Linear(16, 16), nn.Linear(16, 16)
        self.key, self.value = nn.Linear(16, 8), nn.Linear(16, 8)
        self.weights = torch.empty(0)

    def forward(self, x):
        q = self.query(x).unflatten(-1, (2, 2, 4)).permute(0, 3, 2, 1, 4)  # (b, place, group, i, d)
        k, v = (part(x).unflatten(-1, (2, 4)).transpose(1, 2) for part in (self.key, self.value))
        if self.is_contracted:
            weights = torch.einsum("bpgid,bgjd->bpgij", q / 2, k).softmax(-1)
            mixed = torch.einsum("bpgij,bgjd->bpgid", weights, v)
        else:
            weights = (q @ k.unsqueeze(1).mT / 2).softmax(-1)
            mixed = weights @ v.unsqueeze(1)
        self.weights = weights.transpose(1, 2).flatten(1, 2)
        return self.out(mixed.permute(0, 3, 2, 1, 4).flatten(2))


@pytest.mark.parametrize("is_contracted", [False, True])
def test_readings_name_heads_as_the_layer_does_if_they_are_computed_in_another_order(is_contracted):
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(16), Groups(is_contracted=is_contracted))
    read, expected = [], []
    with HeadDiversityMonitor(model, metrics=["attention_entropy"]) as monitor:
        for step in range(3):
            monitor.arm()
            model(torch.randn(3, 8, 16)).sum().backward()
            read.append(monitor.measure(step).record().layers["1"].arrays["attention_entropy"])
            weights = model[1].weights.detach()
            expected.append((-(weights * weights.log()).sum(-1) / math.log(8)).mean((0, 2)).tolist())
    torch.testing.assert_close(torch.tensor(read), torch.tensor(expected))


class FilledUpBlocks(Windows):
    """Attention in blocks of four tokens, the last of which is filled up: maps made fewer tokens than it takes."""

    def forward(self, x):
        split = (part(x).unflatten(-1, (self.heads, -1)) for part in (self.query, self.key, self.value))
        filled = (F.pad(part, (0, 0, 0, 0, 0, -x.shape[1] % 4)) for part in split)
        q, k, v = (part.unflatten(1, (-1, 4)).permute(0, 3, 1, 2, 4) for part in filled)  # (b, h, blocks, i, d)
        self.weights = (q @ k.mT / 2).softmax(-1)
        return self.out((self.weights @ v).permute(0, 2, 3, 1, 4).flatten(1, 2).flatten(2)[:, : x.shape[1]])


@pytest.mark.parametrize("heads", [4, 2])
def test_rows_are_those_of_the_claimed_heads_if_blocks_of_tokens_are_filled_up(heads):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.LayerNorm(16), FilledUpBlocks(heads, "windows")), torch.randn(2, 10, 16)
    observer = AttentionObserver(model, find_attention(model, forward=lambda: model(x)), reduce_rows=diagonals)
    for reading in range(3):
        observer.arm(keeps_samples=not reading)
        model(x)
        observer.disarm()
        observer.verdicts()
        (core,) = observer.cores
        assert core.unread == ""
        torch.testing.assert_close(core.rows, model[1].diagonal)
