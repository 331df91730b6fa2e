"""The catalogue: the name of every metric, what it means, and how it is read from a measurement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hdi_callback.arguments import did_you_mean, shown
from hdi_callback.errors import MisconfigurationError

KEYS = "key weights"
OUTPUTS = "head outputs"
FINITE_OUTPUTS = "finiteness of head outputs"
QK, OV = "QK circuits", "OV circuits"
FINITENESS = "finiteness of weights"
MOVEMENT = "movement of weights"
ROWS = "attention rows"
NORMS = "norms of queries and keys"
TOKENS = "input tokens"
PARAMETERS = "movement of other parameters"
TRAINING = "training"

WEIGHT_SOURCES = (KEYS, QK, OV, FINITENESS, MOVEMENT)
FORWARD_SOURCES = (OUTPUTS, FINITE_OUTPUTS, ROWS, NORMS, TOKENS)
SOURCES = (*WEIGHT_SOURCES, *FORWARD_SOURCES, PARAMETERS)
"""What a reading measures, in the order in which it does; `TRAINING` is asked of the layers, beside them."""

Read = Callable[[Any], Tensor]
"""Result of a source for layers of one shape -> one tensor with the layers in front."""


@dataclass(frozen=True)
class Metric:
    """One number per layer and reading.

    Attributes:
        name: what a user writes in ``metrics=[...]``, and the key in `LayerRecord.values`.
        source: the measurement that it is read from, one of `SOURCES`; sources of which nothing is asked for are not
            measured.
        read: result of that source -> ``(layers,)``; NaN where it is not known.
        summary: one sentence for people.
    """

    name: str
    source: str
    read: Read
    summary: str


@dataclass(frozen=True)
class Detail:
    """Numbers of single heads or pairs that a record keeps beside the metrics."""

    source: str  # the measurement that they are read from
    read: Read  # result of that source -> ``(layers, heads)``, ``(layers, 2)`` for a pair, ``(layers, heads, heads)``


def _mean_over_pairs(matrix: Tensor) -> Tensor:
    H = matrix.shape[-1]
    return (matrix.sum((-2, -1)) - matrix.diagonal(dim1=-2, dim2=-1).sum(-1)) / (H * (H - 1) or float("nan"))


def _dead_heads(diversity: Any) -> Tensor:
    count: Tensor = diversity.dead.sum(-1).double()
    return count.masked_fill(~diversity.head_norm.isfinite().all(-1), float("nan"))


_METRICS = (
    Metric(
        "hdi",
        KEYS,
        lambda d: d.subspace.index,
        "Head Diversity Index of the heads' key weights: 0 all aligned, 1 all mutually orthogonal.",
    ),
    Metric("hdi_alignment", KEYS, lambda d: d.subspace.alignment, "Mean overlap against chance: 0 chance, 1 same."),
    Metric(
        "hdi_worst_pair", KEYS, lambda d: d.subspace.worst, "Largest overlap of any two heads: 1 for the same subspace."
    ),
    Metric("hdi_worst_alignment", KEYS, lambda d: d.subspace.worst_alignment, "Largest overlap against chance."),
    Metric("hdi_effective_heads", KEYS, lambda d: d.subspace.effective_heads, "H / (1 + (H-1)(1-HDI))."),
    Metric(
        "hdi_energy_alignment",
        KEYS,
        lambda d: d.energy.alignment,
        "Mean overlap against chance with directions weighted by their energy.",
    ),
    Metric(
        "hdi_energy_worst_alignment",
        KEYS,
        lambda d: d.energy.worst_alignment,
        "Largest energy-weighted overlap of two heads against chance.",
    ),
    Metric("hdi_dead_heads", KEYS, _dead_heads, "Number of heads whose key weights are nearly zero."),
    Metric("circuit_qk", QK, lambda c: c.mean, "Mean cosine of two heads' QK circuits: 0 independent, 1 same."),
    Metric("circuit_qk_worst", QK, lambda c: c.worst, "Largest cosine of two heads' QK circuits."),
    Metric("circuit_qk_norm", QK, lambda c: c.norm.amin(-1), "Smallest norm of a head's QK circuit."),
    Metric("circuit_ov", OV, lambda c: c.mean, "Mean cosine of two heads' OV circuits: 0 independent, 1 same."),
    Metric("circuit_ov_worst", OV, lambda c: c.worst, "Largest cosine of two heads' OV circuits."),
    Metric("circuit_ov_norm", OV, lambda c: c.norm.amin(-1), "Smallest norm of a head's OV circuit."),
    Metric(
        "weights_not_finite",
        FINITENESS,
        lambda f: f.not_finite.clamp(max=1).sum(-1),
        "Number of heads with query, key, value or output weights that are NaN or infinite.",
    ),
    Metric(
        "head_movement_min",
        MOVEMENT,
        lambda m: m.movement.amin(-1),
        "Smallest relative change of a head's weights since the last reading: 0 is frozen, or rounds away.",
    ),
    Metric(
        "head_unchanged",
        MOVEMENT,
        lambda m: m.unchanged.amax(-1),
        "Largest share of a head's weights that are bit-identical to those at the last reading.",
    ),
    Metric(
        "head_covariance", OUTPUTS, lambda c: c.covariance, "Empirical covariance term: mean covariance of two heads."
    ),
    Metric("head_correlation", OUTPUTS, lambda c: c.correlation, "The covariance term over the mean variance."),
    Metric(
        "head_output_overlap",
        OUTPUTS,
        lambda c: _mean_over_pairs(c.output_overlap),
        "Mean energy overlap of head outputs before the output projection.",
    ),
    Metric(
        "outputs_not_finite",
        FINITE_OUTPUTS,
        lambda c: c.not_finite.sum(-1),
        "Number of heads with an output that is NaN or infinite.",
    ),
    Metric(
        "attention_entropy",
        ROWS,
        lambda r: r.entropy.mean(-1),
        "Entropy of attention over log n, mean over heads: 1 uniform, 0 one token.",
    ),
    Metric(
        "attention_sink",
        ROWS,
        lambda r: r.sink.amax(-1),
        "Largest mean attention of a head to one position: 1 if all queries attend to it.",
    ),
    Metric(
        "attention_alike",
        ROWS,
        lambda r: r.alike_mean,
        "Mean overlap of two heads' attention without its uniform part: 1 if heads attend to the same tokens.",
    ),
    Metric(
        "attention_logit",
        ROWS,
        lambda r: r.logit.amax(-1),
        "Largest score of a sampled query, less the mean over the keys that it sees, which softmax ignores.",
    ),
    Metric(
        "attention_keys",
        ROWS,
        lambda r: r.keys,
        "Number of keys that a query sees, mean over queries: 1 is a mask that leaves one token each.",
    ),
    Metric(
        "attention_ahead",
        ROWS,
        lambda r: r.ahead.amax(-1),
        "Largest mean attention of a head to later tokens: 0 under a causal mask.",
    ),
    Metric("query_norm", NORMS, lambda n: n.query.mean(-1), "Mean norm of the queries as they enter the scores."),
    Metric("key_norm", NORMS, lambda n: n.key.mean(-1), "Mean norm of the keys as they enter the scores."),
    Metric("trains", TRAINING, lambda t: t.trains, "1 if a parameter of the layer requires a gradient, else 0."),
    Metric(
        "parameters_still",
        PARAMETERS,
        lambda p: p.still.nansum(-1).masked_fill(~p.is_known, float("nan")),
        "Number of adapters, gains and biases of a layer that are to train and are what they were at the last reading.",
    ),
    Metric(
        "others_move",
        PARAMETERS,
        lambda p: p.others_move.masked_fill(~p.is_known, float("nan")),
        "1 if parameters outside all watched layers have changed since the last reading, else 0.",
    ),
    Metric("token_rank", TOKENS, lambda t: t.rank, "Effective rank of a layer's centred input tokens."),
    Metric("token_cosine", TOKENS, lambda t: t.cosine, "Mean cosine of two input tokens: 1 if all point alike."),
)

METRICS: dict[str, Metric] = {metric.name: metric for metric in _METRICS}
"""Every metric by name."""


def check_metric(name: Any) -> None:
    """Raise an error for a name that is no metric.

    Raises:
        MisconfigurationError: with the closest name.
    """
    if not isinstance(name, str) or name not in METRICS:
        raise MisconfigurationError(
            f"There is no metric {shown(name)}.{did_you_mean(name, METRICS)} `hdi explain` lists all of them."
        )


DEFAULT_METRICS = ("hdi", "hdi_worst_alignment", "head_covariance")
"""The metrics that are drawn for each layer without being asked for."""

ON_REQUEST = frozenset({"token_rank"})
"""Metrics that cost as much as several others and that no rule needs: measured when they are asked for by name."""

MEASURED = tuple(name for name in METRICS if name not in ON_REQUEST)
"""The metrics that a monitor measures when it is not told which: all that rules judge, and what comes with them."""

HEADS: dict[str, Detail] = {
    "worst_pair": Detail(KEYS, lambda d: d.subspace.worst_pair),
    "worst_alignment_pair": Detail(KEYS, lambda d: d.subspace.worst_alignment_pair),
    "energy_worst_alignment_pair": Detail(KEYS, lambda d: d.energy.worst_alignment_pair),
    "nearest": Detail(KEYS, lambda d: d.subspace.nearest),
    "nearest_overlap": Detail(KEYS, lambda d: d.subspace.nearest_overlap),
    "rank": Detail(KEYS, lambda d: d.rank),
    "flatness": Detail(KEYS, lambda d: d.flatness),
    "head_norm": Detail(KEYS, lambda d: d.head_norm),
    "circuit_qk_worst_pair": Detail(QK, lambda c: c.worst_pair),
    "circuit_ov_worst_pair": Detail(OV, lambda c: c.worst_pair),
    "circuit_qk_norm": Detail(QK, lambda c: c.norm),
    "circuit_ov_norm": Detail(OV, lambda c: c.norm),
    "weights_not_finite": Detail(FINITENESS, lambda f: f.not_finite),
    "head_movement": Detail(MOVEMENT, lambda m: m.movement),
    "query_movement": Detail(MOVEMENT, lambda m: m.by_role[..., 0, :]),
    "key_movement": Detail(MOVEMENT, lambda m: m.by_role[..., 1, :]),
    "value_movement": Detail(MOVEMENT, lambda m: m.by_role[..., 2, :]),
    "output_movement": Detail(MOVEMENT, lambda m: m.by_role[..., 3, :]),
    "head_unchanged": Detail(MOVEMENT, lambda m: m.unchanged),
    "parameter_still": Detail(PARAMETERS, lambda p: p.still),
    "outputs_not_finite": Detail(FINITE_OUTPUTS, lambda c: c.not_finite),
    "attention_entropy": Detail(ROWS, lambda r: r.entropy),
    "attention_sink": Detail(ROWS, lambda r: r.sink),
    "attention_sink_position": Detail(ROWS, lambda r: r.sink_position),
    "attention_logit": Detail(ROWS, lambda r: r.logit),
    "attention_ahead": Detail(ROWS, lambda r: r.ahead),
}
"""What `LayerRecord.heads` holds: one entry per head, or the two heads of a pair, -1 where there is none; of
`parameter_still` one per parameter in `AttentionLayer.facts`.

