"""The door of a model: its inputs are changed, and its output is looked at, though a forward takes no arguments.

`Inputs` says by their values what the inputs are: tokens, numbers, padding, positions, labels.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from hdi_callback.checks.facts import Facts

__all__ = ["Changes", "Door", "Inputs", "NotAskedError", "by_token", "tensors_in"]

Changes = dict[int, Tensor]  # by the place of an input among the leaves of the arguments
Place = Callable[[Tensor], Any]  # what of a tensor must stay as it is, as an index; `None` if nothing of it


class NotAskedError(Exception):
    """A question does not fit a model or its inputs."""


class _LookedAtError(Exception):
    """The output has been computed; the rest of the user's forward (its loss) is not needed."""


def tensors_in(value: Any) -> list[Tensor]:
    """Return the floating tensors in what a module takes or gives."""
    if not isinstance(value, (Tensor, dict, list, tuple, nn.Module, type)) and hasattr(value, "__dict__"):
        value = vars(value)
    leaves = [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]
    return [leaf for leaf in leaves if leaf.layout == torch.strided and leaf.is_floating_point()]


class Door:
    """The first module that a forward calls takes its inputs; the last that it calls gives its output."""

    def __init__(self, model: nn.Module, forward: Callable[[], object]) -> None:
        self.model, self.forward = model, forward
        self.forwards = [1]  # a list, as a door within shares it
        self.noise, self.axis, self.is_random = 0.0, -1, False
        self._inner: Door | None = None
        self.names = {
            module: name for name, module in model.named_modules() if not isinstance(module, torch.jit.ScriptModule)
        }
        calls: list[list[Any]] = []
        shaped: list[tuple[nn.Module, int, Any]] = []  # the last output that has more than scalars
        counts: dict[nn.Module, int] = {}
        depth = [0]

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not depth[0]:
                calls.append([module, args, kwargs, None])
            depth[0] += 1

        def after(module: nn.Module, _: Any, output: Any) -> None:
            depth[0] -= 1
            counts[module] = counts.get(module, 0) + 1
            if not depth[0]:
                calls[-1][3] = output
            if any(tensor.dim() > 1 for tensor in tensors_in(output)):
                shaped[:] = [(module, counts[module], output)]

        with self.hooked(after), ExitStack() as stack:
            for module in self.names:
                stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            forward()
        if not calls or depth[0]:
            raise NotAskedError("the forward calls no module of the model")
        (self.inlet, args, kwargs, _), self.outlet = calls[0], calls[-1][0]
        self.calls = sum(call[0] is self.outlet for call in calls)
        self.leaves, self.spec = tree_flatten((args, kwargs))
        self.inputs = [at for at, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor) and leaf.dim()]
        try:
            arguments = dict(inspect.signature(self.inlet.forward).bind(*args, **kwargs).arguments)
        except (TypeError, ValueError):
            arguments = dict(kwargs)
        for value in list(arguments.values()):
            if isinstance(value, dict):
                arguments = {**value, **arguments}
        self.label = {
            at: next((name for name, value in arguments.items() if value is self.leaves[at]), "") for at in self.inputs
        }
        self.outputs = sum(tensor.dim() > 1 for tensor in tensors_in(calls[-1][3]))
        try:
            self._look_at(self.output_of(calls[-1][3]))
        except NotAskedError:  # a loss alone: what it is made of
            if not shaped:
                raise
            self.outlet, self.calls, output = shaped[0]
            self._look_at(self.output_of(output))

    def _look_at(self, base: Tensor) -> None:
        self.base, self.scale = base, float(base.float().std()) + 1e-12 if base.numel() > 1 else 1.0

    def hooked(self, hook: Callable[..., Any], **options: Any) -> ExitStack:
        """Return a context in which all modules have a hook."""
        stack = ExitStack()
        for module in self.names:
            stack.callback(module.register_forward_hook(hook, **options).remove)
        return stack

    def output_of(self, output: Any) -> Tensor:
        """Return the first tensor that is no scalar, and no matrix of samples and samples (contrastive logits)."""
        batch = len(self.leaves[self.inputs[0]]) if self.inputs else 0
        several = sum(self.leaves[at].dim() > 1 for at in self.inputs) > 1
        for tensor in tensors_in(output):
            is_pairwise = tensor.dim() > 1 and tensor.shape[0] == tensor.shape[1] == batch
            if tensor.dim() and not (is_pairwise and (tensor.dim() == 2 or several)):
                return tensor.detach()
        raise NotAskedError("the output has no tensor of numbers")

    def ask(self, changes: Changes | None = None, contexts: Sequence[AbstractContextManager[Any]] = ()) -> Tensor:
        """Return the output after changes of inputs."""
        leaves = [
            (changes or {}).get(at, leaf.clone() if isinstance(leaf, Tensor) else leaf)
            for at, leaf in enumerate(self.leaves)
        ]
        is_entered: list[bool] = []
        outputs: list[Any] = []

        def enter(*_: Any) -> Any:
            if is_entered:
                return None
            is_entered.append(True)
            return tree_unflatten(leaves, self.spec)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            outputs.append(output)
            if len(outputs) == self.calls:
                raise _LookedAtError

        self.forwards[0] += 1
        with ExitStack() as stack:
            stack.callback(self.inlet.register_forward_pre_hook(enter, with_kwargs=True, prepend=True).remove)
            for context in contexts:
                stack.enter_context(context)
            stack.callback(self.outlet.register_forward_hook(leave).remove)
            with suppress(_LookedAtError):
                self.forward()
        return self.output_of(outputs[-1])

    def inner(self, batch: int, tokens: int) -> Door:
        """Return the same door, looked at where a module last gave (batch, tokens, features)."""
        if self._inner is None:
            calls: list[tuple[nn.Module, int]] = []
            counts: dict[nn.Module, int] = {}

            def note(module: nn.Module, _: Any, output: Any) -> None:
                counts[module] = counts.get(module, 0) + 1
                tensor = next(iter(tensors_in(output)), None)
                if tensor is not None and tensor.dim() == 3 and tensor.shape[:2] == (batch, tokens):
                    calls.append((module, counts[module]))

            with self.hooked(note):
                self.ask()
            if not calls:
                raise NotAskedError("outputs are not by token")
            self._inner = copy.copy(self)
            self._inner.outlet, self._inner.calls = calls[-1]
            self._inner._look_at(self._inner.ask())
        return self._inner

    def takes(self, names: Collection[str], changes: Changes) -> dict[str, list[Tensor]]:
        """Return the floating tensors that modules take in a changed forward."""
        tensors: dict[str, list[Tensor]] = {}

        def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self.names[module] in names:
                tensors[self.names[module]] = [tensor.detach().clone() for tensor in tensors_in((args, kwargs))]

        with self.hooked(note, with_kwargs=True):
            self.ask(changes)
        return tensors

    def differ(self, first: Tensor, second: Tensor) -> float:
        """Return the largest difference, in units of the output's spread."""
        if first.shape != second.shape:
            return float("inf")
        gaps = torch.where(first == second, 0.0, (first.float() - second.float()).abs()).nan_to_num(1e9)
        return float(gaps.max()) / self.scale if first.numel() else 0.0

    @property
    def tolerance(self) -> float:
        """What rounding and the noise between two forwards can make."""
        return max(3e-4 if self.base.dtype in {torch.float32, torch.float64} else 0.1, 30 * self.noise)

    def first(
        self,
        changes: Changes,
        place: Place,
        other_place: Place | None = None,
        context: Callable[[], AbstractContextManager[Any]] | None = None,
        lost_outside: Sequence[str] | None = None,
    ) -> str:
        """Return the first module whose output differs at a place where its inputs do not; "" if there is none.

        `other` is that place in the changed forward, if it is another. With `lost_outside`, names of modules, the first
        module outside of these whose inputs differ, and whose output does not.
        """
        runs: list[list[tuple[nn.Module, list[Tensor], list[Tensor]]]] = []
        places = place, other_place or place

        def cut(value: Any) -> list[Tensor]:
            at = places[len(runs) - 1]
            pairs = [(tensor, at(tensor)) for tensor in tensors_in(value)]
            return [tensor.detach()[index].float().clone() for tensor, index in pairs if index is not None]

        def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            runs[-1].append((module, cut((args, kwargs)), cut(output)))

        for change, contexts in (({}, []), (changes, [context()] if context else [])):
            runs.append([])
            try:
                with self.hooked(note, with_kwargs=True):
                    self.ask(change, contexts)
            except Exception:
                return ""
        for (module, ins, outs), (again, other_ins, other_outs) in zip(*runs):
            if module is not again:
                return ""
            name, is_lost = self.names[module], lost_outside is not None
            if any(f"{name}.".startswith(f"{path}.") for path in lost_outside or ()):
                continue
            is_in, is_out = _unequal(ins, other_ins), _unequal(outs, other_outs)
            if ins and outs and (is_in and not is_out if is_lost else is_out and not is_in):
                return name or type(module).__name__
        return ""


