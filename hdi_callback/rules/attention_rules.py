"""Rules on the rows of attention: too sharp, too flat, sudden changes, later tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hdi_callback.rules.initialisation import began_small
from hdi_callback.rules.rule import Finding, Rule
from hdi_callback.rules.series import Series

ENTROPY, LOGIT, AHEAD = "attention_entropy", "attention_logit", "attention_ahead"
CLIP = "interventions=[QKClip(limit={:.3g})]"
HIDDEN = 1e-6
"""Largest attention to tokens that are hidden, from rounding."""


class SharpFromStart(Rule):
    """The scale of the scores is wrong, or the inputs of the layer are far too large."""

    name = "sharp from the start"
    needs = (ENTROPY,)
    reads = (LOGIT,)
    limits = ("start",)
    condition = "at step 0 of fresh weights the mean entropy of attention is at 0.5 or less. It ends at 0.6"
    action = (
        "look at the scale of the scores, usually one over the root of the head width, and at the size of the "
        "embedding; if the weights are pretrained, say so"
    )
    code = "pretrained=True"
    margin = 0.1

    def judge(self, series: Series, active: Finding | None) -> Finding | None:
        entropy, logit = series.value(ENTROPY), series.latest.values.get(LOGIT)
        limit = self.limit["start"] or 0.0
        is_sparse = not series.facts.get("has_softmax", True)  # sparsemax or a ReLU leave most keys out by design
        if active is None and (series.latest.step > 0 or series.is_pretrained or is_sparse):
            return None
        if entropy > limit + (self.margin if active else 0.0):
            return None
        score = "" if logit is None else f", largest score {logit:.0f}"
        clause = "attention is sharp in {layer} before anything was learned"
        return Finding(clause, f"mean entropy {entropy:.2f}{score}", value=entropy, threshold=limit, metric=ENTROPY)


class FlatAttention(Rule):
    """The scores are so small that every head averages all tokens; where weights began small, the start is slow."""

    name = "flat attention"
    needs = (ENTROPY,)
    reads = (LOGIT,)
    limits = ("flat",)
    condition = (
        "the mean entropy was never below 0.9995 in 15 readings, nor the largest score above 0.25; a notice where key "
        "weights began small. Or it was 0.995 or less at the first reading, and is 0.9995 or more at five in a row"
    )
    action = (
        "look at the scale of the scores and the size of the layer's inputs, and check that gradients arrive at the "
        "query and key weights"
    )
    readings, lasts, largest = 15, 5, 0.25

    def judge(self, series: Series, active: Finding | None) -> Finding | None:
        limit, (steps, curve), (_, logits) = self.at("flat"), series.curve(ENTROPY), series.curve(LOGIT)
        first = series.first.values.get(ENTROPY, 0.0)
        began_flat = 1 - first < 10 * (1 - limit)
        if active is not None and not began_flat:
            return active if 1 - curve[-1] <= 2 * (1 - limit) else None
        count = self.readings if began_flat else self.lasts
        flat = [first, *curve] if began_flat else curve[-count:]
        scores = logits if began_flat else logits[-count:]
        if len(curve) < count or min(flat) < limit or max(scores, default=0.0) > self.largest or not series.trains:
            return None
        if series.was_written and not began_flat:
            return None
        score = f", largest score {max(logits):.2g}" if logits and began_flat else ""
        was = "" if began_flat else f", {first:.2f} at step {series.first.step}"
        begun = f"stayed uniform since step {series.first.step}" if began_flat else "become uniform"
        return Finding(
            f"attention in {{layer}} has {begun}",
            f"mean entropy {curve[-1]:.4f}{score}{was}",
            value=curve[-1],
            threshold=limit,
            metric=ENTROPY,
            level="notice" if began_flat and began_small(series) else "warning",
            since=series.first.step if began_flat else steps[-count],
        )


class SuddenSharpening(Rule):
    """Scores grow, or something is added to those of one token."""

    name = "sudden sharpening"
    heeds_loss = True
    needs = (ENTROPY,)
    reads = (LOGIT,)
    limits = ("sharpen",)
    condition = (
        "the mean entropy is at a quarter or less of the least until eight readings ago, of which there are six or "
        "more, and has changed since then four times as far, in logarithms, as ever before within eight readings; a "
        "notice while the loss is good. It ends half way back"
    )
    action = "look at the learning rate and its warm-up, at masks and at biases on scores. If scores grow, limit them"
    code = CLIP.format(30)
    within, past, factor = 8, 6, 4.0

    def judge(self, series: Series, active: Finding | None) -> Finding | None:
        now, fall = max(series.value(ENTROPY), 0.0), self.at("sharpen")
        if active is not None:
            return active if now < math.sqrt(fall) * (active.threshold or 0.0) else None
        steps, curve = series.curve(ENTROPY)
        start = len(curve) - 1 - self.within
        before = curve[: start + 1]
        if series.was_written or start < self.past - 1 or not min(before) > now * fall:
            return None
        if math.log(before[-1] / max(now, 1e-12)) < self.factor * _largest_change(before, self.within):
            return None
        logit = series.latest.values.get(LOGIT)
        largest = max((row.values.get(LOGIT, 0.0) for row in series.rows if row.step <= steps[start]), default=0.0)
        return Finding(
            "the heads of {layer} have come to attend to few tokens",
            f"mean entropy {series.change(ENTROPY)}{'' if logit is None else f', largest score {logit:.0f}'}",
            value=now,
            threshold=before[-1] / fall,
            metric=ENTROPY,
            since=steps[start],
            code=CLIP.format(largest) if logit is not None and logit > largest > 0 else "",
        )


class LaterTokens(Rule):
    """The model sees tokens that are to be hidden from it: the mask is missing, or leaks."""

    name = "later tokens"
    is_cause = True
    needs = (AHEAD,)
    limits = ("later",)
    level = "critical"
    condition = (
        "0.001 of the attention reaches tokens after the query, in a layer where they were hidden at the first reading "
        "or where most layers of its name, but for the number, hid them"
    )
    action = "look at the mask that the attention gets, and whether True means visible or hidden there"

    def judge(self, series: Series, active: Finding | None) -> Finding | None:
        value, limit = series.value(AHEAD), self.at("later")
        was_hidden = series.first.values.get(AHEAD, 1.0) <= HIDDEN
        if value < limit or not (was_hidden or series.peers_hide):
            return None
        heads = tuple(head for head, share in enumerate(series.latest.per_head(AHEAD)) if share >= limit)
        is_all = len(heads) in {0, series.facts.get("num_heads")}
        before = f"they were hidden at step {series.first.step}" if was_hidden else "layers like it hide them"
        return Finding(
            f"{'attention in {layer}' if is_all else 'the attention of {heads}'} reaches tokens after the query",
            f"their share {series.change(AHEAD)}; {before}",
            () if is_all else heads,
            value=value,
            threshold=limit,
            metric=AHEAD,
        )


def _largest_change(curve: Sequence[float], within: int) -> float:
    """Return the largest change between two readings that are at most so many apart, as a logarithm."""
    logs = [math.log(max(value, 1e-12)) for value in curve]
    apart = range(1, within + 1)
    return max((abs(after - before) for gap in apart for before, after in zip(logs, logs[gap:])), default=0.0)
