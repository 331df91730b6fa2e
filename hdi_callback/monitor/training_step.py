"""The training step as a part of the contract: what becomes of gradients before the optimizer, and who writes weights.

Exact facts of the parameters that the optimizers hold: the gradient that a step uses is that of the backward, up to one
positive factor of all; and between two steps nothing writes. Versions count writes for nothing, but none through
`.data`; gradients and places of rows are looked at where the contract is compared. Not known, and so never told, are
gradients with several ranks, of sharded or sparse parameters and in compiled steps.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import attrgetter, sub
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdi_callback.attention.discovery.find import name_without_wrappers
from hdi_callback.attention.dtensors import is_sharded
from hdi_callback.attention.hooks import Hook
from hdi_callback.attention.layer import AttentionLayer
from hdi_callback.guard import Guard, guarded
from hdi_callback.monitor.places import Place, Places, Side, sketch_of
from hdi_callback.monitor.ranks import number_of_ranks
from hdi_callback.monitor.reading import StepFacts, Terms
from hdi_callback.monitor.standstill import Standstill, parameters_of

GRADIENTS, PLACES = "step gradients", "step places"
ADDED, TURNED, SCALED, UNCLEAR = "not cleared", "turned", "scaled", "unclear"

_SAMPLE = 1024  # entries of a parameter's gradient that are compared, in a regular grid
_OPPOSITE = 0.1  # share of entries of the other sign that no clipping, scaling or rounding of a sum makes
_ROUNDING, _SMALLER = 0.01, 50
_SHRUNK = "the optimizer gets gradients 50 times smaller than ever from a backward that gives as large ones as before"
_OTHER = 2**32  # writes into another tensor are more, of one they are less
_version, _is_tensor = attrgetter("_version"), partial(type.__instancecheck__, Tensor)  # in C, as states have hundreds

_PHRASES = {
    ADDED: "gradients of {} are not cleared: they add up",
    TURNED: "the optimizer gets another gradient of {} than the backward gives, in other directions",
    SCALED: "the optimizer gets a larger gradient of {} than the backward gives, beside all others",
}

Key = tuple[int, str]  # number of a parameter, and the name of a tensor in its state; `""` for itself


@dataclass
class _Steps:
    """The steps of one optimizer; for versions, and their differences, see `_versions`."""

    count: int = 0  # since the last step that was looked at
    has_run: bool = False  # since the last reading, so that its hooks are called
    is_armed: bool = False
    begun: list[int] = field(default_factory=list)  # versions right before the step that is looked at
    ended: list[int] = field(default_factory=list)  # and right after the last one
    own: list[int] = field(default_factory=list)  # writes by the last one
    most: dict[Key, float] = field(default_factory=dict)  # writes by one step; without end where their number varies
    settings: dict[str, Any] = field(default_factory=dict)  # of its groups, at the last step that was looked at
    least: tuple[float, float] | None = None  # norm of all gradients, and that as a share of the backward's


class TrainingStep:
    """Looks at optimizer steps at readings."""

    def __init__(self, model: nn.Module) -> None:
        self.written: tuple[str, ...] = ()  # what else than a step wrote for the first time, see `Record`
        self._model, self._guard = model, Guard()
        self._layers: Sequence[AttentionLayer] = ()
        self._steps: WeakKeyDictionary[Optimizer, _Steps] = WeakKeyDictionary()
        self._handles: list[Any] = []
        self._hooks: list[Any] = []  # on parameters and modules, until the step
        self._gradients: dict[int, Tensor] = {}  # number -> sample of the gradient
        self._was_there: dict[int, Tensor] = {}  # number -> whether a gradient was there
        self._touched: set[Any] = set()  # what something else than a step has written
        self._is_fresh = True  # whether no forward of the step to come was missed
        self._compares = self._is_wanted = False  # now, and at the next reading as well
        self._arms = 0
        self._ready: list[StepFacts] = []
        self._last: Terms = {}  # what was known of gradients last, where a step does not show it
        self._places, self._standstill = Places(), Standstill(model)

    @guarded("watching the training step")
    def arm(self, optimizers: Iterable[Optimizer], layers: Sequence[AttentionLayer], *, compares: bool) -> None:
        """Look at the next step; where the contract `compares`, also at its gradients and at places of rows."""
        self.drop()
        self._arms, self._layers = self._arms + 1, layers
        self._compares, self._is_wanted = compares or self._is_wanted or self._arms == 2, compares
        for optimizer in optimizers:
            if optimizer not in self._steps and hasattr(type(optimizer).step, "hooked"):
                self._steps[optimizer] = _Steps()
                self._handles.append(Hook(self, "_before_step").on(optimizer.register_step_pre_hook))
                self._handles.append(Hook(self, "_after_step").on(optimizer.register_step_post_hook))
        for optimizer, steps in self._steps.items():
            # A step that is compiled calls no hooks: then none would take those on the parameters away.
            is_able = self._compares and self._is_fresh and steps.has_run and number_of_ranks() == 1
            for parameter in parameters_of(optimizer) if is_able else ():
                if parameter.requires_grad and parameter.is_floating_point() and not is_sharded(parameter):
                    self._hooks.append(parameter.register_hook(partial(self._note, parameter)))
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(self._take))
            steps.is_armed, steps.has_run = True, False
        self._hooks += self._standstill.arm()
        self._is_fresh = False

    @guarded("watching what moves")
    def look(self, step: int, parameters: Sequence[nn.Parameter], *, is_new: bool) -> None:
        """Look at a reading at what has moved since the last; `is_new`: other parameters, or others are to train."""
        if self._steps:
            self._ready.append(self._standstill.look(step, parameters, self._steps, self._layers, is_new=is_new))

    def drop(self) -> None:
        """Look at no step any more; its forward did not finish, or there is no further one."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._gradients, self._was_there = [], {}, {}
        for steps in self._steps.values():
            steps.is_armed, steps.begun = False, []

    def close(self) -> None:
        """Look at no step any more; also within one, where no hook of an optimizer can be removed."""
        self.drop()
        self._steps.clear()

    def remove(self) -> None:
        """Remove all hooks, between steps."""
        self.close()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def accept(self) -> None:
        """Take what an intervention has just written for what a step left."""
        for steps in self._steps.values():
            steps.ended, steps.count = [], 0

    def take(self) -> list[StepFacts]:
        """Return what steps have shown since it was called last."""
        ready, self._ready = self._ready, []
        return ready

    @guarded("watching the training step")
    def _before_step(self, optimizer: Optimizer, *args: Any) -> None:
        steps = self._steps.get(optimizer)
        if steps is not None and steps.is_armed:
            steps.begun = _versions(optimizer)

    @guarded("watching the training step")
    def _after_step(self, optimizer: Optimizer, *args: Any) -> None:
        steps = self._steps.get(optimizer)
        if steps is None:
            return
        self._is_fresh = steps.has_run = True
        if not (steps.is_armed and steps.begun):
            steps.count += 1
            return
        self._look_for_writes(optimizer, steps)
        if self._compares:
            self._look_at_gradients(optimizer, steps)
        if not any(each.is_armed for each in self._steps.values()):
            self.drop()

    @guarded("watching the training step")
    def _note(self, parameter: Tensor, gradient: Tensor) -> None:
        """Note whether a gradient is there before the first backward since gradients were cleared."""
        if not torch.compiler.is_compiling():
            there = parameter.new_zeros(()) if parameter.grad is None or parameter.grad.is_sparse else parameter.grad
            was_there = _sample(there).any()
            # Between backwards gradients may be cleared: by a closure, or as a step was skipped.
            self._was_there[id(parameter)] = was_there & self._was_there.get(id(parameter), was_there)

    @guarded("watching the training step")
    def _take(self, parameter: Tensor) -> None:
        """Keep a sample of the gradient as the last backward leaves it."""
        if not torch.compiler.is_compiling() and parameter.grad is not None and not parameter.grad.is_sparse:
            self._gradients[id(parameter)] = _sample(parameter.grad)

    def _look_for_writes(self, optimizer: Optimizer, steps: _Steps) -> None:
        """Compare versions and settings with those after the step that was looked at before."""
        now, settings, keys = _versions(optimizer), _settings(optimizer), list[Key]()
        own, since = [*map(sub, now, steps.begun)], [*map(sub, steps.begun, steps.ended)]
        is_as_ever = own == steps.own and since == [*map(steps.count.__mul__, own)]
        touched: set[Any] = {name for name, value in settings.items() if steps.settings.get(name, value) != value}
        if not is_as_ever and len(now) == len(steps.begun) == len(steps.ended):
            keys = _keys(optimizer)
            steps.most |= {  # learn what this step writes
                key: writes if key not in steps.most and 0 < writes < _OTHER else math.inf
                for key, writes in zip(keys, _writes(own)) if writes and writes != steps.most.get(key)
            }  # fmt: skip
            owners = Counter(id(parameter) for each in self._steps for parameter in parameters_of(each))
            most = [steps.most.get(key, math.inf) for key in keys]
            touched |= {
                key for key, writes, at_most in zip(keys, _writes(since), most)
                # What no step is seen to write may have been without a gradient in those alone.
                if at_most < math.inf and owners[key[0]] == 1 and not 0 <= writes <= at_most * steps.count
            }  # fmt: skip
        new = touched - self._touched if self._arms > 2 else ()  # what was so at first is no change
        self._touched |= touched
        if new:
            names = _names(self._model, ())
            own_names = [
                f"{state} of {names[key][1]}" if state else names[key][1] for key, state in keys
                if (key, state) in new and key in names
            ]  # fmt: skip
            self.written += (*own_names, *(f"{name} of the optimizer" for name in settings if name in new))
        steps.ended, steps.own, steps.settings = now, own, settings
        steps.count, steps.is_armed, steps.begun = 0, False, []

    def _look_at_gradients(self, optimizer: Optimizer, steps: _Steps) -> None:
        """Take gradients, and entries of the rows of weights."""
        parameters, names = parameters_of(optimizer), _names(self._model, self._layers)
        pairs = [
            (parameter, self._gradients[id(parameter)], self._was_there[id(parameter)], _sample(parameter.grad))
            for parameter in parameters
            if id(parameter) in self._gradients and parameter.grad is not None and not parameter.grad.is_sparse
        ]
        able = [each for each in parameters if each.is_floating_point() and not is_sharded(each)]
        places = [names.get(id(parameter)) for parameter in able], [names.get(id(parameter)) for parameter, *_ in pairs]
        sizes = [sample.numel() for _, sample, *_ in pairs]
        home = able[0].device if able else torch.device("cpu")
        columns = [torch.cat([tensor.to(home).reshape(-1) for tensor in column]) for column in [*zip(*pairs)][1:]]
        sides, entries = sketch_of(able, home)
        self._ready.append(StepFacts([*columns, entries], partial(self._terms, steps, *places, sizes, sides)))

    def _terms(
        self, steps: _Steps, able: Sequence[Place | None], trained: Sequence[Place | None], sizes: Sequence[int],
        sides: Sequence[Side], *arrived: Tensor,
    ) -> Terms:  # fmt: skip
        """Return the terms of the contract, of each layer and under `""` of the rest of the model."""
        *of_gradients, entries = arrived
        self._places.compare(able, sides, entries)
        terms: Terms = {("", 0, PLACES): {}}
        for at in filter(None, able):
            terms.setdefault((at[0], 0, PLACES), {})[at[1]] = self._places.moved.get(at, "")
        if of_gradients:
            raw, was_there, used = of_gradients
            states = _compared(raw.split(sizes), used.split(sizes))
            for place, was_added_to, became in zip(trained, was_there.tolist(), states):
                if place is not None and became is not None:
                    terms.setdefault((place[0], 0, GRADIENTS), {})[place[1]] = ADDED if was_added_to else became
            size, share = float(used.norm()), float(used.norm() / raw.norm())
            if 0 < size < math.inf and share < math.inf:
                least, of_backward = steps.least or (size, share)
                is_shrunk = _SMALLER * size < least and _SMALLER * share < of_backward
                steps.least = (least, of_backward) if is_shrunk else (min(size, least), min(share, of_backward))
                terms["", 0, PLACES][f"gradients {id(steps)}"] = _SHRUNK if is_shrunk else ""
        for term in terms:  # also what other optimizers have shown
            self._last[term] = terms[term] = {**self._last.get(term, {}), **terms[term]}
        return terms


