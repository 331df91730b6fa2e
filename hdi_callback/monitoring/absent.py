"""`Absent`: quantities that a reading lacks, with reasons; warns once of each kind of reason."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from hdi_callback.attention import ROLES
from hdi_callback.errors import HDIError
from hdi_callback.monitoring.metrics import COVARIANCE
from hdi_callback.monitoring.warn_once import WarnOnce, describe

FOUND_LATE = "its heads were found in the forward of this reading, and are captured from the next one that is read"


class ContradictedError(HDIError):
    """A forward contradicted the heads of a layer, of which the user has been warned."""


class Absent:
    """Quantities that could not be measured at one reading, with reasons.

    Args:
        warn_once: warns once for each kind of reason.
        reasons: reasons known so far: layer, or source and layer -> reason.
        quiet_sources: sources that only the default rules need: their absence is noted without a warning.

    Attributes:
        reasons: all reasons so far.
        quiet_sources: see above.
    """

    def __init__(
        self, warn_once: WarnOnce, reasons: dict[str, str] | None = None, *, quiet_sources: Collection[str] = ()
    ) -> None:
        self.reasons: dict[str, str] = {} if reasons is None else reasons
        self._warn_once, self.quiet_sources = warn_once, quiet_sources

    def leave_out(self, what: str, reason: str, kind: str, cause: str = "") -> None:
        """Note that something is absent, and warn if the reason is the first of its kind.

        Args:
            what: key, see `absence_of`.
            reason: why.
            kind: reasons of one kind are reported once.
            cause: where a layer fails in several ways for one cause, the first is reported.
        """
        self.reasons[what] = reason
        if what.partition("/")[0] in self.quiet_sources or (cause and not self._warn_once.is_first(cause)):
            return
        self._warn_once.warn(
            kind,
            f"{what}: {reason}. It is left out of these readings, as is every layer with this reason; training "
            "goes on.",
        )

    def leave_all_out(self, source: str, layers: Sequence[str], reason: str, kind: str) -> None:
        """Note one reason for several layers.

        Args:
            source: the source that could not be measured.
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
            source: the source.
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
            self.leave_out(absence_of(source, layer), reason, kind, cause=f"{layer}: {describe(error)}")


def absence_of(source: str, layer: str) -> str:
    """Key of an absent quantity of a layer.

    Args:
        source: a role of weights, or another source.
        layer: name of the layer.

    Returns:
        The layer's name for a weight, without which nothing is measured; else source and name.
    """
    return layer if source in ROLES else f"{source}/{layer}"


def listed(names: Sequence[str]) -> str:
    """At most three names, as a list for a message.

    Args:
        names: all of them.

    Returns:
        Text for a message.
    """
    shown = ", ".join(f"`{name}`" for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
