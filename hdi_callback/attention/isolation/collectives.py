"""Collectives of user code that runs isolated: answered here, as if every rank held what this one holds.

Context-parallel and tensor-parallel modules call collectives in their forward. This package runs a copy on
one rank, at any time: the other ranks may never reach such a call, and waiting for them would end in the timeout of
the process group. So nothing is sent: a sum over N ranks is N times this rank's share, a gathered tensor has this
rank's part N times, and what is received is what was sent.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_UNEQUAL = "one rank cannot stand in for others whose shards have different sizes"
_NAMESPACES = ("c10d", "_c10d_functional", "_dtensor")


class CollectiveError(RuntimeError):
    """A collective call that has no answer without the other ranks."""


@contextmanager
def answered_locally() -> Iterator[None]:
    """Answer collective calls of the block without the other ranks; does nothing where there are none.

    Example:
        >>> with answered_locally():
        ...     pass
    """
    if _count_of_ranks() == 1:
        yield
        return
    with LocalAnswers():
        yield


@contextmanager
def collectives_within(ranks: Collection[int]) -> Iterator[None]:
    """Refuse collective calls of the block in which other ranks take part: they would be waited for in vain.

    Args:
        ranks: those that run the same code at the same time, by their numbers among all.

    Raises:
        CollectiveError: from a call that is refused, which the code that makes it may catch.
    """
    before, _allowed.ranks = _allowed.ranks, frozenset(ranks)
    try:
        with refusing_still():
            yield
    finally:
        _allowed.ranks = before


@contextmanager
def collectives_as_stated() -> Iterator[None]:
    """Refuse all collective calls of the block, unless a block around it states which ranks run the same code."""
    ranks = _count_of_ranks()
    if ranks == 1 or _allowed.ranks is not None:
        yield
        return
    with collectives_within({sys.modules["torch.distributed"].get_rank()}):
        yield


@contextmanager
def refusing_still() -> Iterator[None]:
    """Refuse what `collectives_within` refuses, where modes were set aside."""
    if _allowed.ranks is None or len(_allowed.ranks) == _count_of_ranks():
        yield
        return
    with _Refusing(_allowed.ranks):
        yield


class _Allowed(threading.local):
    ranks: frozenset[int] | None = None  # not stated


_allowed = _Allowed()


def _count_of_ranks() -> int:
    distributed: Any = sys.modules.get("torch.distributed")
    is_used = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if is_used else 1


class _Refusing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, ranks: frozenset[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ranks = ranks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_local = func.namespace not in _NAMESPACES or func._schema.name.endswith("wait_tensor")
        if not is_local and not self._takes_part(args, kwargs or {}):
            name = f"{func.namespace}::{func._schema.name.partition('::')[2]}"
            raise CollectiveError(f"computing it calls {name}, in which the other ranks do not take part")
        return func(*args, **(kwargs or {}))

    def _takes_part(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Return whether the process group of a call has these ranks alone."""
        from torch.distributed import get_process_group_ranks

        for argument in (*args, *kwargs.values()):
            try:
                members = (
                    get_process_group_ranks(_group(argument))
                    if isinstance(argument, (str, torch.ScriptObject))
                    else None
                )
            except Exception:  # an operation such as "sum", or an object that is no group
                continue
            if members is not None:
                return self._ranks.issuperset(members)
        return False


