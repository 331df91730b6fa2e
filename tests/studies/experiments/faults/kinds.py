"""The kinds of faults, one line of a table each: what is done to a healthy training, from which step on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.studies.experiments.faults.trainings import Attention, Batch, Model

START = 40
"""Optimizer step at which faults begin that do not belong to the start of a training."""


class Run:
    """A training that a fault may act on.

    Attributes:
        model: the model.
        optimizers: its optimizers.
        rates: their learning rates, before any schedule.
        layers: its attention modules by name.
        name: name of the one that is acted on where a fault is one of a single layer.
        generator: of what a fault draws.
        kept: what a fault keeps between steps.
    """

    def __init__(self, model: Model, optimizers: Sequence[torch.optim.Optimizer], seed: int) -> None:
        self.model, self.optimizers = model, optimizers
        self.rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
        self.layers = {name: module for name, module in model.named_modules() if isinstance(module, Attention)}
        self.name = [*self.layers, ""][seed % len(self.layers) if self.layers else 0]
        self.generator = torch.Generator().manual_seed(seed)
        self.kept: dict[str, Any] = {}

    @property
    def layer(self) -> Attention:
        return self.layers[self.name]

    def heads(self, role: str, layer: Attention | None = None) -> Tensor:
        """The weights of the heads of a layer, as a view: (heads, width, features); of the output with its input."""
        layer = self.layer if layer is None else layer
        if role == "out":
            return layer.out_proj.weight.T.unflatten(0, (layer.num_heads, -1))
        heads = layer.num_heads if role == "q" else layer.num_key_heads
        return getattr(layer, f"{role}_proj").weight.unflatten(0, (heads, -1))


Act = Callable[[Run, int], None]


@dataclass(frozen=True)
class Fault:
    """One way in which a training goes wrong.

    Attributes:
        begin: called once before the first step.
        before: called before each optimizer step from `start` on, with the rates that the schedule has set.
        after: called after each step from `start` on.
        data: makes of a batch what the model is given, from `start` on.
        start: first step at which it acts.
        bases: names of the trainings that it is tried on hold one of these words; all by default.
        shows: whether attention, its weights or its inputs can show it.
        is_of_layer: whether it is done to one layer.
        heads: if it is done to the first heads of that layer, how many.
    """

    begin: Act | None = None
    before: Act | None = None
    after: Act | None = None
    data: Callable[[Run, Batch, int], Batch] | None = None
    start: int = START
    bases: tuple[str, ...] = ("",)
    shows: bool = True
    is_of_layer: bool = False
    heads: int = 0


def _set(**values: Any) -> Act:
    def act(run: Run, step: int) -> None:
        for name, value in values.items():
            setattr(run.model.switches, name, value)

    return act


def _scale_rates(factor: float, steps: int = 10_000) -> Act:
    def act(run: Run, step: int) -> None:
        if step < START + steps:
            for optimizer in run.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] *= factor

    return act


def _pull(roles: Sequence[str], heads: int | None = None) -> Act:
    """Move heads towards their mean."""

    def act(run: Run, step: int) -> None:
        for role in roles:
            weight = run.heads(role)[:heads]
            weight += 0.05 * (weight.mean(0, keepdim=True) - weight)

    return act


def _scale(role: str, factor: float, heads: int | None = None) -> Act:
    def act(run: Run, step: int) -> None:
        run.heads(role)[:heads] *= factor

    return act


def _scale_all(roles: Sequence[str], factor: float) -> Act:
    def act(run: Run, step: int) -> None:
        for layer in run.layers.values():
            for role in roles:
                getattr(layer, f"{role}_proj").weight.mul_(factor)

    return act


def _round_weights(run: Run, step: int) -> None:
    for parameter in run.model.parameters():
        parameter.copy_(parameter.bfloat16())


def _freeze_layer(run: Run, step: int) -> None:
    for name, parameter in run.layer.named_parameters():
        parameter.copy_(run.kept.setdefault(name, parameter.clone()))


def _freeze_head(run: Run, step: int) -> None:
    for role in ("q", "k", "v", "out"):
        weight = run.heads(role)
        weight[:1] = run.kept.setdefault(role, weight[:1].clone())


def _copy_all(run: Run, step: int) -> None:
    for layer in run.layers.values():
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
        for layer in run.layers.values():
            q, k, v = (getattr(layer, f"{role}_proj").weight for role in "qkv")
            rows = min(len(q), len(k))
            q[:rows], k[:rows], v[:rows] = k[:rows].clone(), v[:rows].clone(), q[:rows].clone()


def _permute_rows(run: Run, step: int) -> None:
    if step == START:
        for layer in run.layers.values():
            for role in ("q", "k"):
                weight = getattr(layer, f"{role}_proj").weight
                order = torch.randperm(len(weight), generator=torch.Generator().manual_seed(1 + ord(role)))
                weight[:] = weight[order].clone()


def _enlarge_embedding(run: Run, step: int) -> None:
    for parameter in run.model.embed.parameters():
        parameter *= 30


def _share_direction(run: Run, step: int) -> None:
    weight = run.heads("k")
    direction = run.kept.setdefault("direction", torch.randn(weight.shape[-1], generator=run.generator))
    weight += 0.03 * weight.norm() / weight[..., 0].numel() ** 0.5 * direction / direction.norm()


def _lose_rank(run: Run, step: int) -> None:
    weight = run.heads("k")
    if "goal" not in run.kept:
        run.kept["goal"] = torch.linalg.svd(weight, full_matrices=False)[2][:, :1]
    goal = run.kept["goal"]
    weight += 0.05 * ((weight @ goal.mT) @ goal - weight)


def _spoil(run: Run, step: int) -> None:
    if step == START:
        run.heads("v")[0, 0, 0] = torch.nan


def _grow_sink(run: Run, step: int) -> None:
    run.model.switches.sink = 0.15 * (step - START)


def _grow_common(run: Run, step: int) -> None:
    # Not along the ones, which a norm takes away.
    direction = run.kept.setdefault("common", torch.randn(run.model.norm.weight.shape, generator=run.generator))
    run.model.switches.common = 0.3 * (step - START) * direction


def _noise_gradient(run: Run, step: int) -> None:
    for parameter in run.model.parameters():
        if parameter.grad is not None:
            parameter.grad.copy_(torch.randn(parameter.shape, generator=run.generator) * parameter.grad.norm())


def _repeat(run: Run, batch: Batch, step: int) -> Batch:
    return run.kept.setdefault("batch", batch)


def _shuffle_labels(run: Run, batch: Batch, step: int) -> Batch:
    x, y = batch
    return x, y.flatten()[torch.randperm(y.numel(), generator=run.generator)].view(y.shape)


def _repeat_first_token(run: Run, batch: Batch, step: int) -> Batch:
    x, y = batch
    return x[:, :1].expand_as(x).contiguous(), y


FAULTS: dict[str, Fault] = {
    # --- optimisation
    "rate 30 times too high, for good": Fault(before=_scale_rates(30)),
    "rate 60 times too high, for 5 steps": Fault(before=_scale_rates(60, steps=5)),
    "rate 10 times too high from the start, no warm-up": Fault(before=_scale_rates(10), start=0),
    "rate falls to nothing": Fault(before=_scale_rates(1e-6), shows=False),
    "ten times the usual decay, runaway": Fault(after=_scale_all(("q", "k", "v", "out"), 0.97)),
    "scores grow under an aggressive optimizer": Fault(after=_scale_all(("q", "k"), 1.025)),
    "gradients replaced by noise": Fault(before=_noise_gradient, shows=False),
    "weights kept in bf16, small updates round away": Fault(before=_scale_rates(0.02), after=_round_weights),
    "a layer that should train and does not": Fault(after=_freeze_layer, is_of_layer=True),
    # --- code and data
    "softmax scale 8 times too large": Fault(_set(scale=8.0), start=0),
    "softmax scale left out of a sharp model, 100 times too small": Fault(_set(scale=0.01), start=0),
    "heads split without the transpose": Fault(_set(split="no transpose"), start=0),
    "rows of query, key, value in the wrong order when training goes on": Fault(before=_swap_rows),
    "rows within queries and keys permuted when training goes on": Fault(
        before=_permute_rows, bases=("text", "reversal")
    ),
    "mask left out": Fault(before=_set(mask="none"), bases=("text", "reversal")),
    "mask leaves each token itself alone": Fault(before=_set(mask="self"), bases=("text", "reversal")),
    "lost skip connections": Fault(_set(has_skip=False), start=0),
    "attention's output rounded down to bf16": Fault(before=_set(rounds_down=True)),
    "embedding 30 times too large": Fault(_enlarge_embedding, start=0),
    "all heads begin as copies": Fault(_copy_all, start=0),
    "two heads copied": Fault(before=_copy_pair, bases=("text", "digits", "table"), is_of_layer=True, heads=2),
    "a loader that repeats one batch": Fault(data=_repeat, shows=False),
    "labels shuffled": Fault(data=_shuffle_labels, shows=False),
    "every token of an input is the first": Fault(data=_repeat_first_token),
    # --- heads made to collapse
    "keys and queries of all heads merge": Fault(after=_pull(("q", "k")), is_of_layer=True),
    "keys merge": Fault(
        after=_pull(("k",)), bases=("grouped", "four layers", "digits", "table"), is_of_layer=True
    ),
    "queries merge": Fault(after=_pull(("q",)), is_of_layer=True),
    "two heads merge": Fault(after=_pull(("q", "k"), 2), is_of_layer=True, heads=2),
    "values and outputs merge": Fault(after=_pull(("v", "out")), is_of_layer=True),
    "keys share one direction": Fault(after=_share_direction, is_of_layer=True),
    "keys lose their rank": Fault(after=_lose_rank, is_of_layer=True),
    "keys of a layer vanish": Fault(after=_scale("k", 0.93), is_of_layer=True),
    "values of a layer vanish": Fault(after=_scale("v", 0.93), is_of_layer=True),
    "output of a head dies": Fault(after=_scale("out", 0.9, 1), is_of_layer=True, heads=1),
    "a head is frozen": Fault(after=_freeze_head, is_of_layer=True, heads=1),
    "NaN in the values of a head": Fault(after=_spoil),
    "attention sinks into the first token": Fault(before=_grow_sink),
    "tokens become one": Fault(before=_grow_common),
    "inputs of attention cut to two dimensions": Fault(before=_set(rank=2)),
    "queries blow up": Fault(after=_scale("q", 1.05), is_of_layer=True),
}  # fmt: skip
