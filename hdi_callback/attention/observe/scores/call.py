"""One call of a torch function, and notes about its input and output tensors."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor

Note = TypeVar("Note")


@dataclass(eq=False)
class Call:
    """One call of a function: its arguments and its result.

    Attributes:
        name: of the function.
        args: by position.
        kwargs: by name.
        result: its output.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any

    @property
    def base(self) -> str:
        """The name of the operation, in place or as an operator or not: ``"add"`` of ``add_`` and ``__iadd__``."""
        plain = self.name.strip("_")
        return plain.removeprefix("i") if self.name.startswith("__i") else plain

    @property
    def values(self) -> tuple[Any, ...]:
        """All arguments."""
        return (*self.args, *self.kwargs.values())

    @property
    def results(self) -> list[Tensor]:
        """Output tensors of the call."""
        made = self.result if isinstance(self.result, (tuple, list)) else (self.result,)
        return [result for result in made if isinstance(result, Tensor)]

    def argument(self, place: int, name: str) -> Any:
        """Return one argument.

        Args:
            place: its position.
            name: of its parameter.

        Returns:
            The argument; None if it was not passed.
        """
        return self.args[place] if len(self.args) > place else self.kwargs.get(name)

    def tensors(self) -> Iterator[Tensor]:
        """Walk the tensors among the arguments, in tuples and lists too.

        Yields:
            Each, in the order in which they were passed.
        """
        for value in self.values:
            for one in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(one, Tensor):
                    yield one


def from_the_end(dim: int, dims: int) -> int:
    """Count a dimension from the last.

    Args:
        dim: the dimension, counted from either side.
        dims: how many there are.

    Returns:
        The same dimension as a negative number.
    """
    return dim if dim < 0 else dim - dims


class TensorNotes(Generic[Note]):
    """Facts about tensors, each by identity; none is kept alive by it."""

    def __init__(self) -> None:
        self._notes: dict[int, tuple[weakref.ref[Tensor], Note]] = {}

    def __bool__(self) -> bool:
        return bool(self._notes)

    def __setitem__(self, tensor: Tensor, note: Note) -> None:
        key, notes = id(tensor), self._notes
        notes[key] = weakref.ref(tensor, lambda _: notes.pop(key, None)), note

    def get(self, tensor: Any) -> Note | None:
        """Return the note of a tensor.

        Args:
            tensor: anything.

        Returns:
            The note; None if there is none.
        """
        known = self._notes.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None

    def clear(self) -> None:
        """Forget all tensors."""
        self._notes.clear()
