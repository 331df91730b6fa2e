"""`load_history`: a history file, read back."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hdi_callback.arguments import file_path, one_of
from hdi_callback.dashboards.pictures import draw_curves, svg, svg_style
from hdi_callback.dashboards.report import page_of
from hdi_callback.dashboards.verdict import events, verdict
from hdi_callback.errors import MisconfigurationError
from hdi_callback.history.lines import from_text, matrices_folder, record_from_line
from hdi_callback.monitor.metrics import check_metrics
from hdi_callback.record import Alert, Record

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@dataclass(frozen=True, repr=False)
class RunHistory:
    """A run, as read from its history."""

    path: Path  #: the file
    layers: Sequence[Mapping[str, Any]]  #: the facts of the layers
    records: Sequence[Record]  #: the readings in the order of steps, without matrices
    skipped_lines: int = 0  #: that could not be read, such as one that was being written when its process was killed

    def __repr__(self) -> str:
        return f"<RunHistory: {self.path}, {len(self.records)} readings of {len(self.layers)} layers>"

    @property
    def alerts(self) -> tuple[Alert, ...]:
        """The alerts of the run, one for each event: as it began, with the level and the sentence that it came to.

        The status of one that is over is ``"resolved"``, and `Alert.ended` its end.
        """
        return tuple(events(self.records))

    def plot(self, layer: str | None = None) -> Figure:
        """Return a figure of the curves of the run, or of one layer, with alerts and interventions marked.

        Args:
            layer: name of the layer; by default the extremes and means over all layers are drawn.

        Raises:
            MisconfigurationError: if there is no such layer, or nothing was measured.
        """
        if layer is not None:
            one_of("layer", layer, [facts["name"] for facts in self.layers])
        with svg_style():
            figure = draw_curves(self.records, layer)
        if figure is None:
            raise MisconfigurationError(f"There is nothing to draw: {verdict(self.records, self.layers).text}")
        drawn: Any = figure
        drawn._repr_html_ = lambda: svg(figure, f"Curves of {layer or 'the model'} over the steps")
        return figure

    def _repr_html_(self) -> str:
        """Return the report, for a notebook, whose styles and those of the page leave each other alone."""
        return f'<iframe srcdoc="{escape(page_of(self))}" style="width: 100%; height: 640px; border: 0"></iframe>'

    def series(self, metric: str) -> dict[str, list[float]]:
        """Return layer -> the values of a metric, one for each record, NaN where it was not measured."""
        check_metrics([metric])
        names = dict.fromkeys(name for record in self.records for name in record.layers)
        values = [record.values(metric) for record in self.records]
        return {name: [at.get(name, math.nan) for at in values] for name in names}

    @property
    def matrix_steps(self) -> list[int]:
        """Steps of which matrices are kept: the first, every tenth, those with new alerts, and the last."""
        files = matrices_folder(self.path).glob("step_*.npz")
        return sorted(int(file.stem.removeprefix("step_")) for file in files)

    def matrices(self, step: int) -> dict[str, dict[str, Tensor]]:
        """Read the matrices over heads of a step.

        Args:
            step: one of `matrix_steps`.

        Returns:
            Layer -> name -> ``(H, H)``, with three digits; empty if none are kept. Of a layer that a new alert accuses
            also ``"attention_pattern_140"`` -> ``(H, 32, 32)``: its patterns of attention at step 140, before the
            alert, and at its own.
        """
        by_layer: dict[str, dict[str, Tensor]] = {}
        file = matrices_folder(self.path) / f"step_{step:09d}.npz"
        if file.is_file():
            with np.load(file) as arrays:
                for key in arrays.files:
                    layer, _, name = key.rpartition("/")
                    by_layer.setdefault(layer, {})[name] = torch.from_numpy(arrays[key].astype(np.float32))
        return by_layer

    def to_frame(self) -> pd.DataFrame:
        """Return a table with a row for each step and layer: step, time, loss, layer, and every metric."""
        import pandas as pd

        rows: list[dict[str, Any]] = [
            {"step": record.step, "time": record.time, "loss": record.loss, "layer": name} | layer.values
            for record in self.records
            for name, layer in record.layers.items()
        ]
        frame: pd.DataFrame = pd.DataFrame(rows, columns=None if rows else ["step", "time", "loss", "layer"])
        return frame


def load_history(run: str | os.PathLike[str]) -> RunHistory:
    """Return the readings, alerts and actions of a run, also while training goes on.

    Args:
        run: the file, or a folder that contains it at any depth; of several the newest is taken.

    Raises:
        MisconfigurationError: if there is no history.

    Example:
        >>> import tempfile
        >>> from hdi_callback.history import History
        >>> folder = tempfile.mkdtemp()
        >>> history = History(f"{folder}/hdi/history.jsonl", [{"name": "blocks.0.attn", "num_heads": 4}])
        >>> history.write(Record(step=0, layers={}))
        >>> load_history(folder).records
        (<Record at step 0: 0 layers, no active alert>,)
    """
    folder = file_path("run", run, "lightning_logs/version_0")
    files = [folder] if folder.is_file() else list(folder.rglob("history*.jsonl"))
    if not files:
        raise MisconfigurationError(
            f"There is no `history.jsonl` in `{folder}`, nor in a folder below it: its run has not begun, watches no "
            "layer, or has `history=False`. Write the file, or the folder of a run."
        )
    path = max(files, key=lambda file: file.stat().st_mtime)
    header: dict[str, Any] = {}
    records: dict[int, Record] = {}
    skipped = 0
    active: tuple[Alert, ...] = ()
    with path.open("rb") as file:
        for number, text in enumerate(file):
            line = from_text(text)
            if number == 0 and line is not None and "step" not in line:
                header = line
                continue
            try:
                record = record_from_line(line or {}, active)
            except (AttributeError, KeyError, TypeError, ValueError):  # written in part, or JSON of somebody else's
                skipped += bool(text.strip())
                continue
            records[record.step], active = record, record.active
    return RunHistory(path, header.get("layers", []), tuple(records[step] for step in sorted(records)), skipped)
