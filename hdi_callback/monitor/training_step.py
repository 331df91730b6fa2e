"""The training step as a part of the contract: what becomes of gradients before the optimizer, and who writes weights.

Exact facts of the parameters that the optimizers hold: the gradient that a step uses is that of the backward, up to one
positive factor of all; and between two steps nothing writes. Versions of parameters count writes for nothing; gradients
and bits are looked at where the contract is compared. Not known, and so never told, are gradients with several ranks,
of sharded or sparse parameters and in compiled steps, and writes through `.data` between two comparisons.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdi_callback.attention.discovery.find import name_without_wrappers
from hdi_callback.attention.dtensors import is_sharded
from hdi_callback.attention.hooks import Hook
from hdi_callback.attention.layer import AttentionLayer
from hdi_callback.guard import Guard, guarded, without_modes
from hdi_callback.monitor.parameter_source import bits_of
from hdi_callback.monitor.ranks import number_of_ranks

__all__ = ["GRADIENTS", "WRITES", "StepFacts", "TrainingStep", "tell"]

GRADIENTS, WRITES = "step gradients", "step writes"
ADDED, TURNED, SCALED, CHANGED, TOUCHED = "not cleared", "turned", "scaled", "changed", "touched"

_SAMPLE = 1024
"""Entries of a parameter's gradient that are compared, in a regular grid."""

_OPPOSITE = 0.1
"""Share of entries of the other sign that no clipping, scaling or rounding of a sum makes."""

_ROUNDING = 0.01

Terms = dict[tuple[str, int, str], dict[str, str]]
Place = tuple[str, str]
"""The layer that a parameter belongs to, or `""`, and its name there or in the model."""

_PHRASES = {
    ADDED: "gradients of {} are not cleared: they add up",
    TURNED: "the optimizer gets another gradient of {} than the backward gives, in other directions",
    SCALED: "the optimizer gets a larger gradient of {} than the backward gives, beside all others",
    CHANGED: "something writes {} between the optimizer's steps",
}


class StepFacts(NamedTuple):
    """What one step has shown: tensors on their way to the host, and what makes terms of the contract of them."""

    tensors: Sequence[Tensor]
    terms: Callable[..., Terms]


Key = tuple[int, str]
Version = tuple[int, int]


@dataclass
class _Steps:
    """The steps of one optimizer; versions, with which tensor it was, are by number of the parameter and its state."""

    optimizer: Optimizer
    count: int = 0  # since the last step that was looked at
    has_run: bool = False  # since the last reading, so that its hooks are called
    is_armed: bool = False
    begun: dict[Key, Version] = field(default_factory=dict)  # versions right before the step that is looked at
    ended: dict[Key, Version] = field(default_factory=dict)  # and right after the last one
    most: dict[Key, int] = field(default_factory=dict)  # writes by one step
    settings: dict[str, Any] = field(default_factory=dict)  # of its groups, at the last step that was looked at
    facts: StepFacts | None = None  # of a step, until the next one begins
    looked_at: list[nn.Parameter] = field(default_factory=list)  # for these


