"""`QKClip`: scales down the queries and keys of heads whose largest score exceeds a limit."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hdi_callback.arguments import number
from hdi_callback.attention.layer import AttentionLayer, bias_of
from hdi_callback.interventions.intervention import Intervention, why_not_writable
from hdi_callback.record import Action, Record


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
        at_most: how often to act in a run; any number of times by default.
    """

    name = "QKClip"
    rules = ()

    def __init__(self, limit: float = 100.0, *, at_most: int | None = None) -> None:
        super().__init__(at_most=at_most)
        self.limit = number("limit of QKClip", limit, example=100)

    def why_not(self, layer: AttentionLayer) -> str:
        """Return why scaling the weights does not scale the scores, or cannot be done; empty if it does."""
        for role in ("query", "key"):
            if role in layer.normed:
                return f"a norm follows its {role} heads, which undoes it"
        if why := why_not_writable(layer, ("query", "key")):
            return why
        (query, rows), (key, key_rows) = (layer.weights[role].index(0) for role in ("query", "key"))
        return "its queries and keys share their weight" if query is key and rows.equal(key_rows) else ""

    def on_reading(self, record: Record) -> Sequence[Action | None]:
        """Scale the heads above the limit."""
        parts = {}
        for name, layer in self.training.layers.items():
            scores = record.layers[name].heads.get("attention_logit", []) if name in record.layers else []
            above = {head: score for head, score in enumerate(scores) if score and self.limit < score < math.inf}
            if not above or len(scores) != layer.num_heads:
                continue
            _scale_scores(layer, [self.limit / above.get(head, self.limit) for head in range(layer.num_heads)])
            self.training.expect_change(name, [*above], self.training.trainer.step, self.name)
            phrase = f"{'head' if len(above) == 1 else 'heads'} {', '.join(map(str, above))}"
            parts[name] = f"{name} ({phrase}, up to {max(above.values()):.3g})"
        if not parts:
            return ()
        done = f"scaled queries and keys with scores above {self.limit:g}: {'; '.join(parts.values())}"
        return [self.action(parts, done)]


@torch.no_grad()
def _scale_scores(layer: AttentionLayer, factors: Sequence[float]) -> None:
    """Scale the scores of heads by scaling their queries and keys in place."""
    of_key = [
        math.sqrt(max(factor for head, factor in enumerate(factors) if layer.key_of[head] == key))
        for key in range(layer.num_key_heads)
    ]
    of_query = [factor / of_key[key] for factor, key in zip(factors, layer.key_of)]
    for role, of_role in (("query", of_query), ("key", of_key)):
        for head, factor in enumerate(of_role):
            bias = bias_of(layer.weights[role], head)
            for parameter, index in [layer.weights[role].index(head), *([] if bias is None else [bias])]:
                if factor < 1:
                    # Less by the largest error of rounding: in bfloat16 0.999 times a number may be the number itself.
                    factor_below = factor * (1 - torch.finfo(parameter.dtype).eps)
                    parameter.put_(index, parameter.take(index) * factor_below)
