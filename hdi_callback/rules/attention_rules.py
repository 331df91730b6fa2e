"""Rules on the rows of attention, too sharp, too flat, later tokens; and on what changes as the loss rises."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import accumulate, pairwise

from hdi_callback.rules.rule import Finding, Rule
from hdi_callback.rules.series import APART, LOSS, Row, Series

ENTROPY, LOGIT, AHEAD = "attention_entropy", "attention_logit", "attention_ahead"
QUANTITIES = {
    "attention_entropy": "its mean entropy",
    "head_covariance": "the covariance of its heads' outputs",
    "circuit_qk_norm": "the smallest norm of a head's QK circuit",
    "circuit_ov_norm": "the smallest norm of a head's OV circuit",
    "head_movement_min": "the smallest movement of a head",
}
"""What *change with the loss* looks at, none of it a matter of the inputs' length -> its name in messages."""

HIDDEN = 1e-6  # largest attention to tokens that are hidden, from rounding


class SharpFromStart(Rule):
    """The scale of the scores is wrong, or the inputs of the layer are far too large."""

    name = "sharp from the start"
    needs = (ENTROPY,)
    reads = (LOGIT,)
    limits = ("start",)
    condition = (
        "at step 0 of fresh weights the mean entropy of attention is at 0.5 or less; a notice where queries and keys "
        "are normed. It ends at 0.6"
    )
    action = "look at the scale of the scores and the size of the embedding; if the weights are pretrained, say so"
    code = "pretrained=True"
    margin = 0.1

    def judge(self, series: Series, active: Finding | None) -> Finding | None:
        entropy, logit = series.value(ENTROPY), series.latest.values.get(LOGIT)
        is_sparse = not series.facts.get("has_softmax", True)  # sparsemax or a ReLU leave most keys out by design
        if active is None and (series.latest.step > 0 or series.is_pretrained or is_sparse):
            return None
        if entropy > series.limits["start"] + (self.margin if active else 0.0):
            return None
        score = "" if logit is None else f", largest score {logit:.0f}"
        clause = "attention is sharp in {layer} before anything was learned"
        is_chosen = {"query", "key"} <= {*series.facts.get("normed", ())}  # by a scale that no input changes
        return Finding(clause, f"mean entropy {entropy:.2f}{score}", level="notice" if is_chosen else "warning")


class FlatAttention(Rule):
    """The scores are so small that every head averages all tokens; where weights began small, the start is slow."""

    name = "flat attention"
    needs = (ENTROPY,)
    reads = (LOGIT,)
    limits = ("flat",)
    condition = (
        "the mean entropy was never below 0.9995 in 15 readings, nor the largest score above 0.25; a notice where key "
        "weights began small. Or it was 0.995 or less at the first reading, and is 0.9995 or more at five in a row, at "
        "15 where the largest score was below 1 at first"
    )
    action = "look at the scale of the scores, the size of the layer's inputs, and the gradients of queries and keys"
    readings, lasts, largest, small = 15, 5, 0.25, 1.0

    def judge(self, series: Series, active: Finding | None) -> Finding | None:
        limit, (steps, curve), (_, logits) = series.limits["flat"], series.curve(ENTROPY), series.curve(LOGIT)
        began, first = series.starts[ENTROPY]
        began_flat = 1 - first < 10 * (1 - limit)
        if active is not None and not began_flat:
            return active if 1 - curve[-1] <= 2 * (1 - limit) else None
        _, first_score = series.starts.get(LOGIT, (began, math.inf))  # what has hardly begun may flatten for a while
        count = self.readings if began_flat or first_score < self.small else self.lasts
        flat = [first, *curve] if began_flat else curve[-count:]
        scores = logits if began_flat else logits[-count:]
        if len(curve) < count or min(flat) < limit or max(scores, default=0.0) > self.largest or not series.trains:
            return None
        if series.was_written and not began_flat:
            return None
        score = f", largest score {max(logits):.2g}" if logits else ""
        begun = f"stayed uniform since step {began}" if began_flat else "become uniform"
        return Finding(
            f"attention in {{layer}} has {begun}",
            f"mean entropy {curve[-1]:.4f}{score if began_flat else f', {first:.2f} at step {began}'}",
            level="notice" if began_flat and series.began_small else "warning",
            since=began if began_flat else steps[-count],
        )


