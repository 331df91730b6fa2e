"""The ranks of a distributed run: they meet before each reading, and add up only what is the same.

A meeting is a note in the store of the process group, in which nobody waits for longer than a third of the group's
timeout; sums then go through a group of our own. So no call of ours can meet one of the training's. Where ranks are at
different steps, hold layers of different weights, do not come or are gone, each measures alone from then on.

A rank whose own work failed puts NaN in its place and makes the same calls, so that nobody waits for it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hdi_callback.attention.layer import ROLES, AttentionLayer
from hdi_callback.attention.sharding import group_of_heads
from hdi_callback.guard import describe
from hdi_callback.monitor.reading import to_host

S = TypeVar("S")
T = TypeVar("T", bound=tuple[Tensor, ...])

_AT_ONCE = 2**24  # numbers in one call: packing takes as much memory again
_SAME = 1e-9  # relative difference of checksums that rounding on other hardware may leave


def number_of_ranks() -> int:
    """Return the number of processes of the run, 1 outside `torch.distributed`."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class Ranks:
    """All ranks of the run, as long as they hold the same layers at the same steps; else this rank alone.

    All ranks compare the facts of their layers, a collective call. `why_alone` says why they must not wait for each
    other, as a clause, the same on every rank.
    """

    def __init__(self, facts: Sequence[Mapping[str, Any]], why_alone: str = "") -> None:
        self.size, self.device = number_of_ranks(), torch.device("cpu")  # that measure together; where sums are added
        self.difference = ""  # why ranks measure alone, as a clause
        self.is_first = True  # whether no earlier rank holds the same layers
        self.is_sharded = any(layer["is_sharded"] for layer in facts)  # whether others are needed to read a weight
        self._names = [layer["name"] for layer in facts]
        self._readings = 0
        self._agree: Tensor | None = None  # whether the sums of this reading may be added up
        self._flags: tuple[Tensor, torch.cuda.Event | None] | None = None  # layers that agree, on their way to the host
        if self.size == 1:
            return
        with self._or_alone():
            self._limit = timeout_of_ranks() / 3
            self._prefix = begun("ranks")
        self._meet("the comparison of layers", why_alone)
        if self.size > 1:
            with self._or_alone():  # ranks have just met, so all of them come
                self._compare_facts(facts)

    def _compare_facts(self, facts: Sequence[Mapping[str, Any]]) -> None:
        """Make the group and compare layers."""
        is_on_host = "nccl" not in dist.get_backend()
        # A group on the host raises at its timeout, and nobody else has waited for as long; one of NCCL ends the run.
        self._group = dist.new_group(timeout=timedelta(seconds=self._limit) if is_on_host else None)
        if not is_on_host:
            self.device = torch.device("cuda", torch.cuda.current_device())
        of_ranks: list[Any] = [None] * self.size
        dist.all_gather_object(of_ranks, facts, group=self._group)
        different = [rank for rank, listed in enumerate(of_ranks) if listed != of_ranks[0]]
        if different:
            self.is_first = of_ranks.index(facts) == dist.get_rank()
            self._part(f"rank {different[0]} holds other attention layers than rank 0")

    def begin(self, step: int, why_alone: str = "") -> None:
        """Meet the other ranks for the reading at a step; they measure alone if some are not at this step."""
        self.settle()
        self._agree = None
        self._readings += 1
        self._meet(f"reading {self._readings}", why_alone, step=step)

    def compare(self, checksums: Mapping[str, Tensor]) -> None:
        """Compare the weights of all layers over the ranks: a collective call, of fixed size.

        The host does not wait for a device: there, the sums of this reading are added up only if the flags say so.
        `checksums` (see `checksums_of`) has no layers that this rank could not read.
        """
        if self.size == 1:
            return
        unread = torch.full((len(ROLES),), -torch.inf, dtype=torch.float64, device=self.device)
        own = torch.stack([checksums.get(name, unread).to(self.device) for name in self._names] or [unread])
        absent = own == -torch.inf
        top, negative = self._all_reduced(torch.stack([own, torch.where(absent, own, -own)]), dist.ReduceOp.MAX)
        if self.size == 1:
            return
        agree = (top + negative <= _SAME * torch.maximum(top.abs(), negative.abs())).all(-1)
        self._agree = agree.all()
        self._flags = to_host(agree)
        if self.device.type == "cpu":
            self.settle()

    def settle(self) -> None:
        """Part if layers had different weights at the last reading; every rank finds the same."""
        if self._flags is None:
            return
        (agree, event), self._flags = self._flags, None
        if event is not None:
            event.synchronize()
        if not agree.all():
            self._part(f"`{self._names[agree.tolist().index(False)]}` does not have the same weights on all ranks")

    def from_first(self, purpose: str, value: Any) -> Any:
        """Return the value of the first rank, plain data, on every rank that comes; its own where ranks have parted."""
        self._meet(purpose)
        values = [value]
        with self._or_alone():
            if self.size > 1:
                dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def _part(self, why: str) -> None:
        if why and self.size > 1:
            self.size, self.difference, self._agree = 1, why, None

    @contextmanager
    def _or_alone(self) -> Iterator[None]:
        """Measure alone from now on if an exchange fails: nobody waits again for a rank, or a store, that is gone."""
        try:
            yield
        except Exception as error:
            self._part(f"a rank, or the store of the ranks, is gone ({describe(error).partition('. ')[0]})")

    def _meet(self, purpose: str, why_alone: str = "", **header: Any) -> None:
        self._part(why_alone)
        if self.size > 1:
            with self._or_alone():
                self._part(why_apart(f"{self._prefix}/{purpose}", header, self._limit))

    def _all_reduced(self, tensor: Tensor, operation: Any) -> Tensor:
        """Return a tensor reduced over the ranks; as it is where ranks have parted."""
        reduced = tensor.clone()
        with self._or_alone():
            if self.size > 1:
                dist.all_reduce(reduced, op=operation, group=self._group)
        return reduced if self.size > 1 else tensor

    def add(self, records: Sequence[T]) -> list[T]:
        """Return the sums of records over all ranks, field by field: named tuples of the same shapes and order on each.

        A field called `largest` merges by maximum.
        """
        totals: list[dict[str, Tensor]] = [record._asdict() for record in records]  # type: ignore[attr-defined]
        for operation, is_largest in ((dist.ReduceOp.SUM, False), (dist.ReduceOp.MAX, True)):
            places = [(total, name) for total in totals for name in total if (name == "largest") == is_largest]
            if self.size > 1:  # they may have parted
                reduced = self._reduce([total[name] for total, name in places], operation)
                for (total, name), tensor in zip(places, reduced):
                    total[name] = tensor
        return [type(record)(**total) for record, total in zip(records, totals)]

    def _reduce(self, tensors: Sequence[Tensor], operation: Any) -> list[Tensor]:
        reduced: list[Tensor] = []
        for part in chunks(tensors, map(Tensor.numel, tensors), _AT_ONCE):
            packed = torch.cat([tensor.detach().reshape(-1).to(self.device, torch.float64) for tensor in part])
            total = self._all_reduced(packed, operation)
            total = total if self._agree is None else torch.where(self._agree, total, packed)
            pieces = torch.split(total, [tensor.numel() for tensor in part])
            reduced += [piece.view(own.shape).to(own.device, own.dtype) for piece, own in zip(pieces, part)]
        return reduced


