"""`ReviveHeads`: fresh key and query weights for redundant heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hdi_callback.arguments import number
from hdi_callback.attention.layer import AttentionLayer
from hdi_callback.core import circuit_similarity, fold_head, fresh_head, head_diversity
from hdi_callback.interventions.intervention import Intervention
from hdi_callback.interventions.writing import bias_of, refuse, why_not_writable
from hdi_callback.record import Action, Alert

ALIKE = ("copied heads", "worst pair", "mean alignment")
ROLES = ("query", "key", "value", "output")
ALIGNED = 0.7
"""Alignment of key heads from which on named heads are one group; at it *worst pair* ends."""


class ReviveHeads(Intervention):
    """Assign fresh key and query weights in another subspace to redundant heads.

    Of key heads that are alike, all but the one that contributes most get fresh key and query weights, as far from the
    other heads' as the width allows, and at their scale. Their contribution is folded into that head, and their own
    output slices are set to zero, so that the layer computes the same if they attended alike. Their entries in the
    optimizer's state are cleared. Under grouped keys a key head is revived together with its query heads.

    Before anything is written the relative error of the head's output is estimated from the weights, see
    `fold_head`: what the other head's values cannot express, and where its attention differs. A head with a larger
    error than `max_output_error` is left as it is, and the action says so. So are heads whose own position terms or
    sinks differ; terms that are passed to the module, as ALiBi's, are not known.

    Args:
        max_output_error: largest relative error of a head's output, in [0, 1], that the head it is folded into may
            leave; 1 for any.
        options: see `Intervention`; by default it acts on "copied heads" and "worst pair".
    """

    name = "ReviveHeads"
    rules = ("copied heads", "worst pair")
    at_most = 16
    ignores_start = True

    def __init__(self, *, max_output_error: float = 0.1, **options: Any) -> None:
        super().__init__(**options)
        self.max_output_error = number(
            "max_output_error of ReviveHeads", max_output_error, most=1, allows_zero=True, example=0.1
        )

    def check(self) -> None:
        """Refuse layers whose heads cannot be written in place."""
        for layer in self.training.layers.values():
            refuse(layer, self.name, _why_not(layer))

    @torch.no_grad()
    def on_alert(self, alert: Alert) -> Action | None:
        """Revive all but the strongest of the heads that are alike, in every layer that the alert names."""
        revived, spared, layers = list[str](), list[str](), list[str]()
        for name in alert.layers:
            layer = self.training.layers.get(name)
            if layer is None or _why_not(layer):
                continue
            leaving, unit = [], "head" if layer.num_heads == layer.num_key_heads else "key head"
            for leaves, stays in _pairs(layer, alert):
                layers.append(name)
                error = _error(layer, leaves, stays)
                about = "" if error < 0.005 else f", with a relative error of about {100 * error:.0f} %"
                is_leaving = error <= self.max_output_error  # NaN is not
                (revived if is_leaving else spared).append(f"{unit} {leaves} of {name} (folded into {stays}{about})")
                leaving += [(leaves, stays)] if is_leaving else []
            if leaving:
                self._revive(layer, leaving)
        done = [f"assigned fresh weights to {', '.join(revived)}"] if revived else []
        if spared:
            done.append(f"left as before, above max_output_error={self.max_output_error:g}: {', '.join(spared)}")
        return self.action(dict.fromkeys(layers), "; ".join(done), is_refusal=not revived) if done else None

    def _revive(self, layer: AttentionLayer, pairs: Sequence[tuple[int, int]]) -> None:
        weights = {role: layer.weight(role).detach().clone() for role in ROLES}
        members = [member for pair in pairs for member in _query_heads(layer, *pair)]
        for leaves, stays in members:
            weights["output"][stays] = _fold(layer, weights, leaves, stays)[0].to(weights["output"])
            weights["output"][leaves] = 0
        fresh = [("query", leaves) for leaves, _ in members] + [("key", leaves) for leaves, _ in pairs]
        for role, head in fresh:
            weights[role][head] = fresh_head(weights[role], head)
        # Nothing is written before all of it is computed, so that a failure leaves the layer as it was.
        for _, stays in members:
            layer.weights["output"].write(stays, weights["output"][stays])
        for role, head in [*fresh, *(("output", leaves) for leaves, _ in members)]:
            layer.weights[role].write(head, weights[role][head])
            self._clear_state(*layer.weights[role].index(head))
        written = sorted({head for member in members for head in member})
        self.training.expect_change(layer.name, written, self.training.trainer.step, self.name)

    def _clear_state(self, parameter: nn.Parameter, index: Tensor) -> None:
        """Set what optimizers keep of some elements of a parameter to zero: momentum, mean squares."""
        for optimizer in self.training.trainer.optimizers:
            for state in optimizer.state.get(parameter, {}).values():
                if isinstance(state, Tensor) and state.shape == parameter.shape:
                    state.put_(index.to(state.device), torch.zeros_like(index, dtype=state.dtype, device=state.device))


def _why_not(layer: AttentionLayer) -> str:
    """Return why heads of a layer cannot be folded into one another; empty if they can."""
    if layer.num_heads < 2:
        return "it has one head"
    if layer.num_value_heads != layer.num_key_heads or layer.value_of != layer.key_of:
        return f"it has {layer.num_key_heads} key heads and {layer.num_value_heads} value heads"
    if "value" in layer.normed:
        return "a norm follows its values"
    return why_not_writable(layer, ROLES)


def _pairs(layer: AttentionLayer, alert: Alert) -> list[tuple[int, int]]:
    """Return each key head that has a stronger one like it, and that one; of those that the alert names."""
    # The heads are those of the rule that states the cause: another may name one head of two.
    is_named = alert.rule in ALIKE and (layer.num_heads == layer.num_key_heads or alert.unit == "key heads")
    candidates = (alert.where[layer.name] if is_named else ()) or range(layer.num_key_heads)
    alike = head_diversity(layer.weight("key")).subspace.pair_alignment >= ALIGNED
    norms = circuit_similarity(layer.weight("output"), layer.weight("value"), layer.value_of).norm.square()
    strength = norms.new_zeros(layer.num_key_heads).index_add(0, torch.tensor(layer.key_of).to(norms.device), norms)
    staying, pairs = list[int](), list[tuple[int, int]]()
    for head in sorted(candidates, key=strength.tolist().__getitem__, reverse=True):
        stays = next((stronger for stronger in staying if alike[head, stronger]), None)
        if stays is None:
            staying.append(head)
        else:
            pairs.append((head, stays))
    return sorted(pairs)


def _query_heads(layer: AttentionLayer, leaves: int, stays: int) -> list[tuple[int, int]]:
    """Return pairs of the query heads of the key head that leaves, and of the one that stays."""
    leaving, staying = ([h for h, key in enumerate(layer.key_of) if key == head] for head in (leaves, stays))
    return list(zip(leaving, staying))


def _error(layer: AttentionLayer, leaves: int, stays: int) -> float:
    """Return the relative error of a key head's output once it is folded: the largest of its query heads."""
    weights, errors = {role: layer.weight(role) for role in ROLES}, [0.0]
    for head, staying in _query_heads(layer, leaves, stays):
        if weights["output"][head].any():  # else it contributes nothing
            has_terms = _has_terms_of_its_own(layer, head, staying)
            errors.append(1.0 if has_terms else float(_fold(layer, weights, head, staying)[1]))
    return float(torch.tensor(errors).max())  # NaN if one is


