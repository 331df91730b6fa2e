"""`ReviveHeads`: fresh key and query weights for redundant heads."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hdi_callback.arguments import number, whole_number
from hdi_callback.attention.layer import AttentionLayer, HeadWeight
from hdi_callback.core import (
    Folding,
    attention_agreement,
    fold_head,
    folding_error,
    fresh_head,
    head_diversity,
    qk_circuits,
)
from hdi_callback.interventions.intervention import Intervention
from hdi_callback.interventions.writing import clear_state, output_bias, read_bias, refuse, why_not_writable
from hdi_callback.record import Action, Alert

ALIKE = ("copied heads", "worst pair", "mean alignment")
ROLES = ("query", "key", "value", "output")
ALIGNED, SCORE_ALIKE = 0.7, 0.8
"""Alignment of key heads, at which *worst pair* ends, and cosine of QK circuits, from which on named heads are one
group."""


class ReviveHeads(Intervention):
    """Assign fresh key and query weights in another subspace to redundant heads.

    In each group of heads that are alike, all but the one that contributes most get fresh key and query weights, as far
    from the other heads' as the width allows, and at their scale. Their contribution is folded into that head, and
    their own output slices are set to zero, so that the layer computes the same if they attended alike. Their entries
    in the optimizer's state are cleared. Under grouped keys a key head is revived together with its query heads, and
    query heads that only score alike get fresh queries.

    Before anything is written the relative error of the head's output is estimated from the weights, see
    `folding_error`: what the other head's values cannot express, and where its attention differs. A head with a larger
    error than `max_output_error` is left as it is, and the action says so. So are heads whose own position terms or
    sinks differ; terms that are passed to the module, as ALiBi's, are not known.

    Args:
        seed: seed of its own random generator, the same on every rank.
        max_output_error: largest relative error of a head's output, in [0, 1], that the head it is folded into may
            leave; 1 for any.
        options: see `Intervention`; by default it acts on "copied heads" and "worst pair".

    Raises:
        MisconfigurationError: if an argument cannot work.
    """

    name = "ReviveHeads"
    rules = ("copied heads", "worst pair")
    at_most = 16
    ignores_start = True

    def __init__(self, *, seed: int = 0, max_output_error: float = 0.1, **options: Any) -> None:
        super().__init__(**options)
        self.seed = whole_number("seed of ReviveHeads", seed, least=0, example=0)
        self.max_output_error = number(
            "max_output_error of ReviveHeads", max_output_error, most=1, allows_zero=True, example=0.1
        )

    def check(self) -> None:
        """Refuse layers whose heads cannot be written in place."""
        for layer in self.training.layers.values():
            refuse(layer, self.name, _why_not(layer))

    @torch.no_grad()
    def on_alert(self, alert: Alert) -> Action | None:
        """Revive all but the strongest head of each group, in every layer that the alert names."""
        done, refusals, layers = [], [], []
        for name in alert.layers:
            layer = self.training.layers.get(name)
            if layer is None or _why_not(layer):
                continue
            plans = self._plans(layer, alert)
            acting = [plan for plan in plans if plan.leaving]
            refusals += [f"{self._left(plan)} of {name}" for plan in plans if plan.spared]
            if not plans:
                continue
            layers.append(name)
            if acting:
                done.append(f"{_done(acting)} of {name}")
                if not self.dry_run:
                    self._act(layer, acting)
        if not layers:
            return None
        if not done:
            return self.action(layers, "; ".join(refusals), is_refusal=True)
        return self.action(layers, "; ".join([f"assigned fresh weights to {', and to '.join(done)}", *refusals]))

    def _plans(self, layer: AttentionLayer, alert: Alert) -> list[_Plan]:
        """Choose for each group of heads that are alike the one that stays, and those that may leave."""
        of_keys = bool({*ALIKE} & {alert.rule, *alert.also})
        # The heads are those of the rule that states the cause: a weight jump may name one head of two.
        is_grouped = layer.num_heads != layer.num_key_heads
        fits = alert.rule in ALIKE and (not is_grouped or (alert.unit == "key heads") == of_keys)
        groups = _groups(layer, alert.where[layer.name] if fits else (), of_keys=of_keys)
        strength = _strength(layer, of_keys=of_keys)
        plans = []
        for group in groups:
            stays = max(group, key=lambda head: strength[head])
            errors = {head: _error(layer, _members(layer, head, stays, of_keys)) for head in group if head != stays}
            leaving = {head: error for head, error in errors.items() if error <= self.max_output_error}  # NaN is not
            staying = {head: error for head, error in errors.items() if head not in leaving}
            plans.append(_Plan(stays, leaving, staying, of_keys, "key head" if of_keys and is_grouped else "head"))
        return plans

    def _act(self, layer: AttentionLayer, plans: Sequence[_Plan]) -> None:
        step = self.training.step
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {step} {layer.name}".encode()))
        written = set[int]()
        with self._all_or_nothing(layer):
            for plan in plans:
                for head in plan.leaving:
                    members = _members(layer, head, plan.stays, plan.of_keys)
                    self._revive(layer, head, members, generator, plan.of_keys)
                    written.update(query for pair in members for query in pair)
        self.training.expect_change(layer.name, sorted(written), step, self.name)

    def _revive(
        self,
        layer: AttentionLayer,
        head: int,
        members: Sequence[tuple[int, int]],
        generator: torch.Generator,
        of_keys: bool,
    ) -> None:
        output, constant = layer.weights["output"], output_bias(layer)
        for leaving, staying in members:
            folded = _fold(layer, leaving, staying)
            output.write(staying, folded.output)
            if constant is not None:
                constant.add_(folded.bias.to(constant))
            self._write(output, leaving, torch.zeros_like(folded.output))
            query = layer.weights["query"]
            self._write(query, leaving, fresh_head(query.tensor(), leaving, generator=generator))
        if of_keys:
            key = layer.weights["key"]
            self._write(key, head, fresh_head(key.tensor(), head, generator=generator))

    def _write(self, weight: HeadWeight, head: int, rows: Tensor) -> None:
        weight.write(head, rows)
        clear_state(self.training.optimizers, *weight.index(head))

    @contextmanager
    def _all_or_nothing(self, layer: AttentionLayer) -> Iterator[None]:
        """Restore the weights and the optimizer's state if the block fails."""
        owners = [
            *layer.module.parameters(),
            *(parameter for role in ROLES for parameter in layer.weights[role].parameters()),
        ]
        bias = output_bias(layer)
        states = [
            item
            for optimizer in self.training.optimizers
            for owner in owners
            for item in optimizer.state.get(owner, {}).values()
            if isinstance(item, Tensor)
        ]
        tensors = [*owners, *([] if bias is None else [bias]), *states]
        before = [(tensor, tensor.detach().clone()) for tensor in tensors]
        try:
            yield
        except BaseException:
            for tensor, value in before:
                tensor.detach().copy_(value)
            raise

    def _left(self, plan: _Plan) -> str:
        shares = ", ".join(f"{100 * error:.0f} %" for error in plan.spared.values())
        return (
            f"left {plan.words(plan.spared)} as before, for {plan.words([plan.stays])} would replace the output with a "
            f"relative error of about {shares}, above max_output_error={self.max_output_error:g},"
        )


