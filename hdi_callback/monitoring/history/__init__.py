"""The history of a run on disk: one JSON object a line, append-only, readable while training goes on.

The matrices are in a file beside it, see `matrices`, as they are large; ``docs/history.md`` describes both.

Four kinds of line: ``run`` (a training run starts or resumes at a step, with its layers and its id), ``reading`` (the
numbers of one step), ``alert`` and ``intervention``. A resumed run goes back to the last reading that its checkpoint
knows: lines that an interrupted run had written beyond that stay in the file, and are skipped by the readers here.
"""

from hdi_callback.monitoring.history.frame import load_history
from hdi_callback.monitoring.history.run_history import RunHistory, read_history, read_records
from hdi_callback.monitoring.history.scan import FORMAT, read_lines, run_lines
from hdi_callback.monitoring.history.writer import DEFAULT_BUDGET, History

__all__ = [
    "DEFAULT_BUDGET",
    "FORMAT",
    "History",
    "RunHistory",
    "load_history",
    "read_history",
    "read_lines",
    "read_records",
    "run_lines",
]
