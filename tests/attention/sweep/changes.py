"""Change the weights of one claimed head after another, and compare which heads of attention change.

Where a filter over many tokens and a norm lie between a projection and attention, what a head receives is no linear map
of a few tokens, and `judge` finds it nowhere. Which heads change shows all the same whose rows a weight holds.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tests.attention.sweep.judge import Claim, merged, read_by_head
from tests.attention.witness import witness

_INPUTS = ("query", "key", "value")


def each_head_changes_alone(claim: Claim, run: Callable[[], Any], batch: int) -> bool:
    """Tell whether the rows that a head claims change what attention receives for it, and for no other head.

    Args:
        claim: of a module; its weights are changed in place and put back.
        run: runs the model, and with it the module, on `batch` sequences; what the module takes then it gets each time.
        batch: number of sequences.
    """
    call = _first_call(claim.module, run)
    before = _received(claim, call, batch)
    if before is None or claim.order:
        return False
    for role in _INPUTS:
        if role not in claim.roles:
            continue
        heads = len(claim.weight(role))
        for head in range(heads):
            with _changed(claim, role, head):
                after = _received(claim, call, batch)
            if after is None:
                return False
            for other in _INPUTS:
                apart = (after[other] - before[other]).abs().amax((0, 1, 3))  # (heads of attention,)
                has_changed = apart > 1e-4 * before[other].abs().amax()
                own = torch.arange(claim.num_heads) // (claim.num_heads // heads) == head
                if not torch.equal(has_changed, own if other == role else torch.zeros_like(own)):
                    return False
    return True


def _first_call(module: nn.Module, run: Callable[[], Any]) -> Callable[[], Any]:
    """Note what a module takes in a run, and call it with that."""
    taken: list[Any] = []

    def note(_: nn.Module, args: Any, kwargs: Any) -> None:
        taken.append(copy.deepcopy((args, kwargs)) if not taken else None)

    handle = module.register_forward_pre_hook(note, with_kwargs=True)
    try:
        with torch.no_grad():
            run()
    finally:
        handle.remove()

    def call() -> Any:
        args, kwargs = copy.deepcopy(taken[0])  # it may write into what it takes
        return module(*args, **kwargs)

    return call


@contextmanager
def _changed(claim: Claim, role: str, head: int) -> Iterator[None]:
    with torch.no_grad():
        rows = claim.weight(role)[head]
        kept = rows.clone()
        rows += kept.std() * torch.randn(rows.shape, generator=torch.Generator().manual_seed(head))
        try:
            yield
        finally:
            rows.copy_(kept)


def _received(claim: Claim, call: Callable[[], Any], batch: int) -> dict[str, Tensor] | None:
    """What the first attention of the module receives, ``(batch, positions, heads, width)`` for each role."""
    with torch.no_grad(), witness(claim.module, keep=()) as observed:
        torch.manual_seed(5)
        call()
    for one in merged(observed.computations, batch)[:1]:
        for heads in read_by_head(one, batch, claim.num_heads):
            if heads.pairs and heads.output.shape[2] == claim.num_heads:
                query, key = heads.pairs[0]
                return {"query": query, "key": key, "value": heads.value}
    return None
