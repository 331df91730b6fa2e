"""Every name that a user sees, with its meaning: of rules, curves, pictures, metrics, interventions and audits."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hdi_callback.arguments import did_you_mean, shown
from hdi_callback.checks.diagnoses import DIAGNOSES
from hdi_callback.errors import MisconfigurationError
from hdi_callback.interventions import QKClip, ReviveHeads, SaveCheckpoint, StopTraining
from hdi_callback.monitor import contract
from hdi_callback.monitor.metrics import METRICS
from hdi_callback.record import Record
from hdi_callback.rules import RULES

ALERTS = "hdi/alerts"
MAP, HEADS, EVIDENCE = "hdi/map", "hdi/heads", "hdi/evidence"

MODEL_CURVES = {
    "hdi/mean": "Head Diversity Index, mean over the layers, 0 to 1; a fresh model starts at chance, 1 - d_k/d, not "
    "at 1: with 12 heads at 0.917.",
    "hdi/min": "Head Diversity Index of the lowest layer, 0 to 1; the highest value is often that of step 0.",
    "hdi/closest_pair": "Alignment of the two most similar heads of any layer: 0 is chance, 1 the same head. Slow "
    "rises are usual; a jump to 1 is a copied head.",
    "hdi/alignment": "Mean alignment of the heads of the worst layer: 0 is chance, 1 the same head. Usually about 0 at "
    "the start, then a slow rise.",
    "hdi/covariance": "Mean covariance of two heads' contributions, in the layer where it is largest, in units of the "
    "output squared; about 0 at the start.",
    ALERTS: "Number of active alerts; notices are not counted.",
}
"""Curve of the model -> meaning."""

PICTURES = {
    MAP: "A row for each layer and a column for each reading, coloured by the alignment of the two closest heads.",
    HEADS: "Alignment of every two heads of the worst layer.",
    EVIDENCE: "The number that an alert accuses over the steps, the accused layer or heads in red; below it the "
    "patterns of attention of some of these heads before it began, and at the alert.",
}
"""The pictures; the last is drawn at an alert."""

AUDITED = {
    "dead heads": "The weights of a head are all but zero for queries, keys, values or the output.",
    "copied layers": "Two layers have equal weights to the bit, though they do not share them.",
    "unmatched weights": "Training has matched queries with keys, or values with outputs, in the other layers and not "
    "in this one: it was not trained, or its heads or rows are in another order.",
    "weights missing": "The file has no weights for a role of a layer, so that nothing can be said of it.",
}
"""Findings of audits, where a run has rules of their own or nothing of the kind."""

LAYER_CURVES = {"hdi": "hdi", "hdi_worst_alignment": "worst_alignment", "head_covariance": "covariance"}
"""Metric -> its name in the tag of a layer."""

INTERVENTIONS = {kind.__name__: kind for kind in (QKClip, ReviveHeads, SaveCheckpoint, StopTraining)}


@dataclass(frozen=True)
class Name:
    """A name that a user sees."""

    text: str
    kind: str  # "rule", "curve", "metric", "finding of hdi check" ...
    meaning: str  # a sentence or two
    metric: str = ""  # that it is, or that a curve of each layer draws


def every_name() -> dict[str, Name]:
    """Return all names by their text; nothing that trains asks questions, and so it imports none of them."""
    from hdi_callback.checks.questions import QUESTIONS

    meanings: dict[str, Mapping[str, str]] = {
        "rule": {rule.name: f"Raised when {rule.condition}. {rule.meaning}" for rule in RULES},
        "alert": {contract.NAME: contract.MEANING},
        "curve": MODEL_CURVES,
        "picture": PICTURES,
        "metric": {metric: entry.summary for metric, entry in METRICS.items()},
        "intervention": {name: (kind.__doc__ or "").split("\n")[0] for name, kind in INTERVENTIONS.items()},
        "finding of hdi audit": AUDITED,
        "finding of hdi check": {each.__name__: each.__doc__ or "" for each in DIAGNOSES}
        | {each.__name__: f"{each.__doc__} The model was asked, and it is not so." for each in QUESTIONS},
    }
    names: dict[str, Name] = {}
    for kind, of_kind in meanings.items():
        for name, meaning in of_kind.items():
            text = name.replace("_", " ") if kind == "finding of hdi check" else name
            text = f"{text} asked" if text in names else text
            names[text] = Name(text, kind, meaning, metric=text if kind == "metric" else "")
    return names


def look_up(word: str) -> Name:
    """Return the name that a user has written: a tag, a metric, a rule or one of its limits, an intervention."""
    every = every_name()
    names = {_letters(limit): every[rule.name] for rule in RULES for limit in rule.limits}
    names |= {_letters(text): name for text, name in every.items()}
    names |= {_letters(text): every[rule.name] for rule in RULES for text in (rule.__name__, rule.name)}
    short, _, layer = word.removeprefix("hdi/per_layer/").partition("/")
    metric = next((name for name, drawn in LAYER_CURVES.items() if drawn == short), short)
    if word.startswith("hdi/per_layer/") and metric in METRICS:
        return Name(word, "curve", f"{METRICS[metric].summary} Of {layer or 'a layer'}.", metric)
    picture = "/".join(word.split("/")[:2])  # that of an alert has its rule
    entry = every.get(word) or every.get(picture) or names.get(_letters(word))
    if entry is None:
        hint = did_you_mean(word, every)
        raise MisconfigurationError(f"Nothing has the name {shown(word)}; `hdi explain` lists every name.{hint}")
    return entry


def _letters(name: str) -> str:
    """The letters of a name; a slash stays, as `hdi/alignment` is a curve and `hdi_alignment` a metric."""
    return "".join(letter for letter in name.lower() if letter.isalnum() or letter == "/")


def curves(record: Record, metrics: Iterable[str] = ()) -> dict[str, float]:
    """Return the points of all curves at one reading."""
    hdi = record.values("hdi").values()
    points = {
        "hdi/mean": statistics.fmean(hdi) if hdi else None,
        "hdi/min": min(hdi, default=None),
        "hdi/closest_pair": max(record.values("hdi_worst_alignment").values(), default=None),
        "hdi/alignment": max(record.values("hdi_alignment").values(), default=None),
        "hdi/covariance": max(record.values("head_covariance").values(), default=None),
        ALERTS: float(sum(alert.level != "notice" for alert in record.active)),
    }
    for metric in dict.fromkeys([*LAYER_CURVES, *metrics]):
        for layer, value in record.values(metric).items():
            points[_layer_tag(metric, layer)] = value
    return {tag: value for tag, value in points.items() if value is not None}


def _layer_tag(metric: str, layer: str) -> str:
    return f"hdi/per_layer/{LAYER_CURVES.get(metric, metric)}/{layer}"


def all_tags(layers: Iterable[str], metrics: Iterable[str] = ()) -> list[str]:
    """Return the tags of all curves of a run with these layers."""
    wanted = dict.fromkeys([*LAYER_CURVES, *metrics])
    return [*MODEL_CURVES, *(_layer_tag(metric, layer) for layer in layers for metric in wanted)]
