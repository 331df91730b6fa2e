"""`ReviveHeads`: fresh key and query weights for redundant heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from hdi_callback.arguments import number
from hdi_callback.attention.layer import ROLES, AttentionLayer
from hdi_callback.core import circuit_similarity, fold_head, fresh_head, head_diversity
from hdi_callback.interventions.intervention import Intervention
from hdi_callback.interventions.writing import bias_of, why_not_writable
from hdi_callback.record import Action, Alert

ALIGNED = 0.7
"""Alignment of key heads from which on one of them is redundant; at it *worst pair* ends."""


class ReviveHeads(Intervention):
    """Assign fresh key and query weights in another subspace to redundant heads.

    Of key heads of a layer that are alike, all but the one that contributes most get fresh key and query weights, as
    far from the other heads' as the width allows, and at their scale. Their contribution is folded into that head, and
    their own output slices are set to zero, so that the layer computes the same if they attended alike. Their entries
    in the optimizer's state are cleared. Under grouped keys a key head is revived together with its query heads.

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

    def why_not(self, layer: AttentionLayer) -> str:
        """Return why heads of a layer cannot be folded into one another; empty if they can."""
        if layer.num_heads < 2:
            return "it has one head"
        if layer.num_value_heads != layer.num_key_heads or layer.value_of != layer.key_of:
            return f"it has {layer.num_key_heads} key heads and {layer.num_value_heads} value heads"
        return "a norm follows its values" if "value" in layer.normed else why_not_writable(layer, ROLES)

    @torch.no_grad()
    def on_alert(self, alert: Alert) -> Action | None:
        """Revive all but the strongest of the heads that are alike, in every layer that the alert names."""
        revived, spared, layers = list[str](), list[str](), list[str]()
        for name in alert.layers:
            layer = self.training.layers[name]
            weights = {role: layer.weight(role).detach().clone() for role in ROLES}
            leaving, members = list[int](), list[tuple[int, int]]()
            unit = "head" if layer.num_heads == layer.num_key_heads else "key head"
            for leaves, stays in _pairs(layer):
                layers.append(name)
                of_leaving, of_staying = (
                    [head for head, key in enumerate(layer.key_of) if key == key_head] for key_head in (leaves, stays)
                )
                folded = {pair: _fold(layer, weights, *pair) for pair in zip(of_leaving, of_staying)}
                error = float(torch.stack([error for _, error in folded.values()]).max())  # NaN if one is
                about = "" if error < 0.005 else f", with a relative error of about {100 * error:.0f} %"
                is_leaving = error <= self.max_output_error
                (revived if is_leaving else spared).append(f"{unit} {leaves} of {name} (folded into {stays}{about})")
                if is_leaving:
                    leaving.append(leaves)
                    members += folded
                    for (head, staying), (output, _) in folded.items():
                        weights["output"][staying], weights["output"][head] = output, 0
            if leaving:
                self._write(layer, weights, leaving, members)
        done = [f"assigned fresh weights to {', '.join(revived)}"] if revived else []
        if spared:
            done.append(f"left as before, above max_output_error={self.max_output_error:g}: {', '.join(spared)}")
        return self.action(dict.fromkeys(layers), "; ".join(done), is_refusal=not revived) if done else None

    def _write(
        self,
        layer: AttentionLayer,
        weights: Mapping[Any, Tensor],
        leaving: Sequence[int],
        members: Sequence[tuple[int, int]],
    ) -> None:
        """Write folded outputs and fresh queries and keys, once all are computed: a failure leaves the layer."""
        revived = [("query", head) for head, _ in members] + [("key", head) for head in leaving]
        for role, head in revived:
            weights[role][head] = fresh_head(weights[role], head)
        revived += [("output", head) for head, _ in members]
        for role, head in [*revived, *(("output", staying) for _, staying in members)]:
            layer.weights[role].write(head, weights[role][head])
        for optimizer, (role, head) in product(self.training.trainer.optimizers, revived):
            parameter, index = layer.weights[role].index(head)
            for state in optimizer.state.get(parameter, {}).values():  # momentum, mean squares
                if isinstance(state, Tensor) and state.shape == parameter.shape:
                    state.put_(index.to(state.device), state.new_zeros(index.shape))
        written = sorted({head for pair in members for head in pair})
        self.training.expect_change(layer.name, written, self.training.trainer.step, self.name)


def _pairs(layer: AttentionLayer) -> list[tuple[int, int]]:
    """Return each key head that has a stronger one like it, and that one."""
    alike = head_diversity(layer.weight("key")).subspace.pair_alignment >= ALIGNED
    norms = circuit_similarity(layer.weight("output"), layer.weight("value"), layer.value_of).norm.square()
    strength = norms.new_zeros(layer.num_key_heads).index_add(0, torch.tensor(layer.key_of).to(norms.device), norms)
    staying, pairs = list[int](), list[tuple[int, int]]()
    for head in sorted(range(layer.num_key_heads), key=strength.tolist().__getitem__, reverse=True):
        stays = next((stronger for stronger in staying if alike[head, stronger]), None)
        if stays is None:
            staying.append(head)
        else:
            pairs.append((head, stays))
    return sorted(pairs)


def _fold(layer: AttentionLayer, weights: Mapping[Any, Tensor], leaves: int, stays: int) -> tuple[Tensor, Tensor]:
    """Return the output weight of a head that takes over another's contribution, and the relative error of that."""
    outputs = weights["output"][[stays, leaves]]
    if not outputs[1].any() or _have_different_terms(layer, leaves, stays):
        return outputs[0], outputs.any((1, 2))[1].double()  # 0 where it contributes nothing

    def with_biases(role: str, heads: Sequence[int]) -> Tensor:
        biases = [bias_of(layer.weights[role], head) for head in heads]
        columns = [parameter.take(index)[:, None] for parameter, index in filter(None, biases)]
        stacked = weights[role][list(heads)]
        return torch.cat([stacked, torch.stack(columns)], -1) if columns else stacked

    keys = [layer.key_of[stays], layer.key_of[leaves]]
    queries, values = with_biases("query", (stays, leaves)), with_biases("value", keys)
    is_normed = bool(layer.normed & {"query", "key"})
    output, error = fold_head(queries, weights["key"][keys], values, outputs, is_normed=is_normed)
    return output.to(outputs), error


def _have_different_terms(layer: AttentionLayer, head: int, staying: int) -> bool:
    """Return whether the module has parameters or buffers by head, besides projections, in which two heads differ."""
    projections = {id(parameter) for role in ROLES for parameter in layer.weights[role].parameters()}
    return any(
        size == layer.num_heads and not tensor.select(dim, head).equal(tensor.select(dim, staying))
        for tensor in (*layer.module.parameters(), *layer.module.buffers())
        if id(tensor) not in projections
        for dim, size in enumerate(tensor.shape)
    )