def _fold(layer: AttentionLayer, weights: dict[str, Tensor], leaves: int, stays: int) -> tuple[Tensor, Tensor]:
    def of_both(role: str, heads: Sequence[int]) -> Tensor:
        biases = [] if role == "key" else [bias_of(layer.weights[role], head) for head in heads]
        columns = [bias[0].take(bias[1])[:, None] for bias in biases if bias is not None]
        stacked = weights[role][list(heads)]
        return torch.cat([stacked, torch.stack(columns)], -1) if columns else stacked

    keys = layer.key_of[stays], layer.key_of[leaves]
    queries, outputs = of_both("query", (stays, leaves)), weights["output"][[stays, leaves]]
    is_normed = bool(layer.normed & {"query", "key"})
    return fold_head(queries, of_both("key", keys), of_both("value", keys), outputs, is_normed=is_normed)


def _has_terms_of_its_own(layer: AttentionLayer, head: int, staying: int) -> bool:
    """Return whether the module has parameters or buffers by head, besides projections, in which two heads differ."""
    projections = {id(parameter) for role in ROLES for parameter in layer.weights[role].parameters()}
    return any(
        size == layer.num_heads and not tensor.select(dim, head).equal(tensor.select(dim, staying))
        for tensor in (*layer.module.parameters(), *layer.module.buffers())
        if id(tensor) not in projections
        for dim, size in enumerate(tensor.shape)
    )
