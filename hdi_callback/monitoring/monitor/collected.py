"""`Collected`: what armed forwards captured, until it is measured."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import cast

from torch import Tensor

from hdi_callback.attention import AttentionLayer, Capture
from hdi_callback.attention.layer.sharding import is_part, whole
from hdi_callback.monitoring.monitor.gathers import Gather
from hdi_callback.monitoring.monitor.weights import WeightReader


class Collected:
    """Captures of layers, from the forward to the measurement."""

    _tapped: list[AttentionLayer]
    _captures: dict[str, Capture] | None = None
    _reader: WeightReader

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

    def _gathered(self, layer: AttentionLayer) -> Iterator[tuple[Hashable, Gather]]:
        """What `_whole` gathers of a captured layer, for `Gathers.planned`."""
        capture = None if self._captures is None else self._captures.get(layer.name)
        if capture is not None and is_part(capture.outputs):
            yield (layer.name, "captured"), partial(_gathering, capture.outputs)

    def _whole(self, layer: AttentionLayer, captured: Tensor) -> Tensor:
        """Gather what was captured of a layer where other ranks hold parts of it."""
        if not is_part(captured):
            return captured
        with self._reader.gathers.take((layer.name, "captured")) as gathered:
            return cast("Tensor", gathered)

    def clear(self) -> None:
        """Release the captures after the measurement."""
        self._captures = None


@contextmanager
def _gathering(captured: Tensor) -> Iterator[Tensor]:
    yield whole(captured)
