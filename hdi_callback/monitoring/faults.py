"""What goes wrong while monitoring costs one warning, never the run."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from hdi_callback.errors import MonitoringWarning


class Faults:
    """Turn failures into one warning for each kind of work, and count them.

    Example:
        >>> import warnings
        >>> faults = Faults()
        >>> with warnings.catch_warnings(record=True) as seen:
        ...     warnings.simplefilter("always")
        ...     for _ in range(3):
        ...         with faults.contained("writing the history"):
        ...             raise OSError("disk full")
        >>> len(seen), faults.count["writing the history"]
        (1, 3)
    """

    def __init__(self) -> None:
        self.count: dict[str, int] = {}

    @contextmanager
    def contained(self, work: str) -> Iterator[None]:
        """Contain any exception of the block; `work` names what was being done, in the user's words."""
        try:
            yield
        except Exception as error:
            self.tell(work, error)

    def tell(self, work: str, error: Exception) -> None:
        """Warn that `work` failed with `error`, once for each kind of work."""
        self.say(work, f"{work} failed ({type(error).__name__}: {error}). Training goes on.")

    def say(self, kind: str, message: str) -> None:
        """Warn with `message`, once for each `kind`."""
        self.count[kind] = self.count.get(kind, 0) + 1
        if self.count[kind] == 1:
            warnings.warn(message, MonitoringWarning, stacklevel=3)
