r"""Importance of heads: the share of each in the layer's output, and the first-order cost of losing it.

Head h adds :math:`z_h(t) = o_h(t) W_h` to the output of the layer at token t. No ``(tokens, H, d)`` tensor is formed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hdi_callback.core.tensors import require_tensors
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
        r"""Sums of some tokens of one layer.

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
    r"""First-order effect of each head, and of each pair of heads, on the loss; adds up over sequences and ranks.

    With :math:`s_{bh} = \sum_t \langle o_h(t), \partial L / \partial o_h(t) \rangle` over the tokens of sequence b, the
    slope of the loss in a factor on head h there.

    Attributes:
        slope: ``(H,)``, :math:`\sum_b s_{bh}`: how fast the loss grows with a factor on the head.
        pairs: ``(H, H)``, :math:`\sum_b |s_{bh} + s_{bg}|`, and on the diagonal :math:`\sum_b |s_{bh}|`: size of the
            change, sequence by sequence, if both heads are removed, or one.
    """

    slope: Tensor
    pairs: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, outputs: Tensor, gradients: Tensor) -> ImportanceSums:
        """Sums of some sequences of one layer.

        Args:
            outputs: ``(sequences, tokens, H, d_v)``, head outputs; ``(tokens, H, d_v)`` is one sequence.
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
        is_one = isinstance(outputs, Tensor) and outputs.dim() == 3
        return cls.of_slopes(head_slopes(*((outputs[None], gradients[None]) if is_one else (outputs, gradients))))

    @classmethod
    @torch.no_grad()
    def of_slopes(cls, slopes: Tensor) -> ImportanceSums:
        """Sums of sequences whose slopes are known.

        Args:
            slopes: ``(sequences, H)``, as `head_slopes` gives them.

        Returns:
            Their sums.
        """
        H = slopes.shape[-1]
        pairs = slopes.new_zeros(H, H)
        for part in torch.split(slopes, max(1, _CHUNK // max(1, H * H))):
            pairs = pairs + (part[:, :, None] + part[:, None, :]).abs().sum(0)
        single = torch.eye(H, dtype=torch.bool, device=slopes.device)
        return cls(slopes.sum(0), torch.where(single, pairs / 2, pairs))

    def __add__(self, other: ImportanceSums) -> ImportanceSums:
        """Join different sequences of the same heads."""
        return ImportanceSums(self.slope + other.slope, self.pairs + other.pairs)

    @property
    def importance(self) -> Tensor:
        """Size of the first-order change of the loss if the head is removed, ``(H,)`` (Michel et al. 2019).

        Summed over sequences: over all tokens at once the changes cancel where training has come to rest.
        """
        return self.pairs.diagonal()

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


@torch.no_grad()
def head_slopes(outputs: Tensor, gradients: Tensor) -> Tensor:
    r"""Compute how fast the loss grows with a factor on each head, sequence by sequence.

    .. math:: s_{bh} = \sum_t \langle o_{bh}(t), \partial L / \partial o_{bh}(t) \rangle

    Args:
        outputs: ``(sequences, tokens, H, d_v)``, head outputs.
        gradients: of the same shape, gradients of the loss with respect to them; where they are zero, as in padding,
            the outputs may have any value.

    Returns:
        ``(sequences, H)``, in float32 or wider.

    Raises:
        ShapeError: if the two shapes differ.

    Example:
        >>> head_slopes(torch.ones(2, 3, 1, 4), torch.ones(2, 3, 1, 4)).tolist()
        [[12.0], [12.0]]
    """
    require_tensors(3, outputs=outputs, gradients=gradients)
    if outputs.dim() != 4 or outputs.shape != gradients.shape:
        raise ShapeError(
            "Head outputs and their gradients have one shape (sequences, tokens, heads, width), got "
            f"{tuple(outputs.shape)} and {tuple(gradients.shape)}."
        )
    wide = torch.promote_types(outputs.dtype, torch.float32)
    slopes = outputs.new_zeros(outputs.shape[0], outputs.shape[2], dtype=wide)
    # In chunks of tokens: no copy of all of them in the wider type.
    step = max(1, _CHUNK // max(1, outputs.shape[0] * outputs.shape[2] * outputs.shape[3]))
    for own, gradient in zip(torch.split(outputs, step, 1), torch.split(gradients, step, 1)):
        product = own.to(wide) * gradient.to(wide)
        slopes += torch.where(gradient == 0, 0, product).sum((1, 3))
    return slopes


_CHUNK = 2**22  # numbers


def _kept(outputs: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Outputs with zeros in padding, and the number of other tokens."""
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
