"""The ranks of a distributed run: every rank runs the same sequence, and adds up sums of fixed shape.

A rank whose own work failed puts NaN in its place and makes the same calls, so that nobody waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hdi_callback.attention.layer import AttentionLayer
from hdi_callback.attention.sharding import _group_of_heads

S = TypeVar("S")

_AT_ONCE = 2**24  # numbers in one call: packing takes as much memory again


def number_of_ranks() -> int:
    """Number of processes of the run, 1 outside `torch.distributed`."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class Ranks:
    """All ranks of the run, if they hold the same layers; else this rank alone, as a stage of a pipeline.

    Args:
        facts: plain data about the layers of this rank; all ranks compare theirs, a collective call.

    Attributes:
        size: number of ranks that measure together.
        device: where sums are exchanged.
        difference: why ranks measure alone, as a clause; empty if they do not.
        is_sharded: whether some rank would need the others to read a weight.
        is_first: whether no earlier rank holds the same layers.
    """

    def __init__(self, facts: Sequence[Mapping[str, Any]]) -> None:
        self.size, self.device = number_of_ranks(), torch.device("cpu")
        found: list[Any] = [facts]
        if self.size > 1:
            found = [None] * self.size
            dist.all_gather_object(found, facts)
            if "nccl" in dist.get_backend():
                self.device = torch.device("cuda", torch.cuda.current_device())
        other = next((rank for rank, theirs in enumerate(found) if theirs != found[0]), None)
        self.difference = "" if other is None else f"rank {other} holds other attention layers than rank 0"
        self.is_first = other is None or found.index(facts) == dist.get_rank()
        self.is_sharded = any(layer["is_sharded"] for theirs in found for layer in theirs)
        self.size = self.size if other is None else 1

    def sum(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Add up tensors over the ranks; of the same shapes, in the same order, on every rank."""
        return self._reduce(tensors, "SUM") if self.size > 1 else list(tensors)

    def add(self, records: Sequence[S]) -> list[S]:
        """Add up records of sums over the ranks, field by field.

        Args:
            records: frozen dataclasses of tensors, of the same shapes and in the same order on every rank; fields named
                in their `MAXIMA` merge by maximum, and the field `centre` is the same everywhere.

        Returns:
            The sums over all ranks.
        """
        if self.size == 1:
            return list(records)
        added = iter(self.sum([tensor for one in records for tensor in _fields(one, largest=False).values()]))
        tops = [tensor for one in records for tensor in _fields(one, largest=True).values()]
        largest = iter(self._reduce(tops, "MAX"))
        together: list[S] = []
        for one in records:
            values = {name: next(added) for name in _fields(one, largest=False)}
            values |= {name: next(largest) for name in _fields(one, largest=True)}
            together.append(replace(one, **values))  # type: ignore[type-var]
        return together

    def _reduce(self, tensors: Sequence[Tensor], operation: str) -> list[Tensor]:
        reduced: list[Tensor] = []
        for part in _parts(tensors):
            packed = torch.cat([tensor.detach().reshape(-1).to(self.device, torch.float64) for tensor in part])
            dist.all_reduce(packed, op=getattr(dist.ReduceOp, operation))
            pieces = torch.split(packed, [tensor.numel() for tensor in part])
            reduced += [piece.view(own.shape).to(own.device, own.dtype) for piece, own in zip(pieces, part)]
        return reduced


def repeats_tokens(layer: AttentionLayer) -> bool:
    """Whether an earlier rank has the same tokens, as ranks have that share the heads of a layer among them."""
    group = _group_of_heads(layer) if any(site.heads != layer.num_heads for site in layer.sites) else None
    return group is not None and dist.get_rank(group) > 0


def failed(record: S) -> S:
    """Fill sums with NaN: the place of a rank whose own work has failed."""
    tensors = {**_fields(record, largest=False), **_fields(record, largest=True)}
    nan = {name: torch.full_like(tensor, torch.nan) for name, tensor in tensors.items() if tensor.is_floating_point()}
    return replace(record, **nan)  # type: ignore[type-var]


def _fields(record: Any, *, largest: bool) -> dict[str, Tensor]:
    """The tensors of a record that add up over ranks, or those that merge by maximum."""
    maxima = getattr(record, "MAXIMA", ())
    names = [item.name for item in fields(record) if item.name != "centre" and (item.name in maxima) == largest]
    return {name: getattr(record, name) for name in names if isinstance(getattr(record, name), Tensor)}


def _parts(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Cut a list of tensors into lists that are packed one at a time; shapes decide, alike on every rank."""
    parts: list[list[Tensor]] = []
    size = 0
    for tensor in tensors:
        if not parts or size + tensor.numel() > _AT_ONCE:
            parts.append([])
            size = 0
        parts[-1].append(tensor)
        size += tensor.numel()
    return parts
