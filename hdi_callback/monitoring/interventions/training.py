"""`Training`: the operations on a training that interventions may use, under any trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor
from torch.optim import Optimizer

from hdi_callback.attention import AttentionLayer


class Training(Protocol):
    """The operations on a training that interventions may use; each integration has one.

    Attributes:
        layers: the watched attention layers, by name.
        optimizers: the optimizers of the run.
    """

    @property
    def layers(self) -> Mapping[str, AttentionLayer]:
        """Layers by name."""

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The optimizers."""

    def loss_scale(self, optimizer: Optimizer) -> float:
        """Factor of the gradients when `Intervention.before_optimizer_step` is called.

        Args:
            optimizer: the one that is about to step.

        Returns:
            1 where they have been unscaled.
        """

    def largest_over_ranks(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Elementwise maximum over the ranks that act together; every rank calls it with the same shapes.

        Args:
            tensors: tensors of this rank.

        Returns:
            The maxima.
        """

    def stop(self) -> None:
        """End the training after this step."""

    def save_checkpoint(self, name: str) -> str:
        """Save a checkpoint.

        Args:
            name: its name, without a suffix.

        Returns:
            Where it was saved.
        """
