"""Which operations lie between an output of the model and the loss, by the graph of autograd.

While a backward runs, a frame of torch's holds the loss, in this thread or in another; from there the graph leads to
the output whose gradient has just arrived. Sizes are no matter, but the axes along which numbers are repeated are.
"""

from __future__ import annotations

import re
import sys
from itertools import islice
from typing import Any

from torch.autograd import graph

from hdi_callback.arguments import listed
from hdi_callback.attention.tape import walk_back

OUTPUT = "an output, to hdi_callback"  # so nodes of outputs are marked
COPIES = {"ToCopy", "View", "UnsafeView", "ReshapeAlias", "Alias", "Clone"}
_MOST = 5000  # nodes, as a second term may lead through the whole model
_NUMBERS = ("dim", "ignore_index", "reduction", "exponent", "min", "max", "delta", "beta", "p")  # that are no sizes
_SOON, _FEWEST = 2, 4  # paths that may show the same change; earlier ones from which it is known what varies


class LossPaths:
    """Which operations were on all paths from an output to the loss, and which on any."""

    def __init__(self) -> None:
        self._latest: dict[str, list[frozenset[str]]] = {}
        self._earlier: dict[str, list[frozenset[str]]] = {}

    def departure(self, name: str, path: frozenset[str]) -> str:
        """Return what is on the path from an output, and was on none before, or the other way round; `""` if none."""
        latest, earlier = self._latest.setdefault(name, []), self._earlier.setdefault(name, [])
        latest.append(path)
        if len(latest) > _SOON:
            earlier.append(latest.pop(0))
        if len(earlier) < _FEWEST:
            return ""
        pairs = ("has now", path.difference(*earlier)), ("has lost", earlier[0].intersection(*earlier) - path)
        texts = [f"{verb} {listed(sorted(operations))}" for verb, operations in pairs if operations]
        return f"the way from {name} to the loss {' and '.join(texts)}" if texts else ""


def node_name(node: Any) -> str:
    """Return the operation of a node of autograd's: ``NllLoss``."""
    return re.sub(r"Backward\d*$", "", node.name())


def path_to_loss(output: Any) -> frozenset[str] | None:
    """Return the operations between the loss of the backward that runs and a node that it has reached."""
    # On CUDA hooks run in threads of their own.
    frames = walk_back(sys._current_frames().values(), lambda frame: filter(None, [frame.f_back]))
    backwards = [frame for frame in frames if frame.f_code is graph._engine_run_backward.__code__]
    losses = [each.grad_fn for frame in backwards for each in frame.f_locals.get("t_outputs", ())]

    def after(node: Any) -> list[Any]:
        return [] if node is output else [other for other, _ in node.next_functions if other]

    nodes = [*islice(walk_back(filter(None, losses), after), _MOST)]
    users: dict[Any, list[Any]] = {}
    for node in nodes:
        for other in after(node):
            users.setdefault(other, []).append(node)
    path = [*walk_back(users.get(output, ()), lambda node: users.get(node, ()))]
    if not path or len(nodes) == _MOST or any(OUTPUT in node.metadata for node in path):  # it is within the model
        return None
    texts = [text for node in path for text in _shown(node)]
    return frozenset([*texts, *(f"a second {text}" for text in texts if texts.count(text) > 1)])


def _shown(node: Any) -> list[str]:
    """Return the operation of a node with its numbers, and along which axes it repeats what it takes."""
    name = node_name(node)
    if name in COPIES | {"Slice"}:  # autograd does not record a slice that takes the whole
        return []
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    takes = [(entry._input_metadata, at) for entry, at in node.next_functions if entry]
    sizes = [tuple(each[at].shape) for each, at in takes if at < len(each)]
    texts = []
    for attribute in _NUMBERS:
        # A function of the user's may keep anything by this name, and what is a tensor goes through the user's hooks.
        if hasattr(type(node), f"_saved_{attribute}") and not hasattr(type(node), f"_raw_saved_{attribute}"):
            value = getattr(node, f"_saved_{attribute}")
            values = value if isinstance(value, tuple) else [value] * (value is not None)
            numbers = [at - 2**64 * (isinstance(at, int) and at >= 2**63) for at in values]
            if attribute == "dim" and sizes:
                numbers = [at - len(sizes[0]) * (at >= 0) for at in numbers]  # from the end
            texts += [f"{attribute} {listed(numbers)}"] if numbers else []
    out = tuple(node._input_metadata[0].shape)
    for size in sizes:
        size = (1,) * (len(out) - len(size)) + size
        if len(size) == len(out) and all(was in {1, now} for was, now in zip(size, out)) and size != out:
            axes = [at - len(out) for at, pair in enumerate(zip(size, out)) if pair[0] != pair[1]]
            texts.append(f"repeated along axis {listed(axes)}")
    return [f"{name} ({', '.join(texts)})" if texts else name]