def tell(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Return what has become of gradients of which nothing was told -> names of parameters."""
    told: dict[str, tuple[str, ...]] = {}
    for name, state in after.items():
        if state not in {"", UNCLEAR} and before.get(name, state) == "":
            told[_PHRASES[state]] = (*told.get(_PHRASES[state], ()), name)
    return told


def _versions(optimizer: Optimizer) -> list[int]:
    """Return of each parameter and each tensor of its state which tensor it is, then of each its version."""
    states = [state.values() for state in optimizer.state.values() if isinstance(state, dict)]
    tensors = [*filter(_is_tensor, chain(parameters_of(optimizer), *states))]
    return [*map(id, tensors), *map(_version, tensors)]


def _writes(differences: Sequence[int]) -> list[int]:
    """Return how often tensors were written, of differences of what `_versions` returns."""
    count = len(differences) // 2
    return [other * _OTHER + writes for other, writes in zip(differences[:count], differences[count:])]


def _keys(optimizer: Optimizer) -> list[Key]:
    """Return the keys of the tensors of `_versions`."""
    states = [(id(owner), state) for owner, state in optimizer.state.items() if isinstance(state, dict)]
    of_states = [(owner, name) for owner, state in states for name in state if isinstance(state[name], Tensor)]
    return [*((id(each), "") for each in parameters_of(optimizer)), *of_states]


def _settings(optimizer: Optimizer) -> dict[str, Any]:
    """Return the settings of all groups, but for the rate, of which only the share of a group in the first counts."""
    settings: dict[str, Any] = {}
    first = optimizer.param_groups[0].get("lr")
    for number, group in enumerate(optimizer.param_groups):
        place = f" of group {number}" if number else ""
        for name in group.keys() - {"params", "lr", "initial_lr"}:
            if isinstance(group[name], bool | int | float | tuple | list):
                settings[name + place] = group[name]
        if number and isinstance(first, float) and isinstance(group.get("lr"), float) and first > 0:
            settings[f"lr{place}"] = round(group["lr"] / first, 6)
    return settings


def _names(model: nn.Module, layers: Sequence[AttentionLayer]) -> dict[int, Place]:
    """Return number of a parameter -> its place."""
    within = (layer for layer in layers if layer.module is not model)
    of_layers = ((layer.name, name, each) for layer in within for name, each in layer.module.named_parameters())
    of_model = (("", name_without_wrappers(name), each) for name, each in model.named_parameters())
    return {id(parameter): (layer, name) for layer, name, parameter in (*of_model, *of_layers)}


def _sample(tensor: Tensor) -> Tensor:
    """Return entries of a tensor in a regular grid, flat and in float32."""
    side = max(1, int(_SAMPLE ** (1 / max(1, tensor.dim()))))
    grid = tuple(slice(None, None, max(1, size // side)) for size in tensor.shape)
    return tensor.detach()[grid].to(torch.float32, copy=True).reshape(-1)


def _compared(raw: Sequence[Tensor], used: Sequence[Tensor]) -> list[str | None]:
    """Return what became of each gradient but for one positive factor and clipping; `None` where it is not known."""
    factors = torch.stack([(each * after).sum() / each.square().sum() for each, after in zip(raw, used)])
    common = factors[factors.isfinite()].median() if bool(factors.isfinite().any()) else factors[0]
    is_common = bool(2 * ((factors / common - 1).abs() < _ROUNDING).sum() > len(factors))
    states: list[str | None] = []
    for each, after, factor in zip(raw, used, factors):
        ratios = (after / each)[(each.abs() > 1e-4 * each.norm()) & (after != 0)]
        if not bool(each.isfinite().all() & after.isfinite().all()) or not len(ratios):
            states.append(None)
        elif float((ratios < 0).float().mean()) > _OPPOSITE:
            states.append(TURNED)
        elif is_common and float(factor / common.clamp(min=1)) > 1 + 5 * _ROUNDING:  # clipping makes smaller ones
            states.append(SCALED)
        else:  # what is added to a gradient from the start on may outgrow it later
            states.append(UNCLEAR if bool((ratios > (1 + 5 * _ROUNDING) * ratios.median()).any()) else "")
    return states
