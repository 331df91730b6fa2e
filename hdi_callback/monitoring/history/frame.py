"""A history file as a pandas table."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hdi_callback.errors import MisconfigurationError
from hdi_callback.monitoring.history.run_history import read_records

if TYPE_CHECKING:
    import pandas as pd


def load_history(path: str | os.PathLike[str]) -> pd.DataFrame:
    """Load a history file as a table, also while training goes on.

    Args:
        path: a history file, ``<log directory>/hdi/history.jsonl``.

    Returns:
        A frame with one row for each step and layer: ``step``, ``epoch``, ``time`` (seconds since the Unix epoch),
        ``layer``, one column per metric (NaN where it could not be measured), and the heads of the worst pair.

    Raises:
        MisconfigurationError: if there is no such file, or pandas is not installed.

    Example:
        >>> import tempfile, pathlib
        >>> from hdi_callback.monitoring.history import History
        >>> from hdi_callback.monitoring.readings import LayerRecord, Record
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "history.jsonl"
        >>> History(path).write(Record(step=50, layers={"attn": LayerRecord(values={"hdi": 0.75})}))
        >>> load_history(path)[["step", "layer", "hdi"]].values.tolist()
        [[50, 'attn', 0.75]]
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise MisconfigurationError("A history frame needs pandas: pip install 'hdi-callback[reports]'.") from error
    rows = [
        {
            **dict.fromkeys(("step", "epoch", "time", "layer")),
            **layer.values,
            **({"worst_pair": tuple(layer.arrays["worst_pair"])} if "worst_pair" in layer.arrays else {}),
            "step": record.step,
            "epoch": record.epoch,
            "time": record.time,
            "layer": name,
        }
        for record in read_records(path)
        for name, layer in record.layers.items()
    ]
    frame: pd.DataFrame = pd.DataFrame(rows, columns=None if rows else ["step", "epoch", "time", "layer"])
    return frame
