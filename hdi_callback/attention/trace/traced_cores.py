"""`TracedCores`: the attention cores of a traced run, and of further runs of the same copy."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from hdi_callback.attention.trace.cores import Core, cores_of
from hdi_callback.attention.trace.draw import Draw
from hdi_callback.attention.trace.run import Traceable
from hdi_callback.attention.trace.support import Support, random_weights
from hdi_callback.attention.trace.traced_run import TracedRun


class TracedCores:
    """One run, and others of the same copy that tell what is linear and what is centred."""

    def __init__(self, traceable: Traceable, args: Any, kwargs: Any, run: TracedRun, cores: list[Core]) -> None:
        self.traceable, self.args, self.kwargs, self.run, self.cores = traceable, args, kwargs, run, cores
        self.leaves = run.leaves
        self.tensors = run.tensors
        self._fed: dict[int, Support] = {}

    def fed(self, leaf: int) -> Support:
        """The part of the input of a map that other maps, parameters or inputs make."""
        if leaf not in self._fed:
            taken = self.leaves[leaf].taken
            self._fed[leaf] = Support.of(taken, random_weights(taken.shape), self.tensors)
        return self._fed[leaf]

    def inputs_of(self, leaf: int) -> Support:
        """The part of the input of a map that inputs of the run make without another map in between."""
        taken = self.leaves[leaf].taken
        inputs = [one for name, one in self.run.others.items() if name.startswith("input")]
        return Support.of(taken, random_weights(taken.shape), inputs)

    def takes_input(self, leaf: int) -> bool:
        """Return whether a map takes something of the inputs without another map in between."""
        return bool(self.inputs_of(leaf))

    def is_of_inputs(self, leaf: int, depth: int = 8) -> bool:
        """Return whether what a map gives depends on inputs at all; tables of positions do not."""
        return self.takes_input(leaf) or (
            depth > 0 and any(self.is_of_inputs(other, depth - 1) for other in self.fed(leaf).masks if other != leaf)
        )

    @cached_property
    def again(self) -> list[list[Core]]:
        """The cores when maps answer nothing, one draw, another, and their sum."""
        return [self.without_maps[1], *(cores for _, cores in self.with_draws)]

    @cached_property
    def with_draws(self) -> list[tuple[TracedRun, list[Core]]]:
        """The runs in which maps answer one draw, another, and their sum."""
        shares = ((1.0, 0.0), (0.0, 1.0), (1.0, 1.0))
        runs = [self.traceable.run(self.args, self.kwargs, Draw(share)) for share in shares]
        return [(run, cores_of(run)) for run in runs]

    @cached_property
    def without_maps(self) -> tuple[TracedRun, list[Core]]:
        """The run in which maps answer nothing."""
        run = self.traceable.run(self.args, self.kwargs, Draw((0.0, 0.0)))
        return run, cores_of(run)

    @cached_property
    def with_means(self) -> tuple[TracedRun, list[Core]]:
        """The run in which the means that norms subtract are no constants."""
        run = self.traceable.run(self.args, self.kwargs, Draw(), keeps_means=True)
        return run, cores_of(run)

    def parameter_of(self, leaf: int) -> str:
        """Give the dotted path of the matrix of a map.

        Args:
            leaf: number of the call.

        Returns:
            The path in the module that was run.
        """
        return self.leaves[leaf].parameter
