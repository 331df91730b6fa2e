"""`WarnOnce`: a failure of monitoring costs one warning, never the run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from hdi_callback.attention.names import printable
from hdi_callback.errors import MonitoringWarning, NothingToWatchError


class WarnOnce:
    """Turn failures into one warning for each kind of work, and count them.

    Example:
        >>> import warnings
        >>> warn_once = WarnOnce()
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     for _ in range(3):
        ...         with warn_once.guard("writing the history"):
        ...             raise OSError("disk full")
        >>> len(caught), warn_once.count["writing the history"]
        (1, 3)
    """

    def __init__(self) -> None:
        self.count: dict[str, int] = {}

    @contextmanager
    def guard(self, work: str) -> Iterator[None]:
        """Turn any exception of the block into a warning; `work` says in the user's terms what failed."""
        try:
            yield
        except NothingToWatchError:  # an error that the user asked for, with `strict` or by warnings as errors
            raise
        except Exception as error:
            self.error(work, error)

    def error(self, work: str, error: Exception) -> None:
        """Warn that `work` failed with `error`, once for each kind of work."""
        self.warn(work, f"{work} failed ({describe(error)}). Training goes on.")

    def is_first(self, kind: str) -> bool:
        """Count a failure of a kind, and return whether it is the first one."""
        self.count[kind] = self.count.get(kind, 0) + 1
        return self.count[kind] == 1

    def warn(self, kind: str, message: str) -> None:
        """Warn with `message`, once for each `kind`."""
        if self.is_first(kind):
            warnings.warn(printable(message), MonitoringWarning, stacklevel=3)


def describe(error: BaseException) -> str:
    """Type and message of an exception, even if its `__str__` raises.

    Args:
        error: any exception.

    Returns:
        One line.
    """
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


def attempt_each(actions: Iterable[Callable[[], object]]) -> None:
    """Run each of several actions, even if earlier ones fail.

    Args:
        actions: the actions, in order.

    Raises:
        Exception: the first failure, after all actions were tried.

    Example:
        >>> done = []
        >>> attempt_each([lambda: done.append(1), lambda: 1 / 0, lambda: done.append(3)])
        Traceback (most recent call last):
        ZeroDivisionError: division by zero
        >>> done
        [1, 3]
    """
    first: Exception | None = None
    for action in actions:
        try:
            action()
        except Exception as error:  # noqa: PERF203
            first = error if first is None else first
    if first is not None:
        raise first
