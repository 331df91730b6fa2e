"""Relative change of each head's weights since the last reading, whose weights are kept on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hdi_callback.attention import Role
from hdi_callback.core.tensors import may_decide_on_host
from hdi_callback.core.updates import weight_update
from hdi_callback.monitoring.monitor import rotation

LARGEST = 2**31
"""Bytes of weights kept on the host in all; the movement and updates of further layers are absent."""

LARGEST_FOR_RULES = 2**28
"""The same where only the default rules need these weights."""

_EVERY = 4
"""One of so many rows, or columns, of a wide layer is kept where only rules need the movement."""


@dataclass(frozen=True)
class HeadMovement:
    """Relative change of the heads' weights between two readings.

    Attributes:
        movement: ``(H,)``, norm of the change of a head's own weights over the norm that they had: of query and output,
            and of key and value where no other head shares them. 0 means frozen, updates that round away, or zeros that
            stay so. NaN without an earlier reading, and where zeros have changed.
        unchanged: ``(H,)``, share of these weights that are exactly what they were, to the last bit.
    """

    movement: Tensor
    unchanged: Tensor


class LastWeights:
    """Weights of the last reading, kept on the host.

    Args:
        largest: bytes that may be kept in all.
        for_movement_alone: only `movement` needs them: on a CPU a weight then overwrites the last one.
        samples_wide: only rules need them: a quarter of the weights of wide layers is kept and compared.
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
            step: step of the reading; a second reading at one step has the same weights, and is not compared.
        """
        if step == self._step:
            self._kept = {}
        self._step = step
        self._finite = set()

    def are_finite(self, names: Sequence[str]) -> bool:
        """Return whether all weights of layers are finite, as far as their movement at this reading has shown.

        Args:
            names: of some layers.

        Returns:
            True if they are; False if not, or if it was not checked.
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
                        self._replace(name, role, own)
                    continue
                numbers = own[0].numel()
                if self._samples_wide and rotation.is_wide_weight(own.numel()):
                    own = _sample(own)
                    are_all_seen = False
                # A sample is scaled up to the whole weight, so that each role counts as in layers that are not sampled.
                seen = own[0].numel()
                last = self._reusable(name, role, own)
                before = self._replace(name, role, own) if last is None else last
                if before is None:
                    moved[row] = same[row] = torch.nan
                    continue
                size[row] += _squares(before.to(own.device, wide)) * (numbers / seen)
                change = weight_update(own, before) if last is None else self._difference(own, before)
                count[row] += numbers
                moved[row] += _squares(change) * (numbers / seen)
                # As floats, in place: summing booleans is six times as slow. Divided first, so that an unchanged weight
                # gives exactly `numbers`.
                same[row] += change.eq_(0).sum((-2, -1)) / seen * numbers
                if last is not None:
                    self._next[name, role] = last.copy_(own)
        # The difference from a finite weight is finite only if the weight is.
        if are_all_seen and may_decide_on_host(some):
            is_finite = (moved + size).isfinite().all(-1).tolist()
            self._finite.update(name for name, own in zip(names, is_finite) if own)
        movement = torch.where(size == 0, torch.nan, (moved / size).sqrt())
        return HeadMovement(torch.where(moved == 0, 0.0, movement), same / count)  # zeros that stay so do not move

    def before(self, names: Sequence[str], weights: Mapping[Role, Tensor]) -> dict[Role, Tensor]:
        """Return the weights of the last reading, and keep those of this one.

        Args:
            names: of some layers.
            weights: role -> ``(layers, heads, width, features)``.

        Returns:
            The same at the last reading; NaN in layers without an earlier one.
        """
        found: dict[Role, Tensor] = {}
        for role, weight in weights.items():
            found[role] = torch.full_like(weight, torch.nan)
            for row, name in enumerate(names):
                before = self._replace(name, role, weight[row])
                if before is not None:
                    found[role][row].copy_(before, non_blocking=True)
        return found

    def end(self) -> None:
        """End a reading: its weights are the last ones now."""
        self._kept, self._next = self._next, {}
        self._bytes = 0
        self._room = None

    def _reusable(self, name: str, role: Role, weight: Tensor) -> Tensor | None:
        """The weight of the last reading, if this one may be written over it and it is within the limit."""
        before = self._kept.get((name, role))
        is_alike = before is not None and before.shape == weight.shape and before.dtype == weight.dtype
        if not (self._for_movement_alone and is_alike and type(weight) is Tensor and weight.device.type == "cpu"):
            return None
        if weight.dtype not in (torch.float32, torch.float64) or (name, role) in self._next:
            return None
        self._bytes += weight.numel() * weight.element_size()
        return None if self.is_full else before

    def _difference(self, weight: Tensor, before: Tensor) -> Tensor:
        """Weight - before, in the memory of the last difference: reused memory costs a third."""
        room = self._room
        if room is None or room.shape != before.shape or room.stride() != before.stride() or room.dtype != before.dtype:
            room = self._room = torch.empty_like(before)
        return torch.sub(weight, before, out=room)

    def _replace(self, name: str, role: Role, weight: Tensor) -> Tensor | None:
        """Keep a weight; return that of the last reading."""
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
            # The host does not wait for a copy into pinned memory; later reads are queued behind it.
            host = torch.empty(weight.shape, dtype=weight.dtype, device="cpu", pin_memory=True)
            self._next[name, role] = host.copy_(weight, non_blocking=True)
        else:
            self._next[name, role] = weight.detach().to("cpu", copy=True)


def _sample(heads: Tensor) -> Tensor:
    """Every fourth row of each head, or column where columns are contiguous; always the same ones."""
    by_row = heads.stride(-2) >= heads.stride(-1)
    part = heads[:, ::_EVERY] if by_row else heads[:, :, ::_EVERY]
    return part if part.device.type == "cpu" else part.contiguous()  # which is then copied without a wait


def _squares(heads: Tensor) -> Tensor:
    """Sums of squares by head; of heads that are not contiguous a norm takes four times as long."""
    if heads.is_contiguous():
        norms: Tensor = torch.linalg.vector_norm(heads, dim=(-2, -1))
        return norms.square()
    return heads.square().sum((-2, -1))
