"""The ranks of a distributed run that measure together.

Every reading is made on every rank at once: a rank that has nothing to tell adds zeros. So no rank waits for another
that does not come, as long as all of them take readings at the same steps; whether all of them have a monitor at all is
settled once, through the store of the process group and with a time limit, before the first collective call.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hdi_callback.arguments import shown
from hdi_callback.errors import MisconfigurationError

_PATIENCE = timedelta(seconds=120)
_meetings = itertools.count()


class Ranks:
    """The ranks of a process group, or this process alone.

    Args:
        group: the process group; `None` for this process alone.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)

    def sum(self, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """Add up tensors over the ranks, in one collective call; whole numbers stay exact.

        Args:
            tensors: of the same shapes, in the same order, on every rank.
            device: where to add them up.

        Returns:
            The sums, in float64.
        """
        return self._reduce(tensors, device, "SUM")

    def largest(self, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """Take the largest of each number over the ranks, in one collective call.

        Args:
            tensors: of the same shapes, in the same order, on every rank.
            device: where to compare them.

        Returns:
            The largest, in float64.
        """
        return self._reduce(tensors, device, "MAX")

    def _reduce(self, tensors: Sequence[Tensor], device: torch.device, how: str) -> list[Tensor]:
        if not tensors:
            return []
        flat = torch.cat([tensor.detach().reshape(-1).to(device, torch.float64) for tensor in tensors])
        if self._group is not None:
            dist.all_reduce(flat, op=getattr(dist.ReduceOp, how), group=self._group)
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors)]


def number_of_processes() -> int:
    """Count the processes of the run.

    Returns:
        1 outside `torch.distributed`.
    """
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_first_rank() -> bool:
    """Tell whether this is the process that writes for all.

    Returns:
        True outside `torch.distributed`.
    """
    return number_of_processes() == 1 or dist.get_rank() == 0


def from_first_rank(thing: Any) -> Any:
    """Give every rank what the first has.

    Args:
        thing: what can be pickled.

    Returns:
        That of the first rank; this one if it is alone.
    """
    if number_of_processes() == 1:
        return thing
    box = [thing]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def check_process_group(group: Any) -> Any:
    """Check which ranks are to measure together.

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
    """Make the function that gives all ranks of a group what the first of them has.

    Args:
        group: as `check_process_group` takes it.

    Returns:
        A function of a thing that can be pickled.
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
    """Refuse what must happen on all ranks alike where each rank measures alone.

    Args:
        group: as `check_process_group` takes it.
        names: interventions that change the training.

    Raises:
        MisconfigurationError: if there are any, several processes, and no group.
    """
    if group is None and names and number_of_processes() > 1:
        raise MisconfigurationError(
            f"process_group=None measures on each of {number_of_processes()} ranks alone, so that they cannot agree on "
            f'interventions ({", ".join(names)}): write process_group="auto", or leave interventions out or to '
            "dry_run=True."
        )


class Meeting:
    """Find the ranks that measure together, and make sure once that all of them came.

    Args:
        group: ``"auto"`` for all ranks once `torch.distributed` is initialised, a process group, or `None` for this
            process alone.

    Raises:
        MisconfigurationError: if `group` is none of these.
    """

    def __init__(self, group: Any = "auto") -> None:
        self._choice = check_process_group(group)
        self._ranks: Ranks | None = None

    @property
    def asked(self) -> Ranks:
        """The ranks that were asked for, whether or not they have met; this process alone where there are no others."""
        if self._choice is None or number_of_processes() == 1:
            return Ranks()
        return Ranks(dist.group.WORLD if self._choice == "auto" else self._choice)

    def attend(self, subject: Sequence[Any], say: Callable[[str, str], None]) -> Ranks:
        """Give the ranks to measure with.

        Args:
            subject: plain data that describes what is measured; it must be the same on every rank.
            say: takes a kind of warning and its message.

        Returns:
            The ranks; this process alone where the others do not measure the same.
        """
        if self._choice is None or number_of_processes() == 1:
            return Ranks()
        if self._ranks is None:
            group = dist.group.WORLD if self._choice == "auto" else self._choice
            self._ranks = Ranks(group)
            reason = None if self._ranks.size == 1 else _what_keeps_apart(self._ranks, subject)
            if self._ranks.size == 1 or reason is not None:
                self._ranks = Ranks()
            if reason is not None:
                say(
                    "measuring together",
                    f"This rank measures head diversity alone: {reason}. Its readings are of its own tokens. Give "
                    "every rank the same monitor, or write process_group=None.",
                )
        return self._ranks

    def part(self) -> None:
        """Measure alone from now on."""
        self._ranks = Ranks()


# A collective call with a rank that never comes would end the run, so the ranks meet in the store, where waiting has an
# end. Whoever sees first that all have come, or that the time is over, decides for all.
def _what_keeps_apart(ranks: Ranks, subject: Sequence[Any]) -> str | None:
    """Settle, the same on every rank, why they cannot measure together; `None` if they can."""
    store: Any = dist.distributed_c10d._get_default_store()
    group = ",".join(str(rank) for rank in dist.get_process_group_ranks(ranks._group))
    place = f"hdi_callback/{group}/{next(_meetings)}"
    digest = hashlib.sha256(repr(list(subject)).encode()).hexdigest()
    store.set(f"{place}/{ranks.rank}", digest)
    try:
        store.wait([f"{place}/{rank}" for rank in range(ranks.size)], _PATIENCE)
    except RuntimeError:
        verdict = f"some of the {ranks.size} ranks have taken no reading within {_PATIENCE.seconds} seconds"
    else:
        others = {bytes(store.get(f"{place}/{rank}")) for rank in range(ranks.size)}
        verdict = "" if len(others) == 1 else f"the {ranks.size} ranks do not watch the same layers and metrics"
    if store.add(f"{place}/decided", 1) == 1:
        store.set(f"{place}/verdict", verdict)
    return bytes(store.get(f"{place}/verdict")).decode() or None
