"""`replaced`: attributes that are replaced during a run, and functions that are replaced in its thread alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(*places: tuple[Any, str, Any]) -> Iterator[None]:
    """Set attributes, and restore them at the end.

    Args:
        places: an object, the name of an attribute, and its value within the block.

    Yields:
        Nothing.
    """
    known = [vars(owner)[name] for owner, name, _ in places]
    for owner, name, value in places:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for (owner, name, _), value in zip(places, known):
            setattr(owner, name, value)


def in_this_thread(own: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function that runs another one in this thread, and itself in all others.

    Args:
        own: the function.
        plain: takes `own` and its arguments; it runs as it is where this returns `NotImplemented`.

    Returns:
        The function.
    """
    thread = threading.get_ident()

    def chosen(*args: Any, **kwargs: Any) -> Any:
        made = plain(own, *args, **kwargs) if threading.get_ident() == thread else NotImplemented
        return own(*args, **kwargs) if made is NotImplemented else made

    return chosen
