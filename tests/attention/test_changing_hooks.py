"""Forward hooks of projections: what may change what a map gives is refused, what looks on is no hindrance."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
from torch import nn

from hdi_callback import find_attention
from hdi_callback.attention.changing_hooks import changing_hook
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


LOOK_ON = [looks_on, Recorder(), lambda module, args, output: SEEN.append(output), lambda module, args, output: None]
MAY_CHANGE = [may_return, functools.partial(with_an_option, 2), Recorder().scaled, lambda m, args, output: output + 1]


def _plain(hook: Any) -> nn.Module:
    module = cases()["Plain"].make()
    module.k.register_forward_hook(hook)
    return module


@pytest.mark.parametrize("hook", LOOK_ON)
def test_a_hook_that_returns_nothing_is_no_hindrance(hook):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(find_attention(_plain(hook))) == 1


@pytest.mark.parametrize("hook", MAY_CHANGE)
def test_a_hook_that_may_change_the_keys_is_named_and_they_are_not_read(hook):
    module = _plain(hook)
    name = changing_hook(module.k)
    with pytest.warns(UnsupportedAttentionWarning, match=f"`k` is a Linear with the forward hook `{name}`"):
        assert find_attention(module) == []
