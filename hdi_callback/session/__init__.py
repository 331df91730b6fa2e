"""One watched run: its settings, its schedule, what it resumes, and the protocol of a trainer."""

from hdi_callback.session.session import Session
from hdi_callback.session.settings import Settings
from hdi_callback.session.trainer import Trainer

__all__ = ["Session", "Settings", "Trainer"]