class TrainingStep:
    """Looks at optimizer steps at readings.

    Attributes:
        written: names of parameters, of their states in an optimizer, and of its settings but for the rate, that
            something else than a step wrote since the reading before, for the first time.
    """

    def __init__(self, model: nn.Module) -> None:
        self.written: tuple[str, ...] = ()
        self._model, self._guard = model, Guard()
        self._layers: Sequence[AttentionLayer] = ()
        self._steps: dict[int, _Steps] = {}
        self._handles: list[Any] = []
        self._hooks: list[Any] = []  # on parameters, until the step
        self._raw: dict[int, list[Any]] = {}  # number -> sum of the samples of gradients, and whether one was there
        self._ever: set[Any] = set()  # what something else than a step has written
        self._is_fresh = True  # whether no forward of the step to come was missed
        self._compares = self._is_wanted = False  # now, and at the next reading as well
        self._arms = 0
        self._ready: list[StepFacts] = []
        self._last: Terms = {}  # what was known of gradients last, where a step does not show it

    @guarded("watching the training step")
    def arm(self, optimizers: Iterable[Optimizer], layers: Sequence[AttentionLayer], *, compares: bool) -> None:
        """Look at the next step; where the contract `compares`, also at its gradients and at what follows it."""
        self.drop()
        self._arms, self._layers = self._arms + 1, layers
        self._compares, self._is_wanted = compares or self._is_wanted or self._arms == 2, compares
        for optimizer in optimizers:
            if id(optimizer) not in self._steps and hasattr(type(optimizer).step, "hooked"):
                self._steps[id(optimizer)] = _Steps(optimizer)
                self._handles.append(optimizer.register_step_pre_hook(Hook(self, "_before_step")))
                self._handles.append(optimizer.register_step_post_hook(Hook(self, "_after_step")))
        for steps in self._steps.values():
            # A step that is compiled calls no hooks: then none would take those on the parameters away.
            is_able = self._compares and self._is_fresh and steps.has_run and number_of_ranks() == 1
            for parameter in _parameters(steps.optimizer) if is_able else ():
                if parameter.requires_grad and not is_sharded(parameter):
                    self._hooks.append(parameter.register_hook(partial(self._take, parameter)))
            steps.is_armed, steps.has_run = True, False
        self._is_fresh = False

    def drop(self) -> None:
        """Look at no step any more; its forward did not finish, or there is no further one."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._raw = [], {}
        for steps in self._steps.values():
            steps.is_armed, steps.begun = False, {}

    def close(self) -> None:
        """Look at no step any more; also within one, where no hook of an optimizer can be removed."""
        self.drop()
        self._steps = {}

    def remove(self) -> None:
        """Remove all hooks, between steps."""
        self.close()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def accept(self) -> None:
        """Take what an intervention has just written for what a step left."""
        for steps in self._steps.values():
            steps.ended, steps.count, steps.facts = {}, 0, None

    def take(self) -> list[StepFacts]:
        """Return what steps have shown since it was called last."""
        ready, self._ready = self._ready, []
        return ready

    def _before_step(self, optimizer: Optimizer, *args: Any) -> None:
        steps = self._steps.get(id(optimizer))
        if steps is not None and (steps.facts is not None or steps.is_armed):
            self._begin(steps)

    def _after_step(self, optimizer: Optimizer, *args: Any) -> None:
        steps = self._steps.get(id(optimizer))
        if steps is None:
            return
        self._is_fresh = steps.has_run = True
        if steps.is_armed and steps.begun:
            self._look(steps)
        else:
            steps.count += 1

    def _take(self, parameter: Tensor, gradient: Tensor) -> None:
        """Add up a sample of what the backward gives, before it is added to what is there."""
        if torch.compiler.is_compiling() or gradient.layout is not torch.strided:
            return
        with without_modes():
            sample, there = _sample(gradient), parameter.grad
            if id(parameter) in self._raw:
                self._raw[id(parameter)][0] += sample
            else:
                was_there = sample.new_zeros((), dtype=torch.bool)
                if there is not None and there.layout is torch.strided:
                    was_there = _sample(there).any()
                self._raw[id(parameter)] = [sample, was_there]

    @guarded("watching the training step")
    def _look(self, steps: _Steps) -> None:
        """Compare versions with those after the step that was looked at before, and take gradients and bits."""
        parameters = _parameters(steps.optimizer)
        now, settings = _versions(steps.optimizer), _settings(steps.optimizer)
        own = {key: now[key][0] - steps.begun.get(key, now[key])[0] for key in now}
        most = {key: max(own[key], steps.most.get(key, 0)) for key in now}
        touched: set[Any] = {
            key for key, (version, tensor) in steps.begun.items()
            # What no step is seen to write may have been without a gradient in those alone.
            if key in steps.ended and most.get(key) and
            (tensor != steps.ended[key][1] or version - steps.ended[key][0] > most[key] * steps.count)
        }  # fmt: skip
        touched |= {name for name, value in settings.items() if steps.settings.get(name, value) != value}
        new = touched - self._ever if self._arms > 2 else ()  # what was so at first is no change
        self._ever |= touched
        if new:
            names = _names(self._model, ())
            own_names = [
                f"{state} of {names[key][1]}" if state else names[key][1] for key, state in now
                if (key, state) in new and key in names
            ]  # fmt: skip
            self.written += (*own_names, *(f"{name} of the optimizer" for name in settings if name in new))
        steps.ended, steps.most, steps.count, steps.is_armed, steps.begun = now, most, 0, False, {}
        steps.settings = settings
        if not self._compares:
            return
        pairs = []
        for parameter in parameters:
            gradient = parameter.grad
            if id(parameter) in self._raw and gradient is not None and gradient.layout is torch.strided:
                pairs.append((parameter, *self._raw[id(parameter)], _sample(gradient)))
        if not any(each.is_armed for each in self._steps.values()):
            self.drop()
        able = [parameter for parameter in parameters if not is_sharded(parameter) and parameter.is_floating_point()]
        names = _names(self._model, self._layers)
        places = [names.get(id(parameter)) for parameter in able], [names.get(id(parameter)) for parameter, *_ in pairs]
        sizes = [sample.numel() for _, sample, *_ in pairs]
        home = able[0].device if able else torch.device("cpu")
        columns = [torch.cat([tensor.to(home).reshape(-1) for tensor in column]) for column in [*zip(*pairs)][1:]]
        is_touched = [(id(parameter), "") in self._ever for parameter in able]
        steps.looked_at = able
        steps.facts = StepFacts([*columns, _bits(able)], partial(self._terms, *places, sizes, is_touched))

    @guarded("watching the training step")
    def _begin(self, steps: _Steps) -> None:
        """Note versions right before a step, and the bits right before that which follows one that was looked at."""
        parameters = _parameters(steps.optimizer)
        if steps.is_armed:
            steps.begun = _versions(steps.optimizer)
        if steps.facts is not None:
            if {*map(id, steps.looked_at)} <= {*map(id, parameters)}:
                tensors = [*steps.facts.tensors, _bits(steps.looked_at)]
                self._ready.append(StepFacts(tensors, steps.facts.terms))
            steps.facts, steps.looked_at = None, []

    def _terms(
        self, able: Sequence[Place | None], trained: Sequence[Place | None], sizes: Sequence[int],
        is_touched: Sequence[bool], *arrived: Tensor,
    ) -> Terms:  # fmt: skip
        """Return the terms of the contract, of each layer and under `""` of the rest of the model."""
        *of_gradients, after, before = arrived
        terms: Terms = {}
        for place, is_same, was_touched in zip(able, (after == before).tolist(), is_touched):
            if place is not None:
                state = TOUCHED if is_same and was_touched else "" if is_same else CHANGED
                terms.setdefault((place[0], 0, WRITES), {})[place[1]] = state
        if of_gradients:
            raw, was_there, used = of_gradients
            states = _compared(raw.split(sizes), used.split(sizes))
            for place, was_added_to, became in zip(trained, was_there.tolist(), states):
                if place is not None and became is not None:
                    terms.setdefault((place[0], 0, GRADIENTS), {})[place[1]] = ADDED if was_added_to else became
        for term in [term for term in terms if term[2] == GRADIENTS]:
            self._last[term] = terms[term] = {**self._last.get(term, {}), **terms[term]}
        return terms


def tell(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, list[str]]:
    """Return what has become of gradients or weights of which nothing was told -> names of parameters."""
    told: dict[str, list[str]] = {}
    for name, state in after.items():
        if state not in {"", TOUCHED} and before.get(name, state) == "":
            told.setdefault(_PHRASES[state], []).append(name)
    return told


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _versions(optimizer: Optimizer) -> dict[Key, Version]:
    """Return version and number of each parameter, and of the tensors of its state."""
    versions = {}
    for parameter in _parameters(optimizer):
        states = {
            name: state for name, state in optimizer.state.get(parameter, {}).items() if isinstance(state, Tensor)
        }
        for name, tensor in {"": parameter, **states}.items():
            versions[id(parameter), name] = tensor._version, id(tensor)
    return versions


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
    names: dict[int, Place] = {
        id(parameter): ("", name_without_wrappers(name)) for name, parameter in model.named_parameters()
    }
    for layer in layers:
        names |= {id(parameter): (layer.name, name) for name, parameter in layer.module.named_parameters()}
    return names


def _sample(tensor: Tensor) -> Tensor:
    """Return entries of a tensor in a regular grid, flat and in float32."""
    side = max(1, int(_SAMPLE ** (1 / max(1, tensor.dim()))))
    grid = tuple(slice(None, None, max(1, size // side)) for size in tensor.shape)
    return tensor.detach()[grid].to(torch.float32, copy=True).reshape(-1)


def _bits(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return the sum of the bits of each parameter, which any change changes."""
    sums = [bits_of(parameter).sum(dtype=torch.int64) for parameter in parameters]
    return torch.stack([each.to(sums[0].device) for each in sums]) if sums else torch.zeros(0, dtype=torch.int64)


def _compared(raw: Sequence[Tensor], used: Sequence[Tensor]) -> list[str | None]:
    """Return what became of each gradient but for one positive factor and clipping; `None` where it is not known."""
    factors = torch.stack([(each * after).sum() / each.square().sum() for each, after in zip(raw, used)])
    common = factors[factors.isfinite()].median() if bool(factors.isfinite().any()) else factors[0]
    is_common = bool(2 * ((factors / common - 1).abs() < _ROUNDING).sum() > len(factors))
    states: list[str | None] = []
    for each, after, factor in zip(raw, used, factors):
        counts = (each.abs() > 1e-3 * each.abs().max()) & (after != 0)
        if not bool(each.isfinite().all() & after.isfinite().all() & counts.any()):
            states.append(None)
        elif float((each * after < 0)[counts].float().mean()) > _OPPOSITE:
            states.append(TURNED)
        else:  # clipping makes smaller ones
            states.append(SCALED if is_common and float(factor / common) > 1 + 5 * _ROUNDING else "")
    return states