def why_apart(key: str, header: Mapping[str, Any], limit: float) -> str:
    """Return why the ranks do not all come with the same header, as a clause, alike on every rank; empty if they do.

    No collective call: a rank that does not come within `limit` seconds may be waiting for us in one of the training's.
    `key` is the prefix of the notes of this meeting in the store; its last part names it.
    """
    store, rank, size = store_of_ranks(), dist.get_rank(), dist.get_world_size()
    first_rank, first = json.loads(store.compare_set(f"{key}/header", "", json.dumps([rank, header])))
    header = json.loads(json.dumps(header))
    purpose, verdict = key.rpartition("/")[-1], "alike"
    store.set(f"{key}/{rank}", "here")
    if first != header:
        name = next(name for name in header if header[name] != first.get(name))
        both = sorted([(first_rank, first.get(name)), (rank, header[name])])
        verdict = f"at {purpose}, `{name}` is " + " and ".join(f"{value} on rank {number}" for number, value in both)
    elif store.add(f"{key}/came", 1) < size:
        deadline, pause = time.monotonic() + limit, 0.0005
        while not store.check([f"{key}/verdict"]) and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(0.02, 1.5 * pause)
        if not store.check([f"{key}/verdict"]):
            missing = [number for number in range(size) if not store.check([f"{key}/{number}"])]
            listed = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
            verdict = f"rank {listed} of {size} did not come to {purpose} within {limit:.0f} seconds"
    decided: str = store.compare_set(f"{key}/verdict", "", verdict).decode()
    return "" if decided == "alike" else decided


