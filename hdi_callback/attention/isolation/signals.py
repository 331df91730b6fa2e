"""Exceptions that a signal handler has raised."""

from __future__ import annotations

import signal
from typing import Any


def comes_from_signal(error: BaseException) -> bool:
    """Return whether a signal handler raised an exception, as on SIGTERM: then the run is to end.

    Args:
        error: what was raised.

    Returns:
        True if its traceback leads through a handler.
    """
    codes = set()
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        if callable(handler):
            handler = getattr(handler, "func", handler)  # of a partial
            function = getattr(handler, "__func__", handler)
            codes.add(getattr(function, "__code__", None) or getattr(type(handler).__call__, "__code__", None))
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False