@dataclass(frozen=True)
class _Plan:
    """What to do with a group: the head that stays; those that leave, and those that may not, with their errors."""

    stays: int
    leaving: dict[int, float]
    spared: dict[int, float]
    of_keys: bool
    kind: str

    def words(self, heads: Sequence[int] | dict[int, float]) -> str:
        return f"{self.kind}{'s' if len(heads) > 1 else ''} {', '.join(map(str, heads))}"


def _done(plans: Sequence[_Plan]) -> str:
    parts = []
    for plan in plans:
        error = max(plan.leaving.values())
        about = "" if error < 0.005 else f", with a relative error of about {100 * error:.0f} %"
        parts.append(f"{plan.words(plan.leaving)} (folded into {plan.words([plan.stays])}{about})")
    return ", ".join(parts)


def _why_not(layer: AttentionLayer) -> str:
    """Why heads of a layer cannot be folded into one another; empty if they can."""
    if layer.num_heads < 2:
        return "it has one head"
    if layer.num_value_heads != layer.num_key_heads or layer.value_of != layer.key_of:
        return f"it has {layer.num_key_heads} key heads and {layer.num_value_heads} value heads"
    if "value" in layer.normed:
        return "a norm follows its values"
    return why_not_writable(layer, ROLES)


def _groups(layer: AttentionLayer, accused: Sequence[int], *, of_keys: bool) -> list[list[int]]:
    """Group the heads of a layer that are alike now; only those that the alert names, if it names some."""
    if of_keys:
        alike = head_diversity(layer.weight("key")).subspace.pair_alignment >= ALIGNED
    else:
        alike = qk_circuits(layer.weight("query"), layer.weight("key"), layer.key_of).cosine >= SCORE_ALIKE
    is_alike = alike.tolist()
    groups: list[list[int]] = []
    for head in accused or range(len(is_alike)):
        near = [group for group in groups if any(is_alike[head][member] for member in group)]
        groups = [group for group in groups if group not in near] + [
            [head, *(item for group in near for item in group)]
        ]
    return [sorted(group) for group in groups if len(group) > 1]


