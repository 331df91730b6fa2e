"""The faults and collapses, one line of a table each: what is done to a healthy training, from which step on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.experiments.faults.trainings import Attention, Model

START = 40
"""Optimizer step at which faults begin that do not belong to the start of a training."""


class Run:
    """A training that a fault may act on.

    Attributes:
        model: the model.
        optimizers: its optimizers.
        layers: its attention modules.
        generator: of what a fault draws.
        kept: what a fault keeps between steps.
    """

    def __init__(self, model: Model, optimizers: Sequence[torch.optim.Optimizer], seed: int) -> None:
        self.model, self.optimizers = model, optimizers
        self.layers = [module for module in model.modules() if isinstance(module, Attention)]
        self.layer = self.layers[seed % len(self.layers)] if self.layers else None
        self.generator = torch.Generator().manual_seed(seed)
        self.kept: dict[str, Any] = {}

    def heads(self, role: str, layer: Attention | None = None) -> Tensor:
        """The weights of the heads of a layer, as a view: (heads, width, features); of the output with its input."""
        layer = self.layer if layer is None else layer
        if role == "out":
            return layer.out_proj.weight.T.unflatten(0, (layer.num_heads, -1))
        heads = layer.num_heads if role == "q" else layer.num_key_value_heads
        return getattr(layer, f"{role}_proj").weight.unflatten(0, (heads, -1))

    def scale_rates(self, factor: float) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * factor


Act = Callable[[Run, int], None]


@dataclass(frozen=True)
class Fault:
    """One way in which a training goes wrong.

    Attributes:
        of: what it is a fault of.
        is_cause: whether it is what people do wrong, rather than a force that makes heads collapse.
        shows: whether attention, its weights or its inputs can show it.
        begin: called once before the first step.
        before: called before each step from `start` on, with the rates that the schedule has set.
        after: called after each step from `start` on.
        data: makes of a batch what the model is given, from `start` on.
        start: first step at which it acts.
        bases: names of the trainings that it is tried on hold one of these words; all by default.
    """

    of: str
    is_cause: bool
    shows: bool
    begin: Act | None = None
    before: Act | None = None
    after: Act | None = None
    data: Callable[[Run, Any, int], Any] | None = None
    start: int = START
    bases: tuple[str, ...] = ("",)


def _set(**values: Any) -> Act:
    def act(run: Run, step: int) -> None:
        for name, value in values.items():
            setattr(run.model.switches, name, value)

    return act


def _pull(roles: Sequence[str], rate: float, heads: int | None = None) -> Act:
    def act(run: Run, step: int) -> None:
        for role in roles:
            weight = run.heads(role)[:heads]
            weight += rate * (weight.mean(0, keepdim=True) - weight)

    return act


def _shrink(role: str, rate: float, heads: int | None = None) -> Act:
    def act(run: Run, step: int) -> None:
        run.heads(role)[:heads] *= rate

    return act


def _copy_all(run: Run, step: int) -> None:
    for layer in run.layers:
        for role in ("q", "k", "v", "out"):
            weight = run.heads(role, layer)
            weight[:] = weight[:1].clone()


def _copy_pair(run: Run, step: int) -> None:
    if step == START:
        for role in ("q", "k", "v", "out"):
            weight = run.heads(role)
            if len(weight) > 1:
                weight[1] = weight[0]


def _swap_rows(run: Run, step: int) -> None:
    if step == START:
        for layer in run.layers:
            q, k = layer.q_proj.weight.clone(), layer.k_proj.weight.clone()
            rows = min(len(q), len(k))
            layer.q_proj.weight[:rows], layer.k_proj.weight[:rows] = k[:rows], layer.v_proj.weight[:rows].clone()
            layer.v_proj.weight[:rows] = q[:rows]


def _interleave(run: Run, step: int) -> None:
    if step == START:
        for layer in run.layers:
            for role in ("q", "k"):
                weight = getattr(layer, f"{role}_proj").weight
                generator = torch.Generator().manual_seed(len(role) + ord(role))
                weight[:] = weight[torch.randperm(len(weight), generator=generator)].clone()


def _large_embedding(run: Run, step: int) -> None:
    for parameter in run.model.embed.parameters():
        parameter *= 30


def _spoil(run: Run, step: int) -> None:
    if step == START:
        run.heads("v")[0, 0, 0] = torch.nan


def _freeze_head(run: Run, step: int) -> None:
    for role in ("q", "k", "v", "out"):
        weight = run.heads(role)
        run.kept.setdefault(role, weight[:1].clone())
        weight[:1] = run.kept[role]


def _freeze_layer(run: Run, step: int) -> None:
    for name, parameter in run.layer.named_parameters():
        run.kept.setdefault(name, parameter.clone())
        parameter.copy_(run.kept[name])


def _round_weights(run: Run, step: int) -> None:
    for parameter in run.model.parameters():
        parameter.copy_(parameter.bfloat16())


def _drop_learning(factor: float) -> Act:
    return lambda run, step: run.scale_rates(factor)


def _spike(run: Run, step: int) -> None:
    if step < START + 5:
        run.scale_rates(60)


def _rate_of_scores(run: Run, step: int) -> None:
    # As an optimizer whose steps do not shrink where scores grow: queries and keys move along their own direction.
    for layer in run.layers:
        for projection in (layer.q_proj, layer.k_proj):
            projection.weight *= 1.025


def _decay(run: Run, step: int) -> None:
    for layer in run.layers:
        for parameter in layer.parameters():
            parameter *= 0.97


def _common_direction(run: Run, step: int) -> None:
    weight = run.heads("k")
    direction = run.kept.setdefault("direction", torch.randn(weight.shape[-1], generator=run.generator))
    weight += 0.03 * weight.norm() / weight[..., 0].numel() ** 0.5 * direction / direction.norm()


def _lose_rank(run: Run, step: int) -> None:
    weight = run.heads("k")
    if "goal" not in run.kept:
        run.kept["goal"] = torch.linalg.svd(weight, full_matrices=False)[2][:, :1]
    goal = run.kept["goal"]
    weight += 0.05 * ((weight @ goal.mT) @ goal - weight)


def _grow_common(run: Run, step: int) -> None:
    direction = run.kept.setdefault("common", torch.randn(run.model.norm.weight.shape, generator=run.generator))
    run.model.switches.common = 0.3 * (step - START) * direction


def _grow_sink(run: Run, step: int) -> None:
    run.model.switches.sink = 0.15 * (step - START)


def _repeat(run: Run, batch: Any, step: int) -> Any:
    return run.kept.setdefault("batch", batch)


def _shuffle_labels(run: Run, batch: Any, step: int) -> Any:
    x, y = batch
    flat = y.flatten()
    return x, flat[torch.randperm(len(flat), generator=run.generator)].view(y.shape)


def _constant_inputs(run: Run, batch: Any, step: int) -> Any:
    x, y = batch
    return x[:, :1].expand_as(x).contiguous(), y


def _noise_gradient(run: Run, step: int) -> None:
    for parameter in run.model.parameters():
        if parameter.grad is not None:
            parameter.grad.copy_(torch.randn(parameter.shape, generator=run.generator) * parameter.grad.norm())


FAULTS: dict[str, Fault] = {
    # --- optimisation
    "rate 30 times too high, for good": Fault("optimisation", True, True, before=_drop_learning(30)),
    "rate 60 times too high, for 5 steps": Fault("optimisation", True, True, before=_spike),
    "rate 10 times too high from the start, no warm-up": Fault(
        "optimisation", True, True, before=_drop_learning(10), start=0
    ),
    "rate falls to nothing": Fault("optimisation", True, False, before=_drop_learning(1e-6)),
    "ten times the usual decay, runaway": Fault("optimisation", True, True, after=_decay),
    "scores grow under an aggressive optimizer": Fault("optimisation", True, True, after=_rate_of_scores),
    "gradients replaced by noise": Fault("optimisation", True, False, before=_noise_gradient),
    "weights kept in bf16, small updates round away": Fault(
        "optimisation", True, True, before=_drop_learning(0.02), after=_round_weights
    ),
    "a layer that should train and does not": Fault("optimisation", True, True, after=_freeze_layer),
    # --- code
    "softmax scale 8 times too large": Fault("code", True, True, begin=_set(scale=8.0), start=0),
    "softmax scale left out of a sharp model, 100 times too small": Fault(
        "code", True, True, begin=_set(scale=0.01), start=0
    ),
    "heads split without the transpose": Fault("code", True, True, begin=_set(split="no transpose"), start=0),
    "rows of query, key, value in the wrong order when training goes on": Fault("code", True, True, before=_swap_rows),
    "rows within queries and keys permuted when training goes on": Fault(
        "code", True, True, before=_interleave, bases=("text", "reversal")
    ),
    "mask left out": Fault("code", True, True, before=_set(mask="none"), bases=("text", "reversal")),
    "mask leaves each token itself alone": Fault(
        "code", True, True, before=_set(mask="self"), bases=("text", "reversal")
    ),
    "lost skip connections": Fault("code", True, True, begin=_set(has_skip=False), start=0),
    "attention's output rounded down to bf16": Fault("code", True, True, before=_set(rounds_down=True)),
    "embedding 30 times too large": Fault("code", True, True, begin=_large_embedding, start=0),
    "all heads begin as copies": Fault("code", True, True, begin=_copy_all, start=0),
    "two heads copied": Fault("code", True, True, before=_copy_pair, bases=("text", "digits", "table")),
    "a loader that repeats one batch": Fault("data", True, False, data=_repeat),
    "labels shuffled": Fault("data", True, False, data=_shuffle_labels),
    "every token of an input is the first": Fault("data", True, True, data=_constant_inputs),
    # --- collapses by force
    "keys and queries of all heads merge": Fault("collapse", False, True, after=_pull(("q", "k"), 0.05)),
    "keys merge": Fault(  # not under multi-query attention, which has one key head
        "collapse", False, True, after=_pull(("k",), 0.05), bases=("grouped", "four layers", "digits", "table")
    ),
    "queries merge": Fault("collapse", False, True, after=_pull(("q",), 0.05)),
    "two heads merge": Fault("collapse", False, True, after=_pull(("q", "k"), 0.05, 2)),
    "values and outputs merge": Fault("collapse", False, True, after=_pull(("v", "out"), 0.05)),
    "keys share one direction": Fault("collapse", False, True, after=_common_direction),
    "keys lose their rank": Fault("collapse", False, True, after=_lose_rank),
    "keys of a layer vanish": Fault("collapse", False, True, after=_shrink("k", 0.93)),
    "values of a layer vanish": Fault("collapse", False, True, after=_shrink("v", 0.93)),
    "output of a head dies": Fault("collapse", False, True, after=_shrink("out", 0.9, 1)),
    "a head is frozen": Fault("collapse", False, True, after=_freeze_head),
    "NaN in the values of a head": Fault("collapse", False, True, after=_spoil),
    "attention sinks into the first token": Fault("collapse", False, True, before=_grow_sink),
    "tokens become one": Fault("collapse", False, True, before=_grow_common),
    "inputs of attention cut to two dimensions": Fault("collapse", False, True, before=_set(rank=2)),
    "queries blow up": Fault("collapse", False, True, after=_shrink("q", 1.05)),
}
