"""`Host`: the interface of a trainer to a session and to interventions."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from hdi_callback.attention import AttentionLayer
from hdi_callback.deprecation import renamed_attribute
from hdi_callback.monitoring.history import History
from hdi_callback.monitoring.monitor import HeadDiversityMonitor
from hdi_callback.monitoring.ranks import is_first_rank, share_within
from hdi_callback.monitoring.session.position import Position
from hdi_callback.monitoring.session.sink import Sink


class Host(Protocol):
    """The interface of a trainer to a session; each integration has one.

    Attributes:
        is_first_rank: whether this process writes files.
        folder: folder of the run; may be a collective call, on which the ranks agree.
        position: step and epoch of the training.
        optimizers: the optimizers of the run.
    """

    @property
    def is_first_rank(self) -> bool:
        """Whether this process writes."""

    @property
    def folder(self) -> Path:
        """The folder of the run."""

    @property
    def position(self) -> Position:
        """Step, epoch and logging axis of the training."""

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The optimizers of the run."""

    def loss_scale(self, optimizer: Optimizer) -> float:
        """Factor of the gradients before a step, 1 where they have been unscaled."""

    def stop(self) -> None:
        """End the training after this step."""

    def save(self, name: str) -> str:
        """Save a checkpoint under a name without a suffix; return where."""

    def print(self, text: str) -> None:
        """Print a line to the user."""

    def sinks(
        self, monitor: HeadDiversityMonitor, history: History | None, state: Mapping[str, Any] | None
    ) -> Sequence[Sink]:
        """Open the sinks of this rank, once it is known what is resumed."""


class PlainHost:
    """The part of a host that needs no trainer: ranks by `torch.distributed`, output by `print`.

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
        """The scale that a fused optimizer divides out itself; 1 for others, where it has been divided out.

        Args:
            optimizer: the one that is about to step.

        Returns:
            The factor on its gradients.
        """
        return float(getattr(optimizer, "grad_scale", None) or 1)

    def broadcast(self, value: Any) -> Any:
        """Deprecated: return the value of the group's first rank on every rank; nothing of this package calls it.

        Args:
            value: anything that can be pickled.

        Returns:
            That of the first rank.
        """
        warnings.warn(
            "`broadcast` of a host is deprecated, as no session calls it: call torch.distributed in its place.",
            DeprecationWarning,
            stacklevel=2,
        )
        return self._share(value)

    def print(self, text: str) -> None:
        """Print a line.

        Args:
            text: the line.
        """
        print(text)  # noqa: T201

    say = renamed_attribute("say", "print")


class HostTraining:
    """`Training` for interventions: through a host, on the layers of a monitor.

    Args:
        host: the trainer.
        monitor: the monitor.
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
        """Factor of the gradients.

        Args:
            optimizer: the one that is about to step.

        Returns:
            1 where they have been unscaled.
        """
        return self._host.loss_scale(optimizer)

    def largest_over_ranks(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Elementwise maximum over the ranks that act together on the same layers.

        Args:
            tensors: tensors of this rank, on one device or several.

        Returns:
            The maxima.

        Raises:
            OtherRankError: if it is not known which ranks hold the same layers.
        """
        ranks = self._monitor.rendezvous.acquainted
        if ranks.size == 1 or not tensors:
            return list(tensors)
        return ranks.largest_among_peers(tensors, tensors[0].device)

    def stop(self) -> None:
        """End the training after this step."""
        self._host.stop()

    def save_checkpoint(self, name: str) -> str:
        """Save a checkpoint.

        Args:
            name: its name, without a suffix.

        Returns:
            Where it was saved.
        """
        return self._host.save(name)
