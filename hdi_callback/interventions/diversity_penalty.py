"""`DiversityPenalty`: the gradient of a penalty on heads that are alike, while an alert is active."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdi_callback.arguments import one_of
from hdi_callback.attention.layer import AttentionLayer
from hdi_callback.core import circuit_penalty, diversity_penalty, head_diversity, qk_circuits
from hdi_callback.interventions.intervention import WhileActive
from hdi_callback.interventions.run import positive
from hdi_callback.interventions.writing import refuse

CLONES = 1 - 1e-4
"""Overlap, or cosine, from which on the gradient of the penalty is taken aside, as it is zero for clones."""


class DiversityPenalty(WhileActive):
    r"""Push the heads of a layer apart while an alert is active.

    Adds the gradient of ``weight * mean overlap`` (`diversity_penalty`) to that of the loss, once for each optimizer
    step: after the backward, the reduction over ranks and the unscaling, before clipping. So it acts as a part of the
    loss would, under accumulation, mixed precision and data parallelism.

    Exactly aligned heads are a stationary point of the penalty, so for clones its gradient is taken at displaced
    weights, at a distance of `noise`; the weights themselves are not changed. The directions come from a generator of
    its own, the same on every rank.

    Args:
        weight: what the mean overlap, in [0, 1], is multiplied by.
        measure: ``"subspace"`` for the mean overlap of the key heads' subspaces, ``"circuit"`` for the mean squared
            cosine of the heads' QK circuits (`circuit_penalty`).
        noise: size of the displacement, relative to the norm of a head.
        options: see `Intervention`; by default it acts on the rules on heads that are alike.

    Raises:
        MisconfigurationError: if an argument cannot work.
    """

    name = "DiversityPenalty"
    rules = ("mean alignment", "worst pair", "merged scores")
    ignores_start = True

    def __init__(
        self,
        weight: float = 0.1,
        *,
        measure: Literal["subspace", "circuit"] = "subspace",
        noise: float = 1e-2,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.weight = positive("weight of DiversityPenalty", weight)
        self.measure = one_of("measure of DiversityPenalty", measure, ("subspace", "circuit"))
        self.noise = positive("noise of DiversityPenalty", noise)

    @property
    def roles(self) -> tuple[str, ...]:
        """The weights that it pushes apart."""
        return ("query", "key") if self.measure == "circuit" else ("key",)

    @property
    def begins(self) -> str:
        """See `WhileActive`."""
        what = "QK circuits of the" if self.measure == "circuit" else "key"
        return f"began to push the {what} heads apart (weight {self.weight:g})"

    @property
    def ends(self) -> str:
        """See `WhileActive`."""
        return "stopped pushing the heads apart"

    def check(self) -> None:
        """Refuse layers whose weights are spread over ranks, or made by no parameter."""
        for layer in self.training.layers.values():
            missing = [role for role in self.roles if role not in layer.weights]
            sharded = [role for role in self.roles if role not in missing and layer.weights[role].is_sharded]
            refuse(layer, self.name, f"it has no {missing[0]} weight of its own" if missing else "")
            refuse(layer, self.name, f"its {sharded[0]} weight is spread over ranks" if sharded else "")

    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Add the penalty's gradient to that of the loss, or none on all ranks if one of them cannot compute it."""
        if not self.active or self.dry_run:
            return
        gradients, failure = list[tuple[nn.Parameter, Tensor]](), None
        layers = [self.training.layers[name] for name in self.active if name in self.training.layers]
        try:
            for layer in layers:
                gradients += self._gradients(layer, optimizer)
        except Exception as error:
            failure = error
        # Other ranks wait for this flag; it stays on the device, so that the host does not wait for it.
        device = next(layers[0].module.parameters()).device
        (has_failed,) = self.training.max_over_ranks([torch.full((1,), float(failure is not None), device=device)])
        if failure is not None:
            raise failure
        for parameter, gradient in gradients:
            # Weights that are not finite give no gradient; the check must not make the host wait.
            may_add = gradient.isfinite().all() & (has_failed.to(gradient.device) == 0)
            gradient = torch.where(may_add, gradient, 0)
            if parameter.grad is None:
                parameter.grad = gradient.to(parameter.dtype)
            else:
                parameter.grad += gradient.to(parameter.grad.dtype)

    def _gradients(self, layer: AttentionLayer, optimizer: Optimizer) -> list[tuple[nn.Parameter, Tensor]]:
        """The parameters of a layer that an optimizer steps, each with its part of the penalty's gradient."""
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        found = {id(one): one for role in self.roles for one in layer.weights[role].parameters()}
        parameters = [one for one in found.values() if one.requires_grad and id(one) in stepped]
        if not parameters:
            return []
        with torch.enable_grad(), torch.autocast(parameters[0].device.type, enabled=False):
            penalty = self.weight * self.training.loss_scale(optimizer) * self._penalty(layer)
            gradients = torch.autograd.grad(penalty, parameters, allow_unused=True)
        return [(parameter, gradient) for parameter, gradient in zip(parameters, gradients) if gradient is not None]

    def _penalty(self, layer: AttentionLayer) -> Tensor:
        key = layer.weight("key").float()
        if self.measure == "subspace":
            nearest = head_diversity(key.detach()).subspace.nearest_overlap
            return diversity_penalty(self._displaced(key, nearest))
        query = layer.weight("query").float()
        nearest = qk_circuits(query.detach(), key.detach(), layer.key_of).nearest_cosine
        return circuit_penalty(self._displaced(query, nearest), key, layer.key_of)

    def _displaced(self, weight: Tensor, nearest: Tensor) -> Tensor:
        """Move clones at random, in the same way on every rank."""
        size = torch.linalg.vector_norm(weight.detach(), dim=(-2, -1), keepdim=True)
        generator = torch.Generator().manual_seed(weight.shape[0])
        draw = torch.randn(weight.shape, generator=generator, device="cpu").to(weight.device)
        aside = self.noise * size * draw / weight[0].numel() ** 0.5
        displaced: Tensor = weight + aside * (nearest > CLONES)[:, None, None]
        return displaced
