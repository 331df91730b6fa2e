"""Every reason for which a test may be skipped, in one place; `conftest.py` refuses any other."""

NEEDS_GPU = "needs a CUDA device: run on a machine with one"
NEEDS_TORCHVISION = "needs torchvision (which the CPU build of torch lacks): run in an environment with plain torch"

REASONS = frozenset({NEEDS_GPU, NEEDS_TORCHVISION})
