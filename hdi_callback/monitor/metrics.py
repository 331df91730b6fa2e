"""The catalogue: the name of every metric, what it means, and how it is read from a measurement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hdi_callback.arguments import did_you_mean, shown, strings
from hdi_callback.errors import MisconfigurationError

KEYS = "key weights"
OUTPUTS = "head outputs"
FINITE_OUTPUTS = "finiteness of head outputs"
QK, OV = "QK circuits", "OV circuits"
FINITENESS = "finiteness of weights"
MOVEMENT = "movement of weights"
ROWS = "attention rows"
PARAMETERS = "movement of other parameters"
TRAINING = "training"

WEIGHT_SOURCES = (KEYS, QK, OV, FINITENESS, MOVEMENT)
FORWARD_SOURCES = (OUTPUTS, FINITE_OUTPUTS, ROWS)
SOURCES = (*WEIGHT_SOURCES, *FORWARD_SOURCES, PARAMETERS)  # in this order; `TRAINING` is asked of layers

Read = Callable[[Any], Tensor]  # result of a source for layers of one shape -> one tensor with the layers in front


@dataclass(frozen=True)
class Metric:
    """What a record keeps of each layer under a name: a number, or numbers of single heads or pairs."""

    source: str  # the measurement that it is read from; those of which nothing is asked for are not made
    read: Read  # result of that source -> ``(layers,)``, and of heads or pairs ``(layers, ...)``; NaN if not known
    summary: str = ""  # of a number one sentence for people


METRICS: dict[str, Metric] = {
    "hdi": Metric(
        KEYS,
        lambda d: d.subspace.index,
        "Head Diversity Index of the heads' key weights: 0 all aligned, 1 all mutually orthogonal.",
    ),
    "hdi_alignment": Metric(KEYS, lambda d: d.subspace.alignment, "Mean overlap against chance: 0 chance, 1 same."),
    "hdi_worst_pair": Metric(
        KEYS, lambda d: d.subspace.worst, "Largest overlap of any two heads: 1 for the same subspace."
    ),
    "hdi_worst_alignment": Metric(
        KEYS, lambda d: d.subspace.worst_alignment, "Alignment of the two closest heads: 0 chance, 1 same."
    ),
    "hdi_effective_heads": Metric(KEYS, lambda d: d.subspace.effective_heads, "H / (1 + (H-1)(1-HDI))."),
    "hdi_energy_alignment": Metric(
        KEYS, lambda d: d.energy.alignment, "Mean overlap against chance with directions weighted by their energy."
    ),
    "hdi_energy_worst_alignment": Metric(
        KEYS, lambda d: d.energy.worst_alignment, "Largest energy-weighted overlap of two heads against chance."
    ),
    "circuit_qk_norm": Metric(QK, lambda norm: norm.amin(-1), "Smallest norm of a head's QK circuit."),
    "circuit_ov_worst": Metric(OV, lambda c: c.worst, "Largest cosine of two heads' OV circuits."),
    "circuit_ov_norm": Metric(OV, lambda c: c.norm.amin(-1), "Smallest norm of a head's OV circuit."),
    "weights_not_finite": Metric(
        FINITENESS,
        lambda bad: bad.clamp(max=1).sum(-1),
        "Number of heads with query, key, value or output weights that are NaN or infinite.",
    ),
    "head_movement_min": Metric(
        MOVEMENT,
        lambda m: m.movement.amin(-1),
        "Smallest relative change of a head's weights since the last reading: 0 is frozen, or rounds away.",
    ),
    "head_unchanged": Metric(
        MOVEMENT,
        lambda m: m.unchanged.amax(-1),
        "Largest share of a head's weights that are bit-identical to those at the last reading.",
    ),
    "head_covariance": Metric(
        OUTPUTS, lambda covariance: covariance, "Empirical covariance term: mean covariance of two heads."
    ),
    "outputs_not_finite": Metric(
        FINITE_OUTPUTS, lambda bad: bad.sum(-1), "Number of heads with an output that is NaN or infinite."
    ),
    "attention_entropy": Metric(
        ROWS, lambda r: r.entropy.mean(-1), "Entropy of attention over log n, mean over heads: 1 uniform, 0 one token."
    ),
    "attention_sink": Metric(
        ROWS,
        lambda r: r.sink.amax(-1),
        "Largest mean attention of a head to the first token that a query sees: 1 if all queries attend to it alone.",
    ),
    "attention_logit": Metric(
        ROWS,
        lambda r: r.logit.amax(-1),
        "Largest score of a sampled query, less the mean over the keys that it sees, which softmax ignores.",
    ),
    "attention_ahead": Metric(
        ROWS, lambda r: r.ahead.amax(-1), "Largest mean attention of a head to later tokens: 0 under a causal mask."
    ),
    "trains": Metric(TRAINING, lambda trains: trains, "1 if a parameter of the layer requires a gradient, else 0."),
    "parameters_still": Metric(
        PARAMETERS,
        lambda p: p.number,
        "Number of adapters, gains and biases of a layer that are to train and are what they were at the last reading.",
    ),
}
"""What a user writes in ``metrics=[...]``, and the key in `LayerRecord.values` -> the metric."""


def check_metrics(metrics: Any) -> tuple[str, ...] | None:
    """Return a list of names of metrics, or `None`, checked; an error has the closest name."""
    names = strings("metrics", metrics, "names of metrics")
    for name in (name for name in names or () if name not in METRICS):
        raise MisconfigurationError(
            f"There is no metric {shown(name)}.{did_you_mean(name, METRICS)} `hdi explain` lists all of them."
        )
    return names


DEFAULT_METRICS = ("hdi", "hdi_worst_alignment", "head_covariance")  # drawn for each layer without being asked for

HEADS: dict[str, Metric] = {
    "worst_alignment_pair": Metric(KEYS, lambda d: d.subspace.worst_alignment_pair),
    "rank": Metric(KEYS, lambda d: d.rank),
    "flatness": Metric(KEYS, lambda d: d.flatness),
    "head_norm": Metric(KEYS, lambda d: d.head_norm),
    "circuit_qk_norm": Metric(QK, lambda norm: norm),
    "circuit_ov_norm": Metric(OV, lambda c: c.norm),
    "weights_not_finite": Metric(FINITENESS, lambda bad: bad),
    "head_movement": Metric(MOVEMENT, lambda m: m.movement),
    "query_movement": Metric(MOVEMENT, lambda m: m.by_role["query"]),
    "key_movement": Metric(MOVEMENT, lambda m: m.by_role["key"]),
    "value_movement": Metric(MOVEMENT, lambda m: m.by_role["value"]),
    "output_movement": Metric(MOVEMENT, lambda m: m.by_role["output"]),
    "head_unchanged": Metric(MOVEMENT, lambda m: m.unchanged),
    "parameter_still": Metric(PARAMETERS, lambda p: p.still),
    "outputs_not_finite": Metric(FINITE_OUTPUTS, lambda bad: bad),
    "attention_entropy": Metric(ROWS, lambda r: r.entropy),
    "attention_sink": Metric(ROWS, lambda r: r.sink),
    "attention_logit": Metric(ROWS, lambda r: r.logit),
    "attention_ahead": Metric(ROWS, lambda r: r.ahead),
}
"""What `LayerRecord.heads` holds: one entry per head, or the two heads of a pair, -1 where there is none; of
`parameter_still` one per parameter in `AttentionLayer.description`, and NaN up to their largest number in a layer.

