"""Pictures during a run, drawn from readings on the host within a share of the run's time."""

from __future__ import annotations

import importlib.util
import io
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hdi_callback.dashboards.figures import WORST_ALIGNMENT, heads_of, layers_that_matter, panel_of
from hdi_callback.dashboards.maps import draw_heads, draw_layers
from hdi_callback.guard import attempt_each
from hdi_callback.monitoring.atomic import write_atomically
from hdi_callback.monitoring.history import read_records
from hdi_callback.monitoring.readings import Record

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from hdi_callback.monitoring.session.sink import Result

SHARE = 0.02
"""Largest share of the run's time for drawing while it goes on."""
SHARE_AT_END = 0.1
"""Largest share of the run's time for all drawing, the last pictures included."""

_FIRST_COST = 2.0  # seconds, before it is measured: the first drawing imports matplotlib and finds fonts
_MOST_POINTS = 1200  # of a curve; then every two neighbours become one
_DOTS_PER_INCH = 90


class Picture:
    """One picture, as pixels.

    Attributes:
        name: ``layers`` or ``heads``.
        pixels: ``(height, width, 3)``, a numpy array of bytes.
        step: optimizer step of the reading.
        axis: position on the trainer's own logging axis.
    """

    def __init__(self, name: str, pixels: Any, step: int, axis: int) -> None:
        self.name, self.pixels, self.step, self.axis = name, pixels, step, axis

    @property
    def tag(self) -> str:
        """Its name in a dashboard."""
        return f"attention_heads/{self.name}"

    def png(self) -> bytes:
        """The picture as a PNG file.

        Returns:
            The bytes of a PNG.
        """
        from PIL import Image

        buffer = io.BytesIO()
        Image.fromarray(self.pixels).save(buffer, format="png")
        return buffer.getvalue()


class Outlet(Protocol):
    """A function that takes pictures."""

    def __call__(self, picture: Picture) -> object:
        """Take a picture."""


def save_in(place: Callable[[], Path]) -> Outlet:
    """Write pictures into a folder, each in place of the one before.

    Args:
        place: returns the folder, which is created with the first picture.

    Returns:
        The outlet.
    """

    def save(picture: Picture) -> None:
        folder = place()
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / f"{picture.name}.png", picture.png())

    return save


def can_draw() -> bool:
    """Return whether matplotlib is installed, without importing it.

    Returns:
        True if it is.
    """
    return importlib.util.find_spec("matplotlib") is not None and importlib.util.find_spec("PIL") is not None


