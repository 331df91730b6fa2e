"""`Training`: what an intervention sees of a training, and may do to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.optim import Optimizer

from hdi_callback.attention.layer import AttentionLayer

if TYPE_CHECKING:
    from hdi_callback.session import Trainer


@dataclass(frozen=True)
class Training:
    """What an intervention sees of a training, and may do to it, under any trainer.

    Attributes:
        trainer: stops the training and saves checkpoints.
        layers: name -> layer.
        expect_change: tells the rules that the weights of heads of a layer are written at a step, and by which
            intervention, so that this raises no alert.
    """

    trainer: Trainer
    layers: Mapping[str, AttentionLayer]
    expect_change: Callable[[str, Sequence[int], int, str], None]

    @property
    def step(self) -> int:
        """Optimizer steps taken so far."""
        return self.trainer.step

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The optimizers of the run."""
        return self.trainer.optimizers
