"""The callbacks for each trainer: thin shells that unpack the framework's objects and delegate to a `Session`."""

import sys

# Asked before any callback imports it: does the user work with `lightning`, or with `pytorch_lightning` only?
LIGHTNING_WAS_LOADED = "lightning" in sys.modules
