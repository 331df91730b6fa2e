"""`Collected`: what armed forwards captured, until it is measured."""

from __future__ import annotations

from hdi_callback.attention import AttentionLayer, Capture


class Collected:
    """Captures of layers, from the forward to the measurement."""

    _tapped: list[AttentionLayer]
    _captures: dict[str, Capture] | None = None

    @property
    def has_collected(self) -> bool:
        """Whether a forward was armed for the next measurement."""
        return self._captures is not None

    @property
    def tapped(self) -> list[AttentionLayer]:
        """The layers that are captured."""
        return self._tapped

    def join_measurement(self) -> None:
        """Take part in the measurement of other ranks' captures without one of this rank's own."""
        self._captures = {} if self._captures is None else self._captures

    def clear(self) -> None:
        """Release the captures after the measurement."""
        self._captures = None
