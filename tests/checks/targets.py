"""What tests of the command line name as ``tests.checks.targets:...``."""

from __future__ import annotations

import lightning
import torch
from torch import Tensor

from tests.checks.corpus import BUGS, Attention, B, Model, T


def _named(name: str) -> tuple[Model, Tensor]:
    bug = next(one for one in BUGS if one.name == name)
    return bug.build(), bug.batch()[0]


def wrong_and_a_batch() -> tuple[Model, Tensor]:
    return _named("mask shows the next token")


def odd_and_a_batch() -> tuple[Model, Tensor]:
    return _named("no scale")


class Watched(lightning.LightningModule):
    """One block in a module of Lightning, with an example of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Model(Attention)
        self.example_input_array = torch.zeros(B, T, dtype=torch.int64)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.net(tokens)
