"""An intervention that pushes the heads of a layer apart."""

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
    step: after the backward, the reduction over ranks and the unscaling, before clipping. So accumulation, mixed
    precision and data parallelism see what they would if it were part of the loss.

    Exactly aligned heads are a stationary point of the penalty, so where a pair is identical its gradient is taken
    beside the weights, at a distance of `noise`; the weights themselves are not touched. The directions come from a
    generator of its own, the same on every rank.

    Args:
        weight: what the mean overlap, in [0, 1], is multiplied by.
        roles: the weights that are pushed apart: ``"key"``, ``"query"``, ``"value"``.
        noise: size of the displacement, relative to the norm of a head.
        measure: what is made small: ``"subspace"`` the mean overlap of the subspaces of each role, ``"circuit"`` the
            mean squared cosine of the QK circuits (`circuit_penalty`), that is of what attends to what. `roles` are for
            subspaces alone.
        options: see `Intervention`.

    Raises:
        MisconfigurationError: if an argument cannot work.
    """

    name = "DiversityPenalty"
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
        """Say what begins."""
        what = "QK circuits of the" if self.measure == "circuit" else " and ".join(self.roles)
        return f"started to push the {what} heads apart (weight {self.weight:g})"

    def end(self) -> str:
        """Say what ends."""
        return "stopped pushing the heads apart"

    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Add the penalty's gradient to that of the loss."""
        if not self.is_active:
            return
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for name in self.standing:
            if name in self.training.layers:
                layer = self.training.layers[name]
                parameters = [item for item in parameters_of(layer) if item.requires_grad and id(item) in stepped]
                self._add_gradient(layer, parameters, self.training.loss_scale(optimizer))

    def _add_gradient(self, layer: AttentionLayer, parameters: list[nn.Parameter], scale: float) -> None:
        if not parameters:
            return
        with torch.enable_grad(), without_autocast(parameters[0].device):
            if self.measure == "circuit":
                penalty = self._circuit_penalty(layer.weight("query"), layer.weight("key"))
            else:
                penalty = torch.stack([self._penalty(layer.weight(role)) for role in self.roles]).sum()
            if not penalty.requires_grad:
                return
            gradients: tuple[Tensor | None, ...] = torch.autograd.grad(
                self.weight * penalty, parameters, allow_unused=True
            )
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients):
                if gradient is None:
                    continue
                # Broken weights have no gradient to follow, and asking the host about it would make it wait.
                gradient = torch.where(gradient.isfinite().all(), scale * gradient, 0)
                if parameter.grad is None:
                    parameter.grad = gradient.to(parameter.dtype)
                else:
                    parameter.grad += gradient.to(parameter.grad.dtype)

    def _penalty(self, weight: Tensor) -> Tensor:
        if weight.shape[0] < 2:
            return weight.new_zeros(())
        detached = weight.detach().float()
        aside = self._aside(detached)
        # A pair that shares its subspace gets no gradient where it is.
        nearest = head_diversity(detached).nearest_overlap
        is_clone = (nearest > 1 - 1e-4)[:, None, None]
        return diversity_penalty(weight.float() + aside * is_clone)

    def _circuit_penalty(self, query: Tensor, key: Tensor) -> Tensor:
        if query.shape[0] < 2:
            return query.new_zeros(())
        # Equal circuits get no gradient where they are; keys that they share need none to be moved apart.
        nearest = qk_circuits(query, key).nearest_cosine
        is_clone = (nearest > 1 - 1e-4)[:, None, None]
        wide = query.float()
        return circuit_penalty(wide + self._aside(wide.detach()) * is_clone, key.float())

    def _aside(self, weight: Tensor) -> Tensor:
        """Draw a displacement of each head, the same on every rank."""
        size = torch.linalg.vector_norm(weight, dim=(-2, -1), keepdim=True)
        generator = torch.Generator().manual_seed(weight.shape[0])
        draw = torch.randn(weight.shape, generator=generator, device="cpu").to(weight)
        aside: Tensor = self.noise * size * draw / weight[0].numel() ** 0.5
        return aside
