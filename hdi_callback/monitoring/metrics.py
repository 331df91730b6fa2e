"""The catalogue of curves: the name of each, what it means and where its value comes from.

A metric's name is the first part of its tag: the metric `hdi` of layer `blocks.0.attn` is logged as
`hdi/blocks.0.attn`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

COVARIANCE = "head outputs"
CONTRIBUTION = "head contributions"
IMPORTANCE = "head importance"
QK, OV = "QK circuits", "OV circuits"
FINITENESS = "finiteness of weights"
MOVEMENT = "movement of weights"
UPDATES, UPDATES_QK, UPDATES_OV = "key updates", "QK circuits of updates", "OV circuits of updates"
ROWS = "attention rows"
KEYS, TOKENS = "keys as they come", "input tokens"


@dataclass(frozen=True)
class Metric:
    """One number per layer and reading.

    Attributes:
        name: the first part of the tag, and what a user writes in ``metrics=[...]``.
        source: the role of the weights it is read from (``"key"``, ``"query"``, ``"value"``, ``"output"``), or another
            measurement such as ``"head outputs"``; sources that no metric needs are not measured.
        read: batched result (such as a ``HeadDiversity``) -> one value per layer, ``(layers,)``.
        summary: one sentence for people.
        worst: which extreme is the worse one, ``"max"`` or ``"min"``: the value of the worst layer is logged as
            ``<name>/max`` or ``<name>/min``; `None` if layers are not comparable, or neither extreme is worse.
    """

    name: str
    source: str
    read: Callable[[Any], Tensor]
    summary: str
    worst: Literal["max", "min"] | None = None


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _field(name: str, over_heads: Callable[[Tensor], Tensor] = _as_it_is) -> Callable[[Any], Tensor]:
    """Reader of a field, one number a layer; `over_heads` reduces the numbers of heads to one."""

    def read(values: Any) -> Tensor:
        return over_heads(getattr(values, name))

    return read


def _smallest(heads: Tensor) -> Tensor:
    return heads.amin(-1)  # NaN in one head is NaN


def _largest(heads: Tensor) -> Tensor:
    return heads.amax(-1)


def _mean(heads: Tensor) -> Tensor:
    return heads.mean(-1)


def _mean_over_pairs(matrix: Tensor) -> Tensor:
    H = matrix.shape[-1]
    return (matrix.sum((-2, -1)) - matrix.diagonal(dim1=-2, dim2=-1).sum(-1)) / (H * (H - 1) or float("nan"))


def _smallest_of_those_known(heads: Tensor) -> Tensor:
    return _smallest(heads.nan_to_num(nan=float("inf"), posinf=float("inf")))


def _smallest_flatness(diversity: Any) -> Tensor:
    smallest: Tensor = diversity.flatness.masked_fill(diversity.dead, float("inf")).amin(-1)
    return smallest.masked_fill(diversity.dead.all(-1), float("nan"))


def _dead_heads(diversity: Any) -> Tensor:
    count: Tensor = diversity.dead.sum(-1).double()
    return count.masked_fill(~diversity.effective_heads.isfinite(), float("nan"))  # of weights that are not finite


def _diversity_metrics(role: str) -> list[Metric]:
    prefix = "hdi" if role == "key" else f"hdi_{role}"
    of = f"the heads' {role} weights"

    def metric(suffix: str, field: str | Callable[[Any], Tensor], summary: str) -> Metric:
        read = _field(field) if isinstance(field, str) else field
        # Alignment alone is on one scale in layers of all shapes.
        worst: Literal["max"] | None = "max" if suffix.endswith("_alignment") else None
        return Metric(f"{prefix}{suffix}", role, read, summary.format(of=of), worst)

    return [
        metric("", "index", "Head Diversity Index of {of}: 0 all aligned, 1 all mutually orthogonal."),
        metric("_worst_pair", "worst", "Largest overlap of any two heads, from {of}: 1 for the same subspace."),
        metric("_effective_heads", "effective_heads", "H / (1 + (H-1)(1-HDI)), from {of}."),
        metric("_alignment", "alignment", "Mean overlap against chance, from {of}: 0 chance, 1 identical."),
        metric("_worst_alignment", "worst_alignment", "Largest overlap against chance, from {of}."),
        metric("_normalised", "normalised_index", "HDI over its ceiling, from {of}."),
        metric("_chance", "chance", "HDI of independent random heads of these ranks, from {of}."),
        metric("_energy", "energy_index", "HDI with directions weighted by their energy, from {of}."),
        metric("_energy_alignment", "energy_alignment", "Mean energy overlap against chance, from {of}."),
        metric(
            "_energy_worst_alignment", "energy_worst_alignment", "Largest energy overlap against chance, from {of}."
        ),
        metric("_dead_heads", _dead_heads, "Number of heads whose weights are nearly zero, from {of}."),
        metric("_min_rank", lambda d: d.rank.amin(-1), "Smallest numerical rank of a head, from {of}."),
        metric("_head_norm", lambda d: d.head_norm.mean(-1), "Mean norm of a head, from {of}."),
        metric("_min_flatness", _smallest_flatness, "Smallest spectral flatness of a live head, from {of}."),
    ]


_COVARIANCE_METRICS = [
    Metric(
        "head_covariance", COVARIANCE, _field("covariance"), "Empirical covariance term: mean covariance of two heads."
    ),
    Metric("head_correlation", COVARIANCE, _field("correlation"), "The covariance term over the mean variance."),
    Metric("head_variance", COVARIANCE, _field("variance"), "Mean variance of a head's contribution."),
    Metric(
        "head_variance_factor", COVARIANCE, _field("variance_factor"), "Variance of the mean head over that of a head."
    ),
    Metric(
        "head_effective_heads",
        COVARIANCE,
        _field("effective_heads"),
        "The inverse of the variance factor, capped at H.",
    ),
    Metric(
        "head_correlation_error", COVARIANCE, _field("correlation_error"), "Jackknife standard error over sequences."
    ),
    Metric("head_covariance_error", COVARIANCE, _field("covariance_error"), "Jackknife standard error over sequences."),
    Metric(
        "head_output_overlap",
        COVARIANCE,
        lambda c: _mean_over_pairs(c.output_overlap),
        "Mean energy overlap of head outputs before the output projection.",
        "max",
    ),
]

_CIRCUIT_METRICS = [
    Metric(
        "circuit_qk",
        QK,
        _field("mean"),
        "Mean cosine of two heads' QK circuits: 0 independent, 1 the same kernel.",
        "max",
    ),
    Metric("circuit_qk_worst", QK, _field("worst"), "Largest cosine of two heads' QK circuits.", "max"),
    Metric("circuit_qk_norm", QK, _field("norm", _smallest), "Smallest norm of a head's QK circuit.", "min"),
    Metric(
        "circuit_ov",
        OV,
        _field("mean"),
        "Mean cosine of two heads' OV circuits: 0 independent, 1 the same message.",
        "max",
    ),
    Metric("circuit_ov_worst", OV, _field("worst"), "Largest cosine of two heads' OV circuits.", "max"),
    Metric("circuit_ov_norm", OV, _field("norm", _smallest), "Smallest norm of a head's OV circuit.", "min"),
]


_HEAD_METRICS = [
    Metric(
        "head_contribution_min",
        CONTRIBUTION,
        _field("relative", _smallest),
        "Smallest share of a head: RMS of what it adds over that of what all heads add together.",
        "min",
    ),
    Metric(
        "outputs_not_finite",
        CONTRIBUTION,
        lambda c: c.not_finite.sum(-1),
        "Number of heads with an output that is NaN or infinite.",
        "max",
    ),
    Metric(
        "head_importance_min",
        IMPORTANCE,
        _field("importance", _smallest),
        "Smallest first-order effect on the loss of losing a head, over the mean of the layer's heads.",
        "min",
    ),
    Metric(
        "hdi_worst_pair_importance",
        IMPORTANCE,
        _field("worst_pair_one"),
        "The same of the less important head of the pair in `hdi_worst_pair`: what losing one costs.",
    ),
    Metric(
        "hdi_worst_pair_importance_both",
        IMPORTANCE,
        _field("worst_pair_both"),
        "The same of both heads of that pair: what losing both costs.",
    ),
    Metric(
        "weights_not_finite",
        FINITENESS,
        lambda f: f.not_finite.clamp(max=1).sum(-1),  # NaN, where not measured, stays NaN
        "Number of heads with query, key, value or output weights that are NaN or infinite.",
        "max",
    ),
    Metric(
        "head_movement_min",
        MOVEMENT,
        _field("movement", _smallest),
        "Smallest relative change of a head's weights since the last reading: 0 is frozen, or rounds away.",
        "min",
    ),
    Metric(
        "head_unchanged",
        MOVEMENT,
        _field("unchanged", _largest),
        "Largest share of a head's weights that are exactly what they were at the last reading.",
        "max",
    ),
]


_UPDATE_METRICS = [
    Metric("update_hdi", UPDATES, _field("index"), "HDI of the changes of the key weights since the last reading."),
    Metric("update_worst_pair", UPDATES, _field("worst"), "Largest overlap of two heads' changes of key weights."),
    Metric(
        "update_energy", UPDATES, _field("energy_index"), "The HDI of changes, directions weighted by their energy."
    ),
    Metric(
        "update_entropy_min",
        UPDATES,
        _field("entropy", _smallest_of_those_known),
        "Smallest spectral entropy of a head's change of key weights: 0 one direction, 1 spread evenly over all.",
        "min",
    ),
    Metric(
        "update_circuit_qk", UPDATES_QK, _field("mean"), "Mean cosine of two heads' QK circuits, of the changes.", "max"
    ),
    Metric("update_circuit_qk_worst", UPDATES_QK, _field("worst"), "Largest cosine of these.", "max"),
    Metric(
        "update_circuit_ov", UPDATES_OV, _field("mean"), "Mean cosine of two heads' OV circuits, of the changes.", "max"
    ),
    Metric("update_circuit_ov_worst", UPDATES_OV, _field("worst"), "Largest cosine of these.", "max"),
]


_ROW_METRICS = [
    Metric(
        "attention_entropy",
        ROWS,
        _field("entropy", _mean),
        "Entropy of attention over log n, mean over heads: 1 uniform, 0 one token.",
        "min",
    ),
    Metric(
        "attention_entropy_min",
        ROWS,
        _field("entropy", _smallest),
        "The same of the head that attends to the fewest tokens.",
        "min",
    ),
    Metric(
        "attention_samples",
        ROWS,
        _field("samples", _mean),
        "Effective sample size 1 / ||a||^2, mean over heads: over how many tokens a head averages.",
        "min",
    ),
    Metric(
        "attention_sink",
        ROWS,
        _field("sink", _largest),
        "Largest mean attention of a head to one position: 1 if all queries attend to it.",
        "max",
    ),
    Metric(
        "attention_overlap",
        ROWS,
        _field("overlap_mean"),
        "Mean overlap of two heads' attention, the correlation of their noise; 1 also if both are flat.",
        "max",
    ),
    Metric(
        "attention_alike",
        ROWS,
        _field("alike_mean"),
        "The same with the uniform part taken out: 1 if heads attend alike beyond being flat.",
        "max",
    ),
    Metric("attention_alike_worst", ROWS, _field("alike_worst"), "Largest `attention_alike` of two heads.", "max"),
    Metric("attention_logit", ROWS, _field("logit", _largest), "Largest score of a sampled query.", "max"),
    Metric(
        "attention_logit_bound",
        ROWS,
        _field("logit_bound", _largest),
        "Upper bound of all scores: largest norms times the scale, plus the largest bias.",
        "max",
    ),
    Metric(
        "attention_keys",
        ROWS,
        _field("keys"),
        "Number of keys that a query sees, mean over queries: 1 is a mask that leaves one token each.",
        "min",
    ),
    Metric(
        "attention_ahead",
        ROWS,
        _field("ahead", _largest),
        "Largest mean attention of a head to later tokens: 0 under a causal mask.",
        "max",
    ),
    Metric("query_norm", ROWS, _field("query_norm", _mean), "Mean norm of the queries, as they enter the product."),
    Metric("key_norm", ROWS, _field("key_norm", _mean), "Mean norm of the keys, as they enter the product."),
    Metric(
        "key_norm_spread",
        ROWS,
        _field("key_norm_spread", _mean),
        "Coefficient of variation of the keys' norms: at 0 attention is the Gaussian kernel.",
    ),
]


_INPUT_METRICS = [
    Metric(
        "hdi_keys",
        KEYS,
        _field("index"),
        "HDI of the keys that the layer really makes, before rotation: 1 less the mean squared canonical correlation.",
    ),
    Metric(
        "hdi_keys_worst_pair", KEYS, _field("worst"), "Largest mean squared canonical correlation of two heads' keys."
    ),
    Metric(
        "hdi_keys_energy",
        KEYS,
        _field("energy_index"),
        "The same with directions weighted by their energy: 1 less the mean RV coefficient.",
    ),
    Metric(
        "hdi_keys_energy_worst_pair",
        KEYS,
        _field("energy_worst"),
        "Largest RV coefficient of two heads' keys.",
    ),
    Metric(
        "token_rank",
        TOKENS,
        _field("rank"),
        "Effective rank of a layer's centred input tokens: 0 if all are one.",
    ),
    Metric(
        "token_cosine",
        TOKENS,
        _field("cosine"),
        "Mean cosine of two of these tokens: 1 if all point the same way.",
        "max",
    ),
]

METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        *(metric for role in ("key", "query", "value", "output") for metric in _diversity_metrics(role)),
        *_COVARIANCE_METRICS,
        *_CIRCUIT_METRICS,
        *_HEAD_METRICS,
        *_UPDATE_METRICS,
        *_ROW_METRICS,
        *_INPUT_METRICS,
    )
}
"""Every metric by name."""


@dataclass(frozen=True)
class Details:
    """Values of single heads and pairs that the history holds beside the curves of a source.

    Attributes:
        arrays: name in the history -> field ``(layers, H)``, or ``(layers, 2)`` for a pair.
        matrices: name in the history -> field ``(layers, H, H)``.
        why_not: the reason why a curve is absent where its value is NaN.
    """

    arrays: Mapping[str, str]
    matrices: Mapping[str, str]
    why_not: str


_OF_UPDATES = "there is no earlier reading to compare with in this process, or fewer than two heads have moved"
_OF_CIRCUITS = "there are fewer than two live heads, or the weights are not finite"

DETAILS: dict[str, Details] = {
    KEYS: Details(
        {"hdi_keys_worst_pair": "worst_pair"},
        {"hdi_keys": "overlap", "hdi_keys_energy": "energy_overlap"},
        "there are fewer than two live key heads, or too few tokens, or they are not finite",
    ),
    TOKENS: Details({}, {}, "there were fewer than two tokens without padding, or they are not finite"),
    ROWS: Details(
        {
            "attention_entropy": "entropy",
            "attention_samples": "samples",
            "attention_sink": "sink",
            "attention_sink_position": "sink_position",
            "attention_logit": "logit",
            "attention_logit_bound": "logit_bound",
            "query_norm": "query_norm",
            "key_norm": "key_norm",
            "key_norm_spread": "key_norm_spread",
            "attention_ahead": "ahead",
            "attention_alike_worst_pair": "alike_worst_pair",
        },
        {"attention_overlap": "overlap", "attention_alike": "alike"},
        "no query that was read sees two keys, or the quantity does not follow from the inputs of attention",
    ),
    QK: Details(
        {"circuit_qk_worst_pair": "worst_pair", "circuit_qk_norm": "norm"}, {"circuit_qk": "cosine"}, _OF_CIRCUITS
    ),
    OV: Details(
        {"circuit_ov_worst_pair": "worst_pair", "circuit_ov_norm": "norm"}, {"circuit_ov": "cosine"}, _OF_CIRCUITS
    ),
    UPDATES: Details(
        {"update_worst_pair": "worst_pair", "update_entropy": "entropy"},
        {"update_hdi": "overlap", "update_energy": "energy_overlap"},
        _OF_UPDATES,
    ),
    UPDATES_QK: Details({"update_circuit_qk_worst_pair": "worst_pair"}, {"update_circuit_qk": "cosine"}, _OF_UPDATES),
    UPDATES_OV: Details({"update_circuit_ov_worst_pair": "worst_pair"}, {"update_circuit_ov": "cosine"}, _OF_UPDATES),
    CONTRIBUTION: Details(
        {"head_contribution": "relative", "outputs_not_finite": "not_finite"},
        {},
        "there were no tokens without padding, or the outputs are zero or not finite",
    ),
    IMPORTANCE: Details(
        {"head_importance": "importance", "head_slope": "slope"},
        {"head_pair_importance": "pairs"},
        "the gradients at the head outputs are zero or not finite, or there are fewer than two live key heads",
    ),
    FINITENESS: Details({"weights_not_finite": "not_finite"}, {}, ""),
    MOVEMENT: Details(
        {"head_movement": "movement", "head_unchanged": "unchanged"},
        {},
        "there is no earlier reading to compare with in this process, or a weight was zero or is not finite",
    ),
}
"""Source -> its details, of all sources but the roles of weights and the head outputs."""

DEFAULT_METRICS = (
    "hdi",
    "hdi_alignment",
    "hdi_energy_alignment",
    "hdi_worst_pair",
    "hdi_effective_heads",
    "head_correlation",
    "head_output_overlap",
    "head_covariance",
)
"""The default curves: eight for each layer, and five over all layers.

They come from the key weights and from one sample of head outputs. Curves of attention rows and circuits are drawn on
request.
"""

RULE_METRICS = (
    "circuit_qk_worst",
    "circuit_ov_norm",
    "attention_logit",
    "head_movement_min",
    "token_cosine",
    "weights_not_finite",
    "outputs_not_finite",
)
"""Metrics that only the default rules need, one of each source: measured with the default metrics and kept in the
history, but not drawn: few curves are read, many are not. What they detect is in `docs/evidence.md`, what they cost in
`docs/cost.md`."""
