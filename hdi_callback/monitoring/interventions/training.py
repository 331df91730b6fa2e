"""What an intervention may do to a training, whichever trainer runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor
from torch.optim import Optimizer

from hdi_callback.attention import AttentionLayer


class Training(Protocol):
    """What an intervention may do to a training; each integration has one.

    Attributes:
        layers: the attention layers that are watched, by name.
        optimizers: the optimizers of the run.
    """

    @property
    def layers(self) -> Mapping[str, AttentionLayer]:
        """Layers by name."""

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The optimizers."""

    def loss_scale(self, optimizer: Optimizer) -> float:
        """Tell the factor that is on the gradients when `Intervention.before_optimizer_step` is called.

        Args:
            optimizer: the one that is about to step.

        Returns:
            1 where they have been unscaled.
        """

    def largest_over_ranks(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Take the largest of each number over the ranks that act together; every rank calls it with the same shapes.

        Args:
            tensors: what this rank has.

        Returns:
            The largest.
        """

    def stop(self) -> None:
        """End the training after this step."""

    def save_checkpoint(self, name: str) -> str:
        """Save a checkpoint.

        Args:
            name: what to call it, without a suffix.

        Returns:
            Where it was saved.
        """
