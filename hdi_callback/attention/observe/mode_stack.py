"""Torch's stack of function modes: one mode is removed from it, at any place, and put back there."""

from __future__ import annotations

from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode


def take_off(mode: TorchFunctionMode) -> list[TorchFunctionMode]:
    """Remove a mode from the stack; modes above it stay.

    Args:
        mode: the mode; one that is not there is no error.

    Returns:
        The modes above it, for `put_back`.
    """
    if mode not in _get_current_function_mode_stack():  # type: ignore[no-untyped-call]
        return []
    above: list[TorchFunctionMode] = []
    while (top := _pop_mode()) is not mode:  # type: ignore[no-untyped-call]
        above.append(top)
    for one in reversed(above):
        _push_mode(one)  # type: ignore[no-untyped-call]
    return above


def put_back(mode: TorchFunctionMode, above: list[TorchFunctionMode]) -> None:
    """Put a mode back to its place under those that lay above it.

    Args:
        mode: the mode.
        above: the result of `take_off`.
    """
    for _ in above:
        _pop_mode()  # type: ignore[no-untyped-call]
    _push_mode(mode)  # type: ignore[no-untyped-call]
    for one in reversed(above):
        _push_mode(one)  # type: ignore[no-untyped-call]
