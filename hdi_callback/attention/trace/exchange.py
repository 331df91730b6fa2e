"""All-to-all calls of a traced run, kept in its graph as if all ranks ran the same code on the same tokens.

If ranks swap heads for tokens during attention (Ulysses), each rank attends with a part of the heads. So the copy is
run as each rank in turn, and then once more with the tensors that those runs sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import enable_reentrant_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from hdi_callback.attention.isolation.collectives import LocalAnswers, finished_call, rank_in, size_of
from hdi_callback.attention.trace.torch_arguments import torch_arguments
from hdi_callback.attention.trace.traced_run import TracedRun


@dataclass(eq=False)
class Exchange:
    """Tensors that one run sends in its all-to-all calls.

    Attributes:
        rank: the one that it plays, within the group that swaps; its own if `None`.
        ranks: what the runs of all ranks sent; every rank sends what this one does if that is empty.
        sent: for each call the parts for each rank.
        calls: how many calls wrote what ranks hold into tensors.
    """

    rank: int | None = None
    ranks: Sequence[Exchange] = ()
    sent: list[list[Tensor]] = field(default_factory=list)
    calls: int = 0

    @property
    def size(self) -> int:
        """Number of ranks that swap; 1 if none does, or groups of several sizes do."""
        sizes = {len(parts) for parts in self.sent}
        return sizes.pop() if len(sizes) == 1 else 1

    def received(self, parts: Sequence[Tensor], group: Any) -> list[Tensor]:
        """Swap parts.

        Args:
            parts: for each rank.
            group: of the ranks.

        Returns:
            Those from each rank.
        """
        rank, number = rank_in(group) if self.rank is None else self.rank, len(self.sent)
        self.sent.append([part.clone() for part in parts])
        if len(self.ranks) != len(parts):
            return [parts[min(rank, len(parts) - 1)]] * len(parts)
        return [one.sent[number][rank] for one in self.ranks]

    def swapped(self, own: Tensor, group: Any, sent: Sequence[int] | None) -> Tensor:
        """Swap parts of one tensor along its first dim, of the sizes that are sent, or of equal ones."""
        parts: Any = own.split(list(sent)) if sent else own.chunk(size_of(group))  # type: ignore[no-untyped-call]
        return torch.cat(self.received(parts, group))


_MOVING = ("alltoall", "allgather", "send", "recv")  # what one rank has is what another gets


class Exchanging(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers in-place all-to-all calls such that their results depend, in the graph, on the tensors that are sent."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._exchange, self._answers = exchange, LocalAnswers()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace != "c10d" or not any(kind in func._schema.name for kind in _MOVING):
            return func(*args, **kwargs)
        self._exchange.calls += 1
        with enable_reentrant_dispatch():
            if func._schema.name == "c10d::alltoall_base_":
                output, own, group, _, sent = args[:5]
                output.copy_(self._exchange.swapped(own, group, sent).view_as(output))
                return finished_call()
            if func._schema.name == "c10d::alltoall_":
                outputs, parts, group = args[:3]
                for output, part in zip(outputs, self._exchange.received(parts, group)):
                    output.copy_(part.view_as(output))
                return list(outputs), finished_call()
            return self._answers.answer(func, args, kwargs)


def handler_of_ranks(func: Any) -> Callable[..., Any] | None:
    """Choose the replacement of an operator of torch's functional collectives.

    Args:
        func: the operator.

    Returns:
        The handler, which takes a `GraphCut` first; `None` for other operators.
    """
    return _OPERATORS.get(str(func).removesuffix(".default"))


def _all_to_all(cut: Any, func: Any, args: Any, kwargs: Any) -> Any:
    names = ("input", "output_split_sizes", "input_split_sizes", "group_name")
    own, _, sent, group = torch_arguments(args, kwargs, *names)
    return cut.exchange.swapped(own, group, sent)


def _awaited(cut: Any, func: Any, args: Any, kwargs: Any) -> Any:
    return args[0] if type(args[0]) is Tensor else NotImplemented  # the call has ended already


_OPERATORS: dict[str, Callable[..., Any]] = {
    "_c10d_functional.all_to_all_single": _all_to_all,
    "_c10d_functional_autograd.all_to_all_single": _all_to_all,
    "_c10d_functional._wrap_tensor_autograd": _awaited,
    "_c10d_functional.wait_tensor": _awaited,
}


def of_all_ranks(own: TracedRun, ranks: Sequence[TracedRun]) -> TracedRun | None:
    """Join the runs of all ranks to the one that used their tensors.

    Args:
        own: the run of this rank.
        ranks: those of all, each with calls that return what this rank sends itself.

    Returns:
        The run of this rank, which is made of what the others computed; `None` if ranks do not run the same code.
    """
    maps = [leaf.parameter for leaf in own.leaves]
    if any(run.error is not None or [leaf.parameter for leaf in run.leaves] != maps for run in ranks):
        return None
    # After a second swap values are right only in this rank's own run; their features are the same in all runs.
    taking = [replace(leaf, input=mine.input) for run in ranks for leaf, mine in zip(run.leaves, own.leaves)]
    every = [own, *ranks]
    return replace(
        own,
        leaves=own.leaves + taking,
        inputs=[tensor for run in every for tensor in run.inputs],
        spans=[span for run in every for span in run.spans],
        normed=[tensor for run in every for tensor in run.normed],
        convolved=[one for run in every for one in run.convolved],
        mixed_tokens=[one for run in every for one in run.mixed_tokens],
        scores={node: score for run in ranks for node, score in run.scores.items()},
        mixed={node: one for run in ranks for node, one in run.mixed.items()},
        ranks=len(ranks),
    )
