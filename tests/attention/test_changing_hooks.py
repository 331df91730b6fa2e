"""Forward hooks of projections: what may change what a map gives is refused, what looks on is no hindrance."""

from __future__ import annotations

import functools
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hdi_callback import find_attention, watch_heads
from hdi_callback.attention.layer.changing_hooks import changing_hook
from hdi_callback.errors import UnsupportedAttentionWarning
from tests.attention.wild.catalogue import cases

SEEN: list[Any] = []


def looks_on(module: nn.Module, args: Any, output: Any) -> None:
    SEEN.append(output)


def may_return(module: nn.Module, args: Any, output: Any) -> Any:
    if not args:
        return None
    return output * 2


def with_an_option(option: int, module: nn.Module, args: Any, output: Any) -> Any:
    return output + option


class Recorder:
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.last = output

    def scaled(self, module: nn.Module, args: Any, output: Any) -> Any:
        return output * 2


class Doubled:
    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return output * 2


LOOK_ON = [looks_on, Recorder(), lambda module, args, output: SEEN.append(output), lambda module, args, output: None]
MAY_CHANGE = [
    *(may_return, functools.partial(with_an_option, 2), Recorder().scaled, Doubled()),
    lambda m, args, output: output + 1,
]


def _plain(hook: Any) -> nn.Module:
    module = cases()["Plain"].make()
    module.k.register_forward_hook(hook)
    return module


@pytest.mark.parametrize("hook", LOOK_ON)
def test_a_forward_hook_that_returns_none_does_not_prevent_reading(hook):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(find_attention(_plain(hook))) == 1


@pytest.mark.parametrize("hook", MAY_CHANGE)
def test_a_layer_whose_key_projection_has_a_hook_that_may_change_its_output_is_refused(hook):
    module = _plain(hook)
    what = changing_hook(module.k)
    assert what is not None
    with pytest.warns(UnsupportedAttentionWarning, match=re.escape(f"`k` is a Linear {what}")):
        assert find_attention(module) == []


def hands_on(module: nn.Module, args: Any, output: Any) -> Any:
    SEEN.append(output)
    return output


def hands_on_if_it_must(module: nn.Module, args: Any, output: Any) -> Any:
    return output if module.training else output * 2


def writes(module: nn.Module, args: Any, output: Tensor) -> None:
    output.mul_(2)


def writes_behind_autograd(module: nn.Module, args: Any, output: Tensor) -> None:
    output.data[:, 0] = 0


class LowRank:
    """An update that begins with zeros, as LoRA by a hook does."""

    def __init__(self) -> None:
        self.a, self.b = torch.randn(4, 24), torch.zeros(24, 4)

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output + args[0] @ self.a.T @ self.b.T


def _of_forward(module: nn.Module, way: str, folder: Path) -> tuple[int, str]:
    """Read a module with a forward, or in a training: how many layers, and what is said."""
    x = torch.randn(2, 7, 24)
    with warnings.catch_warnings(record=True) as reported:
        warnings.simplefilter("always")
        if way == "forward":
            layers = find_attention(module, forward=lambda: module(x))
        else:
            holder = nn.Sequential(module)
            optimizer = torch.optim.SGD(holder.parameters(), lr=0.0)
            with watch_heads(holder, optimizer, every_n_steps=1, alerts=None, history=False, verbose=False) as heads:
                for _ in range(2):
                    with heads.step():
                        holder(x).square().mean().backward()
                        optimizer.step()
            layers = heads.monitor.layers
    said = [str(one.message) for one in reported if issubclass(one.category, UnsupportedAttentionWarning)]
    return len(layers), " | ".join(said)


@pytest.mark.parametrize("way", ["forward", "training"])
@pytest.mark.parametrize("hook", [hands_on, hands_on_if_it_must, *LOOK_ON])
def test_a_hook_that_returns_the_output_unchanged_in_a_forward_does_not_prevent_reading(hook, way, tmp_path):
    assert _of_forward(_plain(hook), way, tmp_path)[0] == 1


@pytest.mark.parametrize("way", ["forward", "training"])
@pytest.mark.parametrize("hook", [writes, writes_behind_autograd, *MAY_CHANGE])
@pytest.mark.some_slow(quick=8)
def test_a_layer_whose_keys_a_hook_changed_in_a_forward_is_left_out(hook, way, tmp_path):
    count, said = _of_forward(_plain(hook), way, tmp_path)
    assert count == 0
    assert "`k`" in said
    assert "hook" in said


@pytest.mark.parametrize("way", ["forward", "training"])
def test_a_low_rank_update_by_a_hook_that_is_zero_at_first_is_not_overlooked(way, tmp_path):
    count, said = _of_forward(_plain(LowRank()), way, tmp_path)
    assert count == 0
    assert "which may change its output" in said


def test_a_hook_added_after_the_forward_is_judged_again(tmp_path):
    module = _plain(hands_on)
    assert _of_forward(module, "forward", tmp_path)[0] == 1
    assert changing_hook(module.k) is None
    module.k.register_forward_hook(may_return)
    assert "which may change its output" in str(changing_hook(module.k))
