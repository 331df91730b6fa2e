"""The autograd graph of a run, backwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor


def made_from(node: Any) -> list[Any]:
    """Return the nodes of the inputs of a node.

    Args:
        node: of the graph.

    Returns:
        One for each of its inputs, `None` where that is not differentiated.
    """
    return [edge for edge, _ in node.next_functions]


def walk(starts: Iterable[Any], onward: Callable[[Any], Iterable[Any]] = made_from) -> Iterator[Any]:
    """Go back from some nodes, depth first.

    Args:
        starts: the nodes; `None` is skipped.
        onward: from a node to those to go to from there.

    Yields:
        Each node once, the starts included.
    """
    todo, visited = list(starts), set()
    while todo:
        node = todo.pop()
        if node is not None and node not in visited:
            visited.add(node)
            yield node
            todo += onward(node)


def upstream_nodes(tensors: Iterable[Tensor]) -> Iterator[Any]:
    """Return all nodes upstream of some tensors.

    Args:
        tensors: made in the run.

    Returns:
        The nodes.
    """
    return walk(tensor.grad_fn for tensor in tensors)


def is_rounded(tensor: Tensor) -> bool:
    """Return whether rounding, which leaves no derivative, is in the graph of a tensor."""
    return any(node.name().startswith(("Round", "Floor", "Ceil", "Trunc", "Sign")) for node in upstream_nodes([tensor]))


def is_fake_quantised(tensor: Tensor) -> bool:
    """Return whether a fake quantisation, alone or with its observer, is in the graph of a tensor."""
    return any(kind in node.name() for node in upstream_nodes([tensor]) for kind in ("FakeQuant", "ObsFqHelper"))


def nodes_between(ends: list[Tensor], start: Any) -> list[Any]:
    """Return the nodes of the paths from a node to tensors that are computed from it.

    Args:
        ends: tensors that are made of it.
        start: the node.

    Returns:
        The nodes, without the start.
    """
    consumers: dict[Any, list[Any]] = {}
    for node in upstream_nodes(ends):
        for previous in made_from(node):
            consumers.setdefault(previous, []).append(node)
    return [node for node in walk([start], lambda one: consumers.get(one, ())) if node is not start]