class LocalAnswers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation below autograd, so also the collectives of backward functions and of DTensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sent: list[Tensor] = []  # and not received yet
        self._awaited: list[Tensor] = []  # received before they are sent

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.answer(func, args, kwargs or {}) if func.namespace in _NAMESPACES else func(*args, **(kwargs or {}))

    def answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Compute the result of a collective operator without other ranks.

        Args:
            func: the operator.
            args: by position.
            kwargs: by name.

        Returns:
            What it would return.

        Raises:
            CollectiveError: if there is no answer.
        """
        name = func._schema.name.partition("::")[2]
        answer = getattr(self, f"_{func.namespace.strip('_')}_{name}", None)
        if answer is None:
            raise CollectiveError(f"{func.namespace}::{name} communicates with other ranks, which do not run this copy")
        return answer(*args, **kwargs)

    # --- calls that write into tensors

    def _c10d_allreduce_(self, tensors: Sequence[Tensor], group: Any, op: Any, *rest: Any) -> Any:
        _reduce(tensors, op, group)
        return list(tensors), finished_call()

    def _c10d_broadcast_(self, tensors: Sequence[Tensor], group: Any, root: int, *rest: Any) -> Any:
        if root != rank_in(group):
            _refuse_numbers(tensors)
        return list(tensors), finished_call()

    def _c10d_allgather_(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], *rest: Any) -> Any:
        for gathered, own in zip(outputs, inputs):
            for part in gathered:
                _copy(part, own)
        return [list(gathered) for gathered in outputs], finished_call()

    def _c10d__allgather_base_(self, output: Tensor, own: Tensor, group: Any, *rest: Any) -> Any:
        for part in output.view(-1).chunk(size_of(group)):
            _copy(part, own.reshape(-1))
        return output, finished_call()

    def _c10d_gather_(self, outputs: Any, inputs: Sequence[Tensor], *rest: Any) -> Any:
        return self._c10d_allgather_(outputs, inputs)[1]

    def _c10d_scatter_(self, outputs: Any, inputs: Any, group: Any, root: int, *rest: Any) -> Any:
        if not any(inputs):  # another rank would send what it has not sent yet
            _refuse_numbers(outputs)
            for output in outputs:
                output.zero_()
        for output, parts in zip(outputs, inputs):
            _copy(output, parts[rank_in(group)])
        return list(outputs), finished_call()

    def _c10d_reduce_scatter_(self, outputs: Any, inputs: Any, group: Any, op: Any, *rest: Any) -> Any:
        for output, parts in zip(outputs, inputs):
            _copy(output, parts[rank_in(group)])
        _reduce(outputs, op, group)
        return list(outputs), finished_call()

    def _c10d__reduce_scatter_base_(self, output: Tensor, own: Tensor, group: Any, op: Any, *rest: Any) -> Any:
        _copy(output, own.reshape(-1).chunk(size_of(group))[rank_in(group)].view_as(output))
        _reduce([output], op, group)
        return output, finished_call()

    def _c10d_alltoall_(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], group: Any, *rest: Any) -> Any:
        for output in outputs:
            _copy(output, inputs[rank_in(group)])
        return list(outputs), finished_call()

    def _c10d_alltoall_base_(self, output: Tensor, own: Tensor, group: Any, to: Any, sent: Any, *rest: Any) -> Any:
        _copy(output, _swapped(own, size_of(group), rank_in(group), to, sent))
        return finished_call()

    def _c10d_send(self, tensors: Sequence[Tensor], *rest: Any) -> Any:
        for tensor in tensors:
            pending = _pop_matching(self._awaited, tensor)
            if pending is None:
                self._sent.append(tensor.clone())
            else:
                pending.copy_(tensor)
        return finished_call()

    def _c10d_recv_(self, tensors: Sequence[Tensor], *rest: Any) -> Any:
        for tensor in tensors:
            sent = _pop_matching(self._sent, tensor)
            if sent is None:
                _refuse_numbers([tensor])
                tensor.zero_()
                self._awaited.append(tensor)
            else:
                tensor.copy_(sent)
        return finished_call()

    _c10d_recv_any_source_ = _c10d_recv_

    def _c10d_barrier(self, tensor: Tensor, *rest: Any, **options: Any) -> Any:
        return finished_call()

    # --- calls that give new tensors

    def _c10d_functional_all_reduce(self, own: Tensor, op: str, group: Any) -> Tensor:
        return self._c10d_functional_all_reduce_(own.clone(), op, group)

    def _c10d_functional_all_reduce_(self, own: Tensor, op: str, group: Any) -> Tensor:
        _reduce([own], op, group)
        return own

    def _c10d_functional_all_gather_into_tensor(self, own: Tensor, size: int, group: Any) -> Tensor:
        return torch.cat([own] * size)

    def _c10d_functional_reduce_scatter_tensor(self, own: Tensor, op: str, size: int, group: Any) -> Tensor:
        share = own.chunk(size)[rank_in(group)].clone()
        _reduce([share], op, group)
        return share

    def _c10d_functional_all_to_all_single(self, own: Tensor, to: Any, sent: Any, group: Any) -> Tensor:
        return _swapped(own, size_of(group), rank_in(group), to, sent).clone()

    def _c10d_functional_broadcast(self, own: Tensor, root: int, group: Any) -> Tensor:
        return own.clone()

    def _c10d_functional_broadcast_(self, own: Tensor, root: int, group: Any) -> Tensor:
        return own

    def _c10d_functional_wait_tensor(self, tensor: Tensor) -> Tensor:
        return tensor

    _c10d_functional__wrap_tensor_autograd = _c10d_functional_wait_tensor

    def _dtensor_shard_dim_alltoall(self, own: Tensor, gather_dim: int, shard_dim: int, group: Any) -> Tensor:
        size = size_of(group)
        return torch.cat([own.chunk(size, shard_dim)[rank_in(group)]] * size, gather_dim)


def _copy(target: Tensor, source: Tensor) -> None:
    if target.numel() != source.numel():
        raise CollectiveError(_UNEQUAL)
    target.copy_(source.view_as(target) if target.shape != source.shape else source)


def _swapped(own: Tensor, size: int, rank: int, received: Sequence[int], sent: Sequence[int]) -> Tensor:
    """Return the result of an all-to-all along the first dim, where every rank sends the same parts."""
    parts: Any = own.split(list(sent)) if sent else own.chunk(size)  # type: ignore[no-untyped-call]
    result = torch.cat([parts[rank]] * size)
    if received and sum(received) != result.shape[0]:
        raise CollectiveError(_UNEQUAL)
    return result


def _reduce(tensors: Sequence[Tensor], op: Any, group: Any) -> None:
    """Add up a share of every rank; the mean, the largest and the smallest of them are that of one."""
    from torch.distributed import ReduceOp

    if op.lower() == "sum" if isinstance(op, str) else op.op() == ReduceOp.SUM:
        for tensor in tensors:
            tensor.mul_(size_of(group))


def _refuse_numbers(tensors: Sequence[Tensor]) -> None:
    """Refuse whole numbers that another rank would send: sizes and places, not features that may be any."""
    if any(not tensor.is_floating_point() for tensor in tensors):
        raise CollectiveError("the integers that another rank would send are not known")


def _pop_matching(tensors: list[Tensor], like: Tensor) -> Tensor | None:
    """Remove the first tensor of the same shape and type from a list, and return it."""
    alike = (place for place, tensor in enumerate(tensors) if tensor.shape == like.shape and tensor.dtype == like.dtype)
    place = next(alike, None)
    return None if place is None else tensors.pop(place)


def _group(group: Any) -> Any:
    from torch.distributed import ProcessGroup, distributed_c10d

    resolve: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    if group is None:
        return distributed_c10d.group.WORLD
    if isinstance(group, str):
        return resolve(group)
    return ProcessGroup.unbox(group) if isinstance(group, torch.ScriptObject) else group


def size_of(group: Any) -> int:
    """Count the ranks of a process group.

    Args:
        group: the group, its name, or its form in operators.

    Returns:
        Their number.
    """
    return int(_group(group).size())


def rank_in(group: Any) -> int:
    """Return the number of this rank in a process group.

    Args:
        group: see `size_of`.

    Returns:
        The number.
    """
    return int(_group(group).rank())


def finished_call() -> Any:
    """Make the handle of a call that has ended.

    Returns:
        The handle, in the form that the operators of `torch.distributed` return.

    Raises:
        CollectiveError: if this release of torch has none.
    """
    from torch._C import _distributed_c10d as c10d

    kind: Any = getattr(c10d, "FakeWork", None)
    if not hasattr(kind, "boxed"):
        raise CollectiveError("this release of torch has no handle for a call that is not sent")
    return kind().boxed()
