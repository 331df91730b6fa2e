"""`Absent`: what a reading lacks, with the reason; each kind of reason is reported once."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from hdi_callback.attention import ROLES
from hdi_callback.errors import HDIError
from hdi_callback.monitoring.metrics import COVARIANCE
from hdi_callback.monitoring.warn_once import WarnOnce

FOUND_LATE = "its heads were found in the forward of this reading, and are captured from the next one that is read"


class ContradictedError(HDIError):
    """The heads of a layer are not what was claimed, which was said when it was found."""


class Absent:
    """Collect what could not be measured at one reading.

    Args:
        warn_once: warns once for each kind of reason.
        reasons: what is known so far: layer, or source and layer -> reason.
        unasked: sources that are measured for the default rules alone: what they lack is noted, and nobody is warned.

    Attributes:
        reasons: those known at first, and what was noted since.
        unasked: see above.
    """

    def __init__(
        self, warn_once: WarnOnce, reasons: dict[str, str] | None = None, *, unasked: Collection[str] = ()
    ) -> None:
        self.reasons: dict[str, str] = {} if reasons is None else reasons
        self._warn_once, self.unasked = warn_once, unasked

    def leave_out(self, what: str, reason: str, kind: str) -> None:
        """Note a reason, and warn if it is the first of its kind.

        Args:
            what: what `absence_of` gives.
            reason: why.
            kind: reasons of one kind are reported once.
        """
        self.reasons[what] = reason
        if what.partition("/")[0] in self.unasked:
            return
        self._warn_once.warn(
            kind,
            f"{what}: {reason}. It is left out of such readings, and so is every layer of which this holds; training "
            "goes on.",
        )

    def leave_all_out(self, source: str, layers: Sequence[str], reason: str, kind: str) -> None:
        """Note one reason for several layers.

        Args:
            source: what was to be measured.
            layers: their names.
            reason: why.
            kind: reasons of one kind are reported once.
        """
        for name in layers:
            self.leave_out(absence_of(source, name), reason, kind)

    @contextmanager
    def unless_measured(self, source: str, layer: str) -> Iterator[None]:
        """Leave a layer out of the reading if the block fails.

        Args:
            source: what is measured.
            layer: its name.
        """
        try:
            yield
        except ContradictedError as error:
            self.reasons[absence_of(source, layer)] = str(error)
        except Exception as error:
            kind = f"reading {source} {type(error).__name__}"
            if source in ROLES:
                reason = f"its {source} weight cannot be read ({error})"
            elif source == COVARIANCE:
                reason = f"they cannot be measured ({error})"
            else:
                reason = f"cannot be measured ({error})"
            self.leave_out(absence_of(source, layer), reason, kind)


def absence_of(source: str, layer: str) -> str:
    """Give the key under which a layer is said to lack something.

    Args:
        source: a role of weights, or what else is measured.
        layer: name of the layer.

    Returns:
        The name alone for a weight, as nothing is known of the layer then; source and name for all else.
    """
    return layer if source in ROLES else f"{source}/{layer}"


def listed(names: Sequence[str]) -> str:
    """Name at most three things.

    Args:
        names: all of them.

    Returns:
        Text for a message.
    """
    shown = ", ".join(f"`{name}`" for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
