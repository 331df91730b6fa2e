"""How far the weights of each head moved since the last reading, whose weights wait on the host until then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hdi_callback.attention import Role
from hdi_callback.core.tensors import may_decide_on_host
from hdi_callback.core.updates import weight_update
from hdi_callback.monitoring.monitor import turns

LARGEST = 2**31
"""Bytes of weights that are kept on the host in all; nothing is known of the movement and updates of layers beyond."""

LARGEST_UNASKED = 2**28
"""The same where no such curve was asked for, and the default rules alone need them."""

_EVERY = 4
"""Of so many rows, or columns, of a wide layer one is kept where rules alone look at the movement."""


@dataclass(frozen=True)
class HeadMovement:
    """How far heads moved.

    Attributes:
        movement: ``(H,)``, norm of the change of a head's own weights over the norm that they had: of query and output,
            and of key and value where no other head shares them. 0 means frozen, or updates that round away. NaN where
            there is nothing to compare with.
        unchanged: ``(H,)``, share of these weights that are exactly what they were, to the last bit.
    """

    movement: Tensor
    unchanged: Tensor


class LastWeights:
    """Keep the weights of the last reading on the host.

    Args:
        largest: bytes that may be kept in all.
        for_movement_alone: nothing else is computed of them: on a CPU a weight is then written over the last one.
        samples_wide: and of layers that are wide a quarter is kept and compared, for rules alone.
    """

    def __init__(self, largest: int = LARGEST, *, for_movement_alone: bool = False, samples_wide: bool = False) -> None:
        self._largest, self._for_movement_alone = largest, for_movement_alone
        self._samples_wide = samples_wide and for_movement_alone
        self._kept: dict[tuple[str, Role], Tensor] = {}
        self._next: dict[tuple[str, Role], Tensor] = {}
        self._room: Tensor | None = None
        self._step: int | None = None
        self._bytes = 0
        self._finite: set[str] = set()

    @property
    def is_full(self) -> bool:
        """Whether weights were left out as there are too many."""
        return self._bytes > self._largest

    def begin(self, step: int) -> None:
        """Begin a reading.

        Args:
            step: of the reading; one more at the same step is compared with nothing, as its weights are the same.
        """
        if step == self._step:
            self._kept = {}
        self._step = step
        self._finite = set()

    def are_finite(self, names: Sequence[str]) -> bool:
        """Return whether the movement of layers at this reading has shown that all their weights are finite.

        Args:
            names: of some layers.

        Returns:
            True if it has; False where it was not asked.
        """
        return self._finite.issuperset(names)

    def movement(self, names: Sequence[str], weights: Mapping[Role, Tensor]) -> HeadMovement:
        """Compare weights with those of the last reading, and keep them for the next one.

        Args:
            names: of some layers.
            weights: role -> ``(layers, heads, width, features)``.

        Returns:
            The movement of the heads, ``(layers, H)``.
        """
        H = max(weight.shape[1] for weight in weights.values())
        some = next(iter(weights.values()))
        wide = torch.promote_types(some.dtype, torch.float32)
        if some.is_meta:
            return HeadMovement(*(torch.empty(len(names), H, dtype=wide, device="meta") for _ in range(2)))
        moved, size, same, count = (torch.zeros(len(names), H, dtype=wide, device=some.device) for _ in range(4))
        are_all_seen = True
        for role, weight in weights.items():
            for row, name in enumerate(names):
                own = weight[row]
                if own.shape[0] != H:
                    are_all_seen = False
                    if not self._for_movement_alone:
                        self._exchange(name, role, own)
                    continue
                numbers = own[0].numel()
                if self._samples_wide and turns.makes_wide(own.numel()):
                    own = _sample(own)
                    are_all_seen = False
                # What was seen of a weight stands for all of it, so that each role counts as it does in whole layers.
                seen = own[0].numel()
                last = self._to_write_over(name, role, own)
                before = self._exchange(name, role, own) if last is None else last
                if before is None:
                    moved[row] = same[row] = torch.nan
                    continue
                size[row] += _squares(before.to(own.device, wide)) * (numbers / seen)
                change = weight_update(own, before) if last is None else self._difference(own, before)
                count[row] += numbers
                moved[row] += _squares(change) * (numbers / seen)
                # Written as numbers, in place: adding up truth values is six times as slow. Divided first, so that a
                # weight that stood still counts whole to the last bit.
                same[row] += change.eq_(0).sum((-2, -1)) / seen * numbers
                if last is not None:
                    self._next[name, role] = last.copy_(own)
        # A weight less one that is finite is finite if it is.
        if are_all_seen and may_decide_on_host(some):
            is_finite = (moved + size).isfinite().all(-1).tolist()
            self._finite.update(name for name, own in zip(names, is_finite) if own)
        return HeadMovement(torch.where(size == 0, torch.nan, (moved / size).sqrt()), same / count)

    def before(self, names: Sequence[str], weights: Mapping[Role, Tensor]) -> dict[Role, Tensor]:
        """Give the weights of the last reading, and keep those of this one.

        Args:
            names: of some layers.
            weights: role -> ``(layers, heads, width, features)``.

        Returns:
            The same at the last reading; NaN in layers of which nothing is known.
        """
        found: dict[Role, Tensor] = {}
        for role, weight in weights.items():
            found[role] = torch.full_like(weight, torch.nan)
            for row, name in enumerate(names):
                before = self._exchange(name, role, weight[row])
                if before is not None:
                    found[role][row].copy_(before, non_blocking=True)
        return found

    def end(self) -> None:
        """End a reading: its weights are the last ones now."""
        self._kept, self._next = self._next, {}
        self._bytes = 0
        self._room = None

    def _to_write_over(self, name: str, role: Role, weight: Tensor) -> Tensor | None:
        """Give what a weight was, if this reading is to be written over it and there is room for that."""
        before = self._kept.get((name, role))
        is_alike = before is not None and before.shape == weight.shape and before.dtype == weight.dtype
        if not (self._for_movement_alone and is_alike and type(weight) is Tensor and weight.device.type == "cpu"):
            return None
        if weight.dtype not in (torch.float32, torch.float64) or (name, role) in self._next:
            return None
        self._bytes += weight.numel() * weight.element_size()
        return None if self.is_full else before

    def _difference(self, weight: Tensor, before: Tensor) -> Tensor:
        """Subtract, into the memory of the last difference: memory that is used already costs a third."""
        room = self._room
        if room is None or room.shape != before.shape or room.stride() != before.stride() or room.dtype != before.dtype:
            room = self._room = torch.empty_like(before)
        return torch.sub(weight, before, out=room)

    def _exchange(self, name: str, role: Role, weight: Tensor) -> Tensor | None:
        """Keep a weight, and give what it was."""
        if not weight.is_meta:
            self._keep(name, role, weight)
        before = self._kept.get((name, role))
        return None if before is None or before.shape != weight.shape else before

    def _keep(self, name: str, role: Role, weight: Tensor) -> None:
        if (name, role) in self._next:  # for another curve of this reading
            return
        self._bytes += weight.numel() * weight.element_size()
        if self.is_full:
            return
        if weight.device.type == "cuda":
            # A copy into pinned memory is not waited for; what reads it later is queued behind it.
            host = torch.empty(weight.shape, dtype=weight.dtype, device="cpu", pin_memory=True)
            self._next[name, role] = host.copy_(weight, non_blocking=True)
        else:
            self._next[name, role] = weight.detach().to("cpu", copy=True)


def _sample(heads: Tensor) -> Tensor:
    """Take every fourth row of each head, or column where columns lie one after the other; always the same ones."""
    by_row = heads.stride(-2) >= heads.stride(-1)
    part = heads[:, ::_EVERY] if by_row else heads[:, :, ::_EVERY]
    return part if part.device.type == "cpu" else part.contiguous()  # which is then copied without a wait


def _squares(heads: Tensor) -> Tensor:
    """Add up squares by head; of heads that do not lie one after the other, a norm takes four times as long."""
    if heads.is_contiguous():
        norms: Tensor = torch.linalg.vector_norm(heads, dim=(-2, -1))
        return norms.square()
    return heads.square().sum((-2, -1))