def timeout_of_ranks() -> float:
    """Return the timeout of the process group, in seconds; a store of the user's own has another."""
    group = dist.distributed_c10d._get_default_group()
    options: list[Any] = [getattr(group._get_backend(device), "options", None) for device in group._device_types]
    timeouts = [option._timeout for option in options if hasattr(option, "_timeout")]
    return float(min(timeouts, default=store_of_ranks().timeout).total_seconds())


def store_of_ranks() -> Any:
    """Return the store of the process group."""
    return dist.distributed_c10d._get_default_store()


def begun(kind: str) -> str:
    """Return the prefix of notes of what this rank begins: its number, alike on all ranks as they begin alike.

    It is counted in the store, not in the process: processes may have been in other groups before.
    """
    return f"hdi_callback/{kind}/{store_of_ranks().add(f'hdi_callback/{kind}/begun/{dist.get_rank()}', 1)}"


def checksums_of(weights: Mapping[str, Tensor]) -> Tensor:
    """Return numbers by which weights of equal shape are told apart, ``(layers, roles)``.

    They depend on the order of heads and features, and weights that are not finite count as zeros.
    """
    some = next(iter(weights.values()))
    absent = torch.full(some.shape[:1], -torch.inf, dtype=torch.float64, device=some.device)
    return torch.stack([_checksum(weights[role]) if role in weights else absent for role in ROLES], -1)


def _checksum(weight: Tensor) -> Tensor:
    rows, columns = weight.sum(-1, dtype=torch.float64).flatten(1), weight.sum((1, 2), dtype=torch.float64)
    return (_mixed(rows) + _mixed(columns)).nan_to_num(0, 0, 0)


def _mixed(numbers: Tensor) -> Tensor:
    """Add up numbers ``(layers, n)`` with factors that differ by their place."""
    place = torch.arange(1, 1 + numbers.shape[-1], dtype=torch.float64, device=numbers.device)
    return numbers @ (1 + place.sin())


def repeats_tokens(layer: AttentionLayer) -> bool:
    """Whether an earlier rank has the same tokens, as ranks have that share the heads of a layer among them."""
    group = group_of_heads(layer) if any(site.heads != layer.num_heads for site in layer.sites) else None
    return group is not None and dist.get_rank(group) > 0


def failed(record: T) -> T:
    """Return sums filled with NaN: the place of a rank whose own work has failed."""
    return type(record)(*(torch.full_like(tensor, torch.nan) for tensor in record))


def chunks(items: Sequence[S], sizes: Iterable[int], largest: int) -> list[list[S]]:
    """Return items in lists whose sizes add up to `largest` at most, or of one item; alike on every rank."""
    parts: list[list[S]] = []
    total = 0
    for item, size in zip(items, sizes):
        total += size
        if not parts or total > largest:
            parts.append([])
            total = size
        parts[-1].append(item)
    return parts
