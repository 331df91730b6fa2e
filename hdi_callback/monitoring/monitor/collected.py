"""`Collected`: captures of layers, kept until they are measured."""

from __future__ import annotations

from hdi_callback.attention import AttentionLayer, Capture


class Collected:
    """Captures of layers between the forward that they are of and their measurement."""

    _tapped: list[AttentionLayer]
    _captures: dict[str, Capture] | None = None

    @property
    def has_collected(self) -> bool:
        """Whether a forward was to be captured for the measurement that follows."""
        return self._captures is not None

    @property
    def tapped(self) -> list[AttentionLayer]:
        """The layers that are captured."""
        return self._tapped

    def take_part(self) -> None:
        """Measure what other ranks have captured, though no forward was to be captured on this one."""
        self._captures = {} if self._captures is None else self._captures

    def forget(self) -> None:
        """Let go of what was collected, once it is measured."""
        self._captures = None
