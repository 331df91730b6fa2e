"""`ReviveHeads`: fresh key and query weights for redundant heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from hdi_callback.arguments import number
from hdi_callback.attention.layer import ROLES, AttentionLayer, bias_of
from hdi_callback.core import circuit_similarity, fold_head, fresh_head, head_diversity
from hdi_callback.interventions.intervention import Intervention, why_not_writable
from hdi_callback.record import Action, Alert

ALIGNED = 0.7  # alignment of key heads from which on one of them is redundant; at it *worst pair* ends


class ReviveHeads(Intervention):
    """Assign fresh key and query weights in another subspace to redundant heads.

    Of heads of a layer whose keys are alike, all but the one that contributes most get fresh key and query weights, as
    far from the other heads' as the width allows, and at their scale. Their contribution is folded into that head, and
    their own output slices are set to zero, so that the layer computes the same if they attended alike. Their entries
    in the optimizer's state are cleared. Layers whose heads share keys, or are normed, are refused before training.

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
        if {layer.key_of, layer.value_of} != {tuple(range(layer.num_heads))}:
            return "its heads share keys or values"
        normed = layer.normed & {"query", "key", "value"}
        return f"a norm follows its {min(normed)} heads" if normed else why_not_writable(layer, ROLES)

    @torch.no_grad()
    def on_alert(self, alert: Alert) -> Action | None:
        """Revive all but the strongest of the heads that are alike, in every layer that the alert names."""
        revived, spared, layers = list[str](), list[str](), list[str]()
        for name in alert.layers:
            layer = self.training.layers[name]
            weights = {role: layer.weight(role).detach().clone() for role in ROLES}
            pairs = list[tuple[int, int]]()
            for leaves, stays in _pairs(layer):
                layers.append(name)
                output, error = _fold(layer, weights, leaves, stays)
                about = "" if error < 0.005 else f", with a relative error of about {100 * error:.0f} %"
                is_leaving = error <= self.max_output_error  # NaN is not
                (revived if is_leaving else spared).append(f"head {leaves} of {name} (folded into {stays}{about})")
                if is_leaving:
                    weights["output"][stays], weights["output"][leaves] = output, 0
                    pairs.append((leaves, stays))
            if pairs:
                self._write(layer, weights, pairs)
        done = [f"assigned fresh weights to {', '.join(revived)}"] if revived else []
        if spared:
            done.append(f"left as before, above max_output_error={self.max_output_error:g}: {', '.join(spared)}")
        return self.action(dict.fromkeys(layers), "; ".join(done), is_refusal=not revived) if done else None

    def _write(self, layer: AttentionLayer, weights: Mapping[Any, Tensor], pairs: Sequence[tuple[int, int]]) -> None:
        """Write folded outputs and fresh queries and keys, once all are computed: a failure leaves the layer."""
        revived = [(role, leaves) for leaves, _ in pairs for role in ("query", "key", "output")]
        for role, head in revived:
            if role != "output":
                weights[role][head] = fresh_head(weights[role], head)
        for role, head in [*revived, *(("output", stays) for _, stays in pairs)]:
            layer.weights[role].write(head, weights[role][head])
        for optimizer, (role, head) in product(self.training.trainer.optimizers, revived):
            parameter, index = layer.weights[role].index(head)
            for state in optimizer.state.get(parameter, {}).values():  # momentum, mean squares
                if isinstance(state, Tensor) and state.shape == parameter.shape:
                    state.put_(index.to(state.device), state.new_zeros(index.shape))
        written = sorted({head for pair in pairs for head in pair})
        self.training.expect_change(layer.name, written, self.training.trainer.step, self.name)


def _pairs(layer: AttentionLayer) -> list[tuple[int, int]]:
    """Return each head that has a stronger one with like keys, and that one."""
    alike = head_diversity(layer.weight("key")).subspace.pair_alignment >= ALIGNED
    strength = circuit_similarity(layer.weight("output"), layer.weight("value"), layer.value_of).norm.tolist()
    staying, pairs = list[int](), list[tuple[int, int]]()
    for head in sorted(range(layer.num_heads), key=strength.__getitem__, reverse=True):
        stays = next((stronger for stronger in staying if alike[head, stronger]), None)
        if stays is None:
            staying.append(head)
        else:
            pairs.append((head, stays))
    return sorted(pairs)


def _fold(layer: AttentionLayer, weights: Mapping[Any, Tensor], leaves: int, stays: int) -> tuple[Tensor, float]:
    """Return the output weight of a head that takes over another's contribution, and the relative error of that."""
    heads, outputs = [stays, leaves], weights["output"][[stays, leaves]]
    if not outputs[1].any() or _have_different_terms(layer, leaves, stays):
        return outputs[0], float(outputs[1].any())  # 0 where it contributes nothing

    def with_biases(role: str) -> Tensor:
        biases = [bias_of(layer.weights[role], head) for head in heads]
        columns = [parameter.take(index)[:, None] for parameter, index in filter(None, biases)]
        return torch.cat([weights[role][heads], torch.stack(columns)], -1) if columns else weights[role][heads]

    queries, keys, values = with_biases("query"), weights["key"][heads], with_biases("value")
    output, error = fold_head(queries, keys, values, outputs)
    return output.to(outputs), float(error)


def _have_different_terms(layer: AttentionLayer, head: int, staying: int) -> bool:
    """Return whether the module has parameters or buffers by head, besides projections, in which two heads differ."""
    projections = {id(parameter) for role in ROLES for parameter in layer.weights[role].parameters()}
    return any(
        size == layer.num_heads and not tensor.select(dim, head).equal(tensor.select(dim, staying))
        for tensor in (*layer.module.parameters(), *layer.module.buffers())
        if id(tensor) not in projections
        for dim, size in enumerate(tensor.shape)
    )
