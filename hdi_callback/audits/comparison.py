"""`compare`: which weights of which heads differ in two models or checkpoints."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hdi_callback.arguments import listed
from hdi_callback.attention.layer import ROLES, AttentionLayer
from hdi_callback.audits.audit import missing_weights, open_layers
from hdi_callback.audits.sources import Target
from hdi_callback.dashboards.layer_table import table_lines
from hdi_callback.rules.rule import heads_in_words


@dataclass(frozen=True, repr=False)
class Comparison:
    """The differences between the weights of two models."""

    first: str  #: name of the first model, A
    second: str  #: name of the second, B
    #: Layer -> role -> how far the weights of each head of B are from those of A, as a share of their norm in A; 0 if
    #: they are equal bit by bit.
    changes: Mapping[str, Mapping[str, tuple[float, ...]]]
    broken: tuple[str, ...]  #: sentences that name heads whose weights are not finite, or zero, and in which of the two
    not_compared: Mapping[str, str]  #: layers, and roles of layers, that could not be compared -> the reason

    @property
    def summary(self) -> str:
        """What is broken, the largest change, and what was not compared, in a few sentences."""
        sentences = list(self.broken)
        changes = [
            (share, head, role, layer)
            for layer, roles in self.changes.items()
            for role, shares in roles.items()
            for head, share in enumerate(shares)
            if 0 < share < math.inf
        ]
        if changes:
            share, head, role, layer = max(changes)
            sentences.append(f"{layer} changed most: the {role} weights of head {head} by {share:.3g} of their norm.")
        elif self.changes and not self.broken:
            roles = listed(list(dict.fromkeys(role for roles in self.changes.values() for role in roles)))
            layers = f"{len(self.changes)} layer{'s' if len(self.changes) > 1 else ''}"
            sentences.append(
                f"The {roles} weights that are in both are equal bit by bit, in {layers}. "
                "Other parameters are not compared."
            )
        elif not self.changes:
            sentences.append("Nothing to compare: no layer could be read in both.")
        if self.not_compared:
            name, reason = next(iter(self.not_compared.items()))
            further = f", and {len(self.not_compared) - 1} more" if len(self.not_compared) > 1 else ""
            sentences.append(f"Not compared: {name} ({reason}){further}.")
        return " ".join(sentences)

    def __repr__(self) -> str:
        """The layers that changed most, with the head of each role that did, and the summary."""
        largest = {
            layer: {role: _largest(shares) for role, shares in roles.items()} for layer, roles in self.changes.items()
        }
        ordered = sorted(largest, key=lambda layer: -max(share for _, share in largest[layer].values()))
        rows = [
            [layer, *(f"{at[1]:.2g} (head {at[0]})" if (at := largest[layer].get(role)) else "-" for role in ROLES)]
            for layer in ordered
        ]
        lines = [f"A  {self.first}", f"B  {self.second}", "Largest change of a head, as a share of its norm:"]
        lines += table_lines(("layer", *ROLES), rows, width=100) if rows else []
        return "\n".join([*lines, "", self.summary])


def compare(
    first: nn.Module | str | os.PathLike[str],
    second: nn.Module | str | os.PathLike[str],
    *,
    model: str | Callable[..., Any] | None = None,
) -> Comparison:
    """Return how far the weights of each head of two models or checkpoints are apart, and what cannot be compared.

    Roles are compared one by one, by value. What is not finite, zero, or in one of the two alone is named.

    Args:
        first: a model or a checkpoint, as `audit` takes it.
        second: the same.
        model: see `audit`.

    Raises:
        MisconfigurationError: if one of the two cannot be opened.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.TransformerEncoderLayer(d_model=32, nhead=4, batch_first=True))
        >>> compare(model, model).changes["0.self_attn"]["key"]
        (0.0, 0.0, 0.0, 0.0)
    """
    opened = [open_layers(source, model) for source in (first, second)]
    targets = [target for target, _ in opened]
    before, after = ({layer.name: layer for layer in survey.layers} for _, survey in opened)
    reasons = {refusal.name: refusal.reason for _, survey in opened for refusal in survey.refused}
    for side, names in (("A", before.keys() - after.keys()), ("B", after.keys() - before.keys())):
        reasons |= dict.fromkeys(sorted(names), f"it is only in {side}")
    changes: dict[str, dict[str, tuple[float, ...]]] = {}
    broken: list[str] = []
    for name in (name for name in before if name in after):
        for role in ROLES:
            weights = [_weight(target, side[name], role) for target, side in zip(targets, (before, after))]
            in_first, in_second = weights
            if not isinstance(in_first, Tensor) or not isinstance(in_second, Tensor):
                reasons[f"{role} of {name}"] = next(weight for weight in weights if isinstance(weight, str))
            elif in_first.shape != in_second.shape:
                shapes = f"{tuple(in_first.shape)} in A and {tuple(in_second.shape)} in B"
                reasons[f"{role} of {name}"] = f"its weights are {shapes}"
            else:
                changes.setdefault(name, {})[role] = _shares(in_first, in_second)
                broken += _broken(name, role, in_first, in_second)
    return Comparison(targets[0].name, targets[1].name, changes, tuple(broken), reasons)


def _weight(target: Target, layer: AttentionLayer, role: str) -> Tensor | str:
    """Return the weights of a role, or why there are none."""
    if role not in layer.weights:
        return "its weights are not read in one of the two"
    return missing_weights(target, layer, [role]) or layer.weights[role].tensor().detach().float().cpu()


def _shares(before: Tensor, after: Tensor) -> tuple[float, ...]:
    """Return how far the weights of each head are apart, as a share of the norm of the first; NaN if not finite."""
    distances, norms = (after - before).flatten(1).norm(dim=1), before.flatten(1).norm(dim=1)
    return tuple((distances / norms.clamp_min(1e-30)).masked_fill((before == after).flatten(1).all(1), 0.0).tolist())


def _broken(layer: str, role: str, before: Tensor, after: Tensor) -> list[str]:
    """Return sentences that name heads that are not finite, or zero."""
    sentences = []
    for side, weights in (("A", before.flatten(1)), ("B", after.flatten(1))):
        for fault, heads in (("not finite", ~weights.isfinite().all(1)), ("zero", (weights == 0).all(1))):
            if heads.any():
                names = heads_in_words([heads.nonzero().flatten().tolist()], layer, count=len(before))
                sentences.append(f"The {role} weights of {names} are {fault} in {side}.")
    return sentences


def _largest(shares: tuple[float, ...]) -> tuple[int, float]:
    """Return the head that changed most, and its share; what is not finite comes first."""
    return max(enumerate(shares), key=lambda change: change[1] if math.isfinite(change[1]) else math.inf)
