"""States of their own that forwards change: what is drawn, counted, kept or built in them changes the training."""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

WIDTH = 32


class State(nn.Module):
    """Changes its input by a number that its state gives."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + 0.1 * self.number(x))

    def number(self, x: Tensor) -> Any:
        return 0.0


class NumpyGenerator(State):
    def __init__(self) -> None:
        super().__init__()
        self.draw = np.random.default_rng(0)

    def number(self, x: Tensor) -> float:
        return float(self.draw.random())


class PythonGenerator(State):
    def __init__(self) -> None:
        super().__init__()
        self.draw = random.Random(0)

    def number(self, x: Tensor) -> float:
        return self.draw.random()


class OldNumpyGenerator(State):
    def __init__(self) -> None:
        super().__init__()
        self.draws = [np.random.RandomState(0)]

    def number(self, x: Tensor) -> float:
        return float(self.draws[0].rand())


class TorchGenerators(State):
    def __init__(self) -> None:
        super().__init__()
        self.draws = {"a": [torch.Generator().manual_seed(0)]}

    def number(self, x: Tensor) -> Tensor:
        return torch.rand((), generator=self.draws["a"][0])


class GlobalGenerators(State):
    def number(self, x: Tensor) -> Any:
        return random.random() + float(np.random.rand()) + torch.rand(())  # noqa: NPY002


class Deque(State):
    def __init__(self) -> None:
        super().__init__()
        self.last: deque[float] = deque(maxlen=3)

    def number(self, x: Tensor) -> float:
        self.last.append(len(self.last) + 1.0)
        return sum(self.last)


class Counting(State):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def number(self, x: Tensor) -> int:
        self.counts["calls"] += 1
        return self.counts["calls"]


class Nested(State):
    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Any] = {"a": {"b": [0]}}

    def number(self, x: Tensor) -> int:
        self.kept["a"]["b"].append(1)
        return sum(self.kept["a"]["b"])


@dataclass
class Record:
    calls: int = 0
    seen: set[int] = field(default_factory=set)


class Dataclass(State):
    def __init__(self) -> None:
        super().__init__()
        self.record = Record()

    def number(self, x: Tensor) -> int:
        self.record.calls += 1
        self.record.seen.add(self.record.calls)
        return len(self.record.seen)


class Slots:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


class Slotted(State):
    def __init__(self) -> None:
        super().__init__()
        self.slots = Slots()

    def number(self, x: Tensor) -> int:
        self.slots.calls += 1
        return self.slots.calls


class Iterating(State):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count()

    def number(self, x: Tensor) -> int:
        return next(self.numbers)


class Cycling(State):
    def __init__(self) -> None:
        super().__init__()
        self.rows = [iter([0.5, 1.5, 2.5] * 40)]

    def number(self, x: Tensor) -> float:
        return next(self.rows[0])


class TensorsInContainers(State):
    def __init__(self) -> None:
        super().__init__()
        self.kept = {"sums": [torch.zeros(())]}

    def number(self, x: Tensor) -> Tensor:
        self.kept["sums"][0] += 1
        return self.kept["sums"][0].clone()


class Array(State):
    def __init__(self) -> None:
        super().__init__()
        self.sums = np.zeros(2)

    def number(self, x: Tensor) -> float:
        self.sums += 1
        return float(self.sums[0])


class MovingAverage(State):
    """A second copy of a weight, written through `.data` in the forward, as momentum encoders are."""

    def __init__(self) -> None:
        super().__init__()
        self.fast, self.slow = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)
        self.slow.requires_grad_(False)

    def number(self, x: Tensor) -> Tensor:
        for fast, slow in zip(self.fast.parameters(), self.slow.parameters()):
            slow.data.mul_(0.9).add_(fast.data, alpha=0.1)
        return self.slow(x) + self.fast(x)


class Written(State):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sums", torch.zeros(()))
        self.plain = torch.zeros(())

    def number(self, x: Tensor) -> Tensor:
        self.sums.add_(1)
        self.plain.add_(1)
        return self.sums + self.plain


class BuiltModule(State):
    """A module that the first forward builds, with weights that torch's generator draws."""

    def number(self, x: Tensor) -> Tensor:
        if not hasattr(self, "built"):
            self.built = nn.Linear(WIDTH, 1).requires_grad_(False)
        return self.built(x)


class BuiltBuffer(State):
    def number(self, x: Tensor) -> Tensor:
        if not hasattr(self, "noise"):
            self.register_buffer("noise", torch.rand(()))
        return self.noise


class OnTheClass(State):
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        OnTheClass.calls = 0

    def number(self, x: Tensor) -> int:
        OnTheClass.calls += 1
        return OnTheClass.calls


CALLS = [0]


class InGlobals(State):
    def __init__(self) -> None:
        super().__init__()
        CALLS[0] = 0

    def number(self, x: Tensor) -> int:
        CALLS[0] += 1
        return CALLS[0]


class InAClosure(State):
    def __init__(self) -> None:
        super().__init__()
        calls = [0]

        def count() -> int:
            calls[0] += 1
            return calls[0]

        self.count: Callable[[], int] = count

    def number(self, x: Tensor) -> int:
        return self.count()


class Normed(State):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def number(self, x: Tensor) -> Tensor:
        self.norm(x.flatten(0, -2))
        return self.norm.running_mean.mean() + self.norm.num_batches_tracked


STATES: dict[str, type[State]] = {
    kind.__name__: kind
    for kind in (
        NumpyGenerator, PythonGenerator, OldNumpyGenerator, TorchGenerators, GlobalGenerators, Deque, Counting, Nested,
        Dataclass, Slotted, Iterating, Cycling, TensorsInContainers, Array, MovingAverage, Written, BuiltModule,
        BuiltBuffer, OnTheClass, InGlobals, InAClosure, Normed,
    )
}  # fmt: skip
