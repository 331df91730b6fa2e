"""The ranks of a distributed run that measure together, and reductions over them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hdi_callback.arguments import shown
from hdi_callback.errors import MisconfigurationError

_AT_ONCE = 1.0  # seconds


class Ranks:
    """The ranks of a process group, or this process alone.

    Args:
        group: the process group; `None` for this process alone.
        peers: the ranks of the group that hold the same layers as this one; all of them by default.
        agree: called before each collective call; raises if another rank will not make it.
        give_up: lets no rank wait for this one before the next call.
        hold_parts: whether some of them hold parts of parameters.

    Attributes:
        group: the process group; `None` for this process alone.
        size: number of ranks.
        rank: number of this rank among them.
        peers: the ranks that hold the same layers as this one.
        agree: see above; `None` where nobody waits.
        give_up: see above.
        hold_parts: see above.
    """

    def __init__(
        self,
        group: Any = None,
        peers: Sequence[int] | None = None,
        agree: Callable[[], None] | None = None,
        *,
        give_up: Callable[[], None] | None = None,
        hold_parts: bool = False,
    ) -> None:
        self.group, self.agree, self.give_up, self.hold_parts = group, agree, give_up, hold_parts
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.peers = tuple(range(self.size)) if peers is None else tuple(peers)
        self._group_of_peers: Any = None

    @property
    def members_of_world(self) -> tuple[int, ...]:
        """Numbers, in the whole world, of the ranks that hold the same layers as this one and read them with it."""
        if self.group is None:
            return (dist.get_rank(),) if number_of_processes() > 1 else (0,)
        return tuple(dist.get_global_rank(self.group, rank) for rank in self.peers)

    def takes(self, place: int) -> bool:
        """Return whether this rank measures a layer's weights.

        Args:
            place: position of the layer among those that this rank and its peers hold.

        Returns:
            True on exactly one of them.
        """
        return place % len(self.peers) == self.peers.index(self.rank)

    def largest_among_peers(self, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """Elementwise maximum over the ranks that hold the same layers; see `largest`."""
        if len(self.peers) == self.size:
            return self.largest(tensors, device)
        if len(self.peers) == 1:
            return [tensor.detach().to(device, torch.float64) for tensor in tensors]
        if self._group_of_peers is None:
            members = [dist.get_global_rank(self.group, rank) for rank in self.peers]
            self._group_of_peers = dist.new_group(members, use_local_synchronization=True)
        return Ranks(self._group_of_peers).largest(tensors, device)

    def sum(self, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """Add up tensors over the ranks, in one collective call; whole numbers stay exact.

        Args:
            tensors: of the same shapes, in the same order, on every rank.
            device: the device of the sums.

        Returns:
            The sums, in float64.
        """
        return self._reduce(tensors, device, "SUM")

    def add_up(self, tensor: Tensor) -> None:
        """Add up a tensor over the ranks in place, in its own type.

        Args:
            tensor: of the same shape and type on every rank, contiguous; becomes the sum.
        """
        if self.group is not None and tensor.numel():
            self._all_reduce(tensor, "SUM")

    def largest(self, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """Elementwise maximum over the ranks, in one collective call.

        Args:
            tensors: of the same shapes, in the same order, on every rank.
            device: the device of the maxima.

        Returns:
            The maxima, in float64.
        """
        return self._reduce(tensors, device, "MAX")

    def _reduce(self, tensors: Sequence[Tensor], device: torch.device, how: str) -> list[Tensor]:
        if not tensors:
            return []
        flat = torch.cat([tensor.detach().reshape(-1).to(device, torch.float64) for tensor in tensors])
        if self.group is not None:
            self._all_reduce(flat, how)
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors)]

    def _all_reduce(self, tensor: Tensor, how: str) -> None:
        """Reduce a tensor over the ranks in place, once each of them is about to."""
        find_backend = getattr(self.group, "_get_backend", None)
        if find_backend is not None:
            find_backend(tensor.device)  # raises for a device that the group does not know, before others make the call
        if self.agree is not None:
            self.agree()
        op, begun = getattr(dist.ReduceOp, how), time.monotonic()
        try:
            dist.all_reduce(tensor, op=op, group=self.group)
        except RuntimeError:
            # Others wait in this call, and would meet the next one of the training. One that failed at once, as for
            # want of memory, has sent nothing.
            if time.monotonic() - begun > _AT_ONCE:
                raise
            dist.all_reduce(tensor, op=op, group=self.group)


def number_of_processes() -> int:
    """Number of processes of the run.

    Returns:
        1 outside `torch.distributed`.
    """
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_first_rank() -> bool:
    """Return whether this process is the one that writes files.

    Returns:
        True outside `torch.distributed`.
    """
    return number_of_processes() == 1 or dist.get_rank() == 0


def from_first_rank(thing: Any) -> Any:
    """Broadcast a value from the first rank.

    Args:
        thing: a value that can be pickled.

    Returns:
        The value of the first rank; this rank's own without others.
    """
    if number_of_processes() == 1:
        return thing
    box = [thing]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def check_process_group(group: Any) -> Any:
    """Check the argument `process_group`.

    Args:
        group: ``"auto"``, a process group or `None`.

    Returns:
        It.

    Raises:
        MisconfigurationError: if it is none of these, or a group that this rank does not belong to.
    """
    if group is None or (isinstance(group, str) and group == "auto"):
        return group
    if not dist.is_available() or not isinstance(group, dist.ProcessGroup):
        if dist.is_available() and group is dist.GroupMember.NON_GROUP_MEMBER:
            raise MisconfigurationError(
                "`process_group` is a group that this rank does not belong to: give this rank a group of its own, or "
                "None to measure on it alone."
            )
        raise MisconfigurationError(
            f'`process_group` must be "auto", a process group or None, got {shown(group)}: write "auto" to measure '
            "over all ranks, or None to measure on this rank alone."
        )
    return group


def share_within(group: Any) -> Callable[[Any], Any]:
    """A function that broadcasts a value from the first rank of a group.

    Args:
        group: as `check_process_group` takes it.

    Returns:
        A function of a value that can be pickled.
    """
    if group is None:
        return lambda thing: thing
    if isinstance(group, str):
        return from_first_rank

    def share(thing: Any) -> Any:
        box = [thing]
        dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
        return box[0]

    return share


def refuse_apart(group: Any, names: Sequence[str]) -> None:
    """Refuse interventions, which need the same decision on all ranks, if each rank measures alone.

    Args:
        group: as `check_process_group` takes it.
        names: names of interventions that change the training.

    Raises:
        MisconfigurationError: if there are any, several processes, and no group.
    """
    if group is None and names and number_of_processes() > 1:
        raise MisconfigurationError(
            f"process_group=None measures on each of {number_of_processes()} ranks alone, so that they cannot agree on "
            f'interventions ({", ".join(names)}): write process_group="auto", or leave interventions out or to '
            "dry_run=True."
        )
