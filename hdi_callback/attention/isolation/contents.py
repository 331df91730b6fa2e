"""Contents of objects, read and restored past the methods of their classes, which may do anything when called."""

from __future__ import annotations

import collections
import itertools
from typing import Any

import torch
from torch import Tensor

ATOMS = (type(None), bool, int, float, complex, str, bytes, range, torch.dtype, torch.device, torch.Size, torch.layout)
"""Types of objects that hold no others and never change."""


def attributes_of(one: Any) -> dict[str, Any] | None:
    """Read the attributes of an instance without its class, whose `__getattribute__` may do anything.

    Args:
        one: any object.

    Returns:
        Its own dictionary; `None` if it has none.
    """
    try:
        found = object.__getattribute__(one, "__dict__")
    except AttributeError:
        return None
    return found if isinstance(found, dict) else None


def has_memory(tensor: Tensor) -> bool:
    """Return whether the elements of a tensor may be read.

    FSDP1 frees the memory of whole weights between forwards, while modules still hold views of it. Reading one
    ends the process with a segmentation fault.

    Args:
        tensor: any tensor.

    Returns:
        False if its memory was freed; True for tensors that keep their elements elsewhere, such as sparse ones.
    """
    if tensor.layout is not torch.strided or not tensor.numel():
        return True
    last = tensor.storage_offset() + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    try:
        held = tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):  # wrappers around other tensors have no storage
        return True
    return held >= (last + 1) * tensor.element_size()


def kind_of(one: Any) -> Any:
    """Find Python's own class of a container, whose methods call no code of a subclass.

    Args:
        one: the container.

    Returns:
        The class.
    """
    kinds = (collections.OrderedDict, dict, set, list, collections.deque, bytearray)
    return next(kind for kind in kinds if isinstance(one, kind))


def items_of(one: Any) -> list[Any]:
    """List the items of a container; to ask the class of a lazy mapping may import a whole library.

    Args:
        one: of one of Python's own kinds, or a subclass.

    Returns:
        Its items, those of a dictionary as pairs.
    """
    kind = kind_of(one)
    return list(kind.items(one) if isinstance(one, dict) else kind.__iter__(one))


def refill(one: Any, items: list[Any]) -> None:
    """Replace the items of a container; the class of a `Counter` would count them.

    Args:
        one: the container.
        items: as `items_of` gives them.
    """
    kind = kind_of(one)  # an OrderedDict keeps an order of its own beside that of a dict
    kind.clear(one)
    if isinstance(one, dict):
        for name, value in items:
            kind.__setitem__(one, name, value)
    elif isinstance(one, set):
        set.update(one, items)
    else:
        kind.extend(one, items)


def are_same(now: list[Any], before: list[Any]) -> bool:
    """Return whether two lists of items hold the same objects.

    Args:
        now: as `items_of` returns them.
        before: at another time.

    Returns:
        True if so; equal objects are not the same.
    """
    if len(now) != len(before):
        return False
    for item, other in zip(now, before):
        if item is other:
            continue
        is_item = isinstance(item, tuple) and isinstance(other, tuple) and len(item) == len(other) == 2
        if not is_item or item[0] is not other[0] or item[1] is not other[1]:
            return False
    return True


def counters_in(items: list[Any]) -> dict[int, str]:
    """Find the counters of itertools among some items.

    Args:
        items: as `items_of` gives them.

    Returns:
        Their places, and what they are at.
    """
    found = {}
    for place, item in enumerate(items):
        value = item[1] if isinstance(item, tuple) and len(item) == 2 else item
        if isinstance(value, itertools.count):
            found[place] = repr(value)
    return found


def rewind(items: list[Any], counters: dict[int, str]) -> None:
    """Replace counters that have counted; nothing sets one back.

    Args:
        items: as `items_of` returned them.
        counters: what `counters_in` found among them.
    """
    for place, before in counters.items():
        item = items[place]
        value = item[1] if isinstance(item, tuple) else item
        if repr(value) != before:  # "count(5)" or "count(5, 2)", of whole numbers
            again = itertools.count(*(int(number) for number in before[6:-1].split(",")))
            items[place] = (item[0], again) if isinstance(item, tuple) else again
