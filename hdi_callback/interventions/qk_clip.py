"""`QKClip`: scales down the queries and keys of heads whose largest score exceeds a limit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hdi_callback.arguments import number
from hdi_callback.attention.layer import AttentionLayer, HeadWeight
from hdi_callback.errors import MisconfigurationError
from hdi_callback.interventions.intervention import Intervention
from hdi_callback.interventions.writing import bias_of, refuse, why_not_writable
from hdi_callback.record import Action, Alert, Record


class QKClip(Intervention):
    r"""Scale the query and key weights of heads whose largest score exceeds a limit, at every reading.

    .. math:: W_Q^h \to \sqrt{\gamma_h} \, W_Q^h, \quad W_K^h \to \sqrt{\gamma_h} \, W_K^h, \qquad
              \gamma_h = \min(1, \mathrm{limit} / S_h)

    with :math:`S_h` the largest score of the queries sampled for the reading, less the mean over the keys that its
    query sees (``attention_logit``), and biases scaled alike (after MuonClip, Kimi Team 2025, which looks at every
    step). Where heads share a key, the key is scaled only if all of them exceed the limit, by the factor closest to 1,
    and the queries by the rest: a head below the limit is left bit-identical. It does not depend on alerts.

    Where to put the limit: at the largest score of a healthy run of the same model, no lower. Additive terms of the
    scores (masks, ALiBi) count in :math:`S_h` and are not scaled.

    Args:
        limit: largest score that is left as it is.
        options: `at_most` and `dry_run`, see `Intervention`.

    Raises:
        MisconfigurationError: if an argument cannot work.
    """

    name = "QKClip"
    rules = ()

    def __init__(self, limit: float = 100.0, **options: Any) -> None:
        unknown = sorted(set(options) - {"at_most", "dry_run"})
        if unknown:
            raise MisconfigurationError(
                f"QKClip does not depend on alerts, so it takes `at_most` and `dry_run`, and not {unknown[0]!r}."
            )
        super().__init__(**options)
        self.limit = number("limit of QKClip", limit, example=100)

    def check(self) -> None:
        """Refuse layers where scaling the weights does not scale the scores, or cannot be done in place."""
        for layer in self.training.layers.values():
            normed = [role for role in ("query", "key") if role in layer.normed]
            why = f"a norm follows its {normed[0]} heads, which undoes it" if normed else ""
            why = why or why_not_writable(layer, ("query", "key"))
            if not why and layer.weights["query"].index(0)[1].equal(layer.weights["key"].index(0)[1]):
                same = layer.weights["query"].index(0)[0] is layer.weights["key"].index(0)[0]
                why = "its queries and keys share their weight" if same else ""
            refuse(layer, self.name, why)

    def on_alert(self, alert: Alert) -> Action | None:
        """Nothing: it looks at scores."""
        return None

    def on_reading(self, record: Record) -> Sequence[Action | None]:
        """Scale the heads above the limit."""
        if self.at_most is not None and self.count >= self.at_most:
            return ()
        parts, layers = [], []
        for name, layer in self.training.layers.items():
            scores = record.layers[name].heads.get("attention_logit", []) if name in record.layers else []
            factors = [self._factor(score) for score in scores]
            heads = [head for head, factor in enumerate(factors) if factor < 1]
            if not heads or len(factors) != layer.num_heads:
                continue
            if not self.dry_run:
                scale_scores(layer, factors)
                self.training.expect_change(name, heads, self.training.step, self.name)
            largest = max(scores[head] for head in heads)
            phrase = f"{'head' if len(heads) == 1 else 'heads'} {', '.join(map(str, heads))}"
            parts.append(f"{name} ({phrase}, up to {largest:.3g})")
            layers.append(name)
        if not parts:
            return ()
        self.count += 1
        return [self.action(layers, f"scaled queries and keys with scores above {self.limit:g}: {'; '.join(parts)}")]

    def _factor(self, score: float | None) -> float:
        is_above = score is not None and math.isfinite(score) and score > self.limit
        return self.limit / score if is_above and score else 1.0


@torch.no_grad()
def scale_scores(layer: AttentionLayer, factors: Sequence[float]) -> None:
    """Scale the scores of heads by scaling their queries and keys in place."""
    of_key = [
        math.sqrt(max(factor for head, factor in enumerate(factors) if layer.key_of[head] == key))
        for key in range(layer.num_key_heads)
    ]
    for head, factor in enumerate(factors):
        _scale(layer.weights["query"], head, factor / of_key[layer.key_of[head]])
    for key, factor in enumerate(of_key):
        _scale(layer.weights["key"], key, factor)


def _scale(weight: HeadWeight, head: int, factor: float) -> None:
    parts: list[tuple[nn.Parameter, Tensor]] = [weight.index(head)]
    bias = bias_of(weight, head)
    for parameter, index in parts if bias is None else [*parts, bias]:
        if factor < 1:
            rows = parameter.take(index)
            parameter.put_(index, rows * _rounded_down(factor, rows))


def _rounded_down(factor: float, like: Tensor) -> Tensor:
    """The factor in the type of a weight; in bfloat16 the nearest to 0.999 is 1, and scores would stay above."""
    nearest = torch.tensor(factor, dtype=like.dtype, device=like.device)
    below = torch.tensor(factor * (1 - torch.finfo(like.dtype).eps / 2), dtype=like.dtype, device=like.device)
    return below if float(nearest) > factor else nearest