class LaterTokens(Rule):
    """The model sees tokens that are to be hidden from it: the mask is missing, or leaks."""

    name = "later tokens"
    is_cause = True
    needs = (AHEAD,)
    limits = ("later",)
    level = "critical"
    condition = "0.001 of the attention reaches tokens after the query, which were hidden at the first reading"
    action = "look at the mask that the attention gets, and whether True means visible or hidden there"

    def judge(self, series: Series, active: Finding | None) -> Finding | None:
        value, limit = series.value(AHEAD), series.limits["later"]
        if value < limit or series.first.values.get(AHEAD, 1.0) > HIDDEN:
            return None
        heads = tuple(head for head, share in enumerate(series.latest.per_head(AHEAD)) if share >= limit)
        is_all = len(heads) in {0, series.facts.get("num_heads")}
        return Finding(
            f"{'attention in {layer}' if is_all else 'the attention of {heads}'} reaches tokens after the query",
            f"their share {series.change(AHEAD)}; they were hidden at step {series.first.step}",
            () if is_all else heads,
        )


class ChangeWithLoss(Rule):
    """The loss rose, and something in the layer changed with it further than ever before."""

    name = "change with the loss"
    is_cause = True
    reads = (*QUANTITIES, LOGIT)
    limits = ("with_loss",)
    condition = (
        "at two readings the loss is above the median of the three before, and a quantity of the layer has changed by "
        "a twentieth or more and 1.5 times as far as ever in 32 readings, but for the change just before; that factor "
        "times the mean rise of the loss, in median changes between readings, is 9 or more; a notice below 5 times. Of "
        "entropy and covariance only what comes with a rise of 2.5. Or the loss rose by two such changes within five "
        "readings after something else than the optimizer wrote parameters, or a notice of the contract, or was at "
        "three readings above all of the 15 before and by four such changes above the median of the last five of them "
        "and nothing else was told, and five readings after the rise, or at the last one, a third of it is left; a "
        "notice of the write alone, and of a loss that rose by five where no layer changed. It ends with a loss that "
        "falls or is at its best"
    )
    action = (
        "look at what changed at that step: the data, the learning rate, the checkpoint that was loaded, and the code "
        "before this layer and in it. If scores grow, limit them"
    )
    code = "interventions=[QKClip(limit=30)]"
    past, window, least, surely, share, lasts = 8, 32, 1.5, 5.0, 0.05, 5
    clear = 2.5  # usual changes, which noise of the loss seldom makes: attention that wakes changes by any factor

    def judge(self, series: Series, active: Finding | None) -> Finding | None:
        if active is not None:
            followed = sum(row.step > (active.since or 0) for row in series.rows)
            return None if series.is_loss_good and followed > self.lasts else active
        rows = [row for row in series.rows if LOSS in row.values][-self.window :]
        if len(rows) <= self.past or rows[-1] is not series.latest or rows[-1].step - rows[-2].step < APART:
            return None
        losses = [row.values[LOSS] for row in rows]
        usual = statistics.median(abs(after - before) for before, after in pairwise(losses[:-2]))
        was, now = statistics.median(losses[-5:-2]), statistics.fmean(losses[-2:])
        if series.was_written or not usual > 0 or min(losses[-2:]) <= was:
            return None
        rise = (now - was) / usual
        clear = [metric for metric in QUANTITIES if rise >= self.clear or "norm" in metric or "movement" in metric]
        far = {metric: self._change(metric, rows) for metric in clear}
        metric, change = max(far.items(), key=lambda item: item[1])
        if change < self.least or rise * change < series.limits["with_loss"]:
            return None
        before, after = (row.values.get(metric, 0.0) for row in rows[-3:-1])
        *scores, _, score = (row.values.get(LOGIT, 0.0) for row in rows)
        return Finding(
            "{layer} changed as the loss rose",
            f"{QUANTITIES[metric]} went from {before:.2g} to {after:.2g} between steps {rows[-3].step} and "
            f"{rows[-2].step}, {change:.{int(change < 10)}f} times as far as ever up to step {rows[-4].step}, and the "
            f"loss from {was:.3g} to {now:.3g}",
            value=rise * change,
            metric=metric,
            level="warning" if change >= self.surely else "notice",
            since=rows[-2].step,
            code=f"interventions=[QKClip(limit={max(scores):.3g})]" if score > 2 * max(scores) > 0 else "",
        )

    def _change(self, metric: str, rows: Sequence[Row]) -> float:
        """Return how far the last two values are from the one before, in largest such changes but the one before."""
        values = [row.values.get(metric, 0.0) for row in rows]
        # Weights that jumped stay there: the way that they have gone so far stands for their movement.
        path = [*accumulate(values)] if "movement" in metric else [math.log(value) for value in values if value > 0]
        if len(path) <= self.past or min(values[-3:]) <= 0:
            return 0.0
        *before, _, now = (
            min(abs(second - first), abs(third - first)) * ((second > first) == (third > first))
            for first, second, third in zip(path, path[1:], path[2:])
        )
        return now / max(before) if now > self.share and max(before) > 0 else 0.0
