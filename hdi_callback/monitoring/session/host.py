"""`Host`: what a session asks of a trainer, and what interventions may use of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from hdi_callback.attention import AttentionLayer
from hdi_callback.monitoring.history import History
from hdi_callback.monitoring.monitor import HeadDiversityMonitor
from hdi_callback.monitoring.ranks import is_first_rank, share_within
from hdi_callback.monitoring.session.position import Position
from hdi_callback.monitoring.session.sink import Sink


class Host(Protocol):
    """What a trainer offers to a session; each integration has one.

    Attributes:
        is_first_rank: whether this process writes.
        folder: folder of the run; a collective call where the ranks have to agree on it.
        position: where the training is.
        optimizers: those of the run.
    """

    @property
    def is_first_rank(self) -> bool:
        """Whether this process writes."""

    @property
    def folder(self) -> Path:
        """The folder of the run."""

    @property
    def position(self) -> Position:
        """Where the training is."""

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The optimizers of the run."""

    def loss_scale(self, optimizer: Optimizer) -> float:
        """Give the factor that is on the gradients before a step, 1 where they have been unscaled."""

    def broadcast(self, value: Any) -> Any:
        """Give every rank the value of the first."""

    def stop(self) -> None:
        """End the training after this step."""

    def save(self, name: str) -> str:
        """Save a checkpoint under a name without a suffix; say where."""

    def say(self, text: str) -> None:
        """Print a line to the user."""

    def sinks(
        self, monitor: HeadDiversityMonitor, history: History | None, state: Mapping[str, Any] | None
    ) -> Sequence[Sink]:
        """Open what results are written to on this rank, once it is known what is resumed."""


class PlainHost:
    """What hosts have in common that leave ranks to `torch.distributed`, and print.

    Args:
        process_group: the ranks that act together, see `Settings`.
    """

    def __init__(self, process_group: Any = "auto") -> None:
        self._share = share_within(process_group)

    @property
    def is_first_rank(self) -> bool:
        """Whether this process writes."""
        return is_first_rank()

    @property
    def folder(self) -> Path:
        """The working directory."""
        return Path()

    def loss_scale(self, optimizer: Optimizer) -> float:
        """Give the scale that a fused optimizer takes off itself; for all others it has been taken off.

        Args:
            optimizer: the one that is about to step.

        Returns:
            The factor on its gradients.
        """
        return float(getattr(optimizer, "grad_scale", None) or 1)

    def broadcast(self, value: Any) -> Any:
        """Give every rank of the group the value of its first.

        Args:
            value: anything that can be pickled.

        Returns:
            That of the first rank.
        """
        return self._share(value)

    def say(self, text: str) -> None:
        """Print a line.

        Args:
            text: the line.
        """
        print(text)  # noqa: T201


class HostTraining:
    """What interventions may do to a training, see `Training`: by its host, on the layers of its monitor.

    Args:
        host: the trainer.
        monitor: what measures.
    """

    def __init__(self, host: Host, monitor: HeadDiversityMonitor) -> None:
        self._host, self._monitor = host, monitor

    @property
    def layers(self) -> Mapping[str, AttentionLayer]:
        """The layers that are watched, by name."""
        return {layer.name: layer for layer in self._monitor.layers}

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The optimizers of the run."""
        return self._host.optimizers

    def loss_scale(self, optimizer: Optimizer) -> float:
        """Give the factor that is on the gradients.

        Args:
            optimizer: the one that is about to step.

        Returns:
            1 where they have been unscaled.
        """
        return self._host.loss_scale(optimizer)

    def largest_over_ranks(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Take the largest of each number over the ranks that act together on the same layers.

        Args:
            tensors: what this rank has, on one device or several.

        Returns:
            The largest.
        """
        ranks = self._monitor.ranks
        if ranks.size == 1 or not tensors:
            return list(tensors)
        return ranks.largest_among_peers(tensors, tensors[0].device)

    def stop(self) -> None:
        """End the training after this step."""
        self._host.stop()

    def save_checkpoint(self, name: str) -> str:
        """Save a checkpoint.

        Args:
            name: what to call it, without a suffix.

        Returns:
            Where it was saved.
        """
        return self._host.save(name)
