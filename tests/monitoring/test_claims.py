"""Claims about heads are judged by the first captured forward, and attention that is not watched is named."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hdi_callback import HeadDiversityMonitor
from hdi_callback.errors import MonitoringWarning, NothingToWatchError, UnsupportedAttentionWarning
from tests.models import Attention

H, D, B, T = 4, 16, 2, 6


class TakesAnObject(nn.Module):
    """Attention under usual names, with the configured heads, on inputs that cannot be synthesised."""

    def __init__(self, heads: int = H, claimed: int = H) -> None:
        super().__init__()
        self.num_heads, self.heads = claimed, heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(D, D) for _ in range(4))

    def forward(self, batch):
        x = batch["states"].tensor
        q, k, v = (
            one(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = F.scaled_dot_product_attention(q, k, v)
        return self.out_proj(out.transpose(1, 2).flatten(2))


class States:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Model(nn.Module):
    def __init__(self, *blocks: nn.Module, runs: int | None = None) -> None:
        super().__init__()
        self.blocks, self.runs = nn.ModuleList(blocks), runs

    def forward(self, states):
        x = states.tensor
        for block in self.blocks[: self.runs]:
            x = x + block({"states": States(x)} if isinstance(block, (TakesAnObject, Mixing)) else x)
        return x


def step(monitor: HeadDiversityMonitor, model: nn.Module, number: int):
    monitor.arm()
    model(States(torch.randn(B, T, D))).sum().backward()
    return monitor.measure(number).record()


def test_heads_claimed_by_names_are_published_once_a_forward_confirms_them():
    model = Model(TakesAnObject(), TakesAnObject(), runs=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monitor = HeadDiversityMonitor(model)
    assert ["could not be run" in refusal.reason for refusal in monitor.refused] == [True, True]
    with monitor, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert monitor.layers == ()
        assert monitor.measure(0).record().layers == {}, "nothing is published before a forward"
        warnings.simplefilter("error", UnsupportedAttentionWarning)
        record = step(monitor, model, 1)
        assert list(record.layers) == ["blocks.0"]
        assert "hdi" in record.layers["blocks.0"].values
        model.runs = 2
        record = step(monitor, model, 2)
        assert list(record.layers) == ["blocks.0", "blocks.1"]
        assert all("hdi" in layer.values for layer in record.layers.values())
        assert [layer.name for layer in monitor.layers] == ["blocks.0", "blocks.1"]
        assert monitor.refused == ()


def test_heads_claimed_by_names_are_never_published_if_the_forward_contradicts_them():
    model = Model(TakesAnObject(heads=2, claimed=4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with HeadDiversityMonitor(model, metrics=["hdi", "hdi_query"]) as monitor:
            record = step(monitor, model, 0)
            heads = [layer.num_heads for layer in monitor.layers]
    assert heads == [2], "as the forward shows"
    assert len(record.layers) == 1


class Mixing(nn.Module):
    """Attention whose heads mix before they reach the softmax, in a module that is called otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(D, D) for _ in range(4))
        self.mix = nn.Linear(H, H)

    def forward(self, batch):
        x = batch["states"].tensor
        q, k, v = (one(x).unflatten(-1, (H, -1)).transpose(1, 2) for one in (self.a, self.b, self.c))
        scores = self.mix((q @ k.mT).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.d((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def reported(model: nn.Module, **options) -> tuple[list[str], HeadDiversityMonitor]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with HeadDiversityMonitor(model, **options) as monitor:
            for number in range(2):
                step(monitor, model, number)
    return [str(one.message) for one in caught if issubclass(one.category, UnsupportedAttentionWarning)], monitor


def test_unwatched_attention_is_reported_once_with_its_module():
    messages, monitor = reported(Model(Attention(D, H), Mixing()))
    assert [layer.name for layer in monitor.layers] == ["blocks.0"]
    (message,) = messages
    assert "blocks.1" in message
    assert any(refusal.name.startswith("blocks.1") for refusal in monitor.refused)


@pytest.mark.parametrize("patterns", [{"include": ["blocks.0"]}, {"exclude": ["blocks.1*"]}])
def test_excluded_attention_is_not_reported(patterns):
    messages, _ = reported(Model(Attention(D, H), Mixing()), **patterns)
    assert messages == []


class CallsForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention(D, H)

    def forward(self, x):
        return self.attn.forward(x)


def test_a_layer_whose_forward_is_called_directly_is_not_reported_as_unwatched_attention():
    model = CallsForward()
    with warnings.catch_warnings(), HeadDiversityMonitor(model, metrics=["hdi"]) as monitor:
        warnings.simplefilter("error", UnsupportedAttentionWarning)
        monitor.arm()
        model(torch.randn(B, T, D))
        assert "hdi" in monitor.measure(0).record().layers["attn"].values


class AttendsItself(CallsForward):
    def forward(self, x):
        y = x.unflatten(-1, (H, -1)).transpose(1, 2)
        return self.attn(x) + F.scaled_dot_product_attention(y, y, y).transpose(1, 2).flatten(2)


def test_attention_in_the_root_forward_is_reported_without_an_empty_name():
    model = AttendsItself()
    with HeadDiversityMonitor(model, metrics=["hdi"]) as monitor:
        monitor.arm()
        model(torch.randn(B, T, D))
        with pytest.warns(UnsupportedAttentionWarning, match="in the model's own forward") as reported:
            monitor.measure(0)
    assert [word for one in reported for word in ("``", "exclude=") if word in str(one.message)] == []


def test_no_unwatched_attention_is_reported_if_all_of_it_is_watched():
    messages, monitor = reported(Model(Attention(D, H), nn.Sequential(Attention(D, H))))
    assert messages == []
    assert len(monitor.layers) == 2


class Unnamed(nn.Module):
    """Attention under names that say nothing, of inputs that nobody can make up: nothing is found before a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, states):
        q, k, v = (one.unflatten(-1, (H, -1)).transpose(1, 2) for one in self.a(states.tensor).chunk(3, -1))
        return self.b(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("is_strict", [False, True])
def test_strict_does_not_raise_for_heads_that_the_first_forward_shows(is_strict):
    model = Unnamed()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with HeadDiversityMonitor(model, strict=is_strict) as monitor:
            assert monitor.layers == ()
            record = step(monitor, model, 0)
    (layer,) = monitor.layers
    assert layer.num_heads == H
    assert torch.equal(layer.weight("key").flatten(0, 1), model.a.weight[D : 2 * D])
    assert "hdi" in record.layers[layer.name].values
    assert not any("nothing to watch" in str(one.message) for one in caught)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, states):
        return self.b(self.a(states.tensor).relu())


def test_a_model_without_attention_is_reported_at_the_first_forward():
    model = Mlp()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monitor = HeadDiversityMonitor(model)
    with monitor, pytest.warns(MonitoringWarning, match="nothing to watch"):
        step(monitor, model, 0)
    with HeadDiversityMonitor(model, strict=True) as monitor, pytest.raises(NothingToWatchError):
        step(monitor, model, 0)
