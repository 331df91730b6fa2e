"""Is a claim about heads true? The model itself answers: what is claimed for a head is changed, and its attention seen.

Nothing of the finder is used here but the claim: which elements of which parameters are whose. `Watch` sees what
attention gives, as one flat tensor, without knowing where heads are in it. Turning the rows of a head around changes a
part of that. A claim is right if parts of heads have nothing in common, if those of queries, keys and values that are
said to meet are the same, and if one row alone changes all of its head's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "mv", "dot", "convolution"}
_SOFTMAXES = {"_softmax", "_safe_softmax", "exp", "exp2", "_log_softmax"}
MOST = 8  # heads of a layer that are judged, the first and the last
_NOTHING = {"empty_like", "zeros_like", "ones_like", "new_zeros", "new_ones", "new_empty", "full_like", "new_full"}


@dataclass
class Event:
    """An attention that ran: which module's, and what it gave."""

    path: str
    outputs: list[Tensor] = field(default_factory=list)


class _EnoughError(BaseException):
    """Ends a forward behind the attention that is watched."""


class Watch(TorchDispatchMode):
    """List the attentions of a forward: a softmax of products of two computed tensors, and its products with values."""

    def __init__(self, model: nn.Module, until: int | None = None) -> None:
        super().__init__()
        self.events: list[Event] = []
        self._until = until
        self._names = {module: name for name, module in model.named_modules()}
        self._maps = {_storage(one) for one in model.parameters()}
        self._scores: set[int] = set()  # storages
        self._weights: dict[int, Event] = {}
        self._running: list[str] = []
        self._kept: list[Tensor] = []  # so that no storage is used again

    def __enter__(self) -> Watch:
        self._handles = [
            hooks.register_module_forward_pre_hook(lambda module, _: self._entered(module)),
            hooks.register_module_forward_hook(lambda *_: self._left(), always_call=True),
        ]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        for handle in self._handles:
            handle.remove()
        super().__exit__(*error)

    def _entered(self, module: nn.Module) -> None:
        around = self._running[-1] if self._running else ""
        self._running.append(self._names.get(module, around))  # a module made in the forward has no name

    def _left(self) -> None:
        self._running.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__.rstrip("_") if hasattr(func, "overloadpacket") else ""
        name = func.overloadpacket.__name__ if name not in _PRODUCTS and name not in _NOTHING else name
        out = func(*args, **(kwargs or {}))
        given = [_storage(one) for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        made = [one for one in tree_leaves(out) if isinstance(one, Tensor) and one.is_floating_point()]
        if not made or name in _NOTHING:
            return out
        self._kept += made
        if name not in _PRODUCTS and given and all(one in self._maps for one in given):  # a copy
            self._maps |= {_storage(one) for one in made}
        of_weights = next((self._weights[one] for one in given if one in self._weights), None)
        of_scores = any(one in self._scores for one in given)
        if name.startswith("_scaled_dot_product"):
            self._add().outputs.append(made[0])
        elif name in _SOFTMAXES and of_scores:
            self._weights[_storage(made[0])] = self._add()
        elif name in _PRODUCTS:
            is_map = any(one in self._maps for one in given)
            if of_weights is not None and not is_map:
                of_weights.outputs.append(made[0])
            elif of_weights is not None and made[0].numel() in self._sizes_of_weights(args):  # heads are mixed
                self._weights[_storage(made[0])] = of_weights
            elif not is_map:
                self._scores.add(_storage(made[0]))
        else:
            for one in made:
                if of_weights is not None:
                    self._weights[_storage(one)] = of_weights
                elif of_scores:
                    self._scores.add(_storage(one))
        return out

    def _sizes_of_weights(self, args: Any) -> set[int]:
        tensors = [one for one in tree_leaves(args) if isinstance(one, Tensor)]
        return {one.numel() for one in tensors if _storage(one) in self._weights}

    def _add(self) -> Event:
        if self._until is not None and len(self.events) > self._until and self.events[self._until].outputs:
            raise _EnoughError
        self.events.append(Event(self._running[-1] if self._running else ""))
        return self.events[-1]


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class Oracle:
    """Answer for one model and forward.

    Attributes:
        paths: the modules in which attention ran.
    """

    def __init__(self, model: nn.Module, forward: Callable[[], object]) -> None:
        self._model, self._forward = model, forward
        self._base, self._until = self._watched(), None
        self.paths = {event.path for event in self._base if event.outputs}

    def judge(self, layer: Any) -> str:
        """Say what is wrong with a claim; `""` if nothing is, and with a question mark where it cannot be said."""
        if any(rows.recipes for one in layer.weights.values() for term in one.terms for rows in term.factors):
            return "? its weights are computed"
        at = sorted(self._events_of(layer))
        if not at:
            return "? it does not run"
        whole, self._until = self._base, max(at)
        rows = _rows(layer, "query" if "query" in layer.weights else "key")
        answer = ""
        for factor in (1, 0.02, 1e-3):  # where attention is sharp, nothing changes: then scores are made small first
            with _changed([(rows, head) for head in range(rows.heads)], lambda one, factor=factor: factor * one):
                self._base = self._watched()
                answer = self._judge_heads(layer, at) or self._judge_outputs(layer)
            if not answer:
                break
        self._base, self._until = whole, None
        return answer

    def _judge_heads(self, layer: Any, at: list[int]) -> str:
        heads = [*range(layer.num_heads)]
        heads = heads[: MOST // 2] + heads[-MOST // 2 :] if len(heads) > MOST else heads
        of = {"query": range(layer.num_heads), "key": layer.key_of, "value": layer.value_of}
        all_rows = {role: _rows(layer, role) for role in of if role in layer.weights}
        # Of queries that are keys, neither an order nor a sign matters.
        is_tied = "query" in all_rows and _are_same(all_rows["query"], all_rows["key"])
        changes = {
            role: {
                head: self._change(rows, head, at, _moved if is_tied and role != "value" else _turned)
                for head in {of[role][one] for one in heads}
            }
            for role, rows in all_rows.items()
        }
        asking = changes.get("query") or {head: changes["key"][layer.key_of[head]] for head in heads}
        if not any(one.any() for role, mine in changes.items() if role != "value" for one in mine.values()):
            return "? it has one key"
        for role, mine in changes.items():
            if any(not one.any() for one in mine.values()):
                return f"the {role} of a head changes nothing"
            if any(_outside(one, other) < 0.9 for one in mine.values() for other in mine.values() if one is not other):
                return f"two heads of the {role} change the same"
            for head, change in asking.items():
                if _outside(change, mine[of[role][head]]) > 0.3:
                    return f"the queries of head {head} meet other {role}s than is said"
        rows = all_rows.get("query")
        if rows is not None and "query" not in layer.normed and rows.width > 1:
            for head, change in asking.items():
                of_one = self._change(rows, head, at, _first_moved if is_tied else _first_negated)
                if _outside(change, of_one) > 0.3:
                    return f"a row of head {head} changes another part than all of them"
        return ""

    def _events_of(self, layer: Any) -> set[int]:
        """Find the attentions that depend on the values of a layer, or its keys: the first that changes is its own."""
        found, rows = set(), _rows(layer, "value" if "value" in layer.weights else "key")
        for head in range(rows.heads):
            with _changed([(rows, head)], _turned):
                events = self._watched()
            pairs = enumerate(zip(events, self._base))
            first = next((i for i, (one, other) in pairs if one.outputs and _difference(one, other).any()), None)
            found |= {first} if first is not None else set()
        return found

    def _change(self, rows: Any, head: int, at: list[int], how: Callable[[Tensor], Tensor]) -> Tensor:
        """Say how much what attention gives changes with the rows of a head."""
        with _changed([(rows, head)], how):
            events = self._watched()
        return torch.cat([_difference(events[i], self._base[i]) for i in at]).square()

    def _judge_outputs(self, layer: Any) -> str:
        """Without the columns of its output, a head's values change nothing in what the layer gives."""
        if "value" not in layer.weights or "output" not in layer.weights:
            return ""
        columns, values = _rows(layer, "output"), _rows(layer, "value")
        for value in range(min(values.heads, 4)):
            mine = [(columns, head) for head in range(columns.heads) if layer.value_of[head] == value]
            with _changed(mine, torch.zeros_like):
                before = self._given(layer)
                with _changed([(values, value)], _turned):
                    after = self._given(layer)
            with _changed([(values, value)], _turned):
                whole = self._given(layer)
            if before is None or after is None or whole is None:
                return ""
            if (after - before).abs().max() > 1e-3 * (whole - before).abs().max().clamp(min=1e-12):
                return f"without its columns of the output, value head {value} is still seen"
        return ""

    def _given(self, layer: Any) -> Tensor | None:
        """What the layer's output projection gives first; the layer itself where that is no module."""
        given: list[Tensor] = []

        def keep(_: Any, __: Any, out: Any) -> None:
            given.extend(one.detach().clone() for one in tree_leaves(out)[:1] if isinstance(one, Tensor))

        handle = (layer.output_module or layer.module).register_forward_hook(keep)
        try:
            self._run()
        finally:
            handle.remove()
        return given[0] if given else None

    def _watched(self) -> list[Event]:
        with contextlib.suppress(_EnoughError), Watch(self._model, getattr(self, "_until", None)) as watch:
            self._run()
        return watch.events

    def _run(self) -> None:
        torch.manual_seed(0)
        with torch.no_grad():
            self._forward()


def _rows(layer: Any, role: str) -> Any:
    """The rows, or columns, of heads: the factor that tells heads apart."""
    return layer.weights[role].terms[0].factors[0]


def _turned(rows: Tensor) -> Tensor:
    """The last row first: neither a norm over the head nor one over all heads changes by it."""
    return rows.roll(1, 0) if len(rows) > 1 else -rows


def _moved(rows: Tensor) -> Tensor:
    return rows.roll(1, 1)


def _are_same(one: Any, other: Any) -> bool:
    return bool(one.names == other.names and torch.equal(one.starts, other.starts))


def _first_negated(rows: Tensor) -> Tensor:
    return torch.cat([-rows[:1], rows[1:]])


def _first_moved(rows: Tensor) -> Tensor:
    return torch.cat([rows[:1].roll(1, 1), rows[1:]])


@contextlib.contextmanager
def _changed(heads: list[tuple[Any, int]], change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Change rows in their parameters, for a while."""
    kept = []
    with torch.no_grad():
        for rows, head in heads:
            name, at = rows.names[head if len(rows.names) > 1 else 0], rows.index(head)
            parameter = rows.module.get_parameter(name)
            kept.append((parameter, parameter.clone()))
            flat = parameter.flatten()
            flat[at] = change(flat[at])
            parameter.copy_(flat.view_as(parameter))
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, before in reversed(kept):
                parameter.copy_(before)


def _difference(one: Event, other: Event) -> Tensor:
    pairs = [(a, b) for a, b in zip(one.outputs, other.outputs) if a.shape == b.shape]
    return torch.cat([(a - b).flatten().nan_to_num() for a, b in pairs]) if pairs else torch.zeros(1)


def _outside(one: Tensor, other: Tensor) -> float:
    """Give the share of a change that lies where another changes nothing."""
    return float(one[other <= 1e-8 * other.max()].sum() / one.sum())
