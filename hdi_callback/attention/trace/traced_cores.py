"""`TracedCores`: the attention cores of a traced run, and of further runs of the same copy."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from torch import Tensor, nn

from hdi_callback.attention.layer.heads import Role
from hdi_callback.attention.trace.cores import Core, cores_of
from hdi_callback.attention.trace.draw import Draw
from hdi_callback.attention.trace.run import Traceable
from hdi_callback.attention.trace.support import Support
from hdi_callback.attention.trace.traced_run import TracedRun

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class TracedCores:
    """One run, and others of the same copy that show what is linear and what is centred."""

    def __init__(
        self,
        traceable: Traceable,
        args: Any,
        kwargs: Any,
        run: TracedRun,
        cores: list[Core],
        *,
        is_synthetic: bool = False,
    ) -> None:
        self.is_synthetic = is_synthetic
        self.traceable, self.args, self.kwargs, self.run, self.cores = traceable, args, kwargs, run, cores
        self.leaves = run.leaves
        self._fed: dict[int, Support] = {}

    def fed(self, leaf: int) -> Support:
        """Support of the input of a map in the outputs of other maps."""
        if leaf not in self._fed:
            self._fed[leaf] = self.run.support(self.leaves[leaf].input)
        return self._fed[leaf]

    def inputs_of(self, leaf: int) -> Support:
        """Support of the input of a map in the inputs of the run, without another map in between."""
        return Support.of(self.leaves[leaf].input, self.run.inputs)

    def is_of_inputs(self, leaf: int, depth: int = 8) -> bool:
        """Return whether the output of a map depends on inputs at all; tables of positions do not."""
        return bool(self.inputs_of(leaf)) or (
            depth > 0 and any(self.is_of_inputs(other, depth - 1) for other in self.fed(leaf).masks if other != leaf)
        )

    def source_matrix(self, tensor: Tensor) -> str | None:
        """Return the path of a matrix that a tensor is computed with and that is of no linear map."""
        parameters = self.run.parameters
        made = Support.of(tensor, list(parameters.values())).masks
        numbered = enumerate(parameters.items())
        return next(
            (name for at, (name, one) in numbered if at in made and sum(size > 1 for size in one.shape) > 1), None
        )

    def source_convolution(self, role: Role, tensor: Tensor) -> str:
        """The convolution over several tokens that queries, keys or values come from, in words.

        Args:
            role: which of them.
            tensor: they themselves.

        Returns:
            A clause; empty where no convolution that is a module gives them.
        """
        run = self.run
        made = Support.of(tensor, list(run.parameters.values())).masks if run.convolved else {}
        for at, name in enumerate(run.parameters):
            path, _, _ = name.rpartition(".")
            if at in made and isinstance(run.module.get_submodule(path), _CONVOLUTIONS):
                return f"its {role}s come from the convolution `{path}`, whose filters cover several tokens"
        return ""

    @cached_property
    def again(self) -> list[list[Core]]:
        """The cores of four runs, in which maps output zero, one draw, another, and their sum."""
        return [self.without_maps[1], *(cores for _, cores in self.with_draws)]

    @cached_property
    def with_draws(self) -> list[tuple[TracedRun, list[Core]]]:
        """Three runs, in which maps output one draw, another, and their sum."""
        return [self._run(Draw(shares)) for shares in ((1.0, 0.0), (0.0, 1.0), (1.0, 1.0))]

    @cached_property
    def without_maps(self) -> tuple[TracedRun, list[Core]]:
        """The run in which maps output zero."""
        return self._run(Draw((0.0, 0.0)))

    @cached_property
    def with_means(self) -> tuple[TracedRun, list[Core]]:
        """The run in which the means that norms subtract depend on the features."""
        return self._run(Draw(keeps_means=True))

    def _run(self, draw: Draw) -> tuple[TracedRun, list[Core]]:
        run = self.traceable.run(self.args, self.kwargs, draw)
        # Where maps output zero, states of a recurrence beside attention may look like averages.
        known = {core.path for core in self.cores}
        return run, [core for core in cores_of(run) if core.path in known]
