"""Interventions on the whole run: stop, save a checkpoint, scale the learning rate, call a function."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdi_callback.arguments import number, one_of, shown
from hdi_callback.errors import MisconfigurationError
from hdi_callback.guard import attempt_each, guarded
from hdi_callback.monitoring.alerts import Alert, Level
from hdi_callback.monitoring.interventions.action import Action
from hdi_callback.monitoring.interventions.intervention import Intervention
from hdi_callback.monitoring.interventions.parameters import parameters_of
from hdi_callback.monitoring.interventions.training import Training
from hdi_callback.monitoring.interventions.while_active import WhileActive
from hdi_callback.monitoring.warn_once import WarnOnce


class StopTraining(Intervention):
    """End the training; by default on the first critical alert.

    Args:
        on: the least serious level that it answers.
        options: see `Intervention`.
    """

    name = "StopTraining"

    def __init__(self, *, on: Level = "critical", **options: Any) -> None:
        super().__init__(on=on, **options)

    def act(self, alert: Alert) -> Action:
        """End the training after this step."""
        if not self.dry_run:
            self.training.stop()
        return self._action(alert, "stopped the training")


class SaveCheckpoint(Intervention):
    """Save a checkpoint at a warning, before the collapse deepens; at most three."""

    name = "SaveCheckpoint"
    at_most = 3

    def act(self, alert: Alert) -> Action:
        """Save a checkpoint named for the step."""
        name = f"heads-{alert.rule.replace(' ', '-')}-step={alert.step}"
        path = name if self.dry_run else self.training.save_checkpoint(name)
        return self._action(alert, f"saved {path}", path=path)


class Call(Intervention):
    """Call a function of your own with the alert.

    Args:
        function: takes the `Alert`; what it returns goes into the action's facts as text.
        options: see `Intervention`.
    """

    name = "Call"
    at_most = 1000

    def __init__(self, function: Callable[[Alert], Any], **options: Any) -> None:
        super().__init__(**options)
        if not callable(function):
            raise MisconfigurationError(
                f"`function` of Call must be a function that takes an Alert, got {shown(function)}."
            )
        self.function = function

    def act(self, alert: Alert) -> Action:
        """Call the function."""
        called = getattr(self.function, "__name__", type(self.function).__name__)
        result = None if self.dry_run else self.function(alert)
        return self._action(alert, f"called {called}", result=None if result is None else str(result))


class ScaleLearningRate(WhileActive):
    """Scale the learning rate while an alert is active.

    The factor is applied before each optimizer step and removed after it, so that schedulers and checkpoints see the
    learning rate that they set. For one layer alone its parameters are moved by that share of the step, which for every
    optimizer whose step is proportional to the learning rate (weight decay included) is the same.

    Args:
        factor: factor of the learning rate, in (0, 1].
        scope: ``"all"`` parameters of the run, or those of the collapsing ``"layer"``.
        options: see `Intervention`.

    Raises:
        MisconfigurationError: if an argument cannot work.
    """

    name = "ScaleLearningRate"

    def __init__(self, factor: float = 0.1, *, scope: Literal["all", "layer"] = "all", **options: Any) -> None:
        super().__init__(**options)
        self.factor = number("factor of ScaleLearningRate", factor, above=0, below=1, includes="]", example=0.1)
        self.scope = one_of("scope of ScaleLearningRate", scope, ("all", "layer"))
        self._handles: list[Any] = []
        self._rates: dict[int, list[Any]] = {}  # optimizer -> learning rates of its groups to restore
        self._before: list[tuple[nn.Parameter, Tensor]] = []
        self._warn_once = WarnOnce()

    def attach(self, training: Training) -> None:
        """Watch the steps of every optimizer."""
        super().attach(training)
        self.detach()
        for optimizer in training.optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._begin_step))
            self._handles.append(optimizer.register_step_post_hook(self._end_step))

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __getstate__(self) -> dict[str, Any]:
        """Drop the hooks as well."""
        return {**super().__getstate__(), "_handles": [], "_rates": {}, "_before": [], "_warn_once": WarnOnce()}

    def begin(self) -> str:
        """The action at the beginning, as a part of a sentence."""
        return f"multiplied the learning rate{self._of} by {self.factor:g}"

    def end(self) -> str:
        """The action at the end, as a part of a sentence."""
        return f"restored the learning rate{self._of}"

    @property
    def _of(self) -> str:
        return "" if self.scope == "all" else " of the layer"

    # Called by the optimizers, inside the user's `optimizer.step()`.

    @guarded("scaling the learning rate, which is left as it was,")
    def _begin_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        try:
            self._shrink(optimizer)
        except Exception:
            self._give_back(optimizer)
            self._before = []
            raise

    @guarded("restoring the learning rate")
    def _end_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._restore(optimizer)

    def _failed(self, work: str, error: Exception) -> None:
        self._warn_once.error(work, error)

    def _shrink(self, optimizer: Optimizer) -> None:
        if not self.is_active:
            return
        if self.scope == "all":
            self._give_back(optimizer)  # left by a step that failed
            rates = [group["lr"] for group in optimizer.param_groups]
            smaller = [rate * self.factor for rate in rates]  # all before any is set, as one may not be a number
            self._rates[id(optimizer)] = rates
            for group, rate in zip(optimizer.param_groups, smaller):
                group["lr"] = rate
            return
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        concerned = {
            id(parameter): parameter
            for layer in self.standing
            if layer in self.training.layers
            for parameter in parameters_of(self.training.layers[layer])
            if id(parameter) in stepped
        }
        self._before = [(parameter, parameter.detach().clone()) for parameter in concerned.values()]

    def _restore(self, optimizer: Optimizer) -> None:
        self._give_back(optimizer)
        moved, self._before = self._before, []
        attempt_each(partial(self._shorten, parameter, before) for parameter, before in moved)

    @torch.no_grad()
    def _shorten(self, parameter: nn.Parameter, before: Tensor) -> None:
        parameter.copy_(torch.lerp(before, parameter, self.factor))

    def _give_back(self, optimizer: Optimizer) -> None:
        for group, rate in zip(optimizer.param_groups, self._rates.pop(id(optimizer), ())):
            group["lr"] = rate
