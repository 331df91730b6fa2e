"""Lightning trainers that write nothing and show nothing, unless a test asks for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L


def trainer_for(folder: Path, *callbacks: L.Callback, **options: Any) -> L.Trainer:
    """Make a trainer of one epoch on the CPU."""
    settings = {
        "default_root_dir": folder, "accelerator": "cpu", "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "max_epochs": 1, "callbacks": list(callbacks),
    }  # fmt: skip
    return L.Trainer(**(settings | options))
