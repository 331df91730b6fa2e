"""The callbacks for each trainer."""

import sys

# Checked before any callback imports it: does the user work with `lightning`, or with `pytorch_lightning` only?
LIGHTNING_WAS_LOADED = "lightning" in sys.modules
