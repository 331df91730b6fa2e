"""`DiversityPenalty`: gradient of a penalty on similar heads, while an alert is active."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdi_callback.arguments import number, one_of, words
from hdi_callback.attention import AttentionLayer, Role
from hdi_callback.attention.autocast import without_autocast
from hdi_callback.core import diversity_penalty, head_diversity, qk_circuits
from hdi_callback.core.penalties import circuit_penalty
from hdi_callback.errors import MisconfigurationError
from hdi_callback.monitoring.interventions.parameters import parameters_of, refuse_sharded
from hdi_callback.monitoring.interventions.while_active import WhileActive


class DiversityPenalty(WhileActive):
    r"""Push the heads of a layer apart while an alert is active.

    Adds the gradient of ``weight * mean overlap`` (`diversity_penalty`) to that of the loss, once for each optimizer
    step: after the backward, the reduction over ranks and the unscaling, before clipping. So it acts as a part of the
    loss would, under accumulation, mixed precision and data parallelism.

    Exactly aligned heads are a stationary point of the penalty, so for an identical pair its gradient is taken at
    displaced weights, at a distance of `noise`; the weights themselves are not changed. The directions come from a
    generator of its own, the same on every rank.

    Args:
        weight: what the mean overlap, in [0, 1], is multiplied by.
        roles: the weights that are pushed apart: ``"key"``, ``"query"``, ``"value"``.
        noise: size of the displacement, relative to the norm of a head.
        measure: the penalty: ``"subspace"`` for the mean overlap of the subspaces of each role, ``"circuit"`` for the
            mean squared cosine of the QK circuits (`circuit_penalty`). `roles` are for subspaces only.
        options: see `Intervention`; by default it answers the rules on heads that are alike, and no others: pushing
            heads apart does not mend a lost mask or a rate that is too high. A rule of your own has to be named.

    Raises:
        MisconfigurationError: if an argument cannot work.
    """

    name = "DiversityPenalty"
    rules = (
        "mean alignment", "worst pair", "forecast", "shared direction", "merged scores", "merged messages",
        "attend alike",
    )  # fmt: skip
    waits_for_change = True

    def __init__(
        self,
        weight: float = 0.1,
        *,
        roles: Sequence[Role] = ("key",),
        noise: float = 1e-2,
        measure: Literal["subspace", "circuit"] = "subspace",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.measure = one_of("measure of DiversityPenalty", measure, ("subspace", "circuit"))
        self.weight = number("weight of DiversityPenalty", weight, above=0, below=math.inf, example=0.1)
        self.noise = number("noise of DiversityPenalty", noise, above=0, below=math.inf, example=0.01)
        for role in words("roles of DiversityPenalty", roles, what="roles", may_be_empty=False) or ("",):
            one_of("roles of DiversityPenalty", role, ("key", "query", "value"))
        self.roles = tuple(roles)
        if measure == "circuit" and self.roles != ("key",):
            raise MisconfigurationError(
                f'`roles` of DiversityPenalty are for subspaces, and measure="circuit" takes queries and keys '
                f"together, got roles={list(self.roles)}: leave `roles` out."
            )

    def check(self) -> None:
        """Refuse weights that are spread over ranks."""
        for layer in self.training.layers.values():
            if self.is_for_layer(layer.name):
                refuse_sharded(layer, self.name)

    def begin(self) -> str:
        """The action at the beginning, as a part of a sentence."""
        what = "QK circuits of the" if self.measure == "circuit" else " and ".join(self.roles)
        return f"started to push the {what} heads apart (weight {self.weight:g})"

    def end(self) -> str:
        """The action at the end, as a part of a sentence."""
        return "stopped pushing the heads apart"

    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Add the penalty's gradient to that of the loss, or none on all ranks if one of them cannot compute it."""
        layers = [self.training.layers[name] for name in self.standing if name in self.training.layers]
        if not self.is_active or not layers:
            return
        gradients, failure = list[tuple[nn.Parameter, Tensor]](), None
        try:
            for layer in layers:
                gradients += self._gradients(layer, optimizer)
        except Exception as error:
            failure = error
        # Other ranks wait for this flag; it stays on the device, so that the host does not wait for it.
        place = next(layers[0].module.parameters()).device
        largest = getattr(self.training, "largest_over_ranks", list)  # those written for version 0.1 have none
        (is_out,) = largest([torch.full((1,), float(failure is not None), device=place)])
        if failure is not None:
            raise failure
        with torch.no_grad():
            for parameter, gradient in gradients:
                # Weights that are not finite give no gradient; the check must not make the host wait.
                may_add = gradient.isfinite().all() & (is_out.to(gradient.device) == 0)
                gradient = torch.where(may_add, gradient, 0)
                if parameter.grad is None:
                    parameter.grad = gradient.to(parameter.dtype)
                else:
                    parameter.grad += gradient.to(parameter.grad.dtype)

    def _gradients(self, layer: AttentionLayer, optimizer: Optimizer) -> list[tuple[nn.Parameter, Tensor]]:
        """The parameters of a layer that an optimizer steps, each with its part of the penalty's gradient."""
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        parameters = [item for item in parameters_of(layer) if item.requires_grad and id(item) in stepped]
        if not parameters:
            return []
        with torch.enable_grad(), without_autocast(parameters[0].device):
            if self.measure == "circuit":
                penalty = self._circuit_penalty(layer.weight("query"), layer.weight("key"))
            else:
                penalty = torch.stack([self._penalty(layer.weight(role)) for role in self.roles]).sum()
            if not penalty.requires_grad:
                return []
            gradients: tuple[Tensor | None, ...] = torch.autograd.grad(
                self.weight * penalty, parameters, allow_unused=True
            )
        scale = self.training.loss_scale(optimizer)
        return [
            (parameter, scale * gradient) for parameter, gradient in zip(parameters, gradients) if gradient is not None
        ]

    def _penalty(self, weight: Tensor) -> Tensor:
        if weight.shape[0] < 2:
            return weight.new_zeros(())
        detached = weight.detach().float()
        aside = self._aside(detached)
        # At equal subspaces the gradient is zero.
        nearest = head_diversity(detached).nearest_overlap
        is_clone = (nearest > 1 - 1e-4)[:, None, None]
        return diversity_penalty(weight.float() + aside * is_clone)

    def _circuit_penalty(self, query: Tensor, key: Tensor) -> Tensor:
        if query.shape[0] < 2:
            return query.new_zeros(())
        # At equal circuits the gradient is zero; shared keys need no displacement.
        nearest = qk_circuits(query, key).nearest_cosine
        is_clone = (nearest > 1 - 1e-4)[:, None, None]
        wide = query.float()
        return circuit_penalty(wide + self._aside(wide.detach()) * is_clone, key.float())

    def _aside(self, weight: Tensor) -> Tensor:
        """A random displacement of each head, the same on every rank."""
        size = torch.linalg.vector_norm(weight, dim=(-2, -1), keepdim=True)
        generator = torch.Generator().manual_seed(weight.shape[0])
        draw = torch.randn(weight.shape, generator=generator, device="cpu").to(weight)
        aside: Tensor = self.noise * size * draw / weight[0].numel() ** 0.5
        return aside
