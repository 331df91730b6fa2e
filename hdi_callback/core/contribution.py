r"""How much each head matters: its share of the layer's output, and the first-order cost of losing it.

Head h adds :math:`z_h(t) = o_h(t) W_h` to the output of the layer at token t. No ``(tokens, H, d)`` tensor is formed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hdi_callback.errors import ShapeError


@dataclass(frozen=True)
class ContributionSums:
    r"""Sums over tokens of what the heads add to the layer's output; they add up over chunks and ranks.

    Attributes:
        count: number of tokens.
        heads: ``(H,)``, sum over tokens of :math:`\lVert z_h(t) \rVert^2`.
        output: sum over tokens of the squared norm of the layer's output.
    """

    count: Tensor
    heads: Tensor
    output: Tensor

    @classmethod
    @torch.no_grad()
    def of(
        cls, outputs: Tensor, output_weight: Tensor, *, bias: Tensor | None = None, valid: Tensor | None = None
    ) -> ContributionSums:
        r"""Add up some tokens of one layer.

        .. math:: \sum_t \lVert z_h(t) \rVert^2
                  = \langle \textstyle\sum_t o_h(t)^\top o_h(t), \; W_h W_h^\top \rangle_F

        Args:
            outputs: ``(tokens, H, d_v)``, input of the output projection by head.
            output_weight: ``(H, d_v, d)``, the output projection's slice of each head.
            bias: ``(d,)``, the output projection's own.
            valid: ``(tokens,)``, boolean; False for padding.

        Returns:
            Their sums, in float32 or wider.

        Raises:
            ShapeError: if the shapes do not belong together.

        Example:
            >>> outputs = torch.tensor([[[3.0], [4.0]]])  # one token, two heads of width one
            >>> ContributionSums.of(outputs, torch.eye(2)[:, None]).relative.tolist()
            [0.6000000238418579, 0.800000011920929]
        """
        _require_outputs(outputs, output_weight)
        wide = torch.promote_types(outputs.dtype, torch.float32)
        weight = output_weight.to(wide)
        kept, count = _kept(outputs.to(wide), valid)
        by_head = kept.movedim(1, 0)  # (H, tokens, d_v)
        heads = ((by_head.mT @ by_head) * (weight @ weight.mT)).sum((-2, -1))
        output = kept.flatten(1) @ weight.flatten(0, 1)
        if bias is not None:
            output = output + bias.to(wide) * (1 if valid is None else valid[:, None])
        return cls(count, heads.clamp_min(0), output.square().sum())

    def __add__(self, other: ContributionSums) -> ContributionSums:
        """Join disjoint tokens of the same heads."""
        return ContributionSums(self.count + other.count, self.heads + other.heads, self.output + other.output)

    @property
    def relative(self) -> Tensor:
        """RMS of each head's contribution over that of the layer's output, ``(H,)``; NaN without an output."""
        return (self.heads / self.output).sqrt()


@dataclass(frozen=True)
class ImportanceSums:
    r"""First-order effect of each head on the loss; adds up over chunks and ranks.

    Attributes:
        slope: ``(H,)``, :math:`\sum_t \langle o_h(t), \partial L / \partial o_h(t) \rangle`: how fast the loss grows
            with a factor on the head.
    """

    slope: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, outputs: Tensor, gradients: Tensor) -> ImportanceSums:
        """Add up some tokens of one layer.

        Args:
            outputs: ``(..., H, d_v)``, head outputs.
            gradients: of the same shape, gradients of the loss with respect to them; divide out a loss scale.

        Returns:
            Their sums, in float32 or wider.

        Raises:
            ShapeError: if the two shapes differ.

        Example:
            >>> outputs = torch.tensor([[[1.0, 2.0], [0.0, 3.0]]])
            >>> ImportanceSums.of(outputs, torch.ones(1, 2, 2)).importance.tolist()
            [3.0, 3.0]
        """
        if outputs.dim() < 2 or outputs.shape != gradients.shape:
            raise ShapeError(
                "Head outputs and their gradients have one shape (..., heads, width), got "
                f"{tuple(outputs.shape)} and {tuple(gradients.shape)}."
            )
        wide = torch.promote_types(outputs.dtype, torch.float32)
        product = (outputs.to(wide) * gradients.to(wide)).sum(-1)
        return cls(product.reshape(outputs.shape[:-2].numel(), outputs.shape[-2]).sum(0))

    def __add__(self, other: ImportanceSums) -> ImportanceSums:
        """Join disjoint tokens of the same heads."""
        return ImportanceSums(self.slope + other.slope)

    @property
    def importance(self) -> Tensor:
        """Size of the first-order change of the loss if the head is removed, ``(H,)`` (Michel et al. 2019)."""
        return self.slope.abs()

    @property
    def cost(self) -> Tensor:
        """First-order change of the loss if the head is removed, ``(H,)``: positive where the head helps."""
        return -self.slope

    @property
    def pair_cost(self) -> Tensor:
        """First-order change of the loss if two heads are removed, ``(H, H)``; on the diagonal that of one head.

        To first order the costs of two heads add up. That close heads cost more together than apart is an effect of
        higher order, which only removing them shows.
        """
        both = self.cost[:, None] + self.cost[None, :]
        return torch.where(torch.eye(len(self.cost), dtype=torch.bool, device=both.device), both / 2, both)


def _kept(outputs: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Set the tokens that do not count to zero, and count the others."""
    if valid is None:
        return outputs, outputs.new_full((), outputs.shape[0])
    if valid.shape != outputs.shape[:1]:
        raise ShapeError(f"`valid` has one entry for each of {outputs.shape[0]} tokens, got {tuple(valid.shape)}.")
    return torch.where(valid[:, None, None], outputs, 0), valid.sum().to(outputs.dtype)


def _require_outputs(outputs: Tensor, output_weight: Tensor) -> None:
    if outputs.dim() != 3 or output_weight.dim() != 3 or outputs.shape[1:] != output_weight.shape[:2]:
        raise ShapeError(
            "Head outputs (tokens, heads, width) and an output weight (heads, width, out_features) must agree, got "
            f"{tuple(outputs.shape)} and {tuple(output_weight.shape)}."
        )
