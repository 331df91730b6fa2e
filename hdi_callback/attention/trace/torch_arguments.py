"""Arguments of torch's functions, by position or by name."""

from __future__ import annotations

from typing import Any


def torch_arguments(args: Any, kwargs: Any, *names: str) -> tuple[Any, ...]:
    """Return the arguments of a call in the order of their names.

    Args:
        args: by position.
        kwargs: by name.
        names: of the function's arguments, in its order.

    Returns:
        One value for each name, `None` for what was not passed.
    """
    return tuple(args[i] if len(args) > i else kwargs.get(name) for i, name in enumerate(names))
