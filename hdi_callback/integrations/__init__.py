"""Shells around the trainers."""

import sys

# Asked before any shell loads it: whether it is the user who works with `lightning`, or with `pytorch_lightning` alone.
LIGHTNING_WAS_LOADED = "lightning" in sys.modules
