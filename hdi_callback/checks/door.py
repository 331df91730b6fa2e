"""The door of a model: its inputs are changed, and its output is looked at, though a forward takes no arguments.

`Inputs` says by their values what the inputs are: tokens, numbers, padding, positions, labels.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from hdi_callback.checks.facts import Facts

Changes = Mapping[int, Tensor | None]  # by the place of an input among the leaves of the arguments
Place = Callable[[Tensor], Any]  # what of a tensor must stay as it is, as an index; `None` if nothing of it
Calls = list[tuple[nn.Module, list[Tensor], list[Tensor]]]  # of modules, with what they take and return


class NotAskedError(Exception):
    """A question does not fit a model or its inputs."""


class _LookedAtError(Exception):
    """The output has been computed; the rest of the user's forward (its loss) is not needed."""


def tensors_in(value: Any) -> list[Tensor]:
    """Return the floating tensors in what a module takes or returns."""
    if not isinstance(value, (Tensor, dict, list, tuple, nn.Module, type)) and hasattr(value, "__dict__"):
        value = vars(value)
    leaves = [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]
    return [leaf for leaf in leaves if leaf.layout == torch.strided and leaf.is_floating_point()]


class Door:
    """The first module that a forward calls takes its inputs; the last that it calls returns its output."""

    def __init__(self, model: nn.Module, forward: Callable[[], object]) -> None:
        self.model, self.forward = model, forward
        self.noise, self.axis, self.is_random, self.sees_padding = 0.0, -1, False, False
        modules = ((module, name) for name, module in model.named_modules())
        self.names = {module: name for module, name in modules if not isinstance(module, torch.jit.ScriptModule)}
        outer: list[list[Any]] = []  # calls that lie in no other: module, arguments, and output
        self._returned: list[tuple[nn.Module, int, list[torch.Size]]] = []  # module, which of its calls, shapes
        self._place: int | None = None  # of the tensor that is looked at, among those of the output
        self.embedded: Counter[int] = Counter()  # how often embeddings take a storage
        last_call: dict[int, int] = {}  # number of a tensor -> that of the call that returned it
        counts: Counter[nn.Module] = Counter()
        depth = 0

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            nonlocal depth
            if not depth:
                outer.append([module, args, kwargs, None])
            depth += 1

        def after(module: nn.Module, args: Any, output: Any) -> None:
            nonlocal depth
            depth -= 1
            if isinstance(module, nn.Embedding) and args:
                self.embedded[args[0].untyped_storage().data_ptr()] += 1
            counts[module] += 1
            if not depth:
                outer[-1][3] = output
            self._returned.append((module, counts[module], [tensor.shape for tensor in tensors_in(output)]))
            if depth:
                last_call.update((id(tensor), len(self._returned)) for tensor in tensors_in(output))

        with self.hooked(after), ExitStack() as stack:
            for module in self.names:
                stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            forward()
        if not outer or depth:
            raise NotAskedError("the forward calls no module of the model")
        (self.inlet, args, kwargs, _), (self.outlet, _, _, output) = outer[0], outer[-1]
        self.calls = sum(call[0] is self.outlet for call in outer)
        self.leaves, self.spec = tree_flatten((args, kwargs))
        arguments = dict(inspect.signature(self.inlet.forward).bind(*args, **kwargs).arguments)
        for value in [value for value in arguments.values() if isinstance(value, dict)]:
            arguments |= value
        names = {id(value): name for name, value in reversed(arguments.items())}
        # Labels may be the tokens themselves, one tensor by two names.
        keywords = [name if leaf is value else "" for name, value in kwargs.items() for leaf in tree_leaves(value)]
        written = [""] * (len(self.leaves) - len(keywords)) + keywords
        self.label = {
            at: name or names.get(id(leaf), "")
            for at, (leaf, name) in enumerate(zip(self.leaves, written)) if isinstance(leaf, Tensor) and leaf.dim()
        }  # fmt: skip
        self.inputs = sorted(self.label, key=lambda at: [*arguments, ""].index(self.label[at]))  # as they are declared
        tensors = tensors_in(output)
        self.outputs = sum(tensor.dim() > 1 for tensor in tensors)
        try:
            self.base = self.output_of(output)
            # Of states of all layers the last: the first is that of the embedding.
            alike = [at for at, tensor in enumerate(tensors) if tensor.shape == self.base.shape]
            self._place = max(alike, key=lambda at: last_call.get(id(tensors[at]), 0))
            self.base = self.output_of(output)
        except NotAskedError:  # a loss alone: what it is made of
            self._look_at(lambda shapes: any(len(shape) > 1 for shape in shapes))

    def _look_at(self, fits: Callable[[list[torch.Size]], bool]) -> None:
        """Look at the last call whose output has tensors of shapes that fit."""
        calls = [call for call in self._returned if fits(call[2])]
        if not calls:
            raise NotAskedError("no output is by token")
        self.outlet, self.calls, _ = calls[-1]
        self._place = None
        self.base = self.ask()

    def inner(self, batch: int, tokens: int) -> Door:
        """Return the same door, looked at where a module last returned (batch, tokens, features)."""
        door = copy.copy(self)
        door._look_at(lambda shapes: bool(shapes) and len(shapes[0]) == 3 and shapes[0][:2] == (batch, tokens))
        return door

    def hooked(self, hook: Callable[..., Any], **options: Any) -> ExitStack:
        """Return a context in which all modules have a hook."""
        stack = ExitStack()
        for module in self.names:
            stack.callback(module.register_forward_hook(hook, **options).remove)
        return stack

    def output_of(self, output: Any) -> Tensor:
        """Return the tensor that is looked at: no scalar, no matrix of samples and samples (contrastive logits)."""
        if self._place is not None:
            return tensors_in(output)[self._place].detach()
        batch = len(self.leaves[self.inputs[0]]) if self.inputs else 0
        several = sum(self.leaves[at].dim() > 1 for at in self.inputs) > 1
        for tensor in tensors_in(output):
            is_pairwise = tensor.dim() > 1 and tensor.shape[0] == tensor.shape[1] == batch
            if tensor.dim() and not (is_pairwise and (tensor.dim() == 2 or several)):
                return tensor.detach()
        raise NotAskedError("the output has no tensor of numbers")

    def ask(self, changes: Changes | None = None, context: AbstractContextManager[Any] | None = None) -> Tensor:
        """Return the output after changes of inputs."""
        leaves = [
            (changes or {}).get(at, leaf.clone() if isinstance(leaf, Tensor) else leaf)
            for at, leaf in enumerate(self.leaves)
        ]
        outputs: list[Any] = []

        def enter(*_: Any) -> Any:
            entrance.remove()
            return tree_unflatten(leaves, self.spec)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            outputs.append(output)
            if len(outputs) == self.calls:
                raise _LookedAtError

        entrance = self.inlet.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
        with ExitStack() as stack:
            stack.callback(entrance.remove)
            stack.enter_context(context or nullcontext())
            stack.callback(self.outlet.register_forward_hook(leave).remove)
            with suppress(_LookedAtError):
                self.forward()
        return self.output_of(outputs[-1])

    def record(
        self,
        changes: Changes,
        place: Place = lambda tensor: ...,
        context: AbstractContextManager[Any] | None = None,
        among: Collection[str] | None = None,
    ) -> Calls:
        """Return calls of modules in a changed forward, and of what they take and return what lies at a place."""
        calls: Calls = []

        def cut(value: Any) -> list[Tensor]:
            pairs = [(tensor.detach(), place(tensor)) for tensor in tensors_in(value)]
            return [tensor[index].float().clone() for tensor, index in pairs if index is not None]

        def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if among is None or self.names[module] in among:
                calls.append((module, cut((args, kwargs)), cut(output)))

        with self.hooked(note, with_kwargs=True):
            self.ask(changes, context)
        return calls

    def differ(self, first: Tensor, second: Tensor) -> float:
        """Return the largest difference, in units of the output's spread."""
        if first.shape != second.shape:
            return float("inf")
        spread = float(self.base.float().std()) + 1e-12 if self.base.numel() > 1 else 1.0
        gaps = torch.where(first == second, 0.0, (first.float() - second.float()).abs()).nan_to_num(1e9)
        return float(gaps.max()) / spread if first.numel() else 0.0

    @property
    def tolerance(self) -> float:
        """What rounding and the noise between two forwards can make."""
        return max(3e-4 if self.base.dtype in {torch.float32, torch.float64} else 0.1, 30 * self.noise)

    def first(self, before: Calls, after: Calls) -> str:
        """Return the first module whose output differs in two forwards and whose inputs do not; "" if there is none."""
        for (module, inputs, outputs), (again, other_inputs, other_outputs) in zip(before, after):
            if module is not again:
                return ""
            if inputs and outputs and _unequal(outputs, other_outputs) and not _unequal(inputs, other_inputs):
                return self.names[module] or type(module).__name__
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
    """Tokens, numbers, caches, padding, positions and labels of the inputs, by their values (labels by name too)."""

    def __init__(self, door: Door) -> None:
        self.door = door
        leaves = self.leaves = door.leaves
        self._inner: Door | None = None
        binary = {at for at in door.inputs if bool(((leaves[at] == 0) | (leaves[at] == 1)).all())}
        numbers = [at for at in door.inputs if at not in binary]
        listed = [at for at in door.inputs if not door.label[at] and leaves[at].dim() == 4]  # or in a dict
        self.caches = [at for at in listed if leaves[at].is_floating_point()]
        self.floats = [at for at in numbers if leaves[at].is_floating_point() and leaves[at].dim() > 1]
        self.masks = [at for at in door.inputs if leaves[at].dim() == 2 and at in binary]
        whole = [at for at in numbers if leaves[at].dtype in {torch.int32, torch.int64} and leaves[at].dim() == 2]
        self.labels = [at for at in whole if bool((leaves[at] < 0).any()) or re.search("label|target", door.label[at])]
        self.positions = [at for at in whole if at not in self.labels and _counts(leaves[at])]
        tokens = [at for at in whole if at not in self.labels + self.positions]
        held = {at: leaves[at].untyped_storage().data_ptr() for at in tokens}
        again = [
            at for at in tokens if any(i < at and self.is_moved(leaves[i], leaves[at]) for i in tokens)
            # A target that is its source is embedded, too.
            and sum(held[i] == held[at] for i in tokens if i <= at) > door.embedded[held[at]]
        ]  # fmt: skip
        self.tokens, self.labels = [at for at in tokens if at not in again], self.labels + again
        self.main = self.tokens + [at for at in self.floats if not self.tokens or at not in self.caches]
        self.pads = self._padding()
        self.is_pair = len(self.main) == 2 and all(
            leaves[at].dim() == 2 + leaves[at].is_floating_point() for at in self.main
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
        """Return which entries are padding: what a mask hides at ends of rows, or a known id, or zeros, only there."""
        sides = [side for at in self.masks for side in (~self.leaves[at].bool(), self.leaves[at].bool())]
        marked: list[Tensor] = sorted(filter(_is_at_ends, sides), key=lambda pads: bool(pads.any(1).all()))
        if marked:  # where some row is all real, it says which of 0 and 1 is padding
            return {at: marked[0] for at in self.door.inputs if self.leaves[at].shape[:2] == marked[0].shape}
        zeros = {at: (self.leaves[at] == 0).all(-1) for at in self.floats if self.leaves[at].dim() == 3}
        pads_of = {at: pads for at, pads in zeros.items() if _is_at_ends(pads) and int(pads.sum()) > 1}
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

    def unpadded(self) -> dict[int, Tensor]:
        """Return changes that put real tokens for padding."""
        changes: dict[int, Tensor] = {}
        for at in [at for at in self.tokens + self.masks if at in self.pads]:
            pads = self.pads[at]
            real = self.leaves[at][~pads]
            filled = real.repeat(pads.numel() // len(real) + 1)[: pads.numel()].view(pads.shape)
            changes[at] = torch.where(pads, filled, self.leaves[at])
        return changes

    def sequence(self, facts: Sequence[Facts]) -> tuple[Door, int, int]:
        """Return door, main input and number of tokens where one sequence goes in."""
        door = self.door
        if door.is_random or door.axis != 0:
            random = "forwards are random" if door.is_random else ""
            raise NotAskedError(random or "samples mix, or are not on the first axis")
        if len(self.main) != 1 or getattr(getattr(door.model, "config", None), "is_encoder_decoder", False):
            several = "more than one sequence goes in, or is made of labels"
            raise NotAskedError(several if self.main else "no sequence goes in")
        x = self.leaves[self.main[0]]
        if x.dim() != 2 + x.is_floating_point() or x.shape[1] < 4:
            raise NotAskedError("no sequence of tokens goes in")
        if door.base.dim() < 3 or door.base.shape[:2] != x.shape[:2]:
            if not facts or any(not each.queries == each.keys == x.shape[1] for each in facts):
                raise NotAskedError("outputs are not by token, or attention is not among the tokens alone")
            door = self._inner = self._inner or door.inner(*x.shape[:2])
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