class Pictures:
    """Draws the map of layers over steps, and the heads of the worst layers, at a cadence of its own.

    At every so many readings and at alerts, unless drawing would take more than its share of the run's time: then at
    the first later reading at which it does not. The last reading is drawn as well, if all drawing stays within a tenth
    of the run's time.

    Args:
        outlets: take the pictures.
        every: readings between two sets of pictures.
        before: the history of a run that is resumed, whose earlier readings are drawn as well.
        share: of the run's time while it goes on.
        share_at_end: of the run's time in all.
        clock: seconds.
    """

    name = "drawing pictures"

    def __init__(
        self,
        outlets: Sequence[Outlet],
        *,
        every: int,
        before: Path | None = None,
        share: float = SHARE,
        share_at_end: float = SHARE_AT_END,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._outlets, self._every, self._before = list(outlets), every, before
        self._share, self._share_at_end, self._clock = share, share_at_end, clock
        self._began, self._spent, self._cost = clock(), 0.0, _FIRST_COST
        self._readings, self._is_due = 0, False
        self._steps: list[int] = []
        self._curves: dict[str, list[float]] = {}
        self._alerts: list[tuple[int, str, tuple[int, ...]]] = []
        self._actions: list[tuple[int, str]] = []

    def write(self, result: Result) -> None:
        """Take one reading, and draw if it is due.

        Args:
            result: the result of a reading.
        """
        record = result.record
        self._add(record)
        reported = [alert for alert in result.alerts if alert.level != "notice" and not alert.is_resolved]
        self._alerts += [(alert.step, alert.layer, alert.finding.heads) for alert in reported]
        done = [action for action in result.actions if not action.is_dry_run and not action.is_refusal]
        self._actions += [(record.step, action.layer) for action in done]
        self._is_due = self._is_due or bool(reported) or self._readings % self._every == 0
        self._readings += 1
        share = self._share_at_end if result.is_last else self._share
        if (self._is_due or result.is_last) and self._is_affordable(share):
            self._is_due = False
            self._draw(result)

    def _is_affordable(self, share: float) -> bool:
        return self._spent + self._cost <= share * (self._clock() - self._began)

    def _draw(self, result: Result) -> None:
        began = self._clock()
        try:
            if self._before is not None:
                before, self._before = self._before, None
                self._take_over(before, result.record.step)
            figures = {"layers": self._layers(result), "heads": self._heads(result)}
            step, axis = result.record.step, result.record.axis
            pictures = [
                Picture(name, pixels_of(figure), step, axis) for name, figure in figures.items() if figure is not None
            ]
            attempt_each(partial(outlet, picture) for picture in pictures for outlet in self._outlets)
        finally:
            self._cost = self._clock() - began
            self._spent += self._cost

    def _layers(self, result: Result) -> Figure | None:
        curves = {name: curve for name, curve in self._curves.items() if any(map(math.isfinite, curve))}
        if not curves:
            return None
        pairs = {
            name: tuple(int(head) for head in layer.arrays.get("worst_alignment_pair", ()))
            for name, layer in result.record.layers.items()
        }
        return draw_layers(self._steps, curves, pairs=pairs, alerts=self._alerts, interventions=self._actions)

    def _heads(self, result: Result) -> Figure | None:
        alerted = heads_of(result.active or ())
        record = result.record
        panels = [
            panel_of(name, record.layers[name], matrix, alerted.get(name))
            for name in layers_that_matter(record, alerted)
            if (matrix := record.layers[name].matrices.get("pair_alignment")) is not None
        ]
        return draw_heads(panels, record.step) if panels else None

    def _take_over(self, history: Path, step: int) -> None:
        """Prepend the readings before this process began."""
        known = set(self._steps)
        steps, curves = self._steps, self._curves
        self._steps, self._curves = [], {}
        for record in read_records(history):
            if record.step <= step and record.step not in known:
                self._add(record)
        length = len(self._steps)
        names = list(dict.fromkeys([*self._curves, *curves]))
        missing = [math.nan] * len(steps)
        self._curves = {name: self._curves.get(name, [math.nan] * length) + curves.get(name, missing) for name in names}
        self._steps += steps

    def _add(self, record: Record) -> None:
        for name in record.layers:
            self._curves.setdefault(name, [math.nan] * len(self._steps))
        self._steps.append(record.step)
        for name, curve in self._curves.items():
            layer = record.layers.get(name)
            curve.append(math.nan if layer is None else layer.values.get(WORST_ALIGNMENT, math.nan))
        if len(self._steps) > _MOST_POINTS:
            self._steps = self._steps[::2]
            self._curves = {name: _halved(curve) for name, curve in self._curves.items()}


def _halved(curve: list[float]) -> list[float]:
    """Keep the larger of every two neighbours; NaN is smaller than any number."""
    pairs = zip(curve[::2], [*curve[1::2], math.nan])
    return [max(pair, key=lambda value: -math.inf if math.isnan(value) else value) for pair in pairs]


def pixels_of(figure: Figure) -> Any:
    """Draw a figure.

    Args:
        figure: a matplotlib figure.

    Returns:
        ``(height, width, 3)``, a numpy array of bytes.
    """
    import matplotlib
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    # The user's matplotlib style, such as LaTeX for all texts, must not apply here.
    with matplotlib.rc_context({"text.usetex": False}):
        canvas: Any = FigureCanvasAgg(figure)
        figure.set_dpi(_DOTS_PER_INCH)
        canvas.draw()
        return np.asarray(canvas.buffer_rgba())[..., :3].copy()
