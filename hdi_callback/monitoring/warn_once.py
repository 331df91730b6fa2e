"""`WarnOnce`: a failure of monitoring costs one warning, never the run."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
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
    def guard(self, work: str, *, passes: tuple[type[Exception], ...] = ()) -> Iterator[None]:
        """Turn any exception of the block but `passes` into a warning; `work` says in the user's terms what failed."""
        let_through: tuple[type[Exception], ...] = (NothingToWatchError, *passes)
        try:
            yield
        except let_through:  # errors that the user asked for, with `strict`
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
