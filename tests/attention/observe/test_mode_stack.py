"""One function mode is taken out of torch's stack, at whatever place, and put back."""

from __future__ import annotations

import pytest
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from hdi_callback.attention.observe.mode_stack import put_back, take_off
from hdi_callback.attention.observe.module_stack import ModuleStack


class Mode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_mode_is_removed_from_under_others_and_restored_at_its_place(place):
    modes = [Mode(), Mode(), Mode()]
    with modes[0], modes[1], modes[2]:
        before = _get_current_function_mode_stack()
        above = take_off(modes[place])
        assert _get_current_function_mode_stack() == [one for one in before if one is not modes[place]]
        put_back(modes[place], above)
        assert _get_current_function_mode_stack() == before


def test_removing_a_mode_that_is_not_on_the_stack_leaves_the_others():
    with Mode():
        before = _get_current_function_mode_stack()
        assert take_off(Mode()) == []
        assert _get_current_function_mode_stack() == before


def test_the_innermost_module_is_the_last_one_that_began_and_has_not_ended():
    stack, outer, inner = ModuleStack(), nn.Identity(), nn.Identity()
    assert (stack.innermost, stack.owner) == (None, "")
    stack.enter("outer", outer)
    stack.enter("outer.inner", inner)
    assert (stack.innermost, stack.owner) == (inner, "outer.inner")
    stack.leave("outer.inner")
    assert (stack.innermost, stack.owner) == (outer, "outer")
