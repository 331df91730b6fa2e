"""The history of a run: a file of JSON lines, with the matrices over heads beside it."""

from hdi_callback.history.load import RunHistory, load_history
from hdi_callback.history.writer import History

__all__ = ["History", "RunHistory", "load_history"]
