"""Run user code without side effects: the one way in which this package calls code that is not its own.

Trials of a module, copies of it, and reading a weight that a parametrization computes all run code that the user wrote
for training. It may draw random numbers, count its calls, add to a list, print, or end the process. `isolated` puts
back everything that such code can reach, and keeps settings of the user's away from it; `isolated_copy` gives a copy
that calls no hook.

    with isolated(module, seed=0):
        trial = isolated_copy(module)
        trial.forward(torch.randn(1, 8, 64))

What is not put back: files and other processes, what C extensions keep, and tensors of more than 65,536 elements that
are reached other than as parameters and buffers of the copy.
"""

from hdi_callback.attention.isolation.collectives import collectives_within
from hdi_callback.attention.isolation.contents import ATOMS, attributes_of, has_memory
from hdi_callback.attention.isolation.copies import HOOKS, isolated_copy
from hdi_callback.attention.isolation.deadline import Deadline
from hdi_callback.attention.isolation.isolated import MOST_SECONDS, IsolationError, isolated, without_other_ranks

__all__ = [
    "ATOMS",
    "HOOKS",
    "MOST_SECONDS",
    "Deadline",
    "IsolationError",
    "attributes_of",
    "collectives_within",
    "has_memory",
    "isolated",
    "isolated_copy",
    "without_other_ranks",
]  # fmt: skip
