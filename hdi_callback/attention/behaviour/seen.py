"""One run of a copy whose linear maps answer as they are told, with the scores and all that lies behind them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hdi_callback.attention import projections
from hdi_callback.attention.behaviour.codes import Change, Draw
from hdi_callback.attention.behaviour.elements import Where, depends_on
from hdi_callback.attention.behaviour.probe import MadeUp, Run, Stub, run_copy
from hdi_callback.attention.behaviour.scores import Scores
from hdi_callback.attention.weight_reading import read_tensor


class Leaves(Stub):
    """Answers with features of its own for each token of whatever it is given.

    Args:
        linear: the map that it stands in for.
        path: its path.
        drawn: what it answers.
    """

    def __init__(self, linear: nn.Module, path: str, drawn: Draw) -> None:
        super().__init__(*projections.features(linear))
        self.path, self.drawn, self.dim = path, drawn, projections.feature_dim(linear)
        if read_tensor(linear, "bias") is not None:  # some ask for it
            self.bias = torch.zeros(self.out_features)
        self.strides: tuple[int, ...] = getattr(linear, "stride", ()) if self.dim < -1 else ()
        self.is_called = True  # as a module; some only use its weight
        self.leaves: list[Tensor] = []  # (..., features)
        self.received: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        """Answer.

        Args:
            x: what the linear map would be given.

        Returns:
            What it is to give.
        """
        x = x.movedim(self.dim, -1)
        for dim, stride in enumerate(self.strides):  # of a convolution, which may leave tokens out
            x = x[(slice(None),) * (dim + x.dim() - 1 - len(self.strides)) + (slice(None, None, stride),)]
        self.received.append(x)
        leaf = self.drawn(self.path, len(self.leaves), (*x.shape[:-1], self.out_features))
        self.leaves.append(leaf.detach().requires_grad_())
        return self.leaves[-1].movedim(-1, self.dim).clone()  # some work in place


_CONVOLUTIONS = (
    F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d,
)  # fmt: skip
_ACTIVATIONS = (
    F.relu, F.relu_, torch.relu, Tensor.relu, F.relu6, F.gelu, F.silu, F.hardswish, F.leaky_relu, F.elu, F.mish,
)  # fmt: skip


class Behind(TorchFunctionMode):
    """Follows what attention gives: through activations, and up to convolutions that mix positions.

    An activation leaves each feature where it is, but what comes of it is not proportional to the attention weights.

    Args:
        scores: what watches attention in the same run.
        activations: numbers of activations that are passed through.
    """

    def __init__(self, scores: Scores, activations: set[int]) -> None:
        super().__init__()
        self.scores, self.activations = scores, set(activations)  # those behind attention, by their numbers
        self.count = 0
        self.convolved: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _CONVOLUTIONS and args:
            self.convolved.append(args[0])
        if func in _ACTIVATIONS and args:
            self.count += 1
            weights = self.scores.weights
            if all(one.requires_grad for one in weights) and depends_on(args[0], weights):
                self.activations.add(self.count)
            if self.count in self.activations:
                return args[0].clone()
        return func(*args, **(kwargs or {}))


@dataclass
class Seen:
    """What one run of a copy showed.

    Attributes:
        run: what came back.
        stubs: path -> what stood in for the linear map.
        watch: scores and attention weights.
        behind: what lies behind attention.
        leaves: what the stubs answered.
    """

    run: Run
    stubs: dict[str, Leaves]
    watch: Scores
    behind: Behind
    leaves: dict[Where, Tensor] = field(default_factory=dict)


def look(
    module: nn.Module,
    linears: Mapping[str, nn.Module],
    way: MadeUp,
    drawn: Draw,
    changed: Change,
    *,
    activations: set[int],
    seed: int,
) -> Seen:
    """Run a copy once.

    Args:
        module: the module.
        linears: its linear maps.
        way: its inputs.
        drawn: what the maps answer.
        changed: what becomes of attention weights.
        activations: numbers of activations that are passed through.
        seed: of the parameters that are left.

    Returns:
        What was seen.
    """
    stubs = {path: Leaves(linear, path, drawn) for path, linear in linears.items()}
    watch = Scores(changed)
    behind = Behind(watch, activations)
    replaced: dict[nn.Module, Stub] = {linears[path]: stub for path, stub in stubs.items()}
    torch.default_generator.manual_seed(seed)
    width = projections.features(next(iter(linears.values())))[0]
    with watch, behind:
        run = run_copy(module, replaced, way, batch=1, width=width)
    leaves = {(path, call): leaf for path, stub in stubs.items() for call, leaf in enumerate(stub.leaves)}
    return Seen(run, stubs, watch, behind, leaves=leaves)


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Give the tensors in what a forward returns.

    Args:
        output: tensors, tuples, lists and dicts of them, or anything.

    Yields:
        Those of at least two dimensions.
    """
    if isinstance(output, Tensor) and output.dim() > 1:
        yield output
    elif isinstance(output, (tuple, list)):
        for one in output:
            yield from tensors_in(one)
    elif isinstance(output, dict):
        for one in output.values():
            yield from tensors_in(one)
