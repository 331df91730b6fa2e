"""`Gathers`: what ranks with parts of one tensor gather, the same calls in the same order on each of them.

A rank that left out one of them would meet its like with another one, or with a call of the training. So the calls of
a block are found before any is made, the ranks agree that all of them have found theirs, and then each rank makes every
one of them, also those that its own work, which may fail, has not come to.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any

from hdi_callback.errors import HDIError
from hdi_callback.monitoring.ranks import Ranks

Gather = Callable[[], AbstractContextManager[Any]]
"""Makes the calls when it is entered, and holds what they gathered until it is left."""


class Gathers:
    """The gathering that is planned and not done yet."""

    def __init__(self) -> None:
        self._planned: list[tuple[Hashable, Gather]] = []

    @contextmanager
    def planned(self, ranks: Ranks, wanted: Iterable[tuple[Hashable, Gather]]) -> Iterator[None]:
        """Agree with the other ranks on what is gathered in the block, all of which is gathered when it ends.

        Args:
            ranks: those that measure together; every one of them calls this.
            wanted: a key and its calls, in the order in which they are made.

        Yields:
            Nothing.

        Raises:
            OtherRankError: if another rank could not find what it would gather.
        """
        if not ranks.hold_parts:
            yield
            return
        found = list(wanted)
        if ranks.agree is not None:
            ranks.agree()
        self._planned = found
        try:
            yield
        except Exception:
            if ranks.give_up is not None:  # others may wait for this rank before a sum, and gather once they know
                ranks.give_up()
            raise
        finally:
            while self._planned:
                self._make_next()

    @contextmanager
    def take(self, key: Hashable) -> Iterator[Any]:
        """Gather what was planned, after everything that was planned before it.

        Args:
            key: of what is gathered.

        Yields:
            What was gathered.

        Raises:
            HDIError: if it was not planned.
        """
        if all(planned != key for planned, _ in self._planned):
            raise HDIError("other ranks hold parts of it, and it was not foreseen that it is gathered")
        while self._planned[0][0] != key:
            self._make_next()
        with ExitStack() as stack:
            yield stack.enter_context(self._planned.pop(0)[1]())

    def _make_next(self) -> None:
        _, gather = self._planned.pop(0)
        with suppress(Exception), gather():
            pass