def _unequal(first: list[Tensor], second: list[Tensor]) -> bool:
    return any(
        a.shape != b.shape or (a.numel() > 0 and not bool((a - b).abs().max() <= 1e-5 * (a.abs().max() + 1e-6)))
        for a, b in zip(first, second)
    )


def by_token(door: Door, tokens: int, *at: Any) -> Place:
    """Return the place in tensors of (batch, tokens, features)."""
    return lambda tensor: at if tensor.dim() > 2 and tensor.shape[:2] == (len(door.base), tokens) else None


class Inputs:
    """Tokens, numbers, padding, positions and labels among the inputs, by their values (labels by name too)."""

    def __init__(self, door: Door) -> None:
        self.door, self.leaves = door, door.leaves
        binary = {at for at in door.inputs if bool(((self.leaves[at] == 0) | (self.leaves[at] == 1)).all())}
        numbers = [at for at in door.inputs if at not in binary]
        self.floats = [at for at in numbers if self.leaves[at].is_floating_point() and self.leaves[at].dim() > 1]
        self.masks = [at for at in door.inputs if self.leaves[at].dim() == 2 and at in binary]
        whole = [
            at for at in numbers if self.leaves[at].dtype in {torch.int32, torch.int64} and self.leaves[at].dim() == 2
        ]
        self.labels = [
            at for at in whole if bool((self.leaves[at] < 0).any()) or re.search("label|target", door.label[at])
        ]
        self.positions = [at for at in whole if at not in self.labels and _counts(self.leaves[at])]
        tokens = [at for at in whole if at not in self.labels + self.positions]
        again = [at for at in tokens if any(i < at and self.is_moved(self.leaves[i], self.leaves[at]) for i in tokens)]
        self.tokens, self.labels = [at for at in tokens if at not in again], self.labels + again
        self.main = self.tokens + self.floats
        self.pads = self._padding()
        self.is_pair = len(self.main) == 2 and all(
            self.leaves[at].dim() == 2 + self.leaves[at].is_floating_point() for at in self.main
        )

    @staticmethod
    def is_moved(tokens: Tensor, labels: Tensor) -> bool:
        """Whether labels are the tokens as they are, or moved by one: those of a language model."""
        if tokens.shape != labels.shape or tokens.shape[1] < 4:
            return False
        is_labelled = labels >= 0
        return bool(
            (tokens == labels)[is_labelled].all() or (tokens[:, 1:] == labels[:, :-1])[is_labelled[:, :-1]].all()
        )

    def _padding(self) -> dict[int, Tensor]:
        """Return which entries of inputs are padding: what a mask hides at ends of rows, or a known id only there."""
        sides = [side for at in self.masks for side in (~self.leaves[at].bool(), self.leaves[at].bool())]
        marked: list[Tensor] = sorted(filter(_is_at_ends, sides), key=lambda pads: bool(pads.any(1).all()))
        if marked:  # where some row is all real, it says which of 0 and 1 is padding
            return {at: marked[0] for at in self.door.inputs if self.leaves[at].shape[:2] == marked[0].shape}
        pads_of: dict[int, Tensor] = {}
        tables = [module.padding_idx for module in self.door.names if isinstance(module, nn.Embedding)]
        for pad in dict.fromkeys([getattr(getattr(self.door.model, "config", None), "pad_token_id", None), *tables, 0]):
            for at in self.tokens if isinstance(pad, int) else ():
                pads: Tensor = self.leaves[at] == pad
                if at not in pads_of and _is_at_ends(pads) and int(pads.sum()) > 1:
                    pads_of[at] = pads
        return pads_of

    def changed(self, at: int, where: Any) -> Tensor:
        """Return an input with other values at an index: other tokens of the batch, or other numbers."""
        tensor: Tensor = self.leaves[at]
        new = tensor.clone()
        if tensor.is_floating_point():
            noise = torch.randn(new[where].shape, generator=torch.Generator().manual_seed(0)).to(tensor)
            new[where] += noise * (tensor.float().std() + 0.1).to(tensor.dtype)
            return new
        pads = self.pads.get(at)
        ids = (tensor if pads is None else tensor[~pads]).unique()
        if len(ids) < 2:
            raise NotAskedError("all tokens are equal")
        place = torch.searchsorted(ids, new[where].contiguous()).clamp(max=len(ids) - 1)
        new[where] = ids[(place + 1 + len(ids) // 3) % len(ids)]
        return new if pads is None else torch.where(pads, tensor, new)

    def unpadded(self) -> Changes:
        """Return changes that put real tokens for padding."""
        changes: Changes = {}
        for at in [at for at in self.tokens + self.masks if at in self.pads]:
            pads = self.pads[at]
            real = self.leaves[at][~pads]
            filled = real.repeat(pads.numel() // len(real) + 1)[: pads.numel()].view(pads.shape)
            changes[at] = torch.where(pads, filled, self.leaves[at])
        return changes

    def sequence(self, facts: Sequence[Facts]) -> tuple[Door, int, int]:
        """Return door, main input and number of tokens where one sequence goes in.

        Raises:
            NotAskedError: elsewhere.
        """
        door = self.door
        if door.is_random or door.axis != 0:
            raise NotAskedError(
                "forwards are random" if door.is_random else "samples mix, or are not on the first axis"
            )
        if len(self.main) != 1 or getattr(getattr(door.model, "config", None), "is_encoder_decoder", False):
            raise NotAskedError("more than one sequence goes in" if self.main else "no sequence goes in")
        x = self.leaves[self.main[0]]
        if x.dim() != 2 + x.is_floating_point() or x.shape[1] < 4:
            raise NotAskedError("no sequence of tokens goes in")
        if door.base.dim() < 3 or door.base.shape[:2] != x.shape[:2]:
            if not facts or any(not each.queries == each.keys == x.shape[1] for each in facts):
                raise NotAskedError("outputs are not by token, or attention is not among the tokens alone")
            door = door.inner(*x.shape[:2])
        return door, self.main[0], x.shape[1]


def _counts(tensor: Tensor) -> bool:
    """Whether numbers are positions: each is one more than that before it, or a new start."""
    if tensor.shape[1] < 3:
        return False
    is_step = (tensor[:, 1:] - tensor[:, :-1] == 1) | (tensor[:, 1:] <= 1)
    return bool(is_step.all() and tensor.max() > 1)


def _is_at_ends(pads: Tensor) -> bool:
    if pads.shape[1] < 3 or not bool(pads.any()) or bool(pads.all(1).any()):
        return False
    return bool(((pads[:, 1:] != pads[:, :-1]).sum(1) <= 1).all())