def _members(layer: AttentionLayer, head: int, stays: int, of_keys: bool) -> list[tuple[int, int]]:
    """Pair the query heads that leave with those that stay."""
    if not of_keys:
        return [(head, stays)]
    leaving, staying = ([h for h, key in enumerate(layer.key_of) if key == key_head] for key_head in (head, stays))
    return list(zip(leaving, staying))


def _strength(layer: AttentionLayer, *, of_keys: bool) -> list[float]:
    """Norm of each head's map from input to output; of key heads that of all of their query heads."""
    values, outputs = layer.weight("value").double(), layer.weight("output").double()
    maps = values[list(layer.value_of)].mT @ outputs  # (H, in_features, out_features)
    norms: list[float] = maps.square().sum((-2, -1)).tolist()
    if not of_keys:
        return norms
    return [sum(norm for norm, own in zip(norms, layer.key_of) if own == key) for key in range(layer.num_key_heads)]


def _error(layer: AttentionLayer, members: Sequence[tuple[int, int]]) -> float:
    """Relative error of a head's output once it is folded into another; the largest over its query heads."""
    query, key, output = layer.weight("query"), layer.weight("key"), layer.weight("output")
    is_normed = "query" in layer.normed or "key" in layer.normed
    errors = []
    for leaving, staying in members:
        if not output[leaving].any():
            errors.append(0.0)  # it contributes nothing
            continue
        if _has_terms_of_its_own(layer, leaving, staying):
            return 1.0
        biases = read_bias(layer.weights["query"], staying), read_bias(layer.weights["query"], leaving)
        agreement = attention_agreement(
            (query[staying], query[leaving]),
            (key[layer.key_of[staying]], key[layer.key_of[leaving]]),
            None if biases[0] is None or biases[1] is None else (biases[0], biases[1]),
            is_normed=is_normed,
        )
        errors.append(float(folding_error(_fold(layer, leaving, staying).lost, agreement)))
    return math.nan if any(map(math.isnan, errors)) else max(errors)


def _fold(layer: AttentionLayer, leaving: int, staying: int) -> Folding:
    value, output = layer.weight("value"), layer.weight("output")
    stays, leaves = layer.value_of[staying], layer.value_of[leaving]
    biases = read_bias(layer.weights["value"], stays), read_bias(layer.weights["value"], leaves)
    return fold_head(
        (value[stays], value[leaves]),
        (output[staying], output[leaving]),
        None if biases[0] is None or biases[1] is None else (biases[0], biases[1]),
    )


def _has_terms_of_its_own(layer: AttentionLayer, head: int, other_head: int) -> bool:
    """Return whether the module has parameters or buffers by head, besides projections, in which two heads differ."""
    projections = {id(parameter) for role in ROLES for parameter in layer.weights[role].parameters()}
    for name, item in (*layer.module.named_parameters(), *layer.module.named_buffers()):
        if id(item) in projections or (name.endswith("bias") and item.dim() == 1 and item.shape[0] != layer.num_heads):
            continue
        for dim, size in enumerate(item.shape):
            if size == layer.num_heads and not torch.equal(item.select(dim, head), item.select(dim, other_head)):
                return True
    return False