`worst_alignment_pair` is that of `hdi_worst_alignment`, by overlap against chance: dashboards call it the closest pair.
"""

WHOLE = frozenset({"rank", "weights_not_finite", "outputs_not_finite"})  # names in `HEADS`

MATRICES: dict[str, Metric] = {
    "overlap": Metric(KEYS, lambda d: d.subspace.overlap),
    "pair_alignment": Metric(KEYS, lambda d: d.subspace.pair_alignment),
    "energy_pair_alignment": Metric(KEYS, lambda d: d.energy.pair_alignment),
    "circuit_ov": Metric(OV, lambda c: c.cosine),
    "attention_pattern": Metric(ROWS, lambda r: r.pattern),
}
"""What `LayerRecord.matrices` holds."""

WHY_NOT = {
    KEYS: "there are fewer than two live key heads, or the weights are not finite",
    QK: "there are fewer than two live heads, or the weights are not finite",
    OV: "there are fewer than two live heads, or the weights are not finite",
    FINITENESS: "the weights were not read",
    TRAINING: "the layer was not asked",
    PARAMETERS: "there is no earlier reading to compare with in this process",
    MOVEMENT: "there is no earlier reading to compare with in this process, or a weight was zero or is not finite",
    FINITE_OUTPUTS: "the outputs were not read on a rank",
    OUTPUTS: "there were fewer than two tokens without padding, or outputs are zero, not finite or not read on a rank",
    ROWS: "no query that was read sees two keys, or the scores are not known, not finite, or not read on a rank",
}
"""Source -> why a metric of it is absent where its value is NaN."""
