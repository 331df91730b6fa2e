"""Masks of scores, as terms that are evaluated for few queries at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from hdi_callback.attention.observe.scores.axes import Axes

HIDDEN = -5000.0
"""A number added to a score hides the key if it is at most this (-10000 in old models, -inf, the least of a type)."""


@dataclass(frozen=True, eq=False)
class MaskTerm:
    """One mask, or one bias, that hides keys from queries.

    Attributes:
        tensor: broadcastable to ``(*lead, queries, keys)``; `None` for those that follow from positions.
        kind: ``"visible"``: True where a query may attend; ``"hidden"``: the other way round; ``"added"``: numbers that
            are added to the scores, which also bias the visible ones; ``"causal"``: query i sees keys up to
            i + offset.
        offset: of ``"causal"``.
        sign: -1 where numbers are subtracted.
        window: of ``"causal"``: and none before i + offset - window; negative for no such limit.
    """

    tensor: Tensor | None
    kind: Literal["visible", "hidden", "added", "causal"]
    offset: int = 0
    window: int = -1
    sign: float = 1.0

    def hidden(self, axes: Axes, sequences: Tensor, positions: Tensor, keys: int) -> Tensor:
        """Return which keys some queries do not see.

        Args:
            axes: the leading dimensions.
            sequences: ``(S,)``.
            positions: ``(q,)``.
            keys: how many keys there are.

        Returns:
            ``(S or 1, heads or 1, q, keys)``, True where a key is hidden.

        Raises:
            ValueError: if the term does not fit the scores.
        """
        if self.tensor is None:
            key = torch.arange(keys, device=positions.device)
            last = (positions + self.offset)[:, None]
            hidden = key > last
            if self.window >= 0:
                hidden = hidden | (key < last - self.window)
            return hidden[None, None]
        rows = self._rows(axes, sequences, positions)
        return _is_hiding(rows * self.sign if self.kind == "added" else rows, self.kind)

    def added(self, axes: Axes, sequences: Tensor, positions: Tensor) -> Tensor | None:
        """Return this term as it is added to the scores of some queries.

        Args:
            axes: the leading dimensions.
            sequences: ``(S,)``.
            positions: ``(q,)``.

        Returns:
            ``(S, heads or 1, q, keys or 1)``, or None if it adds nothing.
        """
        return self._rows(axes, sequences, positions).float() * self.sign if self.kind == "added" else None

    def hidden_from_all(self, axes: Axes, sequences: Tensor, queries: int, keys: int) -> Tensor | None:
        """The keys that are hidden from every query of a sequence: padding.

        Rows of padding that see every key, so that their softmax is no 0/0, are not counted as seeing.

        Args:
            axes: the leading dimensions.
            sequences: ``(S,)``.
            queries: how many queries there are.
            keys: how many keys there are.

        Returns:
            ``(S, keys)``, or None if this term does not depend on the sequence.
        """
        if self.tensor is None or self.sign < 0:
            return None
        opened = axes.opened(self.tensor if self.tensor.dim() >= 2 else self.tensor[None])
        if opened is None or opened.shape[-1] != keys:
            return None
        by_sequence = any(opened.shape[dim] > 1 for dim in axes.batch)
        if not by_sequence and axes.sequences > 1:
            return None
        for dim in axes.heads_dims:  # padding is the same for all heads
            opened = opened.narrow(dim, 0, 1)
        if opened.shape[-2] == 1:
            return _is_hiding(axes.rows(opened, sequences, None), self.kind).flatten(0, -2)
        alone = torch.zeros(len(sequences), keys, dtype=torch.bool, device=opened.device)
        everyone = alone.clone()
        step = max(1, 2**22 // max(keys * len(sequences), 1))
        for start in range(0, queries, step):
            positions = torch.arange(start, min(start + step, queries), device=opened.device)
            visible = ~_is_hiding(axes.rows(opened, sequences, positions), self.kind)[:, 0]  # (S, q, keys)
            all_keys = visible.all(-1, keepdim=True) & (positions != queries - 1)[:, None]
            alone |= (visible & ~all_keys).any(1)
            everyone |= visible.any(1)
        some = alone.any(-1, keepdim=True)
        return ~torch.where(some, alone, everyone)

    def viewed(self, before: Sequence[int], after: Sequence[int]) -> MaskTerm:
        """Follow scores whose leading dimensions are joined or split.

        Args:
            before: the leading dimensions that it was broadcast to.
            after: those that the scores have now, of as many elements.

        Returns:
            The same term for them; itself where it has nothing in the dimensions that changed.
        """
        same = 0
        while same < min(len(before), len(after)) and before[-1 - same] == after[-1 - same]:
            same += 1
        tensor = self.tensor
        if tensor is None or tensor.dim() <= 2 + same:
            return self
        changed, kept = tensor.shape[: -2 - same], tensor.shape[-2 - same :]
        if changed.numel() == 1:
            return replace(self, tensor=tensor.reshape(kept))
        opened = tensor.expand(*before[: len(before) - same], *kept)
        return replace(self, tensor=opened.reshape(*after[: len(after) - same], *kept))

    def _rows(self, axes: Axes, sequences: Tensor, positions: Tensor) -> Tensor:
        tensor = self.tensor
        assert tensor is not None
        opened = axes.opened(tensor if tensor.dim() >= 2 else tensor[None])
        if opened is None:
            raise ValueError(f"a mask of shape {tuple(tensor.shape)} does not fit scores of {axes.lead}")
        return axes.rows(opened, sequences, positions)


def _is_hiding(rows: Tensor, kind: str) -> Tensor:
    if kind == "added":
        return rows <= HIDDEN
    return ~rows.bool() if kind == "visible" else rows.bool()


def hidden_by(terms: Sequence[MaskTerm], axes: Axes, sequences: Tensor, positions: Tensor, keys: int) -> Tensor | None:
    """Put terms together: a key is hidden if one of them hides it.

    Args:
        terms: the terms.
        axes: the leading dimensions.
        sequences: ``(S,)``.
        positions: ``(q,)``.
        keys: how many keys there are.

    Returns:
        ``(S or 1, heads or 1, q, keys or 1)``; None without terms.
    """
    hidden: Tensor | None = None
    for term in terms:
        one = term.hidden(axes, sequences, positions, keys)
        hidden = one if hidden is None else hidden | one
    return hidden
