"""`Training`: what an intervention sees of a training, and may do to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from torch.optim import Optimizer

from hdi_callback.attention.layer import AttentionLayer

if TYPE_CHECKING:
    from hdi_callback.session import Trainer

Expect = Callable[[str, Iterable[int], int], None]


class Training:
    """What an intervention sees of a training, and may do to it, under any trainer.

    Attributes:
        layers: name -> layer.
        expect_change: tells the rules that the weights of heads of a layer are written at a step, so that this raises
            no alert.
    """

    def __init__(self, trainer: Trainer, layers: Sequence[AttentionLayer], expect_change: Expect) -> None:
        self._trainer, self.expect_change = trainer, expect_change
        self.layers: Mapping[str, AttentionLayer] = {layer.name: layer for layer in layers}

    @property
    def step(self) -> int:
        """Optimizer steps taken so far."""
        return self._trainer.step

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The optimizers of the run."""
        return self._trainer.optimizers

    def loss_scale(self, optimizer: Optimizer) -> float:
        """Return the factor on the gradients before a step, 1 where they have been unscaled."""
        return self._trainer.loss_scale(optimizer)

    def stop(self) -> None:
        """End the training after this step."""
        self._trainer.stop()

    def save(self, name: str) -> str:
        """Save a checkpoint under a name without a suffix; return where. Every rank calls it."""
        return self._trainer.save(name)