`worst_pair` is the pair of `hdi_worst_pair`, by overlap; `worst_alignment_pair` that of `hdi_worst_alignment`, by
overlap against chance: dashboards call it the closest pair.
"""

WHOLE = frozenset({"nearest", "rank", "attention_sink_position", "weights_not_finite", "outputs_not_finite"})
"""Names in `HEADS` whose entries are whole numbers; those of pairs are, too."""

MATRICES: dict[str, Detail] = {
    "overlap": Detail(KEYS, lambda d: d.subspace.overlap),
    "pair_alignment": Detail(KEYS, lambda d: d.subspace.pair_alignment),
    "energy_pair_alignment": Detail(KEYS, lambda d: d.energy.pair_alignment),
    "output_overlap": Detail(OUTPUTS, lambda c: c.output_overlap),
    "circuit_qk": Detail(QK, lambda c: c.cosine),
    "circuit_ov": Detail(OV, lambda c: c.cosine),
    "attention_alike": Detail(ROWS, lambda r: r.alike),
    "attention_pattern": Detail(ROWS, lambda r: r.pattern),
}
"""What `LayerRecord.matrices` holds."""

WHY_NOT = {
    KEYS: "there are fewer than two live heads, or the weights are not finite",
    QK: "there are fewer than two live heads, or the weights are not finite",
    OV: "there are fewer than two live heads, or the weights are not finite",
    FINITENESS: "the weights were not read",
    TRAINING: "the layer was not asked",
    PARAMETERS: "there is no earlier reading to compare with in this process",
    MOVEMENT: "there is no earlier reading to compare with in this process, or a weight was zero or is not finite",
    FINITE_OUTPUTS: "the outputs were not read on a rank",
    OUTPUTS: "there were fewer than two tokens without padding, or outputs are zero, not finite or not read on a rank",
    ROWS: "no query that was read sees two keys, or the scores are not known, not finite, or not read on a rank",
    NORMS: "queries and keys are known only where attention is fused, on every rank",
    TOKENS: "there were fewer than two tokens without padding, or they are not finite, or not read on a rank",
}
"""Source -> why a metric of it is absent where its value is NaN."""
